"""Choose what the backward pass computes again, or loads from the host, so that the step fits the memory and is fast.

Within a memory limit a plan divides more, gathers again and waits longer; or it computes residuals again
(``meshdsl.recomputation``). Both are planned in turn:

1. The fastest plan that keeps everything, whatever its memory, says what a residual holds on a device, what its
   operation takes, and the traffic of writing and reading it (``recomputation.traffic``).
2. At a price of memory the cheapest choice of what is computed again is a minimum cut (``recomputation.min_cut``).
   Prices from nothing to everything give a ladder of choices, each with fewer bytes and more work than the one before.
   It does not depend on the limit. The first rung is the fastest choice, which saves traffic. If the plan that keeps
   everything fits and that rung promises nothing, nothing is computed again.
3. Rungs of the ladder are planned within the limit, beginning with the first that saves as much as is needed, up and
   down as long as plans get faster. So more memory begins further down, at rungs that are faster.
4. What memory that leaves is filled: residuals that are worth most are kept again, one by one. And the rung that just
   does not fit is emptied: residuals that take the fewest seconds per byte are computed again, for as many bytes as it
   is short of. Rungs are far apart where residuals are worth about the same.
5. Within a limit that the plan of 1. exceeds, the same is done on a second ladder, where only values have a price that
   live where that plan exceeds the limit.
6. Where a faster rung does not fit, loops over layers are divided (``recomputation.loop_parts``): the last iterations
   follow that rung, as many as fit.

The fastest of all plans is taken, that which keeps everything among them.

With ``host="auto"`` values of loops over layers can also wait in the host's memory (``meshdsl.recomputation.hosting``).
At a price of memory at which its transfers take less, a value that is kept is kept there.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf, prod, sqrt
from typing import NamedTuple, Protocol, TypeVar

from meshdsl.ir.graph import Graph, Op, TracedProgram, Value, walk
from meshdsl.ir.index import graph_index
from meshdsl.ir.rewrite import values
from meshdsl.ir.solution import Solution
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.plan.host import boundary_bytes
from meshdsl.plan.op_times import OpTimes
from meshdsl.plan.reasons import Reasons, collectives_inside
from meshdsl.plan.types import Recomputation, RecomputedValue
from meshdsl.planner.costs.fusion import VIEWS, ends_fusion
from meshdsl.planner.liveness.peak import Liveness
from meshdsl.planner.liveness.timeline import copy_timeline
from meshdsl.planner.problem.variables import OpClasses
from meshdsl.planner.solve import SearchResult
from meshdsl.recomputation.hosting import hostable
from meshdsl.recomputation.levels import layer_loops, levels, reads_residual, recomputable
from meshdsl.recomputation.loop_parts import DividedProgram, MixedChoice, mixed_choice
from meshdsl.recomputation.min_cut import RematChoice, RematPrices, Rewrite, cheapest_recomputation
from meshdsl.recomputation.rewrite import Recomputing
from meshdsl.recomputation.segments import boundary_ops
from meshdsl.recomputation.traffic import residual_uses
from meshdsl.trace.annotate import FORWARD
from meshdsl.util.runtime import Deadline

PRICES = 24  # of memory, from one at which nothing is computed again to one at which everything is
STEP = 1.8  # ratio of two prices
PLANS = 8  # rungs of the ladder that are planned
AROUND = (-1, 1, 2, -2)  # rungs that are planned next to the best one, in this order
ENOUGH = 0.9  # part of the bytes in excess that a rung must be expected to save, below one that fits
FILLED = 3  # plans with one residual more that is kept
EMPTIED = 2  # plans with fewer residuals than a rung that does not fit
LONGEST = 0.25  # by which a residual that lives through the whole step is dearer than one that is read at once
NEXT_TO_NOTHING = 1e-9  # price at which only what costs nothing is computed again, as part of the middle one
SENT = 8  # rungs between two that differ in what waits in the host's memory
NEGLIGIBLE = 1e-3  # share of the seconds of a choice that is not worth a plan
PARTS = 3  # plans with divided loops
MOST = 0.9  # of the iterations that may follow the choice that does not fit, in the first of them
WORTH = 2e-3  # share of the seconds of a step that divided loops, or emptying a rung, must promise to save


# ---- What residuals hold, and what operations take -------------------------------------------------------------------


class Means(NamedTuple):
    """What may become of residuals besides keeping them: to be computed again, to wait in the host's memory."""

    recompute: bool
    host: bool


