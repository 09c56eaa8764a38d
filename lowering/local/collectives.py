"""Reshard steps as collectives, and the exchanges inside operations: what one device runs.

This table is the executable half of the table of reshard steps in ``layouts.reshard``. Every entry works on the block
of one device, inside ``shard_map`` (or ``vmap`` with axis names):

    all-gather          S(i) -> B      blocks of all devices, concatenated along i
    all-reduce          P    -> B      the reduction of all devices' values
    reduce-scatter      P    -> S(i)   the same, but each device keeps one block
    all-to-all          S(i) -> S(j)   device r sends its r-th block of j to device r
    all-to-all          P(max) -> S(i) the same, followed by the maximum over the senders
    collective-permute  S(i) -> S(i)   blocks are permuted when the order of axes on one dim changes
    slice               B    -> S(i)   each device keeps its own block
    pad                 S(i) -> P      the other blocks are filled with the reduction's identity
    keep-first          B    -> P      one device keeps the value, the others hold zeros

In fewer bits (``layouts.low_bits``), the parts of a block are rounded, sent as unsigned integers and restored on every
receiver, the sender's own part too, so that replicated values are equal everywhere:

    all-to-all          P    -> S(i)   like a reduce-scatter: parts of i are exchanged, restored and added in float32

A step over several axes is one collective over their product, first axis major; its axes are the minor-most ones of
the dim they leave and of the dim they enter, so blocks stay contiguous.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.exchange import moving_axes, window_pieces
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.low_bits import BLOCK, FORMATS, SCALE
from meshdsl.layouts.placement import Partial, Placement, Split
from meshdsl.layouts.reshard import ReshardStep
from meshdsl.lowering.local.registry import Local
from meshdsl.rules.halo import Sliding

# ---- Reshard steps ---------------------------------------------------------------------------------------------------


Sizes = Mapping[str, int]
LocalMove = Callable[[jax.Array, ReshardStep, Sizes], jax.Array]


def apply_move(x: jax.Array, move: ReshardStep, sizes: Sizes) -> jax.Array:
    """Returns this device's block after the reshard step ``move``, given its block ``x`` before.

    Args:
      x: this device's block in layout ``move.before``.
      move: any kind of the table above.
      sizes: devices per mesh axis.
    """
    if prod(sizes[axis] for axis in move.axes) == 1:
        return x
    if move.format:
        return _in_low_bits(x, move, _devices(move, sizes), sizes)
    return _as_numbers(x, lambda numbers: LOCAL_MOVES[move.kind](numbers, move, sizes), move.kind in COLLECTIVES)


def apply_bucket(xs: Sequence[jax.Array], moves: Sequence[ReshardStep], sizes: Sizes) -> list[jax.Array]:
    """Returns this device's blocks after reshard steps of one kind, axes and reduction, sent as one collective.

    The blocks are put together as one row each, or as one row per receiver where the result is scattered, so every
    element is sent, and summed in the same order, as by a collective of its own.

    Args:
      xs: this device's blocks, of one dtype.
      moves: an all-gather, all-reduce or reduce-scatter for each.
    """
    kind, axes, k = moves[0].kind, moves[0].axes, _devices(moves[0], sizes)
    if kind == "reduce-scatter":
        dims = [_dim(move.target) for move in moves]
        blocks = [jnp.moveaxis(_in_blocks(x, dim, k), dim, 0) for x, dim in zip(xs, dims, strict=True)]
        shapes = [block.shape[1:] for block in blocks]
        sent = jnp.concatenate([block.reshape(k, -1) for block in blocks], axis=1)
        return _cut(lax.psum_scatter(sent, axes, scatter_dimension=0), shapes)
    row = jnp.concatenate([x.ravel() for x in xs])
    if kind == "all-reduce":
        return _cut(LOCAL_MOVES[kind](row, moves[0], sizes), [x.shape for x in xs])
    parts = _cut(lax.all_gather(row, axes), [x.shape for x in xs])
    return [_joined(part, _dim(move.source)) for part, move in zip(parts, moves, strict=True)]


def _in_blocks(x: jax.Array, dim: int, k: int) -> jax.Array:
    """Returns ``x`` with ``dim`` as two dims, of which the first counts ``k`` blocks."""
    return x.reshape(*x.shape[:dim], k, x.shape[dim] // k, *x.shape[dim + 1 :])


def _joined(parts: jax.Array, dim: int) -> jax.Array:
    """Returns the blocks that the first dim counts, concatenated along ``dim`` of theirs."""
    blocks = jnp.moveaxis(parts, 0, dim)
    return blocks.reshape(*blocks.shape[:dim], -1, *blocks.shape[dim + 2 :])


def _cut(rows: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Returns the last dim of ``rows`` cut into arrays of these shapes, one after the other."""
    ends = np.cumsum([prod(shape) for shape in shapes]).tolist()
    begins = [0, *ends[:-1]]
    return [
        rows[..., begin:end].reshape(*rows.shape[:-1], *shape)
        for begin, end, shape in zip(begins, ends, shapes, strict=True)
    ]


