"""Elements picked by name: positions and slices, rows of a table, the largest, the order of elements."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.dsl.array import NamedArray, Tensor, computed, given, sizes_of, wrap
from meshdsl.dsl.blame import described, fail, labels
from meshdsl.dsl.dims import DimsLike
from meshdsl.dsl.operands import axes, axis, is_position, is_whole, named_operand, positions_of
from meshdsl.dsl.order import aligned, permuted


def index(x: Any, /, **at: Any) -> Tensor:
    """Positions and slices by name: ``md.index(x, seq=-1, embed=slice(0, 64))``.

    A position takes its dim away, a slice keeps it. Positions may be traced scalars;
    for tensors of positions there is :func:`take`.
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
    """The elements of ``x`` at these positions along one dim, which gives way to the dims of ``positions``.

        md.take(table, tokens, over="vocab")     table[vocab embed] tokens[batch seq] -> [batch seq embed]
        md.take(logits, labels, over="vocab")    logits[batch vocab] labels[batch] -> [batch]

    Dims that both have are walked along together, as in the second line.
    """
    x, positions = named_operand(x), positions_of(positions, first=1)
    at = axis(x, over)
    if not isinstance(positions, NamedArray):
        return index(x, **{x.dims[at]: positions})
    sizes_of([x, positions], free=(x.dims[at],))
    shared = [name for name in positions.dims if name in x.dims]
    if x.dims[at] in shared:
        raise fail(f"positions along {x.dims[at]!r} have that dim themselves; md.rename gives them another")
    return _take_along(x, positions, at) if shared else _take_rows(x, positions, at)


def update(x: Any, part: Any, /, **start: Any) -> Tensor:
    """``x`` with ``part`` written over it, from these positions on: ``md.update(cache, keys, seq=length)``.

    ``part`` has the dims of ``x``; from where it starts in those that are not named is 0.
    """
    x, part = named_operand(x), named_operand(part)
    axes(x, tuple(start))
    if set(part.dims) != set(x.dims):
        raise fail(f"{described(part)} is written over {labels(1)[0]}{described(x)}; both have the same dims")
    sizes_of([x, part], free=tuple(start))
    rows = [row for name, i in start.items() for row in _bad_position(x, name, i, part.shape[name])]
    dtypes = [jnp.result_type(z.array) for z in (part, x)]
    if dtypes[0] != dtypes[1]:
        rows.append(f"{dtypes[0]} is written over {dtypes[1]}; part.astype(x.dtype) is of the same dtype")
    if rows:
        raise fail(rows)
    begins = [start.get(name, 0) for name in x.dims]
    return wrap(lax.dynamic_update_slice(x.array, permuted(part.array, part.dims, x.dims), begins), x.dims)


def top_k(x: Any, k: int, over: DimsLike) -> tuple[Tensor, Tensor]:
    """The ``k`` largest elements along one dim, largest first, and their positions; the dim then has size ``k``."""
    x = named_operand(x)
    at = axis(x, over)
    size = x.array.shape[at]
    if not (is_whole(k) and 0 <= k <= size):
        raise fail(f"k={k!r} is no number of elements from 0 to {size}, as many as {over!r} has in {described(x)}")
    last = (*x.dims[:at], *x.dims[at + 1 :], x.dims[at])
    found = lax.top_k(permuted(x.array, x.dims, last), k)
    values, positions = (wrap(permuted(array, last, x.dims), x.dims) for array in found)
    return values, positions


def sort(x: Any, over: DimsLike, descending: bool = False) -> Tensor:
    """The elements in rising order along one dim."""
    x = named_operand(x)
    return wrap(jnp.sort(x.array, axis=axis(x, over), descending=descending), x.dims)


def argsort(x: Any, over: DimsLike, descending: bool = False) -> Tensor:
    """Positions that put the elements in rising order along one dim."""
    x = named_operand(x)
    return wrap(jnp.argsort(x.array, axis=axis(x, over), descending=descending), x.dims)


def _bad_position(x: NamedArray, name: str, i: Any, count: int = 1) -> list[str]:
    """A fault if ``count`` elements from this position on are none of the dim's, as far as the position is known."""
    size = x.shape[name]
    if not is_position(i):
        return [
            f"{name}: {given(i)}, not a position; md.take(x, positions, over={name!r}) takes a named tensor of them"
        ]
    if count > size or (is_whole(i) and not -size <= i <= (size - count if i >= 0 else -count)):
        asked = f"{name}={i}" if count == 1 else f"{count} elements from {name}={i} on"
        return [f"{asked}: there are {size} in {labels(1)[0]}{described(x)}"]
    return []


def _bad_slice(x: NamedArray, name: str, i: slice) -> list[str]:
    if i.step != 0 and all(n is None or is_whole(n) for n in (i.start, i.stop, i.step)):
        return []
    return [
        f"{name}: {i}: start, stop and step are known numbers, the step not 0; md.take(x, positions, ...) takes others"
    ]


def _take_rows(x: NamedArray, positions: NamedArray, at: int) -> Tensor:
    made = jnp.asarray(x.array)[(*[slice(None)] * at, positions.array)]
    return computed(made, (*x.dims[:at], *positions.dims, *x.dims[at + 1 :]))


def _take_along(x: NamedArray, positions: NamedArray, at: int) -> Tensor:
    """``take_along_axis``: shared dims side by side, new ones where the dim ``at`` was."""
    name = x.dims[at]
    new = tuple(n for n in positions.dims if n not in x.dims)
    if len(new) > 1:
        raise fail(f"positions have several dims of their own, {' '.join(new)}; md.merge makes them one")
    asked = tuple(new[0] if n == name and new else n for n in x.dims)
    array = aligned(positions.array, positions.dims, asked)
    array = jnp.expand_dims(array, tuple(range(len(asked) - array.ndim)))
    made = jnp.take_along_axis(x.array, array, axis=at)
    if new:
        return computed(made, asked)
    return computed(jnp.squeeze(made, at), x.dims[:at] + x.dims[at + 1 :])
