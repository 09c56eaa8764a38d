"""Composite primitives of JAX that hide what they compute, written as the JAX operations that they consist of.

Most composite primitives carry their implementation with them (``read_jaxpr`` traces it). Those of sparse products and
conversions do not: their ``impl`` compiles them, for a GPU's library may have a kernel. Written out, an operation on
sparse matrices is a lookup of rows, a product, and a sum of rows by position, and each of these has a rule:

    bcoo_dot_general   data [nse], at [nse, 2] (row, column), rhs [k, n]
                       rows = rhs[column]        gather: zeros for padding, whose positions are out of bounds
                       made = data * rows        [nse, n]
                       out[row] += made          scatter-add: drops padding

So columns ``n`` of the dense operand are split without any exchange, elements ``nse`` give partial sums, and a split
``k`` is looked up as an embedding is. CSR forms name rows by where they start, and COO forms hold rows and columns
apart; both are brought into the form above first.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Implementation = Callable[..., Any]
IMPLEMENTATIONS: dict[str, Implementation] = {}


def implements(*names: str) -> Callable[[Implementation], Implementation]:
    """Returns a decorator that registers a function of a primitive's operands and parameters as its implementation."""

    def register(implementation: Implementation) -> Implementation:
        IMPLEMENTATIONS.update(dict.fromkeys(names, implementation))
        return implementation

    return register


# ---- Sparse products -------------------------------------------------------------------------------------------------


@implements("bcoo_dot_general")
def bcoo_dot_general(
    data: jax.Array,
    indices: jax.Array,
    rhs: jax.Array,
    *,
    dimension_numbers: Any,
    preferred_element_type: Any,
    lhs_spinfo: Any,
) -> jax.Array:
    """Returns the product of a sparse and a dense operand, with dimension numbers as those of ``lax.dot_general``.

    Args:
      data: [*batch, nse, *dense]; batch dims of length 1 stand for all.
      indices: [*batch, nse, sparse]; positions beyond the shape are padding.
    """
    (left_sum, right_sum), (left_batch, right_batch) = dimension_numbers
    shape, batches = tuple(lhs_spinfo.shape), indices.ndim - 2
    data = jnp.broadcast_to(data, (*shape[:batches], *data.shape[batches:]))
    indices = jnp.broadcast_to(indices, (*shape[:batches], *indices.shape[batches:]))
    pairs = list(zip(left_sum, right_sum, strict=True))
    outer = [(i, j) for i, j in pairs if i < batches]  # sums over batch dims
    looked_up = [(i - batches, j) for i, j in pairs if i >= batches]
    free = [i for i in range(batches) if i not in (*left_batch, *left_sum)]
    order = (*left_batch, *free, *(i for i, _ in outer))
    joined = (*right_batch, *(j for _, j in outer), *(j for _, j in looked_up))
    dtype = jnp.result_type(data, rhs) if preferred_element_type is None else preferred_element_type
    product: Implementation = partial(
        _rows_product, [i for i, _ in looked_up], shape[batches : batches + indices.shape[-1]], dtype
    )
    for _ in outer:
        product = _summed(jax.vmap(product))
    for _ in free:
        product = jax.vmap(product, in_axes=(0, 0, None))
    for _ in left_batch:
        product = jax.vmap(product)
    return jnp.asarray(product(_leading(data, order), _leading(indices, order), _leading(rhs, joined)))


def _rows_product(
    summed: Sequence[int], shape: Sequence[int], dtype: Any, data: jax.Array, at: jax.Array, rhs: jax.Array
) -> jax.Array:
    """Returns the product of one sparse tensor of sparse dims ``shape`` with ``rhs``, whose first dims are summed."""
    kept = [i for i in range(len(shape)) if i not in summed]
    rows = rhs
    if summed:
        rows = rhs.at[tuple(at[:, i] for i in summed)].get(mode="fill", fill_value=0)
    batch = ([0], [0]) if summed else ([], [])
    made = lax.dot_general(data, rows, (([], []), batch), preferred_element_type=dtype)
    if not kept:
        return made.sum(0, dtype=dtype)
    out = jnp.zeros((*(shape[i] for i in kept), *made.shape[1:]), dtype)
    return out.at[tuple(at[:, i] for i in kept)].add(made, mode="drop")


def _summed(product: Implementation) -> Implementation:
    return lambda *operands: product(*operands).sum(0)


