"""Choose which inputs live in the host's memory, so that the step fits the device's memory and is fast.

Within a memory limit a plan divides more, gathers again and waits longer; or inputs that only a part of the step needs,
such as the state of an optimizer, wait in the host's memory (``meshdsl.ir.host``). Both are planned in turn:

1. The fastest plan that keeps everything on the device, whatever its memory, says where its memory is fullest, which
   inputs are not needed there, and what each holds on a device. If that plan fits, nothing moves.
2. Inputs are moved in the order of the seconds of transfers per byte that is saved there; those that save nothing
   there come last, since plans within the limit may be fullest elsewhere. Every number of them is a choice; the first
   that is planned is the smallest that saves as many bytes as the plan exceeds the limit by.
3. More are moved until a plan fits, then more and fewer as long as plans get faster. Where none fits, the inputs that
   save nothing are moved too, then few inputs one by one.

The fastest of all plans is taken, that which moves nothing among them. With and without such inputs there, residuals
of loops over layers may wait in the host's memory as well (``meshdsl.api.remat``).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple, TypeVar

from meshdsl.api.remat import Planned
from meshdsl.ir.graph import Value
from meshdsl.ir.host import in_optimizer_order
from meshdsl.ir.index import consumers, producers
from meshdsl.ir.solution import Pins
from meshdsl.plan.host import boundary_bytes
from meshdsl.planner.liveness.peak import Liveness
from meshdsl.planner.liveness.timeline import copy_timeline
from meshdsl.planner.solve import SearchResult
from meshdsl.util.runtime import Deadline

PLANS = 6  # numbers of inputs that are planned


class HostChoice(NamedTuple):
    """Inputs, and results that replace them, to be moved to the host's memory, by their positions."""

    inputs: frozenset[int]
    outputs: frozenset[int]


class Hosting(NamedTuple):
    """What is moved, for the plan.

    Args:
      choice: the inputs and results.
      fastest: bytes and seconds of the best plan found that moves nothing, without a memory limit.
      kept: those of the best one within the limit, if there is any.
    """

    choice: HostChoice
    fastest: tuple[int, float]
    kept: tuple[int, float] | None


