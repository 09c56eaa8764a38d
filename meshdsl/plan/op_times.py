"""Where the time of a planned step goes: seconds per operation, spans in program order, source lines, FLOPs.

``OpTimes`` has the seconds of every operation in the signatures that the solution chose; ``make_spans`` puts them in
program order, beside the memory and the collectives that are waited for; ``SourceLines`` has the source text, which a
plan carries with it: it is read where the program was traced, so that a report made elsewhere or later still shows it.
``price_pipeline_parts`` adds up the parts of a pipeline's tick, and ``plan_flops`` the FLOPs of a device.
"""

import linecache
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from math import prod

from meshdsl.ir.graph import Op, Source, TracedProgram, Value, walk
from meshdsl.ir.host import TRANSFERS
from meshdsl.ir.prefetch import pipelined_loops
from meshdsl.ir.rings import ProductParts, ProductRing, chosen_rings
from meshdsl.ir.solution import Solution
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.placement import Split
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.plan.reasons import Reasons
from meshdsl.plan.types import Collective, Line, Span
from meshdsl.planner.costs.fusion import operands_and_results
from meshdsl.planner.costs.op_cost import OpWork, flops_of, unsharded_seconds, work_seconds
from meshdsl.planner.costs.traffic import traffic_of
from meshdsl.planner.liveness.peak import Liveness
from meshdsl.planner.liveness.timeline import copy_timeline
from meshdsl.planner.problem.variables import OpClasses
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.schedules.simulate import BACKWARD, FORWARD, HANDING, HEAD, STASH, WEIGHTS, PipelineCosts, part_of
from meshdsl.util.arrays import object_id

CONTEXT_LINES = 3  # source lines shown before and after a line with operations
LINE_WIDTH = 240  # characters of a source line that a plan keeps
_PARTS = (FORWARD, BACKWARD, WEIGHTS, HEAD, HANDING)  # parts of a pipeline's tick that are fields of ``PipelineCosts``


# ---- Seconds per operation -------------------------------------------------------------------------------------------


