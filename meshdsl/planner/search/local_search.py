"""Sweeps: solve one mesh axis exactly, the others held, until nothing improves.

With one axis free, what reduction has left of a training step is narrow and variable elimination
solves it exactly in milliseconds. Sweeping over the axes converges to a point that no change of
a whole axis can improve. (Solving the axes independently of each other instead collapses to data
parallelism on every axis.) Several axes can also move together: every variable takes one state
on all of them, or stays as it is.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.bounds.certificate import Certificate
from meshdsl.planner.bounds.tighten import _CLOSING_WORK, _PASSES, OPEN, PROVED, _rounds, _tightened
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.mrf.elimination import Scope, eliminate
from meshdsl.planner.mrf.network import Labels, Network
from meshdsl.planner.objective import CostedPlan, Evaluator
from meshdsl.util.arrays import Costs, Ints, object_id
from meshdsl.util.runtime import Deadline

# ---- Closing ---------------------------------------------------------------------------------------------------------


def close_gap(certificate: Certificate, evaluator: Evaluator) -> tuple[CostedPlan, float]:
    """A plan as good as the certificate's or better, and a cost that no plan undercuts."""
    work = _tightened(certificate, evaluator, _CLOSING_WORK, _PASSES[-1])
    clock = certificate.model.clock
    while certificate.gap > PROVED and not clock.is_up():
        certificate, work = _rounds(certificate, evaluator, work)
        best = certificate.best
        if certificate.gap > OPEN and not clock.is_up():
            certificate.best = lns(NetworkBuilder(certificate.model, certificate.left), best, evaluator)
        if certificate.best is best or work <= 0:
            break
    return certificate.best, min(certificate.bound, certificate.best.cost)


# ---- Sweep -----------------------------------------------------------------------------------------------------------


Axes = tuple[int, ...]  # mesh axes by number


class AxisDescent:
    """Improves states of the variables of a reduced network; those it has lost follow from these.

    Args:
      width: number of mesh axes; the network's marks have a column for each.
      cap: entries of the largest table.
    """

    def __init__(self, network: Network, width: int, cap: int) -> None:
        self.network, self.width, self.cap = network, width, cap
        self._at = {v: i for i, v in enumerate(sorted(network.unary))}
        self._domains: dict[tuple[int, Axes, int | tuple[int, ...]], Labels] = {}

    def sweep(self, start: Labels, order: Sequence[Axes], rounds: int) -> Labels:
        """Improve ``start``, taking groups of mesh axes in ``order``, until none has anything left to change."""
        best = {v: int(start[v]) for v in self._at}
        settled: set[Axes] = set()
        for axes in list(order) * rounds:
            solved = self._solve(best, axes)
            settled = settled | {axes} if solved == best else {axes}
            best = solved
            if len(settled) == len(order):
                break
        return self.network.decode_labels(list(best), list(best.values()))

    def _solve(self, states: dict[int, int], axes: Axes) -> dict[int, int]:
        """The best states in which every variable moves on one axis, or on several alike, or stays as it is."""
        domains = {v: self._domain(v, axes, states[v]) for v in self._at}
        incumbent = [int(np.searchsorted(domains[v], states[v])) for v in self._at]
        sizes = [len(domain) for domain in domains.values()]
        answer = eliminate(sizes, self._tables(domains), incumbent, self.cap, self.network.memo)
        return {v: int(domain[at]) for (v, domain), at in zip(domains.items(), answer.states, strict=True)}

    def _tables(self, domains: dict[int, Labels]) -> Iterable[tuple[tuple[int, ...], Costs]]:
        cut = self.network.memo.get
        for v, i in self._at.items():
            yield (i,), cut("cut", (self.network.unary[v], domains[v]), lambda table, a: table[a])
            for w, table in self.network.pairwise[v].items():
                if v < w:
                    sources = (table, domains[v], domains[w])
                    yield (i, self._at[w]), cut("cut", sources, lambda table, a, b: table[a[:, None], b])

    def _domain(self, v: int, axes: Axes, state: int) -> Labels:
        """The states that ``v`` may move to; equal questions get the same array."""
        marks = self.network.coordinates[v]
        assert marks is not None, "the variables of a plan say what their states mean"
        others = [axis for axis in range(self.width) if axis not in axes]
        held = state if len(axes) > 1 else tuple(marks[state, others].tolist())
        key = (object_id(marks), axes, held)
        if key not in self._domains:
            self._domains[key] = np.flatnonzero(_movable(marks, state, axes, others))
        return self._domains[key]


