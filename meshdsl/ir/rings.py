"""Collective matmul: products that run in parts beside the hops of a gather or of a reduction, called a ring.

A product that waits for the gather of its operand, or whose result is reduced, hides neither behind other products. In
parts it does: each of the ``k`` devices of a mesh axis begins with the block that it has, and passes blocks on to its
neighbour while it multiplies.

    gather, then product      links    [    gather    ]
                              compute                  [        product        ]
    ring                      links    [ hop ][ hop ][ hop ]
                              compute  [part ][part ][part ][part ]

Blocks are those of one *factor* of the product, a letter of its einsum ``b m k, b k n -> b m n``:

    gathered, a free or batch dim   a part is a block of the result
    gathered, a contracted dim      parts are summed
    reduced, any dim of the result  a part is a block of the result; sums travel, and each device adds to them

On a link that sends both ways around at once, blocks go both ways: two arrive in each step, in half as many steps.

``k - 1`` hops of a block send the bytes of the gather or reduce-scatter. Several products that read one gathered copy
share its ring, if their other operands are there when the first one runs; all others find the whole copy in memory.
A constraint that states a layout, or a transpose in front of a reduction, does not separate a product from its ring.

Reference: S. Wang et al., "Overlap communication with dependent computation via decomposition in large deep learning
models", ASPLOS 2023.
"""

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import numpy as np

from meshdsl.ir.graph import Graph, Op, Value, walk
from meshdsl.ir.prefetch import pipelined_loops
from meshdsl.ir.rewrite import values
from meshdsl.ir.solution import Ring, Solution
from meshdsl.layouts.collective_cost import hop_seconds, ring_ways
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import Partial, Placement, Split
from meshdsl.layouts.reshard import ReshardStep

_SUM_BYTES = 4  # of the shortest floats in which parts are summed
_LEAST_BITS = 16  # of floats that are passed on; backends send narrower ones in ways of their own
_BETWEEN = ("constrain", "transpose")  # a product and its reduction
Step = tuple[int, Layout]  # a value id, and the layout that a reshard step leads to
Use = tuple[int, int, bool]  # position of an operation, operand, and whether it needs all of it at once


class Factor(NamedTuple):
    """A letter of a product's einsum: its dim in each operand and in the result, None where it has none."""

    left: int | None
    right: int | None
    result: int | None


def factors(op: Op) -> tuple[Factor, ...]:
    """Returns the factors of a ``dot_general``: batch dims, free dims of both operands, contracted dims."""
    contracted, batch = op.params["dimension_numbers"]
    free = [
        [d for d in range(len(x.shape)) if d not in (*contracted[side], *batch[side])]
        for side, x in enumerate(op.inputs)
    ]
    first, second = len(batch[0]), len(batch[0]) + len(free[0])
    return (
        *(Factor(left, right, i) for i, (left, right) in enumerate(zip(*batch, strict=True))),
        *(Factor(d, None, i) for i, d in enumerate(free[0], first)),
        *(Factor(None, d, i) for i, d in enumerate(free[1], second)),
        *(Factor(left, right, None) for left, right in zip(*contracted, strict=True)),
    )


@dataclass(frozen=True)
class ProductParts:
    """A product that runs in parts.

    Args:
      op: the product.
      cut: the factor of which a part has one block.
      port: the operand whose blocks arrive; None where sums of the result travel.
    """

    op: Op
    cut: Factor
    port: int | None

    @property
    def dtype(self) -> Any:
        """In which the result is kept while parts arrive: short floats that are summed are so in 32 bits."""
        result = self.op.outputs[0].dtype
        return np.dtype(np.float32) if self.cut.result is None and result.itemsize < _SUM_BYTES else result


