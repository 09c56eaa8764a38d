"""``md.expect_iterations``: loops are planned to run as often as stated."""

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.trace import trace


@pytest.mark.parametrize("about", [0, 3])
def test_a_while_runs_as_often_as_stated(about):
    def step(x):
        return jax.lax.fori_loop(1, md.expect_iterations(jnp.max(x), about), lambda i, y: y + i, x)

    x = jnp.arange(4)
    program = trace(step, (x,))
    (loop,) = (op for op in program.graph.ops if op.bodies)
    assert not program.warnings
    assert (loop.bodies[1].trips, loop.bodies[1].estimated) == (about, True)
    assert step(x).tolist() == [3, 4, 5, 6]
    assert jax.vmap(lambda n: md.expect_iterations(n, about))(x).tolist() == [0, 1, 2, 3]


def test_an_expectation_that_no_loop_takes_is_noted():
    def step(x):
        return jax.lax.fori_loop(0, md.expect_iterations(jnp.max(x), 3) + 1, lambda i, y: y + i, x)

    (note,) = trace(step, (jnp.arange(4),)).warnings
    assert note.startswith("expect_iterations at test_iterations.py:") and "says nothing about any loop" in note


@pytest.mark.parametrize(
    "x, about, text",
    [
        (1, -1, "about=-1 is not a number of iterations; give an integer from 0 on"),
        (1.5, 1, "1.5 is a float, not a scalar integer; give"),
    ],
    ids=["negative", "float"],
)
def test_what_is_no_number_of_iterations_is_refused(x, about, text):
    with pytest.raises(md.ArgumentError, match=text):
        md.expect_iterations(x, about)
