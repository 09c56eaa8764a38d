"""Clean-up: a number times a mask is a choice between the number and zero.

    convert_element_type(mask) * x        select_n(mask, zeros, x)

XLA reads the product so wherever it sees both together, and an infinity that the mask leaves out is then zero, where
the product as written is not a number. Whether mask and product are still together would be a matter of layouts,
so the choice is part of the program here. The gradient of a maximum is such a product.
"""

from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax import lax

from meshdsl.ir import Graph, Op, Value
from meshdsl.trace.graphs import Atom, Table, fresh_ids, in_bodies, substitute, with_ops
from meshdsl.trace.read import written


def choose_masked(graph: Graph) -> Graph:
    """The graph with products of floats and masks as choices; masks are left to whoever else reads them."""
    return _chosen(graph, fresh_ids(graph))


def _chosen(graph: Graph, ids: Iterator[int]) -> Graph:
    table: Table = {}
    masks: dict[int, Atom] = {}  # by value: the booleans that it was cast from
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(lambda body: _chosen(body, ids), substitute(op, table))
        if op.name == "convert_element_type" and op.inputs[0].dtype == np.bool_:
            masks[op.outputs[0].id] = op.inputs[0]
        found = _masked(op, masks)
        if found:
            made, table[op.outputs[0].id] = written(_choice, found, ids, op)
            ops += made
        else:
            ops.append(op)
    return with_ops(graph, ops)


def _masked(op: Op, masks: Mapping[int, Atom]) -> tuple[Atom, Atom] | None:
    """Mask and number of a product that has both, of one shape."""
    if op.name != "mul" or not jax.numpy.issubdtype(op.outputs[0].dtype, np.inexact):
        return None
    for mask, x in (op.inputs, op.inputs[::-1]):
        if isinstance(mask, Value) and mask.id in masks and x.shape == mask.shape:
            return masks[mask.id], x
    return None


def _choice(mask: jax.Array, x: jax.Array) -> jax.Array:
    return lax.select(mask, x, lax.full_like(x, 0))
