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
from meshdsl.ir.solution import Prefetch, Solution
from meshdsl.plan.op_times import OpTimes
from meshdsl.plan.reasons import Reasons
from meshdsl.plan.types import PrefetchedLoop
from meshdsl.planner.liveness.peak import Liveness, Peak
from meshdsl.planner.liveness.timeline import copy_timeline

# Devices that send what a loop carries beside its products, by the names of their topologies: seen in programs that
# the compilers of TPU v5e and H100 made. Those of TPU v6e leave such gathers synchronous, and a CPU does one thing
# after the other.
_SENDS_BESIDE = ("dgx-*", "gb200-*", "tpu-v4", "tpu-v5*")


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
    """Returns the solution with loops that send ahead and behind where that saves seconds and fits the memory.

    One loop after the other is chosen, that which saves most first: all that it can send, or what of it fits.
    """
    able = any(fnmatchcase(solution.mesh.topology.name, glob) for glob in _SENDS_BESIDE)
    possible = prefetchable(program.graph, solution) if able and not program.pipeline else {}
    if not possible:
        return solution
    times, saved = OpTimes(program, solution, Reasons(program, solution)), list[tuple[float, int]]()
    for inside, op in walk(program.graph):
        if op.id in possible:
            serial, exposed = _waited(inside, op, PipelinedLoop.of(op, possible[op.id], solution), times)
            saved.append((serial - exposed, op.id))
    best = solution
    for seconds, op_id in sorted(saved, reverse=True):
        whole = possible[op_id]
        parts = dict.fromkeys((whole, Prefetch(ahead=whole.ahead), Prefetch(behind=whole.behind)))
        for choice in (part for part in parts if part and seconds > 0):
            trial = with_prefetch(program, solution, {**best.prefetch, op_id: choice}, donated)
            if trial.peak <= limit:
                best = trial
                break
    return best


def saved_seconds(program: TracedProgram, solution: Solution) -> float:
    """Returns the seconds of a step that loops hide by what they send ahead and behind."""
    reasons = Reasons(program, solution)
    loops = prefetched_loops(program, solution, reasons, OpTimes(program, solution, reasons))
    return sum(loop.serial - loop.exposed for loop in loops)


# ---- Memory ----------------------------------------------------------------------------------------------------------


def peak_of(program: TracedProgram, s: Solution, donated: frozenset[int]) -> Peak:
    """Returns the peak memory of a program under a solution."""
    placed = copy_timeline(program.graph, s.mesh, s.layouts, s.uses, s.trees)
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
            serial, exposed = _waited(inside, op, loop, times)
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


def _waited(inside: Graph, op: Op, loop: PipelinedLoop, times: OpTimes) -> tuple[float, float]:
    """Seconds per step that the collectives of a loop are waited for: where they are needed, and ahead and behind."""
    (body,) = op.bodies
    compute = sum(times.seconds(inner) * graph.trips / body.trips for graph, inner in walk(body))
    links, length = sum(step.seconds for _, step in loop.steps), body.trips / inside.trips
    return body.trips * links, inside.trips * (links + (length - 1) * max(0.0, links - compute))