def _as_numbers(x: jax.Array, moved: Callable[[jax.Array], jax.Array], sent: bool = True) -> jax.Array:
    """Returns what ``moved`` makes of ``x``, given as numbers that it can move.

    Keys are the integers that they consist of. Integers of two bits are sent as bytes: XLA has no sums of them, and its
    collectives on CPU write beyond the end of such arrays (jax 0.10 and 0.12).
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        keys: jax.Array = jax.random.wrap_key_data(moved(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        return keys
    if sent and x.dtype.name in ("int2", "uint2"):
        return moved(x.astype(jnp.int8)).astype(x.dtype)
    return moved(x)


def opaque_copy(x: jax.Array, count: int, axis: str, size: int, after: jax.Array | None = None) -> jax.Array:
    """Returns a copy that the compiler cannot identify with ``x`` or with copies of another ``count``.

    Args:
      after: an array that the compiler cannot make the copy without.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = opaque_copy(jax.random.key_data(x), count, axis, size, after)
        copy: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return copy
    never = lax.axis_index(axis) == size + count
    if after is not None:
        never &= after.ravel()[0] > 0
    return jnp.where(never, jnp.zeros_like(x), x)


def move_scope(move: ReshardStep, dtype: Any) -> str:
    """Returns the name of a reshard step in the compiled program: kind, axes and planned dtype."""
    return collective_scope(move.kind, move.axes, _integers(move.format) if move.format else dtype)


def collective_scope(kind: str, axes: Sequence[str], dtype: Any) -> str:
    """Returns the name of a planned collective on values of ``dtype``."""
    return f"{kind}({','.join(axes)}) {np.dtype(dtype).name if _is_plain(dtype) else dtype}"


def _is_plain(dtype: Any) -> bool:
    return not jnp.issubdtype(dtype, jax.dtypes.extended)


# ---- In fewer bits ---------------------------------------------------------------------------------------------------


def _in_low_bits(x: jax.Array, move: ReshardStep, devices: int, sizes: Sizes) -> jax.Array:
    """Returns this device's block after a step in which rounded parts are sent."""
    if move.kind == "all-to-all":
        parts = jnp.moveaxis(_in_blocks(x, _dim(move.target), devices), _dim(move.target), 0)
    else:
        parts = x[None]
    sent = lax.optimization_barrier(rounded(parts, move.format))
    if move.kind == "all-gather":
        got = lax.all_gather(sent, move.axes, axis=0, tiled=True)
    elif move.kind == "all-to-all":
        got = lax.all_to_all(sent, move.axes, split_axis=0, concat_axis=0, tiled=True)
    else:
        got = _permute(sent, move, sizes)
    exact = restored(got, parts.shape[1:], move.format)
    if isinstance(move.source, Partial):
        return exact.sum(0).astype(x.dtype)
    exact = exact.astype(x.dtype)
    return exact[0] if move.kind == "collective-permute" else _joined(exact, _dim(move.source))


_MASKED = -128  # negative infinity in int8; other numbers are from -127
_SHIFTS = tuple(range(0, 8 * SCALE, 8))  # of the bytes of a scale


