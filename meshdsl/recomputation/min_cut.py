"""Which operations to run twice, by a minimum cut, if keeping a value costs so many seconds per byte.

A value of the forward pass that the backward pass needs is kept, at the price of the memory that it takes, or computed
again, at the price of its operation; and then the operands of that operation are needed. So chains are as deep as pays:

    x --mul--> h --tanh--> y        needed: y        price of memory    kept    runs twice
    keeping x, h, y:  4 MB each                      0                  y
    mul 1 us, tanh 2 us, x is a parameter            0.6 us / MB        h       tanh
                                                     2 us / MB                  mul, tanh

This is a minimum s-t cut (Ford and Fulkerson 1956). An edge from a value to its operation has the price of keeping the
value, one from the operation to the sink that of running it again, and edges from an operation to its operands, as from
the source to what is needed, are never cut. Values on the source's side are needed; operations there run twice. The
same network, without layouts, is in PyTorch's AOTAutograd (min-cut rematerialization, H. He and S. Yu, 2022).

Operations of a loop over layers belong to one network with those outside of it: a slice or a constant of the loop is
needed if the array outside is. A carry can be kept, as one more stack, and not be computed again.

Where a value can wait in the host's memory, and its transfers take less than it is worth to keep it on the device, they
are the price of keeping it.

Any other scan that runs twice, as one over time inside of a layer, runs only as far as its results are needed: each of
them is kept or computed again by itself, and the operations of its body have their own prices.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from meshdsl.ir.graph import Graph, Op, Value
from meshdsl.ir.index import producers
from meshdsl.ir.loops import ABSENT, PortRole, loop_ports
from meshdsl.ir.rewrite import value_ids, values
from meshdsl.recomputation.levels import LayerLoops, layer_loops, levels, reads_residual
from meshdsl.trace.annotate import FORWARD, OPTIMIZER

_SOURCE, _SINK = 0, 1
_CAPACITY_LIMIT = 1 << 29  # of an edge: the solver has 32-bit integers


class RematPrices(NamedTuple):
    """What the two choices cost, in seconds per step.

    Args:
      kept: by value id, to keep a value for the backward pass; one in a loop over layers for all iterations. Infinite
        for a view, which is its operand.
      again: by op id, to run an operation a second time, all iterations counted.
      fused: ids of values that take no memory, as views or fused with what reads them: their operands are kept instead.
    """

    kept: Mapping[int, float]
    again: Mapping[int, float]
    fused: frozenset[int] = frozenset()


# ids of operations that run twice, of their results that are kept, and of values in the host's memory
Rewrite = tuple[frozenset[int], frozenset[int], frozenset[int]]


class RematChoice(NamedTuple):
    """What is computed again and what is kept.

    Args:
      ops: ids of the operations that run twice.
      kept: ids of the values that the backward pass, or a copy of an operation, reads.
      spared: ids of the results of scans among ``ops`` that are not computed again.
      parts: ids of what the second runs consist of: these operations, and in place of scans those of their bodies.
      hosted: ids of the values among ``kept`` that wait in the host's memory.
    """

    ops: frozenset[int]
    kept: frozenset[int]
    spared: frozenset[int]
    parts: frozenset[int]
    hosted: frozenset[int] = frozenset()

    @property
    def rewrite(self) -> Rewrite:
        """What decides the program; choices that differ in nothing else are one."""
        return self.ops, self.spared, self.hosted


def cheapest_recomputation(graph: Graph, ops: Collection[int], prices: RematPrices) -> RematChoice:
    """Returns the cheapest choice, with as few operations that run twice as such a choice can have.

    Args:
      ops: ids of the operations that may run twice.
    """
    network = _Network(frozenset(ops), prices)
    for level in levels(graph):
        network.add_level(level)
    return network.cut()


@dataclass
class _Network:
    """The network: nodes of values and of operations, and capacities of edges."""

    ops: frozenset[int]
    prices: RematPrices
    nodes: dict[tuple[str, int], int] = field(default_factory=dict)
    edges: dict[tuple[int, int], float] = field(default_factory=dict)
    numbers: "count[int]" = field(default_factory=lambda: count(2))
    order: list[Op] = field(default_factory=list)

    def add_level(self, level: Graph) -> None:
        """Adds the forward pass of a level, and what its backward pass needs."""
        made, loops = producers(level), list(layer_loops(level))
        free = kept_anyway(level)
        for op in level.ops:
            if op.phase == FORWARD:
                self._add(op, free)
        stacks = {id for pair in loops for id in stack_ids(pair)}
        for op in level.ops:
            for x in values(op.inputs) if reads_residual(op) else ():
                if x.id in made and made[x.id].phase == FORWARD and x.id not in stacks:
                    self._need(x)
        inside = dict[int, Op]()
        for pair in loops:
            for residual in pair.residuals:
                self._need(residual.value)
            inside[pair.forward.id] = pair.forward
        for forward in inside.values():
            self._add_layer(forward, stacked_anyway(forward, loops, level, stacks), level)

    def _add(self, op: Op, free: Collection[int]) -> None:
        """Adds an operation; values in ``free`` are kept without a price."""
        self.order.append(op)
        if op.id in self.ops and op.name == "scan":
            self._add_scan(op, free)
            return
        again = self._node("op", op.id) if op.id in self.ops else _SINK
        for v in op.outputs:
            price = 0.0 if v.id in free else self.prices.kept.get(v.id, 0.0)
            self._connect(self._value(v.id), again, 0.0 if again == _SINK and price == inf else price)
        if op.id in self.ops:
            self._connect(again, _SINK, self.prices.again.get(op.id, 0.0))
            for x in values(op.inputs):
                self._connect(again, self._value(x.id), inf)

    def _add_scan(self, op: Op, free: Collection[int]) -> None:
        """Adds a scan of which parts can run twice."""
        again, body = self._node("op", op.id), op.bodies[0]
        for port in loop_ports(op):
            made = body.returned[port.outputs[0][1]] if port.outputs else None
            if port.result != ABSENT:
                v = op.outputs[port.result]
                result = self._node("result", v.id)
                self._connect(self._value(v.id), result, 0.0 if v.id in free else self.prices.kept.get(v.id, 0.0))
                self._connect(result, again, inf)
                if isinstance(made, Value):
                    self._connect(result, self._value(made.id), inf)
            for _, i in port.inputs:
                for x in (op.inputs[port.operand], made if port.role is PortRole.CARRY else None):
                    if isinstance(x, Value):
                        self._connect(self._value(body.inputs[i].id), self._value(x.id), inf)
        for each in body.ops[:-1]:
            part = self._node("part", each.id)
            self._connect(part, _SINK, self.prices.again.get(each.id, 0.0))
            for v in each.outputs:
                self._connect(self._value(v.id), part, inf)
            for x in values(each.inputs):
                self._connect(part, self._value(x.id), inf)

    def _add_layer(self, forward: Op, free: Collection[int], level: Graph) -> None:
        """Adds the body of a forward scan over layers."""
        body = forward.bodies[0]
        for op in body.ops[:-1]:
            self._add(op, free)
        for port in loop_ports(forward):
            for _, i in port.inputs:
                inside, outside = body.inputs[i], forward.inputs[port.operand]
                if port.role is PortRole.CARRY:
                    price = 0.0 if inside.id in free else self.prices.kept.get(inside.id, 0.0)
                    self._connect(self._value(inside.id), _SINK, price)
                elif isinstance(outside, Value):
                    self._connect(self._value(inside.id), self._value(outside.id), inf)

    def _need(self, x: Value) -> None:
        self._connect(_SOURCE, self._value(x.id), inf)

    def _value(self, id: int) -> int:
        return self._node("value", id)

    def _node(self, kind: str, id: int) -> int:
        if (kind, id) not in self.nodes:
            self.nodes[kind, id] = next(self.numbers)
        return self.nodes[kind, id]

    def _connect(self, start: int, end: int, capacity: float) -> None:
        if capacity > 0:
            self.edges[start, end] = capacity

    def cut(self) -> RematChoice:
        """Returns what the minimum cut means: on the source's side are values that are needed and what runs twice."""
        finite = sum(c for c in self.edges.values() if c < inf)
        if not finite:
            return RematChoice(*(frozenset[int](),) * 4)
        scale = _CAPACITY_LIMIT / 2 / finite
        capacities = [_CAPACITY_LIMIT if c == inf else max(1, int(c * scale)) for c in self.edges.values()]
        rows, columns = zip(*self.edges, strict=True)
        count = next(self.numbers)
        network = csr_array((np.array(capacities, np.int32), (rows, columns)), shape=(count, count))
        residual = network - maximum_flow(network, _SOURCE, _SINK).flow
        residual.eliminate_zeros()
        reached = set(breadth_first_order(residual, _SOURCE, return_predecessors=False).tolist())
        cut = {start for start, end in self.edges if start in reached and end not in reached}

        def ids(kind: str, among: Collection[int]) -> set[int]:
            return {id for (each, id), node in self.nodes.items() if each == kind and node in among}

        ops, results = self._without_fused(ids("op", reached)), ids("result", reached)
        scans = [op for op in self.order if op.id in ops and op.name == "scan"]
        spared = frozenset(v.id for op in scans for v in op.outputs if v.id not in results)
        parts = frozenset(ids("part", reached)).union(ops - {op.id for op in scans})
        return RematChoice(ops, frozenset(ids("value", cut)), spared, parts)

    def _without_fused(self, ops: set[int]) -> frozenset[int]:
        """Operations without those that are fused with backward ones and read nothing that is computed again.

        One that a copy reads is copied as well: a barrier in front of the copy would have it kept.
        """
        left, made, read = set[int](), set[int](), set[int]()
        for op in self.order:
            is_fused = all(v.id in self.prices.fused for v in op.outputs)
            if op.id in ops and not (is_fused and made.isdisjoint(value_ids(op.inputs))):
                left.add(op.id)
                made.update(v.id for v in op.outputs)
        for op in reversed(self.order):
            if op.id in left or (op.id in ops and not read.isdisjoint(v.id for v in op.outputs)):
                left.add(op.id)
                read.update(value_ids(op.inputs))
        return frozenset(left)


