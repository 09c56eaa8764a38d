import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir.graph import walk
from meshdsl.layouts.roundness import Roundness
from meshdsl.trace import trace
from meshdsl.trace.passes import run_passes

X = jnp.linspace(-1, 1, 32).reshape(8, 4)


def names(step, *args):
    graph = run_passes(trace(step, args).graph, Roundness((1,)))
    return [op.name for _, op in walk(graph)]


def in_every_row(mask):
    def step(x):
        return jax.lax.scan(lambda y, m: (jnp.where(m, jnp.sin(y), y + x), None), x, mask)[0]

    return step


@pytest.mark.parametrize("value", [False, True])
def test_a_case_that_is_never_taken_is_dropped(value):
    mask = np.full((1, 1), value)

    def step(x):
        return jnp.where(jnp.asarray(mask)[0, 0], jnp.sin(x), x * 2)

    assert ("sin" in names(step, X), "mul" in names(step, X)) == (value, not value)
    assert "select_n" not in names(step, X)


@pytest.mark.parametrize("value", [False, True])
def test_a_mask_that_is_the_same_in_every_iteration_is_known(value):
    found = names(in_every_row(np.full(5, value)), X)
    assert ("sin" in found, "select_n" in found) == (value, False)


def test_other_masks_stay():
    assert "select_n" in names(in_every_row(np.arange(5) > 2), X)
    assert "select_n" in names(lambda x: jnp.where(x > 0, x, jnp.sin(x)), X)
    assert "select_n" in names(lambda x: jnp.where(np.arange(4) > 1, x, jnp.sin(x)), X)


def test_numbers_are_those_of_the_step():
    for mask in (np.zeros(5, bool), np.ones(5, np.int32), np.full(5, 2)):
        step = in_every_row(mask > 0)
        np.testing.assert_allclose(md.parallelize(step, md.Mesh(data=8))(X), step(X), rtol=1e-6)
