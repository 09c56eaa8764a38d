"""Rearrange, join and index tensors with named dims.

    q = md.split(x, embed="heads=8 head")                  # [batch seq embed] -> [batch seq heads head]
    embedded = md.take(table, tokens, over="vocab")        # table[vocab embed] tokens[batch seq]

Functions take and return named tensors; dims are given by name, never by position. They raise DimError for a dim that a
tensor lacks, would have twice, or has in another size.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.errors import is_a
from meshdsl.nd.diagnostics import absent, described, fail, labels
from meshdsl.nd.named_array import (
    NamedArray,
    Tensor,
    aligned,
    axes,
    axis,
    computed,
    given,
    is_pair,
    is_position,
    is_whole,
    named_operand,
    one_name,
    permuted,
    positions_of,
    read,
    sizes_of,
    wrap,
)
from meshdsl.nd.named_dims import DimsLike, read_dims, read_names

# ---- Rename, order, split, merge, join -------------------------------------------------------------------------------


def rename(x: Any, /, **new: str) -> Tensor:
    """Return ``x`` with other names for dims; the array is the same.

    Args:
      x: a named tensor.
      **new: the new name per dim.

    Returns:
      A tensor of the same shape and dtype, with the new names in place.

    Raises:
      DimError: ``x`` lacks a dim, or two dims would have one name.

    Example:
      >>> keys = md.rename(x, seq="key")       # [batch seq embed] -> [batch key embed]
    """
    x = named_operand(x)
    axes(x, tuple(new))
    names = tuple(one_name(new[name], name) if name in new else name for name in x.dims)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise fail(f"renaming {labels(1)[0]}{described(x)} would duplicate dim {twice[0]!r}: [{' '.join(names)}]")
    return wrap(x.array, names)


def order(x: Any, dims: DimsLike) -> Tensor:
    """Return ``x`` transposed to this order of dims.

    Args:
      x: a named tensor.
      dims: all dims of ``x``, in the new order.

    Raises:
      DimError: a dim is missing, or ``x`` lacks it.

    Example:
      >>> q = md.order(q, "batch heads seq head")
    """
    x = named_operand(x)
    names = read_names(dims)
    axes(x, names)
    left = [name for name in x.dims if name not in names]
    if left:
        raise fail(f"order must name all dims of {labels(1)[0]}{described(x)}; missing: {' '.join(left)}")
    return wrap(permuted(x.array, x.dims, names), names)


def split(x: Any, /, **parts: DimsLike) -> Tensor:
    """Return ``x`` with dims split in place, as a reshape.

    Args:
      x: a named tensor.
      **parts: per dim its parts with sizes, major part first; one size may be omitted.

    Returns:
      A tensor in which the parts replace their dim.

    Raises:
      DimError: the sizes do not multiply to that of the dim, or a part has the name of another dim.

    Example:
      >>> md.split(x, embed="heads=8 head")     # [batch embed] -> [batch heads head]
    """
    x = named_operand(x)
    axes(x, tuple(parts))
    read_in = {name: _completed(x, name, text) for name, text in parts.items()}
    pieces = [read_in.get(name, ((name, size),)) for name, size in zip(x.dims, x.array.shape, strict=True)]
    return _reshaped(x, [pair for piece in pieces for pair in piece])


def merge(x: Any, /, **parts: DimsLike) -> Tensor:
    """Return ``x`` with dims merged into one, major first, at the place of the first.

    Dims that are not adjacent in this order are transposed first.

    Args:
      x: a named tensor.
      **parts: per new dim the dims that it is made of, major first.

    Raises:
      DimError: ``x`` lacks a dim, or already has one of the new name.

    Example:
      >>> md.merge(x, embed="heads head")       # [batch heads head] -> [batch embed]
    """
    x = named_operand(x)
    for new, text in parts.items():
        names = read_names(text)
        axes(x, names)
        if not names:
            raise fail(f"merge into {new!r} names no dims to merge; to add a new dim, use md.pack or md.broadcast")
        x = _merged(x, new, names)
    return x


def broadcast(x: Any, dims: DimsLike) -> Tensor:
    """Return ``x`` repeated along the dims that it lacks.

    Args:
      x: a named tensor or a scalar.
      dims: all dims of the result, in order, with sizes for those that ``x`` lacks.

    Raises:
      DimError: a dim of ``x`` is missing or has another size, or a new one has no size.

    Example:
      >>> md.broadcast(bias, "batch=32 embed")     # [embed] -> [batch embed]
    """
    x, wanted = read(x), read_dims(dims)
    known = sizes_of([x])
    absent_here = [name for name in known if name not in wanted]
    if absent_here:
        raise fail(f"cannot broadcast {labels(1)[0]}{described(x)} to [{wanted}]: dim {absent_here[0]!r} is missing")
    off = [name for name in known if wanted.size_of(name) not in (None, known[name])]
    if off:
        sizes = f"dim {off[0]!r} has size {known[off[0]]}, not {wanted[off[0]]}"
        raise fail(f"cannot broadcast {labels(1)[0]}{described(x)} to [{wanted}]: {sizes}")
    shape = tuple(known[name] if name in known else wanted[name] for name in wanted)
    array = aligned(x.array, x.dims, wanted.names) if isinstance(x, NamedArray) else x
    return wrap(jnp.broadcast_to(array, shape), wanted.names)


def concat(tensors: Sequence[Any], over: DimsLike) -> Tensor:
    """Return the tensors concatenated along one dim.

    Args:
      tensors: named tensors with the same dims, in any order, and equal sizes along all but ``over``.
      over: the dim to concatenate along.

    Returns:
      A tensor with the dims in the order of the first tensor.

    Raises:
      DimError: a tensor lacks the dim, or dims or sizes differ.

    Example:
      >>> md.concat([cache, keys], over="seq")
    """
    read_in = [named_operand(x) for x in _listed(tensors)]
    name = one_name(over)
    rows = [absent(name, label, x) for label, x in _labelled(read_in) if name not in x.dims]
    rows = rows or _unlike(read_in)
    if rows:
        raise fail(rows)
    sizes_of(read_in, free=(name,))
    lead = read_in[0]
    arrays = [permuted(x.array, x.dims, lead.dims) for x in read_in]
    return computed(jnp.concatenate(arrays, axis=lead.dims.index(name)), lead.dims)


def pack(tensors: Sequence[Any], over: DimsLike) -> Tensor:
    """Return the tensors stacked along a new leading dim, as ``jax.numpy.stack``.

    Args:
      tensors: named tensors with the same dims and sizes, or scalars.
      over: the new dim.

    Raises:
      DimError: dims or sizes differ, or the tensors already have the dim.

    Example:
      >>> md.pack([x, y], over="layers")           # two [batch embed] -> [layers batch embed]
    """
    read_in, over = [read(x) for x in _listed(tensors)], one_name(over)
    dims = read_in[0].dims if isinstance(read_in[0], NamedArray) else ()
    rows = _unlike([x for x in read_in if isinstance(x, NamedArray)])
    if rows or any(isinstance(x, NamedArray) != bool(dims) for x in read_in):
        raise fail(rows or ["cannot join tensors that have dims with scalars, which have none"])
    if over in dims:
        raise fail(f"pack adds a new dim, but {described(read_in[0])} already has {over!r}; md.concat joins along it")
    sizes_of(read_in)
    arrays: list[Any] = [permuted(x.array, x.dims, dims) if dims else x for x in read_in]
    return computed(jnp.stack(arrays), (over, *dims))


def padded(x: Any, /, value: float = 0, **widths: tuple[int, int]) -> Tensor:
    """Return ``x`` padded with ``value``.

    Args:
      x: a named tensor.
      value: of the new elements.
      **widths: per dim the number of elements (before, after).

    Raises:
      DimError: ``x`` lacks a dim, or a width is not a pair of integers >= 0.

    Example:
      >>> md.padded(x, seq=(1, 0))                 # [seq=8] -> [seq=9]
    """
    x = named_operand(x)
    axes(x, tuple(widths))
    rows = [
        f"{name}={w!r} is not a padding; expected (before, after), two integers >= 0"
        for name, w in widths.items()
        if not (is_pair(w) and min(w) >= 0)
    ]
    if rows:
        raise fail(rows)
    return wrap(jnp.pad(x.array, [widths.get(name, (0, 0)) for name in x.dims], constant_values=value), x.dims)


def roll(x: Any, shift: int, over: DimsLike) -> Tensor:
    """Return ``x`` rotated by ``shift`` positions along one dim; elements beyond the end move to the front.

    Example:
      >>> md.roll(md.arange("seq=4"), 1, over="seq")
      NamedArray([seq=4], Array([3, 0, 1, 2], dtype=int32))
    """
    x = named_operand(x)
    if not is_position(shift):
        raise fail(f"shift: {is_a(shift)}, not an integer number of positions")
    return computed(jnp.roll(x.array, shift, axis(x, over)), x.dims)


def flip(x: Any, over: DimsLike) -> Tensor:
    """Return ``x`` in reverse order along these dims.

    Example:
      >>> md.flip(md.arange("seq=4"), over="seq")
      NamedArray([seq=4], Array([3, 2, 1, 0], dtype=int32))
    """
    x = named_operand(x)
    return wrap(jnp.flip(x.array, axes(x, over)), x.dims)


def _completed(x: NamedArray, name: str, text: DimsLike) -> tuple[tuple[str, int], ...]:
    """Return the parts of one dim with their sizes, the omitted one included."""
    parts, whole = read_dims(text), x.shape[name]
    stated = [size for part in parts if (size := parts.size_of(part)) is not None]
    missing = len(parts) - len(stated)
    if missing > 1 or whole % prod(stated) or (not missing and prod(stated) != whole):
        remedy = f"the sizes must multiply to {whole}; at most one may be omitted"
        raise fail(f"{name}={whole} of {labels(1)[0]}{described(x)} does not split into [{parts}]; {remedy}")
    return tuple((part, parts.size_of(part) or whole // prod(stated)) for part in parts)


def _merged(x: NamedArray, new: str, names: Sequence[str]) -> NamedArray:
    first = min(x.dims.index(name) for name in names)
    rest = [name for name in x.dims if name not in names]
    at = len([name for name in x.dims[:first] if name in rest])
    wanted = (*rest[:at], *names, *rest[at:])
    moved = NamedArray(permuted(x.array, x.dims, wanted), wanted)
    size = prod(moved.shape[name] for name in names)
    pairs = [(name, moved.shape[name]) for name in rest]
    return _reshaped(moved, [*pairs[:at], (new, size), *pairs[at:]])


def _reshaped(x: NamedArray, pairs: Sequence[tuple[str, int]]) -> NamedArray:
    names = [name for name, _ in pairs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise fail(f"{labels(1)[0]}{described(x)} would become [{' '.join(names)}], with duplicate dim {twice[0]!r}")
    return NamedArray(jnp.reshape(x.array, [size for _, size in pairs]), read_names(names))


def _listed(tensors: Sequence[Any]) -> Sequence[Any]:
    """Return the tensors to join as a list; DimError if there are none."""
    if isinstance(tensors, NamedArray) or not (isinstance(tensors, Iterable) and (found := list(tensors))):
        raise fail(f"{given(tensors)}; expected a nonempty list of tensors, such as [x, y]")
    return found


def _labelled(tensors: Sequence[NamedArray]) -> list[tuple[str, NamedArray]]:
    return list(zip(labels(len(tensors)), tensors, strict=True))


def _unlike(tensors: Sequence[NamedArray]) -> list[str]:
    """Return a fault if the tensors do not all have the same dims."""
    shown = [f"{label}{described(x)}" for label, x in _labelled(tensors)]
    same = all(set(x.dims) == set(tensors[0].dims) for x in tensors)
    return [] if same else [f"cannot join tensors with different dims: {', '.join(shown)}"]


# ---- Index and sort --------------------------------------------------------------------------------------------------


def index(x: Any, /, **at: Any) -> Tensor:
    """Return elements at positions and slices by name; a position removes its dim, a slice keeps it.

    Args:
      x: a named tensor.
      **at: per dim an integer, traced or not, negative from the end; or a slice of static integers. For tensors of
        positions see :func:`take`.

    Raises:
      DimError: ``x`` lacks a dim, or a static position is out of range.

    Example:
      >>> md.index(x, seq=-1, embed=slice(0, 64))
    """
    x = named_operand(x)
    axes(x, tuple(at))
    rows = [
        row for name, i in at.items() for row in (_bad_slice if isinstance(i, slice) else _bad_position)(x, name, i)
    ]
    if rows:
        raise fail(rows)
    made = jnp.asarray(x.array)[tuple(at.get(name, slice(None)) for name in x.dims)]
    return wrap(made, tuple(name for name in x.dims if isinstance(at.get(name, slice(None)), slice)))


def take(x: Any, positions: Any, over: DimsLike) -> Tensor:
    """Return the elements of ``x`` at these positions along one dim, which is replaced by the dims of ``positions``.

        md.take(table, tokens, over="vocab")     table[vocab embed] tokens[batch seq] -> [batch seq embed]
        md.take(logits, labels, over="vocab")    logits[batch vocab] labels[batch] -> [batch]

    Dims that both tensors have are batch dims, as in the second line.

    Args:
      x: a named tensor.
      positions: integers, with or without dims.
      over: the dim of ``x`` that the positions index.

    Raises:
      DimError: ``x`` lacks the dim, positions are not integers or have that dim, or a shared dim has two sizes.

    Example:
      >>> md.take(md.arange("vocab=9"), md.named(jnp.array([7, 2]), "batch"), over="vocab")
      NamedArray([batch=2], Array([7, 2], dtype=int32))
    """
    x, positions = named_operand(x), positions_of(positions, first=1)
    at = axis(x, over)
    if not isinstance(positions, NamedArray):
        return index(x, **{x.dims[at]: positions})
    sizes_of([x, positions], free=(x.dims[at],))
    shared = [name for name in positions.dims if name in x.dims]
    if x.dims[at] in shared:
        raise fail(
            f"positions{described(positions)} have the indexed dim {x.dims[at]!r} themselves; rename it with md.rename"
        )
    return _take_along(x, positions, at) if shared else _take_rows(x, positions, at)


def update(x: Any, part: Any, /, **start: Any) -> Tensor:
    """Return ``x`` with ``part`` written over it, starting at these positions.

    Args:
      x: a named tensor.
      part: a tensor with the dims and the dtype of ``x``.
      **start: start position per dim, traced or not; 0 for dims that are not named.

    Raises:
      DimError: dims, sizes or dtypes differ, or ``part`` does not fit at a static position.

    Example:
      >>> cache = md.update(cache, keys, seq=length)
    """
    x, part = named_operand(x), named_operand(part)
    axes(x, tuple(start))
    if set(part.dims) != set(x.dims):
        raise fail(f"cannot write {described(part)} over {labels(1)[0]}{described(x)}: update needs equal dims")
    sizes_of([x, part], free=tuple(start))
    rows = [row for name, i in start.items() for row in _bad_position(x, name, i, part.shape[name])]
    dtypes = [jnp.result_type(z.array) for z in (part, x)]
    if dtypes[0] != dtypes[1]:
        rows.append(f"cannot write {dtypes[0]} over {dtypes[1]}; convert the part with part.astype(x.dtype)")
    if rows:
        raise fail(rows)
    begins = [start.get(name, 0) for name in x.dims]
    return wrap(lax.dynamic_update_slice(x.array, permuted(part.array, part.dims, x.dims), begins), x.dims)


def top_k(x: Any, k: int, over: DimsLike) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest elements along one dim, in descending order, and their positions.

    Args:
      x: a named tensor.
      k: number of elements, at most the size of the dim.
      over: the dim.

    Returns:
      Values in the dtype of ``x`` and positions as int32, both with the dims of ``x``, of size ``k`` along ``over``.

    Raises:
      DimError: ``x`` lacks the dim, or ``k`` is out of range.

    Example:
      >>> gates, experts = md.top_k(scores, 2, over="experts")
    """
    x = named_operand(x)
    at = axis(x, over)
    size = x.array.shape[at]
    if not (is_whole(k) and 0 <= k <= size):
        raise fail(
            f"k={k!r} is out of range; expected an integer from 0 to {size}, the size of {over!r} in {described(x)}"
        )
    last = (*x.dims[:at], *x.dims[at + 1 :], x.dims[at])
    found = lax.top_k(permuted(x.array, x.dims, last), k)
    values, positions = (wrap(permuted(array, last, x.dims), x.dims) for array in found)
    return values, positions


