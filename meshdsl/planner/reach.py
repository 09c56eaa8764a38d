"""Where a value can be partial at all."""

from meshdsl.layouts.placement import Partial, Placement
from meshdsl.layouts.rule import Signature
from meshdsl.planner.node import Node, Problem


def drop_unreachable_partials(problem: Problem) -> None:
    """Keep a partial placement only where a partial value can come from upstream."""
    possible: dict[int, set[Placement]] = {v: set() for v in problem.defined}
    tables = {id(node.rows): node.rows for node in problem.nodes}
    mentions = {table: _partial_mentions(rows) for table, rows in tables.items()}
    concerned = [(node, mentions[id(node.rows)]) for node in problem.nodes if mentions[id(node.rows)]]
    _reach([(node, ports) for node, rows in concerned for ports in rows.values()], possible)
    shared: dict[tuple[int, tuple[int, ...]], tuple[Signature, ...]] = {}
    for node, rows in concerned:
        lost = tuple(i for i, ports in rows.items() if not _reachable(node, ports, possible))
        if lost:
            key = id(node.rows), lost
            if key not in shared:
                shared[key] = tuple(row for i, row in enumerate(node.rows) if i not in lost)
            node.rows = shared[key]


def _reach(rows: "list[tuple[Node, _Mentions]]", possible: dict[int, set[Placement]]) -> None:
    """Note what is possible by any row; one that is reached stays so."""
    left = len(rows) + 1
    while len(rows) < left:
        left, waiting = len(rows), []
        for node, ports in rows:
            if _reachable(node, ports, possible):
                _spread(node, ports, possible)
            else:
                waiting.append((node, ports))
        rows = waiting


_Mentions = tuple[tuple[int, Placement], ...]  # ports that are partial in a row, and how


def _partial_mentions(rows: tuple[Signature, ...]) -> dict[int, _Mentions]:
    found = (
        (i, tuple((p, at) for p, at in enumerate(row.outputs) if isinstance(at, Partial))) for i, row in enumerate(rows)
    )
    return {i: ports for i, ports in found if ports}


def _reachable(node: Node, partial: _Mentions, possible: dict[int, set[Placement]]) -> bool:
    """Whether some operand that the row wants partial can be; stated layouts are taken at their word."""
    needs = [(node.ports[p].value.id, at) for p, at in partial if not node.ports[p].defines]
    stated = any(isinstance(placed, Partial) for _, placed in node.pin.placements)
    return stated or not needs or any(at in possible[v] for v, at in needs)


def _spread(node: Node, partial: _Mentions, possible: dict[int, set[Placement]]) -> None:
    for p, at in partial:
        if node.ports[p].defines:
            possible[node.ports[p].value.id].add(at)
