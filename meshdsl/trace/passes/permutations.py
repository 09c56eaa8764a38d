"""Lookups whose positions are known while tracing, and that only permute: they become a roll or a ``deal``.

    gather(x, [7, 0, 1, ..., 6])                 roll(x, 1)
    gather(x, [1, 0, 3, 2, ...])                 deal(x, (1, 0, 3, 2, ...))
    scatter-add(zeros, [7, 0, 1, ..., 6], g)     the gradient, likewise in the opposite order

A lookup along a split dim needs all blocks, since its positions could be any; of a permutation, devices exchange only
what moves. ``vmap`` turns ``ppermute`` into such a lookup, and ``x[perm]`` with an array of numpy is one. The positions
may pass operations on constants, and the boundaries of loops.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.rewrite import Table, fresh_ids, in_bodies, substitute, with_ops
from meshdsl.trace.passes.known_values import KnownValues
from meshdsl.trace.passes.rolls import roll_p
from meshdsl.trace.read_jaxpr import written

# ---- The operation ---------------------------------------------------------------------------------------------------


def _take(x: jax.Array, *, which: tuple[int, ...]) -> jax.Array:
    return x.at[jnp.asarray(which)].get(mode="promise_in_bounds")


deal_p = Primitive("deal")  # element i of dim 0 of the result is element which[i] of the operand
deal_p.def_impl(_take)
deal_p.def_abstract_eval(lambda x, *, which: x.update(shape=(len(which), *x.shape[1:])))
mlir.register_lowering(deal_p, mlir.lower_fun(_take, multiple_results=False))

# ---- The pass --------------------------------------------------------------------------------------------------------


def find_permutations(graph: Graph) -> Graph:
    """Returns the graph with such lookups as permutations."""
    return _permuted(graph, fresh_ids(graph), KnownValues())


def _permuted(graph: Graph, ids: Iterator[int], known: KnownValues) -> Graph:
    table: Table = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = substitute(op, table)
        known.enter(op)
        op = in_bodies(lambda body: _permuted(body, ids, known), op)
        found = _FORMS[op.name](op, known) if op.name in _FORMS else None
        if found:
            made, table[op.outputs[0].id] = written(partial(_assembled, form=found), (found.source,), ids, op)
            ops += made
        else:
            ops.append(op)
    return with_ops(graph, ops)


@dataclass(frozen=True)
class _Permutation:
    """Element i of dim ``to`` of the result is element ``order[i]`` of dim ``dim`` of the source; other dims stay."""

    source: Value
    dim: int
    to: int
    order: tuple[int, ...]


def _assembled(x: jax.Array, form: _Permutation) -> jax.Array:
    order, n = form.order, len(form.order)
    shift = -order[0] % n
    if order == tuple((i - shift) % n for i in range(n)):
        rolled = roll_p.bind(x, axis=form.dim, shift=shift) if shift else x
        return jnp.moveaxis(rolled, form.dim, form.to)
    return jnp.moveaxis(deal_p.bind(jnp.moveaxis(x, form.dim, 0), which=order), 0, form.to)


# ---- Forms of lookups ------------------------------------------------------------------------------------------------


def _gathered(op: Op, known: KnownValues) -> _Permutation | None:
    x, numbers = op.inputs[0], op.params["dimension_numbers"]
    if not isinstance(x, Value) or numbers.operand_batching_dims or len(numbers.collapsed_slice_dims) != 1:
        return None
    (dim,) = numbers.collapsed_slice_dims
    whole = all(
        size == n for d, (size, n) in enumerate(zip(op.params["slice_sizes"], x.shape, strict=True)) if d != dim
    )
    if not whole or tuple(numbers.start_index_map) != (dim,):
        return None
    return _found(x, int(dim), op.outputs[0], numbers.offset_dims, _order(known, op.inputs[1], x.shape[dim]))


def _scattered(op: Op, known: KnownValues) -> _Permutation | None:
    """The gradient of a permutation: every element is added to a place of its own among zeros."""
    base, positions, updates = op.inputs
    numbers = op.params["dimension_numbers"]
    if not isinstance(updates, Value) or numbers.operand_batching_dims or len(numbers.inserted_window_dims) != 1:
        return None
    (dim,) = numbers.inserted_window_dims
    if tuple(numbers.scatter_dims_to_operand_dims) != (dim,) or not _is_zero(known, base):
        return None
    order = _order(known, positions, base.shape[dim])
    back = None if order is None else tuple(np.argsort(order).tolist())
    kept = [d for d in range(len(updates.shape)) if d not in numbers.update_window_dims]
    others = [n for d, n in enumerate(base.shape) if d != dim]
    if len(kept) != 1 or others != [updates.shape[d] for d in numbers.update_window_dims]:
        return None
    return None if back is None else _Permutation(updates, kept[0], int(dim), back)


def _found(
    x: Value, dim: int, made: Value, windows: Sequence[int], order: tuple[int, ...] | None
) -> _Permutation | None:
    kept = [d for d in range(len(made.shape)) if d not in windows]
    return None if order is None or len(kept) != 1 else _Permutation(x, dim, kept[0], order)


_FORMS = {"gather": _gathered, "scatter-add": _scattered}

# ---- Positions -------------------------------------------------------------------------------------------------------


def _order(known: KnownValues, x: Atom, n: int) -> tuple[int, ...] | None:
    """Returns the positions in ``x`` if they are known and a permutation of n elements."""
    if tuple(x.shape) not in ((n, 1), (n,)) or not np.issubdtype(x.dtype, np.integer):
        return None
    found = known.value(x)
    order = None if found is None else tuple(np.ravel(found).tolist())
    return order if order is not None and sorted(order) == list(range(n)) else None


def _is_zero(known: KnownValues, x: Atom) -> bool:
    """Whether ``x`` is a broadcast of zero."""
    op = known.makers.get(x.id)
    fill = op.inputs[0] if op is not None and op.name == "broadcast_in_dim" else None
    return isinstance(fill, Literal) and not fill.value