def _integers(name: str) -> np.dtype[Any]:
    """Returns the dtype that carries numbers of a format: of as many bits, which no backend sends in another width."""
    return np.dtype(f"uint{8 * FORMATS[name].bytes}")


def rounded(parts: jax.Array, name: str) -> jax.Array:
    """Returns parts of floats ``[k ...]`` as integers: like them if the format has no scales, else one row each.

    A row has the small numbers, and then the scales of its blocks: the first byte of all, the second, and so on. No
    array has a short last dim, which TPUs pad to 128: a bitcast to bytes takes 64 times the memory of bfloat16 there,
    and minutes to compile (libtpu 0.0.42).

    A block with infinity or NaN is restored as NaN. Compilers' maxima do not all keep NaN (that of CPU, jax 0.10), so
    it counts as infinite. Negative infinity, as in masks, has a number of its own in int8, and is NaN by itself in
    float8.
    """
    dtype, largest = jnp.dtype(name), FORMATS[name].largest
    if not largest:
        end = float(jnp.finfo(dtype).max)  # the largest floats would be rounded to infinity
        parts = jnp.where(jnp.isfinite(parts), jnp.clip(parts, -end, end), parts)
        return lax.bitcast_convert_type(parts.astype(dtype), _integers(name))
    rows = parts.reshape(len(parts), -1)
    count = rows.shape[1]
    blocks = jnp.pad(rows.astype(jnp.float32), ((0, 0), (0, -count % BLOCK))).reshape(len(rows), -1, BLOCK)
    masked = jnp.isneginf(blocks)
    most = jnp.where(jnp.isnan(blocks), jnp.inf, jnp.where(masked, 0, jnp.abs(blocks))).max(-1, keepdims=True)
    scales = jnp.maximum(most / largest, jnp.finfo(jnp.float32).tiny)
    small = blocks / scales
    small = jnp.where(masked, _MASKED, jnp.round(small)).astype(dtype) if dtype == jnp.int8 else small.astype(dtype)
    numbers = lax.bitcast_convert_type(small, _integers(name)).reshape(len(rows), -1)[:, :count]
    bits = lax.bitcast_convert_type(scales[..., 0], jnp.uint32)
    return jnp.concatenate([numbers, *((bits >> shift).astype(jnp.uint8) for shift in _SHIFTS)], axis=1)


def restored(sent: jax.Array, shape: tuple[int, ...], name: str) -> jax.Array:
    """Returns parts of a ``shape`` in float32, given what ``rounded`` made of them."""
    dtype, count = jnp.dtype(name), prod(shape)
    if not FORMATS[name].largest:
        return lax.bitcast_convert_type(sent, dtype).astype(jnp.float32)
    small = lax.bitcast_convert_type(sent[:, :count], dtype).astype(jnp.float32)
    small = jnp.where(small == _MASKED, -jnp.inf, small) if dtype == jnp.int8 else small
    blocks = jnp.pad(small, ((0, 0), (0, -count % BLOCK))).reshape(len(sent), -1, BLOCK)
    planes = jnp.split(sent[:, count:].astype(jnp.uint32), SCALE, axis=1)
    bits = reduce(jnp.bitwise_or, map(jnp.left_shift, planes, _SHIFTS))
    exact = blocks * lax.bitcast_convert_type(bits, jnp.float32)[..., None]
    return exact.reshape(len(sent), -1)[:, :count].reshape(len(sent), *shape)


# ---- In full ---------------------------------------------------------------------------------------------------------


def _all_gather(x: jax.Array, move: ReshardStep, sizes: Sizes) -> jax.Array:
    moved: jax.Array = lax.all_gather(x, move.axes, axis=_dim(move.source), tiled=True)
    return moved


def _all_reduce(x: jax.Array, move: ReshardStep, sizes: Sizes) -> jax.Array:
    """The reduction; of floats, a maximum or minimum is NaN where one is, as that of ``jnp.max``.

    All-reduces of CPUs lose NaN (jax 0.10; GPUs and TPUs were not tried), so they are sent integers.
    """
    reduction = _reduction(move.source)
    if reduction == "sum" or x.dtype.name not in _ORDERED:
        reduce: Callable[..., jax.Array] = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[reduction]
        return reduce(x, move.axes)
    if reduction == "min":
        return -_restored_order(lax.pmax(_in_order(-x), move.axes), x.dtype)
    return _restored_order(lax.pmax(_in_order(x), move.axes), x.dtype)