class Rung(NamedTuple):
    """A choice and the price of memory at which it is the cheapest, in seconds per byte.

    Args:
      sent: ids of the values that may wait in the host's memory at that price; None for all that are worth it.
    """

    choice: RematChoice
    price: float
    sent: frozenset[int] | None = None


@dataclass(frozen=True)
class ResidualCosts:
    """The two sides of the choice, under the layouts of one plan.

    Args:
      program: that is planned.
      ops: the operations that can run twice.
      held: by value id, the bytes on a device to keep a value for the backward pass; 0 where memory is not short.
      lasting: by value id, how long it would be kept, from 0 to 1.
      traffic: by value id, the seconds per step to write and read a value that is kept, where a recomputed one is not.
      again: by op id, the seconds per step that running an operation twice adds.
      twice: by op id, the seconds per step of its second run, whatever becomes of the first.
      transfers: by value id, the seconds per step to send a value to the host's memory and to bring it back, as far as
        it may wait there.
      room: bytes of the host's memory, per device.
      views: ids of values outside of loops that are their operands.
      fused: ids of values outside of loops that take no memory: views, and what is fused with its reader.
      reasons: names of values.
    """

    program: TracedProgram
    ops: frozenset[int]
    held: Mapping[int, int]
    lasting: Mapping[int, float]
    traffic: Mapping[int, float]
    again: Mapping[int, float]
    twice: Mapping[int, float]
    transfers: Mapping[int, float]
    room: float
    views: frozenset[int]
    fused: frozenset[int]
    reasons: Reasons

    @classmethod
    def of(cls, found: SearchResult, limit: float, means: Means) -> "ResidualCosts":
        """Returns the costs under the plan of a search; memory is short where that plan exceeds a limit."""
        problem, solution = found.model.problem, found.unproved_solution
        graph, s = problem.program.graph, solution
        reasons = Reasons(problem.program, solution)
        times = OpTimes(problem.program, solution, reasons, problem.op_classes)
        placed = copy_timeline(graph, s.mesh, s.layouts, s.uses, s.trees)
        fullest = Liveness(placed, found.fitter.pins.donated).fullest_by_op()
        held, lasting = dict[int, int](), dict[int, float]()
        for level in levels(graph):
            for value, size, part in _gaps(level, solution, fullest, limit):
                held[value.id], lasting[value.id] = size, part
        twice = seconds_again(problem.program, solution, times)
        traffic, again = _with_traffic(problem.program, solution, twice)
        ops, is_stored = [op for level in levels(graph) for op in level.ops], placed.timeline.has_memory
        views = frozenset(v.id for op in ops if op.name in (*VIEWS, "constrain") for v in op.outputs)
        numbers = {v.id: problem.index.number_of(v.id) for op in ops for v in op.outputs}
        fused = views.union(v for v, number in numbers.items() if not is_stored[number])
        held |= dict.fromkeys(views, 0)
        kept = frozenset[int]().union(*(boundary_ops(level, held, views) for level in levels(graph)))
        ops_twice = recomputable(problem.program) - kept if means.recompute else frozenset[int]()
        transfers = _transfer_seconds(graph, s) if means.host else {}
        room = s.mesh.topology.host_memory - boundary_bytes(graph, s, found.fitter.pins)
        return cls(
            *(problem.program, ops_twice, held, lasting, traffic, again, twice, transfers, room),
            *(views, fused, reasons),
        )

    def choice(
        self, price: float, kept: frozenset[int] = frozenset(), sent: frozenset[int] | None = None
    ) -> RematChoice:
        """Returns the cheapest choice at a price of memory in seconds per byte.

        Args:
          kept: ids of values that are kept on the device in any case.
          sent: ids of values that are kept in the host's memory, if they are kept; None for those to which it pays, as
            far as there is room.
        """
        sizes = {v: 0 if v in kept else size for v, size in self.held.items()}
        prices = {v: price * size * (1 + LONGEST * self.lasting.get(v, 0.0)) for v, size in sizes.items()}
        paying = (v for v, seconds in self.transfers.items() if seconds < prices.get(v, 0.0))
        hosted = frozenset(paying if sent is None else sent) - kept
        prices |= {v: self.transfers[v] for v in hosted}
        choice = self._cut(
            {v: prices.get(v, 0.0) + self.traffic.get(v, 0.0) for v in {**prices, **self.traffic}}, self.again
        )
        choice = choice._replace(hosted=choice.kept & hosted)
        if sum(self.held.get(v, 0) for v in choice.hosted) > self.room:
            return self.choice(price, kept, self._with_room(choice.hosted))
        return choice

    def _with_room(self, values: Iterable[int]) -> frozenset[int]:
        """Returns the values that have room in the host's memory, those first that take the fewest seconds per byte."""
        ordered = sorted(values, key=self._sending_order)
        sizes = accumulate(self.held.get(v, 0) for v in ordered)
        return frozenset(v for v, size in zip(ordered, sizes, strict=True) if size <= self.room)

    def _sending_order(self, v: int) -> tuple[float, int]:
        return self.transfers[v] / max(1, self.held.get(v, 0)), v

    def _cut(self, prices: Mapping[int, float], again: Mapping[int, float]) -> RematChoice:
        kept = {**prices, **dict.fromkeys(self.views, inf)}
        return cheapest_recomputation(self.program.graph, self.ops, RematPrices(kept, again, self.fused))

    def ladder(self) -> list[Rung]:
        """Returns choices with more and more work, without that which keeps everything; the first is the fastest."""
        if not self._middle_price:
            return []
        steps = (STEP ** (i - PRICES // 2) for i in range(PRICES))
        rungs = [
            Rung(self.choice(price), price) for price in (self._middle_price * k for k in (NEXT_TO_NOTHING, *steps))
        ]
        between = [Rung(self.choice(price), price) for price in _between(rungs)]
        rungs = sorted([*rungs, *between], key=lambda rung: rung.price)
        rungs = [*rungs[:1], *(rung for a, b in pairwise(rungs) for rung in (*self._sending_more(a, b), b))]
        ladder = list[Rung]()
        for rung in rungs:
            more = self.saved(rung.choice) - (self.saved(ladder[-1].choice) if ladder else 0)
            if (rung.choice.ops or rung.choice.hosted) and (not ladder or more > NEGLIGIBLE * self.saved(rung.choice)):
                ladder.append(rung)
        return ladder

    def _sending_more(self, a: Rung, b: Rung) -> Iterator[Rung]:
        """Yields rungs between two, that send more and more: values of equal sizes pay at the same price."""
        more = sorted(b.choice.hosted - a.choice.hosted, key=self._sending_order)
        for stop in range(1, len(more), len(more) // SENT + 1):
            sent = a.choice.hosted.union(more[:stop])
            yield Rung(self.choice(a.price, sent=sent), a.price, sent)

    @cached_property
    def _middle_price(self) -> float:
        """The price at which all values together are worth as much as all operations and transfers."""
        size = sum(self.held.values())
        work = sum(self.twice.get(op, 0.0) for op in self.ops) + sum(self.transfers.values())
        return work / size if size else 0.0

    @cached_property
    def as_written(self) -> RematChoice:
        """The choice in which hardly anything is computed again."""
        return self._cut({v: self._middle_price * NEXT_TO_NOTHING * size for v, size in self.held.items()}, self.twice)

    @cached_property
    def promise(self) -> float:
        """The seconds per step that the fastest choice saves, whatever the memory."""
        return self.seconds(self.as_written) - self.seconds(self.choice(self._middle_price * NEXT_TO_NOTHING))

    @cached_property
    def results(self) -> dict[int, tuple[int, ...]]:
        """Per operation, the ids of its results."""
        return {op.id: tuple(v.id for v in op.outputs) for _, op in walk(self.program.graph)}

    def saved(self, choice: RematChoice) -> int:
        """Returns the bytes on a device that a choice keeps less than the step as it is written."""
        return self.bytes(self.as_written) - self.bytes(choice)

    def bytes(self, choice: RematChoice) -> int:
        """Returns the bytes on a device of all that a choice keeps where memory is short."""
        return sum(self.held.get(v, 0) for v in choice.kept - choice.hosted)

    def seconds(self, choice: RematChoice) -> float:
        """Returns the seconds per step of what a choice computes again and sends, and of traffic of what it keeps."""
        again = sum(self.again.get(op, 0.0) for op in choice.parts)
        sent = sum(self.transfers[v] for v in choice.hosted)
        return again + sent + sum(self.traffic.get(v, 0.0) for v in choice.kept)


def _between(rungs: Sequence[Rung]) -> Iterator[float]:
    """Yields a price between each two at which choices differ, but for the first."""
    for a, b in pairwise(rungs):
        if a.choice.rewrite != b.choice.rewrite and b.price < a.price * STEP**2:
            yield sqrt(a.price * b.price)


def _gaps(
    level: Graph, solution: Solution, fullest: Mapping[int, int], limit: float
) -> Iterator[tuple[Value, int, float]]:
    """Yields the values of a level's forward pass with their bytes on a device and how long they would be kept."""
    position = {op.id: i for i, op in enumerate(level.ops)}
    over = [0, *accumulate(fullest[op.id] > limit for op in level.ops)]
    needed = dict[int, int]()
    for i, op in enumerate(level.ops):
        for x in values(op.inputs) if reads_residual(op) else ():
            needed.setdefault(x.id, i)
    for op in reversed(level.ops):
        if op.phase == FORWARD:
            first = min((needed[v.id] for v in op.outputs if v.id in needed), default=len(level.ops))
            for x in values(op.inputs) if first < len(level.ops) else ():
                needed[x.id] = min(first, needed.get(x.id, first))

    def part(start: int, stop: int) -> tuple[int, float]:
        return over[stop] - over[start], (stop - start) / len(level.ops)

    for i, op in enumerate(level.ops):
        for v in op.outputs if op.phase == FORWARD else ():
            if v.id in needed:
                full, lasting = part(min(i + 1, needed[v.id]), needed[v.id])
                yield v, solution.local_bytes(v) if full else 0, lasting
    for loops in layer_loops(level):
        full, lasting = part(position[loops.forward.id], position[loops.backward.id] + 1)
        body, length = loops.forward.bodies[0], loops.forward.params["length"]
        for v in (*body.inputs, *(v for op in body.ops for v in op.outputs)):
            yield v, length * solution.local_bytes(v) if full else 0, lasting


def seconds_again(program: TracedProgram, solution: Solution, times: OpTimes) -> dict[int, float]:
    """Returns per operation its seconds per step and those of collectives that it waits for, its bodies included."""
    reasons, sent = Reasons(program, solution), dict[int, float]()
    for value, steps in solution.trees.items():
        for step in steps:
            if step.kind in COLLECTIVES:
                consumer = reasons.consumer(value, step).id
                sent[consumer] = sent.get(consumer, 0.0) + step.seconds
    for inside in collectives_inside(program.graph, solution):
        sent[inside.op.id] = sent.get(inside.op.id, 0.0) + inside.seconds
    found = dict[int, float]()

    def add(op: Op, trips: int) -> float:
        own = trips * (times.seconds(op) + sent.get(op.id, 0.0))
        found[op.id] = own + sum(add(each, body.trips) for body in op.bodies for each in body.ops)
        return found[op.id]

    for op in program.graph.ops:
        add(op, program.graph.trips)
    return found


def _with_traffic(
    program: TracedProgram, solution: Solution, twice: Mapping[int, float]
) -> tuple[dict[int, float], dict[int, float]]:
    """Returns the seconds of traffic that keeping values causes, by their ids, and what second runs add, by op id."""
    sizes, uses = solution.mesh.sizes_by_name, residual_uses(program.graph, ends_fusion)
    traffic, again = dict[int, float](), dict(twice)
    copies = solution.mesh.topology.fusion == "kernels"
    for graph, op in walk(program.graph):
        for v in op.outputs if op.id in again else ():
            if v.id in uses:
                use, elements = uses[v.id], prod(solution.layouts[v.id].local_shape(v.shape, sizes))
                once = graph.trips * elements * v.itemsize / solution.mesh.topology.memory_bandwidth
                moved = use.fused + (not use.written and (use.fused or not use.idle))
                traffic[v.id] = once * (moved + copies * use.copied)
                again[op.id] = 0.0 if use.idle else max(0.0, again[op.id] - once * use.fused)
    return traffic, again


def _transfer_seconds(graph: Graph, solution: Solution) -> dict[int, float]:
    """Returns the seconds per step to send values to the host's memory and back, by the ids of those that can be."""
    topology, can = solution.mesh.topology, hostable(graph)
    defined = [(graph.trips, v) for v in graph.inputs]
    defined += [(body.trips, v) for _, op in walk(graph) for body in op.bodies for v in body.inputs]
    defined += [(home.trips, v) for home, op in walk(graph) for v in op.outputs]
    found = dict[int, float]()
    for trips, v in defined:
        if v.id in can:
            per_byte = 1 / topology.host_load + 1 / topology.host_store
            found[v.id] = trips * (solution.local_bytes(v) * per_byte + 2 * topology.overhead)
    return found


# ---- Plans -----------------------------------------------------------------------------------------------------------


class Planned(Protocol):
    """A plan under a choice, or the reason why there is none."""

    @property
    def seconds(self) -> float:
        """Seconds of the plan; infinite if none fits the memory."""
        ...

    @property
    def spare(self) -> float:
        """Bytes that the plan leaves of the limit."""
        ...

    @property
    def least(self) -> float:
        """The least bytes found if none fits; infinite if they are not known."""
        ...


P = TypeVar("P", bound=Planned)


def plan_residuals(
    costs: ResidualCosts,
    excess: float,
    limit: float,
    attempt: Callable[[RematChoice | MixedChoice], P],
    clock: Deadline,
    divides: bool = True,
) -> P | None:
    """Returns the fastest plan found that does not keep all residuals on the device; None if it has to keep them.

    If none fits, that of the last rung is returned.

    Args:
      costs: of residuals.
      excess: bytes by which the plan that keeps everything exceeds the limit.
      limit: bytes per device.
      attempt: plans the program under a choice, within the limit.
      clock: after which only the last rung is planned, unless one fits.
      divides: loops over layers may be divided.
    """
    ladder, tried = costs.ladder(), dict[int, P]()
    if not ladder:
        return None

    def at(i: int) -> P:
        if i not in tried:
            tried[i] = attempt(ladder[i].choice)
        return tried[i]

    saved, last = [costs.saved(rung.choice) for rung in ladder], len(ladder) - 1
    best = last if clock.expired() else min(bisect_left(saved, excess), last)
    while at(best).seconds == inf and best < last:  # up to the first that fits
        best = last if len(tried) >= PLANS // 2 or clock.expired() else (best + last + 1) // 2
    if tried[best].seconds == inf:
        return tried[best]
    while len(tried) < PLANS and not clock.expired():
        refused = max((i for i, plan in tried.items() if plan.seconds == inf), default=-1)
        factor = (excess + tried[best].spare) / saved[best] if saved[best] > 0 else 1.0  # of bytes that were saved
        factor = max(1.0, factor)  # less says nothing: plans fill the room that there is, as by keeping gathered values
        least = bisect_left(saved, ENOUGH * excess / factor)
        jump = (least,) if len(tried) == 1 else ()  # at once as far as the first plan says
        near = (i for i in (*jump, *(best + k for k in AROUND)) if refused < i <= last and i not in tried)
        around = [i for i in near if i > best or i >= least]
        if not around:
            break
        if at(around[0]).seconds < tried[best].seconds:
            best = around[0]
    choice, plan = _filled(costs, ladder[best], tried[best], attempt, clock)
    if excess <= 0:
        return plan
    if exceeding := [i for i, each in tried.items() if each.seconds == inf]:
        over = ladder[max(exceeding)].choice, tried[max(exceeding)]
        choice, plan = _emptied(costs, ladder[best], over, (choice, plan), limit, attempt, clock)
    return _divided(costs, [rung.choice for rung in ladder], choice, plan, attempt, clock) if divides else plan


def _filled(
    costs: ResidualCosts, rung: Rung, best: P, attempt: Callable[[RematChoice], P], clock: Deadline
) -> tuple[RematChoice, P]:
    """Returns the plan with residuals kept in the memory that it leaves, as far as that is faster, and its choice."""
    kept, choice, refused = frozenset[int](), rung.choice, set[int]()
    for _ in range(FILLED):
        spare, more, worth = best.spare, list[int](), _worth_keeping(costs, rung, choice, kept, refused)
        for value, size in worth:
            if size <= spare:
                more.append(value)
                spare -= size
        sent = sorted((size, -i, value) for i, (value, size) in enumerate(worth) if value in choice.hosted)
        more = more or [value for *_, value in sent[:1]]  # it may fit all the same: plans fill the room that there is
        if not more or clock.expired():
            break
        trial_choice = costs.choice(rung.price, kept.union(more), rung.sent)
        trial = attempt(trial_choice)
        if trial.seconds < best.seconds:
            best, choice, kept = trial, trial_choice, kept.union(more)
        else:
            refused.update(more[1:] or more)
    return choice, best


def _emptied(
    costs: ResidualCosts,
    rung: Rung,
    over: tuple[RematChoice, P],
    found: tuple[RematChoice, P],
    limit: float,
    attempt: Callable[[RematChoice], P],
    clock: Deadline,
) -> tuple[RematChoice, P]:
    """Returns the plan with fewer residuals than a choice that does not fit, as far as that is faster, and its choice.

    Args:
      rung: that fits.
      over: the choice that does not, and why.
      found: the best choice so far, and its plan, which are returned if none is faster.
      limit: bytes per device.
    """
    (choice, best), (larger, trial) = found, over
    kept = (larger.kept - larger.hosted) - (rung.choice.kept - rung.choice.hosted)
    for _ in range(EMPTIED):
        before, kept = kept, _keeping_less(costs, rung, kept, trial.least - limit)
        trial_choice = costs.choice(rung.price, kept, rung.sent)
        saves = costs.seconds(choice) - costs.seconds(trial_choice) >= WORTH * best.seconds
        if kept == before or not saves or clock.expired():
            break
        trial = attempt(trial_choice)
        if trial.seconds < inf:
            return (trial_choice, trial) if trial.seconds < best.seconds else found
    return found


def _keeping_less(costs: ResidualCosts, rung: Rung, kept: frozenset[int], short: float) -> frozenset[int]:
    """Returns the values to keep beside a rung to save so many bytes more; those are left out that cost least.

    Values of equal bytes, from operations of equal seconds, count as alike: layers may be many.
    """
    choice, made = costs.choice(rung.price, kept, rung.sent), {v: op for op, vs in costs.results.items() for v in vs}
    alike, gains = dict[tuple[int, float], tuple[float, int]](), dict[int, tuple[float, int]]()
    for value in sorted(v for v in kept if costs.held.get(v)):
        kind = costs.held[value], costs.again.get(made.get(value, -1), 0.0)
        if kind not in alike:
            less = costs.choice(rung.price, kept - {value}, rung.sent)
            alike[kind] = costs.seconds(less) - costs.seconds(choice), costs.saved(less) - costs.saved(choice)
        if alike[kind][1] > 0:
            gains[value] = alike[kind]
    left_out = set[int]()
    while short > 0 and len(left_out) < len(gains):
        value = min(gains.keys() - left_out, key=lambda v: (gains[v][0] / min(gains[v][1], short), v))
        left_out.add(value)
        short -= gains[value][1]
    for value in sorted(left_out, key=lambda v: (-gains[v][0], v)):
        if short + gains[value][1] <= 0:  # the others are enough
            left_out.remove(value)
            short += gains[value][1]
    return kept - left_out


def _divided(
    costs: ResidualCosts,
    others: Iterable[RematChoice],
    choice: RematChoice,
    best: P,
    attempt: Callable[[MixedChoice], P],
    clock: Deadline,
) -> P:
    """Returns the plan in which the last iterations of loops over layers follow a faster choice, as many as fit.

    Args:
      others: of which that is one.
      choice: of the other iterations, and of the best plan found so far, which is returned if none is faster.
    """
    pairs, tried, refused, fits = list[_Pair](), set[MixedChoice](), 0.0, 1.0
    for other in others:
        room, gain = costs.saved(choice) - costs.saved(other), costs.seconds(choice) - costs.seconds(other)
        if room > 0 and gain > 0:
            pairs.append(_Pair(other, room, gain, 1 - min(MOST, best.spare / room)))
    pair = max(pairs, key=lambda pair: pair.gain * (1 - pair.part), default=_Pair(choice, 1, 0.0, 1.0))
    part = pair.part
    for _ in range(PARTS):
        if pair.gain * (fits - part) < WORTH * best.seconds or clock.expired():
            break
        mixed = mixed_choice(costs.program.graph, choice, pair.other, part)
        if mixed is None or mixed in tried:
            break
        tried.add(mixed)
        trial = attempt(mixed)
        if trial.seconds < inf:
            fits, part = part, max(part - trial.spare / pair.room, (refused + part) / 2)
        else:
            refused, part = part, (part + fits) / 2
        best = min(best, trial, key=lambda plan: plan.seconds)
    return best


class _Pair(NamedTuple):
    """A choice beside one that fits.

    Args:
      other: the choice.
      room: bytes on a device that it keeps more.
      gain: seconds per step that it takes less.
      part: of the iterations that cannot follow it, about, for lack of memory.
    """

    other: RematChoice
    room: int
    gain: float
    part: float


def _worth_keeping(
    costs: ResidualCosts, rung: Rung, choice: RematChoice, kept: frozenset[int], refused: Collection[int]
) -> list[tuple[int, int]]:
    """Returns values that are computed again, or sent, with the bytes to keep them; those that save most time first."""
    found, seconds = list[tuple[float, int, int]](), costs.seconds(choice)
    ops = sorted(op for op in choice.ops if costs.again[op] > NEGLIGIBLE * seconds)
    for value in (*(value for op in ops for value in costs.results[op]), *sorted(choice.hosted)):
        if value not in kept and value not in refused and costs.held.get(value):
            gain = seconds - costs.seconds(costs.choice(rung.price, kept | {value}, rung.sent))
            if gain > NEGLIGIBLE * seconds:
                found.append((gain, value, costs.held[value]))
    return [(value, size) for _, value, size in sorted(found, reverse=True)]


# ---- Facts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remat:
    """What a program computes again, and sends to the host until then, for its plan.

    Args:
      choice: the operations that run twice, and the values that are sent.
      rewrite: the choice by the ids of the program before, with its loops divided.
      made: the rewritten program.
      costs: by which they were chosen.
      fastest: bytes and seconds of the best plan found that keeps everything, without a memory limit.
      kept: those of the best one within the limit, if there is any.
      divided: the program before, if loops of it are divided.
      stages: ``Pipeline.recompute`` by the planner's choice; empty without stages. Programs and costs are then those
        before the step is cut into stages.
      redone: all that stages do not keep beside their inputs, if they keep nothing else.
    """

    choice: RematChoice | MixedChoice
    rewrite: Rewrite
    made: Recomputing
    costs: ResidualCosts
    fastest: tuple[int, float]
    kept: tuple[int, float] | None
    divided: DividedProgram | None = None
    stages: str = ""
    redone: RecomputedValue | None = None

    def facts(self, program: TracedProgram, solution: Solution, classes: OpClasses) -> Recomputation:
        """Returns what is computed again, under a solution of the program in which it is."""
        if self.stages:
            again, producer = self.costs.twice, graph_index(self.costs.program.graph)
        else:
            times = OpTimes(program, solution, Reasons(program, solution), classes)
            again, producer = seconds_again(program, solution, times), graph_index(program.graph)
        found = [self.redone] if self.redone else list[RecomputedValue]()
        held = {v: size for v, size in self.costs.held.items() if v not in self.costs.fused}  # others take no memory
        origins, written = self._origins(), self.costs.as_written.kept
        for residual in self.made.residuals:
            made = residual.originals if self.stages else [v.id for v in residual.copies]
            ops = {op.id for v in made if (op := producer.ops[producer.producer[producer.number_of(v)]])}
            kept = [at for v in residual.originals if (at := origins(v)).value in written]
            named = max(kept, key=lambda at: held.get(at.value, 0), default=origins(residual.value))
            name = self.costs.reasons.name_and_line(named.value)
            name += f" and {len(kept) - 1} more" if len(kept) > 1 else ""
            name += f", {named.iterations}" if named.iterations else ""
            size, last = sum(round(at.share * held.get(at.value, 0)) for at in kept), found[-1] if found else None
            each = RecomputedValue(name, size, sum(again[op] for op in ops), len(ops))
            if last and 0 in (size, last.bytes):  # what takes no memory belongs to what it is computed with
                found[-1] = RecomputedValue(
                    (last if last.bytes else each).name,
                    last.bytes + size,
                    last.seconds + each.seconds,
                    last.operations + each.operations,
                )
            else:
                found.append(each)
        twice, spared, hosted = (tuple(sorted(ids)) for ids in self.rewrite)
        divided = () if isinstance(self.choice, RematChoice) else self.choice.trips
        saved = sum(held.get(v, 0) for v in written) - self._kept(held) + (self.redone.bytes if self.redone else 0)
        return Recomputation(twice, tuple(found), saved, self.fastest, self.kept, spared, hosted, divided, self.stages)

    def _origins(self) -> "Callable[[int], Origin]":
        """Returns what says of a value of the program before, with its loops divided, where it is from."""
        if self.divided is None:
            return Origin
        found, trips = dict[int, Origin](), self.divided.trips
        for part, numbers in enumerate(self.divided.values):
            for value, number in numbers.items():
                first, whole = trips.get(value, (1, 1))
                own, which = (whole - first, "last") if part else (first, "first")
                found[number] = Origin(value, own / whole, f"{which} {own} of {whole} iterations" if whole > 1 else "")
        return found.__getitem__

    def _kept(self, held: Mapping[int, int]) -> int:
        """Returns the bytes on a device of all that is kept."""
        choices = (self.choice,) if isinstance(self.choice, RematChoice) else (self.choice.first, self.choice.second)
        total, trips = 0.0, self.divided.trips if self.divided else {}
        for part, choice in enumerate(choices):
            for v in choice.kept:
                first, whole = trips.get(v, (1, 1))
                total += held.get(v, 0) * ((whole - first) if part else first) / whole
        return round(total)


class Origin(NamedTuple):
    """Where a value of a program with divided loops is from.

    Args:
      value: its id in the program before.
      share: of the iterations, in which it is.
      iterations: these as text; nothing for all.
    """

    value: int
    share: float = 1.0
    iterations: str = ""
