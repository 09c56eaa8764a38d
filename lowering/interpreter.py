"""An interpreter of graphs, parameterised by a target (a visitor): the skeleton behind every way to run a graph.

A target decides how a value is stored, how an operand is read and how an operation runs; the interpreter does the
rest, loops and conditionals included:

    env = inputs
    for op in graph:
        operands = read(op, 0), read(op, 1), ...
        env += results of the op: structured ones from the table below, all others by the target's ``run``

A body runs under the same target with an environment of its own, since it sees nothing of the graph around it but its
inputs. The planned program (``program``), the widened check (``numerics``) and the microbatched step run this way.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Graph, Literal, Op, Value
from meshdsl.ir.host import TRANSFERS
from meshdsl.ir.loops import split_operands

Arrays = tuple[jax.Array, ...]
Program = Callable[["Target", Op, Arrays], Sequence[jax.Array]]


class Target(ABC):
    """An environment for one graph, and how its operations run."""

    @abstractmethod
    def inner(self) -> "Target":
        """Returns the same target with an empty environment, for a body."""

    def enter(self, op: Op, arrays: Arrays) -> Arrays:
        """Returns the inputs of an iteration of loop ``op``, given consts, carries and slices; the same by default."""
        return arrays

    def scan(self, op: Op, arrays: Arrays) -> Arrays:
        """Returns the results of a scan; by default, iteration after iteration as ``jax.lax.scan`` runs them."""
        return plain_scan(self, op, arrays)

    def literal(self, x: Literal) -> jax.Array:
        """Returns a literal as an operand, of exactly its dtype by default."""
        return literal(x)

    @abstractmethod
    def define(self, value: Value, array: jax.Array) -> None:
        """Stores ``array`` as ``value``."""

    @abstractmethod
    def read(self, op: Op, index: int, value: Value) -> jax.Array:
        """Returns operand ``index`` of ``op``, which is ``value``, as ``op`` uses it."""

    @abstractmethod
    def run(self, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
        """Returns the results of an operation without bodies."""

    def perform(self, op: Op) -> None:
        """Reads the operands of an operation, runs it and stores its results."""
        program = STRUCTURED.get(op.name, _plain)
        _define(self, op.outputs, program(self, op, _operands(self, op)))


def run_graph(graph: Graph, arrays: Sequence[jax.Array], target: Target) -> Arrays:
    """Returns the results of ``graph`` on ``arrays``, with ``target`` as its empty environment."""
    _define(target, graph.inputs, arrays)
    run_ops(graph.ops[:-1], target)
    return _operands(target, graph.ops[-1])


def run_ops(ops: Iterable[Op], target: Target) -> None:
    """Runs operations in order, and stores their results in ``target``."""
    for op in ops:
        target.perform(op)


def _operands(target: Target, op: Op) -> Arrays:
    return tuple(operand(target, op, i) for i in range(len(op.inputs)))


def operand(target: Target, op: Op, index: int) -> jax.Array:
    """Returns an operand of ``op`` in the environment ``target``."""
    x = op.inputs[index]
    return target.literal(x) if isinstance(x, Literal) else target.read(op, index, x)


def literal(x: Literal) -> jax.Array:
    """Returns a literal as an array of exactly its dtype."""
    opaque = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    array: jax.Array = x.value if opaque else jnp.asarray(x.value, dtype=x.dtype)
    return array


def _define(target: Target, values: Sequence[Value], arrays: Sequence[jax.Array]) -> None:
    for value, array in zip(values, arrays, strict=True):
        target.define(value, array)


def _plain(target: Target, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
    return target.run(op, arrays)


def _constant(target: Target, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
    return (op.params["value"],)


def _same(target: Target, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
    return arrays


def _scan(target: Target, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
    return target.scan(op, arrays)


def plain_scan(target: Target, op: Op, arrays: Arrays) -> Arrays:
    """Returns the results of a scan, iteration after iteration."""
    (body,), operands = op.bodies, split_operands(op, arrays)
    carries = len(operands.carry)

    def step(carry: Arrays, slices: Arrays) -> tuple[Arrays, Arrays]:
        results = run_graph(body, target.enter(op, (*operands.consts, *carry, *slices)), target.inner())
        return results[:carries], results[carries:]

    options = {name: op.params[name] for name in ("reverse", "unroll") if name in op.params}
    carry, stacked = lax.scan(step, operands.carry, operands.slices, length=op.params["length"], **options)
    return (*carry, *stacked)


def _while(target: Target, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
    (condition, body), operands = op.bodies, split_operands(op, arrays)

    def holds(carry: Arrays) -> jax.Array:
        return run_graph(condition, (*operands.condition, *carry), target.inner())[0]

    def step(carry: Arrays) -> Arrays:
        return run_graph(body, target.enter(op, (*operands.consts, *carry)), target.inner())

    result: Arrays = lax.while_loop(holds, step, operands.carry)
    return result


def _cond(target: Target, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
    def branch(body: Graph) -> Callable[..., Arrays]:
        return lambda *operands: run_graph(body, operands, target.inner())

    operands = split_operands(op, arrays)
    result: Arrays = lax.switch(operands.predicate[0], [branch(body) for body in op.bodies], *operands.consts)
    return result


STRUCTURED: dict[str, Program] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "constant": _constant,
    "constrain": _same,
    **dict.fromkeys(TRANSFERS, _same),
}
