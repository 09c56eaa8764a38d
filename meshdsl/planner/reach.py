"""Where a value can be partial at all."""

from collections.abc import Iterator, Sequence

from meshdsl.layouts.placement import Partial, Placement
from meshdsl.layouts.rule import Signature
from meshdsl.planner.node import Problem

_Ends = Sequence[tuple[int, Placement]]  # ports, or values, that are partial in a row, and how
_Row = tuple[int, int, _Ends, _Ends]  # a node, its row, and its partial operands and results


def drop_unreachable_partials(problem: Problem) -> None:
    """Keep a partial placement only where a partial value can come from upstream."""
    lost: dict[int, list[int]] = {}
    for n, i, _, _ in _unreached(list(_partial_rows(problem))):
        lost.setdefault(n, []).append(i)
    shared: dict[tuple[int, tuple[int, ...]], tuple[Signature, ...]] = {}
    for n, rows in lost.items():
        node = problem.nodes[n]
        key = id(node.rows), tuple(rows)
        if key not in shared:
            shared[key] = tuple(row for i, row in enumerate(node.rows) if i not in rows)
        node.rows = shared[key]


def _unreached(rows: list[_Row]) -> list[_Row]:
    """The rows none of whose partial operands any other row makes partial in that way."""
    possible: set[tuple[int, Placement]] = set()
    left = len(rows) + 1
    while len(rows) < left:
        left, waiting = len(rows), []
        for row in rows:
            _, _, needs, gives = row
            if not needs or any(end in possible for end in needs):
                possible.update(gives)
            else:
                waiting.append(row)
        rows = waiting
    return rows


def _partial_rows(problem: Problem) -> Iterator[_Row]:
    """Rows with partial placements; stated layouts are taken at their word, and need nothing."""
    mentions: dict[int, list[tuple[int, _Ends]]] = {}
    for n, node in enumerate(problem.nodes):
        if id(node.rows) not in mentions:
            mentions[id(node.rows)] = list(_mentions(node.rows))
        stated = any(isinstance(placed, Partial) for _, placed in node.pin.placements)
        for i, ports in mentions[id(node.rows)]:
            ends = [(node.ports[p].defines, (node.ports[p].value.id, at)) for p, at in ports]
            needs = [] if stated else [end for defines, end in ends if not defines]
            yield n, i, needs, [end for defines, end in ends if defines]


def _mentions(rows: tuple[Signature, ...]) -> Iterator[tuple[int, _Ends]]:
    """The ports that are partial in a row, and how, by row."""
    for i, row in enumerate(rows):
        ports = [(p, at) for p, at in enumerate(row.outputs) if isinstance(at, Partial)]
        if ports:
            yield i, ports
