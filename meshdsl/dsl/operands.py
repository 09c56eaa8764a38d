"""How names come to arrays, and how an operation finds the dims it is asked to work over."""

from typing import Any

import jax.numpy as jnp
import numpy as np

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
    raise fail(f"{is_a(x)}, not a tensor with named dims; md.named(array, 'batch embed') makes one")


def positions_of(x: Any, first: int = 0) -> Tensor:
    """An operand of whole numbers, which may have dims; ``first`` as in :func:`axes`."""
    x = read(x)
    dtype = jnp.result_type(x.array if isinstance(x, NamedArray) else x)
    if not jnp.issubdtype(dtype, jnp.integer):
        said = f"{labels(1, first)[0]}{described(x)}" if isinstance(x, NamedArray) else repr(x)
        raise fail(f"positions are whole numbers, not {dtype} as in {said}")
    return x


def number(x: Any, argument: str) -> Any:
    """An argument that is one number, traced or not."""
    x = read(x)
    if isinstance(x, NamedArray):
        raise fail(f"{argument} is one number, not a tensor with dims {described(x)}")
    return x


def one_name(given: DimsLike, argument: str = "over") -> str:
    """The name where an argument takes one dim."""
    names = read_names(given)
    if len(names) != 1:
        raise fail(f"one dim is wanted here, not {len(names)}: {argument}={' '.join(names)!r}")
    return names[0]


def is_whole(n: Any) -> bool:
    """Whether it is a whole number that is known while the step is traced; no bool."""
    return isinstance(n, int | np.integer) and not isinstance(n, bool)


def is_position(n: Any) -> bool:
    """Whether it is a whole number, also one in an array without dims, traced or not."""
    scalar = getattr(n, "shape", None) == () and jnp.issubdtype(n.dtype, jnp.integer)
    return scalar or is_whole(n)


def is_pair(widths: Any) -> bool:
    """Whether it is what is added before and after."""
    return isinstance(widths, tuple | list) and len(widths) == 2 and all(map(is_whole, widths))


def axes(x: NamedArray, over: DimsLike | None, first: int = 0) -> tuple[int, ...]:
    """Positions of the dims ``over``, all where that is None; DimError with the nearest name.

    ``first`` is where ``x`` stands among the arguments that the user wrote.
    """
    if over is None:
        return tuple(range(len(x.dims)))
    names = read_names(over)
    missing = [name for name in names if name not in x.dims]
    if missing:
        (label,) = labels(1, first)
        raise fail([absent(name, label, x) for name in missing])
    return tuple(sorted(x.dims.index(name) for name in names))


def axis(x: NamedArray, over: DimsLike, first: int = 0) -> int:
    """Position of one dim."""
    return axes(x, (one_name(over),), first)[0]
