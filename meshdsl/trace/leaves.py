"""Arrays of a tree and their paths: the keys above each array, and the names of its dims.

The ``value`` that flax adds below every variable is left out, so the path of a weight in a flax model is
``layers/0/attn/wq/kernel``.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from meshdsl.ir.graph import Leaf
from meshdsl.nd.named_array import has_names, names_of
from meshdsl.util.paths import join_path


class Found(NamedTuple):
    """An array of a tree.

    Args:
      path: the path that globs match.
      dims: names of its dims, empty if it has none.
    """

    path: str
    array: Any
    dims: tuple[str, ...]


def typed_leaf(path: str, x: Any, dims: tuple[str, ...]) -> Leaf:
    """Returns the leaf at ``path`` with the shape and dtype of ``x``."""
    return Leaf(path, tuple(x.shape), x.dtype, bool(x.weak_type), dims)


def path_leaves(tree: Any, label: tuple[str, ...] = ()) -> list[Found]:
    """Returns every leaf of a pytree with its path, which starts with ``label``, and the names of its dims.

    Names are left out where their number differs from the rank, as for the factored moments of a weight.
    """
    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=has_names)[0]
    return [found for keys, node in nodes for found in _below(join_path((*label, *components(keys))), node)]


def _below(path: str, node: Any) -> Iterable[Found]:
    dims = names_of(node)
    if dims is None:
        return [Found(path, node, ())]
    ranked = ((x, len(getattr(x, "shape", ()))) for x in jax.tree.leaves(node))
    return [Found(path, x, dims if rank == len(dims) else ()) for x, rank in ranked]


def components(keys: Iterable[Any]) -> list[str]:
    """Keys as text, without the attribute of a flax variable that is its array."""
    parts = [_component(key) for key in keys]
    last = list(keys)[-1:]
    attribute = bool(last) and isinstance(last[0], jax.tree_util.GetAttrKey)
    return parts[:-1] if attribute and parts[-1] in ("value", "raw_value") else parts


def _component(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key).strip(".[]'\"")
