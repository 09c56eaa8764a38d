"""A reference interpreter: binds every primitive, runs loops in Python. Nothing of it is shared with lowering."""

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.ir.graph import Literal


def run(program, *args):
    """What the program computes for the step's arguments, as the step returns it."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(args)]
    with jax.disable_jit():
        return jax.tree.unflatten(program.out_tree, run_graph(program.graph, leaves))


def run_graph(graph, arrays):
    env = {v.id: x for v, x in zip(graph.inputs, arrays, strict=True)}
    for op in graph.ops:
        operands = [jnp.asarray(x.value, x.dtype) if isinstance(x, Literal) else env[x.id] for x in op.inputs]
        if op.name == "return":
            return operands
        results = STRUCTURED.get(op.name, bind)(op, operands)
        for value, array in zip(op.outputs, results, strict=True):
            assert (array.shape, array.dtype) == (value.shape, value.dtype), op.name
            env[value.id] = array
    raise AssertionError("no return")


def bind(op, operands):
    results = op.primitive.bind(*operands, **op.params)
    return results if op.primitive.multiple_results else [results]


def scan(op, operands):
    consts, carries = op.params["num_consts"], op.params["num_carry"]
    closed, carry, xs = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]
    trips = range(op.params["length"])
    rows = []
    for i in reversed(trips) if op.params["reverse"] else trips:
        results = run_graph(op.bodies[0], [*closed, *carry, *(x[i] for x in xs)])
        carry = results[:carries]
        rows.append(results[carries:])
    rows = rows[::-1] if op.params["reverse"] else rows
    empty = [jnp.zeros(v.shape, v.dtype) for v in op.outputs[carries:]]
    return [*carry, *([jnp.stack(ys) for ys in zip(*rows, strict=True)] if rows else empty)]


def loop(op, operands):
    asked, done = op.params["cond_nconsts"], op.params["cond_nconsts"] + op.params["body_nconsts"]
    carry = operands[done:]
    while run_graph(op.bodies[0], [*operands[:asked], *carry])[0]:
        carry = run_graph(op.bodies[1], [*operands[asked:done], *carry])
    return carry


def branch(op, operands):
    index = int(np.clip(operands[0], 0, len(op.bodies) - 1))
    return run_graph(op.bodies[index], operands[1:])


STRUCTURED = {"scan": scan, "while": loop, "cond": branch, "constant": lambda op, _: [jnp.asarray(op.params["value"])]}
