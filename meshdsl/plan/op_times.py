"""The step in program order: what computing takes, what memory holds, where collectives are waited for, on which line.

Operations that cost nothing, as they are fused into others, are left out. The source text is kept
in the plan: it is read where the program was traced, and a report made elsewhere, or later, still
shows what was planned.
"""

import linecache
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod

from meshdsl.ir.graph import Op, Source, TracedProgram, Value, walk
from meshdsl.ir.solution import Solution
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.placement import Split
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.plan.reasons import Reasons
from meshdsl.plan.types import Collective, Line, Span
from meshdsl.planner.costs.op_cost import operands_and_results, work_of, work_seconds, workspace_bytes
from meshdsl.planner.liveness.peak import Liveness
from meshdsl.planner.liveness.timeline import copy_timeline
from meshdsl.planner.problem.variables import OpClasses
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.schedules.simulate import BACKWARD, FORWARD, HANDING, HEAD, STASH, WEIGHTS, PipelineCosts, part_of
from meshdsl.util.arrays import object_id

# ---- Work ------------------------------------------------------------------------------------------------------------
# What computing takes in a plan: seconds of the work of every operation, in the rows that it runs in.
#
# Operations of one kind (``OpClasses``) in equal rows take as long, and a step of a hundred layers has few that differ:
# each is worked out once.


class OpTimes:
    """Seconds of the work of operations, in the rows of a solution.

    Args:
      kinds: of the operations, if they are known already.
    """

    def __init__(
        self, program: TracedProgram, solution: Solution, reasons: Reasons, kinds: OpClasses | None = None
    ) -> None:
        self.solution, self._kinds = solution, kinds or OpClasses(program.graph)
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
        key = (self._kinds.number_of(op), *map(object_id, rows))
        if key not in self._known:
            placed = tuple(Signature((), (*row.inputs, *row.outputs)) for row in rows)
            shapes = tuple((x.shape, x.itemsize if isinstance(x, Value) else 0) for x in operands_and_results(op))
            found = work_seconds(placed, shapes, self._kinds.work(op), self.solution.mesh)
            self._known[key] = float(found[tuple(range(len(rows)))])
        return self._known[key]


def _moved(solution: Solution, reasons: Reasons) -> dict[int, float]:
    """Per op id, seconds of the moves within a device that it waits for."""
    found: dict[int, float] = {}
    for value, moves in solution.trees.items():
        for move in moves:
            if move.kind not in COLLECTIVES:
                reader = reasons.consumer(value, move).id
                found[reader] = found.get(reader, 0.0) + move.seconds
    return found


# ---- Spans -----------------------------------------------------------------------------------------------------------


_AROUND = 3  # lines that are shown before and after those with operations
_WIDEST = 240  # characters of a line
_Head = tuple[int, str, str, int]  # what the operations of a span agree in: line, name, phase and trips


class Lines:
    """The lines of a program's source, numbered in the order of files and lines."""

    def __init__(self, reasons: Reasons) -> None:
        places = reasons.index.source_names
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
    solution: Solution, donated: frozenset[int], reasons: Reasons, lines: Lines, waits: Mapping[int, int], work: OpTimes
) -> list[Span]:
    """The spans of a step in program order.

    Args:
      waits: per op id, how many collectives it waits for.
      work: what computing takes.
    """
    s, graph = solution, reasons.program.graph
    memory = Liveness(copy_timeline(graph, s.mesh, s.layouts, s.uses, s.trees), donated).bytes_by_op()
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


# ---- Priced ----------------------------------------------------------------------------------------------------------
# What the parts of a pipeline's tick cost under a solution; the parts are in the scopes of the operations.


_PARTS = (FORWARD, BACKWARD, WEIGHTS, HEAD, HANDING)  # as the fields of PipelineCosts are called


def price_pipeline_parts(
    program: TracedProgram, solution: Solution, waits: Iterable[tuple[Op, Collective]], work: OpTimes
) -> Pipelined | None:
    """How the program takes its microbatches, with the costs of its parts if there are stages.

    Args:
      waits: every collective with the operation that waits for it.
    """
    pipeline = program.pipeline
    if pipeline is None or not pipeline.axis:
        return pipeline
    spent: dict[str, float] = defaultdict(float)
    for graph, op in walk(program.graph):
        spent[part_of(op.scope)] += work.seconds(op) * graph.trips
    for op, c in waits:
        spent[part_of(op.scope)] += c.seconds * c.trips
    handed = [c for op, c in waits if part_of(op.scope) == HANDING]
    costs = PipelineCosts(
        **{part: spent[part] for part in _PARTS},
        others=sum(seconds for part, seconds in spent.items() if part not in _PARTS),
        kept=_stash(program, solution) // max(1, pipeline.slots),
        memory=solution.peak,
        exchanges=sum(c.trips for c in handed),
        sent=sum(c.trips * c.bytes for c in handed),
        room=_room(program, solution),
    )
    return replace(pipeline, costs=costs)


def _stash(program: TracedProgram, solution: Solution) -> int:
    """Bytes of the stash on a device."""
    made = (op for _, op in walk(program.graph) if op.name == "constrain" and part_of(op.scope) == STASH)
    return sum(_local_bytes(v, solution) for op in made for v in op.outputs)


def _room(program: TracedProgram, solution: Solution) -> int:
    """Bytes of a device for the work of stages that are not alike."""
    found = [op for _, op in walk(program.graph) if workspace_bytes(op) and part_of(op.scope)]
    return max(
        (workspace_bytes(op) * _local_bytes(op.outputs[0], solution) // op.outputs[0].bytes for op in found), default=0
    )


def _local_bytes(v: Value, solution: Solution) -> int:
    return prod(solution.layouts[v.id].local_shape(v.shape, solution.mesh.sizes_by_name)) * v.itemsize


# ---- Flops -----------------------------------------------------------------------------------------------------------
# FLOPs of a plan: what one device multiplies and adds in a step.


def plan_flops(program: TracedProgram, solution: Solution) -> float:
    """FLOPs of the matrix products and convolutions of one step on one device, loops counted.

    An axis shares an operation's work if it splits any of its operands or results.
    """
    nothing = set[int]()
    return sum(work_of(op, nothing).flops * graph.trips / _shares(op.id, solution) for graph, op in walk(program.graph))


def _shares(op: int, solution: Solution) -> int:
    """Among how many devices the work of an operation is shared."""
    rows = zip(solution.mesh.sizes, solution.rows.get(op, ()), strict=False)
    return prod(size for size, row in rows if any(isinstance(at, Split) for at in (*row.inputs, *row.outputs)))
