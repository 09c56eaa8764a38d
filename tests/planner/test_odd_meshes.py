"""Stencils and constraints over axes whose sizes are no powers of two: the ends of blocks are sent, and no more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.fuzz.form_bytes import BYTES_ALONE

COLUMNS = 4
ROW = 4 * COLUMNS  # bytes
SUM = 8  # bytes of one number, summed over all devices, at most


def variation(u):
    return jnp.sum((u[1:] - u[:-1]) ** 2)


def heat(u):
    return u.at[1:-1].add(0.25 * (u[2:] - 2 * u[1:-1] + u[:-2]))


def fluxes(u):
    padded = jnp.pad(u, ((1, 1), (0, 0)), mode="edge")
    flux = jnp.tanh(padded[1:] * padded[:-1])
    return u - flux[1:] + flux[:-1]


def looped(u):
    return jax.lax.fori_loop(0, 3, lambda _, u: heat(u), u)


def padded_rows(u):
    return jnp.sum(jnp.tanh(jnp.pad(u, ((0, 1), (0, 0)))))


def constrained_rows(u):
    """Without the constraint, all lengths would be those of six rows."""
    return jnp.sum(jnp.pad(md.constrain(jnp.sin(u), "x=S(0)"), ((0, 1), (0, 0))) ** 2)


def constrained_part(u):
    """20 rows are not put where 21 lie: these do not divide over y."""
    return jnp.sum(jnp.pad(md.constrain(jnp.tanh(u[1:]), "y=S(0)"), ((0, 1), (0, 0))) ** 2)


PROGRAMS = {  # mesh, step, rows, bytes at most; results that are arrays are split as the input is
    "a sum over 27 rows": ("x=3", variation, 27, ROW + SUM),
    "its gradient": ("x=3", jax.grad(variation), 27, 2 * ROW),
    "49 rows over seven": ("x=7", variation, 49, ROW + SUM),
    "9 rows, where 8 are rounder": ("y=2,x=3", variation, 9, ROW + SUM),
    "heat": ("x=5", heat, 25, 2 * ROW),
    "heat on a rounder interior": ("y=3,x=2", heat, 128, 2 * ROW),
    "ghosts and faces": ("x=6", fluxes, 36, 2 * ROW),
    "a loop": ("x=3", looped, 27, 3 * 2 * ROW),
    "3 rows and one": ("x=3", padded_rows, 3, SUM),
    "a constraint on 3 rows": ("y=2,x=3", constrained_rows, 3, SUM),
    "a constraint on 20 rows": ("x=3,y=2", constrained_part, 21, 21 * ROW),  # other blocks: gathered
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_sends_the_ends_of_blocks(name):
    mesh, step, rows, most = PROGRAMS[name]
    u = np.random.default_rng(0).normal(size=(rows, COLUMNS)).astype(np.float32)
    pin = {"**": "x=S(0)"}
    outputs = pin if jax.eval_shape(step, u).ndim else {}
    planned = md.parallelize(step, md.Mesh.parse(mesh, BYTES_ALONE), pin, outputs=outputs)
    assert planned.plan(u).bytes <= most
    planned.check(u)
    planned.verify(u)


def test_padding_keeps_what_a_constraint_divides():
    """21 rows divide over x; padded for the larger blocks of y alone, they would not."""
    k, u = np.ones((4, 4), np.float32), np.ones((21, 4), np.float32)

    def step(k, u):
        return jnp.sum(md.constrain(jnp.tanh(u @ k), "x=S(0)") ** 2)

    md.parallelize(step, md.Mesh.parse("y=2,x=3", BYTES_ALONE)).check(k, u)
