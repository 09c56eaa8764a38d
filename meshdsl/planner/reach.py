"""Where a value can be partial at all.

The nodes are gone through in their order, and again where a loop hands back what was not known yet, until nothing
more can be partial. What a node makes of what it reads is worked out once for all of a kind.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from meshdsl.layouts.placement import REDUCTIONS, Partial
from meshdsl.layouts.rule import Signature
from meshdsl.planner.identity import identity
from meshdsl.planner.node import FREE, Kind, Node, Problem, Rows
from meshdsl.planner.wiring import Wiring

_Ways = int  # in which a tensor may be partial, a bit each
_Given = tuple[tuple[int, _Ways], ...]  # by port
_DEFINED = -1  # of a port that reads nothing
_BITS = {reduction: 1 << i for i, reduction in enumerate(REDUCTIONS)}


def drop_unreachable_partials(problem: Problem) -> None:
    """Keep a partial placement only where a partial value can come from upstream."""
    nodes, reach = problem.nodes, _Reach(problem.nodes, problem.wiring)
    n = reach.due.find(1)
    while n >= 0:
        reach.visit(n)
        later = reach.due.find(1, n + 1)
        n = later if later >= 0 else reach.due.find(1)
    for node, kind in zip(nodes, reach.left, strict=True):
        node.kind = kind


class _Reach:
    """What the kinds of nodes are ``left`` with as far as values can be partial, and which nodes are to be looked at.

    In the beginning no value can be; operations of a kind are left alike then, and those that make one partial at once
    are looked at again.
    """

    def __init__(self, nodes: Sequence[Node], wiring: Wiring) -> None:
        self._nodes, self._passing, reads = nodes, _Passing(), wiring.every != np.arange(wiring.every.size)
        self._ports = list(pairwise((*wiring.first.tolist(), reads.size)))
        self._possible = [0] * len(wiring.made) + [_DEFINED]  # by value; what nodes define is read at the last place
        self._read, self._made = np.where(reads, wiring.of, len(wiring.made)).tolist(), wiring.of.tolist()
        self._begins = np.searchsorted(wiring.makers, wiring.made).tolist()
        self._ends = np.searchsorted(wiring.makers, wiring.made, side="right").tolist()
        self._readers = wiring.nodes[wiring.read].tolist()
        self.due = bytearray(node.op is None for node in nodes)
        first = {node.kind: n for n, node in enumerate(nodes) if node.op}
        known = {kind: self._passed(n) for kind, n in first.items()}
        nothing = {node.kind: (node.kind, ()) for node in nodes if node.op is None}
        found = [known.get(node.kind) or nothing[node.kind] for node in nodes]
        self.left = [kind for kind, _ in found]
        for n, (_, given) in enumerate(found):
            if given and nodes[n].op:
                self._give(n, given)

    def visit(self, n: int) -> None:
        """Look at a node."""
        self.due[n] = 0
        self.left[n], given = self._passed(n)
        self._give(n, given)

    def _passed(self, n: int) -> "tuple[Kind, _Given]":
        return self._passing.of(self._nodes[n], [self._possible[v] for v in self._read[slice(*self._ports[n])]])

    def _give(self, n: int, given: _Given) -> None:
        """Note in which ways the values that a node makes may be partial, and who reads them."""
        begin, _ = self._ports[n]
        for p, ways in given:
            value = self._made[begin + p]
            if self._possible[value] != ways:
                self._possible[value] = ways
                for reader in self._readers[self._begins[value] : self._ends[value]]:
                    self.due[reader] = 1


class _Passing:
    """What nodes are left with, and what they make partial, by the ways in which what they read can be partial."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Kind, _Given]] = {}
        self._rows: dict[tuple[int, tuple[int, ...]], Rows] = {}
        self._kinds: dict[tuple[Kind, tuple[int, ...]], Kind] = {}

    def of(self, node: Node, read: Sequence[_Ways]) -> tuple[Kind, _Given]:
        """Of one node; a stated layout is taken at its word, and needs nothing."""
        stated = node.pin is not FREE and bool(node.pin.partial())
        key = (node.kind, stated, *read)
        return self._known.get(key) or self._known.setdefault(key, self._worked_out(node.kind, stated, read))

    def _worked_out(self, kind: Kind, stated: bool, read: Sequence[_Ways]) -> tuple[Kind, _Given]:
        given: dict[int, _Ways] = {}
        lost = []
        for i, row in enumerate(kind.rows):
            ends = list(_partial(row))
            needs = [read[p] & way for p, way in ends if read[p] != _DEFINED]
            if stated or not needs or any(needs):
                given.update({p: given.get(p, 0) | way for p, way in ends if read[p] == _DEFINED})
            else:
                lost.append(i)
        return self._without(kind, tuple(lost)), tuple(given.items())

    def _without(self, kind: Kind, lost: tuple[int, ...]) -> Kind:
        """The kind without some rows; equal questions get the same object, and kinds that share rows still do."""
        if not lost:
            return kind
        left = tuple(row for i, row in enumerate(kind.rows) if i not in lost)
        rows = self._rows.setdefault((identity(kind.rows), lost), left)
        return self._kinds.setdefault((kind, lost), Kind(rows, kind.shapes, kind.work))


def _partial(row: Signature) -> Iterator[tuple[int, _Ways]]:
    """The ports that are partial in a row, and how."""
    return ((p, _BITS[at.reduction]) for p, at in enumerate(row.outputs) if isinstance(at, Partial))
