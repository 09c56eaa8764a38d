"""The cheapest plan that does some things as one that does not fit does them: as many as fit.

The plans come apart into parts that do not depend on each other (``parts``). Which of them to take over is a knapsack:
each saves something, and needs memory at the points that are fullest, or leaves some for others. The plan that comes of
it is tried; where it is too large after all, its fullest point is looked at as well. Parts that are too large as a
whole are tried by halves in the end.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.liveness.peak import Liveness, Peak
from meshdsl.planner.objective import CostedPlan, Evaluator
from meshdsl.planner.problem.model import Assignment, Model
from meshdsl.util.arrays import Costs, Ids, group_by

# ---- Knapsack --------------------------------------------------------------------------------------------------------
# As many of some things as pay, where there is room for what they need.
#
# A few things are an integer program, which HiGHS solves. Of many, those are taken that its relaxation takes as a
# whole, which are all but as many as there are places, and then what there is still room for.


_WHOLE = 1e-6  # that a part may miss
_FEW = 100  # things that are an integer program


def knapsack(gains: Costs, needs: Costs, counts: Ids, room: Costs) -> Ids:
    """How many to take of each kind of things, of ``counts`` that there are, to gain most.

    Args:
      gains: of one of each kind. needs: [kinds, places], what it takes up in each place; below 0 if it makes room.
      room: per place; none is passed by.

    Where there is not room enough whatever is taken, nothing is, or too much: the caller looks at what comes of it.
    """
    import highspy

    most = max(np.abs(gains).max(initial=0.0), 1.0)
    largest = np.maximum(np.abs(needs).max(axis=0, initial=1.0), np.abs(room))
    model, kinds, places = highspy.HighsLp(), gains.size, room.size
    model.num_col_, model.num_row_ = kinds, places
    model.col_cost_, model.col_lower_, model.col_upper_ = -gains / most, np.zeros(kinds), counts.astype(np.float64)
    model.row_lower_, model.row_upper_ = np.full(places, -highspy.kHighsInf), room / largest
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.arange(places + 1) * kinds
    model.a_matrix_.index_, model.a_matrix_.value_ = np.tile(np.arange(kinds), places), (needs / largest).T.ravel()
    few = counts.sum() <= _FEW
    model.integrality_ = [highspy.HighsVarType.kInteger] * kinds if few else []
    highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, value in (("output_flag", False), ("threads", 1)):
        highs.setOptionValue(option, value)
    highs.passModel(model)
    highs.run()
    found = np.array(highs.getSolution().col_value)
    if not found.size:
        return np.zeros(kinds, dtype=np.intp)
    return np.rint(found).astype(np.intp) if few else _filled(found, gains, needs, counts, room)


def _filled(found: Costs, gains: Costs, needs: Costs, counts: Ids, room: Costs) -> Ids:
    """What a solution of the relaxation takes as a whole, and besides what there is room for, what gains most first."""
    taken = np.floor(found + _WHOLE).astype(np.intp)
    left = room - taken @ needs
    for i in np.argsort(-gains, kind="stable").tolist():
        more = min(counts[i] - taken[i], 1) if gains[i] > 0 else 0
        if more and (needs[i] <= left).all():
            taken[i] += more
            left = left - needs[i]
    return taken


# ---- Parts -----------------------------------------------------------------------------------------------------------
# Where two plans differ: parts that one can take over from the other, and what each of them saves and needs.


_LARGEST = 0.5  # part of all nodes that one part may have
Groups = list[list[int]]  # of nodes


class PlanDifference:
    """Groups of nodes that two plans treat otherwise; what each adds to cost and memory, the others do not change.

    Args:
      groups: of ``independent_parts``. one, other: the plans, with their memory.
      values: per value of the program, by its number, the port that makes it.

    ``saved``: per group, what taking it over from the other plan costs less.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        groups: Groups,
        plans: tuple[CostedPlan, CostedPlan],
        lives: tuple[Liveness, Liveness],
        values: Ids,
    ) -> None:
        self._lives, self._count = lives, len(groups)
        self._node, port = _labels(evaluator.model, groups, *plans)
        self._value = port[values]
        (nodes, moves), (others, their) = (evaluator.shares(plan.rows) for plan in plans)
        self.saved: Costs = self._sums(self._node, nodes - others) + self._sums(port, moves - their)

    def held(self, places: tuple[int, ...]) -> int:
        """Bytes of the first plan at a point."""
        return int(self._lives[0].by_value(places).sum())

    def needs(self, places: tuple[int, ...]) -> Costs:
        """Bytes per group that taking it over needs more at a point, or less."""
        one, other = (lives.by_value(places) for lives in self._lives)
        return self._sums(self._value, (other - one).astype(np.float64))

    def _sums(self, labels: Ids, what: Costs) -> Costs:
        """Per group; what belongs to none has the last label."""
        return np.asarray(np.bincount(labels, what, self._count + 1)[: self._count])


