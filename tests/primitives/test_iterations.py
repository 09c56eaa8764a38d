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
    (loop,) = (op for op in trace(step, (x,)).graph.ops if op.bodies)
    assert (loop.bodies[1].trips, loop.bodies[1].estimated) == (about, True)
    assert step(x).tolist() == [3, 4, 5, 6]
    assert jax.vmap(lambda n: md.expect_iterations(n, about))(x).tolist() == [0, 1, 2, 3]


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
