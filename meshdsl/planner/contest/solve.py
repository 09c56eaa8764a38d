"""The stages of solving an instance: contract, price, search, combine, fix; again on what is left, until time is up.

Whatever is found is judged on the instance itself, in exact integers, and kept if it is valid and
better; so there is an answer from the first valid choice on.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from meshdsl.errors import MemoryLimitError
from meshdsl.planner.contest.instance import Core, Instance, Score, core_of
from meshdsl.planner.contest.lagrangian import FlatCore, Subgradient, prove
from meshdsl.planner.contest.local_search import ForestMoves, Restarts
from meshdsl.planner.contest.mip import RestrictedMIP, narrowed, promising
from meshdsl.planner.contest.presolve import Presolve
from meshdsl.util.arrays import Costs, Ints

_PRICING, _SEARCH = 0.2, 0.35  # parts of the time left that a round may take for prices, and for search
_STARTS, _MANY = 0.4, 1_000  # likewise, before it, for starts at many prices where the core has no more variables
_RUNS, _STEPS = 3, 200  # searches between two programs, and the steps of one
_STALLED = 400  # steps of prices without a better bound
_MARGIN = 0.05  # part of the time that is kept for reading the answer back
_PROGRAM, _ENTRIES = 0.2, 10_000  # the program's part of the time, and pairs at first
_POOL = 6  # choices that the program combines
_FINER = 4.0  # what an impossible combination costs, in costs of the best choice


@dataclass(frozen=True)
class Answer:
    """The best valid choice found, and an integer that no valid choice undercuts."""

    choice: list[int]
    score: Score
    bound: int

    @property
    def optimal(self) -> bool:
        """Whether the choice is proved to be the best."""
        return self.score.cost <= self.bound


def solve(instance: Instance, seconds: float, seed: int = 0) -> Answer:
    """The best valid choice found in the time, with a lower bound.

    Raises MemoryLimitError if none was found: the message says whether there is none.
    """
    with _no_collection():
        return _Solver(instance, time.perf_counter() + seconds * (1 - _MARGIN), seed).run()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection, which would look through millions of small arrays again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Solver:
    def __init__(self, instance: Instance, deadline: float, seed: int) -> None:
        self.instance, self.deadline, self.seed = instance, deadline, seed
        self.best: Answer | None = None
        self._pool: dict[int, list[int]] = {}  # the best valid choices by cost
        self.bound = 0
        self._entries, self._searched = _ENTRIES, False
        self._reason = "there was no time to look for a valid choice"
        self._contracting = 0.0  # seconds of the longest contraction

    def run(self) -> Answer:
        """Solve without what is never needed, and with it only if nothing is valid otherwise."""
        for whole in (False, True):
            if self.best is None and self._left > 0:
                self._solve(core_of(self.instance, whole))
        if self.best is None:
            raise MemoryLimitError(f"{self._reason}; the limit is {self.instance.limit}")
        return Answer(self.best.choice, self.best.score, min(self.bound, self.best.score.cost))

    def _solve(self, core: Core) -> None:
        self._contract(core)
        self._reason = "no valid choice was found in the time" if core.feasible else "no choice is valid"
        prices = np.zeros(core.usage.limit.size)
        while core.feasible and core.network.unary and self._open:
            core, prices = self._round(core, prices)
        if core.feasible and not core.network.unary:
            self._judge(core.choice({}))
            self.bound = max(self.bound, core.cost_unit * int(core.network.constant))

    @property
    def _left(self) -> float:
        return self.deadline - time.perf_counter()

    @property
    def _open(self) -> bool:
        return self._left > 0 and (self.best is None or self.bound < self.best.score.cost)

    def _round(self, core: Core, prices: Costs) -> tuple[Core, Costs]:
        """Raise prices, search, drop what cannot be better; the core that is left, and its prices."""
        flat = FlatCore(core, core.most if self.best is None else _FINER * self.best.score.cost)
        prices = self._price(flat, prices)
        self._combine(flat, prices, self._until(_SEARCH))
        if flat.size <= _MANY:
            self._restart(flat, prices)
        until = self._until(_SEARCH)
        while self._open and time.perf_counter() < until:
            self._combine(flat, prices, until)
        if self.best is None or self._left < self._contracting:
            return core, prices
        return self._fix(flat, prices, self.best.score.cost)

    def _price(self, flat: FlatCore, prices: Costs) -> Costs:
        ascent, until = Subgradient(flat, prices), self._until(_PRICING)
        while time.perf_counter() < until and ascent.open and ascent.idle < _STALLED:
            before = ascent.cost
            ascent.step()
            if ascent.cost < before and ascent.best is not None:
                self._judge(flat.choice(ascent.best))
        self.bound = max(self.bound, prove(flat, ascent.prices).bound)
        return ascent.prices

    def _restart(self, flat: FlatCore, prices: Costs) -> None:
        """Search from many starts, other ones in every round."""
        starts, until = Restarts(flat, prices, self._next_seed()), self._until(_STARTS)
        while time.perf_counter() < until and self._open:
            before = starts.least
            starts.step(until)
            if starts.least < before:
                self._judge(flat.choice(starts.best))

    def _combine(self, flat: FlatCore, prices: Costs, until: float) -> None:
        """Search, and combine what is known by then."""
        if self._open:
            self._search(flat, prices, until)
        if self._open:
            self._program(flat, prices)

    def _search(self, flat: FlatCore, prices: Costs, until: float) -> None:
        """Search from some of the known choices, the best one first; all that is found is good for the program."""
        for run in range(_RUNS):
            start, seed = self._start(flat, run), self._next_seed()
            search = ForestMoves(flat, start, prices, seed, restless=self._searched)
            steps = _STEPS + flat.size // 8
            while time.perf_counter() < until and (steps > 0 or search.least == np.inf):
                search.step()
                steps -= 1
            self._judge(flat.choice(search.best))
        self._searched = True

    def _next_seed(self) -> int:
        self.seed += 1
        return self.seed

    def _program(self, flat: FlatCore, prices: Costs) -> None:
        """Combine the known choices, with the most promising other states; with more of these from time to time."""
        known = self._known(flat)
        if not known or self.best is None or self._left < self._contracting:
            return
        some = promising(flat, prove(flat, prices).excess, known, len(flat.edges) + self._entries)
        core, until = narrowed(flat, some), self._until(_PROGRAM)
        if not core.network.unary:
            self._judge(core.choice({}))
            return
        part = FlatCore(core, flat.top)
        program = RestrictedMIP(
            part, [np.arange(n) for n in np.diff(part.flat.start)], self._states(part, self.best.choice)
        )
        for found in program.solve(until - time.perf_counter()):
            if (part.used(found) <= part.limit).all():
                self._judge(part.choice(found))
        self._entries = self._entries * 2 if time.perf_counter() < until else self._entries // 2

    def _states(self, flat: FlatCore, choice: list[int]) -> Ints | None:
        """The states of a core in a choice; None if it has lost one of them."""
        states = flat.core.states(choice)
        return None if states is None else np.array([states[v] for v in flat.order])

    def _known(self, flat: FlatCore) -> list[Ints]:
        """The known choices that the core has, best first."""
        found = (self._states(flat, choice) for choice in self._pool.values())
        return [states for states in found if states is not None]

    def _start(self, flat: FlatCore, run: int) -> Ints:
        """Where to search from: a known choice, if the core has any, or where messages point to."""
        known = self._known(flat)
        if not known:
            return flat.messages.latest.copy()
        return known[run and self.seed % len(known)]

    def _fix(self, flat: FlatCore, prices: Costs, cost: int) -> tuple[Core, Costs]:
        """Drop states that no choice of this cost or less has, and contract what is left."""
        core, proof = flat.core, prove(flat, prices)
        if any(not keep.size for keep in proof.kept(cost // core.cost_unit - 1).values()):
            self.bound = cost // core.cost_unit * core.cost_unit
        for v, keep in proof.kept(cost // core.cost_unit).items():
            core.restrict(v, keep)
        at = dict(zip(core.usage.times.tolist(), prices.tolist(), strict=True))
        self._contract(core)
        return core, np.array([at[t] for t in core.usage.times.tolist()])

    def _contract(self, core: Core) -> None:
        start = time.perf_counter()
        Presolve(core).run()
        self._contracting = max(self._contracting, time.perf_counter() - start)

    def _until(self, part: float) -> float:
        return time.perf_counter() + part * self._left

    def _judge(self, choice: list[int]) -> None:
        score = self.instance.score(choice)
        if score.fits:
            self._pool[score.cost] = choice
            self._pool = dict(sorted(self._pool.items())[:_POOL])
            if self.best is None or score.cost < self.best.score.cost:
                self.best = Answer(choice, score, self.bound)