class _Candidate(NamedTuple):
    """An input that can be moved.

    Args:
      input, output: its position, and that of the result that replaces it, if any does.
      saved: bytes that the device may hold less where its memory is fullest.
      bytes: of the host's memory, per device.
      seconds: of transfers per step.
    """

    input: int
    output: int | None
    saved: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class HostCosts:
    """What moving inputs saves and costs, under the layouts of one plan.

    Args:
      candidates: the inputs, those first that take the fewest seconds per byte, those last that save nothing.
      excess: bytes by which the plan exceeds the limit.
    """

    candidates: tuple[_Candidate, ...]
    excess: float

    @staticmethod
    def of(found: SearchResult, pins: Pins, limit: float) -> "HostCosts":
        """Returns the costs under the plan of a search, which exceeds a limit."""
        graph, s = found.model.problem.program.graph, found.unproved_solution
        placed = copy_timeline(graph, s.mesh, s.layouts, s.uses, s.trees)
        fullest, ordered = Liveness(placed, pins.donated).fullest_by_op(), in_optimizer_order(graph)
        position = {op.id: at for at, op in enumerate(ordered.ops)}
        peak = max(ordered.ops, key=lambda op: fullest.get(op.id, 0))
        readers, makers, topology = consumers(graph), producers(graph), s.mesh.topology
        replaced = {i: j for j, i in enumerate(pins.follows) if i is not None and j not in pins.hosted_outputs}

        def life(x: Value) -> tuple[int, int] | None:
            """First and last position at which a value is on the device that comes from the host, or goes there."""
            read = [position[op.id] for op in readers.get(x.id, ()) if op is not graph.ops[-1]]
            made = [position[makers[x.id].id]] if x.id in makers else []
            at = [*made, *read]
            return (min(at), max(at)) if at else None

        def copies_at_peak(x: Value, result: Value | None, is_donated: bool) -> tuple[int, int]:
            """How many buffers an input and the result that replaces it have at the peak, now and if they are moved.

            What the step may not overwrite is copied where a loop carries it or an update replaces it; what comes from
            the host is not, if it is read for the last time there.
            """
            at, read, made = position[peak.id], life(x), life(result) if result is not None else None
            is_read = read is not None and read[0] <= at and (at <= read[1] if is_donated else at < read[1])
            is_made = made is not None and made[0] <= at
            before = 1 if is_donated else 1 + is_made
            return before, int(is_read or (is_made and made is not None and at <= made[1]))

        def candidate(i: int, x: Value) -> _Candidate:
            j = replaced.get(i)
            result = None if j is None else graph.returned[j]
            size = s.local_bytes(x)
            seconds = size / topology.host_load + topology.overhead
            if result is not None:
                seconds += size / topology.host_store + topology.overhead
            made = result if isinstance(result, Value) and result is not x else None
            before, after = copies_at_peak(x, made, i in pins.donated)
            copies = 1 if result is None or i in pins.donated else 2
            return _Candidate(i, j, size * (before - after), size * copies, seconds)

        stay = pins.hosted | pins.on_device
        possible = (candidate(i, x) for i, x in enumerate(graph.inputs) if i not in stay and 0 not in x.shape)
        useful = sorted(
            (each for each in possible if each.bytes),
            key=lambda x: (x.seconds / x.saved if x.saved else inf, -x.bytes, x.input),
        )
        room = topology.host_memory - boundary_bytes(graph, s, pins)
        sizes = accumulate(each.bytes for each in useful)
        fitting = tuple(each for each, size in zip(useful, sizes, strict=True) if size <= room)
        return HostCosts(fitting, found.peak.bytes - limit)


def _choice(moved: Sequence[_Candidate]) -> HostChoice:
    outputs = (each.output for each in moved if each.output is not None)
    return HostChoice(frozenset(each.input for each in moved), frozenset(outputs))


P = TypeVar("P", bound=Planned)


def plan_hosting(costs: HostCosts, attempt: Callable[[HostChoice], P], clock: Deadline) -> P | None:
    """Returns the fastest plan found that moves inputs; None if there is none to move.

    If none fits, the one that needs the least memory is returned.

    Args:
      attempt: plans the program under a choice, within the limit.
      clock: after which only the last choice is planned, unless one fits.
    """
    candidates, tried = costs.candidates, dict[int, P]()
    last = len(candidates)
    if not last:
        return None

    def at(count: int) -> P:
        if count not in tried:
            tried[count] = attempt(_choice(candidates[:count]))
        return tried[count]

    saved = list(accumulate(each.saved for each in candidates))
    sure = sum(each.saved > 0 for each in candidates) or last
    best = last if clock.expired() else min(bisect_left(saved, costs.excess) + 1, sure)
    while at(best).seconds == inf and best < last:
        is_late = len(tried) >= PLANS // 2 or clock.expired()
        best = last if best >= sure else sure if is_late else (best + sure + 1) // 2
    if tried[best].seconds == inf:
        alone = candidates if 1 < last <= PLANS - len(tried) and not clock.expired() else ()
        return min((*tried.values(), *(attempt(_choice([each])) for each in alone)), key=by_need)
    step = max(1, best // 2)
    while len(tried) < PLANS and not clock.expired():
        around = [n for n in (best - step, best + step) if 1 <= n <= last and n not in tried]
        if around and at(around[0]).seconds < tried[best].seconds:
            best = around[0]
        elif len(around) < 2:
            if step == 1:
                break
            step //= 2
    return tried[best]


def by_need(planned: Planned) -> tuple[float, float]:
    """Returns what decides between plans: their seconds, or the least memory found where none fits."""
    return planned.seconds, planned.least