_ORDERED = {  # floats whose bits are a sign and a magnitude, the largest of which are NaN, as integers
    **dict.fromkeys(("float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"), jnp.int8),
    **{"float16": jnp.int16, "bfloat16": jnp.int16, "float32": jnp.int32, "float64": jnp.int64},
}


def _in_order(x: jax.Array) -> jax.Array:
    """Returns integers in the order of the floats ``x``, with NaN as the largest."""
    dtype = _ORDERED[x.dtype.name]
    largest = dtype(jnp.iinfo(dtype).max)
    n = lax.bitcast_convert_type(x, dtype)
    return jnp.where(jnp.isnan(x), largest, jnp.where(n < 0, n ^ largest, n))


def _restored_order(n: jax.Array, dtype: Any) -> jax.Array:
    """Returns the floats of which ``_in_order`` made ``n``."""
    return lax.bitcast_convert_type(jnp.where(n < 0, n ^ jnp.iinfo(n.dtype).max, n), dtype)


def _reduce_scatter(x: jax.Array, move: ReshardStep, sizes: Sizes) -> jax.Array:
    moved: jax.Array = lax.psum_scatter(x, move.axes, scatter_dimension=_dim(move.target), tiled=True)
    return moved


def _all_to_all(x: jax.Array, move: ReshardStep, sizes: Sizes) -> jax.Array:
    """Blocks of one dim for blocks of another.

    Of concatenated arrays, one per receiver, XLA sends the arrays themselves, and fails if some are transposed (on CPU,
    jax 0.10), so a barrier hides the operand.
    """
    if isinstance(move.source, Partial):
        return _reduce_blocks(x, move, sizes)
    moved: jax.Array = lax.all_to_all(
        lax.optimization_barrier(x), move.axes, split_axis=_dim(move.target), concat_axis=_dim(move.source), tiled=True
    )
    return moved


