"""Stacks of layers that the user laid out split by layer, and a loop reads layer by layer.

    params/layers  float32[layers, d, d]   pinned  x=S(0)
    scan over params/layers: every device needs every layer, one per trip

To gather the whole stack before the loop is one collective, so it would often be the fastest plan,
but who splits a stack by layer says that no device is to hold all of it. So the loop reads it
split over the same axes along another dim: the stack is exchanged once, all-to-all, and each trip
gathers, or sums over, one layer. Nor is it whole on its way there, or where others read it, if they have
rows that split it. Stacks of vectors are small, and free.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from meshdsl.ir import Graph, Op, Program, Value
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.move import Move
from meshdsl.layouts.placement import Split
from meshdsl.planner.numbering import named
from meshdsl.planner.solution import Pins

_MATRIX = 2  # dims of a layer from which on it counts


@dataclass(frozen=True)
class Stack:
    """The input at ``path``, stated to lie split over ``axes`` along dim 0, as operand ``index`` of the scan ``op``.

    Args:
      values: ids of what it is on its way there, cast say.
    """

    path: str
    axes: tuple[str, ...]
    op: Op
    index: int
    values: tuple[int, ...]

    def stays_split(self, trees: Mapping[int, Sequence[Move]]) -> bool:
        """Whether no move, not even one on the way to another layout, puts all of it on a device."""
        moves = (move for value in self.values for move in trees.get(value, ()))
        return all(isinstance(move.after.on(axis), Split) for move in moves for axis in self.axes)

    def __str__(self) -> str:
        over = ",".join(self.axes)
        return f"{self.path} lies split by layer over {over}: the scan at {self.op.source} never gathers all of it"


_Stated = Mapping[int, tuple[str, tuple[str, ...]]]  # by value id: path and axes


def split_stacks(program: Program, pins: Pins, mesh: Mesh) -> list[Stack]:
    """The stacks that have to stay split over their axes along any dim."""
    if not named(program.graph, "scan"):
        return []
    leaves = zip(program.inputs, program.graph.inputs, pins.inputs, strict=True)
    split = ((leaf, value, tuple(a for a in pin.splitting(0) if mesh.axis(a) > 1)) for leaf, value, pin in leaves)
    stated = {value.id: (leaf.path, axes) for leaf, value, axes in split if axes}
    return list(_read(program.graph, stated, mesh)) if stated else []


def _read(graph: Graph, stated: _Stated, mesh: Mesh) -> Iterator[Stack]:
    if not any(op.name == "scan" for op in graph.ops):
        return
    known = dict(stated)
    for op in graph.ops:
        found = [known[x.id] for x in op.inputs if isinstance(x, Value) and x.id in known]
        known.update({v.id: found[0] for v in op.outputs if found and _passes(op, v)})
        if op.name == "scan":
            yield from _of_scan(op, known, mesh)


def _passes(op: Op, made: Value) -> bool:
    """Whether a stack stays one: it is cast or scaled."""
    return not op.bodies and [x.shape for x in op.inputs if isinstance(x, Value)] == [made.shape]


def _of_scan(op: Op, known: _Stated, mesh: Mesh) -> Iterator[Stack]:
    closed, (body,) = op.params["num_consts"] + op.params["num_carry"], op.bodies
    given = {i: known[x.id] for i, x in enumerate(op.inputs) if isinstance(x, Value) and x.id in known}
    for i, (path, axes) in given.items():
        layer = body.inputs[i].shape
        if i >= closed and len(layer) >= _MATRIX and any(n % prod(map(mesh.axis, axes)) == 0 for n in layer):
            yield Stack(path, axes, op, i, tuple(v for v, stack in known.items() if stack == (path, axes)))
    yield from _read(body, {body.inputs[i].id: stack for i, stack in given.items() if i < closed}, mesh)
