"""Pytrees of layouts at one glob, as jax's ``in_shardings`` are trees.

{"params": {"up": P(None, "model"), "down": P("model")}}   ->   {"params/up": P(None, "model"), "params/down": ...}
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshdsl.layouts.layout import Layout
from meshdsl.trace.leaves import components
from meshdsl.util.paths import join_path

_SHARDINGS = (NamedSharding, PartitionSpec)
_LAYOUTS = (*_SHARDINGS, Layout, str)


def spread(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the table with a row per leaf in place of a pytree of shardings, or of a dict of any layouts.

    Leaves that are None are left to the planner. All else stays as it is, mistakes too.
    """
    found: dict[str, Any] = {}
    for glob, stated in table.items():
        leaves = jax.tree_util.tree_flatten_with_path(stated, is_leaf=lambda x: isinstance(x, _LAYOUTS))[0]
        kinds = _LAYOUTS if isinstance(stated, Mapping) else _SHARDINGS
        if isinstance(glob, str) and leaves and all(keys and isinstance(leaf, kinds) for keys, leaf in leaves):
            found |= {f"{glob}/{join_path(components(keys))}": leaf for keys, leaf in leaves}
        else:
            found[glob] = stated
    return found
