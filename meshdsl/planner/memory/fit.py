"""Fit a plan into the memory limit: put a price on bytes where memory is short, and raise it until the plan fits.

The unconstrained optimum is the constrained one if it fits. Otherwise the constraint "at every program point, live
bytes <= limit" is relaxed (Lagrangian relaxation with lazily generated rows, Geoffrion 1974): only a few program
points ever bind, so the peak of the current plan joins the *priced points*, every value that is live there costs
``price`` seconds per byte, and the step is solved again at these prices.

    limit 80 GB, plan of 90 GB with its peak at the loss     price 1e-12 s/byte at the loss     -> 84 GB, peak elsewhere
                                                             ... and at that point as well      -> 82 GB, same point
                                                             price 3e-12                        -> 78 GB: it fits

The phases, each of which returns a ``FitResult`` and takes that of the one before:

1. ``fit``        raises the price until a plan fits, or raises ``MemoryLimitError``;
2. ``bisect``     searches between that price and the highest one at which none fitted;
3. ``improve``    adopts parts of cheaper plans that do not fit (``combine``), and searches neighbourhoods of the plan
                  (``branch_and_bound.lns_within_memory``);
4. ``prove``      branches and bounds over plans of small steps (``branch_and_bound``).

``resume`` replaces 1 and 2 after a change of pins: it starts at the price that held before.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
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
from meshdsl.planner.liveness.peak import Liveness, Peak, ProgramPoint
from meshdsl.planner.liveness.timeline import CopyTimeline, ReshardedCopies, timeline_of
from meshdsl.planner.memory.branch_and_bound import BranchAndBound, lns_on_many_axes, lns_within_memory
from meshdsl.planner.memory.combine import Crossover, Feasibility, Parts, PlanDifference
from meshdsl.planner.memory.infeasible import infeasible_error, larger_meshes
from meshdsl.planner.memory.pricing import PricedPoints
from meshdsl.planner.objective import CostedPlan, Evaluator, steps_of
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model, Prices
from meshdsl.planner.search.search import evaluate_plan, priced_plans, searches_jointly
from meshdsl.util.arrays import index_array, intern_ids, object_id

# ---- Memory of a plan ------------------------------------------------------------------------------------------------


class PlanMaterializer:
    """Turns plans of one model into timelines of copies, by numbers instead of by names.

    Which port produces which value, and which one is which use, is worked out once for all plans; the layouts on the
    path of a reshard once for all values that are resharded alike.

    Attributes:
      producers: [values], the port that produces each value.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.timeline = model, timeline_of(model.problem.program.graph, model.mesh.topology.backend)
        self.producers, self._consumers = model.wiring.producer, model.wiring.port_of_use
        self._layouts = dict(model.ports.all_layouts)
        self._ends: dict[tuple[int, Edges], list[tuple[int, int]]] = {}

    def timeline_of_plan(self, plan: CostedPlan) -> CopyTimeline:
        """Returns the program under the layouts of a plan."""
        ports = self.model.ports
        layouts, moved = ports.layout_numbers(ports.layouts(plan.rows)), self._resharded(plan)
        own, read = layouts[self.producers], layouts[self._consumers]
        return CopyTimeline(self.timeline, self.model.mesh, tuple(self._layouts), own, read, moved)

    def _resharded(self, plan: CostedPlan) -> ReshardedCopies:
        """Returns the copies that the reshard steps of a plan make; equal trees of equal spaces are expanded once."""
        values, spaces = self.timeline.index.numbers_of(plan.edges), self.model.spaces[self.producers]
        trees = intern_ids(map(object_id, plan.edges.values()))  # equal trees are mostly one object
        keys = spaces[values] * (trees.max(initial=0) + 1) + trees
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        moved = list(plan.edges.items())
        ends = [index_array(chain(*self._ends_of(*moved[i]))).reshape(-1, 2) for i in first.tolist()]
        counts = index_array(map(len, ends))[inverse]
        begins = np.cumsum([0, *map(len, ends)])[inverse]
        at = np.arange(counts.sum()) + (begins - np.cumsum(counts) + counts).repeat(counts)
        before, after = np.concatenate([np.empty((0, 2), dtype=np.intp), *ends])[at].T
        return ReshardedCopies(values.repeat(counts), before, after)

    def _ends_of(self, value: int, edges: Edges) -> list[tuple[int, int]]:
        """Returns the layouts before and after each reshard step of a value, by number."""
        key = object_id(self.model.reshard_costs[value]), edges
        if key not in self._ends:
            steps = steps_of(self.model, value, edges)
            self._ends[key] = [(self._number(step.before), self._number(step.after)) for step in steps]
        return self._ends[key]

    def _number(self, layout: Layout) -> int:
        return self._layouts.setdefault(layout, len(self._layouts))


