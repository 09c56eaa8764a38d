"""The collectives inside the local programs of a solution, as the plan lists them."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from meshdsl.ir import Graph, Literal, Op, Value, walk
from meshdsl.layouts.exchange import Exchange, Turn, in_turn
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.price import price
from meshdsl.planner.solution import Solution


@dataclass(frozen=True)
class Inside:
    """One collective of an operation: what it is of, and what one device sends.

    Args:
      value: the operand or result whose elements are exchanged.
    """

    op: Op
    graph: Graph
    exchange: Exchange
    value: Value
    kind: str
    axes: tuple[str, ...]
    bytes: int
    seconds: float


def collectives_inside(graph: Graph, solution: Solution) -> Iterator[Inside]:
    """Every collective of a local program in the graph and its bodies, in program order.

    A piece of a value that two operations fetch alike is listed once: the compiler drops the second,
    and what is exchanged for a result that nobody reads.
    """
    exchanging = {op for op, rows in solution.rows.items() for row in rows if row.collectives}
    if not exchanging:
        return
    seen: set[object] = set()
    read = {x.id for _, op in walk(graph) for x in op.inputs if isinstance(x, Value)}
    for inside, op in walk(graph):
        for turn in _turns(op, solution, read) if op.id in exchanging else ():
            for piece, found in _collectives(op, inside, turn, solution):
                if piece not in seen:
                    seen.add(piece)
                    yield found


def _turns(op: Op, solution: Solution, read: set[int]) -> Iterator[Turn]:
    """What an operation exchanges, but for results that nobody reads."""
    unread = [i for i, x in enumerate(op.outputs, len(op.inputs)) if x.id not in read]
    turns = in_turn([row.collectives for row in solution.rows[op.id]]) or ()
    return (turn for turn in turns if turn.exchange.port not in unread)


def _collectives(op: Op, graph: Graph, turn: Turn, solution: Solution) -> Iterator[tuple[object, Inside]]:
    """The collectives of one exchange, each with what tells its piece from others."""
    mesh, e = solution.mesh, turn.exchange
    axes = tuple(mesh.names[i] for i in turn.axes)
    value, layout = _port(op, e.port, solution)
    block = turn.widened(layout.local_shape(value.shape, mesh.sizes_by_name))
    extent = block[e.dim] if e.dim is not None else 1
    wider = tuple((t.axes, t.exchange.before, t.exchange.after) for t in turn.earlier)
    for part in e.parts(extent, [mesh.axis(name) for name in axes]) or ():
        sent = part.stop - part.start if e.dim is not None and part.stop else extent
        given = prod(block) // max(1, extent) * sent * value.itemsize
        over = tuple(axes[i] for i in part.axes)
        cost = price(part.kind, over, mesh)
        found = Inside(op, graph, e, value, part.kind, over, round(cost.sent * given), cost.seconds(given))
        piece = (value.id, layout, axes, part, wider) if part.distance else (op.id, e, part)
        yield piece, found


def _port(op: Op, port: int, solution: Solution) -> tuple[Value, Layout]:
    """The operand or result, and how it lies there."""
    value = (*op.inputs, *op.outputs)[port]
    if isinstance(value, Literal):
        raise TypeError(f"{op.name} exchanges the literal {value.value}")
    return value, solution.uses[op.id, port] if port < len(op.inputs) else solution.layouts[value.id]
