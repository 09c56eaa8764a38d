"""The step in program order: what computing takes, what memory holds, where collectives are waited for, on which line.

Operations that cost nothing, as they are fused into others, are left out. The source text is kept
in the plan: it is read where the program was traced, and a report made elsewhere, or later, still
shows what was planned.
"""

import linecache
from collections.abc import Iterator, Mapping

from meshdsl.ir import Op, Source
from meshdsl.plan.reason import Reasons
from meshdsl.plan.timing import Line, Span
from meshdsl.plan.work import Work
from meshdsl.planner.memory import Liveness
from meshdsl.planner.placed import placed
from meshdsl.planner.solution import Solution

_AROUND = 3  # lines that are shown before and after those with operations
_WIDEST = 240  # characters of a line
_Head = tuple[int, str, str, int]  # what the operations of a span agree in: line, name, phase and trips


class Lines:
    """The lines of a program's source, numbered in the order of files and lines."""

    def __init__(self, reasons: Reasons) -> None:
        places = reasons.index.places
        own = {
            (s.file, s.line): s
            for s in sorted(reasons.index.sources, key=lambda s: (s.file, s.line, s.function), reverse=True)
        }
        around = {(file, n) for file, line in own for n in _around(file, line)}
        keys = sorted({*own, *around}, key=lambda key: (places.of(Source(*key)).rpartition(":")[0], key[1]))
        self.number = {key: i for i, key in enumerate(keys)}
        self.texts = tuple(
            Line(places.of(Source(*key)), own[key].function if key in own else "", _text(*key)) for key in keys
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
    solution: Solution, donated: frozenset[int], reasons: Reasons, lines: Lines, waits: Mapping[int, int], work: Work
) -> list[Span]:
    """The spans of a step in program order.

    Args:
      waits: per op id, how many collectives it waits for.
      work: what computing takes.
    """
    s, graph = solution, reasons.program.graph
    memory = Liveness(placed(graph, s.mesh, s.layouts, s.uses, s.trees), donated).points()
    heads: list[_Head] = []
    sums: list[tuple[int, float, int, int]] = []  # the other fields of a span
    for inside, op in reasons.ops():
        seconds, held, waited = work.seconds(op), memory[op.id], waits.get(op.id, 0)
        costs = seconds > 0 or waited > 0
        head = (lines.of(op), op.called, op.phase, inside.trips) if costs or not heads else heads[-1]
        if heads and head == heads[-1] and not waited:
            operations, before, fullest, number = sums[-1]
            sums[-1] = operations + costs, before + seconds, max(fullest, held), number
        else:
            heads.append(head)
            sums.append((int(costs), seconds, held, waited))
    return [Span(*head, *summed) for head, summed in zip(heads, sums, strict=True)]