class PeakCache:
    """The memory of plans of one model: their peaks are kept as long as the plans are.

    Args:
      donated: positions of the inputs whose memory is given up.
    """

    def __init__(self, evaluator: Evaluator, donated: frozenset[int]) -> None:
        self.model, self._evaluator, self._donated = evaluator.model, evaluator, donated
        self._materializer = PlanMaterializer(self.model)
        self._peaks: WeakKeyDictionary[CostedPlan, Peak] = WeakKeyDictionary()
        self._latest: tuple[CostedPlan, Liveness] | None = None

    def peak(self, plan: CostedPlan) -> Peak:
        """Returns the program point at which a plan holds most bytes."""
        if plan not in self._peaks:
            self._peaks[plan] = self._liveness(plan).peak()
        return self._peaks[plan]

    def unpriced_peak(self, plan: CostedPlan, limit: float, priced: Iterable[int]) -> Peak | None:
        """Returns the point at which unpriced values take most bytes, if more than the limit: no price helps there.

        Args:
          priced: ids of the values that have a price.
        """
        liveness = self._liveness(plan)
        free = ~liveness.placed.timeline.index.mask_of(priced)
        held = [
            (int(liveness.bytes_by_value(point.path)[free].sum()), point) for point in self._points_over(plan, limit)
        ]
        most, fullest = max(held, key=lambda each: each[0], default=(0, None))
        return liveness.peak_at(fullest) if fullest and most > limit else None

    def crossover(self, best: CostedPlan, donor: CostedPlan, limit: float) -> CostedPlan:
        """Returns ``best`` with the parts of ``donor``, which does not fit, that save most within the limit."""
        feasibility = Feasibility(
            limit,
            partial(evaluate_plan, self.model, self._evaluator),
            self.peak,
            partial(self._points_over, limit=limit),
            self._difference,
        )
        return Crossover(self.model, best, donor, feasibility).run()

    def _liveness(self, plan: CostedPlan) -> Liveness:
        """Returns the memory of a plan; that of the latest plan is kept."""
        if self._latest is None or self._latest[0] is not plan:
            self._latest = plan, Liveness(self._materializer.timeline_of_plan(plan), self._donated)
        return self._latest[1]

    def _points_over(self, plan: CostedPlan, limit: float) -> list[ProgramPoint]:
        limits = self.model.limits
        return self._liveness(plan).points_over(limit, limits.liveness_points, limits.liveness_spacing)

    def _difference(self, best: CostedPlan, donor: CostedPlan, parts: Parts) -> PlanDifference:
        liveness = self._liveness(best), self._liveness(donor)
        return PlanDifference(self._evaluator, parts, (best, donor), liveness, self._materializer.producers)


# ---- Fit -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pricing:
    """Where the search over prices stands.

    Args:
      points: program points at which bytes have a price.
      price: the latest one, in seconds per byte.
      low: the highest price at which no plan was found that fits, or a negligible one.
      path_copies: whether a value that waits for a later consumer pays for one copy on the path there, the smallest;
        else for every copy that is made.
      infeasible: plans that did not fit, the latest first.
    """

    points: PricedPoints
    price: float = 0.0
    low: float = 0.0
    path_copies: bool = True
    infeasible: tuple[CostedPlan, ...] = ()

    def prices(self, price: float) -> Prices:
        """Returns the prices of all values at a price per byte."""
        return self.points.prices(price, self.path_copies)


@dataclass(frozen=True)
class FitResult:
    """Result of a phase of ``MemoryFitter``.

    Args:
      limit: bytes per device.
      free: the cheapest plan found, whatever its memory.
      plan: the cheapest plan found within the limit; ``free`` itself if it fits.
      pricing: prices at which the plan was found.
      candidates: further plans within the limit, the cheapest first.
      bound: cost that no plan within the limit undercuts; 0 as long as none is proved.
    """

    limit: float
    free: CostedPlan
    plan: CostedPlan
    pricing: Pricing
    candidates: tuple[CostedPlan, ...] = ()
    bound: float = 0.0

    @property
    def is_constrained(self) -> bool:
        """Whether the limit excludes the cheapest plan."""
        return self.plan is not self.free


