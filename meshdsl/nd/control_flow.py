"""``scan`` and ``vmap`` over a named dim: slices lack the dim, results have it again.

Both run ``lax.scan`` and ``jax.vmap`` on the arrays, the dim brought to the front first. What has no names
follows their own rule: ``scan`` takes plain arrays (random keys, say) by their first axis, ``vmap`` hands
them to every call.
"""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshdsl.errors import ArgumentError, nearest
from meshdsl.nd.diagnostics import absent, described, fail
from meshdsl.nd.named_array import (
    NamedArray,
    Names,
    Tensor,
    given,
    is_whole,
    one_name,
    permuted,
    read,
    wrap,
)
from meshdsl.nd.named_dims import DimsLike, read_names

# ---- Loops -----------------------------------------------------------------------------------------------------------


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    *,
    over: str,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """``carry, y = f(carry, x)`` for each slice of ``xs`` along the dim ``over``.

    Args:
      f: takes the carry and a slice; returns the next carry and a result.
      init: the first carry, any pytree; a carry keeps its dims, in whatever order ``f`` returns them.
      xs: a pytree whose named tensors all have the dim.
      over: the dim.
      length: the dim's size, needed where ``xs`` is None.
      reverse: from the last slice to the first.
      unroll: slices per trip of the loop.

    Returns the last carry, and the results with the dim in front; scalars become tensors of that dim alone.
    """
    over = one_name(over)
    _check_have(over, xs)
    _check_trips(over, jax.tree.leaves(xs, is_leaf=_is_named), length)

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        after, y = _pair(f(carry, x))
        return _in_order_of(carry, after), _bare(y)

    carry, ys = lax.scan(
        lambda carry, x: body(carry, _sliced(x, over)), init, _fronted(xs, over), length, reverse, unroll
    )
    return carry, _with_dim(ys, over)


def vmap(f: Callable[..., Any], *, over: str) -> Callable[..., Any]:
    """``f`` for every slice of its arguments along the dim ``over``, at once.

    Arguments that lack the dim, or have no names, are handed to every call; at least one has it.
    The results have the dim in front.
    """
    over = one_name(over)

    def mapped(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args, is_leaf=_is_named)
        held = [_is_named(x) and over in x.dims for x in leaves]
        if not any(held):
            raise fail(_nowhere(over, leaves))
        _check_trips(over, [x for x, h in zip(leaves, held, strict=True) if h])
        arrays = [_front(x, over) if h else x for x, h in zip(leaves, held, strict=True)]

        def each(*slices: Any) -> Any:
            read = [_slice(x, over) if h else x for x, h in zip(slices, held, strict=True)]
            return _bare(f(*jax.tree.unflatten(tree, read)))

        return _with_dim(jax.vmap(each, in_axes=[0 if h else None for h in held])(*arrays), over)

    return mapped


class _Bare:
    """A result on its way out of a loop: its array is a leaf, its names wait for the dim in front."""

    def __init__(self, array: Any, dims: Names) -> None:
        self.array, self.dims = array, dims


jax.tree_util.register_pytree_node(_Bare, lambda x: ((x.array,), x.dims), lambda dims, leaves: _Bare(leaves[0], dims))


def _is_named(x: Any) -> bool:
    return isinstance(x, NamedArray)


def _map_named(fn: Callable[[NamedArray], Any], tree: Any) -> Any:
    return jax.tree.map(lambda x: fn(x) if _is_named(x) else x, tree, is_leaf=_is_named)


def _front(x: NamedArray, over: str) -> NamedArray:
    wanted = (over, *(name for name in x.dims if name != over))
    return NamedArray(permuted(x.array, x.dims, wanted), wanted)


def _slice(x: NamedArray, over: str) -> Any:
    """A front slice as the loop made it: the array has lost the dim, now the names do."""
    return wrap(x.held, tuple(name for name in x.dims if name != over))


def _fronted(xs: Any, over: str) -> Any:
    return _map_named(lambda x: _front(x, over), xs)


def _sliced(xs: Any, over: str) -> Any:
    return _map_named(lambda x: _slice(x, over), xs)


def _bare(y: Any) -> Any:
    """Results with their names set aside; scalars have none yet, arrays without names never."""

    def one(x: Any) -> Any:
        if _is_named(x):
            return _Bare(x.array, x.dims)
        return _Bare(x, ()) if jnp.ndim(x) == 0 else x

    return jax.tree.map(one, y, is_leaf=_is_named)


