"""How names come to arrays, and how an operation finds the dims it is asked to work over."""

from typing import Any

import jax.numpy as jnp

from meshdsl.dsl.array import NamedArray, Tensor, read, wrap
from meshdsl.dsl.blame import absent, described, fail, labels
from meshdsl.dsl.dims import DimsLike, read_dims, read_names
from meshdsl.errors import is_a


def named(array: Any, dims: DimsLike) -> Tensor:
    """The array with names for its dims.

    Args:
      array: an array, or ``jax.ShapeDtypeStruct``, or what ``jax.numpy.asarray`` takes.
      dims: one name per dim, ``"batch seq"``; where a size is stated it has to be the array's.

    Raises DimError if the names are not as many as the array's dims, or a size is another.
    """
    if isinstance(array, NamedArray):
        raise fail(f"{described(array)} has names; md.rename changes them, .array is the plain array")
    array = array if hasattr(array, "shape") and hasattr(array, "dtype") else jnp.asarray(array)
    wanted, shape = read_dims(dims), tuple(array.shape)
    if len(wanted) != len(shape):
        raise fail(f"{len(wanted)} names [{wanted}] for an array of {len(shape)} dims, shape {shape}")
    off = [(n, size) for n, size in zip(wanted, shape, strict=True) if wanted.stated(n) not in (None, size)]
    if off:
        raise fail([f"{n} is {size} in the array of shape {shape}, {n}={wanted[n]} in the names" for n, size in off])
    return wrap(array, wanted.names)


def named_operand(x: Any) -> NamedArray:
    """An operand that has to have dims."""
    x = read(x)
    if isinstance(x, NamedArray):
        return x
    raise fail(f"{is_a(x)} has no dims")


def axes(x: NamedArray, over: DimsLike | None) -> tuple[int, ...]:
    """Positions of the dims ``over``, all where that is None; DimError with the nearest name."""
    if over is None:
        return tuple(range(len(x.dims)))
    names = read_names(over)
    missing = [name for name in names if name not in x.dims]
    if missing:
        (label,) = labels(1)
        raise fail([absent(name, label, x) for name in missing])
    return tuple(sorted(x.dims.index(name) for name in names))


def axis(x: NamedArray, over: DimsLike) -> int:
    """Position of one dim."""
    found = axes(x, over)
    if len(found) != 1:
        raise fail(f"one dim is wanted here, not {len(found)}: over={' '.join(read_names(over))!r}")
    return found[0]
