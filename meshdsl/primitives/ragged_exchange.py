"""``md.ragged_exchange``: ranks send each other as many rows as the data says.

    x         [... ranks rows features]      a rank's rows for the first rank, those for the second, ...
    sizes     [... ranks ranks]              how many rows a rank has for each one
    received  [... ranks length features]    the rows from the first rank, those from the second, ..., and zeros

The function is on whole arrays, as ``jax.numpy`` is, where it is a lookup of rows. A plan that splits ``ranks`` makes
it one collective that sends these rows and no others (``jax.lax.ragged_all_to_all``), or, where the compiler has none,
rounds of all-to-alls with equal slots for every pair (``lowering.local.ragged_exchange``).

It is linear in the rows, and its transpose sends them back: the same with ``sizes`` transposed. For that, a block of
rows begins behind all blocks before it, at the sender and at the receiver, even those that do not fit; of each block,
the rows that lie within both sides are sent (``sizes_within``).
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from meshdsl.errors import ArgumentError, faults

ragged_exchange_p = Primitive("ragged_exchange")


def ragged_exchange(x: jax.Array, sizes: jax.Array, length: int) -> jax.Array:
    """Return the rows that every rank receives: from the first rank, from the second, ..., then zeros.

    Rows that a rank does not have are not sent, and those beyond ``length`` are not received: a program that may lose
    none exchanges in as many rounds as it takes, such as ``meshdsl.models.dropless``.

    Args:
      x: ``[... ranks rows features]``; a rank's rows for the first rank, for the second, and so on, without gaps.
        ``ranks`` divides ``rows``, and ``length``.
      sizes: ``[... ranks ranks]``, integers: how many rows a rank (the first of the two) has for each rank.
      length: how many rows a rank receives at most. Plans count what fills the smaller of ``rows`` and
        ``length``, evenly; rounds count the larger.

    Returns:
      ``[... ranks length features]``.

    Raises:
      ArgumentError: shapes that do not fit each other, sizes that are no integers, a length below 1, or ranks that do
        not divide rows and length.

    Example:
      >>> x = jnp.array([[[1], [2], [3], [4]], [[5], [6], [7], [8]]])  # 2 ranks of 4 rows
      >>> md.ragged_exchange(x, jnp.array([[1, 3], [0, 2]]), length=6)[:, :, 0].tolist()
      [[1, 0, 0, 0, 0, 0], [2, 3, 4, 5, 6, 0]]
    """
    x, sizes = jnp.asarray(x), jnp.asarray(sizes)
    found = []
    if not (isinstance(length, Integral) and length > 0):
        found.append(f"length={length!r} is no number of rows; give an int of at least 1")
    if x.ndim < 3 or not x.shape[-3]:
        found.append(f"x: shape {x.shape} is not [... ranks rows features], of at least one rank")
    elif sizes.shape != (*x.shape[:-2], x.shape[-3]):
        wanted = (*x.shape[:-2], x.shape[-3])
        found.append(f"sizes: shape {sizes.shape} is not [... ranks ranks] {wanted}, to fit x {x.shape}")
    for name, rows in (("rows", x.shape[-2]), ("length", length)) if not found else ():
        if rows % x.shape[-3]:
            found.append(
                f"{name}={rows} is no multiple of ranks={x.shape[-3]}; make it {-(-rows // x.shape[-3]) * x.shape[-3]}"
            )
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        found.append(f"sizes: {sizes.dtype} counts no rows; give integers")
    if found:
        raise ArgumentError(faults("ragged_exchange:", found))
    sizes = jnp.maximum(sizes, 0).astype(jax.dtypes.canonicalize_dtype(jnp.uint64))  # holds every size, and ``rows``
    sizes = jnp.minimum(sizes, x.shape[-2]).astype(jnp.int32)  # so that sums do not overflow
    sizes = _within(sizes, x.shape[-2], -1)
    made: jax.Array = ragged_exchange_p.bind(x, sizes, length=int(length), ragged=False)
    return made


def sizes_within(sizes: jax.Array, rows: int, length: int) -> jax.Array:
    """Returns how much of each block lies within the ``rows`` of its sender and the ``length`` of its receiver."""
    return jnp.minimum(_within(sizes, rows, -1), _within(sizes, length, -2))


def _within(sizes: jax.Array, most: int, dim: int) -> jax.Array:
    return jnp.clip(most - rows_before(sizes, dim), 0, sizes)


def rows_before(sizes: jax.Array, dim: int) -> jax.Array:
    """Returns the sums of the sizes before each along ``dim``: where its rows begin."""
    return jnp.cumsum(sizes, dim) - sizes


def exchanged(x: jax.Array, sizes: jax.Array, length: int) -> jax.Array:
    """Returns what is received, on whole arrays: a lookup of rows."""
    ranks, rows, features = x.shape[-3:]
    sender = sender_of_rows(sizes, length)
    at = jnp.arange(length) + _of_sender(rows_before(sizes, -1) - rows_before(sizes, -2), sender)
    at = jnp.where((sender < ranks) & (at < rows), sender * rows + at, ranks * rows)
    whole = x.reshape(*x.shape[:-3], ranks * rows, features)
    return rows_at(whole, at.reshape(*x.shape[:-3], ranks * length)).reshape(*x.shape[:-2], length, features)


def rows_at(x: jax.Array, at: jax.Array) -> jax.Array:
    """Returns rows of ``x``, ``[... n features]``, at positions ``[... m]``; zeros beyond the last one."""
    made: jax.Array = jnp.take_along_axis(x, at[..., None], -2, mode="fill", fill_value=0)
    return made


def sender_of_rows(sizes: jax.Array, length: int) -> jax.Array:
    """Returns which rank sends each row that a rank receives, ``[... ranks length]``; ``ranks`` for none."""
    ends = jnp.swapaxes(jnp.cumsum(sizes, -2), -1, -2)  # [... receiver sender]
    return jnp.sum(jnp.arange(length) >= ends[..., None], -2)


def _of_sender(table: jax.Array, sender: jax.Array) -> jax.Array:
    """Returns entries of ``[... sender receiver]`` for ``[... receiver row]``, zero for no sender."""
    found: jax.Array = jnp.take_along_axis(jnp.swapaxes(table, -1, -2), sender, -1, mode="fill", fill_value=0)
    return found


def _shape(x: Any, sizes: Any, *, length: int, ragged: bool) -> Any:
    return x.update(shape=(*x.shape[:-2], length, x.shape[-1]), weak_type=False)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    sizes, moved = primals[1], ad.instantiate_zeros(tangents[0])
    return ragged_exchange_p.bind(*primals, **params), ragged_exchange_p.bind(moved, sizes, **params)


def _transpose(cotangent: Any, x: Any, sizes: Any, *, length: int, ragged: bool) -> tuple[Any, None]:
    rows = x.aval.shape[-2]
    back = ad.instantiate_zeros(cotangent), jnp.swapaxes(sizes, -1, -2)
    return ragged_exchange_p.bind(*back, length=rows, ragged=ragged), None


def _batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, int]:
    (count,) = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}
    both = (
        jnp.broadcast_to(x, (count, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    )
    return ragged_exchange_p.bind(*both, **params), 0


def _run(x: jax.Array, sizes: jax.Array, *, length: int, ragged: bool) -> jax.Array:
    return exchanged(x, sizes, length)


ragged_exchange_p.def_impl(_run)
ragged_exchange_p.def_abstract_eval(_shape)
mlir.register_lowering(ragged_exchange_p, mlir.lower_fun(_run, multiple_results=False))
ad.primitive_jvps[ragged_exchange_p] = _jvp
ad.primitive_transposes[ragged_exchange_p] = _transpose
batching.primitive_batchers[ragged_exchange_p] = _batch
