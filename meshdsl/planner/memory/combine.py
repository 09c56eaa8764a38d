"""Crossover of two plans: parts of a cheaper plan that does not fit are adopted while the limit holds.

The difference of two plans comes apart into parts that do not interact: groups of nodes joined by the values whose
layouts differ at both ends (``independent_parts``). Each part saves some cost, and needs bytes at some program points
or frees them (``PlanDifference``), so which parts to adopt is a multidimensional knapsack, with one constraint per
program point (``knapsack``). Only the fullest points are constraints at first; if the combined plan exceeds the limit
elsewhere, that point becomes one, and the knapsack is solved again (row generation). In the end parts that are too
large as a whole are tried by halves (``Crossover``).
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.limits import SearchLimits
from meshdsl.planner.liveness.peak import Liveness, Peak, ProgramPoint
from meshdsl.planner.objective import CostedPlan, Evaluator
from meshdsl.planner.problem.model import Assignment, Model
from meshdsl.util.arrays import Costs, Ids, group_by

Parts = list[list[int]]  # groups of nodes
Path = tuple[int, ...]  # of a program point (see ``ProgramPoint``)

# ---- Knapsack --------------------------------------------------------------------------------------------------------

_INTEGRAL = 1e-6  # by which a solution of the relaxation may be below an integer


def knapsack(gains: Costs, needs: Costs, counts: Ids, room: Costs, exact_items: int) -> Ids:
    """Returns how many items of each kind to take for the largest gain.

    Few items are an integer program, which HiGHS solves. For many, the items that the linear relaxation takes as a
    whole are taken, which are all but at most as many as there are constraints, and then whatever still has room.

    Where there is too little room whatever is taken, the result is none, or too much: the caller evaluates it.

    Args:
      gains: [kinds], of one item.
      needs: [kinds, constraints], room that one item takes; negative if it frees some.
      counts: [kinds], items that there are.
      room: [constraints].
      exact_items: items up to which the integer program is solved.
    """
    import highspy

    scale = max(np.abs(gains).max(initial=0.0), 1.0)
    largest = np.maximum(np.abs(needs).max(axis=0, initial=1.0), np.abs(room))
    model, kinds, constraints = highspy.HighsLp(), gains.size, room.size
    model.num_col_, model.num_row_ = kinds, constraints
    model.col_cost_, model.col_lower_, model.col_upper_ = -gains / scale, np.zeros(kinds), counts.astype(np.float64)
    model.row_lower_, model.row_upper_ = np.full(constraints, -highspy.kHighsInf), room / largest
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.arange(constraints + 1) * kinds
    model.a_matrix_.index_, model.a_matrix_.value_ = np.tile(np.arange(kinds), constraints), (needs / largest).T.ravel()
    exact = counts.sum() <= exact_items
    model.integrality_ = [highspy.HighsVarType.kInteger] * kinds if exact else []
    highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, value in (("output_flag", False), ("threads", 1)):
        highs.setOptionValue(option, value)
    highs.passModel(model)
    highs.run()
    found: Costs = np.array(highs.getSolution().col_value)
    if not found.size:
        return np.zeros(kinds, dtype=np.intp)
    if exact:
        return np.rint(found).astype(np.intp)
    taken: Ids = np.floor(found + _INTEGRAL).astype(np.intp)
    free = room - taken @ needs
    for i in np.argsort(-gains, kind="stable").tolist():
        more = min(counts[i] - taken[i], 1) if gains[i] > 0 else 0
        if more and (needs[i] <= free).all():
            taken[i] += more
            free = free - needs[i]
    return taken


# ---- Parts of a difference -------------------------------------------------------------------------------------------


def independent_parts(model: Model, one: CostedPlan, other: CostedPlan) -> Parts:
    """Returns groups of the nodes that two plans treat differently, joined by values with other layouts at both ends.

    A group of most nodes is divided by repeated layer. The nodes of a group are in the order of a traversal from its
    first node in program order, so that its first half is connected: of equal layers in a row, each with its part of
    the backward pass, the first ones.
    """
    ports, wiring = model.ports, model.wiring
    moved = np.flatnonzero(ports.layouts(one.rows) != ports.layouts(other.rows))
    nodes_of, values_of = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for n, value in zip(wiring.node_of[moved].tolist(), wiring.value_ids[moved].tolist(), strict=True):
        nodes_of[value].append(n)
        values_of[n].append(value)
    remaining = dict.fromkeys(np.flatnonzero((one.rows != other.rows).any(axis=1)).tolist())
    parts: Parts = []
    while remaining:
        first = next(iter(remaining))
        group = [first]
        del remaining[first]
        for n in group:  # which grows meanwhile
            neighbours = [m for value in values_of[n] for m in nodes_of.pop(value, ()) if m in remaining]
            for m in dict.fromkeys(neighbours):
                del remaining[m]
                group.append(m)
        if len(group) > model.limits.memory_part_share * len(model.nodes):
            nodes = np.array(group)
            parts += [nodes[same].tolist() for same in group_by(model.layers.layer[nodes])]
        else:
            parts.append(group)
    return parts


class PlanDifference:
    """What adopting each part of a second plan changes in cost and memory; these changes add up.

    Args:
      parts: of ``independent_parts``.
      plans: the plan to change, and the one that parts are adopted from.
      liveness: their memory.
      producers: [values], the port that produces each value.

    Attributes:
      saved: [parts], cost that adopting the part saves.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        parts: Parts,
        plans: tuple[CostedPlan, CostedPlan],
        liveness: tuple[Liveness, Liveness],
        producers: Ids,
    ) -> None:
        self._liveness, self._count = liveness, len(parts)
        part_of_node, part_of_port = _labels(evaluator.model, parts, *plans)
        self._part_of_value = part_of_port[producers]
        (nodes, moves), (others, their) = (evaluator.breakdown(plan.rows) for plan in plans)
        self.saved: Costs = self._sums(part_of_node, nodes - others) + self._sums(part_of_port, moves - their)

    def held(self, path: Path) -> int:
        """Returns the bytes of the plan to change at a program point."""
        return int(self._liveness[0].bytes_by_value(path).sum())

    def needs(self, path: Path) -> Costs:
        """Returns [parts], the bytes that adopting each part adds at a program point."""
        one, other = (liveness.bytes_by_value(path) for liveness in self._liveness)
        return self._sums(self._part_of_value, (other - one).astype(np.float64))

    def _sums(self, labels: Ids, amounts: Costs) -> Costs:
        """Returns sums per part; whatever is in no part has the last label."""
        return np.asarray(np.bincount(labels, amounts, self._count + 1)[: self._count])


