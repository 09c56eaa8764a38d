"""Rematerialisation by the name of a policy: what the forward pass keeps for the backward pass.

    all      nothing is kept but the arguments; all is computed again
    dots     results of matrix products are kept
    weights  results of products with weights are kept (those without a batch dim), not of attention's
    none     everything is kept, as without ``remat``

Beside the policy, values may be kept by name: ``x = md.keep(x, "attention")`` and
``md.remat(f, "all", keep="attention")``.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from meshdsl.dsl.array import NamedArray, Tensor, read, wrap
from meshdsl.dsl.blame import fail
from meshdsl.dsl.dims import DimsLike, read_names
from meshdsl.errors import ArgumentError, nearest

_SAVEABLE = jax.checkpoint_policies
POLICIES: dict[str, Callable[..., Any]] = {
    "all": _SAVEABLE.nothing_saveable,
    "dots": _SAVEABLE.dots_saveable,
    "weights": _SAVEABLE.dots_with_no_batch_dims_saveable,
    "none": _SAVEABLE.everything_saveable,
}


def remat(f: Callable[..., Any], policy: str = "all", keep: DimsLike = ()) -> Callable[..., Any]:
    """``f``, whose backward pass computes again what the policy does not keep.

    Args:
      f: a function of pytrees.
      policy: all, dots, weights or none.
      keep: names of values that are kept besides, as ``md.keep`` gave them.

    Raises ArgumentError for a policy of another name.
    """
    check_policy(policy)
    if policy == "none":
        return f
    names = read_names(keep)
    chosen = POLICIES[policy]
    if names:
        chosen = _SAVEABLE.save_from_both_policies(chosen, _SAVEABLE.save_only_these_names(*names))
    made: Callable[..., Any] = jax.checkpoint(f, policy=chosen)
    return made


def check_policy(policy: str) -> None:
    """ArgumentError, with the nearest name, if there is no such policy."""
    if policy not in tuple(POLICIES):
        raise fail(f"no remat policy {policy!r}{nearest(policy, POLICIES)}", ArgumentError)


def keep(x: Any, name: str) -> Tensor:
    """``x``, known to ``md.remat(..., keep=name)`` by this name; else the identity."""
    x = read(x)
    return wrap(checkpoint_name(x.array, name), x.dims) if isinstance(x, NamedArray) else checkpoint_name(x, name)
