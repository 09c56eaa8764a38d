"""Local search over forests: many variables take their best states at once, the others stay.

A set of variables without cycles among them is solved exactly by dynamic programming, at the
present prices of memory. Where the answer passes the limit, prices rise there and the same forest is
solved again; what is valid and no worse becomes the new state. When nothing has improved for long,
costs are disturbed for a few forests; what comes of it takes the place of the best if it ends up better.
"""

import numpy as np

from meshdsl.planner.exact import Costs, Ints
from meshdsl.planner.strategies.flat import FlatCore

_TRIES = 6  # prices per forest
_DEARER, _EXTRA = 1.5, 0.01  # how prices rise at a full point: by this factor, and by a part of all prices
_CHEAPER, _LEARN = 0.98, 0.1  # how the prices to begin with follow
_EVERYWHERE = 0.3  # forests over all variables; the others lie near each other
_SMALL = 10  # variables of the smallest neighbourhood
_PATIENCE, _DISTURBED = 40, 4  # forests without anything better before costs are disturbed, and then
_NOISE = (0.1, 30.0)  # of a state's cost when disturbed, in average costs of a variable
_WORSE = 0.02  # what is worse than the best by up to so much may be where to go on


class Forests:
    """Improves states, never leaving the limit once they are valid.

    Args:
      states: to begin with, which cost infinitely much while they are not valid.
      prices: of memory at every point, likewise.
      restless: disturb costs at once.
    """

    def __init__(self, flat: FlatCore, states: Ints, prices: Costs, seed: int, restless: bool = False) -> None:
        self.flat, self.states = flat, states
        self.cost = flat.cost(states) if (flat.used(states) <= flat.limit).all() else np.inf
        self.best, self.least = self.states, self.cost
        self.prices = prices.copy()
        self._first = prices
        self._random = np.random.default_rng(seed)
        self._whole = float(prices.sum()) or flat.cost(states) / (1.0 + float(flat.limit.sum())) * flat.limit.size
        self._patience = _PATIENCE + flat.size // 4
        self._idle = self._patience if restless else 0

    def step(self) -> None:
        """Solve one forest, or disturb costs for a few and go on from there."""
        if self._idle < self._patience or self.least == np.inf:
            self._improve()
        else:
            self._disturb()
        if self.cost < self.least:
            self.best, self.least = self.states, self.cost

    def _improve(self) -> None:
        found = self._solved(self._candidates(), 0.0)
        self._idle += 1
        if found is not None:
            cost = self.flat.cost(found)
            if cost <= self.cost:
                self._idle = 0 if cost < self.cost else self._idle
                self.states, self.cost = found, cost

    def _disturb(self) -> None:
        if self.cost > self.least * (1 + _WORSE * self._random.random()):
            self.states = self.best
        self.prices = self._first * self._random.uniform(0.5, 1.5)
        noise = float(np.exp(self._random.uniform(*np.log(_NOISE)))) * self.least / self.flat.size
        candidates = self._candidates()
        for _ in range(_DISTURBED):
            found = self._solved(self._random.permutation(candidates), noise)
            self.states = self.states if found is None else found
        self.cost, self._idle = self.flat.cost(self.states), 0

    def _solved(self, candidates: Ints, noise: float) -> Ints | None:
        """The states with a forest among the candidates solved; None if no prices make them valid."""
        from meshdsl.planner.strategies import kernels

        order, up = kernels.forest(self.flat.flat, candidates)
        prices, attempt = self.prices.copy(), 0
        extra = noise * self._random.random(self.flat.unary.size) if noise else 0.0
        while True:
            states = self.states.copy()
            kernels.solve(self.flat.flat, self.flat.priced(prices) + extra, self.flat.tables, order, up, states)
            room = self.flat.limit - self.flat.used(states)
            full = room < 0
            if not full.any() or attempt == _TRIES:
                break
            prices[full] = prices[full] * _DEARER + _EXTRA * self._whole / full.sum()
            attempt += 1
        if attempt:
            self.prices = (1 - _LEARN) * self.prices + _LEARN * prices
        else:
            self.prices[room > 0] *= _CHEAPER
        if full.any() and self.cost == np.inf:  # not there yet, but dearer memory has led nearer
            self.states, self.prices = states, prices
        return None if full.any() else states

    def _candidates(self) -> Ints:
        """Variables in random order: all, or some that are near each other."""
        n, random = self.flat.size, self._random
        if n <= _SMALL or random.random() < _EVERYWHERE:
            return random.permutation(n)
        count = int(np.exp(random.uniform(np.log(_SMALL), np.log(n))))
        first = int(random.integers(0, n - count + 1))
        return first + random.permutation(count)
