"""Duplication: every consumer of a cheap constant, and every constrained partial cast, gets a producer of its own.

Both passes undo what ``cse`` does, so they come after it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.index import consumers, producers
from meshdsl.ir.loops import loop_ports, with_ports
from meshdsl.ir.rewrite import (
    Table,
    filtered,
    fresh_ids,
    in_bodies,
    new_value,
    substitute,
    value_ids,
    with_ops,
)
from meshdsl.layouts.placement import P

# ---- Cheap constants -------------------------------------------------------------------------------------------------
# A causal mask is a few operations on no input. Shared by all layers it would couple layers with nothing else in
# common: the planner would have to choose one layout for all of their masks, or pay for resharding. Duplicated, each
# consumer has a mask in the layout that suits it at almost no cost; where layouts agree, XLA merges the copies. A loop
# body is a consumer like any other: autodiff moves masks out of a scan over layers, and they are moved back here.
# Nor is a constant that is computed in place ever sent: a compiler folds it, merges equal ones, and would send less
# than planned.


LONGEST = 6  # operations in a chain that is duplicated
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "select_n", "clamp", "is_finite")
_ARITHMETIC = ("add", "sub", "mul", "div", "rem", "neg", "max", "min", "abs", "sign", "floor", "integer_pow", "square")
_FUNCTIONS = ("exp", "exp2", "log", "pow", "sqrt", "rsqrt", "sin", "cos", "tanh")
_SHAPES = ("broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "concatenate", "rev", "expand_dims")
_OTHERS = ("iota", "convert_element_type", "dynamic_update_slice")  # the last one in weights of real FFTs' gradients
CHEAP = frozenset({*_COMPARE, *_ARITHMETIC, *_FUNCTIONS, *_SHAPES, *_OTHERS})


def clone_cheap_constants(graph: Graph) -> Graph:
    """Returns the graph with a copy of every chain of cheap operations on no input for each of its consumers."""
    return _cloned(graph, _Cheap(fresh_ids(graph)))


class _Cheap:
    """The cheap constants of one graph: by value id, producer and length of the longest chain that ends there."""

    def __init__(self, ids: Iterator[int]) -> None:
        self.ids = ids
        self.made: dict[int, tuple[Op, int]] = {}

    def add(self, op: Op) -> bool:
        """Records the operation if it is a cheap constant, and returns whether it is."""
        if op.name not in CHEAP or op.effects:
            return False
        operands = value_ids(op.inputs)
        if not self.made.keys() >= set(operands):
            return False
        length = 1 + max((self.made[x][1] for x in operands), default=0)
        self.made.update({v.id: (op, length) for v in op.outputs if length <= LONGEST})
        return length <= LONGEST

    def holds(self, x: Atom) -> bool:
        """Whether ``x`` can be computed in place."""
        return isinstance(x, Literal) or x.id in self.made

    def copies(self, x: Atom, table: Table) -> list[Op]:
        """Returns copies of the operations that produce ``x``, operands first; adds their results to ``table``."""
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


# ---- Partial casts ---------------------------------------------------------------------------------------------------
# A cast whose result is constrained to be a partial sum is a cast of its own.
#
#     half = gradient.astype(bfloat16)
#     sent = md.constrain(half, "data=P")      # every device casts its part, and the parts are summed in bfloat16
#     size = jnp.sum(half ** 2)                # of the cast sum, as anywhere else
#
# A sum may not be moved across a cast that rounds, unless the user constrains the result so. The constraint is on
# ``sent``: other consumers of ``half``, and equal casts elsewhere, must get the numbers that they would get without it.


CAST = "convert_element_type"


def split_partial_casts(graph: Graph) -> Graph:
    """Returns the graph, and its bodies, with a cast of its own for every constraint of its result to a partial sum."""
    return _with_own_casts(graph, fresh_ids(graph))


def partial_casts(graph: Graph) -> dict[int, tuple[str, ...]]:
    """Returns, by op id of a cast, the axes on which its only consumer constrains it to a partial sum."""
    constraints = [op for op in graph.ops if op.name == "constrain" and _sums(op)]
    if not constraints:
        return {}
    makers, uses = producers(graph), _use_counts(graph)
    found = ((_cast(op, makers), op) for op in constraints)
    return {cast.id: _sums(op) for cast, op in found if cast is not None and uses[cast.outputs[0].id] == 1}


def _with_own_casts(graph: Graph, ids: Iterator[int]) -> Graph:
    makers, uses = producers(graph), _use_counts(graph)
    ops: list[Op] = []
    for op in graph.ops:
        cast = _cast(op, makers)
        if cast is not None and uses[cast.outputs[0].id] > 1:
            uses[cast.outputs[0].id] -= 1
            own = new_value(cast.outputs[0], ids)
            ops.append(replace(cast, outputs=(own,)))
            op = replace(op, inputs=(own,))
        ops.append(replace(op, bodies=tuple(_with_own_casts(body, ids) for body in op.bodies)) if op.bodies else op)
    return with_ops(graph, ops)


def _cast(op: Op, makers: dict[int, Op]) -> Op | None:
    """The cast whose result ``op`` constrains to a partial sum."""
    read = op.inputs[0] if op.name == "constrain" and _sums(op) else None
    made = makers.get(read.id) if isinstance(read, Value) else None
    return made if made is not None and made.name == CAST else None


def _sums(constraint: Op) -> tuple[str, ...]:
    return tuple(axis for axis, placed in constraint.params["layout"].placements if placed is P)


def _use_counts(graph: Graph) -> Counter[int]:
    """By value id, its number of uses."""
    return Counter({value: len(ops) for value, ops in consumers(graph).items()})
