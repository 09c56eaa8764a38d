"""Local search by large moves: many variables take their best states at once, the others stay.

* ``ForestMoves``: variables that induce a forest are solved exactly by dynamic programming at the present prices of
  memory. Where the result exceeds the limit, prices rise there and the same forest is solved again; a valid result that
  is no worse becomes the new choice. When nothing has improved for long, costs are disturbed for a few forests, and the
  search goes on from there (iterated local search; Lourenco, Martin and Stuetzle 2003).
* ``WideMoves``: variables that induce a narrow graph, cycles and all, are solved by bucket elimination under memory
  allowances (``bucket_kernels``), so that every result is valid.
* ``Restarts``: wide moves from many starts. Where prices leave a gap, no local search gets from states that are best at
  one price to those at another. So every start samples prices; messages and a few moves without a limit find the states
  that are best there, which are then made valid and improved. Prices that led far are sampled again, slightly changed.
"""

import time

import numpy as np

from meshdsl.planner.contest.bucket_kernels import EliminationOrder
from meshdsl.planner.contest.lagrangian import FlatCore
from meshdsl.util.arrays import Costs, Ints

_SEEDS = 2**31  # seeds of the compiled loops' random numbers

# ---- Forests ---------------------------------------------------------------------------------------------------------


class ForestMoves:
    """Improves a choice by forests; once it is valid it stays valid.

    Attributes:
      states, cost: the present choice and its cost, infinite while it is not valid.
      best, least: the best choice and its cost.

    Args:
      states: the first choice.
      prices: the first prices of memory, per point.
      disturb_first: begin with disturbed costs.
    """

    def __init__(self, flat: FlatCore, states: Ints, prices: Costs, seed: int, disturb_first: bool = False) -> None:
        self.flat, self.states, self._limits = flat, states, flat.limits
        self.cost = flat.cost(states) if (flat.used(states) <= flat.limit).all() else np.inf
        self.best, self.least = self.states, self.cost
        self.prices = prices.copy()
        self._first_prices = prices
        self._random = np.random.default_rng(seed)
        self._price_scale = float(prices.sum()) or flat.cost(states) / (1.0 + float(flat.limit.sum())) * flat.limit.size
        self._patience = self._limits.forest_patience + flat.size // 4
        self._idle = self._patience if disturb_first else 0

    def step(self) -> None:
        """Solves one forest, or a few with disturbed costs."""
        if self._idle < self._patience or self.least == np.inf:
            self._improve()
        else:
            self._disturb()
        if self.cost < self.least:
            self.best, self.least = self.states, self.cost

    def _improve(self) -> None:
        found = self._solve_forest(self._candidates(), 0.0)
        self._idle += 1
        if found is not None:
            cost = self.flat.cost(found)
            if cost <= self.cost:
                self._idle = 0 if cost < self.cost else self._idle
                self.states, self.cost = found, cost

    def _disturb(self) -> None:
        if self.cost > self.least * (1 + self._limits.forest_worse * self._random.random()):
            self.states = self.best
        self.prices = self._first_prices * self._random.uniform(0.5, 1.5)
        noise = float(np.exp(self._random.uniform(*np.log(self._limits.forest_noise)))) * self.least / self.flat.size
        candidates = self._candidates()
        for _ in range(self._limits.forest_disturbed):
            found = self._solve_forest(self._random.permutation(candidates), noise)
            self.states = self.states if found is None else found
        self.cost, self._idle = self.flat.cost(self.states), 0

    def _solve_forest(self, candidates: Ints, noise: float) -> Ints | None:
        """Returns the choice with a forest among the candidates solved; None if no prices make it valid."""
        from meshdsl.planner.contest import kernels

        limits = self._limits
        order, up = kernels.induced_forest(self.flat.flat, candidates)
        prices, attempt = self.prices.copy(), 0
        extra = noise * self._random.random(self.flat.unary.size) if noise else 0.0
        while True:
            states = self.states.copy()
            kernels.solve_forest(self.flat.flat, self.flat.priced(prices) + extra, self.flat.tables, order, up, states)
            room = self.flat.limit - self.flat.used(states)
            full = room < 0
            if not full.any() or attempt == self._limits.forest_tries:
                break
            prices[full] = prices[full] * limits.price_factor + limits.price_extra * self._price_scale / full.sum()
            attempt += 1
        if attempt:
            self.prices = (1 - limits.price_learning) * self.prices + limits.price_learning * prices
        else:
            self.prices[room > 0] *= limits.price_decay
        if full.any() and self.cost == np.inf:  # still invalid, but higher prices have led nearer
            self.states, self.prices = states, prices
        return None if full.any() else states

    def _candidates(self) -> Ints:
        """Returns variables in random order: all, or some of neighbouring numbers."""
        n, random, least = self.flat.size, self._random, self._limits.forest_least
        if n <= least or random.random() < self._limits.forest_global:
            return random.permutation(n)
        count = int(np.exp(random.uniform(np.log(least), np.log(n))))
        first = int(random.integers(0, n - count + 1))
        return first + random.permutation(count)


# ---- Narrow graphs ---------------------------------------------------------------------------------------------------


