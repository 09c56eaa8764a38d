"""A lower bound in exact integers, and what no better choice can have.

Whatever messages and prices say, moving their amounts between tables leaves the total of every
choice as it is, and prices only take off what a valid choice gives back. So messages and
prices are rounded to multiples of a small unit, and the sum of the minima is taken in integers: a
bound on every valid choice, however the messages came about. A state that raises it above what a known
choice costs cannot be in a better one.
"""

from dataclasses import dataclass

import numpy as np

from meshdsl.planner.exact import Costs, Ints
from meshdsl.planner.strategies.flat import FlatCore
from meshdsl.planner.trail import Labels

_PASSES = 8  # the last steps of prices may have led the messages elsewhere
_BITS = 60  # what a sum of amounts may have in an int64


@dataclass(frozen=True)
class Proof:
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


def prove(flat: FlatCore, prices: Costs) -> Proof:
    """A proof from messages at these prices of memory, at which they are passed again."""
    from meshdsl.planner.strategies import kernels

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
    return Proof(flat, (int(least) << (fine - digits)) - paid, excess, fine, fine - digits)


def _most(amounts: Costs) -> float:
    return float(np.abs(amounts).max(initial=0.0))


def _room(largest: float) -> int:
    """Binary digits after the point that amounts up to this may have."""
    return max(0, min(_BITS, _BITS - int(np.ceil(np.log2(max(largest, 1.0))))))


def _scaled(amounts: Costs, digits: int) -> Ints:
    """Multiples of 2^-digits."""
    return np.rint(np.ldexp(amounts, digits)).astype(np.int64)
