"""Choices that are known when the step is traced: the case that is never taken is no part of the step.

    m = [[False, False], ...]               a row of a table of ticks, all alike
    y = select_n m[t] a b            y = a
    y = cond 1 f g x                 y = g x
    y = while False f x              y = x

Compilers fold such selections, conditionals and loops, and drop what led to ``b``, with its collectives; a plan has to
do so first. A choice is known if it is one number, computed from constants alone (``jnp.digitize`` compares the ends of
its bins), or if all elements of the array that it is made of are equal; through reshapes, slices and casts, and as what
a loop reads of that array in every iteration.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.loops import PortRole, loop_ports
from meshdsl.ir.rewrite import Table, substitute, with_ops
from meshdsl.trace.passes.known_values import KnownValues
from meshdsl.trace.passes.loop_invariants import inlined

_PASSING = frozenset("squeeze reshape broadcast_in_dim transpose slice dynamic_slice convert_element_type".split())
_READ = frozenset({PortRole.CONST, PortRole.SLICE, PortRole.OPERAND})


def fold_known_choices(graph: Graph) -> Graph:
    """Returns the graph with the case that is taken in place of each known choice."""
    return _folded(graph, KnownValues(), {})


def _folded(graph: Graph, known: KnownValues, given: Mapping[int, Any]) -> Graph:
    """The folded graph.

    Args:
      given: the element of inputs whose elements are all equal, by id.
    """
    table, ops = Table(), list[Op]()
    for op in graph.ops:
        op = substitute(op, table)
        known.enter(op)
        if op.bodies:
            op = _with_folded_bodies(op, known, given)
        which = _element(_decider(op), known, given) if op.name in ("select_n", "cond", "while") else None
        if which is None or (op.name == "while" and which):
            ops.append(op)
        elif op.name == "while":
            table.update({v.id: x for v, x in zip(op.outputs, op.inputs[-len(op.outputs) :], strict=True)})
        elif op.name == "cond":
            ops += inlined(op, int(np.clip(int(which), 0, len(op.bodies) - 1)), table)
        else:
            table[op.outputs[0].id] = op.inputs[1 + int(np.asarray(which).astype(op.inputs[0].dtype))]
    return with_ops(graph, ops)


def _decider(op: Op) -> Atom:
    """What decides which case is taken, or whether a loop goes on."""
    return op.bodies[0].returned[0] if op.name == "while" else op.inputs[0]


def _with_folded_bodies(op: Op, known: KnownValues, given: Mapping[int, Any]) -> Op:
    inside: list[dict[int, Any]] = [{} for _ in op.bodies]
    for port in loop_ports(op):
        if port.role in _READ and (element := _element(op.inputs[port.operand], known, given)) is not None:
            for body, i in port.inputs:
                inside[body][op.bodies[body].inputs[i].id] = element
    bodies = zip(op.bodies, inside, strict=True)
    return replace(op, bodies=tuple(_folded(body, known, elements) for body, elements in bodies))


def _element(x: Atom, known: KnownValues, given: Mapping[int, Any]) -> Any:
    """The element that the operand of a choice has everywhere; None if that is not known."""
    while isinstance(x, Value) and x.id not in given:
        op = known.makers.get(x.id)
        if op is not None and op.name == "constant":
            return _common(op.params["value"])
        if op is None or op.name not in _PASSING:
            return _common(known.value(x)) if prod(x.shape) == 1 else None
        x = op.inputs[0]
    return x.value if isinstance(x, Literal) else given[x.id]


def _common(array: Any) -> Any:
    """The element of an array of booleans or integers if all are equal, else None."""
    array = np.asarray(array)
    is_mask = array.dtype.kind in "biu" and array.size > 0
    return array.flat[0] if is_mask and (array == array.flat[0]).all() else None
