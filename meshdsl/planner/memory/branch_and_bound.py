"""Small steps within the memory limit: branch and bound (Land and Doig 1960) over boxes of states, and LNS.

A price on bytes only finds plans that are cheapest at *some* price. Between two of them lie others that use the limit
better: few in a large step, where parts of one plan can be adopted from another (``combine``), most in a small one.

A *box* restricts every node to some of its states. The cheapest plan of a box, memory aside, is found exactly by
variable elimination. If it exceeds the limit, the box is split by a copy that is live at its peak: smaller ones in one
half, ones at least as large in the other. A box is pruned

* if its cheapest plan costs no less than the incumbent,
* if the bytes that memory certainly holds at some op exceed the limit (``lower_bound``), or
* if both together do, at a price on these bytes (``dual``).

The search dives to smaller and smaller copies, then goes on with the box of the lowest bound.

A plan is a state of every node here; its values take the cheapest resharding trees, though others may hold less memory.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, cycle
from typing import NamedTuple

import numpy as np

from meshdsl.planner.costs.fixed_point import TIES
from meshdsl.planner.costs.reshard_cost import axis_groups_in_two
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.liveness.peak import Peak
from meshdsl.planner.memory.lower_bound import MemoryLowerBound
from meshdsl.planner.memory.pricing import PricedPoints
from meshdsl.planner.mrf.elimination import eliminate
from meshdsl.planner.mrf.network import Network
from meshdsl.planner.objective import CostedPlan, Evaluator
from meshdsl.planner.problem.model import Assignment, Model, Prices
from meshdsl.planner.problem.ports import End
from meshdsl.planner.search.local_search import Mask, search_neighbourhoods
from meshdsl.planner.search.search import evaluate_plan
from meshdsl.util.arrays import Costs, Ids

# ---- Exact solution of a box -----------------------------------------------------------------------------------------

Box = Mapping[int, Ids]  # per restricted node, positions of the states that remain


class BoxSolution(NamedTuple):
    """The cheapest plan of a box, or one near it.

    Args:
      rows: the assignment.
      cost: in the network; -inf if it could not be eliminated exactly, inf if the box is empty.
    """

    rows: Assignment
    cost: float


class BoxSolver:
    """Solves boxes of a network by variable elimination; nodes that were reduced away are in no box.

    Args:
      builder: whose network it is.
      incumbent: a plan to start from; variables that cannot be eliminated exactly stay as they were.
    """

    def __init__(self, builder: NetworkBuilder, network: Network, incumbent: Assignment) -> None:
        self._domains, self._network, self._order = builder.domains, network, network.order
        self._largest = builder.model.limits.memory_box_table_entries
        sizes, self._tables = network.listed()
        self._every = [np.arange(states) for states in sizes]
        self._position = {v: i for i, v in enumerate(self._order)}
        self._states = np.zeros(len(sizes), dtype=np.intp)
        self.entries = 1 + sum(table.size for _, table in self._tables)
        self.start_from(incumbent)

    def start_from(self, plan: Assignment) -> None:
        """Makes a plan the incumbent."""
        self.solve(self.box_of(plan, range(len(plan))))

    def box_of(self, plan: Assignment, nodes: Iterable[int]) -> Box:
        """Returns the box in which some nodes are fixed as in a plan."""
        return {n: self._domains.positions(n, plan[n]) for n in nodes if n in self._position}

    def solve(self, box: Box) -> BoxSolution:
        """Returns the cheapest plan of a box."""
        remaining, fewer = list(self._every), {self._position[n]: states for n, states in box.items()}
        for i, states in fewer.items():
            remaining[i] = states
        start = [int((states == i).argmax()) for states, i in zip(remaining, self._states.tolist(), strict=True)]
        tables = (
            (scope, table if fewer.keys().isdisjoint(scope) else table[np.ix_(*(remaining[v] for v in scope))])
            for scope, table in self._tables
        )
        found = eliminate([states.size for states in remaining], tables, start, self._largest)
        self._states = np.array([states[i] for states, i in zip(remaining, found.states.tolist(), strict=True)])
        rows = self._domains.rows(self._network.decode(self._order, self._states))
        return BoxSolution(rows, self._network.constant + found.cost if found.exact else -np.inf)


def _priced_solver(
    builder: NetworkBuilder, prices: Prices, encode: Callable[[NetworkBuilder], Network], incumbent: Assignment
) -> BoxSolver:
    priced = builder.priced(builder.model.with_prices(prices))
    return BoxSolver(priced, encode(priced), incumbent)


# ---- Branch and bound ------------------------------------------------------------------------------------------------

_ROUNDING = 1e-9  # relative error of a sum of bytes


class BranchResult(NamedTuple):
    """The result of branch and bound.

    Args:
      best: a plan.
      bound: cost that no plan within the limit undercuts.
    """

    best: CostedPlan
    bound: float


class _OpenBox(NamedTuple):
    """A box that is left to explore.

    Args:
      bound: cost that no plan of it within the limit undercuts.
      number: breaks ties; boxes are numbered as they are made.
    """

    bound: float
    number: int
    box: Box


class _BoxPlan(NamedTuple):
    """A plan of a box, with a cost that no plan of the box within the limit undercuts."""

    bound: float
    plan: CostedPlan
    peak: Peak
    fits: bool


class BranchAndBound:
    """Searches for the cheapest plan within a limit, or for the smallest plan.

    Args:
      points: whose lower bounds on memory are used.
      peak: the peak of a plan.
      known: a plan; the incumbent if it fits.
    """

    def __init__(
        self,
        model: Model,
        evaluator: Evaluator,
        points: PricedPoints,
        peak: Callable[[CostedPlan], Peak],
        known: CostedPlan,
    ) -> None:
        self.model, self.evaluator, self.points, self._peak, self._limits = model, evaluator, points, peak, model.limits
        self._known = self._smallest = known
        self._best: CostedPlan | None = None
        self._limit, self._enough = np.inf, -np.inf
        several = frozenset(n for n, states in enumerate(model.states) if len(states) > 1)
        self._builder = NetworkBuilder(model, keep=several)
        self._solvers: dict[tuple[int, float], BoxSolver] = {}
        self._bounds: dict[int, MemoryLowerBound] = {}
        self._proves = True
        self._free = BoxSolver(self._builder, self._encode(self._builder), known.rows)
        self._proves = self._free.solve({}).cost > -np.inf
        if not self._proves:  # exact resharding trees are too large: encode what plans can attain instead
            self._free = BoxSolver(self._builder, self._encode(self._builder), known.rows)

    def cheapest(self, limit: float) -> BranchResult:
        """Returns the cheapest plan found within a limit of bytes, which the known one keeps."""
        self._limit, self._enough, self._best = limit, -np.inf, self._known
        bound = self._explore(self._limits.memory_branch_boxes)
        return BranchResult(self._best, bound if self._proves else 0.0)

    def smallest(self, enough: float) -> BranchResult:
        """Returns the smallest plan found, or one of at most ``enough`` bytes; the bound is inf if none is smaller."""
        self._limit, self._enough, self._best = self._peak(self._known).bytes - 1, float(np.floor(enough)), None
        bound = self._explore(self._limits.memory_branch_boxes_smallest)
        return BranchResult(self._smallest, bound)

    @property
    def _incumbent_cost(self) -> float:
        return self._best.cost if self._best else np.inf

    def _explore(self, boxes: int) -> float:
        """Explores boxes; returns a cost that no plan within the limit undercuts.

        Args:
          boxes: to solve, times nodes.
        """
        left = min(boxes // len(self.model.nodes), self._limits.memory_branch_entries // self._free.entries)
        numbers, queue = count(), list[_OpenBox]()
        at: _OpenBox | None = _OpenBox(0.0, next(numbers), {})
        while at and at.bound < self._incumbent_cost:
            if not left or self._limit < self._enough or self.model.deadline.expired():
                return min(self._incumbent_cost, *(each.bound for each in (at, *queue)))
            left, found = left - 1, self._evaluate(at)
            if found and (halves := self._split(found, at.box)):
                at, other = (_OpenBox(found.bound, next(numbers), box) for box in halves)
                heapq.heappush(queue, other)
            else:
                at = heapq.heappop(queue) if queue else None
        return self._incumbent_cost

    def _evaluate(self, at: _OpenBox) -> _BoxPlan | None:
        """Returns a plan of a box that may hold a better one than the incumbent; None if the box is pruned."""
        if any(self._exceeds(held, at.box) for held in self._bounds.values()):
            return None
        free = self._cheapest_of(self._free, at)
        if free is None or (free.fits and free.plan.cost <= free.bound):
            return None
        op = free.peak.op
        if free.fits or op is None:
            return free
        held = self._bounds[op.id] = self.points.lower_bound(op.id)
        if self._exceeds(held, at.box):
            return None
        if not (price := self._price(held, free.plan)):
            return free
        allowance = float(self.model.scale.pack(np.asarray(price * self._limit))) + (held.rounded_terms + 1) * TIES
        priced = self._cheapest_of(self._solver_at(op.id, held, price), at._replace(bound=free.bound), allowance)
        return priced and (free._replace(bound=priced.bound) if priced.fits else priced)

    def _cheapest_of(self, solver: BoxSolver, at: _OpenBox, allowance: float = 0.0) -> _BoxPlan | None:
        """Returns the cheapest plan of a box, which may become the incumbent; None if the box is pruned.

        Args:
          allowance: cost of the whole limit at the solver's price.
        """
        rows, cost = solver.solve(at.box)
        if cost == np.inf:
            return None
        plan = self.evaluator.with_exact_cost(self.evaluator.evaluate(rows))
        peak = self._peak(plan)
        fits = peak.bytes <= self._limit
        if fits and self._enough > -np.inf:
            self._smallest, self._limit, fits = plan, peak.bytes - 1, False
        elif fits and plan.cost < self._incumbent_cost:
            self._best = plan
        if not self._proves:
            cost = -np.inf if allowance else plan.cost
        bound = max(at.bound, cost - allowance)
        return _BoxPlan(bound, plan, peak, fits) if bound < self._incumbent_cost else None

    def _price(self, held: MemoryLowerBound, over: CostedPlan) -> float:
        """Returns the price at which a plan over the limit costs as much as the incumbent; 0 if there is none.

        Without an incumbent, a high price.
        """
        limits, seconds = self._limits, self.model.scale.seconds
        if self._best is None:
            price = limits.memory_branch_price * seconds(over.cost) / max(1.0, self._limit)
        else:
            its = held.bytes(over)
            more = its - held.bytes(self._best)
            if more <= 0 or its <= self._limit or over.cost >= self._best.cost:
                return 0.0
            price = seconds(self._best.cost - over.cost) / more
        step = limits.memory_branch_price_step  # prices are rounded up to its powers, so that few networks are encoded
        return float(step ** np.ceil(np.log(price) / np.log(step))) if price else 0.0

    def _solver_at(self, op: int, held: MemoryLowerBound, price: float) -> BoxSolver:
        """Returns the solver at a price of the bytes that are certainly held at an op."""
        if (op, price) not in self._solvers:
            solver = _priced_solver(self._builder, held.prices(price), self._encode, self._known.rows)
            self._solvers[op, price] = solver
        return self._solvers[op, price]

    def _encode(self, builder: NetworkBuilder) -> Network:
        """Returns the network of lower bounds; if it cannot be eliminated exactly, that of attainable costs."""
        return (
            builder.bounds(self._known, self._limits.bounds_first_tree_entries).network
            if self._proves
            else builder.plans()
        )

    def _exceeds(self, held: MemoryLowerBound, box: Box) -> bool:
        """Returns whether every plan of a box certainly holds more than the limit."""
        least = sum(held.least(end, self.model.states[end[0]][self._states(end[0], box)]) for end in held.ends)
        return least > self._limit * (1 + _ROUNDING)

    def _split(self, found: _BoxPlan, box: Box) -> tuple[Box, ...]:
        """Splits a box by the size of the live copy that can shrink most; returns none if it has only one plan."""
        most, halves = 0.0, tuple[Box, ...]()
        live = list(self._live_ends(found))
        for n, p in live:
            states = self._states(n, box)
            sizes = self._bytes(n, p, self.model.states[n][states])
            its = float(self._bytes(n, p, found.plan.rows[n : n + 1])[0])
            if its - sizes.min() > most:
                most, halves = its - sizes.min(), ({**box, n: states[sizes < its]}, {**box, n: states[sizes >= its]})
        if halves:
            return halves
        for n in chain(dict.fromkeys([n for n, _ in live]), range(len(self.model.nodes))):
            states = self._states(n, box)
            if states.size > 1:
                same = (self.model.states[n][states] == found.plan.rows[n]).all(axis=1)
                return {**box, n: states[~same]}, {**box, n: states[same]}
        return ()

    def _live_ends(self, found: _BoxPlan) -> Iterator[End]:
        """Yields the ports whose tensors are live at the peak of a plan."""
        ports, every = self.model.ports, list(self.model.ports.all_layouts)
        numbers = ports.layout_numbers(ports.layouts(found.plan.rows))
        for copy in found.peak.copies:
            for end in self.model.wiring.ends_of(copy.value.id):
                if every[numbers[self.model.wiring.port(end)]] == copy.layout:
                    yield end

    def _states(self, n: int, box: Box) -> Ids:
        """Returns the positions of the states of a node that a box leaves."""
        return box[n] if n in box else np.arange(len(self.model.states[n]))

    def _bytes(self, n: int, p: int, rows: Assignment) -> Costs:
        """Returns the bytes of a port in some states of its node."""
        costs = self.model.port_costs((n, p))
        return np.asarray(costs.bytes * costs.shares[self.model.layout_numbers(n, p, rows.T)])


# ---- Large-neighbourhood search --------------------------------------------------------------------------------------
# Where memory is short, messages converge badly, and plans at the same price differ in much at a time. With a random
# part of the nodes fixed at the incumbent, the others are solved exactly, or nearly so, memory aside and at a low price
# in turn (see ``search.local_search``). A cheaper plan becomes the incumbent if it is feasible; if not, as much of it
# is adopted as is (``combine``).

Fitting = Callable[[CostedPlan, CostedPlan], CostedPlan]


def lns_on_many_axes(
    model: Model, evaluator: Evaluator, best: CostedPlan, prices: Sequence[Prices], fitting: Fitting
) -> CostedPlan:
    """Returns ``lns_within_memory`` from neighbourhood to neighbourhood, where all mesh axes together are too many."""
    samples = model.limits.memory_lns_samples_per_group
    for groups in axis_groups_in_two(model.parallel_axes):
        near = model.restricted(groups, best.rows)
        best = lns_within_memory(NetworkBuilder(near), evaluator, best, prices, fitting, samples)
    return best


def lns_within_memory(
    builder: NetworkBuilder,
    evaluator: Evaluator,
    best: CostedPlan,
    prices: Sequence[Prices],
    fitting: Fitting,
    samples: int | None = None,
) -> CostedPlan:
    """Returns a feasible plan that is better than ``best``, or that one.

    Args:
      builder: the networks of all states.
      prices: of memory, taken in turn.
      fitting: of two plans, the second being cheaper, a feasible one that costs no more than the first.
      samples: neighbourhoods at most; by default ``memory_lns_samples``.
    """
    model, limits = builder.model, builder.model.limits
    solver, nodes = _PricedSolver(builder, evaluator, best, prices, fitting), len(model.nodes)
    samples = min(limits.memory_lns_samples if samples is None else samples, limits.memory_lns_nodes // nodes)
    search_neighbourhoods(solver, nodes, samples, model.deadline, limits, free=len(prices))
    return solver.best


class _PricedSolver:
    """The incumbent, and networks at several prices of memory, which solve neighbourhoods in turn."""

    def __init__(
        self,
        builder: NetworkBuilder,
        evaluator: Evaluator,
        best: CostedPlan,
        prices: Sequence[Prices],
        fitting: Fitting,
    ) -> None:
        self.best, self._model, self._evaluator, self._fitting = best, builder.model, evaluator, fitting
        self._solvers = [_priced_solver(builder, each, NetworkBuilder.plans, best.rows) for each in prices]
        self._turns = cycle(self._solvers)

    def improve(self, fixed: Mask) -> bool:
        solver, best = next(self._turns), self.best
        rows = solver.solve(solver.box_of(best.rows, np.flatnonzero(fixed).tolist())).rows
        plan = evaluate_plan(self._model, self._evaluator, rows)
        better = self._fitting(best, plan) if plan.cost < best.cost else best
        if better.cost >= best.cost:
            return False
        self.best = better
        for each in self._solvers:
            each.start_from(better.rows)
        return True
