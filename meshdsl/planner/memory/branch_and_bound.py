"""Small steps within a limit of memory: box by box, until no better plan can fit (branch and bound).

A price on bytes finds only such plans as cost least at some price. Between two of them lie others that fit better: few
in a large step, where parts of one can be done as in the other (``mix``), most in a small one.

A box is what is left in question of every node's states. Its best plan, memory aside, is decided exactly. Where that
does not fit, one of the copies that are in memory where it is fullest is smaller in one part of the box, and at least
as large in the other. A box is done with if its best plan costs no less than one known, or if what memory holds at
least at some operation passes the limit; both at a price as well (``dual``). Boxes are gone through from the one
that may hold the cheapest plan, and from each on down to smaller and smaller copies (Land and Doig 1960).

A plan is a state of every node here; its moves take the cheapest trees, though dearer ones may hold less memory.
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

# ---- Boxed -----------------------------------------------------------------------------------------------------------
# A network of which only some states of each node are in question: a *box*, decided exactly over and over again.


Box = Mapping[int, Ids]  # by node, its states in question, by position; all those of others
_LARGEST = 1 << 16  # entries of the largest table


class Decided(NamedTuple):
    """The best plan of a box, or one near it, and its cost in the network if that was decided exactly, else -inf."""

    rows: Assignment
    cost: float


def boxable(model: Model) -> NetworkBuilder:
    """The networks of all states, in which nodes that have several stay."""
    return NetworkBuilder(model, keep=frozenset(n for n, states in enumerate(model.states) if len(states) > 1))


class BoxSolver:
    """Decides boxes of a network; nodes that it has lost are in none.

    Args:
      joint: whose network it is. known: a plan to begin from.
    """

    def __init__(self, joint: NetworkBuilder, network: Network, known: Assignment) -> None:
        self._joint, self._network, self._order = joint, network, network.order
        domains, self._tables = network.listed()
        self._every = [np.arange(states) for states in domains]
        self._at = {v: i for i, v in enumerate(self._order)}
        self._incumbent = np.zeros(len(domains), dtype=np.intp)
        self.entries = 1 + sum(table.size for _, table in self._tables)
        self.begin(known)

    def begin(self, plan: Assignment) -> None:
        """From a plan: what cannot be decided exactly does as it does."""
        self.decided(self.held(plan, range(len(plan))))

    def held(self, plan: Assignment, nodes: Iterable[int]) -> Box:
        """The box in which some of the nodes do as in a plan."""
        return {n: self._joint.domains.positions(n, plan[n]) for n in nodes if n in self._at}

    def decided(self, box: Box) -> Decided:
        """The best plan; its cost is infinite if there is none."""
        left, fewer = list(self._every), {self._at[n]: states for n, states in box.items()}
        for i, states in fewer.items():
            left[i] = states
        start = [int((states == i).argmax()) for states, i in zip(left, self._incumbent.tolist(), strict=True)]
        tables = (
            (scope, table if fewer.keys().isdisjoint(scope) else table[np.ix_(*(left[v] for v in scope))])
            for scope, table in self._tables
        )
        found = eliminate([states.size for states in left], tables, start, _LARGEST)
        self._incumbent = np.array([states[i] for states, i in zip(left, found.states.tolist(), strict=True)])
        rows = self._joint.domains.rows(self._network.decode(self._order, self._incumbent))
        return Decided(rows, self._network.constant + found.cost if found.exact else -np.inf)


def boxed(
    joint: NetworkBuilder, prices: Prices, drawn: Callable[[NetworkBuilder], Network], known: Assignment
) -> BoxSolver:
    """A network of ``joint`` at prices of memory."""
    priced = joint.priced(joint.model.with_prices(prices))
    return BoxSolver(priced, drawn(priced), known)


# ---- Branching -------------------------------------------------------------------------------------------------------


MOST = 150  # nodes up to which it is worth its time
_BOXES, _LAST = 5_000, 10_000  # of all nodes together, and where nothing else is left to try ...
_WORK = 200_000_000  # ... and entries of the networks of all boxes together
_STEP = 1.5  # prices are powers of this, so that few networks are drawn
_ROUNDED = 1e-9  # part of a sum of bytes that is rounding
_HIGH = 8.0  # of a price that finds small plans: seconds of a plan per limit


class Branched(NamedTuple):
    """What was found.

    Args:
      best: a plan.
      bound: what no plan that was looked for can cost less than.
    """

    best: CostedPlan
    bound: float


class _Open(NamedTuple):
    """A box, and what no plan of it that fits can cost less than."""

    bound: float
    number: int
    box: Box


class _Seen(NamedTuple):
    """A plan of a box.

    Args:
      bound: what no plan of the box that fits can cost less than.
    """

    bound: float
    choice: CostedPlan
    peak: Peak
    fits: bool


class BranchAndBound:
    """Looks for the cheapest plan that fits, or for the smallest.

    Args:
      peak: the fullest point of a plan. points: where floors are asked for.
      known: a plan; the best so far if it fits.
    """

    def __init__(
        self,
        model: Model,
        evaluator: Evaluator,
        points: PricedPoints,
        peak: Callable[[CostedPlan], Peak],
        known: CostedPlan,
    ) -> None:
        self.model, self.evaluator, self.points, self._peak = model, evaluator, points, peak
        self._known = self._least = known
        self._best: CostedPlan | None = None
        self._limit, self._enough = np.inf, -np.inf
        self._joint = boxable(model)
        self._networks: dict[tuple[int, float], BoxSolver] = {}
        self._floors: dict[int, MemoryLowerBound] = {}
        self._proves = True
        self._free = BoxSolver(self._joint, self._drawn(self._joint), known.rows)
        self._proves = self._free.decided({}).cost > -np.inf
        if not self._proves:  # the trees of moves are too large: what costs least is then near the best
            self._free = BoxSolver(self._joint, self._drawn(self._joint), known.rows)

    def cheapest(self, limit: float) -> Branched:
        """The cheapest plan found within so many bytes, which the one known fits."""
        self._limit, self._enough, self._best = limit, -np.inf, self._known
        bound = self._run(_BOXES)
        return Branched(self._best, bound if self._proves else 0.0)

    def smallest(self, enough: float) -> Branched:
        """The smallest plan found, or one of few enough bytes, and infinity if there is no smaller one."""
        self._limit, self._enough, self._best = self._peak(self._known).bytes - 1, float(np.floor(enough)), None
        bound = self._run(_LAST)
        return Branched(self._least, bound)

    @property
    def _most(self) -> float:
        """What a better plan costs less than."""
        return self._best.cost if self._best else np.inf

    def _run(self, boxes: int) -> float:
        """Go through boxes; what no plan that fits can cost less than."""
        left = min(boxes // len(self.model.nodes), _WORK // self._free.entries)
        numbers, queue = count(), list[_Open]()
        at: _Open | None = _Open(0.0, next(numbers), {})
        while at and at.bound < self._most:
            if not left or self._limit < self._enough or self.model.deadline.expired():
                return min(self._most, *(each.bound for each in (at, *queue)))
            left, seen = left - 1, self._looked_at(at)
            if seen and (parts := self._parts(seen, at.box)):
                at, rest = (_Open(seen.bound, next(numbers), box) for box in parts)
                heapq.heappush(queue, rest)
            else:
                at = heapq.heappop(queue) if queue else None
        return self._most

    def _looked_at(self, at: _Open) -> _Seen | None:
        """A plan of a box that does not fit, or is not the best of all that do; None if no better one can be there."""
        if any(self._passes(floor, at.box) for floor in self._floors.values()):
            return None
        first = self._seen(self._free, at)
        if first is None or (first.fits and first.choice.cost <= first.bound):
            return None
        op = first.peak.op
        if first.fits or op is None:
            return first
        floor = self._floors[op.id] = self.points.floor(op.id)
        if self._passes(floor, at.box):
            return None
        if not (price := self._price(floor, first.choice)):
            return first
        paid = float(self.model.scale.pack(np.asarray(price * self._limit))) + (floor.rounded + 1) * TIES
        second = self._seen(self._priced(op.id, floor, price), at._replace(bound=first.bound), paid)
        return second and (first._replace(bound=second.bound) if second.fits else second)

    def _seen(self, network: BoxSolver, at: _Open, paid: float = 0.0) -> _Seen | None:
        """The best plan of a box, noted; None if no better one can be there."""
        rows, cost = network.decided(at.box)
        if cost == np.inf:
            return None
        choice = self.evaluator.exact(self.evaluator.evaluate(rows))
        peak = self._peak(choice)
        fits = peak.bytes <= self._limit
        if fits and self._enough > -np.inf:
            self._least, self._limit, fits = choice, peak.bytes - 1, False
        elif fits and choice.cost < self._most:
            self._best = choice
        if not self._proves:
            cost = -np.inf if paid else choice.cost
        bound = max(at.bound, cost - paid)
        return _Seen(bound, choice, peak, fits) if bound < self._most else None

    def _price(self, floor: MemoryLowerBound, over: CostedPlan) -> float:
        """At which a plan that is too large costs what the best one does, or high; 0 for none."""
        seconds = self.model.scale.seconds
        if self._best is None:
            return _near(_HIGH * seconds(over.cost) / max(1.0, self._limit))
        large = floor.bytes(over)
        more = large - floor.bytes(self._best)
        if more <= 0 or large <= self._limit or over.cost >= self._best.cost:
            return 0.0
        return _near(seconds(self._best.cost - over.cost) / more)

    def _priced(self, op: int, floor: MemoryLowerBound, price: float) -> BoxSolver:
        """The network at a price of what is held at an operation."""
        if (op, price) not in self._networks:
            self._networks[op, price] = boxed(self._joint, floor.prices(price), self._drawn, self._known.rows)
        return self._networks[op, price]

    def _drawn(self, joint: NetworkBuilder) -> Network:
        """What plans cost at least; or, where that cannot be decided exactly, what they can be had for."""
        return (
            joint.bounds(self._known, self.model.limits.bounds_first_tree_entries).network
            if self._proves
            else joint.plans()
        )

    def _passes(self, floor: MemoryLowerBound, box: Box) -> bool:
        """Whether every plan of a box holds more than the limit."""
        held = sum(floor.least(end, self.model.states[end[0]][self._states(end[0], box)]) for end in floor.ends)
        return held > self._limit * (1 + _ROUNDED)

    def _parts(self, seen: _Seen, box: Box) -> tuple[Box, ...]:
        """A box in two, by the size of a copy that could be smaller by the most bytes; none if it has but one plan."""
        most, found = 0.0, tuple[Box, ...]()
        alive = list(self._alive(seen))
        for n, p in alive:
            states = self._states(n, box)
            sizes = self._bytes(n, p, self.model.states[n][states])
            here = float(self._bytes(n, p, seen.choice.rows[n : n + 1])[0])
            if here - sizes.min() > most:
                most, found = here - sizes.min(), ({**box, n: states[sizes < here]}, {**box, n: states[sizes >= here]})
        return found or self._without(seen.choice, box, dict.fromkeys([n for n, _ in alive]))

    def _without(self, choice: CostedPlan, box: Box, first: Iterable[int]) -> tuple[Box, ...]:
        """A box in two, by whether a node does as in a plan, these nodes first."""
        for n in chain(first, range(len(self.model.nodes))):
            states = self._states(n, box)
            if states.size > 1:
                same = (self.model.states[n][states] == choice.rows[n]).all(axis=1)
                return {**box, n: states[~same]}, {**box, n: states[same]}
        return ()

    def _alive(self, seen: _Seen) -> Iterator[End]:
        """The ports whose tensors are in memory where a plan needs most of it."""
        ports, every = self.model.ports, list(self.model.ports.all_layouts)
        laid = ports.layout_numbers(ports.layouts(seen.choice.rows))
        for copy in seen.peak.copies:
            for end in self.model.wiring.ends_of(copy.value.id):
                if every[laid[self.model.wiring.port(end)]] == copy.layout:
                    yield end

    def _states(self, n: int, box: Box) -> Ids:
        """The states of a node that are in question."""
        return box[n] if n in box else np.arange(len(self.model.states[n]))

    def _bytes(self, n: int, p: int, rows: Assignment) -> Costs:
        """Of a port in some states."""
        distances = self.model.port_costs((n, p))
        return np.asarray(distances.bytes * distances.shares[self.model.layout_numbers(n, p, rows.T)])


def _near(price: float) -> float:
    """A power near a price; 0 for none."""
    return float(_STEP ** np.ceil(np.log(price) / np.log(_STEP))) if price else 0.0


# ---- Large-neighbourhood search --------------------------------------------------------------------------------------
# Where memory is short, messages converge badly, and plans at the same price differ in much at a time. With a random
# part of the nodes fixed at the incumbent, the others are solved exactly, or nearly so, memory aside and at a low price
# in turn (see ``search.local_search``). A cheaper plan becomes the incumbent if it is feasible; if not, as much of it
# is taken over as is (``combine``).


_SAMPLES, _FEWER, _LNS_WORK = 24, 8, 40_000  # at most, at most in a neighbourhood, and nodes of all samples together
Fitting = Callable[[CostedPlan, CostedPlan], CostedPlan]


def lns_on_many_axes(
    model: Model, evaluator: Evaluator, best: CostedPlan, prices: Sequence[Prices], fitting: Fitting
) -> CostedPlan:
    """Returns ``lns_within_memory`` from neighbourhood to neighbourhood, where all mesh axes together are too many."""
    for groups in axis_groups_in_two(model.parallel_axes):
        near = model.restricted(groups, best.rows)
        best = lns_within_memory(NetworkBuilder(near), evaluator, best, prices, fitting, _FEWER)
    return best


def lns_within_memory(
    builder: NetworkBuilder,
    evaluator: Evaluator,
    best: CostedPlan,
    prices: Sequence[Prices],
    fitting: Fitting,
    samples: int = _SAMPLES,
) -> CostedPlan:
    """Returns a feasible plan that is better than ``best``, or that one.

    Args:
      builder: the networks of all states.
      prices: of memory, taken in turn.
      fitting: of two plans, the second being cheaper, a feasible one that costs no more than the first.
      samples: neighbourhoods at most.
    """
    model = builder.model
    solver, nodes = _PricedSolver(builder, evaluator, best, prices, fitting), len(model.nodes)
    samples = min(samples, _LNS_WORK // nodes)
    search_neighbourhoods(solver, nodes, samples, model.deadline, model.limits, free=len(prices))
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
        self._networks = [boxed(builder, each, NetworkBuilder.plans, best.rows) for each in prices]
        self._turns = cycle(self._networks)

    def improve(self, fixed: Mask) -> bool:
        network, best = next(self._turns), self.best
        rows = network.decided(network.held(best.rows, np.flatnonzero(fixed).tolist())).rows
        choice = evaluate_plan(self._model, self._evaluator, rows)
        better = self._fitting(best, choice) if choice.cost < best.cost else best
        if better.cost >= best.cost:
            return False
        self.best = better
        for each in self._networks:
            each.begin(better.rows)
        return True
