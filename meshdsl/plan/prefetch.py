"""Which loops of a plan send collectives ahead and behind, and what that costs and saves (``meshdsl.ir.prefetch``).

Without it, an iteration computes and sends one after the other. With it, what is ahead or behind is sent beside the
computation of the iteration, and only the first slices in front of the loop and the last ones behind it are waited for:

    n (compute + links)     -->     links + (n - 1) max(compute, links) + compute

This holds if the compiler hides them at all, which the simulation knows (``meshdsl.plan.simulate``).

The collectives stay the same, so ``plan.seconds``, where everything runs one after the other, does not change. The
price is the second buffer: what an iteration hands to the next is live twice (``meshdsl.planner.liveness.peak``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import inf

from meshdsl.errors import ArgumentError
from meshdsl.ir.graph import TracedProgram, walk
from meshdsl.ir.prefetch import PipelinedLoop, pipelined_loops, prefetchable
from meshdsl.ir.rings import chosen_rings
from meshdsl.ir.solution import Prefetch, Solution
from meshdsl.plan.op_times import OpTimes
from meshdsl.plan.reasons import Reasons
from meshdsl.plan.simulate import simulate, simulated_seconds
from meshdsl.plan.types import PrefetchedLoop
from meshdsl.planner.liveness.peak import Liveness, Peak
from meshdsl.planner.liveness.timeline import copy_timeline

_SHORTER = 1 - 1e-6  # by which factor a simulated step has to be shorter


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


def gathers_beside(program: TracedProgram, solution: Solution) -> bool:
    """Whether a program has loops whose gathers the devices send beside other iterations.

    Nothing is sent behind unless a loop is named: the compiler of GPUs moves reductions to the next iteration by
    itself, and those of TPUs leave them synchronous in either place.
    """
    topology = solution.mesh.topology
    able = not program.pipeline and "all-gather" in topology.asynchronous and not topology.across_loops
    return able and any(op.name == "scan" for _, op in walk(program.graph))


def where_it_pays(program: TracedProgram, solution: Solution, donated: frozenset[int], limit: float = inf) -> Solution:
    """Returns the solution with slices gathered ahead where that makes the simulated step shorter and fits the memory.

    One slice after the other is tried, that whose collectives take longest first.
    """
    if not gathers_beside(program, solution):
        return solution
    loops, slices = {op.id: op for _, op in walk(program.graph)}, list[tuple[float, int, int]]()
    for op_id, choice in prefetchable(program.graph, solution).items():
        for i in choice.ahead:
            sent = PipelinedLoop.of(loops[op_id], Prefetch((i,)), solution).ahead
            slices.append((loops[op_id].bodies[0].trips * sum(step.seconds for _, step in sent), op_id, i))
    times = OpTimes(program, solution, Reasons(program, solution))
    best, least = solution, simulated_seconds(program, solution, times) if slices else 0.0
    for _, op_id, i in sorted(slices, key=lambda each: (-each[0], *each[1:])):
        known = best.prefetch.get(op_id, Prefetch())
        choice = replace(known, ahead=tuple(sorted((*known.ahead, i))))
        trial = with_prefetch(program, solution, {**best.prefetch, op_id: choice}, donated)
        seconds = simulated_seconds(program, trial, times) if trial.peak <= limit else inf
        if seconds < least * _SHORTER:
            best, least = trial, seconds
    return best


def step_seconds(program: TracedProgram, solution: Solution) -> float:
    """Returns the seconds of the simulated step."""
    return simulated_seconds(program, solution, OpTimes(program, solution, Reasons(program, solution)))


# ---- Memory ----------------------------------------------------------------------------------------------------------


def peak_of(program: TracedProgram, s: Solution, donated: frozenset[int]) -> Peak:
    """Returns the peak memory of a program under a solution."""
    graph = program.graph
    placed = copy_timeline(graph, s.mesh, s.layouts, s.uses, s.trees, s.buckets, chosen_rings(graph, s))
    return Liveness(placed, donated, pipelined_loops(graph, s)).peak()


def with_peak(program: TracedProgram, solution: Solution, donated: frozenset[int]) -> Solution:
    """Returns the solution with the peak memory that it has."""
    peak = peak_of(program, solution, donated)
    return replace(solution, peak=peak.bytes, peak_op=peak.op.id if peak.op else -1, held=peak.bytes_by_value())


def with_prefetch(
    program: TracedProgram, solution: Solution, chosen: Mapping[int, Prefetch], donated: frozenset[int]
) -> Solution:
    """Returns the solution with these loops sending ahead and behind, and the peak memory that it then has."""
    return with_peak(program, replace(solution, prefetch=dict(sorted(chosen.items()))), donated)


# ---- Seconds ---------------------------------------------------------------------------------------------------------


def prefetched_loops(
    program: TracedProgram, solution: Solution, reasons: Reasons, times: OpTimes
) -> Iterator[PrefetchedLoop]:
    """Describes the loops of a plan that send ahead or behind, in program order."""
    loops = pipelined_loops(program.graph, solution)
    if not loops:
        return
    _, before = simulate(program, replace(solution, prefetch={}), times)
    _, after = simulate(program, solution, times)
    for op in (op for _, op in walk(program.graph) if op.id in loops):
        loop, choice, body = loops[op.id], solution.prefetch[op.id], op.bodies[0]
        sent = [(value.id, step.after) for value, step in loop.steps]
        yield PrefetchedLoop(
            source=reasons.line(op),
            phase=op.phase,
            trips=body.trips,
            ahead=tuple(reasons.name(body.inputs[i]) for i in choice.ahead),
            behind=tuple(reasons.name_and_line(value.id) for value in loop.unreduced),
            bytes=loop.second_buffer(solution),
            serial=sum(before.get(each, 0.0) for each in sent),
            exposed=sum(after.get(each, 0.0) for each in sent),
        )
