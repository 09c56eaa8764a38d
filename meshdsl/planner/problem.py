"""The planning problem: one variable per operation, whose states are its signatures.

    minimise   sum over nodes of trips * seconds(node at its rows)
             + sum over values of trips * seconds(cheapest moves from the value's own layout
                                                  to every layout its readers ask for)
    subject to pins, divisibility, and the memory limit at every program point

A *node* is an operation, an input, an output or a link of a loop; a *port* is one of its
tensors. Every value has one port that defines it and any number that use it. On each mesh
axis a node takes one row of its table; what the rows say at the two ends of a value decides
which moves lie between.

Loops need no special treatment by the solver. A const of a loop body is a node that reads the
outer value once and defines the inner one: reshard before it and it happens once, after it and
it happens on every trip. A carry is one node that reads the initial value and the body's
result, and defines the body's input and the loop's result, all in one layout, which may be
partial: then it is reduced once, after the loop.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from meshdsl.errors import PinError, faults
from meshdsl.ir import Graph, Op, Program, Value
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, P, Partial, Placement, Split
from meshdsl.layouts.rule import Row
from meshdsl.planner.costs import Work, materialised, work_of
from meshdsl.planner.solution import Pins
from meshdsl.rules import rows_of

NO_WORK, FREE = Work(0.0, (), 4), Layout()
_Known = dict[Hashable, tuple[Row, ...]]  # tables by what they depend on


@dataclass(frozen=True)
class Port:
    """One tensor of a node: its value, whether the node defines it, and who reads it (op id, operand)."""

    value: Value
    defines: bool
    reader: tuple[int, int] | None = None


@dataclass(eq=False)
class Node:
    """A variable of the problem.

    Args:
      ports: its tensors; a row lists one placement per port.
      rows: its table on one axis.
      op: the operation it stands for, if any.
      trips: how often it runs.
      pin: the layout that was stated for it; axes it does not name are free.
    """

    ports: tuple[Port, ...]
    rows: tuple[Row, ...]
    work: Work = NO_WORK
    op: Op | None = None
    trips: int = 1
    pin: Layout = FREE
    what: str = ""

    def placements(self, row: int) -> tuple[Placement, ...]:
        """Placement of every port in one row."""
        return (*self.rows[row].inputs, *self.rows[row].outputs)


@dataclass(eq=False)
class Problem:
    """Nodes, and per value id the (node, port) that defines it and those that use it."""

    program: Program
    mesh: Mesh
    nodes: list[Node]
    defined: dict[int, tuple[int, int]] = field(default_factory=dict)
    used: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    trips: dict[int, int] = field(default_factory=dict)

    def index(self) -> None:
        """Fill the tables by value id."""
        for n, node in enumerate(self.nodes):
            for p, port in enumerate(node.ports):
                if port.defines:
                    self.defined[port.value.id] = (n, p)
                else:
                    self.used.setdefault(port.value.id, []).append((n, p))


def make_problem(program: Program, mesh: Mesh, pins: Pins) -> Problem:
    """The planning problem of a program, with rows that cannot occur left out."""
    problem = Problem(program, mesh, list(_nodes(program, pins)))
    problem.index()
    _count_trips(program.graph, problem.trips)
    _drop_unreachable_partials(problem)
    _require_rows(problem)
    return problem


def _nodes(program: Program, pins: Pins) -> Iterator[Node]:
    kept = materialised(program.graph)
    yield from _boundary(program, pins)
    yield from _graph_nodes(program.graph, kept, {})


def _boundary(program: Program, pins: Pins) -> Iterator[Node]:
    """One node per input, which also reads the output that replaces it; one per other output."""
    last = program.graph.ops[-1]
    replaced = {i: j for j, i in enumerate(pins.follows)}
    for i, value in enumerate(program.graph.inputs):
        j = replaced.get(i)
        output = None if j is None else last.inputs[j]
        uses = (Port(output, False, (last.id, j)),) if isinstance(output, Value) else ()  # type: ignore[arg-type]
        yield _same((Port(value, True), *uses), pins.inputs[i], f"input {program.inputs[i].path}")
    for j, value_out in enumerate(last.inputs):
        if isinstance(value_out, Value) and pins.follows[j] is None:
            port = Port(value_out, False, (last.id, j))
            yield _same((port,), pins.outputs[j], f"output {program.outputs[j].path}")


def _same(ports: tuple[Port, ...], pin: Layout, what: str, partial: bool = False, trips: int = 1) -> Node:
    """A node all of whose ports have one layout."""
    return Node(ports, _alike(len(ports), len(ports[0].value.shape), partial), pin=pin, what=what, trips=trips)


@cache
def _alike(ports: int, rank: int, partial: bool) -> tuple[Row, ...]:
    kinds: list[Placement] = [P, P("max"), P("min")] if partial else []
    return tuple(Row((), (placed,) * ports) for placed in (B, *map(Split, range(rank)), *kinds))


def _graph_nodes(graph: Graph, kept: set[int], known: _Known) -> Iterator[Node]:
    for op in graph.ops:
        if op.bodies:
            yield from _LINKS[op.name](op, graph.trips)
            for body in op.bodies:
                yield from _graph_nodes(body, kept, known)
        elif op.name == "constrain":
            ports = (Port(op.inputs[0], False, (op.id, 0)), Port(op.outputs[0], True))  # type: ignore[arg-type]
            yield _same(ports, op.params["layout"], f"constrain at {op.source}", True, graph.trips)
        elif op.name != "return":
            yield _op_node(op, graph.trips, kept, known)


def _op_node(op: Op, trips: int, kept: set[int], known: _Known) -> Node:
    real = [i for i, v in enumerate((*op.inputs, *op.outputs)) if isinstance(v, Value)]
    uses = [Port(v, False, (op.id, i)) for i, v in enumerate(op.inputs) if isinstance(v, Value)]
    ports = (*uses, *(Port(v, True) for v in op.outputs))
    rows = _rows(op, tuple(real), known)
    work = work_of(op, kept)
    touched = tuple(work.touched[i] for i in real)
    sides = tuple(replace(side, tensor=real.index(side.tensor)) for side in work.sides if side.tensor in real)
    work = replace(work, touched=touched, sides=sides)
    return Node(ports, rows, work, op, trips, what=f"{op.called} at {op.source}")


def _rows(op: Op, real: tuple[int, ...], known: _Known) -> tuple[Row, ...]:
    """The table of an operation without its literals, derived once for equal operations."""
    tensors = tuple((v.shape, v.dtype, isinstance(v, Value)) for v in (*op.inputs, *op.outputs))
    try:
        key: Hashable = (op.name, tensors, tuple(sorted(op.params.items())))
        found = known.get(key)
    except TypeError:  # parameters that cannot be hashed or compared
        key, found = op.id, None
    return found or known.setdefault(key, tuple(_only(row, real) for row in rows_of(op)))


def _only(row: Row, real: Sequence[int]) -> Row:
    placed = (*row.inputs, *row.outputs)
    inside = tuple(replace(e, port=real.index(e.port)) for e in row.collectives)
    return Row((), tuple(placed[i] for i in real), row.size, inside)


def _link(op: Op, uses: Iterable[tuple[Op, int]], defines: Iterable[Value], what: str, trips: int) -> Node | None:
    """A node that passes one layout from the operands it reads to the values it defines."""
    read = [(o.inputs[i], (o.id, i)) for o, i in uses]
    ports = (*(Port(v, False, at) for v, at in read if isinstance(v, Value)), *(Port(v, True) for v in defines))
    return _same(ports, FREE, f"{what} of {op.name} at {op.source}", True, trips) if ports else None


def _scan_links(op: Op, trips: int) -> Iterator[Node]:
    (body,) = op.bodies
    consts, carry = op.params["num_consts"], op.params["num_carry"]
    last = body.ops[-1]
    for i, inner in enumerate(body.inputs):
        if i < consts:
            yield from _some(_link(op, [(op, i)], [inner], "const", trips))
        elif i < consts + carry:
            j = i - consts
            yield from _some(_link(op, [(op, i), (last, j)], [inner, op.outputs[j]], "carry", trips))
        else:
            yield _stacked(op, Port(inner, True), _outer_port(op, i), trips)
    for j in range(carry, len(op.outputs)):
        returned = last.inputs[j]
        inner_port = Port(returned, False, (last.id, j)) if isinstance(returned, Value) else None
        yield _stacked(op, inner_port, Port(op.outputs[j], True), trips)


def _outer_port(op: Op, i: int) -> Port | None:
    value = op.inputs[i]
    return Port(value, False, (op.id, i)) if isinstance(value, Value) else None


def _stacked(op: Op, inner: Port | None, outer: Port | None, trips: int) -> Node:
    """A slice inside the loop and its stack outside: the same layout, one dim further on."""
    present = [port for port in (outer, inner) if port is not None]
    rank = len(inner.value.shape) if inner else len(outer.value.shape) - 1  # type: ignore[union-attr]
    rows = _stacks(rank, outer is not None, inner is not None)
    return Node(tuple(present), rows, what=f"slices of {op.name} at {op.source}", trips=trips)


@cache
def _stacks(rank: int, outer: bool, inner: bool) -> tuple[Row, ...]:
    pairs: list[tuple[Placement, Placement]] = [(Split(i + 1), Split(i)) for i in range(rank)]
    pairs += [(placed, placed) for placed in (B, P, P("max"), P("min"))]
    return tuple(Row((), (*[o] * outer, *[i] * inner)) for o, i in pairs)


def _while_links(op: Op, trips: int) -> Iterator[Node]:
    cond, body = op.bodies
    nc, nb = op.params["cond_nconsts"], op.params["body_nconsts"]
    last = body.ops[-1]
    for i in range(nc):
        yield from _some(_link(op, [(op, i)], [cond.inputs[i]], "const", trips))
    for i in range(nb):
        yield from _some(_link(op, [(op, nc + i)], [body.inputs[i]], "const", trips))
    for j, outer in enumerate(op.outputs):
        uses = [(op, nc + nb + j), (last, j)]
        yield from _some(_link(op, uses, [cond.inputs[nc + j], body.inputs[nb + j], outer], "carry", trips))
    yield from _predicate(cond.ops[-1], trips)


def _cond_links(op: Op, trips: int) -> Iterator[Node]:
    yield from _predicate(op, trips)
    for i in range(1, len(op.inputs)):
        yield from _some(_link(op, [(op, i)], [body.inputs[i - 1] for body in op.bodies], "operand", trips))
    for j, outer in enumerate(op.outputs):
        yield from _some(_link(op, [(body.ops[-1], j) for body in op.bodies], [outer], "result", trips))


def _predicate(op: Op, trips: int) -> Iterator[Node]:
    """What decides a branch is the same everywhere."""
    value = op.inputs[0]
    if isinstance(value, Value):
        yield Node((Port(value, False, (op.id, 0)),), (Row((), (B,)),), what="predicate", trips=trips)


def _some(node: Node | None) -> Iterator[Node]:
    if node is not None:
        yield node


_LINKS = {"scan": _scan_links, "while": _while_links, "cond": _cond_links}


def _count_trips(graph: Graph, trips: dict[int, int]) -> None:
    for value in graph.inputs:
        trips[value.id] = graph.trips
    for op in graph.ops:
        for value in op.outputs:
            trips[value.id] = graph.trips
        for body in op.bodies:
            _count_trips(body, trips)


def _drop_unreachable_partials(problem: Problem) -> None:
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
    shared: dict[tuple[int, tuple[int, ...]], tuple[Row, ...]] = {}
    for node, rows in concerned:
        lost = tuple(i for i, ports in rows.items() if not _reachable(node, ports, possible))
        if lost:
            key = id(node.rows), lost
            if key not in shared:
                shared[key] = tuple(row for i, row in enumerate(node.rows) if i not in lost)
            node.rows = shared[key]


_Mentions = tuple[tuple[int, Placement], ...]  # ports that are partial in a row, and how


def _partial_mentions(rows: tuple[Row, ...]) -> dict[int, _Mentions]:
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


def _require_rows(problem: Problem) -> None:
    """Every pinned axis of every node must leave it at least one row."""
    bad = []
    for node in problem.nodes:
        for axis, placed in node.pin.placements:
            if axis in problem.mesh.names and not any(placed is row.outputs[0] for row in node.rows):
                bad.append(f"{node.what}: {axis}={placed} is pinned, but no signature has it")
    if bad:
        raise PinError(
            faults("pins that cannot be met:", bad, "leave the axis out of the pin, or state another layout")
        )
