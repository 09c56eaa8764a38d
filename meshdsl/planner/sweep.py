"""Axis sweeps: solve one mesh axis exactly, the others held, until nothing improves.

With one axis free, a training step is a narrow network and variable elimination solves it
exactly in milliseconds. Sweeping over the axes converges to a point that no change of a
whole axis can improve. (Solving the axes independently of each other instead collapses to data
parallelism on every axis.)
"""

from collections.abc import Hashable, Iterable

import numpy as np

from meshdsl.planner.closure import Costs, Ids
from meshdsl.planner.eliminate import Network, eliminate
from meshdsl.planner.hub import Hub, make_hub
from meshdsl.planner.model import Assignment, Model

_HUBS_KNOWN = 20_000


class Sweeper:
    """Solves a model axis by axis."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._hubs: dict[Hashable, Hub] = {}
        self._readers = {v: sorted(model.problem.used.get(v, [])) for v in model.problem.defined}

    def sweep(self, start: Assignment, order: Iterable[int]) -> Assignment:
        """Improve ``start``, taking the mesh axes in ``order``, until a whole round changes nothing."""
        best, order = start, list(order)
        for _ in range(8):
            before = best
            for axis in order:
                best = self.solve_axis(best, axis)
            if np.array_equal(before, best):
                break
        return best

    def solve_axis(self, rows: Assignment, axis: int) -> Assignment:
        """The best rows on one axis, given those on the others."""
        domains = [np.flatnonzero(np.isfinite(self.model.along(n, axis, rows[n]))) for n in range(len(rows))]
        network = Network([len(d) for d in domains])
        for n, domain in enumerate(domains):
            network.add((n,), self.model.along(n, axis, rows[n])[domain])
        for value in self.model.problem.defined:
            self._add_value(network, value, rows, axis, domains)
        incumbent = [int(np.searchsorted(d, r)) for d, r in zip(domains, rows[:, axis], strict=True)]
        answer = eliminate(network, np.array(incumbent))
        solved = rows.copy()
        solved[:, axis] = [d[s] for d, s in zip(domains, answer.states, strict=False)]
        return solved

    def _add_value(self, network: Network, value: int, rows: Assignment, axis: int, domains: list[Ids]) -> None:
        readers = self._readers[value]
        if not readers:
            return
        d, p = self.model.problem.defined[value]
        own = self.model.layout_ids(d, p, rows[d], axis)[domains[d]]
        costs = self.model.closures[value].costs
        trips = self.model.trips(value)
        reads = [(n, self.model.layout_ids(n, q, rows[n], axis)[domains[n]]) for n, q in readers]
        if len(reads) == 1:
            _join(network, d, reads[0][0], costs[np.ix_(own, reads[0][1])] * trips)
        else:
            self._add_shared(network, value, d, own, reads)
        for (n, layouts), (_, q) in zip(reads, readers, strict=True):
            price = self.model.read_price(value, n, q)
            if price is not None:
                _join(network, d, n, np.where(own[:, None] == layouts[None], 0.0, price[layouts][None]))

    def _add_shared(self, network: Network, value: int, d: int, own: Ids, reads: list[tuple[int, Ids]]) -> None:
        """Readers that can share: the value's own variable (layout and hub) between them."""
        owns, own_of = np.unique(own, return_inverse=True)
        unique = [np.unique(r, return_inverse=True) for _, r in reads]
        hub = self._hub(value, owns, tuple(u for u, _ in unique))
        trips = self.model.trips(value)
        if len(hub.own) == len(owns):  # no hub pays: the readers are independent
            for (n, _), (_, at), table in zip(reads, unique, hub.reads, strict=True):
                _join(network, d, n, table[np.ix_(own_of, at)] * trips)
            return
        variable = len(network.domains)
        network.domains.append(len(hub.own))
        linked = np.where(hub.own[None] == own_of[:, None], hub.paid[None] * trips, np.inf)
        _join(network, d, variable, linked)
        for (n, _), (_, at), table in zip(reads, unique, hub.reads, strict=True):
            _join(network, variable, n, table[:, at] * trips)

    def _hub(self, value: int, owns: Ids, readers: tuple[Ids, ...]) -> Hub:
        closure = self.model.closures[value]
        key = (closure.number, owns.tobytes(), *(r.tobytes() for r in readers))
        if key not in self._hubs:
            if len(self._hubs) > _HUBS_KNOWN:
                self._hubs.clear()
            self._hubs[key] = make_hub(closure.costs, owns, readers)
        return self._hubs[key]


def _join(network: Network, a: int, b: int, table: Costs) -> None:
    """Add a table over two variables, which may be the same one."""
    if a == b:
        network.add((a,), np.diagonal(table))
    else:
        network.add((a, b), table)
