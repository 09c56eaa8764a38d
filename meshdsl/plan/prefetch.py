"""Which loops of a plan send collectives ahead and behind, and what that costs and saves (``meshdsl.ir.prefetch``).

Without it, an iteration computes and sends one after the other. With it, what is ahead or behind is sent beside the
computation of the iteration, and only the first slices in front of the loop and the last ones behind it are waited for:

    n (compute + links)     -->     links + (n - 1) max(compute, links) + compute

The collectives stay the same, so ``plan.seconds``, where everything runs one after the other, does not change. The
price is the second buffer: what an iteration hands to the next is live twice (``meshdsl.planner.liveness.peak``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import inf

from meshdsl.errors import ArgumentError
from meshdsl.ir.graph import Graph, Op, TracedProgram, walk
from meshdsl.ir.prefetch import PipelinedLoop, pipelined_loops, prefetchable
from meshdsl.ir.rewrite import values
from meshdsl.ir.solution import Prefetch, Solution
from meshdsl.plan.op_times import OpTimes
from meshdsl.plan.reasons import Reasons
from meshdsl.plan.types import PrefetchedLoop
from meshdsl.planner.liveness.peak import Liveness, Peak
from meshdsl.planner.liveness.timeline import copy_timeline

# What compilers schedule beside products, by the names of topologies, as programs compiled for TPU v5e, v5p and v6e and
# for H100 show. Those of GPUs send a gather beside whatever the iteration computes before it is needed, and move
# reductions to the next iteration by themselves. That of TPU v5e leaves both where they are, and sends only what the
# loop carries beside products, gathers alone; those of TPU v5p and v6e leave these synchronous, too, and a CPU does one
# thing after the other. So nothing is sent behind unless a loop is named.
_GATHERS_BESIDE = ("dgx-*", "gb200-*", "tpu-v5e")
_HIDES_IN_ITERATION = ("dgx-*", "gb200-*")


# ---- Choice ----------------------------------------------------------------------------------------------------------


def named_loops(program: TracedProgram, solution: Solution, globs: Sequence[str]) -> dict[int, Prefetch]:
    """Returns all that the loops on some source lines can send ahead and behind.

    Raises:
      ArgumentError: a glob matches no loop.
    """
    reasons = Reasons(program, solution)
    lines = {op.id: reasons.line(op) for _, op in walk(program.graph) if op.name == "scan"}
    for glob in globs:
        if glob != "*" and not any(fnmatchcase(line, glob) for line in lines.values()):
            known = ", ".join(dict.fromkeys(lines.values())) or "none"
            raise ArgumentError(f"overlap: no loop at {glob!r} in {program.name}; its loops are at: {known}")
    named = {op for op, line in lines.items() if any(fnmatchcase(line, glob) for glob in globs)}
    return {op: choice for op, choice in prefetchable(program.graph, solution).items() if op in named}


def where_it_pays(program: TracedProgram, solution: Solution, donated: frozenset[int], limit: float = inf) -> Solution:
    """Returns the solution with loops that send ahead where that saves seconds and fits the memory.

    One loop after the other is chosen, that which saves most first.
    """
    if program.pipeline or not _is_one_of(solution, _GATHERS_BESIDE):
        return solution
    possible = {op: choice.ahead for op, choice in prefetchable(program.graph, solution).items()}
    times, saved = OpTimes(program, solution, Reasons(program, solution)), list[tuple[float, int, Prefetch]]()
    for inside, op in walk(program.graph):
        waits = [_waited(inside, op, Prefetch(ahead=(i,)), solution, times) for i in possible.get(op.id, ())]
        pays = [i for i, (serial, exposed) in zip(possible.get(op.id, ()), waits, strict=True) if serial > exposed]
        if pays:
            choice = Prefetch(ahead=tuple(pays))
            serial, exposed = _waited(inside, op, choice, solution, times)
            saved.append((serial - exposed, op.id, choice))
    best = solution
    for _, op_id, choice in sorted(saved, key=lambda each: -each[0]):
        trial = with_prefetch(program, solution, {**best.prefetch, op_id: choice}, donated)
        best = trial if trial.peak <= limit else best
    return best


def _is_one_of(solution: Solution, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(solution.mesh.topology.name, glob) for glob in globs)


def saved_seconds(program: TracedProgram, solution: Solution) -> float:
    """Returns the seconds of a step that loops hide by what they send ahead and behind."""
    reasons = Reasons(program, solution)
    loops = prefetched_loops(program, solution, reasons, OpTimes(program, solution, reasons))
    return sum(loop.serial - loop.exposed for loop in loops)


# ---- Memory ----------------------------------------------------------------------------------------------------------


def peak_of(program: TracedProgram, s: Solution, donated: frozenset[int]) -> Peak:
    """Returns the peak memory of a program under a solution."""
    placed = copy_timeline(program.graph, s.mesh, s.layouts, s.uses, s.trees, s.buckets)
    return Liveness(placed, donated, pipelined_loops(program.graph, s)).peak()


def with_prefetch(
    program: TracedProgram, solution: Solution, chosen: Mapping[int, Prefetch], donated: frozenset[int]
) -> Solution:
    """Returns the solution with these loops sending ahead and behind, and the peak memory that it then has."""
    made = replace(solution, prefetch=dict(sorted(chosen.items())))
    peak = peak_of(program, made, donated)
    return replace(made, peak=peak.bytes, peak_op=peak.op.id if peak.op else -1, held=peak.bytes_by_value())


# ---- Seconds ---------------------------------------------------------------------------------------------------------


def prefetched_loops(
    program: TracedProgram, solution: Solution, reasons: Reasons, times: OpTimes
) -> Iterator[PrefetchedLoop]:
    """Describes the loops of a plan that send ahead or behind, in program order."""
    loops = pipelined_loops(program.graph, solution)
    for inside, op in walk(program.graph):
        if op.id in loops:
            loop, choice, body = loops[op.id], solution.prefetch[op.id], op.bodies[0]
            serial, exposed = _waited(inside, op, choice, solution, times)
            yield PrefetchedLoop(
                source=reasons.line(op),
                phase=op.phase,
                trips=body.trips,
                ahead=tuple(reasons.name(body.inputs[i]) for i in choice.ahead),
                behind=tuple(reasons.name_and_line(value.id) for value in loop.unreduced),
                bytes=loop.second_buffer(solution),
                serial=serial,
                exposed=exposed,
            )


def _waited(inside: Graph, op: Op, choice: Prefetch, solution: Solution, times: OpTimes) -> tuple[float, float]:
    """Seconds per step that the collectives of a loop are waited for: where they are needed, and ahead and behind."""
    (body,), loop = op.bodies, PipelinedLoop.of(op, choice, solution)
    hides = _is_one_of(solution, _HIDES_IN_ITERATION)
    before = _compute_before(body, times) if hides else {}
    compute = sum(times.seconds(inner) * graph.trips / body.trips for graph, inner in walk(body))
    links, length = sum(step.seconds for _, step in loop.steps), body.trips / inside.trips
    ahead = sum(max(0.0, step.seconds - before.get(v.id, 0.0)) for v, step in loop.ahead)
    behind = sum(step.seconds for v, step in loop.behind)
    serial = inside.trips * (length * ahead + (1 if hides else length) * behind)
    return serial, inside.trips * (links + (length - 1) * max(0.0, links - compute))


def _compute_before(body: Graph, times: OpTimes) -> dict[int, float]:
    """Per value, the seconds that an iteration computes before the value, or what is made of it alone, is needed."""
    found, now = dict[int, float](), 0.0
    for op in body.ops:
        for x in values(op.inputs):
            found.setdefault(x.id, now)
        inner = ((body, op), *(pair for each in op.bodies for pair in walk(each)))
        now += sum(times.seconds(each) * graph.trips / body.trips for graph, each in inner)
    return found
