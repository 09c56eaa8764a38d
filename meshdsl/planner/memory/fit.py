"""The memory limit: put a price on bytes where memory is short, and raise it until the plan fits.

Only a few program points ever bind. The fullest point of the current plan is added to the priced
points, every value alive there pays per byte, and the step is solved again (Lagrangian
relaxation with lazily generated rows). When the unpriced optimum fits, it is the optimum. Once a plan fits, lower
prices are tried, and of the plan that just does not fit is taken over what leaves the limit kept.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from math import inf
from weakref import WeakKeyDictionary

import numpy as np

from meshdsl.errors import PinError
from meshdsl.ir.solution import Pins
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.planner.costs.steiner import Edges
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.liveness.peak import Liveness, Peak
from meshdsl.planner.liveness.timeline import CopyTimeline, ReshardedCopies, timeline_of
from meshdsl.planner.memory.branch_and_bound import MOST, BranchAndBound, lns_on_many_axes, lns_within_memory
from meshdsl.planner.memory.combine import Crossover, Feasibility, Groups, PlanDifference
from meshdsl.planner.memory.infeasible import larger, too_small
from meshdsl.planner.memory.pricing import PricedPoints
from meshdsl.planner.objective import CostedPlan, Evaluator, moves_along
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model, Prices
from meshdsl.planner.search.search import evaluate_plan, priced_plans, searches_jointly
from meshdsl.util.arrays import index_array, intern_ids, object_id

# ---- Placer ----------------------------------------------------------------------------------------------------------
# The states of a model's nodes as layouts on the timeline of its program.
#
# The memory of many plans of one program is asked for. Which port makes which value, and which is which reading, is
# worked out once for all of them; what moves lead through, once for equal values that are moved alike.


class PlanMaterializer:
    """Places plans of a model.

    ``values``: per value of the program, by its number, the port that makes it.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.timeline = model, timeline_of(model.problem.program.graph, model.mesh.topology.backend)
        wiring = model.wiring
        self.values, self._read = wiring.producer, wiring.port_of_use
        self._layouts = dict(model.ports.all_layouts)
        self._known: dict[tuple[int, Edges], list[tuple[int, int]]] = {}

    def placed(self, choice: CostedPlan) -> CopyTimeline:
        """The program under the layouts of a plan."""
        ports = self.model.ports
        layouts, moved = ports.layout_numbers(ports.layouts(choice.rows)), self._moved(choice)
        return CopyTimeline(
            self.timeline, self.model.mesh, tuple(self._layouts), layouts[self.values], layouts[self._read], moved
        )

    def _moved(self, choice: CostedPlan) -> ReshardedCopies:
        """The moves of a plan."""
        values, spaces = self.timeline.numbers.numbers_of(choice.edges), self.model.spaces[self.values]
        ways = intern_ids(map(object_id, choice.edges.values()))  # those that lead alike are mostly one object
        alike = np.unique(spaces[values] * (ways.max(initial=0) + 1) + ways, return_index=True, return_inverse=True)
        moved = list(choice.edges.items())
        ends = [index_array(chain(*self._ends(*moved[i]))).reshape(-1, 2) for i in alike[1].tolist()]
        counts = index_array(map(len, ends))[alike[2]]
        begins = np.cumsum([0, *map(len, ends)])[alike[2]]
        at = np.arange(counts.sum()) + (begins - np.cumsum(counts) + counts).repeat(counts)
        before, after = np.concatenate([np.empty((0, 2), dtype=np.intp), *ends])[at].T
        return ReshardedCopies(values.repeat(counts), before, after)

    def _ends(self, value: int, edges: Edges) -> list[tuple[int, int]]:
        """The layouts between which a value is moved, by number."""
        key = object_id(self.model.reshard_costs[value]), edges
        if key not in self._known:
            moves = moves_along(self.model, value, edges)
            self._known[key] = [(self._number(move.before), self._number(move.after)) for move in moves]
        return self._known[key]

    def _number(self, layout: Layout) -> int:
        return self._layouts.setdefault(layout, len(self._layouts))


# ---- Weigher ---------------------------------------------------------------------------------------------------------
# What plans of a model hold in memory, and the best one that comes of two of them.


_TRIED = 50_000  # operations of all plans together that are made of halves of parts


