"""Clean-up: a cast whose result is stated to be a partial sum is made for the statement alone.

    half = gradient.astype(bfloat16)
    sent = md.constrain(half, "data=P")      # every device casts its part, and the parts are summed in bfloat16
    size = jnp.sum(half ** 2)                # of the cast sum, as anywhere else

A sum is not moved across a cast that rounds, but such a statement asks for it. It speaks of ``sent``: whoever reads
``half`` otherwise, or has written the same cast elsewhere, is to get the numbers it would get without. So the two are
two casts. Merging equal expressions would make one of them again, so this comes after it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from meshdsl.ir import Graph, Op, Value
from meshdsl.layouts.placement import P
from meshdsl.trace.graphs import fresh_ids, makers_of, new_value, value_ids, with_ops

CAST = "convert_element_type"


def part_casts(graph: Graph) -> Graph:
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