def _labels(model: Model, parts: Parts, one: CostedPlan, other: CostedPlan) -> tuple[Ids, Ids]:
    """Returns the part of each node and, by producing port, of each value; the number of parts where there is none."""
    wiring, ports = model.wiring, model.ports
    node, port = (np.full(count, len(parts)) for count in (len(model.nodes), wiring.node_of.size))
    for i, nodes in enumerate(parts):
        node[nodes] = i
    moved = np.flatnonzero(ports.layouts(one.rows) != ports.layouts(other.rows))
    port[wiring.port_producer[moved]] = node[wiring.node_of[moved]]
    return node, port


# ---- Crossover -------------------------------------------------------------------------------------------------------


class Feasibility(NamedTuple):
    """Evaluates plans for ``Crossover``.

    Args:
      limit: bytes per device.
      evaluated: the plan of an assignment.
      peak: its peak.
      points_over: program points at which a plan exceeds the limit, the fullest first.
      difference: of two plans, by parts.
    """

    limit: float
    evaluated: Callable[[Assignment], CostedPlan]
    peak: Callable[[CostedPlan], Peak]
    points_over: Callable[[CostedPlan], list[ProgramPoint]]
    difference: Callable[[CostedPlan, CostedPlan, Parts], PlanDifference]

    def fits(self, plan: CostedPlan) -> bool:
        """Returns whether a plan keeps the limit."""
        return self.peak(plan).bytes <= self.limit


