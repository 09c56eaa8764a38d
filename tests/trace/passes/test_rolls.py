"""Pieces of one array put together again are found, with their gradients, and nothing else is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshdsl.ir.graph import walk
from meshdsl.trace import trace
from tests.trace.interpreter import run

X = jnp.sin(jnp.arange(48.0)).reshape(6, 8)


def halves(x):
    return jnp.concatenate([-x[:, 4:], x[:, :4]], 1)


def split_halves(x):
    a, b = jnp.split(x, 2, 1)
    return jnp.concatenate([-b, a], 1)


def three(x):
    return jnp.concatenate([x[:, 5:] * 2.0, -x[:, :2], x[:, 2:5]], 1)


def in_place(x):
    return jnp.concatenate([-x[:, :3], x[:, 3:]], 1)


def looped(x):
    return jax.lax.scan(lambda c, _: (jnp.roll(c, 1, 0), None), x, None, length=3)[0]


# step -> rolls in it, and in its gradient
ROLLS = {
    "halves": (halves, 1, 1),
    "split": (split_halves, 1, 1),
    "three": (three, 1, 1),
    "in place": (in_place, 0, 0),
    "roll": (lambda x: jnp.roll(x, 3, 1), 1, 1),
    "two dims": (lambda x: jnp.roll(x, (2, -1), (0, 1)), 2, 2),
    "looped": (looped, 1, 1),
    "cast": (lambda x: jnp.concatenate([x[3:].astype(jnp.bfloat16), x[:3].astype(jnp.bfloat16)], 0), 1, 1),
}
CUTTING = {"slice", "split", "pad", "concatenate"}


def names(graph):
    return [op.name for _, op in walk(graph)]


@pytest.mark.parametrize("name", ROLLS)
@pytest.mark.parametrize("gradient", [False, True])
def test_found(name, gradient):
    step, rolls, back = ROLLS[name]
    whole = jax.grad(lambda x: jnp.sum(step(x) * X.astype(step(x).dtype))) if gradient else step
    program = trace(whole, (X,))
    assert names(program.graph).count("roll") == (back if gradient else rolls)
    assert not CUTTING & set(names(program.graph))
    np.testing.assert_array_equal(run(program, X), whole(X))


def test_pieces_in_their_places_are_the_array():
    assert names(trace(lambda x: jnp.sin(jnp.concatenate([x[:2], x[2:]], 0)), (X,)).graph) == ["sin", "return"]


OTHERS = {
    "two arrays": lambda x: jnp.concatenate([x[:3], jnp.sin(x)[3:]], 0),
    "overlap": lambda x: jnp.concatenate([x[2:], x[:2], x[:1]], 0)[:6],
    "not all": lambda x: jnp.concatenate([x[3:5], x[:3]], 0),
    "swapped": lambda x: jnp.concatenate([x[2:4], x[:2], x[4:]], 0),
    "strided": lambda x: jnp.concatenate([x[::2], x[1::2]], 0),
    "another dim": lambda x: jnp.concatenate([x[:3], x[3:]], 1),
    "padded by ones": lambda x: (
        jnp.pad(x[3:], ((0, 3), (0, 0)), constant_values=1.0) + jnp.pad(x[:3], ((3, 0), (0, 0)))
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name):
    program = trace(OTHERS[name], (X,))
    assert "roll" not in names(program.graph)
    np.testing.assert_array_equal(run(program, X), OTHERS[name](X))


def test_a_roll_belongs_to_the_line_of_its_pieces():
    program = trace(jax.grad(lambda x: jnp.sum(jnp.sin(halves(x)))), (X,))
    made = [op for op in program.graph.ops if op.name in ("roll", "select_n")]
    assert {op.source.function for op in made} == {"halves"}
    assert [op.phase for op in made] == ["forward", "forward", "backward", "backward"]


def test_a_sum_of_more_gradients_than_python_may_nest_calls():
    """A residual chain of many layers, each an equation of its own."""

    def step(x):
        for _ in range(1100):
            x = x + jnp.sin(x)
        return x

    graph = trace(jax.grad(lambda x: jnp.sum(step(x))), (jax.ShapeDtypeStruct((8,), jnp.float32),)).graph
    assert sum(op.name == "add_any" for op in graph.ops) == 1100
