"""A bound that knows the memory limit: what memory holds at least at one operation has a price.

For every price, and every plan that fits,

    seconds >= seconds + price * (floor - limit) >= least of (seconds + price * floor) - price * limit

since a plan that fits has floor <= memory <= limit (Lagrangian relaxation). The least is bounded as ever, on the
network whose nodes pay for the bytes that they hold in any case (``floor``), in rounds where it is not too large, or
of small steps at least drawn anew.

Every plan known, whether it fits or not, says what this can be at most: a line over the price. Of the operations at
which plans were too large the one counts where their least is highest. The price is the one there. The plan that
messages then point to is another line, and says which price to try next (cutting planes, Kelley 1960).
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import combinations
from typing import NamedTuple

import numpy as np

from meshdsl.planner.bounds.certificate import Certificate
from meshdsl.planner.bounds.tighten import (
    has_few_layouts,
    is_light,
    raise_bound,
    rebuild_and_raise,
    tighten_without_search,
)
from meshdsl.planner.costs.fixed_point import TIES
from meshdsl.planner.encoding.fanout import Underpaid
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.memory.fit import MemoryFitter
from meshdsl.planner.memory.lower_bound import MemoryLowerBound
from meshdsl.planner.objective import CostedPlan, Evaluator
from meshdsl.planner.problem.model import Prices
from meshdsl.planner.search.search import evaluate_plan, searches_jointly
from meshdsl.util.runtime import Submit

_SMALL = 8_000  # nodes up to which ...
_STEPS = 4  # ... more prices are tried where all states are searched ...
_MORE, _APART = 1e-3, 1.15  # ... as long as the bound may rise by this part of it; where lines say none, so far apart
_WORTH = 2e-3  # part of a plan's cost that a bound may say more than without memory, to be worth its time on others
_LARGEST, _LARGER = 2_000_000, 200_000_000  # entries of a network that is taken through rounds, and of a small step's
_WORK, _LESS = 48_000_000_000, 18_000_000_000  # entries that may be touched at the last price, and at those before
_ALIKE = 0.1  # part of a price by which another one is nearly the same
_SAME = 2e-2  # part by which it says as much


class PendingBound(NamedTuple):
    """The bound at a price of what memory holds at least, worked out beside the search for a better plan."""

    floor: MemoryLowerBound
    price: float
    found: "Future[float]"

    def will_do(self, dual: "_LagrangianBound") -> bool:
        """Whether what is known now says nearly the same price."""
        return self.floor is dual.floor and abs(dual.price - self.price) <= _ALIKE * self.price


def start_bound(
    fitter: MemoryFitter, free: CostedPlan, best: CostedPlan, limit: float, start: Submit
) -> PendingBound | None:
    """The bound of a large step, begun; None where it is not worth its time, which may be limited, or has many prices.

    Args:
      free, best: as for ``dual_bound``, so far.
    """
    hurried = fitter.quick or fitter.model.deadline.seconds is not None
    dual = None if hurried else _most_open(fitter, free, best, limit)
    if dual is None or dual.is_small:
        return None
    dual.model = fitter.model.with_prices(Prices()) if dual.joint else fitter.model.for_thread()
    return PendingBound(dual.floor, dual.price, start(partial(dual.best, 0)))


def dual_bound(
    fitter: MemoryFitter, free: CostedPlan, best: CostedPlan, limit: float, known: PendingBound | None = None
) -> float:
    """What no plan that fits can cost less than; 0 where memory says nothing, or too little for what it takes.

    Args:
      free: the cheapest plan found that need not fit. best: the cheapest found that fits.
      known: one that was begun before.
    """
    if fitter.bound >= best.cost:
        return fitter.bound
    dual = None if fitter.model.deadline.expired() else _most_open(fitter, free, best, limit)
    found = fitter.bound
    if dual and not (known and known.will_do(dual)):
        many = 0 if fitter.quick or not dual.is_small else _STEPS if searches_jointly(fitter.model) else 1
        found = max(found, dual.best(many))
    return max(found, known.found.result()) if known else found


def _most_open(fitter: MemoryFitter, free: CostedPlan, best: CostedPlan, limit: float) -> "_LagrangianBound | None":
    """The bound that may be the highest, if it is worth its time."""
    model, plans = fitter.model, (free, *fitter.over, best)
    small = len(model.nodes) <= _SMALL
    if not has_few_layouts(model) or (fitter.quick and not small):
        return None
    floors = (floor for floor in fitter.points.floors if floor.bytes(free) > limit)
    full = [_LagrangianBound(floor, plans, limit, not fitter.quick, fitter.joint) for floor in floors]
    most = max(full, key=lambda dual: dual.hoped, default=None)
    least = 0.0 if small else model.scale.seconds(free.cost + _WORTH * best.cost)
    return most if most and most.price and most.hoped > least else None


class _LagrangianBound:
    """The bound as a function of the price, which rises to its best value and falls again.

    ``hoped`` are the seconds that it can be at most, as far as known plans say, and ``price`` where; 0 for no price.

    Args:
      plans: that are known; the last one fits.
      rounds: whether small networks go through them.
      joint: the networks of all states, if they can be looked at together.
    """

    def __init__(
        self,
        floor: MemoryLowerBound,
        plans: Sequence[CostedPlan],
        limit: float,
        rounds: bool,
        joint: NetworkBuilder | None = None,
    ) -> None:
        self.floor, self.choice, self.limit, self.model = floor, plans[-1], limit, floor.model
        self._plans = list(plans)
        self._underpaid: Underpaid = {}  # at prices before
        self._rounds, self.joint = rounds, joint
        self.is_small = len(self.model.nodes) <= _SMALL
        self._lines = {self._line(plan) for plan in plans}
        self.hoped, self.price = self._highest()

    def _line(self, plan: CostedPlan) -> tuple[float, float]:
        """What the bound can be at most as far as a plan says, over the price: seconds, and bytes over the limit."""
        return self.model.scale.seconds(plan.cost), self.floor.bytes(plan) - self.limit

    def _highest(self) -> tuple[float, float]:
        """The most that all lines leave, and the price there."""
        pairs = combinations(self._lines, 2)
        crossings = [(a - b) / (y - x) for (a, x), (b, y) in pairs if (a - b) * (y - x) > 0]
        return max((min(cost + price * over for cost, over in self._lines), price) for price in (0.0, *crossings))

    def best(self, more: int) -> float:
        """The highest bound found, at that price and so many others, as long as much is open and may be less."""
        known = dict[float, tuple[float, float]]()  # by price, the bound and how much the plan pointed to is too large
        price, found = self.price, 0.0
        for left in range(more, -1, -1):
            bound, certificate = self._bound(price, not left)
            found = max(found, bound)
            if (
                not left
                or found >= (1 - self.model.limits.bounds_wide_gap) * self.choice.cost
                or self.model.deadline.expired()
            ):
                break
            self._underpaid = certificate.underpaid
            self._plans.append(evaluate_plan(self.model, Evaluator(self.model), certificate.decoded))
            line = self._line(self._plans[-1])
            self._lines.add(line)
            known[price] = bound, line[1]
            hoped, price = self._highest()
            if _near(price, known):  # that line is above the others here
                (_, over), price = max((each, at) for at, each in known.items())
                price *= _APART ** np.sign(over)
            if _near(price, known) or not price or hoped <= self.model.scale.seconds(found * (1 + _MORE)):
                break
        return found

    def _bound(self, price: float, last: bool = True) -> tuple[float, Certificate]:
        """In exact costs, rounded down, and what proves it; with less work if more prices follow.

        The network is tight around the cheapest plan known at the price; if that leaves much open, and rounds are
        quick, around the plan that fits as well.
        """
        model = self.model.with_prices(self.floor.prices(price))
        joint = self.joint.priced(model) if self.joint else NetworkBuilder(model)
        found, trees = list[tuple[float, Certificate]](), model.limits.bounds_first_tree_entries
        for plan in self._cheapest(price):
            paid = self.paid(price, plan)
            certificate = Certificate(joint, CostedPlan(plan.rows, paid, {}), trees, self._underpaid)
            quick = certificate.entries <= _LARGEST
            certificate = self._raised(certificate, last)
            found.append((min(paid, certificate.bound) if is_light(certificate) else 0.0, certificate))
            if not (quick and self._rounds) or certificate.gap <= _MORE:
                break
        least, certificate = max(found, key=lambda each: each[0])
        return least - self._rounded - float(model.scale.pack(np.asarray(price * self.limit))), certificate

    def _raised(self, certificate: Certificate, last: bool) -> Certificate:
        """One that proves more, in rounds where that is quick."""
        if self._rounds and (certificate.entries <= _LARGEST or (self.is_small and certificate.entries <= _LARGER)):
            return tighten_without_search(certificate, _WORK if last else _LESS)
        if is_light(certificate):
            raise_bound(certificate)
        return rebuild_and_raise(certificate) if self._rounds and self.is_small else certificate

    def _cheapest(self, price: float) -> list[CostedPlan]:
        """The plan known that costs least at a price, and the one that fits; of a large step the latter alone."""
        near = min([self.choice, *self._plans], key=lambda plan: self.paid(price, plan))
        return [self.choice] if near is self.choice or not self.is_small else [near, self.choice]

    def paid(self, price: float, plan: CostedPlan) -> float:
        """What a plan costs in the network at most, where every term is rounded by itself."""
        held = self.model.scale.pack(np.asarray(price * self.floor.bytes(plan)))
        return plan.cost + float(held) + self._rounded

    @property
    def _rounded(self) -> float:
        return (self.floor.rounded + 1) * TIES


def _near(price: float, known: Iterable[float]) -> bool:
    """Whether the bound at a price that is known says as much."""
    return any(abs(price - other) <= _SAME * other for other in known)
