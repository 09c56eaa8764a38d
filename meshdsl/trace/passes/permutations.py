"""Lookups whose positions are known while tracing, and that only permute: they become a roll or a ``deal``.

    gather(x, [7, 0, 1, ..., 6])                 roll(x, 1)
    gather(x, [1, 0, 3, 2, ...])                 deal(x, (1, 0, 3, 2, ...))
    scatter-add(zeros, [7, 0, 1, ..., 6], g)     the gradient, likewise in the opposite order

A lookup along a split dim needs all blocks, since its positions could be any; of a permutation, devices exchange only
what moves. ``vmap`` turns ``ppermute`` into such a lookup, and ``x[perm]`` with an array of numpy is one. The positions
may pass operations on constants, and the boundaries of loops.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from numpy.typing import NDArray

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.loops import loop_ports
from meshdsl.ir.rewrite import Table, fresh_ids, in_bodies, substitute, with_ops
from meshdsl.trace.passes.rolls import roll_p
from meshdsl.trace.read_jaxpr import written

Positions = NDArray[np.integer[Any]]
_LONGEST = 1 << 16  # elements of the largest array of positions that is computed while tracing

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
    return _permuted(graph, fresh_ids(graph), _Known())


def _permuted(graph: Graph, ids: Iterator[int], known: "_Known") -> Graph:
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


def _gathered(op: Op, known: "_Known") -> _Permutation | None:
    x, numbers = op.inputs[0], op.params["dimension_numbers"]
    if not isinstance(x, Value) or numbers.operand_batching_dims or len(numbers.collapsed_slice_dims) != 1:
        return None
    (dim,) = numbers.collapsed_slice_dims
    whole = all(
        size == n for d, (size, n) in enumerate(zip(op.params["slice_sizes"], x.shape, strict=True)) if d != dim
    )
    if not whole or tuple(numbers.start_index_map) != (dim,):
        return None
    return _found(x, int(dim), op.outputs[0], numbers.offset_dims, known.order(op.inputs[1], x.shape[dim]))


def _scattered(op: Op, known: "_Known") -> _Permutation | None:
    """The gradient of a permutation: every element is added to a place of its own among zeros."""
    base, positions, updates = op.inputs
    numbers = op.params["dimension_numbers"]
    if not isinstance(updates, Value) or numbers.operand_batching_dims or len(numbers.inserted_window_dims) != 1:
        return None
    (dim,) = numbers.inserted_window_dims
    if tuple(numbers.scatter_dims_to_operand_dims) != (dim,) or not known.is_zero(base):
        return None
    order = known.order(positions, base.shape[dim])
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

# ---- Values that are known while tracing -----------------------------------------------------------------------------


@dataclass
class _Known:
    """Producers of the values of a graph and of the graphs around it.

    Args:
      makers: by value id, the operation that makes it.
      outside: by id of a body's input that is the same in every iteration, the operand of the loop.
      values: the values of the constant expressions computed so far, by value id; None where unknown.
    """

    makers: dict[int, Op] = field(default_factory=dict)
    outside: dict[int, Atom] = field(default_factory=dict)
    values: dict[int, Positions | None] = field(default_factory=dict)

    def enter(self, op: Op) -> None:
        """Records an operation and the invariant operands of its bodies."""
        self.makers.update((v.id, op) for v in op.outputs)
        for port in loop_ports(op):
            if port.invariant:
                self.outside.update((op.bodies[body].inputs[i].id, op.inputs[port.operand]) for body, i in port.inputs)

    def order(self, x: Atom, n: int) -> tuple[int, ...] | None:
        """Returns the positions in ``x`` if they are known and a permutation of n elements."""
        if tuple(x.shape) not in ((n, 1), (n,)) or not np.issubdtype(x.dtype, np.integer):
            return None
        found = self._value(x)
        order = None if found is None else tuple(np.ravel(found).tolist())
        return order if order is not None and sorted(order) == list(range(n)) else None

    def is_zero(self, x: Atom) -> bool:
        """Whether ``x`` is a broadcast of zero."""
        op = self.makers.get(x.id)
        fill = op.inputs[0] if op is not None and op.name == "broadcast_in_dim" else None
        return isinstance(fill, Literal) and not fill.value

    def _value(self, x: Atom) -> Positions | None:
        """Returns the value of the constant expression ``x``; None for other values, and for large ones."""
        waiting = [x]
        while waiting:
            at = waiting[-1]
            read = [] if self._is_known(at) else [y for y in self._operands(at) if not self._is_known(y)]
            if not read:
                waiting.pop()
            if not read and not self._is_known(at):
                self.values[at.id] = self._computed(at)
            waiting += read
        return np.asarray(x.value) if isinstance(x, Literal) else self.values[x.id]

    def _is_known(self, x: Atom) -> bool:
        return isinstance(x, Literal) or x.id in self.values

    def _operands(self, x: Atom) -> Sequence[Atom]:
        """Returns the operands of ``x``; none if it cannot be computed while tracing."""
        if x.id in self.outside:
            return (self.outside[x.id],)
        op = self.makers.get(x.id)
        return () if op is None or not self._is_computable(op, x) else op.inputs

    def _is_computable(self, op: Op, x: Atom) -> bool:
        return not (
            op.bodies or op.effects or prod(x.shape) > _LONGEST or op.primitive is None or op.primitive.multiple_results
        )

    def _computed(self, x: Atom) -> Positions | None:
        """The value of ``x``, whose operands have been computed."""
        operands = [self._value(y) for y in self._operands(x)]
        if x.id in self.outside:
            return operands[0]
        op = self.makers.get(x.id)
        if op is not None and op.name == "constant" and prod(x.shape) <= _LONGEST:
            value = op.params["value"]
            return value if isinstance(value, np.ndarray) else None
        if op is None or not self._is_computable(op, x) or any(y is None for y in operands):
            return None
        with jax.ensure_compile_time_eval():
            return np.asarray(op.primitive.bind(*operands, **op.params))
