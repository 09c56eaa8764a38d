"""A lower bound in exact integers, and what no better choice can have.

Whatever messages and prices say, moving their amounts between tables leaves the total of every
choice as it is, and prices only take off what a valid choice gives back. So messages and
prices are rounded to multiples of a small unit, and the sum of the minima is taken in integers: a
bound on every valid choice, however the messages came about. A state that raises it above what a known
choice costs cannot be in a better one.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshdsl.planner.contest.instance import Core
from meshdsl.planner.mrf.network import Labels
from meshdsl.planner.mrf.trws import TRWS, clip
from meshdsl.util.arrays import Costs, Ints

# ---- Flat ------------------------------------------------------------------------------------------------------------
# A core laid out flat for the compiled loops, and what its states cost and use.


class FlatCore:
    """The variables of a core by position, with costs that are finite.

    Args:
      core: whose arrays are left as they are.
      top: what an impossible combination costs.
    """

    def __init__(self, core: Core, top: float) -> None:
        from meshdsl.planner.contest.kernels import FixedStates

        self.core, self.limit, self.top = core, core.usage.limit, top
        network = core.network.copy()
        clip(network, top)
        self.messages = TRWS(network)
        self.order, self.flat = self.messages.order.tolist(), self.messages.flat
        self.unary, self.tables = self.messages.unary, self.messages.tables
        items = [(i, at, use) for i, v in enumerate(self.order) for at, use in core.usage.held.get(v, {}).items()]
        owner = np.array([i for i, _, _ in items], dtype=np.int64)
        self.held = FixedStates(
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
        """Pairs of neighbours by position, and their tables."""
        network, at = self.messages.network, {v: i for i, v in enumerate(self.order)}
        return [(i, at[w], t) for v, i in at.items() for w, t in network.pairwise[v].items() if i < at[w]]

    def priced(self, prices: Costs) -> Costs:
        """What states cost by themselves when memory has a price at every point."""
        from meshdsl.planner.contest import kernels

        return kernels.priced(self.held, self.flat.start, self.unary, prices)

    def used(self, states: Ints) -> Costs:
        """What the states use at every point."""
        from meshdsl.planner.contest import kernels

        return kernels.profile(self.held, states, self.limit.size)

    def cost(self, states: Ints) -> float:
        """What the states cost, without what contraction has settled."""
        from meshdsl.planner.contest import kernels

        return kernels.cost(self.flat, self.unary, self.tables, states)

    def choice(self, states: Ints) -> list[int]:
        """The strategies of all nodes of the instance."""
        return self.core.choice(dict(zip(self.order, states.tolist(), strict=True)))


# ---- Certify ---------------------------------------------------------------------------------------------------------


_PASSES = 8  # the last steps of prices may have led the messages elsewhere
_BITS = 60  # what a sum of amounts may have in an int64


@dataclass(frozen=True)
class BoundProof:
    """What no choice undercuts, in units of 2^-``digits``: ``least``, and ``excess`` more with each state.

    Args:
      coarse: binary digits fewer that ``excess`` has.
    """

    flat: FlatCore
    least: int
    excess: Ints
    digits: int
    coarse: int

    @property
    def bound(self) -> int:
        """An integer that no valid choice of the core undercuts, in its cost unit."""
        return int(self.flat.core.network.constant) - ((-self.least) >> self.digits)

    def kept(self, cost: int) -> dict[int, Labels]:
        """States by variable that may be in a valid choice of at most this cost, where some are not."""
        room = ((cost - int(self.flat.core.network.constant)) << self.digits) - self.least
        most, start = room >> self.coarse, self.flat.flat.start
        parts = ((v, self.excess[start[i] : start[i + 1]]) for i, v in enumerate(self.flat.order))
        found = {v: np.flatnonzero(part <= most) for v, part in parts if part.max() > most}
        return found


def prove(flat: FlatCore, prices: Costs) -> BoundProof:
    """A proof from messages at these prices of memory, at which they are passed again."""
    from meshdsl.planner.contest import kernels

    messages = flat.messages
    messages.unary = flat.priced(prices)
    messages.run(_PASSES)
    terms = 8 * (flat.size + flat.flat.to.size)
    digits = _room(terms * max(map(_most, (messages.unary, messages.sent, flat.tables))))
    fine = _room(2 * float(prices.sum()) * max(_most(flat.held.use), 1.0))
    digits = min(digits, fine)
    price = _scaled(prices, fine)
    held = flat.held._replace(use=flat.held.use.astype(np.int64))
    unary, tables, sent = (_scaled(a, digits) for a in (flat.unary, flat.tables, messages.sent))
    least, excess = kernels.least(flat.flat, held, unary, tables, sent, price, fine - digits)
    paid = sum([p * int(most) for p, most in zip(price.tolist(), flat.limit.tolist(), strict=True) if p])
    return BoundProof(flat, (int(least) << (fine - digits)) - paid, excess, fine, fine - digits)


def _most(amounts: Costs) -> float:
    return float(np.abs(amounts).max(initial=0.0))


def _room(largest: float) -> int:
    """Binary digits after the point that amounts up to this may have."""
    return max(0, min(_BITS, _BITS - int(np.ceil(np.log2(max(largest, 1.0))))))


def _scaled(amounts: Costs, digits: int) -> Ints:
    """Multiples of 2^-digits."""
    return np.rint(np.ldexp(amounts, digits)).astype(np.int64)


# ---- Ascent ----------------------------------------------------------------------------------------------------------
# Prices of memory per time point, and a lower bound that rises with them: Lagrangian relaxation.
#
# With a price at every point instead of a limit, a core is a network that messages bound (see
# ``meshdsl.planner.mrf.trws``); the limit times its prices, taken off, leaves a bound on every valid
# choice. Prices follow the subgradient: up where the states that the messages point to use too much,
# down where they leave room, with Polyak's step. States that happen to be valid are kept.


_FIRST = 50  # passes before prices move
_PATIENCE = 20  # moves without a better bound before steps get shorter
_SHORTER = 0.7
_RISE = 1e-6  # part of the cost that counts as a better bound
_AHEAD = 0.1  # with steps of full length, the bound is expected to rise by this part at most


class Subgradient:
    """Raises ``lower``, what no valid choice undercuts by messages at ``prices`` (a float: see ``certify``).

    Args:
      best: valid states, if any are known.
    """

    def __init__(self, flat: FlatCore, prices: Costs, best: Ints | None = None) -> None:
        self.flat, self.limit = flat, flat.limit
        self.prices, self.lower = prices, -np.inf
        self.best, self.cost = best, np.inf if best is None else flat.cost(best)
        self.steps = self.idle = 0
        self._length, self._at = 1.0, prices
        self._per = 1.0 / np.maximum(self.limit, 1.0)

    @property
    def open(self) -> bool:
        """Whether another step can help."""
        return self._length > _RISE

    def step(self) -> None:
        """Pass messages at the present prices, then move those."""
        flat, messages = self.flat, self.flat.messages
        messages.unary = flat.priced(self._at)
        messages.run(1 if self.steps else _FIRST)
        self.steps += 1
        lower = messages.lower - float(self._at @ self.limit)
        self._keep(lower)
        used = self._judge(messages.latest)
        self._move((used - self.limit) * self._per, lower)

    def _keep(self, lower: float) -> None:
        if self.steps == 1 or lower > self.lower + _RISE * max(abs(self.lower), 1.0):
            self.prices, self.lower, self.idle = self._at, lower, 0
            return
        self.idle += 1
        if self.idle % _PATIENCE == 0:
            self._length, self._at = self._length * _SHORTER, self.prices

    def _judge(self, states: Ints) -> Costs:
        """What states use; they are kept if they are valid and better."""
        used = self.flat.used(states)
        if (used <= self.limit).all():
            cost = self.flat.cost(states)
            if cost < self.cost:
                self.best, self.cost = states.copy(), cost
        return used

    def _move(self, excess: Costs, lower: float) -> None:
        slope = np.where((self._at <= 0) & (excess < 0), 0.0, excess)
        steep = float(slope @ slope)
        if not steep:
            self._length = 0.0
            return
        hoped = min(self.cost, lower + _AHEAD * max(abs(lower), 1.0))  # a poor choice says little
        step = self._length * max(hoped - lower, _RISE * abs(lower)) / steep
        self._at = np.maximum(0.0, self._at + step * slope * self._per)
