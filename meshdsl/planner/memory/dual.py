"""A lower bound that knows the memory limit: the Lagrangian dual of the limit at one program point.

For every price p >= 0 and every plan x that fits, with ``held(x)`` the bytes that memory certainly holds at some
operation (``MemoryLowerBound``; ``held <= memory <= limit``),

    seconds(x)  >=  seconds(x) + p * (held(x) - limit)  >=  min over x of (seconds(x) + p * held(x))  -  p * limit

The minimum is bounded like the problem without memory, on the network in which nodes pay for the bytes that they
certainly hold: with rounds of reduced-cost pruning where it is small, with message passing where it is large.

As a function of p the bound is concave, and every known plan, whether it fits or not, caps it by a line:

    seconds
      |        /  a plan over the limit (slope: bytes over)
      |      /\\_
      |    /    \\__  a plan within the limit
      |  /  dual   \\__
      +-----------------  price

So the price to try is where the lowest line is highest, at the operation where that is highest of all; the plan that
messages decode to is another line, and so on (cutting planes, Kelley 1960).
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from copy import copy
from functools import partial
from itertools import combinations
from types import MappingProxyType
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
from meshdsl.planner.memory.fit import FitResult, MemoryFitter, joint_networks
from meshdsl.planner.memory.lower_bound import MemoryLowerBound
from meshdsl.planner.objective import CostedPlan, Evaluator
from meshdsl.planner.problem.model import Prices
from meshdsl.planner.search.search import evaluate_plan, searches_jointly
from meshdsl.util.runtime import Submit

_NOTHING: Underpaid = MappingProxyType({})


class PendingBound(NamedTuple):
    """The bound at one price, computed concurrently with the search for a better plan."""

    held: MemoryLowerBound
    price: float
    result: "Future[float]"

    def is_about(self, dual: "LagrangianBound") -> bool:
        """Returns whether plans found since then suggest nearly the same price at the same operation."""
        tolerance = dual.limits.memory_dual_price_tolerance
        return self.held is dual.held and abs(dual.price - self.price) <= tolerance * self.price


def start_bound(fitter: MemoryFitter, fit: FitResult, submit: Submit) -> PendingBound | None:
    """Starts the bound of a large step; None where it is not worth its time, which may be limited, or for small steps.

    Small steps try several prices, once the best plan is known.
    """
    if fitter.is_replan or fitter.model.deadline.seconds is not None:
        return None
    dual = _highest_dual(fitter, fit)
    if dual is None or dual.is_small:
        return None
    return PendingBound(dual.held, dual.price, submit(partial(dual.detached().best, 0)))


def dual_bound(fitter: MemoryFitter, fit: FitResult, pending: PendingBound | None = None) -> float:
    """Returns a cost that no plan within the limit undercuts; 0 if memory adds nothing, or less than its time is worth.

    Args:
      pending: a bound that was started before.
    """
    bound, model = fit.bound, fitter.model
    if bound >= fit.plan.cost:
        return bound
    dual = None if model.deadline.expired() else _highest_dual(fitter, fit)
    if dual and not (pending and pending.is_about(dual)):
        steps = model.limits.memory_dual_steps if searches_jointly(model) else 1
        bound = max(bound, dual.best(0 if fitter.is_replan or not dual.is_small else steps))
    return max(bound, pending.result.result()) if pending else bound


def _highest_dual(fitter: MemoryFitter, fit: FitResult) -> "LagrangianBound | None":
    """Returns the bound at the operation where it can be highest, as far as plans tell, if it is worth its time."""
    model, plans = fitter.model, (fit.free, *fit.pricing.infeasible, fit.plan)
    small = len(model.nodes) <= model.limits.memory_dual_nodes
    if not has_few_layouts(model) or (fitter.is_replan and not small):
        return None
    held = [held for held in fit.pricing.points.lower_bounds if held.bytes(fit.free) > fit.limit]
    if not held:
        return None
    networks = fitter.networks or joint_networks(model)
    duals = [LagrangianBound(each, plans, fit.limit, not fitter.is_replan, networks) for each in held]
    highest = max(duals, key=lambda dual: dual.highest)
    least = 0.0 if small else model.scale.seconds(fit.free.cost + model.limits.memory_dual_worth * fit.plan.cost)
    return highest if highest.price and highest.highest > least else None


class DualCut(NamedTuple):
    """Upper bound on the dual as a function of the price: ``seconds + price * bytes_over``.

    Args:
      seconds: of a plan.
      bytes_over: bytes that it certainly holds more than the limit; negative if less.
    """

    seconds: float
    bytes_over: float


class LagrangianBound:
    """The bound at one operation, as a function of the price.

    Args:
      held: bytes that memory certainly holds at the operation.
      plans: known plans; the last one fits.
      limit: bytes per device.
      rounds: whether small networks go through rounds of pruning.
      networks: of all states, if all mesh axes can be searched jointly.

    Attributes:
      highest: seconds that the bound cannot exceed, as far as known plans tell.
      price: where that is, in seconds per byte; 0 for no price.
    """

    def __init__(
        self,
        held: MemoryLowerBound,
        plans: Sequence[CostedPlan],
        limit: float,
        rounds: bool,
        networks: NetworkBuilder | None = None,
    ) -> None:
        self.held, self.plans, self.limit, self.model = held, tuple(plans), limit, held.model
        self.limits, self.networks = self.model.limits, networks
        self.is_small = len(self.model.nodes) <= self.limits.memory_dual_nodes
        self._rounds = rounds
        self.highest, self.price = _highest_of({self._line(plan) for plan in plans})

    def detached(self) -> "LagrangianBound":
        """Returns the same bound on a model of its own, so that another thread can compute it."""
        other = copy(self)
        other.model = self.model.with_prices(Prices()) if self.networks else self.model.for_thread()
        return other

    def best(self, steps: int, price: float | None = None) -> float:
        """Returns the highest bound found, at ``price`` and up to ``steps`` others, while much of the gap is open."""
        price, plans, underpaid = self.price if price is None else price, self.plans, _NOTHING
        lines, tried, best = {self._line(plan) for plan in plans}, dict[float, tuple[float, float]](), 0.0
        for left in range(steps, -1, -1):
            bound, certificate = self.at(price, plans, underpaid, is_last=not left)
            best = max(best, bound)
            if (
                not left
                or best >= (1 - self.limits.bounds_wide_gap) * self.plans[-1].cost
                or self.model.deadline.expired()
            ):
                break
            underpaid = certificate.underpaid
            decoded = evaluate_plan(self.model, Evaluator(self.model), certificate.decoded)
            line = self._line(decoded)
            plans, lines, tried[price] = (*plans, decoded), lines | {line}, (bound, line.bytes_over)
            highest, price = _highest_of(lines)
            if self._is_known(price, tried):  # the line of the decoded plan does not cut off this price
                (_, over), price = max((each, at) for at, each in tried.items())
                price *= self.limits.memory_dual_price_step ** np.sign(over)
            rise = self.model.scale.seconds(best * (1 + self.limits.memory_dual_rise))
            if self._is_known(price, tried) or not price or highest <= rise:
                break
        return best

    def at(
        self, price: float, plans: Sequence[CostedPlan] = (), underpaid: Underpaid = _NOTHING, is_last: bool = True
    ) -> tuple[float, Certificate]:
        """Returns the bound at a price, in exact costs rounded down, and the certificate that proves it.

        The network is tight around the plan that is cheapest at the price; if that leaves much open, and rounds are
        quick, around the plan that fits as well.

        Args:
          plans: known ones; the constructor's by default.
          underpaid: values that networks at prices before let pay too little (see ``Certificate``).
          is_last: no other price follows, so more work is worth it.
        """
        model, best = self.model.with_prices(self.held.prices(price)), self.plans[-1]
        networks = self.networks.priced(model) if self.networks else NetworkBuilder(model)
        nearest = min([best, *(plans or self.plans)], key=lambda plan: self.cost_at(price, plan))
        around = [best] if nearest is best or not self.is_small else [nearest, best]
        found = list[tuple[float, Certificate]]()
        for plan in around:
            cost = self.cost_at(price, plan)
            certificate = Certificate(
                networks, CostedPlan(plan.rows, cost, {}), self.limits.bounds_first_tree_entries, underpaid
            )
            quick = certificate.entries <= self.limits.memory_dual_entries
            certificate = self._raised(certificate, is_last)
            found.append((min(cost, certificate.bound) if is_light(certificate) else 0.0, certificate))
            if not (quick and self._rounds) or certificate.gap <= self.limits.memory_dual_rise:
                break
        least, certificate = max(found, key=lambda each: each[0])
        return least - self._rounding - float(model.scale.pack(np.asarray(price * self.limit))), certificate

    def cost_at(self, price: float, plan: CostedPlan) -> float:
        """Returns the most that a plan can cost in the network at a price, in which every term is rounded by itself."""
        held = self.model.scale.pack(np.asarray(price * self.held.bytes(plan)))
        return plan.cost + float(held) + self._rounding

    def _raised(self, certificate: Certificate, is_last: bool) -> Certificate:
        """Returns a certificate that proves more, by rounds of pruning where that is quick."""
        limits = self.limits
        most = limits.memory_dual_entries_small if self.is_small else limits.memory_dual_entries
        if self._rounds and certificate.entries <= most:
            work = limits.memory_dual_work_last if is_last else limits.memory_dual_work
            return tighten_without_search(certificate, work)
        if is_light(certificate):
            raise_bound(certificate)
        return rebuild_and_raise(certificate) if self._rounds and self.is_small else certificate

    @property
    def _rounding(self) -> float:
        return (self.held.rounded_terms + 1) * TIES

    def _line(self, plan: CostedPlan) -> DualCut:
        return DualCut(self.model.scale.seconds(plan.cost), self.held.bytes(plan) - self.limit)

    def _is_known(self, price: float, tried: Iterable[float]) -> bool:
        """Returns whether the bound at a price that was tried is nearly the same."""
        return any(abs(price - other) <= self.limits.memory_dual_price_apart * other for other in tried)


def _highest_of(lines: Iterable[DualCut]) -> tuple[float, float]:
    """Returns the maximum over all prices of the lowest line, in seconds, and the price there."""
    lines = list(lines)
    pairs = combinations(lines, 2)
    crossings = [(a - b) / (y - x) for (a, x), (b, y) in pairs if (a - b) * (y - x) > 0]
    return max((min(cost + price * over for cost, over in lines), price) for price in (0.0, *crossings))
