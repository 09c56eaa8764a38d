import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir.graph import walk
from meshdsl.layouts.roundness import Roundness
from meshdsl.trace import trace
from meshdsl.trace.passes import run_passes
from tests.fuzz.generator import SLOW_DEVICES

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


@pytest.mark.parametrize("bins", [[0.5, 1.5], [1.5, 0.5]])
def test_a_comparison_of_constants_is_known(bins):
    """``jnp.digitize`` also searches the reversed bins, in case they fall: its collectives would be planned in vain."""

    def step(x):
        return jnp.digitize(x, jnp.asarray(bins))

    x = jnp.linspace(0, 2, 8)
    assert ("rev" in names(step, x)) == (bins[0] > bins[1])
    sharded = md.parallelize(step, md.Mesh(data=2, topology=SLOW_DEVICES))
    assert sharded.verify(x).equal and sharded.check(x).ok


@pytest.mark.parametrize("index", [-1, 0, 1, 2, 5])
def test_a_branch_that_is_known_to_be_taken_is_inlined(index):
    def step(x):
        cases = lambda x: jnp.sin(x[::-1]), lambda x: jnp.cumsum(x, 0), lambda x: x * 2
        return jax.lax.switch(jnp.asarray(index) + 0, cases, x)

    assert "cond" not in names(step, X)
    sharded = md.parallelize(step, md.Mesh(data=4), {"x": "data=S(0)"})
    assert sharded.verify(X).equal and sharded.check(X).ok


def test_a_loop_that_does_not_begin_is_its_operands():
    def step(x):
        halved = jax.lax.while_loop(lambda x: jnp.asarray(1) > 2, lambda x: x / 2, x + 1)
        return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, halved)

    assert names(step, X).count("while") == 1
    sharded = md.parallelize(step, md.Mesh(data=4), {"x": "data=S(0)"})
    assert sharded.verify(X).equal and sharded.check(X).ok


def test_branches_by_platform_stay():
    assert "cond" in names(lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.cos), X)


def test_other_masks_stay():
    assert "select_n" in names(in_every_row(np.arange(5) > 2), X)
    assert "select_n" in names(lambda x: jnp.where(x > 0, x, jnp.sin(x)), X)
    assert "select_n" in names(lambda x: jnp.where(np.arange(4) > 1, x, jnp.sin(x)), X)


def test_numbers_are_those_of_the_step():
    for mask in (np.zeros(5, bool), np.ones(5, np.int32), np.full(5, 2)):
        step = in_every_row(mask > 0)
        np.testing.assert_allclose(md.parallelize(step, md.Mesh(data=8))(X), step(X), rtol=1e-6)
