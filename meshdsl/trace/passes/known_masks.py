"""Selections whose mask is known when the step is traced: the case that is never taken is no part of the step.

    m = [[False, False], ...]               a row of a table of ticks, all alike
    y = select_n m[t] a b            y = a

Compilers fold such selections, and drop what led to ``b``, with its collectives; a plan has to do so first. A mask is
known if all elements of the array that it is made of are equal, through reshapes, slices and casts, and as what a loop
reads of that array in every iteration.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.index import producers
from meshdsl.ir.loops import PortRole, loop_ports
from meshdsl.ir.rewrite import Table, substitute, with_ops

_PASSING = frozenset("squeeze reshape broadcast_in_dim transpose slice dynamic_slice convert_element_type".split())
_READ = frozenset({PortRole.CONST, PortRole.SLICE, PortRole.OPERAND})


def fold_known_selects(graph: Graph) -> Graph:
    """Returns the graph with the case that is taken in place of each ``select_n`` with a known mask."""
    return _folded(graph, {})


def _folded(graph: Graph, given: Mapping[int, Any]) -> Graph:
    """The folded graph.

    Args:
      given: the element of inputs whose elements are all equal, by id.
    """
    made, table, ops = producers(graph), Table(), list[Op]()
    for op in graph.ops:
        op = substitute(op, table)
        if op.bodies:
            op = _with_folded_bodies(op, made, given)
        known = _element(op.inputs[0], made, given) if op.name == "select_n" else None
        if known is None:
            ops.append(op)
        else:
            which = int(np.asarray(known).astype(op.inputs[0].dtype))
            table[op.outputs[0].id] = op.inputs[1 + which]
    return with_ops(graph, ops)


def _with_folded_bodies(op: Op, made: Mapping[int, Op], given: Mapping[int, Any]) -> Op:
    inside: list[dict[int, Any]] = [{} for _ in op.bodies]
    for port in loop_ports(op):
        if port.role in _READ and (known := _element(op.inputs[port.operand], made, given)) is not None:
            for body, i in port.inputs:
                inside[body][op.bodies[body].inputs[i].id] = known
    return replace(op, bodies=tuple(_folded(body, known) for body, known in zip(op.bodies, inside, strict=True)))


def _element(x: Atom, made: Mapping[int, Op], given: Mapping[int, Any]) -> Any:
    """The element that a mask has everywhere; None if that is not known."""
    while isinstance(x, Value) and x.id not in given:
        op = made.get(x.id)
        if op is None or op.name not in (*_PASSING, "constant"):
            return None
        if op.name == "constant":
            return _common(op.params["value"])
        x = op.inputs[0]
    return x.value if isinstance(x, Literal) else given[x.id]


def _common(array: Any) -> Any:
    """The element of an array of booleans or integers if all are equal, else None."""
    array = np.asarray(array)
    is_mask = array.dtype.kind in "biu" and array.size > 0
    return array.flat[0] if is_mask and (array == array.flat[0]).all() else None