def _movable(marks: Labels, state: int, axes: Axes, others: list[int]) -> NDArray[np.bool_]:
    alike = (marks[:, axes] == marks[:, axes[:1]]).all(axis=1)
    same = (marks[:, others] == marks[state, others]).all(axis=1)
    movable: NDArray[np.bool_] = alike & same
    movable[state] = True
    return movable


def sweep_order(groups: Sequence[Axes]) -> list[Axes]:
    """All groups of mesh axes together, then one by one."""
    return [*([tuple(axis for axes in groups for axis in axes)] if len(groups) > 1 else []), *groups]


# ---- Neighbourhoods --------------------------------------------------------------------------------------------------
# A better plan from a known one: most operations are decided anew, exactly, while some hold; which ones is drawn.
#
# Where few values disagree in many ways, messages settle badly and one mesh axis at a time is not enough. With a part
# of the variables held the others are narrow enough to be eliminated over all axes at once (large neighbourhood search,
# Shaw 1998). Each draw begins from the best states so far, so it never ends with worse ones; the draws are the same
# every time.


_SEED = 1998
_LEAST, _MOST = 0.05, 0.5  # part of the variables that hold
_LARGEST = 1 << 20  # entries of the largest table
_WORK = 100_000_000  # entries of the networks of all draws together
_FEWEST, _DRAWS = 8, 200
_IDLE = 40  # draws without anything better


def lns(joint: NetworkBuilder, best: CostedPlan, evaluator: Evaluator) -> CostedPlan:
    """A plan that is better than ``best``, or that one.

    Args:
      joint: the states in question, those of ``best`` among them.
    """
    network = joint.plans()
    search = _Search(network, _begin(joint, network, best))
    search.run(max(_FEWEST, min(_DRAWS, _WORK // max(1, network.entries))), joint.model.clock)
    found = evaluator.exact(evaluator.evaluate(joint.domains.rows(network.decode(network.order, search.states))))
    return min(best, found, key=lambda choice: choice.cost)


def _begin(joint: NetworkBuilder, network: Network, best: CostedPlan) -> Ints:
    """The states that the nodes have in a plan, by position in order; hubs come later."""
    places = {}
    for v in (v for v in network.order if v < len(joint.domains.states)):
        places[v] = int(joint.domains.positions(v, best.rows[v])[0])
    return np.array([places.get(v, -1) for v in network.order], dtype=np.int64)


class _Search:
    """The best states so far of a network's variables, by position.

    Args:
      states: to begin with, -1 for those that are to be decided first.
    """

    def __init__(self, network: Network, states: Ints) -> None:
        self.domains, self.tables = network.listed()
        self.states, self.cost = np.maximum(states, 0), np.inf
        self._random = np.random.default_rng(_SEED)
        self._decide(states >= 0)

    def run(self, draws: int, clock: Deadline) -> None:
        """Draw who holds, so many times at most."""
        idle = 0
        for _ in range(draws):
            part = self._random.uniform(_LEAST, _MOST)
            idle = 0 if self._decide(self._random.random(len(self.domains)) < part) else idle + 1
            if idle == _IDLE or clock.is_up():
                break

    def _decide(self, held: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> bool:
        """Decide all variables but those that hold; whether that is better."""
        sizes = np.where(held, 1, self.domains).tolist()
        start = np.where(held, 0, self.states).tolist()
        found = eliminate(sizes, self._cut(held.tolist()), start, _LARGEST)
        better = found.cost < self.cost
        if found.cost <= self.cost:
            self.states, self.cost = np.where(held, self.states, found.states), found.cost
        return better

    def _cut(self, held: list[bool]) -> Iterable[tuple[Scope, Costs]]:
        """The tables at the states that hold."""
        at = [slice(s, s + 1) if holds else slice(None) for s, holds in zip(self.states.tolist(), held, strict=True)]
        return ((scope, table[tuple(at[v] for v in scope)]) for scope, table in self.tables)