@dataclass(frozen=True)
class ProductRing:
    """A ring with all that follows from a solution.

    Args:
      ring: as the solution has it.
      value: what is gathered or reduced.
      step: the reshard step that it replaces.
      products: that run in parts, in program order; all run where the first one stands.
      between: operations between the products and what travels: constraints on a gathered copy, or constraints and
        transposes of what is reduced.
      keeps: other operations read the gathered copy as well.
      early: steps that make copies of other operands, which are read before they are needed.
      devices: of its axis.
      ways: in which blocks go around at once.
      hop: seconds in which a block, or one each way, is passed on.
      workspace: bytes that a device needs beside operands, results and the gathered or unreduced copy.
    """

    ring: Ring
    value: Value
    step: ReshardStep
    products: tuple[ProductParts, ...]
    between: tuple[Op, ...]
    keeps: bool
    early: frozenset[Step]
    devices: int
    ways: int
    hop: float
    workspace: int

    @property
    def axis(self) -> str:
        """The mesh axis along which blocks are passed on."""
        return self.step.axes[0]

    @property
    def dim(self) -> int:
        """The dim of the gathered operand, or of what is reduced, that blocks divide."""
        return _split_dim(self.step.source if self.gathers else self.step.target)

    @property
    def gathers(self) -> bool:
        """Whether blocks of an operand travel, not sums of a result."""
        return self.step.kind == "all-gather"

    @property
    def ops(self) -> tuple[Op, ...]:
        """All operations that run with the first product."""
        return (*self.between, *(each.op for each in self.products))

    def excludes(self, other: "ProductRing") -> bool:
        """Whether a plan can have only one of both: they share a product, or one reads early what the other makes."""
        steps = [(ring.value.id, ring.step.after) for ring in (self, other)]
        shared = set(self.ring.products) & set(other.ring.products)
        return bool(shared) or steps[0] in other.early or steps[1] in self.early

    @property
    def hops(self) -> int:
        """How often a block is passed on."""
        return self.devices - 1

    @property
    def reach(self) -> tuple[int, ...]:
        """Per way around, how many devices away the last block comes from, or goes to."""
        return (self.hops,) if self.ways == 1 else (self.devices // 2, self.hops // 2)

    @property
    def schedule(self) -> tuple[tuple[bool, int], ...]:
        """Per step, whether blocks are passed on, and how many parts are computed meanwhile."""
        far, near = self.reach[0], self.reach[-1]
        if self.ways == 1:
            steps = [*[(True, 1)] * far, (False, 1)]
        else:
            steps = [(True, 1), *[(True, 2)] * (far - 1), (False, 1 + (far == near))]
        return tuple(steps if self.gathers else reversed(steps))

    @property
    def seconds(self) -> float:
        """Of a hop; of two that go both ways at once, half of it."""
        return self.hop * self.reach[0] / self.hops

    def overlapped(self, part: float) -> float:
        """Returns the seconds of the ring if a part takes as many."""
        return sum(max(self.hop * passes, part * parts) for passes, parts in self.schedule)

    @property
    def bytes(self) -> int:
        """Bytes that one device sends per hop."""
        return self.step.bytes // self.hops


def chosen_rings(graph: Graph, solution: Solution) -> tuple[ProductRing, ...]:
    """Returns the rings of a solution, in program order; those that are not possible are left out."""
    if not solution.rings:
        return ()
    chosen = set(solution.rings)
    return tuple(ring for ring in possible_rings(graph, solution) if ring.ring in chosen)


def possible_rings(graph: Graph, solution: Solution) -> list[ProductRing]:
    """Returns every ring that a solution could have, in program order; a product may be in several.

    Of the products that may share a ring, it has the first one, the first two, and so on: where a hop is shorter than a
    part, more parts do not help.

    Collectives that are sent in buckets, or beside other iterations of a loop, are in none.
    """
    taken = {step for bucket in solution.buckets for step in bucket.steps}
    loops = pipelined_loops(graph, solution).values()
    taken |= {(value.id, step.after) for loop in loops for value, step in loop.steps}
    graphs = [graph, *(body for _, op in walk(graph) for body in op.bodies)]
    return [ring for one in graphs for ring in _GraphRings(one, solution, taken).find()]


class _GraphRings:
    """The rings of one graph without its bodies.

    Attributes:
      ready: per value id, the position of its producer.
      uses: per value id, where it is read, as (position, operand, layout), in order; the operand of a bucket is -1.
      bucketed: per step that is sent in a bucket, the position in front of which that is.
    """

    def __init__(self, graph: Graph, solution: Solution, taken: set[Step]) -> None:
        self.graph, self.solution, self.taken = graph, solution, taken
        made = [*graph.inputs, *(v for op in graph.ops for v in op.outputs)]
        self.values = [v for v in made if any(map(_is_candidate, solution.trees.get(v.id, ())))]
        ops = graph.ops if self.values else ()
        self.producers = {v.id: op for op in ops for v in op.outputs}
        self.ready = dict.fromkeys((v.id for v in graph.inputs), -1)
        self.ready |= {v.id: at for at, op in enumerate(ops) for v in op.outputs}
        self.uses = defaultdict[int, list[tuple[int, int, Layout]]](list)
        for at, op in enumerate(ops):
            for i, x in enumerate(op.inputs):
                if isinstance(x, Value):
                    self.uses[x.id].append((at, i, solution.uses[op.id, i]))
        self.bucketed: dict[Step, int] = {}
        places = {op.id: at for at, op in enumerate(ops)} if solution.buckets else {}
        for bucket in (bucket for bucket in solution.buckets if bucket.before in places):
            for value, layout in bucket.steps:
                self.bucketed[value, layout] = places[bucket.before]
                insort(self.uses[value], (places[bucket.before], -1, layout), key=itemgetter(0, 1))

    def find(self) -> Iterator[ProductRing]:
        """Yields the rings in program order of the values."""
        for value in self.values:
            is_float = jax.dtypes.issubdtype(value.dtype, np.floating)  # bfloat16 is one, a key is none
            if not is_float or 8 * value.itemsize < _LEAST_BITS:
                continue
            for step in self.solution.trees[value.id]:
                if _is_candidate(step) and (value.id, step.after) not in self.taken:
                    yield from self._gathered(value, step) if step.kind == "all-gather" else self._reduced(value, step)

    def _ring(
        self,
        value: Value,
        step: ReshardStep,
        products: list[ProductParts],
        between: Iterable[Op] = (),
        keeps: bool = False,
        early: Iterable[Step] = (),
    ) -> ProductRing:
        (axis,), results = step.axes, [each.op.outputs[0] for each in products]
        devices = self.solution.mesh.axis(axis)
        ways = min(ring_ways(axis, self.solution.mesh), devices - 1)
        blocks = 2 * ways if keeps else max(0, 1 + 2 * ways - devices)  # that travel, beyond those of a whole copy
        sums = (self._elements(v) * (p.dtype.itemsize - v.itemsize) for p, v in zip(products, results, strict=True))
        ahead = (self._elements(v) * v.itemsize for v in results[1:])
        return ProductRing(
            Ring(value.id, step.after, tuple(each.op.id for each in products)),
            value,
            step,
            tuple(products),
            tuple(between),
            keeps,
            frozenset(early),
            devices,
            ways,
            hop=hop_seconds(axis, step.bytes / (devices - 1), self.solution.mesh),
            workspace=blocks * step.bytes // (devices - 1) + int(sum(sums) + sum(ahead)),
        )

    def _elements(self, value: Value) -> int:
        return prod(self.solution.layouts[value.id].local_shape(value.shape, self.solution.mesh.sizes_by_name))

    def _gathered(self, value: Value, step: ReshardStep) -> Iterator[ProductRing]:
        """The rings of the first of the products that read a gathered copy, of the first two, and so on."""
        readers, constraints = self._readers(value, step.after), list[Op]()
        found, start, waits = list[tuple[ProductParts, set[Step]]](), 0, False
        while readers:
            at, port, is_whole = readers.pop(0)
            op = self.graph.ops[at]
            if any(other == at for other, *_ in readers):  # it reads the copy through a constraint as well
                readers, is_whole = [(i, operand, whole or i == at) for i, operand, whole in readers], True
            if not is_whole and op.name == "constrain" and self.solution.layouts[op.outputs[0].id] == step.after:
                constraints.append(op)
                readers = sorted([*readers, *self._readers(op.outputs[0], step.after)])
                continue
            parts = None if is_whole else _parts_of_reader(op, port, step)
            if not found:
                if parts is None:  # it needs the whole copy first
                    return
                found, start = [(parts, set())], at
                continue
            copies = None if parts is None else self._copies_at(start, op, port)
            if parts is None or copies is None:
                waits = True
            else:
                found.append((parts, copies))
        for count in range(1, len(found) + 1):
            products, early = [parts for parts, _ in found[:count]], set[Step]().union(*(x for _, x in found[:count]))
            yield self._ring(value, step, products, constraints, waits or count < len(found), early)

    def _readers(self, value: Value, layout: Layout) -> list[Use]:
        """Who reads a copy in a layout, or one that is made from it, in order; the latter read it whole."""
        reached = {layout}
        for each in self.solution.trees.get(value.id, ()):
            if each.before in reached:
                reached.add(each.after)
        uses = [use for use in self.uses[value.id] if use[2] in reached]
        count = Counter(at for at, *_ in uses)
        return [(at, port, each != layout or count[at] > 1) for at, port, each in uses]

    def _copies_at(self, start: int, op: Op, port: int) -> set[Step] | None:
        """The steps that make the other operand of a product, if that can be at a position; else None."""
        other = op.inputs[1 - port]
        if not isinstance(other, Value) or self.ready[other.id] >= start:
            return None
        layout, found = self.solution.uses[op.id, 1 - port], set[Step]()
        while layout != self.solution.layouts[other.id]:
            if self.bucketed.get((other.id, layout), start) > start:
                return None
            found.add((other.id, layout))
            layout = next(each.before for each in self.solution.trees[other.id] if each.after == layout)
        return found

    def _reduced(self, value: Value, step: ReshardStep) -> Iterator[ProductRing]:
        """The ring of a product whose result nobody reads before its reduction."""
        alone = [each for each in self.solution.trees[value.id] if each.before == step.before] == [step]
        if not alone or self.solution.layouts[value.id] != step.before or self._readers_of_own(value):
            return
        dim, between, op = _split_dim(step.target), list[Op](), self.producers.get(value.id)
        while op is not None and op.name in _BETWEEN:
            (source,) = op.inputs
            own = isinstance(source, Value) and self.solution.layouts[source.id]
            if not own or self.solution.trees.get(source.id) or self.solution.uses[op.id, 0] != own:
                return
            if len(self.uses[source.id]) > 1:
                return
            dim, between = op.params["permutation"][dim] if op.name == "transpose" else dim, [op, *between]
            op = self.producers.get(source.id)
        if op is None or not _is_product(op):
            return
        cut = next(each for each in factors(op) if each.result == dim)
        yield self._ring(value, step, [ProductParts(op, cut, None)], between)

    def _readers_of_own(self, value: Value) -> bool:
        return any(layout == self.solution.layouts[value.id] for _, _, layout in self.uses[value.id])


def _is_candidate(step: ReshardStep) -> bool:
    plain = step.kind == "all-gather" or (step.kind == "reduce-scatter" and step.source == Partial("sum"))
    return plain and len(step.axes) == 1 and step.bytes > 0 and not step.format


def _parts_of_reader(op: Op, port: int, step: ReshardStep) -> ProductParts | None:
    """A product that reads a gathered copy, in parts; None if it is no product."""
    if not _is_product(op):
        return None
    return ProductParts(op, next(each for each in factors(op) if each[port] == _split_dim(step.source)), port)


def _is_product(op: Op) -> bool:
    return op.name == "dot_general" and len(list(values(op.inputs))) == len(op.inputs)


def _split_dim(placement: Placement) -> int:
    if isinstance(placement, Split) and isinstance(placement.dim, int):
        return placement.dim
    raise TypeError(f"{placement} names no numbered dim")
