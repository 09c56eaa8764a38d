"""Elements picked by name: positions and slices, rows of a table, the largest, the order of elements."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.dsl.array import NamedArray, Tensor, computed, read, sizes_of, wrap
from meshdsl.dsl.blame import fail
from meshdsl.dsl.dims import DimsLike
from meshdsl.dsl.operands import axes, axis, named_operand
from meshdsl.dsl.order import aligned, permuted
from meshdsl.errors import is_a


def index(x: Any, /, **at: Any) -> Tensor:
    """Positions and slices by name: ``md.index(x, seq=-1, embed=slice(0, 64))``.

    A position takes its dim away, a slice keeps it. Positions may be traced scalars;
    for tensors of positions there is :func:`take`.
    """
    x = named_operand(x)
    axes(x, tuple(at))
    alien = [f"{name}: {is_a(i)}, not a position or slice" for name, i in at.items() if not _is_place(i)]
    if alien:
        raise fail([*alien, "md.take(x, positions, over='seq') takes a tensor of positions"])
    made = x.array[tuple(at.get(name, slice(None)) for name in x.dims)]
    return wrap(made, tuple(name for name in x.dims if isinstance(at.get(name, slice(None)), slice)))


def take(x: Any, positions: Any, over: DimsLike) -> Tensor:
    """The elements of ``x`` at these positions along one dim, which gives way to the dims of ``positions``.

        md.take(table, tokens, over="vocab")     table[vocab embed] tokens[batch seq] -> [batch seq embed]
        md.take(logits, labels, over="vocab")    logits[batch vocab] labels[batch] -> [batch]

    Dims that both have are walked along together, as in the second line.
    """
    x, positions = named_operand(x), read(positions)
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
        raise fail(f"what is written has other dims than what it is written to: {set(part.dims) ^ set(x.dims)}")
    sizes_of([x, part], free=tuple(start))
    begins = [start.get(name, 0) for name in x.dims]
    return wrap(lax.dynamic_update_slice(x.array, permuted(part.array, part.dims, x.dims), begins), x.dims)


def top_k(x: Any, k: int, over: DimsLike) -> tuple[Tensor, Tensor]:
    """The ``k`` largest elements along one dim, largest first, and their positions; the dim then has size ``k``."""
    x = named_operand(x)
    at = axis(x, over)
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


def _is_place(i: Any) -> bool:
    return isinstance(i, slice) or hasattr(i, "__index__") or getattr(i, "shape", None) == ()


def _take_rows(x: NamedArray, positions: NamedArray, at: int) -> Tensor:
    made = x.array[(*[slice(None)] * at, positions.array)]
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
