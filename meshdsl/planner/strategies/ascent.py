"""Prices of memory per time point, and a lower bound that rises with them: Lagrangian relaxation.

With a price at every point instead of a limit, a core is a network that messages bound (see
``meshdsl.planner.messages``); the limit times its prices, taken off, leaves a bound on every valid
choice. Prices follow the subgradient: up where the states that the messages point to use too much,
down where they leave room, with Polyak's step. States that happen to be valid are kept.
"""

import numpy as np

from meshdsl.planner.exact import Costs, Ints
from meshdsl.planner.strategies.flat import FlatCore

_FIRST = 50  # passes before prices move
_PATIENCE = 20  # moves without a better bound before steps get shorter
_SHORTER = 0.7
_RISE = 1e-6  # part of the cost that counts as a better bound
_AHEAD = 0.1  # with steps of full length, the bound is expected to rise by this part at most


class Ascent:
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
