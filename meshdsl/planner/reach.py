"""Where a value can be partial at all.

The nodes are gone through in their order, and again where a loop hands back what was not known yet, until nothing
more can be partial. What a node makes of what it reads is worked out once for all of a kind.
"""

from collections.abc import Hashable, Iterator, Sequence

from meshdsl.layouts.placement import REDUCTIONS, Partial
from meshdsl.layouts.rule import Signature
from meshdsl.planner.node import FREE, Kind, Node, Problem, Rows

_Ways = int  # in which a tensor may be partial, a bit each
_Given = tuple[tuple[int, _Ways], ...]  # by port
_DEFINED = -1  # of a port that reads nothing
_BITS = {reduction: 1 << i for i, reduction in enumerate(REDUCTIONS)}


def drop_unreachable_partials(problem: Problem) -> None:
    """Keep a partial placement only where a partial value can come from upstream."""
    nodes, used, passing = problem.nodes, problem.used, _Passing()
    possible: dict[int, _Ways] = {}  # by value id
    left = [node.kind for node in nodes]
    due = bytearray(b"\1") * len(nodes)
    n = due.find(1)
    while n >= 0:
        due[n], ports = 0, nodes[n].ports
        read = [_DEFINED if defines else possible.get(value.id, 0) for value, defines, _ in ports]
        left[n], given = passing.of(nodes[n], read)
        for p, ways in given:
            value = ports[p].value.id
            if possible.get(value) != ways:
                possible[value] = ways
                for reader, _ in used.get(value, ()):
                    due[reader] = 1
        later = due.find(1, n + 1)
        n = later if later >= 0 else due.find(1)
    for node, kind in zip(nodes, left, strict=True):
        node.kind = kind


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
        rows = self._rows.setdefault((id(kind.rows), lost), left)
        return self._kinds.setdefault((kind, lost), Kind(rows, kind.shapes, kind.work))


def _partial(row: Signature) -> Iterator[tuple[int, _Ways]]:
    """The ports that are partial in a row, and how."""
    return ((p, _BITS[at.reduction]) for p, at in enumerate(row.outputs) if isinstance(at, Partial))
