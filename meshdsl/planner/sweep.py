"""Axis sweeps: solve one mesh axis exactly, the others held, until nothing improves.

With one axis free, a training step is a narrow network and variable elimination solves it
exactly in milliseconds. Sweeping over the axes converges to a point that no change of a
whole axis can improve. (Solving the axes independently of each other instead collapses to data
parallelism on every axis.) Several axes can also move together: every operation takes one row on
all of them, or stays as it is.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from meshdsl.planner.closure import COLLECTIVE_TIE, Costs, Ids
from meshdsl.planner.eliminate import Network, eliminate
from meshdsl.planner.hub import make_hub
from meshdsl.planner.model import Assignment, Axes, Model
from meshdsl.planner.starts import scalars


class Sweeper:
    """Solves a model axis by axis, exactly where no table passes ``cap`` entries."""

    def __init__(self, model: Model, cap: int) -> None:
        self.model, self.cap = model, cap
        self._first = frozenset(scalars(model))
        self._known: dict[Hashable, _Shared] = {}
        self._readers = {v: sorted(model.problem.used.get(v, [])) for v in model.problem.defined}

    def sweep(self, start: Assignment, order: Iterable[Axes], rounds: int = 8) -> Assignment:
        """Improve ``start``, taking groups of mesh axes in ``order``, until none has anything left to change."""
        best, order = start, list(order)
        settled: set[Axes] = set()
        for axes in order * rounds:
            solved = self.solve_axes(best, axes)
            settled = settled | {axes} if np.array_equal(best, solved) else {axes}
            best = solved
            if len(settled) == len(order):
                break
        return best

    def solve_axes(self, rows: Assignment, axes: Axes) -> Assignment:
        """The best plan in which every node moves on one axis, or on several alike, or stays as it is."""
        found = [self.model.domain(n, axes, rows[n]) for n in range(len(rows))]
        domains = [states for states, _ in found]
        network = Network([len(d) for d in domains])
        for n, (_, cost) in enumerate(found):
            network.add((n,), cost)
        incumbent = [int((d == r).all(axis=1).argmax()) for d, r in zip(domains, rows, strict=True)]
        for value in self.model.problem.defined:
            self._add_value(network, value, domains, incumbent)
        answer = eliminate(network, np.array(incumbent), self.cap, self._first)
        return np.array([d[s] for d, s in zip(domains, answer.states, strict=False)], dtype=np.intp)

    def _add_value(self, network: Network, value: int, domains: list[Assignment], incumbent: list[int]) -> None:
        """Add the tables of one value; a hub becomes a variable, with the state that suits the incumbent."""
        readers = self._readers[value]
        if not readers:
            return
        d, p = self.model.problem.defined[value]
        own = self.model.reading(d, p, domains[d])
        reads = [(n, self.model.reading(n, q, domains[n])) for n, q in readers]
        shared = self._shared(value, own, tuple(r for _, r in reads))
        start = d
        if shared.link is not None:
            start = len(network.domains)
            network.domains.append(shared.link.shape[1])
            network.add((d, start), shared.link)
            wanted = (table[:, incumbent[n]] for (n, _), table in zip(reads, shared.reads, strict=True))
            incumbent.append(int(np.argmin(shared.link[incumbent[d]] + sum(wanted))))
        for (n, _), table in zip(reads, shared.reads, strict=True):
            _join(network, start, n, table)
        for (n, layouts), (_, q) in zip(reads, readers, strict=True):
            price = self.model.read_price(value, n, q)
            if price is not None:
                _join(network, d, n, np.where(own[:, None] == layouts[None], 0.0, price[layouts][None]))

    def _shared(self, value: int, own: Ids, reads: tuple[Ids, ...]) -> "_Shared":
        closure, trips = self.model.closures[value], self.model.trips(value)
        key = (closure.number, trips, id(own), *map(id, reads))
        if key not in self._known:
            self._known[key] = _share(closure.costs, trips, own, reads)
        return self._known[key]


@dataclass(frozen=True)
class _Shared:
    """Tables of one value: to its hub variable, if one pays, and from there (or from itself) to the readers."""

    link: Costs | None
    reads: tuple[Costs, ...]


def _share(costs: Costs, trips: int, own: Ids, reads: tuple[Ids, ...]) -> _Shared:
    if len(reads) == 1:
        return _Shared(None, (costs[np.ix_(own, reads[0])] * trips,))
    owns, own_of = np.unique(own, return_inverse=True)
    unique = [np.unique(r, return_inverse=True) for r in reads]
    hub = make_hub(costs, owns, tuple(u for u, _ in unique), worth=COLLECTIVE_TIE)
    tables = [table * trips for table in hub.reads]
    if len(hub.own) == len(owns):  # no hub pays: the readers are independent
        return _Shared(None, tuple(t[np.ix_(own_of, at)] for t, (_, at) in zip(tables, unique, strict=True)))
    link = np.where(hub.own[None] == own_of[:, None], hub.paid[None] * trips, np.inf)
    return _Shared(link, tuple(t[:, at] for t, (_, at) in zip(tables, unique, strict=True)))


def _join(network: Network, a: int, b: int, table: Costs) -> None:
    """Add a table over two variables, which may be the same one."""
    if a == b:
        network.add((a,), np.diagonal(table))
    else:
        network.add((a, b), table)
