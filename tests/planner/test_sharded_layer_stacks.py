"""Stacks that lie split by layer: exchanged once, then a layer per trip."""

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from tests.planner.test_loop_pitfalls import array, checked

MESH = md.Mesh(x=4, y=2)


def layers(ws, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)


def trained_layers(ws, x):
    return ws - 0.1 * jax.grad(layers)(ws, x)


STACK = (array(0, 8, 128, 128), array(1, 64, 128))


def gathered_stacks(plan):
    return [c for c in plan.collectives if c.kind == "all-gather" and "x" in c.axes and c.shape == STACK[0].shape]


def test_a_stack_split_by_layer_is_never_gathered():
    """T14: at most one layer is whole on a device, one trip long."""
    plan = checked(layers, STACK, {"ws": "x=S(0) y=B", "x": "x=S(0)"})
    assert not gathered_stacks(plan)
    assert plan.memory < STACK[0].nbytes
    assert any(note.startswith("ws stays split by layer over x") for note in plan.notes)


def test_nor_for_its_gradient():
    assert not gathered_stacks(checked(trained_layers, STACK, {"ws": "x=S(0) y=B", "x": "x=S(0)"}))


def test_a_stack_cast_inside_a_loop_of_microbatches_is_not_gathered_either():
    def step(ws, xs):
        def add(total, x):
            return total + jax.grad(lambda ws: layers(ws.astype(jnp.bfloat16).astype(jnp.float32), x))(ws), None

        return ws - 0.1 * jax.lax.scan(add, jnp.zeros_like(ws), xs)[0]

    plan = md.parallelize(step, MESH, {"ws": "x=S(0)", "xs": "x=S(1)"}).plan(STACK[0], array(1, 4, 64, 128))
    assert not gathered_stacks(plan)
    assert any("never gathers all of it" in note for note in plan.notes)


@pytest.mark.parametrize("layers, size", [(4, 16), (8, 16), (8, 32), (4, 64)])
@pytest.mark.parametrize("pins", [{"ws": "x=S(0)"}, {"ws": "x=S(0)", "x": "y=S(0)"}], ids=str)
def test_not_even_on_its_way_where_latency_is_all_that_counts(layers, size, pins):
    """One gather, after which each device cuts out its columns, would be the fastest."""
    plan = md.parallelize(trained_layers, MESH, pins).plan(array(0, layers, size, size), array(1, size, size))
    stacks = [c for c in plan.collectives if c.kind == "all-gather" and c.shape == (layers, size, size)]
    assert not any("x" in c.axes for c in stacks)
    assert any(note.startswith("ws stays split by layer over x") for note in plan.notes)


def test_who_asks_for_a_whole_stack_gets_it():
    def step(ws, x):
        return trained_layers(ws, x), md.constrain(ws, "x=B")

    plan = md.parallelize(step, MESH, {"ws": "x=S(0)"}).plan(array(0, 8, 64, 64), array(1, 64, 64))
    assert any(c.kind == "all-gather" and c.shape == (8, 64, 64) for c in plan.collectives)


def test_a_stack_of_vectors_may_be_gathered():
    def step(scales, x):
        return jax.lax.scan(lambda x, s: (jnp.tanh(x * s), None), x, scales)[0]

    plan = checked(step, (array(0, 8, 16), array(1, 64, 16)), {"scales": "x=S(0) y=B", "x": "x=S(0) y=B"})
    assert [(c.kind, c.trips) for c in plan.collectives] == [("all-gather", 1)]
    assert plan.notes == ()
