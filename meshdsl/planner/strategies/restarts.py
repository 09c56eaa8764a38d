"""Search from many starts: what is best at various prices of memory, made to fit.

Where prices leave a gap, no local search gets from the states that are best at one price to those at another. So
every start takes prices at random, messages and a few steps without a limit to what is best there, and steps
within the limit from that on, until nothing improves. Prices that led far are tried again, a little changed.
"""

import time

import numpy as np

from meshdsl.planner.exact import Costs, Ints
from meshdsl.planner.strategies.flat import FlatCore
from meshdsl.planner.strategies.wide import Wide

_PASSES = 20  # of messages, at each start's prices
_FREELY = 10  # steps without a limit
_FITTING = 5  # tries to make a start fit
_PATIENCE = 16  # steps without anything better before a start is given up, and
_TRIAL, _WORSE = 20, 1.5  # after so many steps if it costs so many times what the best does
_FACTORS = (-1.2, 0.9)  # natural logarithms of what prices are taken times
_ELITE, _AGAIN, _CHANGE = 6, 0.5, 0.3  # starts that are remembered, part of starts near them, and how near


class Restarts:
    """Keeps the best states, which cost infinitely much while there are none that fit.

    Args:
      prices: of memory at every point, which starts vary.
    """

    def __init__(self, flat: FlatCore, prices: Costs, seed: int) -> None:
        self.flat, self.prices = flat, prices
        self.best, self.least = flat.messages.latest.copy(), np.inf
        self._random = np.random.default_rng(seed)
        self._wide = Wide(flat, self._random)
        self._sent = flat.messages.sent.copy()
        self._elite: list[tuple[float, Costs]] = []

    def step(self, until: float) -> None:
        """Go from one start as far as it leads, or until a time."""
        factors = self._factors()
        states = self._start(self.prices * factors)
        if states is not None:
            states = self._improved(states, until)
            cost = self.flat.cost(states)
            self._elite = sorted([*self._elite, (cost, factors)], key=lambda known: known[0])[:_ELITE]
            if cost < self.least:
                self.best, self.least = states, cost

    def _factors(self) -> Costs:
        random = self._random
        if not self._elite or random.random() > _AGAIN:
            return np.exp(random.uniform(*_FACTORS, self.prices.size))
        _, factors = self._elite[random.integers(len(self._elite))]
        return factors * np.exp(random.normal(0.0, _CHANGE, factors.size))

    def _start(self, prices: Costs) -> Ints | None:
        """States that are good at these prices, made to fit; None if they cannot be."""
        costs, messages, wide = self.flat.priced(prices), self.flat.messages, self._wide
        messages.unary, messages.sent = costs, self._sent.copy()
        messages.run(_PASSES)
        messages.sent, states = self._sent.copy(), messages.latest.copy()
        for _ in range(_FREELY):
            states = wide.solve(costs, wide.plan(), states)
        for _ in range(_FITTING):
            found = wide.within(states)
            if found is not None:
                return found
        return None

    def _improved(self, states: Ints, until: float) -> Ints:
        cost, steps, idle = self.flat.cost(states), 0, 0
        while idle < _PATIENCE and time.perf_counter() < until:
            states = self._wide.improved(states, steps % 2 == 1)
            before, cost = cost, self.flat.cost(states)
            steps, idle = steps + 1, 0 if cost < before else idle + 1
            if steps >= _TRIAL and cost > _WORSE * self.least:
                break
        return states
