"""Planning for a step in which communication runs beside the computation.

The planner's objective has one thing after the other. Here a collective that can hide behind independent computing
costs only what sticks out of it: one that takes ``c`` seconds, of a value with a window of ``w`` (``windows``), costs

    max(0, c - w) + price * min(c, w)        0 <= price <= 1

The links are busy also with what is hidden, and who waits for them waits longer: that is the price of a hidden second,
which nobody knows beforehand (it is a Lagrange multiplier of "no link sends for longer than the step takes"). So
several prices are tried, and of all plans found the one is taken whose simulated step is the shortest
(``plan.simulated_seconds``), the one that was found without any of this among them: the simulation lets every link send
one thing after the other, so nothing is hidden twice.
"""

from math import floor, log2

from meshdsl.errors import MemoryLimitError
from meshdsl.ir import Program
from meshdsl.plan.jobs import jobs_of
from meshdsl.plan.reason import Reasons
from meshdsl.plan.streams import finish
from meshdsl.plan.windows import windows
from meshdsl.plan.work import Work
from meshdsl.planner.distances import Hidden
from meshdsl.planner.solution import Solution
from meshdsl.planner.solve import Found
from meshdsl.units import seconds_text

_PRICES = (0.5, 0.25, 0.0)
_ROUNDS = 2  # the windows are those of the best plan so far
_BETTER = 1 - 1e-9


def overlapped(found: Found) -> tuple[Found, str]:
    """The plan whose simulated step is the shortest of those tried, ``found`` among them, and what to say about it."""
    best, least = found, (first := _simulated(found))
    for _ in range(_ROUNDS):
        start = best
        for price in _PRICES:
            if found.model.clock.is_up():
                break
            trial, seconds = _hidden(start, price)
            if trial and seconds < least * _BETTER:
                best, least = trial, seconds
        if best is start:
            break
    return best, _note(first, least, best is not found)


def simulated_seconds(program: Program, solution: Solution, work: Work) -> float:
    """Seconds of a step in which collectives that nobody waits for run beside the computation."""
    return max(finish(jobs_of(program, solution, work)), default=0.0)


def _hidden(found: Found, price: float) -> tuple[Found | None, float]:
    """The best plan where a hidden second costs so much, and how long it takes; None if none fits the memory."""
    solution = found.draft()
    spare = windows(found.model.problem.program, _work(found, solution))
    rounded = {v: 2.0 ** floor(log2(window)) for v, window in spare.items() if window > 0}  # so that tables are shared
    try:
        trial = found.hiding({v: Hidden(window, price) for v, window in rounded.items()})
    except MemoryLimitError:
        return None, 0.0
    return (trial, _simulated(trial)) if trial.peak.bytes <= found.limit else (None, 0.0)


def _simulated(found: Found) -> float:
    solution = found.draft()
    return simulated_seconds(found.model.problem.program, solution, _work(found, solution))


def _work(found: Found, solution: Solution) -> Work:
    problem = found.model.problem
    return Work(problem.program, solution, Reasons(problem.program, solution), problem.kinds)


def _note(before: float, after: float, other: bool) -> str:
    alone = "the plan that is fastest one thing after the other"
    if other:
        return f"chosen by the time with overlap, {seconds_text(after)}; {alone} takes {seconds_text(before)} so"
    return f"chosen by the time with overlap: {alone} is the fastest found so, too"
