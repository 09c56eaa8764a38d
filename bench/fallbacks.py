"""Operations that a plan gathers for want of a rule, and what that costs."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshdsl.ir.graph import Graph, Op, TracedProgram, Value, walk
from meshdsl.ir.solution import Solution
from meshdsl.layouts.placement import B, Split
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.rules import rows_of


@dataclass(frozen=True)
class Fallback:
    """An operation that runs the same everywhere.

    Args:
      bytes: what one device sends per step to bring its operands to all devices.
      uneven: its rule splits what was split, but a length does not divide over the devices.
    """

    name: str
    source: str
    bytes: int
    uneven: bool


def fallbacks(program: TracedProgram, solution: Solution) -> Iterator[Fallback]:
    """Operations without a row for their shapes that had an operand moved to all devices."""
    fewest = min(k for k in solution.mesh.sizes if k > 1)
    for graph, op in walk(program.graph):
        chosen = solution.rows.get(op.id, ())
        same = chosen and all(placed is B for row in chosen for placed in row.inputs)
        if same and _moved(op, solution) and not any(_splits(row, op, fewest) for row in rows_of(op)):
            yield Fallback(op.name, str(op.source), _sent(op, graph, solution), _uneven(op, solution))


def _moved(op: Op, solution: Solution) -> bool:
    """Whether it reads an array in another layout than it was made; single numbers cannot be split."""
    return any(x.shape and solution.layouts[x.id] != solution.uses[op.id, i] for i, x in _read(op))


def _uneven(op: Op, solution: Solution) -> bool:
    """Whether a row keeps an operand split as it was made."""
    held = {(i, placed) for i, x in _read(op) for _, placed in solution.layouts[x.id].placements}
    return any((i, p) in held for row in rows_of(op) for i, p in enumerate(row.inputs) if isinstance(p, Split))


def _sent(op: Op, graph: Graph, solution: Solution) -> int:
    """Bytes of all moves on the way to the layouts in which the operands are read."""
    moves = {(x.id, move.after): move for _, x in _read(op) for move in solution.trees.get(x.id, ())}
    needed = {(x.id, solution.uses[op.id, i]) for i, x in _read(op)}
    for x, layout in list(needed):
        while (x, layout) in moves:
            layout = moves[x, layout].before
            needed.add((x, layout))
    return graph.trips * sum(moves[key].bytes for key in needed if key in moves)


def _read(op: Op) -> Iterator[tuple[int, Value]]:
    return ((i, x) for i, x in enumerate(op.inputs) if isinstance(x, Value))


def _splits(row: Signature, op: Op, devices: int) -> bool:
    """Whether a row splits something of ``op``, in equal blocks."""
    ports = zip((*row.inputs, *row.outputs), (*op.inputs, *op.outputs), strict=True)
    lengths = [x.shape[int(p.dim)] for p, x in ports if isinstance(p, Split)]
    return bool(lengths) and all(n % devices == 0 for n in (*lengths, row.size))
