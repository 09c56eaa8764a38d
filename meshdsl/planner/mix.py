"""The cheapest plan that does some things as one that does not fit does them: as many as fit.

The plans come apart into parts that do not depend on each other (``parts``). Which of them to take over is a knapsack:
each saves something, and needs memory at the points that are fullest, or leaves some for others. The plan that comes of
it is tried; where it is too large after all, its fullest point is looked at as well. Parts that are too large as a
whole are tried by halves in the end.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.arrays import grouped
from meshdsl.planner.exact import Costs
from meshdsl.planner.extract import Choice
from meshdsl.planner.knapsack import packed_in
from meshdsl.planner.memory import Peak
from meshdsl.planner.model import Assignment, Model
from meshdsl.planner.parts import Groups, Parts, apart

_ROUNDS, _LAST = 8, 4  # plans that come of a knapsack, and those after which all points are left more room
_MANY, _SPARE = 100, 2e-3  # of so many parts, this part of the limit is left for points that nothing is known of
_SMALLEST = 8  # nodes of a half of a part
_IN_A_ROW = 3  # halves of a round that do not fit
_WORTH = 1e-4  # part of a plan's cost that a part must be able to save for its halves to be tried


Places = tuple[int, ...]  # of a point: positions of the loops around an operation, and its own


class Judge(NamedTuple):
    """What tells what plans cost and need.

    Args:
      limit: of bytes. made: the plan of some rows. peak: its fullest point. over: points at which it passes the limit,
        with their bytes before them.
      parts: two plans, come apart into groups of nodes.
    """

    limit: float
    made: Callable[[Assignment], Choice]
    peak: Callable[[Choice], Peak]
    over: Callable[[Choice], list[tuple[int, Places]]]
    parts: Callable[[Choice, Choice, Groups], Parts]

    def fits(self, plan: Choice) -> bool:
        """Whether a plan keeps the limit."""
        return self.peak(plan).bytes <= self.limit


class Mixer:
    """Looks for that plan.

    Args:
      best: fits. over: does not.
      tries: halves of parts that are tried.
    """

    def __init__(self, model: Model, best: Choice, over: Choice, judge: Judge, tries: int) -> None:
        self.model, self.best, self.over = model, best, over
        self._judge, self._tries = judge, tries

    def mixed(self) -> Choice:
        """The best plan in the end."""
        halves = [half for group in self._left_of_knapsack() for half in split([group])]
        while halves and self._goes_on:
            halves = self._round(halves)
        return self.best

    @property
    def _goes_on(self) -> bool:
        """Whether another plan may be made."""
        return self._tries > 0 and not self.model.clock.is_up()

    def _left_of_knapsack(self) -> Groups:
        """Take over what pays most together, and say what could save something still, most first."""
        groups, judge = apart(self.model, self.best, self.over), self._judge
        if not groups:
            return []
        parts = judge.parts(self.best, self.over, groups)
        full = _Full(parts, judge.limit)
        for places in (judge.peak(self.best).places, *(places for _, places in judge.over(self.over))):
            full.add(places)
        taken = np.zeros(len(groups), dtype=np.bool_)
        for i in range(_ROUNDS):
            trial = full.best()
            plan = self._taken_over([group for group, takes in zip(groups, trial, strict=True) if takes])
            if not trial.any() or judge.fits(plan):
                break
            full.avoid(judge.over(plan), i >= _LAST)
        if trial.any() and judge.fits(plan) and plan.cost < self.best.cost:
            self.best, taken = plan, trial
        worth = np.flatnonzero(~taken & (parts.saved > _WORTH * self.best.cost))
        return [groups[i] for i in worth[np.argsort(-parts.saved[worth], kind="stable")].tolist()]

    def _taken_over(self, some: Groups) -> Choice:
        """The best plan with some groups as the other one has them."""
        rows, nodes = self.best.rows.copy(), [n for group in some for n in group]
        rows[nodes] = self.over.rows[nodes]
        return self._judge.made(rows)

    def _round(self, halves: list[Groups]) -> list[Groups]:
        """Try halves, and say which to try next; where some in a row are too much, the others are halved untried."""
        left, failed = list[Groups](), 0
        for some in halves:
            if failed < _IN_A_ROW and self._goes_on and self._takes(some):
                failed = 0
            else:
                failed += 1
                left += split(some)
        return left

    def _takes(self, some: Groups) -> bool:
        """Whether the best plan is better with some groups as the other one has them, and fits; it is that then."""
        self._tries -= 1
        plan = self._taken_over(some)
        better = plan.cost < self.best.cost and self._judge.fits(plan)
        if better:
            self.best = plan
        return better


class _Full:
    """The points that are fullest, and what may be taken over as far as these say."""

    def __init__(self, parts: Parts, limit: float) -> None:
        self._parts, self._limit = parts, limit
        self._most = limit * (1 - _SPARE) if parts.saved.size > _MANY else limit
        self._room: dict[Places, float] = {}
        self._needs: list[Costs] = []

    def add(self, places: Places) -> None:
        """Look at a point as well."""
        if places not in self._room:
            self._room[places] = self._most - self._parts.held(places)
            self._needs.append(self._parts.needs(places))

    def best(self) -> NDArray[np.bool_]:
        """Which parts to take over, to save most: of equal ones the first."""
        saved, needs = self._parts.saved, np.stack(self._needs, axis=1)
        kinds = np.unique(np.column_stack([saved, needs]), axis=0, return_inverse=True)[1].ravel()
        alike, taken = grouped(kinds), np.zeros(saved.size, dtype=np.bool_)
        first, counts = [some[0] for some in alike], np.array([some.size for some in alike])
        found = packed_in(saved[first], needs[first], counts, np.array(list(self._room.values())))
        for some, count in zip(alike, found.tolist(), strict=True):
            taken[some[:count]] = True
        return taken

    def avoid(self, over: list[tuple[int, Places]], everywhere: bool) -> None:
        """Look at points at which a plan was too large, or leave so much more room there, or everywhere."""
        for held, places in over:
            if places in self._room and not everywhere:
                self._room[places] -= held - self._limit
            self.add(places)
        for places in self._room if everywhere else ():
            self._room[places] -= over[0][0] - self._limit


def split(some: Groups) -> list[Groups]:
    """Groups in two halves, or one that is large enough; none of plans that differ in moves."""
    if len(some) > 1:
        return [some[: len(some) // 2], some[len(some) // 2 :]]
    nodes = some[0] if some else []
    half = len(nodes) // 2
    return [[nodes[:half]], [nodes[half:]]] if half >= _SMALLEST else []