class OpTimes:
    """Seconds of operations under a solution.

    Operations of one class with equal signatures take equally long, and a step of a hundred layers has few distinct
    ones: each is computed once.

    Args:
      program: the planned program.
      solution: its signatures and reshard steps.
      reasons: reasons under the same solution.
      classes: classes of the program's operations; None computes them.
    """

    def __init__(
        self, program: TracedProgram, solution: Solution, reasons: Reasons, classes: OpClasses | None = None
    ) -> None:
        self.solution, self._classes = (
            solution,
            classes or OpClasses(program.graph, traffic_of(program.graph, solution.mesh.topology.fusion)),
        )
        self._local_steps = _local_step_seconds(solution, reasons)
        self._by_signature: dict[Hashable, float] = {}
        self._by_op: dict[int, float] = {}
        self._by_part: dict[Hashable, float] = {}
        self._work: dict[int, OpWork] = {}  # by class, as the next one
        self._whole: dict[int, float] = {}
        for ring in chosen_rings(program.graph, solution):
            parts = {each.op.id: self.part_seconds(each, ring.devices) for each in ring.products}
            parts[ring.products[0].op.id] += self._keeping_seconds(ring)
            self._by_op.update((op, ring.devices * seconds) for op, seconds in parts.items())

    def work(self, op: Op) -> OpWork:
        """The work of an operation at global shapes."""
        number = self._classes.number_of(op)
        if number not in self._work:
            self._work[number] = self._classes.work(op)
        return self._work[number]

    def whole_seconds(self, op: Op) -> float:
        """Seconds per iteration of an operation on one device with whole arrays, without the cost of starting it."""
        number = self._classes.number_of(op)
        if number not in self._whole:
            work, mesh = self.work(op), self.solution.mesh
            overhead = mesh.topology.overhead * work.starts
            self._whole[number] = unsharded_seconds(op, work, mesh) - overhead
        return self._whole[number]

    def seconds(self, op: Op) -> float:
        """Seconds per iteration of an operation, and of the device-local reshard steps that it waits for."""
        return self.compute_seconds(op) + self._local_steps.get(op.id, 0.0)

    def compute_seconds(self, op: Op) -> float:
        """Seconds per iteration of an operation on one device, of all its parts if it runs in parts."""
        found = self._by_op.get(op.id)
        if found is None:
            rows = self._transfer_rows(op) if op.name in TRANSFERS else self.solution.rows.get(op.id)
            found = self._by_op[op.id] = 0.0 if rows is None else self._with_signatures(op, rows)
        return found

    def _transfer_rows(self, op: Op) -> tuple[Signature, ...]:
        """The rows of a transfer to or from the host's memory, which is a part of its input, output or residual."""
        layout = self.solution.layouts[op.outputs[0].id]
        return tuple(Signature((layout.on(axis),), (layout.on(axis),)) for axis in self.solution.mesh.names)

    def ring_part_seconds(self, ring: ProductRing) -> float:
        """Seconds of a part of all products of a ring, and of what stands between them and their reduction."""
        between = sum(map(self.compute_seconds, ring.between)) / ring.devices
        parts = sum(self.part_seconds(each, ring.devices) for each in ring.products)
        return between + parts + self._keeping_seconds(ring)

    def _keeping_seconds(self, ring: ProductRing) -> float:
        """Seconds per block of keeping the gathered copy: it is filled with zeros, and blocks are read and written."""
        return 3 * ring.bytes / self.solution.mesh.topology.memory_bandwidth if ring.keeps else 0.0

    def part_seconds(self, product: ProductParts, devices: int) -> float:
        """Seconds of one of ``devices`` parts of a product on one device, at the rate of the part's sides."""
        op, rows = product.op, self.solution.rows[product.op.id]
        key = (self._classes.number_of(op), *map(object_id, rows), product.cut, product.port, devices)
        if key not in self._by_part:
            whole, tensors = self.work(op), operands_and_results(op)
            shapes = tuple(
                (tuple(n // devices if d == dim else n for d, n in enumerate(x.shape)), x.itemsize)
                for x, dim in zip(tensors, product.cut, strict=True)
                if isinstance(x, Value)
            )
            sides = tuple(
                replace(side, length=side.length // devices if product.cut[side.tensor] in side.dims else side.length)
                for side in whole.sides
            )
            work = replace(whole, flops=whole.flops / devices, sides=sides)
            placed = tuple(Signature((), (*row.inputs, *row.outputs)) for row in rows)
            found = work_seconds(placed, shapes, work, self.solution.mesh)
            traffic = self._traffic_of_part(product, devices) / self.solution.mesh.topology.memory_bandwidth
            self._by_part[key] = float(found[tuple(range(len(rows)))]) + traffic
        return self._by_part[key]

    def _traffic_of_part(self, product: ProductParts, devices: int) -> float:
        """Bytes that a device reads and writes because a part is none of a whole product.

        A block of the result is filled with zeros before; one that travels is read, added to, and written; parts of
        all of the result are read, and their sum is read and written.
        """
        (result,), sizes = product.op.outputs, self.solution.mesh.sizes_by_name
        elements = prod(self.solution.layouts[result.id].local_shape(result.shape, sizes))
        if product.cut.result is None:
            return elements * (result.itemsize + 2 * float(product.dtype.itemsize))
        return elements / devices * result.itemsize * (3 if product.port is None else 1)

    def _with_signatures(self, op: Op, rows: tuple[Signature, ...]) -> float:
        key = (self._classes.number_of(op), *map(object_id, rows))
        if key not in self._by_signature:
            placed = tuple(Signature((), (*row.inputs, *row.outputs)) for row in rows)
            shapes = tuple((x.shape, x.itemsize if isinstance(x, Value) else 0) for x in operands_and_results(op))
            found = work_seconds(placed, shapes, self.work(op), self.solution.mesh)
            self._by_signature[key] = float(found[tuple(range(len(rows)))])
        return self._by_signature[key]


def _local_step_seconds(solution: Solution, reasons: Reasons) -> dict[int, float]:
    """Per operation id, seconds of the device-local reshard steps that it waits for."""
    found: dict[int, float] = {}
    for value, steps in solution.trees.items():
        for step in steps:
            if step.kind not in COLLECTIVES:
                consumer = reasons.consumer(value, step).id
                found[consumer] = found.get(consumer, 0.0) + step.seconds
    return found


# ---- Spans and source lines ------------------------------------------------------------------------------------------

_SpanHead = tuple[int, str, str, int]  # the fields in which the operations of a span agree: line to trips


class SourceLines:
    """The source lines of a program's operations with some context, numbered in the order of files and lines.

    Attributes:
      texts: the lines.
    """

    def __init__(self, reasons: Reasons) -> None:
        names = reasons.index.source_names
        own = {
            (s.file, s.line): s
            for s in sorted(reasons.index.sources, key=lambda s: (s.file, s.line, s.function), reverse=True)
        }
        context = {(file, n) for file, line in own for n in _context(file, line)}
        keys = sorted({*own, *context}, key=lambda key: (names.of(Source(*key)).rpartition(":")[0], key[1]))
        self._numbers = {key: i for i, key in enumerate(keys)}
        self.texts = tuple(
            Line(names.of(Source(*key)), own[key].function if key in own else "", _text(*key)) for key in keys
        )

    def number(self, op: Op) -> int:
        """The position of an operation's line in ``texts``."""
        return self._numbers[op.source.file, op.source.line]


def _context(file: str, line: int) -> range:
    last = len(linecache.getlines(file)) if file else 0
    return range(max(1, line - CONTEXT_LINES), min(last, line + CONTEXT_LINES) + 1)


def _text(file: str, line: int) -> str:
    text = linecache.getline(file, line).rstrip() if file else ""
    return text if len(text) <= LINE_WIDTH else f"{text[: LINE_WIDTH - 1]}…"


def make_spans(
    solution: Solution,
    donated: frozenset[int],
    reasons: Reasons,
    lines: SourceLines,
    waits: Mapping[int, int],
    times: OpTimes,
) -> list[Span]:
    """The spans of a step in program order; operations that cost nothing, since they are fused, join another span.

    Args:
      solution: layouts and reshard steps.
      donated: indices of inputs whose memory the step may reuse.
      reasons: reasons under the solution.
      lines: source lines of the program.
      waits: per operation id, the number of collectives that it waits for.
      times: seconds of operations under the solution.
    """
    s, graph = solution, reasons.program.graph
    placed = copy_timeline(graph, s.mesh, s.layouts, s.uses, s.trees, s.buckets, chosen_rings(graph, s))
    memory = Liveness(placed, donated, pipelined_loops(graph, s)).bytes_by_op()
    heads: list[_SpanHead] = []
    sums: list[tuple[int, float, int, int]] = []  # the other fields of each span
    for inside, op in reasons.ops():
        seconds, live, waited = times.seconds(op), memory[op.id], waits.get(op.id, 0)
        costs = seconds > 0 or waited > 0
        head = (lines.number(op), op.called, op.phase, inside.trips) if costs or not heads else heads[-1]
        if heads and head == heads[-1] and not waited:
            operations, before, fullest, collectives = sums[-1]
            sums[-1] = operations + costs, before + seconds, max(fullest, live), collectives
        else:
            heads.append(head)
            sums.append((int(costs), seconds, live, waited))
    return [Span(*head, *summed) for head, summed in zip(heads, sums, strict=True)]


# ---- Parts of a pipeline ---------------------------------------------------------------------------------------------


def price_pipeline_parts(
    program: TracedProgram, solution: Solution, waits: Iterable[tuple[Op, Collective]], times: OpTimes
) -> Pipelined | None:
    """The program's microbatches and stages with the costs of their parts; None if it has no microbatches.

    The parts are the scopes of operations that ``meshdsl.pipelining`` has set.

    Args:
      program: the planned program.
      solution: its layouts and reshard steps.
      waits: every collective with the operation that waits for it.
      times: seconds of operations under the solution.
    """
    pipeline = program.pipeline
    if pipeline is None or not pipeline.axis:
        return pipeline
    seconds: dict[str, float] = defaultdict(float)
    for graph, op in walk(program.graph):
        seconds[part_of(op.scope)] += times.seconds(op) * graph.trips
    for op, c in waits:
        seconds[part_of(op.scope)] += c.seconds * c.trips
    between_stages = [c for op, c in waits if part_of(op.scope) == HANDING]
    costs = PipelineCosts(
        **{part: seconds[part] for part in _PARTS},
        others=sum(total for part, total in seconds.items() if part not in _PARTS),
        kept=_stash_bytes(program, solution) // max(1, pipeline.slots),
        memory=solution.peak,
        exchanges=sum(c.trips for c in between_stages),
        sent=sum(c.trips * c.bytes for c in between_stages),
        room=_workspace(program, solution),
    )
    return replace(pipeline, costs=costs)


def _stash_bytes(program: TracedProgram, solution: Solution) -> int:
    """Bytes of the stash of stage inputs on a device."""
    stashes = (op for _, op in walk(program.graph) if op.name == "constrain" and part_of(op.scope) == STASH)
    return sum(solution.local_bytes(v) for op in stashes for v in op.outputs)


def _workspace(program: TracedProgram, solution: Solution) -> int:
    """Bytes of a device for the work of the largest stage, where stages differ."""
    found = [op for _, op in walk(program.graph) if op.name == "ruled" and part_of(op.scope)]
    rooms = [(op.outputs[0], spent.room) for op in found if (spent := op.params["ruled"].spent)]
    return max((room * solution.local_bytes(value) // value.bytes for value, room in rooms), default=0)


# ---- FLOPs -----------------------------------------------------------------------------------------------------------


def plan_flops(program: TracedProgram, solution: Solution) -> float:
    """FLOPs of the matrix products and convolutions of one step on one device, iterations counted.

    A mesh axis divides the work of an operation if it splits any of its operands or results.
    """
    return sum(flops_of(op) * graph.trips / _devices(op.id, solution) for graph, op in walk(program.graph))


def _devices(op: int, solution: Solution) -> int:
    """The number of devices that share the work of an operation."""
    rows = zip(solution.mesh.sizes, solution.rows.get(op, ()), strict=False)
    return prod(size for size, row in rows if any(isinstance(at, Split) for at in (*row.inputs, *row.outputs)))