class WideMoves:
    """Moves from choice to choice; a valid one leads to valid ones that cost no more."""

    def __init__(self, flat: FlatCore, random: np.random.Generator) -> None:
        self.flat, self.random = flat, random

    def sample_order(self) -> EliminationOrder:
        """Returns an elimination order of variables of neighbouring numbers, of random width."""
        from meshdsl.planner.contest import bucket_kernels

        n, random, limits = self.flat.size, self.random, self.flat.limits
        count = min(n, limits.wide_candidates)
        candidates = random.integers(0, n - count + 1) + random.permutation(count)
        noise = random.random(count) * random.choice(limits.wide_noise)
        width = float(random.choice(limits.wide_log_entries))
        order: EliminationOrder = bucket_kernels.plan_elimination(self.flat.flat, candidates, noise, width)
        return order

    def solve(self, costs: Costs, order: EliminationOrder, states: Ints) -> Ints:
        """Returns the choice with the best states of the free variables, at these unary costs."""
        from meshdsl.planner.contest import bucket_kernels

        states = states.copy()
        bucket_kernels.solve_buckets(self.flat.flat, costs, self.flat.tables, order, states)
        return states

    def improved(self, states: Ints, exchange: bool) -> Ints:
        """Returns a choice that costs no more, after one move.

        Args:
          exchange: allow one variable more than there is room for, and others less.
        """
        found = self.make_valid(states, exchange)
        return states if found is None or self.flat.cost(found) > self.flat.cost(states) else found

    def make_valid(self, states: Ints, exchange: bool = False) -> Ints | None:
        """Returns a choice within the limit, whether this one is or not; None if allowances near it leave none."""
        from meshdsl.planner.contest import bucket_kernels

        flat, order, seed = self.flat, self.sample_order(), int(self.random.integers(_SEEDS))
        allowances, room = states.copy(), flat.limit - flat.used(states)
        given = flat.usages, flat.flat.start, order.order, allowances
        exceeding = bucket_kernels.exceed_one_allowance(*given, room, seed) if exchange else -1
        if not bucket_kernels.lower_allowances(*given, room, exceeding, seed + 1, flat.limits.allowance_tries):
            return None
        bucket_kernels.fill_allowances(*given, room, seed + 2, flat.limits.allowance_near)
        unary = bucket_kernels.forbid_above_allowances(*given, flat.unary, flat.top)
        found = self.solve(unary, order, states)
        return found if flat.cost(found) < flat.top and (flat.used(found) <= flat.limit).all() else None


# ---- Restarts --------------------------------------------------------------------------------------------------------


class Restarts:
    """Wide moves from sampled starts.

    Attributes:
      best, least: the best choice and its cost, infinite while none is valid.

    Args:
      prices: of memory per point, which starts vary.
    """

    def __init__(self, flat: FlatCore, prices: Costs, seed: int) -> None:
        self.flat, self.prices = flat, prices
        self.best, self.least = flat.messages.latest.copy(), np.inf
        self._random = np.random.default_rng(seed)
        self._wide = WideMoves(flat, self._random)
        self._sent = flat.messages.sent.copy()
        self._elite: list[tuple[float, Costs]] = []

    def step(self, until: float) -> None:
        """Improves one start as far as it leads, or until a time."""
        factors = self._sample_factors()
        states = self._valid_start(self.prices * factors)
        if states is not None:
            states = self._improve(states, until)
            cost = self.flat.cost(states)
            self._elite = sorted([*self._elite, (cost, factors)], key=lambda known: known[0])[
                : self.flat.limits.restart_elite
            ]
            if cost < self.least:
                self.best, self.least = states, cost

    def _sample_factors(self) -> Costs:
        random, limits = self._random, self.flat.limits
        if not self._elite or random.random() > limits.restart_repeat:
            return np.exp(random.uniform(*limits.restart_factors, self.prices.size))
        _, factors = self._elite[random.integers(len(self._elite))]
        return factors * np.exp(random.normal(0.0, limits.restart_change, factors.size))

    def _valid_start(self, prices: Costs) -> Ints | None:
        """Returns a choice that is good at these prices, made valid; None if that fails."""
        costs, messages, wide, limits = self.flat.priced(prices), self.flat.messages, self._wide, self.flat.limits
        messages.unary, messages.sent = costs, self._sent.copy()
        messages.run(limits.restart_passes)
        messages.sent, states = self._sent.copy(), messages.latest.copy()
        for _ in range(limits.restart_free_steps):
            states = wide.solve(costs, wide.sample_order(), states)
        for _ in range(limits.restart_fit_tries):
            found = wide.make_valid(states)
            if found is not None:
                return found
        return None

    def _improve(self, states: Ints, until: float) -> Ints:
        limits, cost, steps, idle = self.flat.limits, self.flat.cost(states), 0, 0
        while idle < limits.restart_patience and time.perf_counter() < until:
            states = self._wide.improved(states, steps % 2 == 1)
            before, cost = cost, self.flat.cost(states)
            steps, idle = steps + 1, 0 if cost < before else idle + 1
            if steps >= limits.restart_trial and cost > limits.restart_worse * self.least:
                break
        return states
