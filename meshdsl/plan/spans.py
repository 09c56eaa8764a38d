"""The step in program order: what computing takes, what memory holds, where collectives are waited for, on which line.

Operations that cost nothing, as they are fused into others, are left out. The source text is kept
in the plan: it is read where the program was traced, and a report made elsewhere, or later, still
shows what was planned.
"""

import linecache
from collections.abc import Hashable, Iterator, Mapping

from meshdsl.ir import Op, Program, Source, Value, walk
from meshdsl.layouts.price import COLLECTIVES
from meshdsl.layouts.rule import Signature
from meshdsl.plan.reason import Reasons
from meshdsl.plan.value import Line, Span
from meshdsl.planner.costs import materialised, tensors, work_of
from meshdsl.planner.lives import Placed
from meshdsl.planner.memory import Liveness
from meshdsl.planner.solution import Solution
from meshdsl.planner.tables import work_seconds

_AROUND = 3  # lines that are shown before and after those with operations
_WIDEST = 240  # characters of a line


class Lines:
    """The lines of a program's source, numbered in the order of files and lines."""

    def __init__(self, program: Program, reasons: Reasons) -> None:
        found = {op.source: None for _, op in walk(program.graph)}
        own = {(s.file, s.line): s for s in sorted(found, key=lambda s: (s.file, s.line, s.function), reverse=True)}
        around = {(file, n) for file, line in own for n in _around(file, line)}
        keys = sorted({*own, *around}, key=lambda key: (reasons.places.of(Source(*key)).rpartition(":")[0], key[1]))
        self.number = {key: i for i, key in enumerate(keys)}
        self.texts = tuple(
            Line(reasons.places.of(Source(*key)), own[key].function if key in own else "", _text(*key)) for key in keys
        )

    def of(self, op: Op) -> int:
        """The position of an operation's line."""
        return self.number[op.source.file, op.source.line]


def _around(file: str, line: int) -> Iterator[int]:
    last = len(linecache.getlines(file)) if file else 0
    return iter(range(max(1, line - _AROUND), min(last, line + _AROUND) + 1))


def _text(file: str, line: int) -> str:
    text = linecache.getline(file, line).rstrip() if file else ""
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def make_spans(
    program: Program,
    solution: Solution,
    donated: frozenset[int],
    reasons: Reasons,
    lines: Lines,
    waits: Mapping[int, int],
    work: "Work",
) -> list[Span]:
    """The spans of a step in program order.

    Args:
      waits: per op id, how many collectives it waits for.
      work: what computing takes.
    """
    s = solution
    memory = Liveness(Placed(program.graph, s.mesh, s.layouts, s.uses, s.trees), donated).points()
    spans: list[Span] = []
    for graph, op in walk(program.graph):
        seconds = work.seconds(op)
        costs = seconds > 0 or op.id in waits
        made = int(costs), seconds, memory[op.id], waits.get(op.id, 0)
        one = Span(lines.of(op), op.called, op.phase, graph.trips, *made)
        if spans and (not costs or _alike(spans[-1], one)):
            spans[-1] = _joined(spans[-1], one)
        else:
            spans.append(one)
    return spans


def _alike(a: Span, b: Span) -> bool:
    return a[:4] == b[:4] and not b.collectives


def _joined(a: Span, b: Span) -> Span:
    return a._replace(
        operations=a.operations + b.operations,
        seconds=a.seconds + b.seconds,
        memory=max(a.memory, b.memory),
        collectives=a.collectives + b.collectives,
    )


def _moved(solution: Solution, reasons: Reasons) -> dict[int, float]:
    """Per op id, seconds of the moves within a device that it waits for."""
    found: dict[int, float] = {}
    for value, moves in solution.trees.items():
        for move in moves:
            if move.kind not in COLLECTIVES:
                reader = reasons.reader(value, move).id
                found[reader] = found.get(reader, 0.0) + move.seconds
    return found


class Work:
    """Seconds of the work of operations, in the rows of a solution."""

    def __init__(self, program: Program, solution: Solution, reasons: Reasons) -> None:
        self.solution, self.kept = solution, materialised(program.graph)
        self._moved, self._known = _moved(solution, reasons), dict[Hashable, float]()
        self._alone: dict[int, float] = {}

    def seconds(self, op: Op) -> float:
        """Of one operation on one device and trip, and of the moves within the device that it waits for."""
        return self.alone(op) + self._moved.get(op.id, 0.0)

    def alone(self, op: Op) -> float:
        """Of one operation on one device and trip."""
        if op.id not in self._alone:
            rows = self.solution.rows.get(op.id)
            self._alone[op.id] = 0.0 if rows is None else self._in_rows(op, rows)
        return self._alone[op.id]

    def _in_rows(self, op: Op, rows: tuple[Signature, ...]) -> float:
        placed = tuple(Signature((), (*row.inputs, *row.outputs)) for row in rows)
        shapes = tuple((x.shape, x.itemsize if isinstance(x, Value) else 0) for x in tensors(op))
        key = (placed, shapes, work_of(op, self.kept))
        if key not in self._known:
            found = work_seconds(*key, self.solution.mesh)
            self._known[key] = float(found[tuple(range(len(rows)))])
        return self._known[key]
