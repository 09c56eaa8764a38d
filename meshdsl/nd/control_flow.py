"""``scan`` and ``vmap`` over a named dim, and rematerialisation by policy.

Slices lack the dim, results have it again. Both run ``lax.scan`` and ``jax.vmap`` on the arrays, with the dim in front.
Arrays without names follow jax's rules: ``scan`` slices them (random keys, say) along their first axis,
``vmap`` passes them whole to every call.
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
    """Run ``carry, y = f(carry, x)`` for each slice of ``xs`` along a dim, as ``jax.lax.scan``.

    Args:
      f: takes the carry and a slice; returns the next carry and a result.
      init: the first carry, any pytree; a carry keeps its dims, in whatever order ``f`` returns them.
      xs: a pytree whose named tensors all have the dim.
      over: the dim.
      length: the dim's size, needed if ``xs`` is None.
      reverse: whether to run from the last slice to the first.
      unroll: slices per iteration of the loop.

    Returns:
      The last carry, and the results with the dim in front; scalar results become tensors of that dim alone.

    Raises:
      DimError: a tensor of ``xs`` lacks the dim, sizes differ, or ``f`` returns a carry with other dims.

    Example:
      >>> x, losses = md.scan(lambda x, w: (md.tanh(md.dot(x, w, over="embed")), md.mean(x)), x, ws, over="layers")
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
    """Return ``f`` mapped over a dim of its arguments, as ``jax.vmap``.

    Args:
      f: a function of pytrees of named tensors and arrays.
      over: the dim. Arguments without it, and arrays without names, are passed whole to every call.

    Returns:
      A function whose results have the dim in front.

    Raises:
      DimError: no argument has the dim, or sizes differ; when the function is called.

    Example:
      >>> norms = md.vmap(md.norm, over="batch")(x)
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
    """A result inside a loop: a pytree of the array, with names to which the loop's dim will be added."""

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
    """Return a slice with names: the loop has removed the front dim of the array, this removes its name."""
    return wrap(x.held, tuple(name for name in x.dims if name != over))


def _fronted(xs: Any, over: str) -> Any:
    return _map_named(lambda x: _front(x, over), xs)


def _sliced(xs: Any, over: str) -> Any:
    return _map_named(lambda x: _slice(x, over), xs)


def _bare(y: Any) -> Any:
    """Return results with names as structure; scalars get empty names, arrays without names stay plain."""

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
    """Return the carry with dims in their order before; DimError for other dims, which ``lax.scan`` would not name."""
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
        raise fail(f"f of scan changes the dims of its carry: it takes {sides[0]} and returns {sides[1]}")
    return wrap(permuted(after.array, after.dims, before.dims), before.dims)


def _check_have(over: str, xs: Any) -> None:
    leaves = [x for x in jax.tree.leaves(xs, is_leaf=_is_named) if _is_named(x)]
    rows = [absent(over, "", x) for x in leaves if over not in x.dims]
    if rows:
        raise fail(
            [
                *rows,
                f"every tensor of xs must have the scanned dim {over!r}; f may close over loop-invariant values",
            ]
        )


def _check_trips(over: str, leaves: Sequence[Any], length: int | None = None) -> None:
    """Raise DimError unless there is exactly one number of iterations."""
    found: dict[Any, str] = {} if length is None else {length: f"length={length!r}"}
    for x in leaves:
        said = described(x) if _is_named(x) else f"an array of shape {jnp.shape(x)}"
        found.setdefault(x.shape[over] if _is_named(x) else next(iter(jnp.shape(x)), None), said)
    if not found:
        raise fail(
            f"xs has no tensor to give the number of iterations along {over!r}; pass it: "
            f"md.scan(f, init, over={over!r}, length=8)"
        )
    odd = [said for size, said in found.items() if not is_whole(size)]
    if odd:
        raise fail([f"no integer number of iterations along {over!r} in:", *odd])
    if len(found) > 1:
        raise fail([f"sizes along {over!r} differ:", *found.values()])


def _pair(made: Any) -> tuple[Any, Any]:
    if not (isinstance(made, tuple) and len(made) == 2):
        raise fail(f"{given(made)}, but f of scan must return a pair (carry, y); y may be None")
    return made


def _nowhere(over: str, leaves: Sequence[Any]) -> list[str]:
    rows = [absent(over, "", x) for x in leaves if _is_named(x)]
    return rows or [
        f"no argument of vmap has named dims, so none has {over!r}; name them with md.named(array, {over!r})"
    ]


# ---- Rematerialisation -----------------------------------------------------------------------------------------------
# Policies name what the forward pass stores for the backward pass (Chen et al. 2016; ``jax.checkpoint_policies``):
#
#     all      recompute everything; only arguments are stored
#     dots     store results of matrix products
#     weights  store results of products with weights (those without batch dims), not those of attention
#     none     store everything, as without ``remat``
#
# Values can be stored by name as well: ``x = md.keep(x, "attention")`` and ``md.remat(f, "all", keep="attention")``.


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
    """Return ``f`` with a backward pass that recomputes what the policy does not store, as ``jax.checkpoint``.

    Args:
      f: a function of pytrees.
      policy: what is recomputed: ``"all"``, ``"none"``, or all but results of ``"dots"`` or of products with
        ``"weights"``.
      keep: names of values that are stored as well, given by ``md.keep``.

    Returns:
      A function with the arguments, results and gradients of ``f``.

    Raises:
      ArgumentError: the policy is unknown; the error has the nearest name.

    Example:
      >>> block = md.remat(block, "dots", keep="attention")
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
    """Raise ArgumentError, with the nearest name, for an unknown policy."""
    if policy not in tuple(POLICIES):
        raise fail(f"no remat policy {policy!r}{nearest(policy, POLICIES)}", ArgumentError)


def keep(x: Any, name: str) -> Tensor:
    """Return ``x``, named for ``md.remat(..., keep=name)``; the identity otherwise, as ``checkpoint_name``.

    Args:
      x: a named tensor or an array.
      name: the name that ``keep`` of ``md.remat`` or ``md.stack`` refers to.

    Example:
      >>> scores = md.keep(scores, "attention")
    """
    x = read(x)
    return wrap(checkpoint_name(x.array, name), x.dims) if isinstance(x, NamedArray) else checkpoint_name(x, name)