def _leading(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Returns ``x`` with these dims first."""
    return x.transpose(*dims, *(i for i in range(x.ndim) if i not in dims))


@implements("bcsr_dot_general")
def bcsr_dot_general(
    data: jax.Array, indices: jax.Array, indptr: jax.Array, rhs: jax.Array, **params: Any
) -> jax.Array:
    """Returns the same product with rows given by where they start, [*batch, rows + 1]."""
    rows: Implementation = partial(rows_of_starts, count=indices.shape[-1])
    for _ in range(indptr.ndim - 1):
        rows = jax.vmap(rows)
    made: jax.Array = bcoo_dot_general(data, jnp.stack([rows(indptr), indices], axis=-1), rhs, **params)
    return made


def rows_of_starts(starts: jax.Array, count: int) -> jax.Array:
    """Returns the row of each of ``count`` elements, given the first element of every row, and behind them the end."""
    found: jax.Array = jnp.searchsorted(starts, jnp.arange(count), side="right") - 1
    return found.astype(starts.dtype)


# ---- Matrices of rows and columns ------------------------------------------------------------------------------------


@implements("coo_matvec", "coo_matmat")
def coo_product(
    data: jax.Array, row: jax.Array, col: jax.Array, rhs: jax.Array, *, spinfo: Any, transpose: bool
) -> jax.Array:
    """Returns a matrix, or its transpose, times a vector or matrix."""
    shape, at = tuple(spinfo.shape), jnp.stack([row, col], axis=-1)
    return _rows_product([0 if transpose else 1], shape, jnp.result_type(data, rhs), data, at, rhs)


@implements("csr_matvec", "csr_matmat")
def csr_product(
    data: jax.Array,
    indices: jax.Array,
    indptr: jax.Array,
    rhs: jax.Array,
    *,
    shape: Sequence[int],
    transpose: bool,
) -> jax.Array:
    """Returns the same with rows given by where they start."""
    at = jnp.stack([rows_of_starts(indptr, data.shape[0]), indices], axis=-1)
    return _rows_product([0 if transpose else 1], shape, jnp.result_type(data, rhs), data, at, rhs)


@implements("coo_todense")
def coo_todense(data: jax.Array, row: jax.Array, col: jax.Array, *, spinfo: Any) -> jax.Array:
    """Returns the dense matrix; elements at equal positions are added."""
    return jnp.zeros(spinfo.shape, data.dtype).at[row, col].add(data)


@implements("csr_todense")
def csr_todense(data: jax.Array, indices: jax.Array, indptr: jax.Array, *, shape: Sequence[int]) -> jax.Array:
    """Returns the dense matrix, with rows given by where they start."""
    return jnp.zeros(shape, data.dtype).at[rows_of_starts(indptr, data.shape[0]), indices].add(data)


@implements("coo_fromdense")
def coo_fromdense(matrix: jax.Array, *, nse: int, index_dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the first ``nse`` elements that are not zero, their rows and columns; padding is out of bounds."""
    row, col = jnp.nonzero(matrix, size=nse, fill_value=matrix.shape)
    data = matrix.at[row, col].get(mode="fill", fill_value=0)
    return data, row.astype(index_dtype), col.astype(index_dtype)


@implements("csr_fromdense")
def csr_fromdense(matrix: jax.Array, *, nse: int, index_dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the same elements, their columns, and where rows start."""
    data, row, col = coo_fromdense(matrix, nse=nse, index_dtype=index_dtype)
    lengths = jnp.zeros(matrix.shape[0], index_dtype).at[row].add(1, mode="drop")
    return data, col, jnp.append(jnp.zeros(1, index_dtype), jnp.cumsum(lengths, dtype=index_dtype))


# ---- Others ----------------------------------------------------------------------------------------------------------


@implements("call_hi_primitive")
def hi_primitive(*operands: jax.Array, _prim: Any) -> list[jax.Array]:
    """Returns the results of a primitive of ``jax.experimental.hijax``, which knows what it consists of."""
    return jax.tree.leaves(_prim.expand(*jax.tree.unflatten(_prim.in_tree, operands)))


@implements("empty")
def empty(*, shape: Sequence[int], dtype: Any, **_: Any) -> jax.Array:
    """Returns zeros, which are as good as any other content."""
    return jnp.zeros(shape, dtype)
