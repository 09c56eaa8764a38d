"""Loops that never run: what is done in them costs next to nothing, and what cannot be done stays impossible."""

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.pins import make_pins
from meshdsl.trace import trace
from tests.planner.graphs import CHAINS, shape, solved


def never(x, w):
    def body(_, c):
        v = jnp.tanh(c @ w)
        return (jnp.sin(v @ w) * v) @ v.T + v + jnp.cumsum(v, 1)

    return jax.lax.fori_loop(0, 0, body, x @ w) @ x, x @ w @ w


@pytest.mark.parametrize("part", [None, 0.8])
def test_a_loop_that_never_runs_costs_next_to_nothing_and_bounds_are_tight(part):
    program, mesh = trace(never, (shape(8, 8),) * 2), md.Mesh(x=2, y=2, topology=CHAINS)
    pins = make_pins(program, mesh)
    whole = solved(program, mesh, pins)
    found = whole if part is None else solved(program, mesh, pins, part * whole.peak)
    assert found.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert 0.99 * found.seconds <= found.lower_bound <= found.seconds


def test_a_scan_of_no_trips_has_a_text():
    def step(x):
        return jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=0)[0]

    assert "predicted step time" in str(md.parallelize(step, md.Mesh(x=2)).plan(shape(8, 8)))
