"""Casts that are stated to be partial sums are apart from all others."""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.ir.check import check_graph
from meshdsl.ir.graph import walk
from meshdsl.trace import trace
from meshdsl.trace.passes.duplicate import CAST, partial_casts
from tests.trace.passes.test_cleanup_passes import X


def read(step, *args):
    """Per cast of the traced step, bodies included: the axes on which it is asked to be a sum, and who reads it."""
    graph = trace(step, args).graph
    check_graph(graph)
    found = []
    for one in (graph, *(body for _, op in walk(graph) for body in op.bodies)):
        asked = partial_casts(one)
        for cast in (op for op in one.ops if op.name == CAST):
            readers = [op.name for op in one.ops if cast.outputs[0] in op.inputs]
            found.append((asked.get(cast.id), readers))
    return found


def half(x):
    return x.astype(jnp.bfloat16)


def test_one_that_nothing_else_reads_stays():
    assert read(lambda x: md.constrain(half(x), "a=P b=S(0) c=P"), X) == [(("a", "c"), ["constrain"])]


def test_other_readers_and_equal_casts_keep_one_of_their_own():
    def step(x):
        y = half(x)
        return jnp.sin(y), md.constrain(y, "a=P"), md.constrain(half(x), "b=P"), jnp.cos(half(x))

    assert sorted(read(step, X), key=str) == [(("a",), ["constrain"]), (("b",), ["constrain"]), (None, ["sin", "cos"])]


def test_the_last_of_several_statements_takes_the_cast_itself():
    def step(x):
        return md.constrain(half(x), "a=P"), md.constrain(half(x), "b=P")

    assert sorted(read(step, X)) == [(("a",), ["constrain"]), (("b",), ["constrain"])]


def test_other_layouts_and_other_operations_ask_for_nothing():
    def step(x):
        return md.constrain(half(x), "a=P(max) b=S(0) c=B"), md.constrain(jnp.sin(half(x)), "a=P")

    assert read(step, X) == [(None, ["constrain", "sin"])]


def test_in_a_loop():
    def body(total, x):
        y = half(total * x)
        return total + md.constrain(y, "a=P").astype(jnp.float32), jnp.sin(y)

    found = read(lambda x: jax.lax.scan(body, x[0], x), X)
    assert sorted(found, key=str) == [(("a",), ["constrain"]), (None, ["add"]), (None, ["sin"])]