def _reduce_blocks(x: jax.Array, move: ReshardStep, sizes: Sizes) -> jax.Array:
    """Gathers every sender's block for this device and reduces them by maximum or minimum."""
    dim, devices = _dim(move.target), _devices(move, sizes)
    blocks = lax.all_to_all(x, move.axes, split_axis=dim, concat_axis=dim, tiled=True)
    apart = blocks.reshape(*x.shape[:dim], devices, x.shape[dim] // devices, *x.shape[dim + 1 :])
    reduce = {"max": jnp.max, "min": jnp.min}[_reduction(move.source)]
    return reduce(apart, axis=dim)


def _permute(x: jax.Array, move: ReshardStep, sizes: Sizes) -> jax.Array:
    dim = _dim(move.source)
    before, after = move.before.splitting(dim), move.after.splitting(dim)
    moved: jax.Array = lax.ppermute(
        x, tuple(axis for axis in sizes if axis in before), swap_pairs(before, after, sizes)
    )
    return moved


def swap_pairs(before: tuple[str, ...], after: tuple[str, ...], sizes: Sizes) -> list[tuple[int, int]]:
    """Returns (sender, receiver) pairs when the axes of one dim change order; devices are numbered in mesh order."""
    axes = [axis for axis in sizes if axis in before]
    devices = np.arange(prod(sizes[axis] for axis in axes)).reshape([sizes[axis] for axis in axes])
    holders = (devices.transpose([axes.index(axis) for axis in order]) for order in (before, after))
    return sorted(zip(*(grid.ravel().tolist() for grid in holders), strict=True))


def _slice(x: jax.Array, move: ReshardStep, sizes: Sizes) -> jax.Array:
    """This device's block.

    For integers, XLA loses the product in a slice of one element of ``3 * slice`` (on CPU, jax 0.10 and 0.12, also
    without a mesh), so a barrier hides the operand of the slice.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        x = lax.optimization_barrier(x)
    dim = _dim(move.target)
    block = x.shape[dim] // _devices(move, sizes)
    return lax.dynamic_slice_in_dim(x, _rank(move.axes) * block, block, dim)


def _pad(x: jax.Array, move: ReshardStep, sizes: Sizes) -> jax.Array:
    dim, devices = _dim(move.source), _devices(move, sizes)
    shape = (*x.shape[:dim], x.shape[dim] * devices, *x.shape[dim + 1 :])
    rest = jnp.full(shape, identity(_reduction(move.target), x.dtype), x.dtype)
    return lax.dynamic_update_slice_in_dim(rest, x, _rank(move.axes) * x.shape[dim], dim)


def _keep_first(x: jax.Array, move: ReshardStep, sizes: Sizes) -> jax.Array:
    if _reduction(move.target) != "sum":
        return x
    return jnp.where(_rank(move.axes) == 0, x, jnp.zeros_like(x))


LOCAL_MOVES: dict[str, LocalMove] = {
    "all-gather": _all_gather,
    "all-reduce": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "collective-permute": _permute,
    "slice": _slice,
    "pad": _pad,
    "keep-first": _keep_first,
}


def identity(reduction: str, dtype: jnp.dtype) -> bool | int | float:
    """Returns the identity of a reduction: 0, or the lowest or highest value of the dtype, infinite where it can be."""
    if reduction == "sum":
        return 0
    lowest = reduction == "max"
    if dtype == jnp.bool_:
        return not lowest
    if jnp.issubdtype(dtype, jnp.inexact):
        if not np.isinf(np.array(np.inf, dtype)):
            return float(jnp.finfo(dtype).min if lowest else jnp.finfo(dtype).max)
        return -np.inf if lowest else np.inf
    return int(jnp.iinfo(dtype).min if lowest else jnp.iinfo(dtype).max)


def _rank(axes: tuple[str, ...]) -> jax.Array:
    return lax.axis_index(axes)


def _devices(move: ReshardStep, sizes: Sizes) -> int:
    return prod(sizes[axis] for axis in move.axes)


def _dim(placement: Placement) -> int:
    if isinstance(placement, Split) and isinstance(placement.dim, int):
        return placement.dim
    raise TypeError(f"{placement} names no numbered dim")


def _reduction(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return placement.reduction
    raise TypeError(f"{placement} is no partial placement")


# ---- Exchanges inside local programs ---------------------------------------------------------------------------------
# These run the exchanges that ``layouts.exchange`` describes, each collective under its planned name. ``axes`` are
# those that split the dim, major first; without axes the block stays as it is.


Axes = tuple[str, ...]
Ends = Mapping[int, tuple[int, int]]  # per dim, numbers of elements in front of a block and behind it
Fill = jax.Array | float | None


def gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Returns the blocks of all devices, concatenated along ``dim``."""
    if not axes:
        return x
    with jax.named_scope(collective_scope("all-gather", axes, x.dtype)):
        return _as_numbers(x, lambda numbers: lax.all_gather(numbers, axes, axis=dim, tiled=True))


def cycle(x: jax.Array, where: Local, axes: Axes, dim: int, before: int, after: int) -> jax.Array:
    """Returns this block with ``before`` elements of ``dim`` in front and ``after`` behind, cyclically.

    A part of a block that lies at both ends is fetched once. Where different parts of one length come from one device,
    their collectives differ in the data alone, which the compiler may find equal: all rows of a mean's gradient are.
    """
    blocks, sent, found = prod(where.sizes[axis] for axis in axes), set[tuple[int, int]](), []
    fetched: dict[tuple[int, int, int], jax.Array] = {}
    for number, (distance, start, stop) in enumerate(window_pieces(before, after, x.shape[dim])):
        part, kind = (distance % blocks, start, stop), (distance % blocks, stop - start)
        if part not in fetched:
            piece = lax.slice_in_dim(x, start, stop, axis=dim)
            if distance % blocks and kind in sent:
                piece = opaque_copy(piece, number, axes[0], where.sizes[axes[0]])
            sent.add(kind)
            fetched[part] = _fetched(piece, where, axes, distance)
        found.append(fetched[part])
    return lax.concatenate(found, dim)


def windows(x: jax.Array, where: Local, layout: Layout, ends: Ends, fill: Fill = 0) -> jax.Array:
    """Returns this block with its halo along several dims, fetched one dim after the other.

    The fill beyond the ends is applied last, so that the data that is sent does not depend on it.

    Args:
      layout: the layout of the operand.
      fill: the value beyond the ends of the dims; None if it has no effect.
    """
    held = x
    for dim, (before, after) in sorted(ends.items()):
        held = cycle(held, where, layout.splitting(dim), dim, before, after)
    outer = [dim for dim in ends if any(ends[dim])]
    if fill is None or not outer:
        return held
    inner = (_within(held.shape, where, layout.splitting(dim), dim, x.shape[dim], ends[dim][0]) for dim in outer)
    return jnp.where(reduce(jnp.logical_and, inner), held, jnp.asarray(fill, x.dtype))


def _within(shape: tuple[int, ...], where: Local, axes: Axes, dim: int, extent: int, before: int) -> jax.Array:
    """Whether elements are inside the whole dim, for a block of ``extent`` with a halo of ``before`` in front."""
    first, blocks = where.index(axes) * extent, prod(where.sizes[axis] for axis in axes)
    at = lax.broadcasted_iota(jnp.int32, shape, dim)
    return (at >= before - first) & (at < before - first + blocks * extent)


def slid(
    x: jax.Array, where: Local, layout: Layout, sliding: Mapping[int, Sliding], fill: Fill = 0
) -> tuple[jax.Array, dict[int, tuple[int, int]]]:
    """Returns this block with the halo of its windows over the dims of ``sliding``, and the remaining padding."""
    held, padding = windows(x, where, layout, {dim: (s.before, s.after) for dim, s in sliding.items()}, fill), {}
    for dim, s in sliding.items():
        axes = layout.splitting(dim)
        blocks = prod(where.sizes[axis] for axis in axes)
        padding[dim] = s.padding(blocks) if s.drift == 0 else (0, 0)
        if s.drift:
            start = where.index(axes) * (s.drift // blocks) - s.low + s.before
            held = lax.dynamic_slice_in_dim(held, start, s.extent(blocks), dim)
    return held, padding


def mirror(x: jax.Array, where: Local, axes: Axes) -> jax.Array:
    """Returns the block of the device at the mirrored position."""
    blocks = prod(where.sizes[axis] for axis in axes)
    return _permute_parts(x, where, axes, lambda at: blocks - 1 - at)


def swap(x: jax.Array, where: Local, axes: Axes, partners: Sequence[int]) -> jax.Array:
    """Returns the block of this device's partner."""
    return _permute_parts(x, where, axes, lambda at: partners[at])


def _fetched(x: jax.Array, where: Local, axes: Axes, distance: int) -> jax.Array:
    """Returns ``x`` of the device ``distance`` blocks further on, cyclically."""
    blocks = prod(where.sizes[axis] for axis in axes)
    moving, apart = moving_axes(distance % blocks, [where.sizes[axis] for axis in axes])
    over = tuple(axes[i] for i in moving)
    count = prod(where.sizes[axis] for axis in over)
    return _permute_parts(x, where, over, lambda at: (at - apart) % count)


def _permute_parts(x: jax.Array, where: Local, axes: Axes, target: Callable[[int], int]) -> jax.Array:
    """Sends ``x`` from every position along ``axes`` to the position ``target`` of it."""
    if not axes:
        return x
    order = tuple(axis for axis in where.sizes if axis in axes)  # a permute counts devices in mesh order
    number = _numbers(axes, order, where.sizes)
    pairs = [(number[at], number[target(at)]) for at in range(len(number))]
    with jax.named_scope(collective_scope("collective-permute", axes, x.dtype)):
        return _as_numbers(x, lambda numbers: lax.ppermute(numbers, order, pairs))


def _numbers(axes: Axes, order: Axes, sizes: dict[str, int]) -> Sequence[int]:
    """Per position along ``axes``, major first, the device's number along ``order``."""
    grid = np.arange(prod(sizes[axis] for axis in order)).reshape([sizes[axis] for axis in order])
    numbers: list[int] = grid.transpose([order.index(axis) for axis in axes]).ravel().tolist()
    return numbers
