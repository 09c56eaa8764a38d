"""Lagrangian relaxation of the memory limit: prices per time point, and a lower bound in exact integers.

With a price at every time point instead of a limit, a core is a pairwise network that TRW-S messages bound (see
``meshdsl.planner.mrf.trws``, Kolmogorov 2006). Less the limit times its price, that bounds every valid choice.
``Subgradient`` moves the prices: up where the decoded states use too much, down where they leave room, with Polyak's
step (Polyak 1969).

``certify`` makes the bound exact. Whatever messages and prices are, shifting their amounts between tables leaves the
total of every choice unchanged, and prices only deduct what every valid choice gives back. So both are rounded to
multiples of a small unit, and the sum of the minima is taken in integers: a bound on every valid choice, however the
messages came about. A state that raises it above the incumbent's cost is in no better choice (reduced cost fixing).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshdsl.planner.contest.instance import Core
from meshdsl.planner.limits import DEFAULT_CONTEST_LIMITS, ContestLimits
from meshdsl.planner.mrf.network import Labels
from meshdsl.planner.mrf.trws import TRWS, clip
from meshdsl.util.arrays import Costs, Ints

_SUM_BITS = 60  # of sums in an int64 that must not overflow

# ---- Flat core -------------------------------------------------------------------------------------------------------


class FlatCore:
    """A core as flat arrays for the compiled loops, with finite costs; variables are given by position.

    A choice is an array of states, one per variable.

    Args:
      core: the core; its arrays are not written.
      top: the cost of an impossible combination.
      limits: of everything that works on it.
    """

    def __init__(self, core: Core, top: float, limits: ContestLimits = DEFAULT_CONTEST_LIMITS) -> None:
        from meshdsl.planner.contest.kernels import UsageItems

        self.core, self.limit, self.top, self.limits = core, core.usage.limit, top, limits
        network = core.network.copy()
        clip(network, top)
        self.messages = TRWS(network)
        self.order, self.flat = self.messages.order.tolist(), self.messages.flat
        self.unary, self.tables = self.messages.unary, self.messages.tables
        items = [(i, at, use) for i, v in enumerate(self.order) for at, use in core.usage.items.get(v, {}).items()]
        owner = np.array([i for i, _, _ in items], dtype=np.int64)
        self.usages = UsageItems(
            first=np.searchsorted(owner, np.arange(len(self.order) + 1)),
            owner=owner,
            lo=np.array([lo for _, (lo, _), _ in items], dtype=np.int64),
            hi=np.array([hi for _, (_, hi), _ in items], dtype=np.int64),
            begin=np.concatenate([[0], np.cumsum([use.size for _, _, use in items])]).astype(np.int64),
            use=np.concatenate([use for _, _, use in items]) if items else np.zeros(0),
        )

    @property
    def size(self) -> int:
        """Number of variables."""
        return len(self.order)

    @cached_property
    def edges(self) -> list[tuple[int, int, Costs]]:
        """The pairs of neighbours by position, and their tables."""
        network, at = self.messages.network, {v: i for i, v in enumerate(self.order)}
        return [(i, at[w], t) for v, i in at.items() for w, t in network.pairwise[v].items() if i < at[w]]

    def priced(self, prices: Costs) -> Costs:
        """Returns the unary costs of all states, with their memory charged at a price per point."""
        from meshdsl.planner.contest import kernels

        return kernels.price_usage(self.usages, self.flat.start, self.unary, prices)

    def used(self, states: Ints) -> Costs:
        """Returns the memory that a choice uses at every point."""
        from meshdsl.planner.contest import kernels

        return kernels.usage_profile(self.usages, states, self.limit.size)

    def cost(self, states: Ints) -> float:
        """Returns the cost of a choice, without the constant of the network."""
        from meshdsl.planner.contest import kernels

        return kernels.choice_cost(self.flat, self.unary, self.tables, states)

    def choice(self, states: Ints) -> list[int]:
        """Returns the strategies of all nodes of the instance in a choice."""
        return self.core.choice(dict(zip(self.order, states.tolist(), strict=True)))


# ---- Exact bound -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BoundProof:
    """A lower bound on every valid choice, in units of 2^-``digits``, and min-marginals.

    Args:
      flat: the core.
      least: the bound, without the constant of the network.
      excess: per state, by how much the bound rises at least with it, in units of 2^-(``digits`` - ``coarse``).
      digits: binary digits after the point.
      coarse: the number of them that ``excess`` lacks.
    """

    flat: FlatCore
    least: int
    excess: Ints
    digits: int
    coarse: int

    @property
    def bound(self) -> int:
        """An integer that no valid choice of the core is below, in its cost unit."""
        return int(self.flat.core.network.constant) - ((-self.least) >> self.digits)

    def remaining(self, cost: int) -> dict[int, Labels]:
        """Returns, for variables that lose some, the states that a valid choice of at most this cost may have."""
        room = ((cost - int(self.flat.core.network.constant)) << self.digits) - self.least
        most, start = room >> self.coarse, self.flat.flat.start
        parts = ((v, self.excess[start[i] : start[i + 1]]) for i, v in enumerate(self.flat.order))
        found = {v: np.flatnonzero(part <= most) for v, part in parts if part.max() > most}
        return found


def certify(flat: FlatCore, prices: Costs) -> BoundProof:
    """Returns the exact bound of messages at these prices, over which some more passes are made."""
    from meshdsl.planner.contest import kernels

    messages = flat.messages
    messages.unary = flat.priced(prices)
    messages.run(flat.limits.bound_passes)
    terms = 8 * (flat.size + flat.flat.to.size)
    digits = _digits(terms * max(map(_largest, (messages.unary, messages.sent, flat.tables))))
    fine = _digits(2 * float(prices.sum()) * max(_largest(flat.usages.use), 1.0))
    digits = min(digits, fine)
    price = _fixed_point(prices, fine)
    usages = flat.usages._replace(use=flat.usages.use.astype(np.int64))
    unary, tables, sent = (_fixed_point(a, digits) for a in (flat.unary, flat.tables, messages.sent))
    least, excess = kernels.exact_bound(flat.flat, usages, unary, tables, sent, price, fine - digits)
    returned = sum([p * int(limit) for p, limit in zip(price.tolist(), flat.limit.tolist(), strict=True) if p])
    return BoundProof(flat, (int(least) << (fine - digits)) - returned, excess, fine, fine - digits)


def _largest(amounts: Costs) -> float:
    return float(np.abs(amounts).max(initial=0.0))


def _digits(largest: float) -> int:
    """Returns the binary digits after the point that amounts up to this may have."""
    return max(0, min(_SUM_BITS, _SUM_BITS - int(np.ceil(np.log2(max(largest, 1.0))))))


def _fixed_point(amounts: Costs, digits: int) -> Ints:
    """Returns the amounts as rounded multiples of 2^-digits."""
    return np.rint(np.ldexp(amounts, digits)).astype(np.int64)


# ---- Prices ----------------------------------------------------------------------------------------------------------


class Subgradient:
    """Ascent of the Lagrangian dual. Decoded states that happen to be valid are remembered.

    Attributes:
      prices: of memory per point, at the best bound so far.
      lower: that bound, in floats (``certify`` makes it exact).
      best: the best valid states, if any are known.
      cost: their cost; infinite without any.
      stalled: steps since the bound has risen.
    """

    def __init__(self, flat: FlatCore, prices: Costs, best: Ints | None = None) -> None:
        self.flat, self.limit = flat, flat.limit
        self.prices, self.lower = prices, -np.inf
        self.best, self.cost = best, np.inf if best is None else flat.cost(best)
        self.steps = self.stalled = 0
        self._step_length, self._trial = 1.0, prices
        self._per_limit = 1.0 / np.maximum(self.limit, 1.0)

    @property
    def is_open(self) -> bool:
        """Whether another step can help."""
        return self._step_length > self.flat.limits.bound_progress

    def step(self) -> None:
        """Passes messages at the trial prices, then moves these."""
        flat, messages = self.flat, self.flat.messages
        messages.unary = flat.priced(self._trial)
        messages.run(1 if self.steps else flat.limits.first_passes)
        self.steps += 1
        lower = messages.lower - float(self._trial @ self.limit)
        self._record_bound(lower)
        used = self._record_states(messages.latest)
        self._move_prices((used - self.limit) * self._per_limit, lower)

    def _record_bound(self, lower: float) -> None:
        if self.steps == 1 or lower > self.lower + self.flat.limits.bound_progress * max(abs(self.lower), 1.0):
            self.prices, self.lower, self.stalled = self._trial, lower, 0
            return
        self.stalled += 1
        if self.stalled % self.flat.limits.step_patience == 0:
            self._step_length, self._trial = self._step_length * self.flat.limits.step_shrink, self.prices

    def _record_states(self, states: Ints) -> Costs:
        """Returns the usage of states, which are remembered if they are valid and better."""
        used = self.flat.used(states)
        if (used <= self.limit).all():
            cost = self.flat.cost(states)
            if cost < self.cost:
                self.best, self.cost = states.copy(), cost
        return used

    def _move_prices(self, excess: Costs, lower: float) -> None:
        slope = np.where((self._trial <= 0) & (excess < 0), 0.0, excess)
        squared = float(slope @ slope)
        if not squared:
            self._step_length = 0.0
            return
        target = min(
            self.cost, lower + self.flat.limits.expected_rise * max(abs(lower), 1.0)
        )  # the cost of a poor choice is no guide
        step = self._step_length * max(target - lower, self.flat.limits.bound_progress * abs(lower)) / squared
        self._trial = np.maximum(0.0, self._trial + step * slope * self._per_limit)