def sort(x: Any, over: DimsLike, descending: bool = False) -> Tensor:
    """Return the elements in ascending order along one dim.

    Example:
      >>> md.sort(md.arange("seq=4"), over="seq", descending=True)
      NamedArray([seq=4], Array([3, 2, 1, 0], dtype=int32))
    """
    x = named_operand(x)
    return wrap(jnp.sort(x.array, axis=axis(x, over), descending=descending), x.dims)


def argsort(x: Any, over: DimsLike, descending: bool = False) -> Tensor:
    """Return the positions that sort the elements in ascending order along one dim.

    Example:
      >>> md.argsort(md.flip(md.arange("seq=3"), over="seq"), over="seq")
      NamedArray([seq=3], Array([2, 1, 0], dtype=int32))
    """
    x = named_operand(x)
    return wrap(jnp.argsort(x.array, axis=axis(x, over), descending=descending), x.dims)


def _bad_position(x: NamedArray, name: str, i: Any, count: int = 1) -> list[str]:
    """Return a fault if ``count`` elements from this position on are out of range, if the position is known."""
    size = x.shape[name]
    if not is_position(i):
        return [f"{name}: {given(i)}, not an integer position; for tensors, md.take(x, positions, over={name!r})"]
    if count > size or (is_whole(i) and not -size <= i <= (size - count if i >= 0 else -count)):
        selected = f"{name}={i} is" if count == 1 else f"{count} elements from {name}={i} are"
        return [f"{selected} out of range: dim {name!r} has size {size} in {labels(1)[0]}{described(x)}"]
    return []