class PeakCache:
    """Weighs plans.

    Args:
      evaluator: of the model.
      donated: positions of the inputs that are given up.
    """

    def __init__(self, evaluator: Evaluator, donated: frozenset[int]) -> None:
        self.model, self._evaluator, self._donated = evaluator.model, evaluator, donated
        self._placer = PlanMaterializer(self.model)
        self._peaks: WeakKeyDictionary[CostedPlan, Peak] = WeakKeyDictionary()
        self._latest: tuple[CostedPlan, Liveness] | None = None

    def peak(self, choice: CostedPlan) -> Peak:
        """The fullest point of a plan."""
        if choice not in self._peaks:
            self._peaks[choice] = self._lives(choice).peak()
        return self._peaks[choice]

    def unpriced(self, choice: CostedPlan, limit: float, priced: Iterable[int]) -> Peak | None:
        """The point at which a plan holds most of what has no price, if more than a limit: no price will do then.

        Args:
          priced: ids of the values that have one.
        """
        lives = self._lives(choice)
        free = ~lives.placed.timeline.numbers.mask_of(priced)
        held = [(int(lives.by_value(point[1])[free].sum()), point) for point in lives.over(limit)]
        most, point = max(held, key=lambda found: found[0], default=(0, (0, ())))
        return lives.at(*point) if most > limit else None

    def mixed(self, best: CostedPlan, over: CostedPlan, limit: float) -> CostedPlan:
        """``best`` with as much as fits of what ``over`` does, which does not fit."""
        made = partial(evaluate_plan, self.model, self._evaluator)
        judge = Feasibility(limit, made, self.peak, lambda choice: self._lives(choice).over(limit), self._parts)
        return Crossover(self.model, best, over, judge, _TRIED // len(self.model.nodes)).mixed()

    def _lives(self, choice: CostedPlan) -> Liveness:
        """The memory of a plan; that of the last one asked for is kept."""
        if self._latest is None or self._latest[0] is not choice:
            self._latest = choice, Liveness(self._placer.placed(choice), self._donated)
        return self._latest[1]

    def _parts(self, one: CostedPlan, other: CostedPlan, groups: Groups) -> PlanDifference:
        """Two plans, come apart."""
        lives = self._lives(one), self._lives(other)
        return PlanDifference(self._evaluator, groups, (one, other), lives, self._placer.values)


# ---- Fit -------------------------------------------------------------------------------------------------------------


_ROUNDS, _TRIALS = 14, 2
_RAISE = 3.0
_FRESH = 2  # times that a price is tried again as points come in that did not pay it
_MIXED = 3  # plans that do not fit of which parts are taken over
_FIRST = 100.0  # how much less than the first price is nearly nothing
_FEW, _HALVINGS, _PRICED = 1, 6, 20_000  # of the price: at least, at most, and operations of all of them together ...
_DEAR = 5e-2  # part of a plan's cost more than without a limit, for a higher price to be tried as well ...
_DEARER = 1e-2  # ... and for it to be decided anew on many mesh axes, where messages settle worse
_NEAR = 2e-3  # ... as long as the plan is so much slower than one that does not fit
_LOW = 0.25  # part of a price at which plans fit, for those that are decided anew from one that does


class MemoryFitter:
    """Searches for the cheapest plan within a limit of bytes per device.

    Args:
      model: of the program under ``pins``.
      like: searched under other pins, where to begin: with its prices.
    """

    def __init__(self, model: Model, pins: Pins, like: "MemoryFitter | None" = None) -> None:
        self.model, self.pins, self.quick = model, pins, like is not None
        self.evaluator = Evaluator(model)
        self.weigher = PeakCache(self.evaluator, pins.donated)
        self.points: PricedPoints = PricedPoints(model, pins.donated, like.points if like else None)
        self.price: float = like.price if like else 0.0  # the last one
        self.keeps = True  # whether one copy is priced of what is kept for later, or all that are made
        self.low = 0.0  # one at which no plan fitted, or nearly nothing
        self.bound = 0.0  # what no plan that fits can cost less than, as far as boxes say
        self._joint: NetworkBuilder | None = None
        self.over: list[CostedPlan] = []  # plans that did not fit, the latest first

    @property
    def joint(self) -> NetworkBuilder | None:
        """The networks of all states, if they can be looked at together, made when they are first asked for."""
        if searches_jointly(self.model):
            self._joint = self._joint or NetworkBuilder(self.model)
        return self._joint

    @property
    def _is_tiny(self) -> bool:
        """Whether plans are looked for box by box."""
        return len(self.model.nodes) <= MOST and searches_jointly(self.model) and not self.model.deadline.expired()

    @property
    def _is_small(self) -> bool:
        """Whether both ways to price what is kept are worth their time."""
        return len(self.model.nodes) <= _PRICED

    def peak(self, choice: CostedPlan) -> Peak:
        """The fullest point of a plan."""
        return self.weigher.peak(choice)

    def fit(self, choice: CostedPlan, limit: float) -> tuple[CostedPlan, Peak]:
        """``choice`` if it fits; else the cheapest plan found that does; MemoryLimitError if none does."""
        peak = self.peak(choice)
        if peak.bytes <= limit:
            return choice, peak
        start = self.price or self.model.scale.seconds(choice.cost) / max(peak.bytes, 1) / 8
        least = choice
        for keeps in (True, False):
            self.keeps = keeps
            found, found_peak = self._fitted(choice, peak, start, limit, keeps and self._is_small)
            if found_peak.bytes <= limit:
                return found, found_peak
            least = min(least, found, key=lambda choice: self.peak(choice).bytes)
        least, none = self._smallest(least, limit)
        if self.peak(least).bytes <= limit:
            return least, self.peak(least)
        raise too_small(self.model.problem, self.pins, self.peak(least), limit, none, self._larger(self.price, limit))

    def resumed(self, known: CostedPlan, free: CostedPlan, limit: float) -> CostedPlan | None:
        """The cheapest plan found that fits at the price that bytes have, with parts of plans that do not; often none.

        Args:
          known: a plan that may fit. free: as for ``nearer``; the search is around it, for equal layers do alike there.
        """
        found = [known, self._priced([free], self.price, limit)]
        others = [free, *(choice for choice in found if self.peak(choice).bytes > limit)]
        if len(others) > len(found):
            found.append(self._fitted(found[-1], self.peak(found[-1]), self.price, limit, self._is_small)[0])
        fitting = [choice for choice in found if self.peak(choice).bytes <= limit]
        return self.mixed(min(fitting, key=lambda choice: choice.cost), others, limit) if fitting else None

    def _smallest(self, least: CostedPlan, limit: float) -> tuple[CostedPlan, bool]:
        """The smallest plan found, or one that fits, and whether that is proved to be the smallest of all."""
        if not self._is_tiny:
            return least, False
        found = BranchAndBound(self.model, self.evaluator, self.points, self.peak, least).smallest(limit)
        return found.best, found.bound == inf

    def proved(self, best: CostedPlan, limit: float) -> tuple[CostedPlan, Peak]:
        """The cheapest plan found that fits, of a step small enough for ``BranchAndBound``; ``bound`` is what it
        proves.

        Args:
          best: one that fits.
        """
        if self._is_tiny:
            best, self.bound = BranchAndBound(self.model, self.evaluator, self.points, self.peak, best).cheapest(limit)
        return best, self.peak(best)

    def _fitted(
        self, choice: CostedPlan, peak: Peak, price: float, limit: float, both: bool
    ) -> tuple[CostedPlan, Peak]:
        """The cheapest plan found that fits, at rising prices; the smallest found if none does.

        Args:
          both: price what is kept both ways at every price.
        """
        least, fresh = (choice, peak), 0
        self.low = price / _FIRST
        for _ in range(2 * _ROUNDS if both else _ROUNDS):
            self.price = price
            choice, peak = self._next(choice, peak, price, limit)
            least = min(least, (choice, peak), key=lambda found: found[1].bytes)
            if peak.bytes <= limit:
                break
            self.over = [choice, *self.over]
            fresh = fresh + 1 if peak not in self.points else _FRESH
            if fresh >= _FRESH and both and self.keeps:
                self.keeps = False
            elif fresh >= _FRESH:
                self.low, price, fresh = price, price * _RAISE, 0
                self.keeps |= both
                if unpriced := self.weigher.unpriced(choice, limit, self.points.values):
                    self.points.add(unpriced)
        return least

    def nearer(self, best: CostedPlan, free: CostedPlan, limit: float) -> list[CostedPlan]:
        """Plans that fit, the cheapest first, found between the price at which one did and the last at which none did.

        Args:
          best: that was found to fit. free: the cheapest plan of all, which does not.
        """
        low, high, fitting, between = self.low, self.price, [best], self._between(best, free)
        if self._is_small and best.cost > free.cost * (1 + _DEAR) and not self.model.deadline.expired():
            choice = self._priced([best], high * _RAISE, limit)  # messages that settle badly may do better there
            fitting += [choice] if self.peak(choice).bytes <= limit else []
        few = _FEW if self.low <= self.price / _FIRST else 0  # a price at which none fitted has been tried
        for _ in range(max(few, min(_HALVINGS, _PRICED // len(self.model.nodes)))):
            best = min(fitting, key=lambda choice: choice.cost)
            if best.cost <= free.cost * (1 + _NEAR) or self.model.deadline.expired():
                break
            price, between = between if low < between < high else (low * high) ** 0.5, 0.0
            self.keeps ^= self._is_small
            choice = self._priced([best, free, *self.over[:1]], price, limit, sweep=False)
            peak = self.peak(choice)
            if peak.bytes <= limit:
                high, fitting = price, [*fitting, choice]
            else:
                low, self.over = price if peak in self.points else low, [choice, *self.over]
                self.points.add(peak)
        self.price = high
        return sorted(fitting, key=lambda choice: choice.cost)

    def cheaper(self, fitting: list[CostedPlan], free: CostedPlan, limit: float) -> CostedPlan:
        """The cheapest plan that comes of some that fit, with parts of others, or decided anew."""
        over = list({choice.cost: choice for choice in self.over}.values())
        others = sorted(over[: 2 * _MIXED if self._is_small else _MIXED], key=lambda choice: choice.cost)
        found = [self.mixed(choice, others or [free], limit) for choice in (fitting if self._is_small else fitting[:1])]
        best = min(found, key=lambda choice: choice.cost)
        joint = self.joint
        if self._is_small and best.cost > free.cost * (1 + (_DEAR if joint else _DEARER)):
            prices = Prices(), self.points.prices(self.price * _LOW, True)
            decided = partial(lns_within_memory, joint) if joint else partial(lns_on_many_axes, self.model)
            best = decided(self.evaluator, best, prices, partial(self._fitting, limit))
        return best

    def _between(self, best: CostedPlan, free: CostedPlan) -> float:
        """The price at which a plan that fits and the cheapest of all cost the same."""
        return self.model.scale.seconds(best.cost - free.cost) / (self.peak(free).bytes - self.peak(best).bytes)

    def _fitting(self, limit: float, best: CostedPlan, other: CostedPlan) -> CostedPlan:
        """The other plan if it fits, else ``best`` with what can be taken over from it."""
        return other if self.peak(other).bytes <= limit else self.weigher.mixed(best, other, limit)

    def mixed(self, best: CostedPlan, others: Iterable[CostedPlan], limit: float) -> CostedPlan:
        """The cheapest plan found that does some things as others do that do not fit."""
        for choice in others:
            if choice.cost * (1 + _NEAR) < best.cost:
                best = self.weigher.mixed(best, choice, limit)
        return best

    def let_go(self) -> None:
        """Of the networks: nothing more is looked for."""
        self._joint = None

    def _larger(self, price: float, limit: float) -> Iterator[tuple[Mesh, int]]:
        """Larger meshes, as long as the pins hold there, and the least bytes found on each; until that fits."""
        program = self.model.problem.program
        for mesh in larger(self.model.mesh):
            try:
                other = MemoryFitter(Model(make_problem(program, mesh, self.pins)), self.pins)
            except PinError:
                return
            other.points = PricedPoints(other.model, self.pins.donated, self.points)
            found = other._leanest(price, limit)
            yield mesh, found
            if found <= limit:
                return

    def _leanest(self, price: float, limit: float) -> int:
        """Bytes of the smallest of the first plans at this price."""
        choice = evaluate_plan(self.model, self.evaluator, self.model.first_states)
        peak = self.peak(choice)
        found = [peak.bytes]
        for _ in range(_TRIALS):
            choice, peak = self._next(choice, peak, price, limit)
            found.append(peak.bytes)
        return min(found)

    def _next(self, choice: CostedPlan, peak: Peak, price: float, limit: float) -> tuple[CostedPlan, Peak]:
        """The next plan, its peak's point priced as well."""
        self.points.add(peak)
        choice = self._priced([choice], price, limit)
        return choice, self.peak(choice)

    def _priced(self, known: list[CostedPlan], price: float, limit: float, sweep: bool = True) -> CostedPlan:
        """The cheapest plan found that fits, or the smallest; the best of those known is where to begin."""
        joint = self._joint if self.quick else self.joint  # what is asked for once is made at its price
        self.model.prices = self.points.prices(price, self.keeps)
        found = priced_plans(self.model, self.evaluator, known, joint, sweep, self._is_small or not self.keeps)
        self.model.prices = Prices()
        return self.evaluator.exact(min(found, key=lambda choice: (max(self.peak(choice).bytes, limit), choice.cost)))