def joint_networks(model: Model) -> NetworkBuilder | None:
    """Returns the networks over all states of a model, if all mesh axes can be searched jointly."""
    return NetworkBuilder(model) if searches_jointly(model) else None


class MemoryFitter:
    """Searches for the cheapest plan within a limit of bytes per device.

    Args:
      model: of the program under ``pins``.
      networks: of ``joint_networks``, to be priced; without them, networks are built at their price.
      is_replan: the plan of other pins is known, and only as much is spent as a change of pins is worth.
    """

    def __init__(
        self, model: Model, pins: Pins, networks: NetworkBuilder | None = None, is_replan: bool = False
    ) -> None:
        self.model, self.pins, self.networks, self.is_replan = model, pins, networks, is_replan
        self.evaluator = Evaluator(model)
        self.peaks = PeakCache(self.evaluator, pins.donated)

    def with_networks(self) -> "MemoryFitter":
        """Returns the fitter with networks of its model, if all mesh axes can be searched jointly."""
        other = copy(self)
        other.networks = self.networks or joint_networks(self.model)
        return other

    def without_networks(self) -> "MemoryFitter":
        """Returns the fitter without its networks, which may be large."""
        other = copy(self)
        other.networks = None
        return other

    def peak(self, plan: CostedPlan) -> Peak:
        """Returns the program point at which a plan holds most bytes."""
        return self.peaks.peak(plan)

    def pricing(self, previous: Pricing | None = None) -> Pricing:
        """Returns a pricing to start from: none, or the points and the price of another model of the program."""
        points = PricedPoints(self.model, self.pins.donated, previous.points if previous else None)
        return Pricing(points, previous.price if previous else 0.0)

    def fit(self, free: CostedPlan, limit: float, pricing: Pricing | None = None) -> FitResult:
        """Returns ``free`` if it fits, else the cheapest plan within the limit that rising prices find.

        Raises:
          MemoryLimitError: if no plan within the limit is found.
        """
        pricing = pricing or self.pricing()
        peak, smallest = self.peak(free), free
        if peak.bytes <= limit:
            return FitResult(limit, free, free, pricing)
        price = pricing.price or self.model.scale.seconds(free.cost) / max(peak.bytes, 1) / 8
        for path_copies in (True, False):
            alternate = path_copies and self._is_small
            plan, pricing = self._raise_price(free, replace(pricing, path_copies=path_copies), price, limit, alternate)
            if self.peak(plan).bytes <= limit:
                return FitResult(limit, free, plan, pricing)
            smallest = min(smallest, plan, key=self._bytes)
            if alternate and self._is_hopeless(smallest, limit):  # both ways were tried
                break
        is_smallest = False
        if self._is_tiny:
            found = self._branch_and_bound(smallest, pricing.points).smallest(limit)
            smallest, is_smallest = found.best, found.bound == inf
        if self.peak(smallest).bytes <= limit:
            return FitResult(limit, free, smallest, pricing)
        larger = self._on_larger_meshes(pricing, limit)
        limits = self.model.limits
        raise infeasible_error(self.model.problem, self.pins, self.peak(smallest), limit, limits, is_smallest, larger)

    def resume(self, known: CostedPlan, free: CostedPlan, limit: float, pricing: Pricing) -> FitResult:
        """Returns the cheapest plan found at a price that held before; its plan often does not fit.

        Args:
          known: a plan that may fit.
          free: the cheapest plan, which does not fit; the search is around it, where equal layers agree.
          pricing: of the plan under other pins.
        """
        found = [known, self._solve([free], pricing.prices(pricing.price), limit, pricing.path_copies)]
        donors = [free, *(plan for plan in found if self._bytes(plan) > limit)]
        if all(self._bytes(plan) > limit for plan in found):
            plan, pricing = self._raise_price(found[-1], pricing, pricing.price, limit, self._is_small)
            found.append(plan)
        feasible = [plan for plan in found if self._bytes(plan) <= limit]
        if not feasible:
            return FitResult(limit, free, min(found, key=self._bytes), pricing)
        return FitResult(limit, free, self._adopt(min(feasible, key=_cost), donors, limit), pricing)

    def bisect(self, result: FitResult) -> FitResult:
        """Returns plans at prices between the one at which a plan fitted and the highest at which none did."""
        limits, deadline, limit, free, pricing = (
            self.model.limits,
            self.model.deadline,
            result.limit,
            result.free,
            result.pricing,
        )
        best, low, high, points = result.plan, pricing.low, pricing.price, pricing.points
        feasible, infeasible, path_copies = [best], pricing.infeasible, pricing.path_copies
        # the price at which the plan and the free one cost the same
        equal = self.model.scale.seconds(best.cost - free.cost) / (self._bytes(free) - self._bytes(best))
        if self._is_small and best.cost > free.cost * (1 + limits.memory_gap_wide) and not deadline.expired():
            # where messages converge badly they may do better at a higher price
            plan = self._solve([best], pricing.prices(high * limits.memory_price_factor), limit, path_copies)
            feasible += [plan] if self._bytes(plan) <= limit else []
        # a plan at a negligible price is worth one trial, if no price at which none fitted was tried
        least = limits.memory_bisections_least if low <= high / limits.memory_price_negligible else 0
        for _ in range(max(least, min(limits.memory_bisections, limits.memory_priced_nodes // len(self.model.nodes)))):
            best = min(feasible, key=_cost)
            if best.cost <= free.cost * (1 + limits.memory_gap_small) or deadline.expired():
                break
            price, equal = equal if low < equal < high else (low * high) ** 0.5, 0.0
            path_copies ^= self._is_small
            known = [best, free, *infeasible[:1]]
            plan = self._solve(known, points.prices(price, path_copies), limit, path_copies, sweep=False)
            peak = self.peak(plan)
            if peak.bytes <= limit:
                high, feasible = price, [*feasible, plan]
            else:
                low, infeasible = price if peak in points else low, (plan, *infeasible)
                points = points.including(peak)
        pricing = replace(pricing, points=points, price=high, path_copies=path_copies, infeasible=infeasible)
        best, *others = sorted(feasible, key=_cost)
        return replace(result, plan=best, candidates=tuple(others), pricing=pricing)

    def improve(self, result: FitResult) -> FitResult:
        """Returns the cheapest plan that adopts parts of infeasible ones, improved by neighbourhood search."""
        limits, limit, free, pricing = self.model.limits, result.limit, result.free, result.pricing
        distinct = {plan.cost: plan for plan in pricing.infeasible}.values()
        count = limits.memory_donors * (2 if self._is_small else 1)
        donors = sorted(list(distinct)[:count], key=_cost) or [free]
        feasible = [result.plan, *(result.candidates if self._is_small else ())]
        best = min((self._adopt(plan, donors, limit) for plan in feasible), key=_cost)
        networks = self.networks or joint_networks(self.model)
        gap = limits.memory_gap_wide if networks else limits.memory_gap_wide_many_axes
        if self._is_small and best.cost > free.cost * (1 + gap):
            low = pricing.points.prices(pricing.price * limits.memory_lns_price, True)
            search = partial(lns_within_memory, networks) if networks else partial(lns_on_many_axes, self.model)
            best = search(self.evaluator, best, (Prices(), low), partial(self._fitted, limit))
        return replace(result, plan=best, candidates=())

    def adopt(self, result: FitResult) -> FitResult:
        """Returns the plan with parts of infeasible ones: ``improve`` for large steps after a change of pins."""
        donors = result.pricing.infeasible or (result.free,)
        return replace(result, plan=self._adopt(result.plan, donors, result.limit), candidates=())

    def prove(self, result: FitResult) -> FitResult:
        """Returns the cheapest plan within the limit with its bound, if the step is small enough to enumerate boxes."""
        if not self._is_tiny:
            return result
        found = self._branch_and_bound(result.plan, result.pricing.points).cheapest(result.limit)
        return replace(result, plan=found.best, bound=found.bound)

    @property
    def _is_tiny(self) -> bool:
        """Whether branch and bound is affordable."""
        few = len(self.model.nodes) <= self.model.limits.memory_branch_nodes
        return few and searches_jointly(self.model) and not self.model.deadline.expired()

    @property
    def _is_small(self) -> bool:
        """Whether both ways to price values that wait for a later consumer are worth their time."""
        return len(self.model.nodes) <= self.model.limits.memory_priced_nodes

    def _bytes(self, plan: CostedPlan) -> int:
        return self.peak(plan).bytes

    def _is_hopeless(self, smallest: CostedPlan, limit: float) -> bool:
        """Whether a plan is so much larger than the limit that going on as before will find none that fits."""
        return self._bytes(smallest) > self.model.limits.memory_hopeless * limit

    def _branch_and_bound(self, known: CostedPlan, points: PricedPoints) -> BranchAndBound:
        return BranchAndBound(self.model, self.evaluator, points, self.peak, known)

    def _raise_price(
        self, plan: CostedPlan, pricing: Pricing, price: float, limit: float, alternate: bool
    ) -> tuple[CostedPlan, Pricing]:
        """Returns the first plan that fits at rising prices, or the smallest found if none does.

        The price rises when the peak is at a priced point, or after a few plans whose peaks were not.

        Args:
          alternate: try both ways to price values that wait (``Pricing.path_copies``) at every price.
        """
        limits, points, path_copies = self.model.limits, pricing.points, pricing.path_copies
        infeasible, last, low = pricing.infeasible, price, price / limits.memory_price_negligible
        smallest, stale, idle = plan, 0, 0
        for _ in range(limits.memory_rounds * (2 if alternate else 1)):
            last, points = price, points.including(self.peak(plan))
            plan = self._solve([plan], points.prices(price, path_copies), limit, path_copies)
            peak, before = self.peak(plan), self._bytes(smallest)
            smallest = min(smallest, plan, key=self._bytes)
            idle = 0 if self._bytes(smallest) < before * (1 - limits.memory_gap_small) else idle
            if peak.bytes <= limit or (idle > limits.memory_idle_prices and self._is_hopeless(smallest, limit)):
                break
            infeasible = (plan, *infeasible)
            stale = stale + 1 if peak not in points else limits.memory_plans_per_price
            if stale >= limits.memory_plans_per_price and alternate and path_copies:
                path_copies = False
            elif stale >= limits.memory_plans_per_price:
                low, price, stale, idle = price, price * limits.memory_price_factor, 0, idle + 1
                path_copies |= alternate
                if unpriced := self.peaks.unpriced_peak(plan, limit, points.values):
                    points = points.including(unpriced)
        return smallest, Pricing(points, last, low, path_copies, infeasible)

    def _solve(
        self, known: Sequence[CostedPlan], prices: Prices, limit: float, path_copies: bool, sweep: bool = True
    ) -> CostedPlan:
        """Returns the cheapest plan found at these prices that fits, or the smallest.

        Args:
          known: plans of which the best at these prices is where the search begins.
          sweep: decide one mesh axis at a time exactly, after the messages.
        """
        model = self.model.with_prices(prices)
        every = self._is_small or not path_copies
        found = priced_plans(model, self.evaluator.at(model), known, self.networks, sweep, every)
        return self.evaluator.with_exact_cost(min(found, key=lambda plan: (max(self._bytes(plan), limit), plan.cost)))

    def _fitted(self, limit: float, best: CostedPlan, other: CostedPlan) -> CostedPlan:
        """Returns the other plan if it fits, else ``best`` with parts of it."""
        return other if self._bytes(other) <= limit else self.peaks.crossover(best, other, limit)

    def _adopt(self, best: CostedPlan, donors: Iterable[CostedPlan], limit: float) -> CostedPlan:
        """Returns a plan with parts of plans that do not fit, one after the other, where these are cheaper."""
        for donor in donors:
            if donor.cost * (1 + self.model.limits.memory_gap_small) < best.cost:
                best = self.peaks.crossover(best, donor, limit)
        return best

    def _on_larger_meshes(self, pricing: Pricing, limit: float) -> Iterator[tuple[Mesh, int]]:
        """Yields larger meshes, as long as the pins hold there, and the least bytes found; the last one fits."""
        for mesh in larger_meshes(self.model.mesh, self.model.limits.memory_mesh_doublings):
            try:
                model = Model(make_problem(self.model.problem.program, mesh, self.pins), limits=self.model.limits)
            except PinError:
                return
            fitter = MemoryFitter(model, self.pins, joint_networks(model))
            points = PricedPoints(model, self.pins.donated, pricing.points)
            plan = evaluate_plan(model, fitter.evaluator, model.first_states)
            least = fitter._bytes(plan)
            for _ in range(model.limits.memory_mesh_plans):
                points = points.including(fitter.peak(plan))
                plan = fitter._solve([plan], points.prices(pricing.price, True), limit, True)
                least = min(least, fitter._bytes(plan))
            yield mesh, least
            if least <= limit:
                return


def _cost(plan: CostedPlan) -> float:
    return plan.cost
