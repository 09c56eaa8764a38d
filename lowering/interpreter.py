"""Walking a planned graph: the one skeleton behind every target.

A target says how a value is kept, how an operand is read and how an operation runs; the walk
does the rest, loops and conditionals included:

    env = inputs
    for op in graph:
        operands = read(op, 0), read(op, 1), ...
        env += the results of the op's program: structured ones from the table below,
               all others by the target's ``run``

A body is walked by the same target with an environment of its own, because it sees nothing
of the graph around it but its inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Graph, Literal, Op, Value

Arrays = tuple[jax.Array, ...]
Program = Callable[["Target", Op, Arrays], Sequence[jax.Array]]


class Target(ABC):
    """An environment for one graph, and the way its operations run."""

    @abstractmethod
    def inner(self) -> "Target":
        """The same target with an empty environment, for a body."""

    def enter(self, body: Graph, consts: int, carries: int, arrays: Arrays) -> Arrays:
        """What a loop's body starts with, given consts, carries and slices; ``arrays`` as they are by default."""
        return arrays

    def literal(self, x: Literal) -> jax.Array:
        """A literal as an operand, of exactly its dtype by default."""
        return literal(x)

    @abstractmethod
    def define(self, value: Value, array: jax.Array) -> None:
        """Keep ``array`` as ``value``."""

    @abstractmethod
    def read(self, op: Op, index: int, value: Value) -> jax.Array:
        """Operand ``index`` of ``op``, which is ``value``, the way ``op`` reads it."""

    @abstractmethod
    def run(self, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
        """The results of an operation without bodies."""


def run_graph(graph: Graph, arrays: Sequence[jax.Array], target: Target) -> Arrays:
    """What ``graph`` returns for ``arrays``, with ``target`` as its empty environment."""
    _define(target, graph.inputs, arrays)
    for op in graph.ops[:-1]:
        _define(target, op.outputs, _run(target, op))
    return _operands(target, graph.ops[-1])


def _run(target: Target, op: Op) -> Sequence[jax.Array]:
    program = STRUCTURED.get(op.name, _plain)
    return program(target, op, _operands(target, op))


def _operands(target: Target, op: Op) -> Arrays:
    return tuple(
        target.literal(x) if isinstance(x, Literal) else target.read(op, i, x) for i, x in enumerate(op.inputs)
    )


def literal(x: Literal) -> jax.Array:
    """A literal as an array of exactly its dtype."""
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
    (body,), consts, carries = op.bodies, op.params["num_consts"], op.params["num_carry"]
    closed, carry, xs = arrays[:consts], arrays[consts : consts + carries], arrays[consts + carries :]

    def step(carry: Arrays, slices: Arrays) -> tuple[Arrays, Arrays]:
        results = run_graph(body, target.enter(body, consts, carries, (*closed, *carry, *slices)), target.inner())
        return results[:carries], results[carries:]

    options = {name: op.params[name] for name in ("reverse", "unroll") if name in op.params}
    carry, stacked = lax.scan(step, carry, xs, length=op.params["length"], **options)
    return (*carry, *stacked)


def _while(target: Target, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
    (condition, body), split = op.bodies, op.params["cond_nconsts"]
    start = split + op.params["body_nconsts"]
    asked, closed, carry = arrays[:split], arrays[split:start], arrays[start:]

    def goes_on(carry: Arrays) -> jax.Array:
        return run_graph(condition, (*asked, *carry), target.inner())[0]

    def step(carry: Arrays) -> Arrays:
        return run_graph(body, target.enter(body, len(closed), len(carry), (*closed, *carry)), target.inner())

    result: Arrays = lax.while_loop(goes_on, step, carry)
    return result


def _cond(target: Target, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
    def branch(body: Graph) -> Callable[..., Arrays]:
        return lambda *operands: run_graph(body, operands, target.inner())

    result: Arrays = lax.switch(arrays[0], [branch(body) for body in op.bodies], *arrays[1:])
    return result


STRUCTURED: dict[str, Program] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "constant": _constant,
    "constrain": _same,
}
