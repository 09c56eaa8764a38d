"""Local search over forests: many variables take their best states at once, the others stay.

A set of variables without cycles among them is solved exactly by dynamic programming, at the
present prices of memory. Where the answer passes the limit, prices rise there and the same forest is
solved again; what is valid and no worse becomes the new state. When nothing has improved for long,
costs are disturbed for a few forests; what comes of it takes the place of the best if it ends up better.
"""

import time

import numpy as np

from meshdsl.planner.contest.bucket_kernels import EliminationOrder
from meshdsl.planner.contest.lagrangian import FlatCore
from meshdsl.util.arrays import Costs, Ints

# ---- Trees -----------------------------------------------------------------------------------------------------------


_TRIES = 6  # prices per forest
_DEARER, _EXTRA = 1.5, 0.01  # how prices rise at a full point: by this factor, and by a part of all prices
_CHEAPER, _LEARN = 0.98, 0.1  # how the prices to begin with follow
_EVERYWHERE = 0.3  # forests over all variables; the others lie near each other
_SMALL = 10  # variables of the smallest neighbourhood
_PATIENCE, _DISTURBED = 40, 4  # forests without anything better before costs are disturbed, and then
_NOISE = (0.1, 30.0)  # of a state's cost when disturbed, in average costs of a variable
_WORSE = 0.02  # what is worse than the best by up to so much may be where to go on


class ForestMoves:
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
        from meshdsl.planner.contest import kernels

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


# ---- Wide ------------------------------------------------------------------------------------------------------------
# Local search over wide parts of a core: they are solved exactly, cycles and all, under allowances of memory.
#
# A step makes a plan for some variables (``plans``), lets what is free use what room there is (``allowances``), and
# solves it (``buckets``). Every other step allows one variable more than there is room for, and others less.


_WIDTHS = (12, 14, 16, 18)  # binary logarithms of how many entries tables may have
_CANDIDATES = 300  # variables that a plan is made for at most
_WIDE_NOISE = (3.0, 30.0)  # in neighbours: how far it is chance which variables are held
_SEEDS = 2**31


class WideMoves:
    """Steps from states to states; those that fit lead to none that do not, or that cost more.

    Args:
      random: where chance comes from.
    """

    def __init__(self, flat: FlatCore, random: np.random.Generator) -> None:
        self.flat, self.random = flat, random

    def plan(self) -> EliminationOrder:
        """A plan for all variables, or for some near each other, of random width."""
        from meshdsl.planner.contest import bucket_kernels as plans

        n, random = self.flat.size, self.random
        count = min(n, _CANDIDATES)
        candidates = random.integers(0, n - count + 1) + random.permutation(count)
        noise = random.random(count) * random.choice(_WIDE_NOISE)
        made: EliminationOrder = plans.planned(self.flat.flat, candidates, noise, float(random.choice(_WIDTHS)))
        return made

    def solve(self, costs: Costs, plan: EliminationOrder, states: Ints) -> Ints:
        """States with the best ones of what is free, at these costs of states by themselves."""
        from meshdsl.planner.contest import bucket_kernels as buckets

        states = states.copy()
        buckets.solve(self.flat.flat, costs, self.flat.tables, plan, states)
        return states

    def improved(self, states: Ints, exchange: bool) -> Ints:
        """States that cost no more, by one step."""
        found = self.within(states, exchange)
        return states if found is None or self.flat.cost(found) > self.flat.cost(states) else found

    def within(self, states: Ints, exchange: bool = False) -> Ints | None:
        """States within the limit, whether these are or not; None if there are none near."""
        from meshdsl.planner.contest import bucket_kernels as allowances

        flat, plan, seed = self.flat, self.plan(), int(self.random.integers(_SEEDS))
        most, room = states.copy(), flat.limit - flat.used(states)
        what = flat.held, flat.flat.start, plan.order, most
        eager = allowances.enlarge(*what, room, seed) if exchange else -1
        if not allowances.lower(*what, room, eager, seed + 1):
            return None
        allowances.fill(*what, room, seed + 2)
        found = self.solve(allowances.allowed(*what, flat.unary, flat.top), plan, states)
        return found if flat.cost(found) < flat.top and (flat.used(found) <= flat.limit).all() else None


# ---- Restarts --------------------------------------------------------------------------------------------------------
# Search from many starts: what is best at various prices of memory, made to fit.
#
# Where prices leave a gap, no local search gets from the states that are best at one price to those at another. So
# every start takes prices at random, messages and a few steps without a limit to what is best there, and steps
# within the limit from that on, until nothing improves. Prices that led far are tried again, a little changed.


_PASSES = 20  # of messages, at each start's prices
_FREELY = 10  # steps without a limit
_FITTING = 5  # tries to make a start fit
_RESTART_PATIENCE = 16  # steps without anything better before a start is given up, and
_TRIAL, _RESTART_WORSE = 20, 1.5  # after so many steps if it costs so many times what the best does
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
        self._wide = WideMoves(flat, self._random)
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
        while idle < _RESTART_PATIENCE and time.perf_counter() < until:
            states = self._wide.improved(states, steps % 2 == 1)
            before, cost = cost, self.flat.cost(states)
            steps, idle = steps + 1, 0 if cost < before else idle + 1
            if steps >= _TRIAL and cost > _RESTART_WORSE * self.least:
                break
        return states
