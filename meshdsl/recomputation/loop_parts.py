"""Divide loops over layers in two, so that the first iterations need not keep what the others keep.

    y, ys = scan f x xs               x', ys' = scan f x xs[:k]        y, ys'' = scan f x' xs[k:]
    ...                      k        ...
    a = scan g b ys                   b' = scan g b ys''               a = scan g b' ys'         (both in reverse)

A loop and all that read its stacks slice by slice in the other pass are one *family*, and are divided at the same
iteration. Parts of stacks are joined only for what else reads them. Iterations run in the same order, so the numbers
are those of the program before.

Megatron-LM leaves the number of layers that recompute to the user (``--recompute-num-layers``; Korthikanti et al. 2022,
"Reducing activation recomputation in large transformer models").
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import ceil
from typing import NamedTuple

from jax import lax

from meshdsl.ir.check import check_graph
from meshdsl.ir.graph import Graph, Op, TracedProgram, Value, walk
from meshdsl.ir.loops import PortRole, loop_ports
from meshdsl.ir.rewrite import copied, defined, fresh_ids, new_value, renumber, with_ops
from meshdsl.recomputation.levels import is_mixed, layer_loops, levels
from meshdsl.recomputation.min_cut import RematChoice, Rewrite
from meshdsl.trace.annotate import count_trips
from meshdsl.trace.passes.dce import dce

FIRST, SECOND = 0, 1
SHORTEST = 2  # iterations of a part: compilers unroll a loop of one, and merge what it computes twice


@dataclass(frozen=True)
class LoopFamily:
    """Loops over layers that are divided together, as one reads stacks of the other.

    Args:
      length: their iterations.
      forward: the forward scans by id.
      loops: ids of all of them.
    """

    length: int
    forward: Mapping[int, Op]
    loops: frozenset[int]


def loop_families(graph: Graph) -> Iterator[LoopFamily]:
    """Yields the families of loops over layers of a program."""
    for level in levels(graph):
        found = list[LoopFamily]()
        for pair in layer_loops(level):
            ids, forward = frozenset({pair.forward.id, pair.backward.id}), {pair.forward.id: pair.forward}
            for other in [each for each in found if each.loops & ids]:
                found.remove(other)
                ids, forward = ids | other.loops, {**other.forward, **forward}
            found.append(LoopFamily(pair.forward.params["length"], forward, ids))
        yield from found


class MixedChoice(NamedTuple):
    """A choice for the first iterations of loops over layers, and one for the others.

    Args:
      first: also for what is outside of divided loops.
      second: of the others.
      trips: forward scans, one of each family that is divided, with the iterations of the first part.
    """

    first: RematChoice
    second: RematChoice
    trips: tuple[tuple[int, int], ...]

    @property
    def ops(self) -> frozenset[int]:
        """Operations that run twice in either part."""
        return self.first.ops | self.second.ops

    @property
    def hosted(self) -> frozenset[int]:
        """Values that wait in the host's memory in either part."""
        return self.first.hosted | self.second.hosted

    @property
    def rewrite(self) -> Hashable:
        """What decides the program; choices that differ in nothing else are one."""
        return self.first.rewrite, self.second.rewrite, self.trips


def mixed_choice(graph: Graph, first: RematChoice, second: RematChoice, part: float) -> MixedChoice | None:
    """Returns the mixture of two choices, in loops over layers in which they differ; None if there is no such loop.

    Args:
      part: of the iterations, that follow the first choice; rounded up.
    """
    pairs = zip(first.rewrite, second.rewrite, strict=True)
    ops, spared, hosted = (a ^ b for a, b in pairs)
    trips = list[tuple[int, int]]()
    for family in (each for each in loop_families(graph) if each.length >= 2 * SHORTEST):
        bodies = [op.bodies[0] for op in family.forward.values()]
        inside = {v.id for body in bodies for v in defined(body)}
        differ = any(op.id in ops for body in bodies for _, op in walk(body))
        if differ or not inside.isdisjoint(spared | hosted):
            k = min(max(SHORTEST, ceil(part * family.length)), family.length - SHORTEST)
            trips.append((min(family.forward), k))
    return MixedChoice(first, second, tuple(trips)) if trips else None


@dataclass(frozen=True)
class DividedProgram:
    """A program whose loops over layers are divided.

    Args:
      program: the rewritten program.
      trips: by the ids of values in the bodies of divided loops in the program before, the iterations of the first part
        and of both.
      ops: for each part, by the id of an operation in the program before, that in the program after. Operations outside
        of divided loops belong to the first part.
      values: the same of values.
    """

    program: TracedProgram
    trips: Mapping[int, tuple[int, int]]
    ops: tuple[Mapping[int, int], Mapping[int, int]]
    values: tuple[Mapping[int, int], Mapping[int, int]]

    def rewrite(self, choice: MixedChoice) -> Rewrite:
        """Returns what decides the program in which each part follows its choice."""
        parts = choice.first, choice.second
        return (
            _renamed(self.ops, [each.ops for each in parts]),
            _renamed(self.values, [each.spared for each in parts]),
            _renamed(self.values, [each.hosted for each in parts]),
        )


def _renamed(numbers: Sequence[Mapping[int, int]], ids: Sequence[frozenset[int]]) -> frozenset[int]:
    return frozenset(known[i] for known, part in zip(numbers, ids, strict=True) for i in part if i in known)