def _bad_slice(x: NamedArray, name: str, i: slice) -> list[str]:
    if i.step != 0 and all(n is None or is_whole(n) for n in (i.start, i.stop, i.step)):
        return []
    return [
        f"{name}: {i} needs static integers, and a step other than 0; for traced positions use md.take or md.update"
    ]


def _take_rows(x: NamedArray, positions: NamedArray, at: int) -> Tensor:
    made = jnp.asarray(x.array)[(*[slice(None)] * at, positions.array)]
    return computed(made, (*x.dims[:at], *positions.dims, *x.dims[at + 1 :]))


def _take_along(x: NamedArray, positions: NamedArray, at: int) -> Tensor:
    """``take_along_axis``: shared dims side by side, new ones where the dim ``at`` was."""
    name = x.dims[at]
    new = tuple(n for n in positions.dims if n not in x.dims)
    if len(new) > 1:
        raise fail(
            f"positions may add one dim to those of x, not {len(new)}: {' '.join(new)}; combine them with md.merge"
        )
    asked = tuple(new[0] if n == name and new else n for n in x.dims)
    array = aligned(positions.array, positions.dims, asked)
    array = jnp.expand_dims(array, tuple(range(len(asked) - array.ndim)))
    made = jnp.take_along_axis(x.array, array, axis=at)
    if new:
        return computed(made, asked)
    return computed(jnp.squeeze(made, at), x.dims[:at] + x.dims[at + 1 :])
