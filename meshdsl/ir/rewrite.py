"""Helpers of passes over a graph: substitution, producers, copies, fresh ids.

A pass creates new operations and graphs but keeps the values, so its only state is a table from value ids to the atoms
that replace them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from meshdsl.ir.graph import Atom, Graph, Op, Value

T = TypeVar("T")
Table = dict[int, Atom]


def substitute(op: Op, table: Table) -> Op:
    """Returns the operation with its operands replaced by the table."""
    if table.keys().isdisjoint(value_ids(op.inputs)):
        return op
    return op.between(tuple([look_up(x, table) for x in op.inputs]), op.outputs)


def look_up(x: Atom, table: Table) -> Atom:
    """Returns the replacement of ``x``, by default ``x``."""
    return table.get(x.id, x) if isinstance(x, Value) else x


def values(atoms: Iterable[Atom]) -> Iterator[Value]:
    """Returns the atoms that are values."""
    return (x for x in atoms if isinstance(x, Value))


def value_ids(atoms: Iterable[Atom]) -> list[int]:
    """Returns the ids of the atoms that are values."""
    return [x.id for x in atoms if isinstance(x, Value)]


def origin(x: Value, makers: Mapping[int, Op], through: Callable[[Value], bool] = lambda _: True) -> Value:
    """Returns the value that a stack was computed from by unary operations on layers, as far as ``through`` is true."""
    while x.id in makers and through(x):
        read = list(values(makers[x.id].inputs))
        if len(read) != 1 or not read[0].shape or read[0].shape[:1] != x.shape[:1]:
            break
        x = read[0]
    return x


def in_bodies(rewrite: Callable[[Graph], Graph], op: Op) -> Op:
    """Returns the operation with its bodies rewritten."""
    return replace(op, bodies=tuple(map(rewrite, op.bodies))) if op.bodies else op


def with_each_op(graph: Graph, rewrite: Callable[[Op], Op]) -> Graph:
    """Returns the graph with every operation rewritten, in bodies too: the same graph if each is what it was.

    Args:
      rewrite: takes an operation whose bodies are rewritten already.
    """

    def inside(op: Op) -> Op:
        bodies = [with_each_op(body, rewrite) for body in op.bodies]
        return rewrite(op if _are_same(bodies, op.bodies) else replace(op, bodies=tuple(bodies)))

    ops = list(map(inside, graph.ops))
    return graph if _are_same(ops, graph.ops) else with_ops(graph, ops)


def _are_same(items: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences of one length hold the same objects."""
    return all(x is y for x, y in zip(items, others, strict=True))


def with_ops(graph: Graph, ops: Iterable[Op]) -> Graph:
    """Returns the graph with other operations."""
    return replace(graph, ops=tuple(ops))


def returning(graph: Graph, atoms: Iterable[Atom]) -> Graph:
    """Returns the graph with other results."""
    return with_ops(graph, (*graph.ops[:-1], replace(graph.ops[-1], inputs=tuple(atoms))))


def copied(graph: Graph) -> Graph:
    """Returns the graph with values and operations of its own, which can be numbered anew."""
    table: Table = {}

    def own(value: Value) -> Value:
        made = table[value.id] = replace(value)
        return made

    inputs, ops = tuple(map(own, graph.inputs)), list[Op]()
    for op in graph.ops:
        read = tuple([look_up(x, table) for x in op.inputs])
        ops.append(replace(op, inputs=read, outputs=tuple(map(own, op.outputs)), bodies=tuple(map(copied, op.bodies))))
    return replace(graph, inputs=inputs, ops=tuple(ops))


def broadcast_params(shape: Sequence[int], dims: Sequence[int]) -> dict[str, Any]:
    """Returns the parameters of a ``broadcast_in_dim`` to ``shape`` whose dims ``dims`` are those of the operand."""
    return {"shape": tuple(shape), "broadcast_dimensions": tuple(dims), "sharding": None}


def filtered(items: Iterable[T], mask: Iterable[bool]) -> tuple[T, ...]:
    """Returns the items where the mask is true."""
    return tuple(x for x, keep in zip(items, mask, strict=True) if keep)


def new_value(like: Value, ids: Iterator[int]) -> Value:
    """Returns a new value of the same shape and dtype."""
    return Value(next(ids), like.shape, like.dtype)


def fresh_ids(graph: Graph) -> Iterator[int]:
    """Returns an iterator of ids that no value of the graph has."""
    return count(1 + max([v.id for v in defined(graph)], default=-1))


def defined(graph: Graph) -> Iterator[Value]:
    """Yields the values defined in a graph and its bodies."""
    yield from graph.inputs
    for op in graph.ops:
        yield from op.outputs
        for body in op.bodies:
            yield from defined(body)


def renumber(graph: Graph) -> None:
    """Numbers values and operations in the order of the text, so that equal programs have equal texts."""
    _number(graph, count(), count())


def _number(graph: Graph, values: Iterator[int], ops: Iterator[int]) -> None:
    for value in graph.inputs:
        value.id = next(values)
    for op in graph.ops:
        op.id = next(ops)
        for body in op.bodies:
            _number(body, values, ops)
        for value in op.outputs:
            value.id = next(values)
