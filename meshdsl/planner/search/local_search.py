"""Improving a plan: coordinate descent over mesh axes, large-neighbourhood search, and rounds that close the gap.

All three solve sub-problems exactly by variable elimination, and never return a worse plan than they begin with.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.bounds.certificate import Certificate
from meshdsl.planner.bounds.tighten import PruningRounds
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.limits import SearchLimits
from meshdsl.planner.mrf.elimination import Scope, eliminate
from meshdsl.planner.mrf.network import Labels, Network
from meshdsl.planner.objective import CostedPlan, Evaluator
from meshdsl.util.arrays import Costs, Ints, object_id
from meshdsl.util.runtime import Deadline

Axes = tuple[int, ...]  # mesh axes by number
Mask = NDArray[np.bool_]

# ---- Coordinate descent over mesh axes -------------------------------------------------------------------------------
# With one mesh axis free and the others fixed, what reduction leaves of a training step is narrow, and elimination
# solves it exactly in milliseconds. Sweeping over the axes converges to a plan that no change of a whole axis improves.
# (Solving the axes independently of each other instead collapses to data parallelism on every axis.) Several axes can
# also move together: every variable takes one state on all of them, or stays as it is.


class AxisDescent:
    """Improves a state of a reduced network, one group of mesh axes at a time; eliminated variables follow.

    Args:
      network: whose variables have ``coordinates``, a column per mesh axis.
      width: number of mesh axes.
      cap: entries of the largest table.
    """

    def __init__(self, network: Network, width: int, cap: int) -> None:
        self.network, self.width, self.cap = network, width, cap
        self._at = {v: i for i, v in enumerate(sorted(network.unary))}
        self._domains: dict[tuple[int, Axes, int | tuple[int, ...]], Labels] = {}

    def sweep(self, start: Labels, order: Sequence[Axes], rounds: int) -> Labels:
        """Returns ``start`` improved on groups of axes in ``order``, until no group changes, or after ``rounds``."""
        best = {v: int(start[v]) for v in self._at}
        converged: set[Axes] = set()
        for axes in list(order) * rounds:
            solved = self._solve(best, axes)
            converged = converged | {axes} if solved == best else {axes}
            best = solved
            if len(converged) == len(order):
                break
        return self.network.decode_labels(list(best), list(best.values()))

    def _solve(self, states: dict[int, int], axes: Axes) -> dict[int, int]:
        """Returns the best states in which every variable moves on these axes, equally on all, or not at all."""
        domains = {v: self._domain(v, axes, states[v]) for v in self._at}
        incumbent = [int(np.searchsorted(domains[v], states[v])) for v in self._at]
        sizes = [len(domain) for domain in domains.values()]
        found = eliminate(sizes, self._tables(domains), incumbent, self.cap, self.network.memo)
        return {v: int(domain[at]) for (v, domain), at in zip(domains.items(), found.states, strict=True)}

    def _tables(self, domains: dict[int, Labels]) -> Iterator[tuple[Scope, Costs]]:
        cut = self.network.memo.get
        for v, i in self._at.items():
            yield (i,), cut("cut", (self.network.unary[v], domains[v]), lambda table, a: table[a])
            for w, table in self.network.pairwise[v].items():
                if v < w:
                    sources = (table, domains[v], domains[w])
                    yield (i, self._at[w]), cut("cut", sources, lambda table, a, b: table[a[:, None], b])

    def _domain(self, v: int, axes: Axes, state: int) -> Labels:
        """Returns the states that ``v`` may move to; equal questions get the same array."""
        coordinates = self.network.coordinates[v]
        assert coordinates is not None, "the variables of a network of plans have coordinates"
        others = [axis for axis in range(self.width) if axis not in axes]
        fixed = state if len(axes) > 1 else tuple(coordinates[state, others].tolist())
        key = (object_id(coordinates), axes, fixed)
        if key not in self._domains:
            same_on_axes = (coordinates[:, axes] == coordinates[:, axes[:1]]).all(axis=1)
            same_elsewhere = (coordinates[:, others] == coordinates[state, others]).all(axis=1)
            allowed: Mask = same_on_axes & same_elsewhere
            allowed[state] = True
            self._domains[key] = np.flatnonzero(allowed)
        return self._domains[key]


def sweep_order(groups: Sequence[Axes]) -> list[Axes]:
    """Returns all groups of mesh axes together, then one by one."""
    return [*([tuple(axis for axes in groups for axis in axes)] if len(groups) > 1 else []), *groups]


# ---- Large-neighbourhood search --------------------------------------------------------------------------------------
# Where a few values disagree in many ways, messages converge badly and one mesh axis at a time is not enough. With a
# random part of the variables fixed at the incumbent, the others are narrow enough to be eliminated over all axes at
# once (Shaw 1998). The samples are the same every time.

_SEED = 1998


class NeighbourhoodSolver(Protocol):
    """Holds an incumbent, and improves it within neighbourhoods."""

    def improve(self, fixed: Mask) -> bool:
        """Solves for all variables but the ``fixed`` ones; returns whether the incumbent has improved."""


def search_neighbourhoods(
    solver: NeighbourhoodSolver,
    variables: int,
    samples: int,
    clock: Deadline,
    limits: SearchLimits,
    free: int = 0,
    patience: int | None = None,
) -> None:
    """Improves the incumbent of a solver in random neighbourhoods.

    Args:
      variables: that may be fixed.
      samples: neighbourhoods at most.
      free: so many of the first fix nothing.
      patience: stop after so many without an improvement.
    """
    random, idle = np.random.default_rng(_SEED), 0
    for i in range(samples):
        if clock.expired() or (patience is not None and idle == patience):
            break
        part = random.uniform(limits.search_lns_fixed_least, limits.search_lns_fixed_most) if i >= free else 0.0
        idle = 0 if solver.improve(random.random(variables) < part) else idle + 1


def lns(builder: NetworkBuilder, best: CostedPlan, evaluator: Evaluator) -> CostedPlan:
    """Returns a better plan than ``best``, or that one.

    Args:
      builder: of the remaining states, those of ``best`` among them.
    """
    network, limits = builder.plans(), builder.model.limits
    solver = _NetworkSolver(network, _positions_of(builder, network, best), limits.search_lns_entries)
    affordable = limits.search_lns_work // max(1, network.entries)
    samples = max(limits.search_lns_samples_least, min(limits.search_lns_samples, affordable))
    clock, count = builder.model.deadline, len(solver.domains)
    search_neighbourhoods(solver, count, samples, clock, limits, patience=limits.search_lns_patience)
    rows = builder.domains.rows(network.decode(network.order, solver.states))
    return min(best, evaluator.with_exact_cost(evaluator.evaluate(rows)), key=lambda plan: plan.cost)


def _positions_of(builder: NetworkBuilder, network: Network, plan: CostedPlan) -> Ints:
    """Returns the states of the nodes in a plan, in order, by position; -1 for hubs."""
    nodes = len(builder.domains.states)
    found = (int(builder.domains.positions(v, plan.rows[v])[0]) if v < nodes else -1 for v in network.order)
    return np.fromiter(found, dtype=np.int64)


class _NetworkSolver:
    """The incumbent states of a network's variables, by position in order.

    Args:
      states: to begin with; -1 for variables that are decided first, given the others.
      cap: entries of the largest table.
    """

    def __init__(self, network: Network, states: Ints, cap: int) -> None:
        self.domains, self._tables = network.listed()
        self.states, self._cost, self._cap = np.maximum(states, 0), np.inf, cap
        self.improve(states >= 0)

    def improve(self, fixed: Mask) -> bool:
        sizes, start = np.where(fixed, 1, self.domains).tolist(), np.where(fixed, 0, self.states).tolist()
        found = eliminate(sizes, self._cut(fixed.tolist()), start, self._cap)
        has_improved = found.cost < self._cost
        if found.cost <= self._cost:
            self.states, self._cost = np.where(fixed, self.states, found.states), found.cost
        return has_improved

    def _cut(self, fixed: list[bool]) -> Iterable[tuple[Scope, Costs]]:
        """Returns the tables at the fixed states."""
        at = [slice(s, s + 1) if holds else slice(None) for s, holds in zip(self.states.tolist(), fixed, strict=True)]
        return ((scope, table[tuple(at[v] for v in scope)]) for scope, table in self._tables)


# ---- Closing the gap -------------------------------------------------------------------------------------------------


class BoundedPlan(NamedTuple):
    """A plan, and a cost that no plan undercuts."""

    plan: CostedPlan
    bound: float


def close_gap(certificate: Certificate, evaluator: Evaluator) -> BoundedPlan:
    """Returns the incumbent of a certificate or a better plan, and a bound as high as is affordable.

    Rounds of pruning raise the bound and try the plans that messages decode to; where much remains open, LNS looks for
    a better incumbent, which prunes more.
    """
    limits, clock = certificate.model.limits, certificate.model.deadline
    rounds = PruningRounds(certificate, evaluator, limits.bounds_closing_work)
    rounds.tighten(limits.bounds_passes[-1])
    while rounds.certificate.is_worth_more and not clock.expired():
        rounds.run()
        certificate = rounds.certificate
        best = certificate.best
        if certificate.gap > limits.bounds_open_gap and not clock.expired():
            certificate.best = lns(NetworkBuilder(certificate.model, certificate.remaining), best, evaluator)
        if certificate.best is best or rounds.work <= 0:
            break
    certificate = rounds.certificate
    return BoundedPlan(certificate.best, min(certificate.bound, certificate.best.cost))
