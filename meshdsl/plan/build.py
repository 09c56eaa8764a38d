"""From a solution to a plan: name what is moved, by whom it is needed, and how often."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, partial

from meshdsl.ir.graph import LOOPS, Graph, Leaf, Op, TracedProgram, Value
from meshdsl.ir.index import graph_index, ops_named
from meshdsl.ir.solution import Pins, Solution
from meshdsl.ir.text import fingerprint
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B, P
from meshdsl.layouts.reshard import ReshardStep, complete
from meshdsl.plan.op_times import Lines, OpTimes, make_spans, price_pipeline_parts
from meshdsl.plan.plan import Plan
from meshdsl.plan.reasons import LocalCollective, Reasons, collectives_inside
from meshdsl.plan.simulate import simulated_seconds
from meshdsl.plan.types import Array, Collective, Timing
from meshdsl.planner.problem.variables import OpClasses
from meshdsl.rules.registry import ONCE, RULES, asked_rows_of
from meshdsl.trace.passes.duplicate import CAST
from meshdsl.util.lazy import Lazy
from meshdsl.util.runtime import gc_paused

_RULELESS = (*LOOPS, "return", "constrain", "constant")
_text = cache(str)  # of dtypes: numpy works theirs out each time


def build_plan(program: TracedProgram, solution: Solution, pins: Pins, kinds: OpClasses | None = None) -> Plan:
    """The plan of ``program`` that ``solution`` chose under ``pins``.

    Args:
      kinds: of the program's operations, if they are known already.
    """
    reasons = Reasons(program, solution)
    waits = _waits(program, solution, reasons)
    lines, work = Lines(reasons), OpTimes(program, solution, reasons, kinds)

    @gc_paused
    def timing() -> Timing:
        number = Counter(op.id for op, _ in waits)
        spans = make_spans(solution, pins.donated, reasons, lines, number, work)
        return Timing(tuple(spans), simulated_seconds(program, solution, work))

    return Plan(
        name=program.name,
        identity=Lazy(gc_paused(partial(fingerprint, program))),
        operations=dict(sorted(Counter([op.name for _, op in reasons.index.ops]).items())),
        inputs=tuple(_inputs(program, solution, pins)),
        outputs=tuple(_outputs(program, solution, pins)),
        collectives=tuple(c for _, c in waits),
        held=tuple((reasons.name_and_line(value), size) for value, size in solution.held),
        notes=(*_opaque(program), *_rounded(program, solution), *program.notes, *solution.notes),
        solution=solution,
        pipeline=price_pipeline_parts(program, solution, waits, work),
        lines=lines.texts,
        timing=Lazy(timing),
    )


def collectives_of(program: TracedProgram, solution: Solution) -> list[Collective]:
    """Every collective of a solution, in the order of the operations that wait for it."""
    return [c for _, c in _waits(program, solution, Reasons(program, solution))]


def _inputs(program: TracedProgram, solution: Solution, pins: Pins) -> Iterator[Array]:
    for leaf, value, pin in zip(program.inputs, program.graph.inputs, pins.inputs, strict=True):
        yield _array(leaf, complete(solution.layouts[value.id], solution.mesh), pin)


def _outputs(program: TracedProgram, solution: Solution, pins: Pins) -> Iterator[Array]:
    last, nowhere = program.graph.ops[-1], Layout(**dict.fromkeys(solution.mesh.names, B))
    for i, (leaf, pin, source) in enumerate(zip(program.outputs, pins.outputs, pins.follows, strict=True)):
        layout = solution.uses.get((last.id, i), nowhere)
        follows = "" if source is None else program.inputs[source].path
        yield _array(leaf, complete(layout, solution.mesh), pin, follows)


def _array(leaf: Leaf, layout: Layout, pin: Layout, follows: str = "") -> Array:
    pinned = tuple(axis for axis in layout.axes if axis in pin.axes) if pin.placements else ()
    return Array(leaf.path, tuple(leaf.shape), _text(leaf.dtype), layout, pinned, follows, leaf.dims)


def _waits(program: TracedProgram, solution: Solution, reasons: Reasons) -> list[tuple[Op, Collective]]:
    """Every collective with the operation that waits for it, in their order."""
    found = [*_moves(solution, reasons), *_inside(program, solution, reasons)]
    return sorted(found, key=lambda pair: reasons.index.order[pair[0].id])


def _moves(solution: Solution, reasons: Reasons) -> Iterator[tuple[Op, Collective]]:
    """Every collective between operations, with the one that waits for it."""
    for value, graph in reasons.resharded():
        for move in solution.trees[value.id]:
            if move.kind in COLLECTIVES:
                reader, at, reason = reasons.explain(value, move)
                yield reader, _collective(move, value, graph, at, reason, reasons)


def _inside(program: TracedProgram, solution: Solution, reasons: Reasons) -> Iterator[tuple[Op, Collective]]:
    """Every collective of a local program, with its operation."""
    for found in collectives_inside(program.graph, solution):
        op = found.op
        reason = f"inside {op.name}, on {reasons.name(found.value)}: {found.exchange}"
        yield op, _collective(found, found.value, found.graph, op, reason, reasons)


def _collective(
    sent: ReshardStep | LocalCollective, value: Value, graph: Graph, at: Op, reason: str, reasons: Reasons
) -> Collective:
    return Collective(
        kind=sent.kind,
        axes=sent.axes,
        bytes=sent.bytes,
        trips=graph.trips,
        estimated=graph.estimated,
        seconds=sent.seconds,
        phase=at.phase,
        source=reasons.line(at),
        reason=reason,
        value=reasons.name(value),
        shape=tuple(value.shape),
        dtype=_text(value.dtype),
    )


def _opaque(program: TracedProgram) -> list[str]:
    """A line per operation without a rule; constant scalars are left out."""
    known = {*RULES, *_RULELESS} - {*ONCE}
    others = set(graph_index(program.graph).op_names) - known
    return _counted(_runs(op) for op in ops_named(program.graph, *others) if not _is_constant(op))


def _rounded(program: TracedProgram, solution: Solution) -> list[str]:
    """A line per place where parts of sums are cast before they are reduced, because that was asked for."""
    casts = ops_named(program.graph, CAST)
    return _counted(_rounds(op, axes) for op in casts if (axes := _rounding_axes(op, solution)))


def _rounding_axes(op: Op, solution: Solution) -> list[str]:
    rows = zip(solution.mesh.sizes_by_name.items(), solution.rows.get(op.id, ()), strict=False)
    sums = [(axis, row) for (axis, size), row in rows if size > 1 and P in row.outputs]
    asked = asked_rows_of(op) if sums else ()
    return [axis for axis, row in sums if row in asked]


def _rounds(op: Op, axes: Iterable[str]) -> str:
    types = f"from {op.inputs[0].dtype} to {op.outputs[0].dtype}"
    return f"partial sums over {','.join(axes)} are cast {types} before the reduction, as constrained: {op.source}"


def _counted(lines: Iterable[str]) -> list[str]:
    return [f"{line} (x{n})" if n > 1 else line for line, n in Counter(lines).items()]


def _runs(op: Op) -> str:
    how = "once, on the first device:" if op.name in ONCE else "replicated: no rule for"
    return f"{how} {op.name} at {op.source}"


def _is_constant(op: Op) -> bool:
    return not op.inputs and not op.effects and not any(value.shape for value in op.outputs)