def _labels(model: Model, groups: Groups, one: CostedPlan, other: CostedPlan) -> tuple[Ids, Ids]:
    """The group of each node and, by the ports that make them, of each value; one past the last where there is none."""
    wiring, ports = model.wiring, model.ports
    node, port = (np.full(count, len(groups)) for count in (len(model.nodes), wiring.node_of.size))
    for i, group in enumerate(groups):
        node[group] = i
    moved = np.flatnonzero(ports.layouts(one.rows) != ports.layouts(other.rows))
    port[wiring.port_producer[moved]] = node[wiring.node_of[moved]]
    return node, port


def independent_parts(model: Model, one: CostedPlan, other: CostedPlan) -> Groups:
    """Groups of nodes that two plans treat differently, joined by the values whose layouts differ at both ends.

    Where that is most of them, the nodes of each of several equal layers are a group of their own. The nodes of a group
    come as they are met from its first in program order on, so that its first half is near: of equal layers in a row,
    each with its part of the backward pass, the first ones.
    """
    ports, wiring = model.ports, model.wiring
    moved = np.flatnonzero(ports.layouts(one.rows) != ports.layouts(other.rows))
    readers, values = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for n, value in zip(wiring.node_of[moved].tolist(), wiring.value_ids[moved].tolist(), strict=True):
        readers[value].append(n)
        values[n].append(value)
    left = dict.fromkeys(np.flatnonzero((one.rows != other.rows).any(axis=1)).tolist())
    found: list[list[int]] = []
    while left:
        first = next(iter(left))
        group = [first]
        del left[first]
        for n in group:  # which grows
            near = [m for value in values[n] for m in readers.pop(value, ()) if m in left]
            for m in dict.fromkeys(near):
                del left[m]
                group.append(m)
        found += _by_layer(model, group) if len(group) > _LARGEST * len(model.nodes) else [group]
    return found


def _by_layer(model: Model, group: list[int]) -> list[list[int]]:
    """The nodes of each layer, and those of none."""
    nodes = np.array(group)
    return [nodes[some].tolist() for some in group_by(model.layers.layer[nodes])]


# ---- Mix -------------------------------------------------------------------------------------------------------------


_ROUNDS, _LAST = 8, 4  # plans that come of a knapsack, and those after which all points are left more room
_MANY, _SPARE = 100, 2e-3  # of so many parts, this part of the limit is left for points that nothing is known of
_SMALLEST = 8  # nodes of a half of a part
_IN_A_ROW = 3  # halves of a round that do not fit
_WORTH = 1e-4  # part of a plan's cost that a part must be able to save for its halves to be tried
Places = tuple[int, ...]  # of a point: positions of the loops around an operation, and its own


class Feasibility(NamedTuple):
    """What tells what plans cost and need.

    Args:
      limit: of bytes. made: the plan of some rows. peak: its fullest point. over: points at which it passes the limit,
        with their bytes before them.
      parts: two plans, come apart into groups of nodes.
    """

    limit: float
    made: Callable[[Assignment], CostedPlan]
    peak: Callable[[CostedPlan], Peak]
    over: Callable[[CostedPlan], list[tuple[int, Places]]]
    parts: Callable[[CostedPlan, CostedPlan, Groups], PlanDifference]

    def fits(self, plan: CostedPlan) -> bool:
        """Whether a plan keeps the limit."""
        return self.peak(plan).bytes <= self.limit


class Crossover:
    """Looks for that plan.

    Args:
      best: fits. over: does not.
      tries: halves of parts that are tried.
    """

    def __init__(self, model: Model, best: CostedPlan, over: CostedPlan, judge: Feasibility, tries: int) -> None:
        self.model, self.best, self.over = model, best, over
        self._judge, self._tries = judge, tries

    def mixed(self) -> CostedPlan:
        """The best plan in the end."""
        halves = [half for group in self._left_of_knapsack() for half in split([group])]
        while halves and self._goes_on:
            halves = self._round(halves)
        return self.best

    @property
    def _goes_on(self) -> bool:
        """Whether another plan may be made."""
        return self._tries > 0 and not self.model.deadline.expired()

    def _left_of_knapsack(self) -> Groups:
        """Take over what pays most together, and say what could save something still, most first."""
        groups, judge = independent_parts(self.model, self.best, self.over), self._judge
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

    def _taken_over(self, some: Groups) -> CostedPlan:
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

    def __init__(self, parts: PlanDifference, limit: float) -> None:
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
        alike, taken = group_by(kinds), np.zeros(saved.size, dtype=np.bool_)
        first, counts = [some[0] for some in alike], np.array([some.size for some in alike])
        found = knapsack(saved[first], needs[first], counts, np.array(list(self._room.values())))
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