def stack_ids(pair: LayerLoops) -> set[int]:
    """Returns the ids of the stacks that a backward scan reads slice by slice, as values outside."""
    body = pair.forward.bodies[0]
    read = {residual.value.id for residual in pair.residuals}
    return {
        pair.forward.outputs[port.result].id
        for port in loop_ports(pair.forward)
        if port.role is PortRole.STACK and getattr(body.returned[port.outputs[0][1]], "id", -1) in read
    }


def kept_anyway(level: Graph) -> set[int]:
    """Returns the ids of values that live on without the backward pass: for the optimizer, results, a checkpoint."""
    return {
        id
        for op in level.ops
        if op.phase == OPTIMIZER or op.name == "return" or not (op.phase == FORWARD or reads_residual(op))
        for id in value_ids(op.inputs)
    } | {v.id for op in level.ops if op.name == "constant" for v in op.outputs}


def stacked_anyway(forward: Op, loops: Collection[LayerLoops], level: Graph, stacks: Collection[int]) -> set[int]:
    """Returns the ids of values in a forward scan whose stacks are read by more than backward scans, slice by slice."""
    body = forward.bodies[0]
    backward = {pair.backward.id for pair in loops if pair.forward is forward}
    free = {residual.value.id for pair in loops if pair.forward is forward for residual in pair.residuals}
    others = {id for op in level.ops if op.id not in backward for id in value_ids(op.inputs)}
    found = set[int]()
    for port in loop_ports(forward):
        x = body.returned[port.outputs[0][1]] if port.role is PortRole.STACK else None
        if isinstance(x, Value):
            stack = forward.outputs[port.result].id
            if stack in others or x.id not in free:
                found.add(x.id)
    return found
