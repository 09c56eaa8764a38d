"""A lower bound on a network's minimum that rises: tree-reweighted message passing.

At any time the sum of the minima of all tables is a lower bound on the minimum of the sum. Passing
messages (TRW-S, Kolmogorov 2006) shifts cost between the tables, their sum staying the same, so
that this bound rises; a state whose own share of it passes the cost of a known plan cannot be in a
better one and goes.
"""

import numpy as np

from meshdsl.planner.exact import Costs
from meshdsl.planner.network import Network

_LEAST = np.minimum.reduce
_Messages = dict[tuple[int, int], Costs]  # by (from, to), over the states of the latter


def bound(network: Network) -> float:
    """The sum of the minima of all tables."""
    edges = (table for v, near in network.near.items() for w, table in near.items() if v < w)
    return network.constant + sum(float(table.min()) for table in (*network.unary.values(), *edges))


def pass_messages(network: Network, rounds: int) -> None:
    """Raise the bound: passes over the variables forwards and backwards. Tables must be finite."""
    sent = {(v, w): np.zeros(network.unary[w].size) for v, near in network.near.items() for w in near}
    order = network.order
    there, back = _ahead(network, order), _ahead(network, order[::-1])
    for _ in range(rounds):
        _sweep(network, there, sent)
        _sweep(network, back, sent)
    _settle(network, sent)
    _collect(network, there)
    _collect(network, back)


def _ahead(network: Network, order: list[int]) -> list[tuple[int, list[int]]]:
    """Every variable with its neighbours further on."""
    at = {v: i for i, v in enumerate(order)}
    return [(v, [w for w in network.near[v] if at[w] > i]) for v, i in at.items()]


def _sweep(network: Network, order: list[tuple[int, list[int]]], sent: _Messages) -> None:
    """Every variable hands its share of what it knows to the neighbours ahead."""
    for v, ahead in order:
        if not ahead:
            continue
        near = network.near[v]
        total = network.unary[v].copy()
        for w in near:
            total += sent[w, v]
        total /= max(len(ahead), len(near) - len(ahead))
        for w in ahead:
            sent[v, w] = _LEAST((total - sent[w, v])[:, None] + near[w])


def _settle(network: Network, sent: _Messages) -> None:
    """Move what the messages say from the edges into the variables' tables."""
    for (v, w), message in sent.items():
        network.unary[w] = network.unary[w] + message
        if v < w:
            _replace(network, v, w, network.near[v][w] - message[None] - sent[w, v][:, None])


def _collect(network: Network, order: list[tuple[int, list[int]]]) -> None:
    """Every variable draws in what its edges can spare and spreads it over the edges ahead."""
    for v, ahead in order:
        near = network.near[v]
        spare = {w: _LEAST(table, axis=1) for w, table in near.items()}
        total = network.unary[v] + sum(spare.values())
        part = total / max(len(ahead), len(near) - len(ahead), 1)
        for w in list(near):
            shift = (part if w in ahead else 0.0) - spare[w]
            _replace(network, v, w, near[w] + shift[:, None])
        network.unary[v] = total - part * len(ahead)


def _replace(network: Network, v: int, w: int, table: Costs) -> None:
    network.near[v][w], network.near[w][v] = table, table.T


def cap(network: Network, limit: float) -> None:
    """Make all tables finite: no plan of interest has an entry above ``limit``."""
    for v, near in network.near.items():
        network.unary[v] = np.minimum(network.unary[v], limit)
        for w, table in near.items():
            if v < w:
                _replace(network, v, w, np.minimum(table, limit))


def fix(network: Network, upper: float) -> None:
    """Drop states that no solution of cost ``upper`` or less can have."""
    slack = upper - bound(network)
    for v in list(network.unary):
        excess = network.unary[v] - network.unary[v].min()
        for table in network.near[v].values():
            least = _LEAST(table, axis=1)
            excess = excess + (least - _LEAST(least))
        keep = np.flatnonzero(excess <= slack + 1.0)
        if 0 < keep.size < excess.size:
            network.unary[v] = network.unary[v][keep]
            labels = network.labels.get(v)
            network.labels[v] = keep if labels is None else labels[keep]
            for w in list(network.near[v]):
                _replace(network, v, w, network.near[v][w][keep])


def point(network: Network) -> dict[int, int]:
    """The states that the messages point to, by label: greedily, then exactly over those eliminated."""
    at: dict[int, int] = {}
    for v in network.order:
        cost = network.unary[v].copy()
        for w, table in network.near[v].items():
            cost += table[:, at[w]] if w in at else table.min(axis=1)
        at[v] = int(cost.argmin())
    chosen = {v: int(network.labels[v][i]) if v in network.labels else i for v, i in at.items()}
    return network.decode(chosen)
