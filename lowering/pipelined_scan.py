"""Scans that send collectives one iteration ahead and behind (``meshdsl.ir.prefetch``), as one device runs them.

With G for the collectives on slices, C for the rest of the body and R for those of results, a loop of n iterations is

    G(0)                                          in front of the loop
    C(0), G(1)                                    only with R
    for k in 1 ... n - 2:  R(k-1), C(k), G(k+1)   from 0 without R, to n - 1 without G
    C(n-1), R(n-2)                                only with G
    R(n-1)                                        behind the loop

What stands side by side does not depend on each other, so compilers may run it at once. G and R run n times each.

A stack is one buffer that every iteration writes its slice to, and operands are read in place, as ``jax.lax.scan`` does
it: no part of a stack is copied because the first and the last iteration are apart.

What stands outside of the loop meets other operations of the step there: the last layer of the forward pass and its
recomputation, the first slices of two loops over one stack. Compilers would merge them, and their collectives. So each
collective there is computed from an opaque copy of one of its inputs, the smallest. In the loop, constants that are
gathered in every iteration are tied to its counter.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Op, Value
from meshdsl.ir.loops import SplitOperands, split_operands
from meshdsl.ir.prefetch import PipelinedLoop
from meshdsl.ir.solution import Prefetch, Solution
from meshdsl.layouts.layout import Layout
from meshdsl.lowering.interpreter import Arrays, Target, operand, run_ops
from meshdsl.lowering.keep_collectives import collective_sources, gathered_inside, tie_to_iteration, varying

Index = int | jax.Array


class BlockTarget(Target):
    """A target that stores a block per value and layout, under a solution."""

    solution: Solution

    @abstractmethod
    def inner(self) -> "BlockTarget":
        """Returns the same target with an empty environment, for a body."""

    @abstractmethod
    def block(self, value: Value, layout: Layout) -> jax.Array:
        """Returns the block of a value in a layout, resharded if need be."""

    @abstractmethod
    def store(self, value: Value, layout: Layout, block: jax.Array) -> None:
        """Stores the block of a value in a layout."""

    @abstractmethod
    def opaque(self, arrays: Arrays) -> Arrays:
        """Returns copies that compilers cannot identify with the arrays, or with other copies of them."""

    @abstractmethod
    def fixed(self, arrays: Arrays) -> Arrays:
        """Returns the arrays behind a barrier: compilers cannot tell which of their elements are needed."""


class _IterationState(NamedTuple):
    """What goes from an iteration to the next.

    Args:
      carry: of the scan.
      stacks: its stacked results, as far as they are written.
      sent: copies for the iteration to come.
      unreduced: values of the iteration before.
    """

    carry: Arrays
    stacks: Arrays
    sent: Arrays
    unreduced: Arrays


def pipelined_scan(target: BlockTarget, op: Op, arrays: Arrays, choice: Prefetch) -> Arrays:
    """Returns the results of a scan that sends ahead and behind what ``choice`` says."""
    scan = _PipelinedScan(target, op, arrays, PipelinedLoop.of(op, choice, target.solution))
    length, (first, last) = scan.length, scan.repeated
    state = scan.start()
    for k in range(first):
        state = scan.iteration(k, state, apart=True)
    state = lax.fori_loop(first, last, scan.iteration, state)
    for k in range(last, length):
        state = scan.iteration(k, state, apart=True)
    return target.fixed((*state.carry, *scan.reduced(length - 1, state)))


@dataclass(frozen=True)
class _PipelinedScan:
    """One scan on one device."""

    target: BlockTarget
    op: Op
    arrays: Arrays
    loop: PipelinedLoop

    @property
    def length(self) -> int:
        """The number of iterations."""
        return int(self.op.params["length"])

    @property
    def repeated(self) -> tuple[int, int]:
        """The first iteration in the loop, and the first one behind it."""
        return int(bool(self.loop.unreduced)), self.length - bool(self.loop.copies)

    @cached_property
    def operands(self) -> SplitOperands[jax.Array]:
        """The operands in their groups."""
        return split_operands(self.op, self.arrays)

    @cached_property
    def held(self) -> list[int]:
        """Positions of the consts that are gathered in every iteration."""
        return gathered_inside(self.op.bodies[0], varying(self.op), self.target.solution)

    @cached_property
    def told_apart(self) -> frozenset[int]:
        """Positions of inputs of the body, so that every collective is computed from one of them."""
        body, found = self.op.bodies[0], set[int]()
        sources = collective_sources(body, (), self.target.solution)
        for inputs in sorted(sources, key=len):
            plain = [i for i in inputs if not jnp.issubdtype(body.inputs[i].dtype, jax.dtypes.extended)]
            if plain and found.isdisjoint(inputs):
                found.add(min(plain, key=lambda i: (body.inputs[i].bytes, i)))
        return frozenset(found)

    def start(self) -> _IterationState:
        """Returns what the first iteration finds."""
        solution = self.target.solution
        stacked, sizes = self.op.outputs[len(self.operands.carry) :], solution.mesh.sizes_by_name
        blocks = (solution.layouts[value.id].local_shape(value.shape, sizes) for value in stacked)
        stacks = tuple(jnp.zeros(shape, value.dtype) for shape, value in zip(blocks, stacked, strict=True))
        return _IterationState(self.operands.carry, stacks, self._sent(0, apart=True), ())

    def iteration(self, k: Index, state: _IterationState, apart: bool = False) -> _IterationState:
        """Returns the state after iteration ``k``; it is ``apart`` in front of the loop or behind it."""
        at, inputs = self._inputs(k, state.carry, apart)
        is_last = apart and k == self.length - 1
        sent = () if is_last else self._sent(at + 1, apart)
        stacks = self.reduced(at - 1, state)

        inner, body = self.target.inner(), self.op.bodies[0]
        for value, array in zip(body.inputs, inputs, strict=True):
            inner.define(value, array)
        for (value, layout), block in zip(self.loop.copies, state.sent, strict=True):
            inner.store(value, layout, block)
        elsewhere = {*self.loop.moved, *(op.id for op in self.loop.late)}
        run_ops((op for op in body.ops[:-1] if op.id not in elsewhere), inner)

        count, returned = len(state.carry), range(len(body.returned))
        results = {j: operand(inner, body.ops[-1], j) for j in returned if j not in self.loop.stacks}
        carry = tuple(results.pop(j) for j in range(count))
        unreduced = tuple(inner.block(v, self.target.solution.layouts[v.id]) for v in self.loop.unreduced)
        return _IterationState(carry, self._written(stacks, at, results), sent, unreduced)

    def reduced(self, k: Index, state: _IterationState) -> Arrays:
        """Returns the stacks with the slices of iteration ``k`` that were still to be reduced."""
        if not state.unreduced:
            return state.stacks
        inner, last = self.target.inner(), self.op.bodies[0].ops[-1]
        for value, block in zip(self.loop.unreduced, state.unreduced, strict=True):
            inner.define(value, block)
        run_ops(self.loop.late, inner)
        return self._written(state.stacks, k, {j: operand(inner, last, j) for j in self.loop.stacks})

    def _inputs(self, k: Index, carry: Arrays, apart: bool) -> tuple[Index, Arrays]:
        """The inputs of the body in iteration ``k``, and the number of the iteration, to which they may be tied."""
        consts, at = self.operands.consts, k
        if self.held and not apart:
            *tied, at = tie_to_iteration((*consts, jnp.asarray(k)), self.held, [len(consts)])
            consts = tuple(tied)
        inputs = (*consts, *carry, *self._slices(at))
        if not apart:
            return at, inputs
        copies = iter(self.target.opaque(tuple(inputs[i] for i in sorted(self.told_apart))))
        return at, tuple(next(copies) if i in self.told_apart else x for i, x in enumerate(inputs))

    def _slices(self, k: Index) -> Arrays:
        """The slices of iteration ``k``."""
        at = self._place(k)
        return tuple(
            lax.dynamic_index_in_dim(x, at, keepdims=False, allow_negative_indices=False) for x in self.operands.slices
        )

    def _sent(self, k: Index, apart: bool) -> Arrays:
        """The copies that are made from the slices of iteration ``k`` and carried."""
        inner, body, slices = self.target.inner(), self.op.bodies[0], self._slices(k)
        slices = self.target.opaque(slices) if apart else slices
        for value, array in zip(body.inputs[len(body.inputs) - len(slices) :], slices, strict=True):
            inner.define(value, array)
        run_ops(self.loop.early, inner)
        return tuple(inner.block(value, layout) for value, layout in self.loop.copies)

    def _written(self, stacks: Arrays, k: Index, slices: Mapping[int, jax.Array]) -> Arrays:
        """The stacks with slices of iteration ``k``, by their positions among the values that the body returns."""
        first, at = len(self.operands.carry), self._place(k)
        return tuple(
            lax.dynamic_update_index_in_dim(stack, slices[j], at, 0, allow_negative_indices=False)
            if j in slices
            else stack
            for j, stack in enumerate(stacks, first)
        )

    def _place(self, k: Index) -> Index:
        """The position of iteration ``k`` in a stack."""
        return self.length - 1 - k if self.op.params["reverse"] else k
