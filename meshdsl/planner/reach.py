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
    changed = True
    while changed:
        changed = False
        for node, rows in concerned:
            for ports in rows.values():
                if _reachable(node, ports, possible):
                    changed |= _spread(node, ports, possible)
    shared: dict[tuple[int, tuple[int, ...]], tuple[Signature, ...]] = {}
    for node, rows in concerned:
        lost = tuple(i for i, ports in rows.items() if not _reachable(node, ports, possible))
        if lost:
            key = id(node.rows), lost
            if key not in shared:
                shared[key] = tuple(row for i, row in enumerate(node.rows) if i not in lost)
            node.rows = shared[key]


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


def _spread(node: Node, partial: _Mentions, possible: dict[int, set[Placement]]) -> bool:
    made = {(node.ports[p].value.id, at) for p, at in partial if node.ports[p].defines}
    new = [(v, at) for v, at in made if at not in possible[v]]
    for v, at in new:
        possible[v].add(at)
    return bool(new)