def dividing(program: TracedProgram, trips: Mapping[int, int]) -> DividedProgram:
    """Returns the program in which loops over layers are divided.

    Args:
      trips: by the id of a forward scan, the iterations of its first part, for its whole family. Others are left.
    """
    graph = copied(program.graph)
    divider = _Divider(graph, trips)
    made = dce(divider.level(graph))
    count_trips(made)
    ops, alive = {op.id: op for _, op in walk(made)}, {id(v) for v in defined(made)}
    renumber(made)
    check_graph(made)
    first, second = (
        (
            {i: ops[n].id for i, n in part.ops.items() if n in ops},
            {i: v.id for i, v in part.values.items() if id(v) in alive},
        )
        for part in divider.parts
    )
    return DividedProgram(replace(program, graph=made), divider.inside, (first[0], second[0]), (first[1], second[1]))


@dataclass
class _Places:
    """What has become of operations and values, by their ids in the program before: ids, and the values themselves."""

    ops: dict[int, int]
    values: dict[int, Value]


_Pieces = dict[tuple[int, int], tuple[Value, ...]]  # by the id of a stack and the iterations of the first part


class _Divider:
    """Divides the loops of levels.

    Attributes:
      parts: what the first and the second parts consist of.
      inside: by the ids of values in divided loops, the iterations of the first part and of both.
    """

    def __init__(self, graph: Graph, trips: Mapping[int, int]) -> None:
        found = ((family, next((trips[i] for i in family.forward if i in trips), 0)) for family in loop_families(graph))
        self._trips = {i: k for family, k in found if 0 < k < family.length for i in family.loops}
        self.inside: dict[int, tuple[int, int]] = {}
        ops = {op.id: op.id for _, op in walk(graph)}
        self.parts = _Places(ops, {v.id: v for v in defined(graph)}), _Places({}, {})
        self._ids, self._op_ids = fresh_ids(graph), count(1 + max(ops))

    def level(self, graph: Graph) -> Graph:
        """Returns a level with its loops divided, and those of the levels inside."""
        ops, pieces = list[Op](), _Pieces()
        for op in graph.ops:
            if op.id in self._trips:
                ops += self._divided(op, self._trips[op.id], pieces)
            else:
                ops.append(replace(op, bodies=tuple(map(self.level, op.bodies))) if is_mixed(op) else op)
        return with_ops(graph, ops)

    def _divided(self, op: Op, first: int, pieces: _Pieces) -> Iterator[Op]:
        """Yields a loop in two parts, with slices of what they read and joined stacks.

        Args:
          pieces: those that are there, to which its own are added for the loops that follow.
        """
        sizes, ports = (first, op.params["length"] - first), list(loop_ports(op))
        for port in ports:
            x = op.inputs[port.operand] if port.role is PortRole.SLICE else None
            if isinstance(x, Value) and (x.id, first) not in pieces:
                pieces[x.id, first] = self._pieces(x, sizes)
                starts = zip((0, first), pieces[x.id, first], strict=True)
                yield from (_slice(next(self._op_ids), op, x, start, piece) for start, piece in starts)
        stacks = [op.outputs[port.result] for port in ports if port.role is PortRole.STACK]
        pieces |= {(stack.id, first): self._pieces(stack, sizes) for stack in stacks}
        order = (SECOND, FIRST) if op.params["reverse"] else (FIRST, SECOND)
        between = {
            port.result: new_value(op.outputs[port.result], self._ids) for port in ports if port.role is PortRole.CARRY
        }
        for part in order:
            inputs, outputs = list(op.inputs), list(op.outputs)
            for port in ports:
                if port.role is PortRole.SLICE and isinstance(x := op.inputs[port.operand], Value):
                    inputs[port.operand] = pieces[x.id, first][part]
                elif port.role is PortRole.STACK:
                    outputs[port.result] = pieces[op.outputs[port.result].id, first][part]
                elif port.role is PortRole.CARRY and part == order[0]:
                    outputs[port.result] = between[port.result]
                elif port.role is PortRole.CARRY:
                    inputs[port.operand] = between[port.result]
            loop = replace(
                op, inputs=tuple(inputs), outputs=tuple(outputs), params={**op.params, "length": sizes[part]}
            )
            yield self._own(loop, self.parts[part], (first, sum(sizes)))
        for stack in stacks:
            yield _joined(next(self._op_ids), op, pieces[stack.id, first], stack)

    def _pieces(self, stack: Value, sizes: tuple[int, ...]) -> tuple[Value, ...]:
        return tuple(Value(next(self._ids), (n, *stack.shape[1:]), stack.dtype) for n in sizes)

    def _own(self, loop: Op, part: _Places, trips: tuple[int, int]) -> Op:
        """Returns a loop with operations and values of its own, which are noted."""
        (body,) = loop.bodies
        made = copied(body)
        for old, new in zip(defined(body), defined(made), strict=True):
            part.values[old.id] = new
            new.id = next(self._ids)
            self.inside[old.id] = trips
        for (_, before), (_, after) in zip(walk(body), walk(made), strict=True):
            after.id = part.ops[before.id] = next(self._op_ids)
        return replace(loop, id=next(self._op_ids), bodies=(made,))


def _slice(id: int, op: Op, x: Value, start: int, piece: Value) -> Op:
    """Returns the operation that reads a piece of a stack for a loop."""
    starts, stops = (start, *(0 for _ in x.shape[1:])), (start + piece.shape[0], *x.shape[1:])
    params = {"start_indices": starts, "limit_indices": stops, "strides": None}
    return Op(id, "slice", lax.slice_p, params, (x,), (piece,), op.source, op.phase, op.scope, manual=op.manual)


def _joined(id: int, op: Op, pieces: tuple[Value, ...], stack: Value) -> Op:
    """Returns the operation that joins the pieces of a loop's stack."""
    inputs, params = tuple(pieces), {"dimension": 0}
    return Op(
        *(id, "concatenate", lax.concatenate_p, params, inputs, (stack,), op.source, op.phase, op.scope),
        manual=op.manual,
    )