def _with_dim(ys: Any, over: str) -> Any:
    def one(x: Any) -> Any:
        return NamedArray(x.array, (over, *x.dims)) if isinstance(x, _Bare) else x

    return jax.tree.map(one, ys, is_leaf=lambda x: isinstance(x, _Bare))


def _in_order_of(before: Any, after: Any) -> Any:
    """The carry with dims in the order in which it came; what has other dims is an error here, not in ``lax.scan``."""
    known, tree = jax.tree.flatten(before, is_leaf=_is_named)
    made, same = jax.tree.flatten(after, is_leaf=_is_named)
    if str(tree) != str(same):  # lax.scan says what differs
        return after
    return jax.tree.unflatten(tree, [_ordered(b, a) for b, a in zip(known, made, strict=True)])


def _ordered(before: Any, after: Any) -> Any:
    if not (_is_named(before) or _is_named(after)):
        return after
    dims = [set(x.dims) if _is_named(x) else set() for x in (before, after)]
    if dims[0] != dims[1]:
        sides = [described(x) if _is_named(x) else "a scalar" for x in (before, after)]
        raise fail(f"the carry of scan comes in as {sides[0]} and leaves as {sides[1]}")
    return wrap(permuted(after.array, after.dims, before.dims), before.dims)


def _check_have(over: str, xs: Any) -> None:
    leaves = [x for x in jax.tree.leaves(xs, is_leaf=_is_named) if _is_named(x)]
    rows = [absent(over, "", x) for x in leaves if over not in x.dims]
    if rows:
        raise fail([*rows, f"all of xs is scanned over {over!r}; what is the same in every trip is closed over"])


def _check_trips(over: str, leaves: Sequence[Any], length: int | None = None) -> None:
    """That there is a number of trips, and only one."""
    found: dict[Any, str] = {} if length is None else {length: f"length={length!r}"}
    for x in leaves:
        said = described(x) if _is_named(x) else f"an array of shape {jnp.shape(x)}"
        found.setdefault(x.shape[over] if _is_named(x) else next(iter(jnp.shape(x)), None), said)
    if not found:
        raise fail(
            f"xs holds no tensor: how many trips along {over!r}? md.scan(f, init, over={over!r}, length=8) says it"
        )
    odd = [said for size, said in found.items() if not is_whole(size)]
    if odd:
        raise fail([f"no number of trips along {over!r} is said by:", *odd])
    if len(found) > 1:
        raise fail([f"all that is mapped along {over!r} is of one size there, not:", *found.values()])


def _pair(made: Any) -> tuple[Any, Any]:
    if not (isinstance(made, tuple) and len(made) == 2):
        raise fail(f"{given(made)}, not the next carry and a result: f of scan returns (carry, y), y may be None")
    return made


def _nowhere(over: str, leaves: Sequence[Any]) -> list[str]:
    rows = [absent(over, "", x) for x in leaves if _is_named(x)]
    return rows or [f"no argument has names, so none has dim {over!r}"]


# ---- Remat -----------------------------------------------------------------------------------------------------------
# Rematerialisation by the name of a policy: what the forward pass keeps for the backward pass.
#
#     all      nothing is kept but the arguments; all is computed again
#     dots     results of matrix products are kept
#     weights  results of products with weights are kept (those without a batch dim), not of attention's
#     none     everything is kept, as without ``remat``
#
# Beside the policy, values may be kept by name: ``x = md.keep(x, "attention")`` and
# ``md.remat(f, "all", keep="attention")``.


Params = ParamSpec("Params")
Result = TypeVar("Result")

_SAVEABLE = jax.checkpoint_policies
POLICIES: dict[str, Callable[..., Any]] = {
    "all": _SAVEABLE.nothing_saveable,
    "dots": _SAVEABLE.dots_saveable,
    "weights": _SAVEABLE.dots_with_no_batch_dims_saveable,
    "none": _SAVEABLE.everything_saveable,
}


def remat(f: Callable[Params, Result], policy: str = "all", keep: DimsLike = ()) -> Callable[Params, Result]:
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
    made: Callable[Params, Result] = jax.checkpoint(f, policy=chosen)
    return made


def check_policy(policy: str) -> None:
    """ArgumentError, with the nearest name, if there is no such policy."""
    if policy not in tuple(POLICIES):
        raise fail(f"no remat policy {policy!r}{nearest(policy, POLICIES)}", ArgumentError)


def keep(x: Any, name: str) -> Tensor:
    """``x``, known to ``md.remat(..., keep=name)`` by this name; else the identity."""
    x = read(x)
    return wrap(checkpoint_name(x.array, name), x.dims) if isinstance(x, NamedArray) else checkpoint_name(x, name)
