"""Clean-up: cheap constants are computed anew for every reader.

A causal mask is a few operations on no input at all. Shared by every layer it would join
layers that have nothing else in common: the planner would have to give one layout to all of
their masks, or to pay for moving one. Cloned, each reader has a mask in the layout it likes,
for next to nothing; where layouts agree XLA merges them again. A loop's body is a reader like
any other: autodiff moves masks out of a scan over layers, and here they go back in.
A constant that is made on the spot is not sent either: a compiler works out what it becomes,
makes equal ones once, and would send less than planned.

This pass comes last, because merging equal expressions undoes it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.loops import loop_ports, with_ports
from meshdsl.ir.rewrite import (
    Table,
    filtered,
    fresh_ids,
    in_bodies,
    makers_of,
    new_value,
    substitute,
    value_ids,
    with_ops,
)
from meshdsl.layouts.placement import P

# ---- Clone -----------------------------------------------------------------------------------------------------------


LONGEST = 6
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "select_n", "clamp", "is_finite")
_ARITHMETIC = ("add", "sub", "mul", "div", "rem", "neg", "max", "min", "abs", "sign", "floor", "integer_pow", "square")
_FUNCTIONS = ("exp", "exp2", "log", "pow", "sqrt", "rsqrt", "sin", "cos", "tanh")
_SHAPES = ("broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "concatenate", "rev", "expand_dims")
CHEAP = frozenset({"iota", "convert_element_type", *_COMPARE, *_ARITHMETIC, *_FUNCTIONS, *_SHAPES})


def clone_cheap_constants(graph: Graph) -> Graph:
    """The graph with a copy of every chain of cheap operations on no input for each of its readers."""
    return _cloned(graph, _Cheap(fresh_ids(graph)))


class _Cheap:
    """The cheap constants of one graph: by value, what makes it and the longest chain that ends there."""

    def __init__(self, ids: Iterator[int]) -> None:
        self.ids = ids
        self.made: dict[int, tuple[Op, int]] = {}

    def add(self, op: Op) -> bool:
        """Take the operation in if it is a cheap constant."""
        if op.name not in CHEAP or op.effects:
            return False
        operands = value_ids(op.inputs)
        if not self.made.keys() >= set(operands):
            return False
        length = 1 + max((self.made[x][1] for x in operands), default=0)
        self.made.update({v.id: (op, length) for v in op.outputs if length <= LONGEST})
        return length <= LONGEST

    def holds(self, x: Atom) -> bool:
        """Whether ``x`` can be made on the spot."""
        return isinstance(x, Literal) or x.id in self.made

    def copies(self, x: Atom, table: Table) -> list[Op]:
        """Copies of the operations that make ``x``, operands first; the table then leads to the copies' results."""
        if isinstance(x, Literal) or x.id in table or x.id not in self.made:
            return []
        op, _ = self.made[x.id]
        before = [copy for y in op.inputs for copy in self.copies(y, table)]
        outputs = tuple(new_value(v, self.ids) for v in op.outputs)
        table.update({v.id: w for v, w in zip(op.outputs, outputs, strict=True)})
        return [*before, replace(substitute(op, table), outputs=outputs)]


def _cloned(graph: Graph, cheap: _Cheap) -> Graph:
    ops: list[Op] = []
    for op in graph.ops:
        if cheap.add(op):
            continue
        op = _with_constants_inside(op, cheap) if op.bodies else op
        table: Table = {}
        for x in op.inputs:
            ops += cheap.copies(x, table)
        op = substitute(op, table)
        ops.append(in_bodies(lambda body: _cloned(body, _Cheap(cheap.ids)), op))
    return with_ops(graph, ops)


def _with_constants_inside(op: Op, cheap: _Cheap) -> Op:
    """The loop or conditional whose bodies compute the cheap constants that it used to pass to them."""
    ports = list(loop_ports(op))
    inside = [port.invariant and cheap.holds(op.inputs[port.operand]) for port in ports]
    moved = [(where, op.inputs[port.operand]) for port in filtered(ports, inside) for where in port.inputs]
    bodies = []
    for which, body in enumerate(op.bodies):
        copied: Table = {}
        table: Table = {}
        made: list[Op] = []
        for (b, i), x in moved:
            if b == which:
                made += cheap.copies(x, copied)
                table[body.inputs[i].id] = copied[x.id] if isinstance(x, Value) else x
        bodies.append(with_ops(body, (*made, *(substitute(inner, table) for inner in body.ops))))
    return with_ports(op, filtered(ports, (not moves for moves in inside)), bodies)


# ---- Casts -----------------------------------------------------------------------------------------------------------
# Clean-up: a cast whose result is stated to be a partial sum is made for the statement alone.
#
#     half = gradient.astype(bfloat16)
#     sent = md.constrain(half, "data=P")      # every device casts its part, and the parts are summed in bfloat16
#     size = jnp.sum(half ** 2)                # of the cast sum, as anywhere else
#
# A sum is not moved across a cast that rounds, but such a statement asks for it. It speaks of ``sent``: whoever reads
# ``half`` otherwise, or has written the same cast elsewhere, is to get the numbers it would get without. So the two are
# two casts. Merging equal expressions would make one of them again, so this comes after it.


CAST = "convert_element_type"


def split_partial_casts(graph: Graph) -> Graph:
    """The graph, and its bodies, with a cast of its own for every statement that the result of one is a partial sum."""
    return _parted(graph, fresh_ids(graph))


def asked_casts(graph: Graph) -> dict[int, tuple[str, ...]]:
    """By the id of a cast of this graph, the axes on which its result, which nobody else reads, is stated a sum."""
    stated = [op for op in graph.ops if op.name == "constrain" and _sums(op)]
    if not stated:
        return {}
    makers, readers = makers_of(graph), _readers(graph)
    found = ((_cast(op, makers), op) for op in stated)
    return {cast.id: _sums(op) for cast, op in found if cast is not None and readers[cast.outputs[0].id] == 1}


def _parted(graph: Graph, ids: Iterator[int]) -> Graph:
    makers, readers = makers_of(graph), _readers(graph)
    ops: list[Op] = []
    for op in graph.ops:
        cast = _cast(op, makers)
        if cast is not None and readers[cast.outputs[0].id] > 1:
            readers[cast.outputs[0].id] -= 1
            own = new_value(cast.outputs[0], ids)
            ops.append(replace(cast, outputs=(own,)))
            op = replace(op, inputs=(own,))
        ops.append(replace(op, bodies=tuple(_parted(body, ids) for body in op.bodies)) if op.bodies else op)
    return with_ops(graph, ops)


def _cast(op: Op, makers: dict[int, Op]) -> Op | None:
    """The cast whose result an operation states to be a partial sum."""
    read = op.inputs[0] if op.name == "constrain" and _sums(op) else None
    made = makers.get(read.id) if isinstance(read, Value) else None
    return made if made is not None and made.name == CAST else None


def _sums(stated: Op) -> tuple[str, ...]:
    return tuple(axis for axis, placed in stated.params["layout"].placements if placed is P)


def _readers(graph: Graph) -> Counter[int]:
    """How often every value is read."""
    return Counter([x for op in graph.ops for x in value_ids(op.inputs)])
