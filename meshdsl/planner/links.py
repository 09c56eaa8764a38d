"""The nodes that tie the body of a loop or a branch to what lies outside it (see ``problem``)."""

from collections.abc import Iterable, Iterator
from functools import cache

from meshdsl.ir import Op, Value
from meshdsl.layouts.placement import B, P, Placement, Split
from meshdsl.layouts.rule import Signature
from meshdsl.planner.node import FREE, Node, Port, linking, same_layout


def _link(op: Op, uses: Iterable[tuple[Op, int]], defines: Iterable[Value], what: str, trips: int) -> Node | None:
    """A node that passes one layout from the operands it reads to the values it defines."""
    read = [(o.inputs[i], (o.id, i)) for o, i in uses]
    ports = (*(Port(v, False, at) for v, at in read if isinstance(v, Value)), *(Port(v, True) for v in defines))
    return same_layout(ports, FREE, f"{what} of {op.name} at {op.source}", True, trips) if ports else None


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
    return linking(tuple(present), rows, f"slices of {op.name} at {op.source}", trips)


@cache
def _stacks(rank: int, outer: bool, inner: bool) -> tuple[Signature, ...]:
    pairs: list[tuple[Placement, Placement]] = [(Split(i + 1), Split(i)) for i in range(rank)]
    pairs += [(placed, placed) for placed in (B, P, P("max"), P("min"))]
    return tuple(Signature((), (*[o] * outer, *[i] * inner)) for o, i in pairs)


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
        yield linking((Port(value, False, (op.id, 0)),), (Signature((), (B,)),), "predicate", trips)


def _some(node: Node | None) -> Iterator[Node]:
    if node is not None:
        yield node


LINKS = {"scan": _scan_links, "while": _while_links, "cond": _cond_links}
