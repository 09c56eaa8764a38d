"""The stages of solving an instance: presolve, price, search, combine, fix states; repeated until the time is up.

Every choice found is scored on the instance itself, in exact integers, and becomes the incumbent if it is valid and
better. So there is an answer from the first valid choice on.
"""

import time
from dataclasses import dataclass

import numpy as np

from meshdsl.errors import MemoryLimitError
from meshdsl.planner.contest.instance import Core, Instance, Score, core_of, unneeded_costs
from meshdsl.planner.contest.lagrangian import FlatCore, Subgradient, certify
from meshdsl.planner.contest.local_search import ForestMoves, Restarts
from meshdsl.planner.contest.mip import RestrictedMIP, promising_states, restricted_core
from meshdsl.planner.contest.presolve import Presolve
from meshdsl.planner.limits import DEFAULT_CONTEST_LIMITS, ContestLimits
from meshdsl.util.arrays import Costs, Ints
from meshdsl.util.runtime import gc_paused


@dataclass(frozen=True)
class Answer:
    """A result of ``solve``.

    Args:
      choice: per node, the strategy in the best valid choice found.
      score: its cost and memory.
      bound: an integer that no valid choice is below.
    """

    choice: list[int]
    score: Score
    bound: int

    @property
    def optimal(self) -> bool:
        """Whether the choice is proved to be the best."""
        return self.score.cost <= self.bound


@gc_paused  # the collector would scan millions of small arrays again and again
def solve(instance: Instance, seconds: float, seed: int = 0, limits: ContestLimits = DEFAULT_CONTEST_LIMITS) -> Answer:
    """Returns the best valid choice found in the time, with a lower bound.

    Args:
      instance: the problem.
      seconds: wall time for everything.
      seed: of all random decisions.
      limits: how the time is divided, and sizes of neighbourhoods.

    Raises:
      MemoryLimitError: if no valid choice was found; the message says whether none exists.
    """
    return _Solver(instance, time.perf_counter() + seconds * (1 - limits.answer_time), seed, limits).run()


