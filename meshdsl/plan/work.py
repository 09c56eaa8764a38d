"""What computing takes in a plan: seconds of the work of every operation, in the rows that it runs in.

Operations of one kind (``Kinds``) in equal rows take as long, and a step of a hundred layers has few that differ: each
is worked out once.
"""

from collections.abc import Hashable

from meshdsl.ir import Op, Program, Value
from meshdsl.layouts.price import COLLECTIVES
from meshdsl.layouts.rule import Signature
from meshdsl.plan.reason import Reasons
from meshdsl.planner.costs import tensors
from meshdsl.planner.identity import identity
from meshdsl.planner.kinds import Kinds
from meshdsl.planner.solution import Solution
from meshdsl.planner.tables import work_seconds


class Work:
    """Seconds of the work of operations, in the rows of a solution.

    Args:
      kinds: of the operations, if they are known already.
    """

    def __init__(self, program: Program, solution: Solution, reasons: Reasons, kinds: Kinds | None = None) -> None:
        self.solution, self._kinds = solution, kinds or Kinds(program.graph)
        self._moved, self._known = _moved(solution, reasons), dict[Hashable, float]()
        self._alone: dict[int, float] = {}

    def seconds(self, op: Op) -> float:
        """Of one operation on one device and trip, and of the moves within the device that it waits for."""
        return self.alone(op) + self._moved.get(op.id, 0.0)

    def alone(self, op: Op) -> float:
        """Of one operation on one device and trip."""
        found = self._alone.get(op.id)
        if found is None:
            rows = self.solution.rows.get(op.id)
            found = self._alone[op.id] = 0.0 if rows is None else self._in_rows(op, rows)
        return found

    def _in_rows(self, op: Op, rows: tuple[Signature, ...]) -> float:
        key = (self._kinds.number(op), *map(identity, rows))
        if key not in self._known:
            placed = tuple(Signature((), (*row.inputs, *row.outputs)) for row in rows)
            shapes = tuple((x.shape, x.itemsize if isinstance(x, Value) else 0) for x in tensors(op))
            found = work_seconds(placed, shapes, self._kinds.work(op), self.solution.mesh)
            self._known[key] = float(found[tuple(range(len(rows)))])
        return self._known[key]


def _moved(solution: Solution, reasons: Reasons) -> dict[int, float]:
    """Per op id, seconds of the moves within a device that it waits for."""
    found: dict[int, float] = {}
    for value, moves in solution.trees.items():
        for move in moves:
            if move.kind not in COLLECTIVES:
                reader = reasons.reader(value, move).id
                found[reader] = found.get(reader, 0.0) + move.seconds
    return found