class Crossover:
    """Searches for the cheapest plan within the limit that combines two plans.

    Args:
      best: a plan that fits.
      donor: a plan that does not.
    """

    def __init__(self, model: Model, best: CostedPlan, donor: CostedPlan, feasibility: Feasibility) -> None:
        self.model, self.best, self.donor = model, best, donor
        self._limits, self._feasibility = model.limits, feasibility
        self._trials = model.limits.memory_crossover_nodes // len(model.nodes)

    def run(self) -> CostedPlan:
        """Returns the best plan in the end."""
        groups = [half for part in self._solve_knapsack() for half in split([part], self._limits.memory_part_nodes)]
        while groups and self._may_try:
            groups = self._try_all(groups)
        return self.best

    @property
    def _may_try(self) -> bool:
        return self._trials > 0 and not self.model.deadline.expired()

    def _solve_knapsack(self) -> Parts:
        """Adopts the parts that save most together, and returns the others that save something, the most first."""
        parts, feasibility, limits = (
            independent_parts(self.model, self.best, self.donor),
            self._feasibility,
            self._limits,
        )
        if not parts:
            return []
        difference = feasibility.difference(self.best, self.donor, parts)
        rows = _KnapsackRows(difference, feasibility.limit, limits)
        for path in (
            feasibility.peak(self.best).path,
            *(point.path for point in feasibility.points_over(self.donor)),
        ):
            rows.add(path)
        adopted = np.zeros(len(parts), dtype=np.bool_)
        for i in range(limits.memory_knapsack_rounds):
            trial = rows.solve()
            plan = self._adopting([part for part, takes in zip(parts, trial, strict=True) if takes])
            if not trial.any() or feasibility.fits(plan):
                break
            rows.tighten(feasibility.points_over(plan), everywhere=i >= limits.memory_knapsack_patience)
        if trial.any() and feasibility.fits(plan) and plan.cost < self.best.cost:
            self.best, adopted = plan, trial
        saving = difference.saved
        worth = np.flatnonzero(~adopted & (saving > limits.memory_part_worth * self.best.cost))
        return [parts[i] for i in worth[np.argsort(-saving[worth], kind="stable")].tolist()]

    def _adopting(self, parts: Parts) -> CostedPlan:
        """Returns the best plan with some parts of the donor."""
        rows, nodes = self.best.rows.copy(), [n for part in parts for n in part]
        rows[nodes] = self.donor.rows[nodes]
        return self._feasibility.evaluated(rows)

    def _try_all(self, groups: list[Parts]) -> list[Parts]:
        """Tries to adopt groups of parts, and returns halves of those that failed.

        After a few failures in a row the others are halved untried.
        """
        halves, failures = list[Parts](), 0
        for group in groups:
            if failures < self._limits.memory_crossover_failures and self._may_try and self._try(group):
                failures = 0
            else:
                failures += 1
                halves += split(group, self._limits.memory_part_nodes)
        return halves

    def _try(self, parts: Parts) -> bool:
        """Adopts some parts if that is cheaper and fits; returns whether it is."""
        self._trials -= 1
        plan = self._adopting(parts)
        better = plan.cost < self.best.cost and self._feasibility.fits(plan)
        if better:
            self.best = plan
        return better


class _KnapsackRows:
    """The knapsack of a difference, with the constraints of the program points that were found to be full."""

    def __init__(self, difference: PlanDifference, limit: float, limits: SearchLimits) -> None:
        self._difference, self._limit, self._exact_items = difference, limit, limits.memory_knapsack_items
        # many parts touch points that are no constraints: some room is reserved for these
        reserve = limits.memory_reserve if difference.saved.size > limits.memory_reserve_parts else 0.0
        self._usable = limit * (1 - reserve) if reserve else limit
        self._room: dict[Path, float] = {}
        self._needs: list[Costs] = []

    def add(self, path: Path) -> None:
        """Adds the constraint of a program point."""
        if path not in self._room:
            self._room[path] = self._usable - self._difference.held(path)
            self._needs.append(self._difference.needs(path))

    def solve(self) -> NDArray[np.bool_]:
        """Returns [parts], which ones to adopt to save most; of equal ones the first."""
        saved, needs = self._difference.saved, np.stack(self._needs, axis=1)
        kinds = np.unique(np.column_stack([saved, needs]), axis=0, return_inverse=True)[1].ravel()
        same, taken = group_by(kinds), np.zeros(saved.size, dtype=np.bool_)
        first, counts = [parts[0] for parts in same], np.array([parts.size for parts in same])
        room = np.array(list(self._room.values()))
        found = knapsack(saved[first], needs[first], counts, room, self._exact_items)
        for parts, count in zip(same, found.tolist(), strict=True):
            taken[parts[:count]] = True
        return taken

    def tighten(self, over: list[ProgramPoint], everywhere: bool) -> None:
        """Adds points at which a plan was too large, or reserves the excess there if they are known, or everywhere."""
        for point in over:
            if point.path in self._room and not everywhere:
                self._room[point.path] -= point.bytes - self._limit
            self.add(point.path)
        for path in self._room if everywhere else ():
            self._room[path] -= over[0].bytes - self._limit


def split(group: Parts, smallest: int) -> list[Parts]:
    """Returns two halves of some parts, or of one part if its halves have at least ``smallest`` nodes; else none."""
    if len(group) > 1:
        return [group[: len(group) // 2], group[len(group) // 2 :]]
    nodes = group[0] if group else []
    half = len(nodes) // 2
    return [[nodes[:half]], [nodes[half:]]] if half >= smallest else []
