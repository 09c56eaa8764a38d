"""A presolved instance (core) as a MIP over a subset of states: those of known solutions and of least reduced cost.

Every state is a binary column, every possible pair of states of neighbours a continuous one, and the pair columns of a
state sum to its column (the local marginal polytope); no linear program over pairs only is tighter. A time point gets
its memory row when a solution exceeds the limit there: few ever bind. HiGHS solves with tolerances, so its solutions
are scored, never taken as proofs. Most variables of a large core have a single state in all known solutions; presolve
leaves a small core of the others (``restricted_core``), so known solutions are combined in seconds.
"""

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from meshdsl.planner.contest.instance import Core
from meshdsl.planner.contest.lagrangian import FlatCore
from meshdsl.planner.contest.presolve import Presolve
from meshdsl.planner.mrf.network import Labels
from meshdsl.util.arrays import Costs, Ints


class RestrictedMIP:
    """The program over some states of every variable.

    Args:
      flat: the core.
      some: per variable, its states in the program.
      best: a valid choice among those, the start; None if none is known.
    """

    def __init__(self, flat: FlatCore, some: list[Labels], best: Ints | None = None) -> None:
        self.flat, self.some = flat, some
        self.best = np.full(len(some), -1) if best is None else best
        self.begin = np.concatenate([[0], np.cumsum([keep.size for keep in some])])
        self._costs = [flat.unary[flat.flat.start[i] + keep] for i, keep in enumerate(some)]
        self._rows, self._columns = (
            [np.repeat(np.arange(len(some)), [keep.size for keep in some])],
            [np.arange(self.begin[-1])],
        )
        self._values = [np.ones(self.begin[-1])]
        self._start = [np.concatenate([keep == state for keep, state in zip(some, self.best, strict=True)])]
        self._height, self._width = len(some), int(self.begin[-1])
        for i, w, table in flat.edges:
            self._add_pairs(i, w, table)
        cost = flat.core.cost_above_all if best is None else flat.cost(best)
        self.highs = _highs(self._model(max(cost, 1.0) / flat.limits.mip_cost_scale), flat.limits.mip_gap)

    def solve(self, seconds: float) -> Iterator[Ints]:
        """Yields solutions; the last one is valid if time suffices."""
        import highspy

        until = time.perf_counter() + seconds
        while (seconds_left := until - time.perf_counter()) > 0:
            if (self.best >= 0).all():
                start = highspy.HighsSolution()
                start.col_value = np.concatenate(self._start).astype(np.float64).tolist()
                self.highs.setSolution(start)
            self.highs.setOptionValue("time_limit", self.highs.getRunTime() + seconds_left)
            self.highs.run()
            values = np.array(self.highs.getSolution().col_value)
            if not values.size:
                return
            states = self._rounded(values)
            yield states
            if not self._add_violated_rows(states):
                return

    def _add_pairs(self, i: int, w: int, table: Costs) -> None:
        """Adds columns for the possible pairs of states of two variables, and rows that tie them to these."""
        cut = table[self.some[i][:, None], self.some[w]]
        left, right = np.nonzero(cut < self.flat.top)
        columns = self._width + np.arange(left.size)
        for v, ends in ((i, left), (w, right)):
            n = self.some[v].size
            self._rows += [self._height + ends, self._height + np.arange(n)]
            self._columns += [columns, self.begin[v] + np.arange(n)]
            self._values += [np.ones(left.size), -np.ones(n)]
            self._height += n
        self._costs.append(cut[left, right])
        self._start.append((self.some[i][left] == self.best[i]) & (self.some[w][right] == self.best[w]))
        self._width += left.size

    def _model(self, unit: float) -> Any:
        import highspy

        places = (np.concatenate(self._rows), np.concatenate(self._columns))
        matrix = csr_matrix((np.concatenate(self._values), places), shape=(self._height, self._width))
        model, right = highspy.HighsLp(), np.zeros(self._height)
        right[: len(self.some)] = 1.0
        model.num_col_, model.num_row_ = self._width, self._height
        model.col_cost_ = np.concatenate(self._costs) / unit
        model.col_lower_, model.col_upper_ = np.zeros(self._width), np.ones(self._width)
        model.row_lower_, model.row_upper_ = right, right
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_, model.a_matrix_.index_ = matrix.indptr, matrix.indices
        model.a_matrix_.value_ = matrix.data
        whole, part = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        states = int(self.begin[-1])
        model.integrality_ = [whole] * states + [part] * (self._width - states)
        return model

    def _rounded(self, values: Costs) -> Ints:
        parts = (values[a:b] for a, b in pairwise(self.begin))
        return np.array([keep[part.argmax()] for keep, part in zip(self.some, parts, strict=True)])

    def _add_violated_rows(self, states: Ints) -> bool:
        """Adds memory rows of the points with the largest excess; returns whether there were any."""
        excess = self.flat.used(states) - self.flat.limit
        full = [t for t in np.argsort(-excess).tolist() if excess[t] > 0]
        limits = self.flat.limits
        spacing = max(1, self.flat.limit.size // limits.mip_spacing)
        chosen: list[int] = []
        for t in full:
            if len(chosen) < limits.mip_rows and all(abs(t - other) >= spacing for other in chosen):
                chosen.append(t)
                self._add_memory_row(t)
        return bool(chosen)

    def _add_memory_row(self, t: int) -> None:
        """Adds the memory row of a time point, in parts of its limit."""
        usages, row = self.flat.usages, np.zeros(self.begin[-1])
        for k in np.flatnonzero((usages.lo <= t) & (t < usages.hi)).tolist():
            v = usages.owner[k]
            row[self.begin[v] : self.begin[v + 1]] += usages.use[usages.begin[k] + self.some[v]]
        unit = max(float(self.flat.limit[t]), 1.0)
        columns = np.flatnonzero(row).astype(np.int32)
        self.highs.addRow(-np.inf, float(self.flat.limit[t]) / unit, columns.size, columns, row[columns] / unit)


def promising_states(flat: FlatCore, excess: Ints, known: list[Ints], entries: int) -> list[Labels]:
    """Returns the states of known choices and those of least excess, with at most so many pairs of states in all."""
    start = flat.flat.start
    excess = excess.copy()
    for states in known:
        excess[start[:-1] + states] = -1
    levels = np.unique(excess)
    low, high = 0, levels.size - 1
    while low < high:  # the highest level that is small enough
        middle = (low + high + 1) // 2
        counts = np.add.reduceat(excess <= levels[middle], start[:-1])
        pairs = sum([int(counts[i] * counts[w]) for i, w, _ in flat.edges])
        low, high = (middle, high) if pairs <= entries else (low, middle - 1)
    chosen = excess <= levels[low]
    return [np.flatnonzero(chosen[a:b]) for a, b in pairwise(start)]


def restricted_core(flat: FlatCore, some: list[Labels]) -> Core:
    """Returns a core with these states only, presolved."""
    core, sizes = flat.core.copy(), np.diff(flat.flat.start).tolist()
    for v, size, keep in zip(flat.order, sizes, some, strict=True):
        if keep.size < size:
            core.restrict(v, keep)
    Presolve(core, flat.limits).run()
    return core


def _highs(model: Any, gap: float) -> Any:
    import highspy

    highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, value in (("output_flag", False), ("mip_rel_gap", gap), ("threads", 1)):
        highs.setOptionValue(option, value)
    highs.passModel(model)
    return highs
