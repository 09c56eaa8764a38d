"""Choose the plan for a step in which communication runs beside independent computation.

The planner's objective is serial time: one operation after the other. With overlap a collective costs only the part of
it that cannot be hidden. A collective of ``c`` seconds on a value with a *window* of ``w`` seconds (independent
computation between the value and its first use, ``overlap_windows``) costs

    max(0, c - w) + price * min(c, w)        0 <= price <= 1

A hidden second still occupies a link, and other transfers wait for it. Its price is the Lagrange multiplier of "no link
sends for longer than the step takes", which is not known beforehand. So several prices are tried, and of all plans
found, the plan of least serial time among them, the one with the shortest simulated step is taken
(``plan.simulated_seconds``). The simulation serialises the transfers of every link, so nothing is hidden twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import floor, log2

from meshdsl.api.buckets import BucketedPlan
from meshdsl.errors import MemoryLimitError
from meshdsl.ir.graph import LOOPS, Graph, Op, TracedProgram, Value
from meshdsl.ir.loops import PortRole, loop_ports
from meshdsl.ir.solution import Solution
from meshdsl.plan.op_times import OpTimes
from meshdsl.plan.prefetch import gathers_beside, named_loops, step_seconds, where_it_pays, with_prefetch
from meshdsl.plan.reasons import Reasons
from meshdsl.plan.simulate import simulated_seconds
from meshdsl.planner.costs.reshard_cost import OverlapWindow
from meshdsl.planner.solve import SearchResult
from meshdsl.util.text import bytes_text, seconds_text

PRICES = (0.5, 0.25, 0.0)  # of a hidden second, in seconds
ROUNDS = 2  # searches per price; the second one takes the windows of the best plan of the first
SHARES = (0.85, 0.7)  # of a plan's memory, within which plans are looked for that gather in loops
IMPROVEMENT = 1 - 1e-9  # a plan is better if its simulated step is shorter by this factor


# ---- Search over prices ----------------------------------------------------------------------------------------------


def plan_with_overlap(found: SearchResult, planned: BucketedPlan) -> BucketedPlan:
    """Return the plan with the shortest simulated step, of those tried and that of least serial time.

    Args:
      found: the search for a plan of least serial time.
      planned: the plan of least serial time, with its buckets.
    """
    best, plain = found, found.unproved_solution
    least = _simulated(found, plain)
    serial = _simulated(found, planned.solution) if planned.solution.buckets else least
    for _ in range(ROUNDS):
        start = best
        for price in PRICES:
            if found.model.deadline.expired():
                break
            trial = _search_at_price(start, price)
            if trial is not None and (seconds := _simulated(trial, trial.unproved_solution)) < least * IMPROVEMENT:
                best, least = trial, seconds
        if best is start:
            break
    choices = [planned.solution, *([best.unproved_solution, best.bucketed_solution()] if best is not found else [])]
    chosen = min(choices, key=lambda each: _simulated(found, each))
    if chosen is planned.solution or _simulated(found, chosen) >= serial * IMPROVEMENT:
        text = "chosen by simulated time with overlap: the plan of least serial time is also the fastest found"
        return replace(planned, notes=(text,))
    text = f"chosen by simulated time with overlap, {seconds_text(_simulated(found, chosen))}; the plan of least serial"
    return replace(
        planned, solution=chosen, origin=best, apart=best, notes=(f"{text} time takes {seconds_text(serial)}",)
    )


def _search_at_price(start: SearchResult, price: float) -> SearchResult | None:
    """Search where a second hidden in the windows of ``start`` costs ``price``; None if no plan found is feasible."""
    windows = overlap_windows(start.model.problem.program, _op_times(start, start.unproved_solution))
    rounded = {v: 2.0 ** floor(log2(window)) for v, window in windows.items() if window > 0}  # to share cost tables
    try:
        trial = start.with_overlap({v: OverlapWindow(window, price) for v, window in rounded.items()})
    except MemoryLimitError:
        return None
    return trial if trial.peak.bytes <= start.limit else None


def _simulated(found: SearchResult, solution: Solution) -> float:
    return simulated_seconds(found.model.problem.program, solution, _op_times(found, solution))


def _op_times(found: SearchResult, solution: Solution) -> OpTimes:
    problem = found.model.problem
    return OpTimes(problem.program, solution, Reasons(problem.program, solution), problem.op_classes)


# ---- Loops that send ahead and behind --------------------------------------------------------------------------------
# What a loop carries is a second buffer, and a plan of least seconds often fills the memory, with arrays that are
# gathered once in front of a loop instead of in every iteration. So plans within less memory are looked at as well.


def plan_with_prefetch(
    found: SearchResult, program: TracedProgram, globs: Sequence[str] | None, donated: frozenset[int], simulates: bool
) -> tuple[SearchResult, Solution]:
    """Return the plan, or one that needs less memory, with loops that send ahead and behind.

    Args:
      globs: over source lines, the loops that do; None for those where that pays.
      donated: indices of inputs whose memory the step may reuse.
      simulates: plans within less memory are also looked at where the second buffers fit.

    Raises:
      ArgumentError: a glob matches no loop.
      MemoryLimitError: no plan in which the named loops do is within the limit.
    """
    plain = found.unproved_solution
    if globs == ():
        return found, plain

    def choose(solution: Solution, limit: float) -> Solution:
        if globs is None:
            return where_it_pays(program, solution, donated, limit)
        named = named_loops(program, solution, globs)
        return with_prefetch(program, solution, named, donated) if named else solution

    def seconds(solution: Solution) -> float:
        return step_seconds(program, solution) if solution.peak <= found.limit else float("inf")

    best, chosen = found, choose(plain, found.limit)
    smaller, wanted = found, choose(plain, float("inf"))
    for _ in range(ROUNDS):
        if wanted.peak <= found.limit:
            break
        try:
            smaller = found.within(smaller.peak.bytes - (wanted.peak - found.limit))
        except MemoryLimitError:
            break
        solution = smaller.unproved_solution
        trial, wanted = choose(solution, found.limit), choose(solution, float("inf"))
        if seconds(trial) < seconds(chosen) * IMPROVEMENT:
            best, chosen = smaller, trial
    for share in SHARES if simulates and globs is None and gathers_beside(program, plain) else ():
        try:
            smaller = found.within(share * found.peak.bytes)
        except MemoryLimitError:
            break
        trial = choose(smaller.unproved_solution, found.limit)
        if seconds(trial) < seconds(chosen) * IMPROVEMENT:
            best, chosen = smaller, trial
    if chosen.peak > found.limit:
        need = (
            f"{bytes_text(chosen.peak)} per device, {bytes_text(plain.peak)} without; {bytes_text(found.limit)} allowed"
        )
        loops = ", ".join(dict.fromkeys(globs or ()))
        raise MemoryLimitError(
            f"overlap: the loops at {loops} cannot prefetch: {need}\nname fewer loops, or raise memory="
        )
    return best, chosen


# ---- Windows ---------------------------------------------------------------------------------------------------------
# A collective on a value can run beside the computation in the value's window. Operations are taken in program order,
# one after the other, each as long as the plan computes in it:
#
#     a = x @ u          1 ms
#     b = y @ v          5 ms     the window of ``a`` is 5 ms
#     c = a + b
#
# Of an operand that a loop reads slice by slice, the mean slice is needed when half of the loop is over; a result that
# it stacks is ready then, too. A slice itself can be sent one iteration ahead. So systems hide communication: the
# parameters of a layer are gathered one layer ahead, and gradients are reduced while the backward pass goes on.


def overlap_windows(program: TracedProgram, op_times: OpTimes) -> Mapping[int, float]:
    """Return the window of every used value, in seconds per iteration, by value id.

    Args:
      op_times: what each operation computes in a plan, in seconds.
    """
    windows = _OverlapWindows(op_times)
    windows.add(program.graph, {})
    return windows.by_value


class _OverlapWindows:
    """Collects the windows of a graph and of the bodies of its loops."""

    def __init__(self, op_times: OpTimes) -> None:
        self.op_times, self.by_value = op_times, dict[int, float]()
        self._loops: dict[int, float] = {}

    def add(self, graph: Graph, ready: dict[int, float], late: Mapping[int, float] | None = None) -> None:
        """Add the values of a graph; times are in seconds from its start.

        Args:
          ready: when inputs are available, by value id; default is 0.
          late: how long after the end a result is needed, by its position; default is 0.
        """
        now, available = 0.0, dict.fromkeys((v.id for v in graph.inputs), 0.0) | ready
        for op in graph.ops:
            length = self.duration(op, graph.trips)
            ports = list(loop_ports(op))
            slices = {port.operand for port in ports if port.role is PortRole.SLICE}
            stacks = {port.result for port in ports if port.role is PortRole.STACK}
            for i, operand in enumerate(op.inputs):
                if isinstance(operand, Value):
                    delay = length / 2 if i in slices else 0.0
                    if op.name == "return":
                        delay = (late or {}).get(i, 0.0)
                    window = now + delay - available[operand.id]
                    self.by_value[operand.id] = min(self.by_value.get(operand.id, window), window)
            for i, value in enumerate(op.outputs):
                available[value.id] = now + (length / 2 if i in stacks else length)
            for which, body in enumerate(op.bodies):
                one = self._iteration(body)
                early = [port.inputs for port in ports if port.role in (PortRole.CONST, PortRole.SLICE)]
                ahead = {body.inputs[i].id: -one for inputs in early for b, i in inputs if b == which}
                self.add(body, ahead, dict.fromkeys(stacks, one))
            now += length

    def duration(self, op: Op, iterations: int) -> float:
        """Return the seconds of computation in ``op``, per iteration of the graph that contains it."""
        if op.name not in LOOPS:
            return self.op_times.compute_seconds(op)
        if op.id not in self._loops:
            self._loops[op.id] = sum(self._iteration(body) * body.trips / max(1, iterations) for body in op.bodies)
        return self._loops[op.id]

    def _iteration(self, body: Graph) -> float:
        return sum(self.duration(op, body.trips) for op in body.ops)
