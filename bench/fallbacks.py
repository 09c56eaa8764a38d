"""Finds the operations whose operands a plan gathers because no rule allows shards, and what that costs."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshdsl.ir.graph import Graph, Op, TracedProgram, Value, walk
from meshdsl.ir.solution import Solution
from meshdsl.layouts.placement import B, Split
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.rules import rows_of


@dataclass(frozen=True)
class Fallback:
    """An operation that is replicated although its operands were sharded.

    Args:
      name: the operation's name.
      source: its source line.
      bytes: bytes that one device sends per step to gather the operands.
      uneven: whether a rule allows the operands' shards, but a length does not divide over the devices.
    """

    name: str
    source: str
    bytes: int
    uneven: bool


def fallbacks(program: TracedProgram, solution: Solution) -> Iterator[Fallback]:
    """Yields the replicated operations that needed a gathered operand because no signature fits their shapes."""
    smallest_axis = min(k for k in solution.mesh.sizes if k > 1)
    for graph, op in walk(program.graph):
        chosen = solution.rows.get(op.id, ())
        replicated = chosen and all(placed is B for row in chosen for placed in row.inputs)
        if replicated and _resharded(op, solution) and not any(_splits(row, op, smallest_axis) for row in rows_of(op)):
            yield Fallback(op.name, str(op.source), _bytes_sent(op, graph, solution), _uneven(op, solution))


def _resharded(op: Op, solution: Solution) -> bool:
    """Whether an operand is used in another layout than its producer's (scalars cannot be split)."""
    return any(x.shape and solution.layouts[x.id] != solution.uses[op.id, i] for i, x in _operands(op))


def _uneven(op: Op, solution: Solution) -> bool:
    """Whether a signature takes an operand split as its producer left it."""
    produced = {(i, placed) for i, x in _operands(op) for _, placed in solution.layouts[x.id].placements}
    return any((i, p) in produced for row in rows_of(op) for i, p in enumerate(row.inputs) if isinstance(p, Split))


def _bytes_sent(op: Op, graph: Graph, solution: Solution) -> int:
    """Bytes of all reshard steps on the paths to the layouts in which the operands are used."""
    steps = {(x.id, step.after): step for _, x in _operands(op) for step in solution.trees.get(x.id, ())}
    needed = {(x.id, solution.uses[op.id, i]) for i, x in _operands(op)}
    for x, layout in list(needed):
        while (x, layout) in steps:
            layout = steps[x, layout].before
            needed.add((x, layout))
    return graph.trips * sum(steps[key].bytes for key in needed if key in steps)


def _operands(op: Op) -> Iterator[tuple[int, Value]]:
    return ((i, x) for i, x in enumerate(op.inputs) if isinstance(x, Value))


def _splits(row: Signature, op: Op, devices: int) -> bool:
    """Whether a signature splits a dim of ``op`` into equal blocks."""
    ports = zip((*row.inputs, *row.outputs), (*op.inputs, *op.outputs), strict=True)
    lengths = [x.shape[int(p.dim)] for p, x in ports if isinstance(p, Split)]
    return bool(lengths) and all(n % devices == 0 for n in (*lengths, row.size))
