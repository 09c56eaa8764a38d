"""Local programs of operations along one split dim: running reductions, sorts, selections, gathered reductions."""

from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Op
from meshdsl.layouts.exchange import sort_rounds
from meshdsl.lowering.local.collectives import gather, swap
from meshdsl.lowering.local.registry import Local, bind, local
from meshdsl.rules.reduction import JOINED, reduces, top_k_dim

_JOIN: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
    "cumlogsumexp": jnp.logaddexp,
}


@local(*_JOIN)
def cumulative(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """The running reduction of the block, combined with the total of the blocks before it."""
    dim, reverse = op.params["axis"], op.params["reverse"]
    axes = where.inputs[0].splitting(dim)
    (scanned,) = bind(op, *arrays)
    if not axes:
        return (scanned,)
    (totals,) = bind(op, gather(_last(scanned, dim, reverse), axes, dim))
    mine, blocks = where.index(axes), totals.shape[dim]
    before, first = (mine + 1, blocks - 1) if reverse else (mine - 1, 0)
    prefix = lax.dynamic_slice_in_dim(totals, jnp.clip(before, 0, blocks - 1), 1, dim)
    return (jnp.where(mine == first, scanned, _JOIN[op.name](prefix, scanned)),)


def _last(x: jax.Array, dim: int, reverse: bool) -> jax.Array:
    """The element of a running reduction that covers the whole block."""
    at = 0 if reverse else x.shape[dim] - 1
    return lax.slice_in_dim(x, at, at + 1, axis=dim)


@local("sort")
def sort(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Sorts the block, then merges it with one partner per round: the one in front keeps the lower half."""
    dim = op.params["dimension"]
    axes, n = where.inputs[0].splitting(dim), arrays[0].shape[dim]
    held, mine = bind(op, *arrays), where.index(axes)
    for partners in sort_rounds(prod(where.sizes[axis] for axis in axes)):
        partner = jnp.array(partners)[mine]
        found = [swap(x, where, axes, partners) for x in held]
        first = [jnp.where(mine < partner, x, y) for x, y in zip(held, found, strict=True)]
        second = [jnp.where(mine < partner, y, x) for x, y in zip(held, found, strict=True)]
        merged = bind(op, *(lax.concatenate(both, dim) for both in zip(first, second, strict=True)))
        kept = [lax.dynamic_slice_in_dim(x, jnp.where(mine < partner, 0, n), n, dim) for x in merged]
        held = tuple(jnp.where(mine == partner, x, y) for x, y in zip(held, kept, strict=True))
    return held


@local("top_k")
def top_k(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """The largest of the largest of every block; of equal ones, both steps select the first."""
    dim = top_k_dim(op)
    axes = where.inputs[0].splitting(dim)
    values, places = bind(op, *arrays)
    if not axes:
        return values, places
    offset = where.offset(where.inputs[0], dim, op.inputs[0].shape[dim]).astype(places.dtype)
    found, chosen = bind(op, gather(values, axes, dim))
    return found, jnp.take_along_axis(gather(places + offset, axes, dim), chosen, dim)


@local(*JOINED)
def joined(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Reduces the block and then the gathered results of all devices, unless the result is a partial value."""
    (found,) = bind(op, *arrays)
    axes = tuple(axis for d in op.params["axes"] for axis in where.inputs[0].splitting(d))
    if not axes or reduces(op):
        return (found,)
    return bind(op, gather(jnp.expand_dims(found, 0), axes, 0), axes=(0,))


@local("argmax", "argmin")
def position(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """The position of the extreme of the extremes of every block; of equal ones, the first."""
    (x,), (dim,) = arrays, op.params["axes"]
    axes = where.inputs[0].splitting(dim)
    (place,) = bind(op, x)
    if not axes:
        return (place,)
    offset = where.offset(where.inputs[0], dim, op.inputs[0].shape[dim]).astype(place.dtype)
    at = jnp.expand_dims(place, dim)
    values, places = gather(jnp.take_along_axis(x, at, dim), axes, dim), gather(at + offset, axes, dim)
    (best,) = bind(op, values)
    return (jnp.squeeze(jnp.take_along_axis(places, jnp.expand_dims(best, dim), dim), dim),)
