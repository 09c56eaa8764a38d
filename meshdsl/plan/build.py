"""From a solution to a plan: ``build_plan`` names arrays and collectives, counts them and says why they are there.

Fingerprint and timing are computed only when they are first used. Notes tell the reader what is easy to overlook:
operations without a rule, and partial sums that are rounded before their reduction because the step asks for it.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import jax

from meshdsl.ir.graph import LOOPS, Graph, Leaf, Op, TracedProgram, Value
from meshdsl.ir.host import TRANSFERS, hosted_outputs
from meshdsl.ir.index import graph_index, ops_named
from meshdsl.ir.rings import ProductRing, chosen_rings
from meshdsl.ir.solution import Bucket, Pins, Solution
from meshdsl.ir.text import fingerprint
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.low_bits import FORMATS
from meshdsl.layouts.placement import B, P
from meshdsl.layouts.reshard import ReshardStep, complete
from meshdsl.plan.host import host_memory
from meshdsl.plan.op_times import OpTimes, SourceLines, make_spans, price_pipeline_parts
from meshdsl.plan.plan import Plan
from meshdsl.plan.prefetch import prefetched_loops
from meshdsl.plan.reasons import LocalCollective, Reasons, collectives_inside
from meshdsl.plan.simulate import Sent, simulate
from meshdsl.plan.types import Array, Collective, Timing
from meshdsl.plan.utilization import utilization
from meshdsl.planner.problem.variables import OpClasses
from meshdsl.rules.registry import ONCE, RULES, rows_if_pinned_partial
from meshdsl.trace.passes.duplicate import CAST
from meshdsl.util.lazy import Lazy
from meshdsl.util.runtime import gc_paused

_WITHOUT_RULE = (*LOOPS, *TRANSFERS, "return", "constrain", "constant")  # operations of the IR itself, which need none
_text = cache(str)  # of dtypes, which numpy formats anew each time


def build_plan(program: TracedProgram, solution: Solution, pins: Pins, classes: OpClasses | None = None) -> Plan:
    """The plan of a program under a solution.

    Args:
      program: the program that was planned.
      solution: a signature per operation and a resharding tree per value.
      pins: what the user fixed; outputs that alias inputs, and donated inputs.
      classes: classes of the program's operations; None computes them.
    """
    reasons = Reasons(program, solution)
    found = _collectives(program, solution, reasons)
    waits = [(op, c) for op, c, _ in found]
    notes = [*without_rule(program, solution), *_rounded_sums(program, solution), *program.notes, *solution.notes]
    notes += _rounded_collectives(program, [c for _, c in waits])
    lines, times = SourceLines(reasons), OpTimes(program, solution, reasons, classes)

    @gc_paused
    def timing() -> Timing:
        counts = Counter(op.id for op, _ in waits)
        spans = make_spans(solution, pins.donated, reasons, lines, counts, times)
        used = utilization(program, solution, times, (c for _, c in waits))
        seconds, exposed = simulate(program, solution, times)
        return Timing(tuple(spans), seconds, used, tuple(exposed.get(sent, 0.0) for _, _, sent in found))

    return Plan(
        name=program.name,
        identity=Lazy(gc_paused(partial(fingerprint, program))),
        operations=dict(sorted(Counter([op.name for _, op in reasons.index.ops]).items())),
        inputs=tuple(_inputs(program, solution, pins)),
        outputs=tuple(_outputs(program, solution, pins)),
        collectives=tuple(c for _, c in waits),
        held=tuple((reasons.name_and_line(value), size) for value, size in solution.held),
        notes=tuple(notes),
        solution=solution,
        pipeline=price_pipeline_parts(program, solution, waits, times),
        lines=lines.texts,
        prefetched=tuple(prefetched_loops(program, solution, reasons, times)),
        timing=Lazy(timing),
        jax=jax.__version__,
        host=host_memory(program, solution, pins, reasons, times),
        checkpoints=program.checkpoints,
        low_bits=str(program.low_bits or ""),
        alternatives=program.taken,
    )


# ---- Arrays ----------------------------------------------------------------------------------------------------------


def _inputs(program: TracedProgram, solution: Solution, pins: Pins) -> Iterator[Array]:
    hosted = program.graph.hosted
    for i, (leaf, value, pin) in enumerate(zip(program.inputs, program.graph.inputs, pins.inputs, strict=True)):
        yield _array(leaf, complete(solution.layouts[value.id], solution.mesh), pin, i in hosted)


def _outputs(program: TracedProgram, solution: Solution, pins: Pins) -> Iterator[Array]:
    last, replicated = program.graph.ops[-1], Layout(**dict.fromkeys(solution.mesh.names, B))
    hosted = hosted_outputs(program.graph)
    for i, (leaf, pin, source) in enumerate(zip(program.outputs, pins.outputs, pins.follows, strict=True)):
        layout = solution.uses.get((last.id, i), replicated)  # a literal has no use
        follows = "" if source is None else program.inputs[source].path
        yield _array(leaf, complete(layout, solution.mesh), pin, i in hosted, follows)


def _array(leaf: Leaf, layout: Layout, pin: Layout, hosted: bool, follows: str = "") -> Array:
    layout = layout.within("host") if hosted else layout
    pinned = tuple(axis for axis in layout.axes if axis in pin.axes) if pin.placements else ()
    return Array(leaf.path, tuple(leaf.shape), _text(leaf.dtype), layout, pinned, follows, leaf.dims, leaf.aliases)


# ---- Collectives -----------------------------------------------------------------------------------------------------


def collectives_of(program: TracedProgram, solution: Solution, idle: Collection[int] = ()) -> list[Collective]:
    """Every collective of a solution, in program order of the operations that wait for them.

    Args:
      idle: ids of operations that do not run, and wait for none.
    """
    return [c for op, c, _ in _collectives(program, solution, Reasons(program, solution)) if op.id not in idle]


def _collectives(program: TracedProgram, solution: Solution, reasons: Reasons) -> list[tuple[Op, Collective, Sent]]:
    """Every collective with the operation that waits for it, in program order of these, and what it is of."""
    found = [*_of_reshards(solution, reasons), *_of_local_programs(program, solution, reasons)]
    return sorted(found, key=lambda sent: reasons.index.order[sent[0].id])


def _of_reshards(solution: Solution, reasons: Reasons) -> Iterator[tuple[Op, Collective, Sent]]:
    rings = {(ring.value.id, ring.step.after): ring for ring in chosen_rings(reasons.program.graph, solution)}
    bucket_of = {step: bucket for bucket in solution.buckets for step in bucket.steps}
    parts = defaultdict[Bucket, list[Collective]](list)
    for value, graph in reasons.resharded():
        for step in solution.trees[value.id]:
            if step.kind in COLLECTIVES:
                consumer, owner, reason = reasons.explain(value, step)
                found, sent = _collective(step, value, graph, owner, reason, reasons), (value.id, step.after)
                if ring := rings.get(sent):
                    found = _hops(ring, found, reasons)
                if bucket := bucket_of.get(sent):
                    parts[bucket].append(found)
                else:
                    yield consumer, found, sent
    ops = {op.id: op for _, op in reasons.index.ops} if parts else {}
    yield from ((ops[bucket.before], _bucket(bucket, found), bucket.steps[0]) for bucket, found in parts.items())


def _bucket(bucket: Bucket, parts: Sequence[Collective]) -> Collective:
    """The one collective that is sent for several."""
    first = parts[0]
    reason = f"{len(parts)} sent as one: {first.reason}, and {len(parts) - 1} more"
    return replace(first, bytes=bucket.bytes, seconds=bucket.seconds, reason=reason, parts=tuple(parts))


def _hops(ring: ProductRing, replaced: Collective, reasons: Reasons) -> Collective:
    """The hops of a ring, in place of the collective that it replaces; they belong to its first product."""
    products = "a product" if len(ring.products) == 1 else f"{len(ring.products)} products"
    return replace(
        replaced,
        kind="collective-permute",
        bytes=ring.bytes,
        trips=replaced.trips * ring.hops,
        seconds=ring.seconds,
        ring=ring.step.kind,
        source=reasons.line(ring.products[0].op),
        reason=f"ring {'both ways ' * (ring.ways > 1)}beside {ring.devices} parts of {products}: {replaced.reason}",
    )


def _of_local_programs(
    program: TracedProgram, solution: Solution, reasons: Reasons
) -> Iterator[tuple[Op, Collective, Sent]]:
    counts = Counter[int]()
    for found in collectives_inside(program.graph, solution):
        op = found.op
        reason = f"inside {op.name}, on {reasons.name(found.value)}: {found.exchange}"
        if op.manual:
            reason = f"{op.name} of {reasons.name(found.value)} {found.exchange}"
        yield op, _collective(found, found.value, found.graph, op, reason, reasons), (op.id, counts[op.id])
        counts[op.id] += 1


def _collective(
    sent: ReshardStep | LocalCollective, value: Value, graph: Graph, owner: Op, reason: str, reasons: Reasons
) -> Collective:
    return Collective(
        kind=sent.kind,
        axes=sent.axes,
        bytes=sent.bytes,
        trips=graph.trips,
        estimated=graph.estimated,
        seconds=sent.seconds,
        phase=owner.phase,
        source=reasons.line(owner),
        reason=reason,
        value=reasons.name(value),
        shape=tuple(value.shape),
        dtype=_text(value.dtype),
        format=sent.format if isinstance(sent, ReshardStep) else "",
    )


# ---- Notes -----------------------------------------------------------------------------------------------------------


def without_rule(program: TracedProgram, solution: Solution) -> list[str]:
    """Returns a note per operation without a rule, except for constant scalars, which cost nothing.

    An operation needs no rule if the user's shard_maps divide it over all axes.
    """
    known = {*RULES, *_WITHOUT_RULE} - {*ONCE}
    unknown = ops_named(program.graph, *(set(graph_index(program.graph).op_names) - known))
    axes = {axis for axis, size in solution.mesh if size > 1}
    return _counted(_how_it_runs(op) for op in unknown if not _is_constant(op) and not axes <= {*op.manual})


def _how_it_runs(op: Op) -> str:
    how = "once, on the first device:" if op.name in ONCE else "replicated: no rule for"
    return f"{how} {op.name} at {op.source}"


def _is_constant(op: Op) -> bool:
    return not op.inputs and not op.effects and not any(value.shape for value in op.outputs)


def _rounded_sums(program: TracedProgram, solution: Solution) -> list[str]:
    """A note per line that casts partial sums before their reduction, because the step constrains them so."""
    notes = []
    for op in ops_named(program.graph, CAST):
        rows = zip(solution.mesh.sizes_by_name.items(), solution.rows.get(op.id, ()), strict=False)
        sums = [(axis, row) for (axis, size), row in rows if size > 1 and P in row.outputs]
        constrained = rows_if_pinned_partial(op) if sums else ()
        axes = ",".join(axis for axis, row in sums if row in constrained)
        if axes:
            types = f"from {op.inputs[0].dtype} to {op.outputs[0].dtype}"
            notes.append(f"partial sums over {axes} are cast {types} before the reduction, as constrained: {op.source}")
    return _counted(notes)


def _rounded_collectives(program: TracedProgram, collectives: Sequence[Collective]) -> Iterator[str]:
    """Yields what becomes of an error budget."""
    if program.low_bits:
        formats = dict.fromkeys(c.format for c in collectives if c.format)
        losses = ", ".join(f"{name}, which loses {FORMATS[name].error:.2%} of normal numbers" for name in formats)
        used = f" is used by {sum(bool(c.format) for c in collectives)} of {len(collectives)} collectives: {losses}"
        unused = ": all is sent in full: nothing that may be rounded is cheaper so"
        yield f"low_bits={program.low_bits}{used if formats else unused}"


def _counted(notes: Iterable[str]) -> list[str]:
    return [f"{note} (x{n})" if n > 1 else note for note, n in Counter(notes).items()]
