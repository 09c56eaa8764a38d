"""The least bytes of forms that are easy to count by hand; no plan of a random form is below its least."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.fuzz.form_bytes import BYTES_ALONE, NEAR_THE_LEAST, form_bytes
from tests.fuzz.least_bytes import least_bytes

ROW = 4 * 4  # bytes: four columns of float32
BY_HAND = {
    "elementwise": (jnp.tanh, 0),
    "roll": (lambda u: jnp.roll(u, 2, axis=0), 2 * ROW),
    "mirror": (lambda u: u[::-1], 8 * ROW),
    "stencil": (lambda u: u.at[1:-1].add(u[2:] - 2 * u[1:-1] + u[:-2]), 2 * ROW),
    "boundary": (lambda u: u.at[0].set(u[1]), 0),
    "far boundary": (lambda u: u.at[0].set(u[-1]), ROW),
    "update": (lambda u: u.at[5].set(0.0), 0),
    "columns": (lambda u: u[:, ::2], 0),
    "total variation": (lambda u: jnp.sum((u[1:] - u[:-1]) ** 2), ROW),
    "its gradient": (jax.grad(lambda u: jnp.sum((u[1:] - u[:-1]) ** 2)), 2 * ROW),
    "squares": (lambda u: jnp.sum(u**2), 4),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_least_is_what_one_counts_by_hand(name):
    step, least = BY_HAND[name]
    mesh, u = md.Mesh(x=4, topology=BYTES_ALONE), np.ones((32, 4), np.float32)
    split = {"**": "x=S(0)"} if jax.eval_shape(step, u).ndim else {}
    plan = md.parallelize(step, mesh, {"**": "x=S(0)"}, outputs=split).plan(u)
    assert least_bytes(step, (u,), plan) == least <= plan.bytes


def test_two_axes_and_copies():
    """A device needs a row and a column of its neighbours, at the corner their sum; nothing that every device has."""
    mesh, u = md.Mesh(x=4, y=2, topology=BYTES_ALONE), np.ones((16, 8), np.float32)
    split = {"**": "x=S(0) y=S(1)"}

    def step(u, v):
        return jnp.roll(u, 1, 0) + jnp.roll(u, 1, 1) + v[::-1]

    plan = md.parallelize(step, mesh, {"u": split["**"], "v": "x=B y=B"}, outputs=split).plan(u, u)
    assert least_bytes(step, (u, u), plan) == 4 * (4 + 4 - 1)


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_is_below_the_least_and_some_forms_are_near_it(seed):
    one = form_bytes(seed)
    if one is not None:
        assert one.planned >= one.least, str(one)
        assert not (one.high and one.form in NEAR_THE_LEAST), str(one)