class _Solver:
    def __init__(self, instance: Instance, deadline: float, seed: int, limits: ContestLimits) -> None:
        self.instance, self.deadline, self.seed, self.limits = instance, deadline, seed, limits
        self.best: Answer | None = None
        self.bound = 0
        self._pool: dict[int, list[int]] = {}  # the best valid choices by cost
        self._mip_pairs, self._has_searched = limits.mip_pairs, False
        self._failure = "there was no time to look for a valid choice"
        self._presolve_seconds = 0.0  # of the longest presolve

    def run(self) -> Answer:
        """Solves without the costs that no optimum has, and with the next larger ones only if no choice is valid."""
        for forbidden in unneeded_costs(self.instance):
            if self.best is None and self._seconds_left > 0:
                self._solve(core_of(self.instance, forbidden))
        if self.best is None:
            raise MemoryLimitError(f"{self._failure}; the limit is {self.instance.limit}")
        return Answer(self.best.choice, self.best.score, min(self.bound, self.best.score.cost))

    def _solve(self, core: Core) -> None:
        self._presolve(core)
        self._failure = "no valid choice was found in the time" if core.is_feasible else "no choice is valid"
        prices = np.zeros(core.usage.limit.size)
        while core.is_feasible and core.network.unary and self._is_open:
            core, prices = self._round(core, prices)
        if core.is_feasible and not core.network.unary:
            self._submit(core.choice({}))
            self.bound = max(self.bound, core.cost_unit * int(core.network.constant))

    # ---- time ----

    @property
    def _seconds_left(self) -> float:
        return self.deadline - time.perf_counter()

    @property
    def _is_open(self) -> bool:
        return self._seconds_left > 0 and (self.best is None or self.bound < self.best.score.cost)

    def _until(self, part: float) -> float:
        return time.perf_counter() + part * self._seconds_left

    # ---- one round ----

    def _round(self, core: Core, prices: Costs) -> tuple[Core, Costs]:
        """Raises prices, searches, and prunes states of no better choice; returns the core that is left, its prices."""
        limits = self.limits
        top = core.cost_above_all if self.best is None else limits.impossible_cost * self.best.score.cost
        flat = FlatCore(core, top, limits)
        prices = self._raise_prices(flat, prices)
        self._search_and_combine(flat, prices, self._until(limits.search_time))
        if flat.size <= limits.restart_variables:
            self._search_from_many_starts(flat, prices)
        until = self._until(limits.search_time)
        while self._is_open and time.perf_counter() < until:
            self._search_and_combine(flat, prices, until)
        if self.best is None or self._seconds_left < self._presolve_seconds:
            return core, prices
        return self._prune(flat, prices, self.best.score.cost)

    def _presolve(self, core: Core) -> None:
        start = time.perf_counter()
        Presolve(core, self.limits).run()
        self._presolve_seconds = max(self._presolve_seconds, time.perf_counter() - start)

    def _raise_prices(self, flat: FlatCore, prices: Costs) -> Costs:
        ascent, until = Subgradient(flat, prices), self._until(self.limits.price_time)
        while time.perf_counter() < until and ascent.is_open and ascent.stalled < self.limits.price_patience:
            before = ascent.cost
            ascent.step()
            if ascent.cost < before and ascent.best is not None:
                self._submit(flat.choice(ascent.best))
        self.bound = max(self.bound, certify(flat, ascent.prices).bound)
        return ascent.prices

    def _search_and_combine(self, flat: FlatCore, prices: Costs, until: float) -> None:
        if self._is_open:
            self._search(flat, prices, until)
        if self._is_open:
            self._combine(flat, prices)

    def _search(self, flat: FlatCore, prices: Costs, until: float) -> None:
        """Searches from some known choices, the best one first; whatever is found is material for the program."""
        for run in range(self.limits.searches):
            known = self._known_states(flat)
            start = known[run and self.seed % len(known)] if known else flat.messages.latest.copy()
            search = ForestMoves(flat, start, prices, self._next_seed(), disturb_first=self._has_searched)
            steps = self.limits.search_steps + flat.size // 8
            while time.perf_counter() < until and (steps > 0 or search.least == np.inf):
                search.step()
                steps -= 1
            self._submit(flat.choice(search.best))
        self._has_searched = True

    def _search_from_many_starts(self, flat: FlatCore, prices: Costs) -> None:
        """Searches from random prices, other ones in every round."""
        starts, until = Restarts(flat, prices, self._next_seed()), self._until(self.limits.restart_time)
        while time.perf_counter() < until and self._is_open:
            before = starts.least
            starts.step(until)
            if starts.least < before:
                self._submit(flat.choice(starts.best))

    def _next_seed(self) -> int:
        self.seed += 1
        return self.seed

    def _combine(self, flat: FlatCore, prices: Costs) -> None:
        """Combines known choices with the most promising other states; with more of these while that is quick."""
        known = self._known_states(flat)
        if not known or self.best is None or self._seconds_left < self._presolve_seconds:
            return
        some = promising_states(flat, certify(flat, prices).excess, known, len(flat.edges) + self._mip_pairs)
        core, until = restricted_core(flat, some), self._until(self.limits.mip_time)
        if not core.network.unary:
            self._submit(core.choice({}))
            return
        part = FlatCore(core, flat.top, self.limits)
        every = [np.arange(n) for n in np.diff(part.flat.start)]
        program = RestrictedMIP(part, every, self._states(part, self.best.choice))
        for found in program.solve(until - time.perf_counter()):
            if (part.used(found) <= part.limit).all():
                self._submit(part.choice(found))
        self._mip_pairs = self._mip_pairs * 2 if time.perf_counter() < until else self._mip_pairs // 2

    def _prune(self, flat: FlatCore, prices: Costs, cost: int) -> tuple[Core, Costs]:
        """Prunes states that no choice of at most this cost has, and presolves what is left."""
        core, proof = flat.core, certify(flat, prices)
        if any(not keep.size for keep in proof.remaining(cost // core.cost_unit - 1).values()):
            self.bound = cost // core.cost_unit * core.cost_unit
        for v, keep in proof.remaining(cost // core.cost_unit).items():
            core.restrict(v, keep)
        at = dict(zip(core.usage.times.tolist(), prices.tolist(), strict=True))
        self._presolve(core)
        return core, np.array([at[t] for t in core.usage.times.tolist()])

    # ---- choices ----

    def _submit(self, choice: list[int]) -> None:
        """Scores a choice; a valid one joins the pool, and becomes the incumbent if it is better."""
        score = self.instance.score(choice)
        if score.fits:
            self._pool[score.cost] = choice
            self._pool = dict(sorted(self._pool.items())[: self.limits.pool])
            if self.best is None or score.cost < self.best.score.cost:
                self.best = Answer(choice, score, self.bound)

    def _known_states(self, flat: FlatCore) -> list[Ints]:
        """Returns the pool's choices as states of the core, best first, but those whose states have been pruned."""
        found = (self._states(flat, choice) for choice in self._pool.values())
        return [states for states in found if states is not None]

    def _states(self, flat: FlatCore, choice: list[int]) -> Ints | None:
        states = flat.core.states(choice)
        return None if states is None else np.array([states[v] for v in flat.order])
