"""Slices, pads, updates and shifts along split dims send the rows at the ends of blocks, and compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.topology import Link, Topology
from meshdsl.trace import trace
from tests.stencils import PLANES, PROGRAMS, SEQUENCES, grid, summed, with_gradient
from tests.sweeps import swept
from tests.trace.interpreter import run

SLOW = Topology("slow links", 1e6, 1e6, 4e9, 4e9, 0.0, (Link(latency=0.0, bandwidth=1e7),))
ROWS, COLUMNS = 2048, 256
GRADIENTS = [name for name, program in PROGRAMS.items() if program.gradient is not None]
SCALARS = 64  # bytes of sums over the grid


def sent_rows(function):
    """Rows that a device sends."""
    u = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    plan = md.parallelize(function, md.Mesh.parse("x=8", SLOW), {"u": "x=S(0)"}).plan(u)
    return (plan.bytes - SCALARS) / (4 * COLUMNS)


@swept("name", PROGRAMS, every=3)
def test_forward_sends_ends_of_blocks(name):
    assert sent_rows(PROGRAMS[name].function) <= PROGRAMS[name].rows


@swept("name", GRADIENTS, every=3)
def test_gradients_send_as_little(name):
    assert sent_rows(summed(PROGRAMS[name].function)) <= PROGRAMS[name].gradient


@pytest.mark.parametrize("rows", [(0, -1), (1, 700, 1399), (5,)])
def test_few_rows_send_rows(rows):
    assert sent_rows(lambda u: jnp.sum(jnp.tanh(u[jnp.array(rows)]))) <= 2 * len(rows)
    assert sent_rows(jax.grad(lambda u: jnp.sum(jnp.tanh(u[np.array(rows)])))) <= 2 * len(rows)


def sent_over(axis, plan):
    return sum(c.bytes * c.trips for c in plan.collectives if axis in c.axes)


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@swept("name", PLANES, every=2)
def test_planes_send_ends_of_blocks_both_ways(name, gradient):
    function, *most = PLANES[name]
    u, n = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), 1024
    step = summed(function) if gradient else function
    plan = md.parallelize(step, md.Mesh.parse("x=4,y=2", SLOW), {"u": "x=S(0) y=S(1)"}).plan(u)
    rows, columns = (sent_over("x", plan) - SCALARS) / (4 * n / 2), (sent_over("y", plan) - SCALARS) / (4 * n / 4)
    assert rows <= 1.02 * most[gradient][0]  # a widened block has two rows more
    assert columns <= 1.02 * most[gradient][1]


@pytest.mark.parametrize("loss", SEQUENCES, ids=lambda loss: loss.__name__)
def test_losses_on_shifted_sequences_send_a_token_per_row(loss):
    def step(params, tokens):
        grads = jax.grad(loss)(params, tokens)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    params = {"embed": jax.ShapeDtypeStruct((64, 32), jnp.float32), "out": jax.ShapeDtypeStruct((32, 64), jnp.float32)}
    layouts = {"tokens": "seq=S(1)", "params/**": "seq=B"}
    sharded = md.parallelize(step, md.Mesh.parse("seq=8", SLOW), layouts)
    plan = sharded.plan(params, jax.ShapeDtypeStruct((8, 2048), jnp.int32))
    gradients = 2 * 7 / 8 * 2 * 64 * 32 * 4
    assert plan.bytes <= gradients + 8 * 4 + SCALARS


REAL = {  # together they have every kind of exchange, and programs with two or three different ones
    "differences": "total_variation more_dilated log_returns smoothmax_of_steps changes limited_slopes",
    "interiors": "heat_set fourth_order flux_differences gradient heat_neumann time_loop red_black",
    "ghosts": "edge_ghosts reflected_ghosts faces faces_with_given_ends wide_ghosts causal_convolution marked last",
}


@pytest.mark.parametrize("group", REAL)
def test_runs_as_planned(group):
    def step(u):
        return [with_gradient(PROGRAMS[name].function)(u) for name in names]

    names = [name for name in REAL[group].split() if PROGRAMS[name].gradient is not None]
    u = grid(64, 8)
    sharded = md.parallelize(step, md.Mesh.parse("x=4,y=2", SLOW), {"u": "x=S(0) y=S(0)"})
    sharded.verify(u)
    sharded.check(u)


@pytest.mark.sweep
def test_planes_run_as_planned():
    def step(u):
        return {name: with_gradient(function)(u) for name, (function, *_) in PLANES.items()}

    u = grid(32, 16)
    sharded = md.parallelize(step, md.Mesh.parse("x=4,y=2", SLOW), {"u": "x=S(0) y=S(1)"})
    sharded.verify(u)
    sharded.check(u)


@swept("name", PROGRAMS, every=3)
def test_the_traced_program_computes_the_same(name):
    program = PROGRAMS[name]

    both = program.function if program.gradient is None else with_gradient(program.function)
    u = grid(32, 3)
    traced = trace(both, (u,))
    made, expected = jax.jit(lambda u: run(traced, u))(u), jax.jit(both)(u)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_stencils_inside_a_shard_map():
    """Its body sees one block; along the axes that it leaves automatic, halos are planned."""
    mesh = md.Mesh.parse("x=4,y=2", SLOW)

    def step(u):
        def body(block):
            return PLANES["five_points"][0](block), jnp.diff(block, axis=0)

        return jax.shard_map(
            body,
            mesh=jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2),
            in_specs=jax.P("x"),
            out_specs=jax.P("x"),
            axis_names={"x"},
        )(u)

    u = grid(64, 32)
    sharded = md.parallelize(step, mesh, {"u": "x=S(0) y=S(1)"})
    sharded.verify(u)
    sharded.check(u)


def test_windows_that_reach_around_fetch_each_block_once():
    """Every device convolves all of one row with its block of the other."""
    sharded = md.parallelize(lambda u: jnp.correlate(u[0], u[1], "full"), md.Mesh.parse("x=8", SLOW), {"u": "x=S(1)"})
    u = grid(2, 16)
    permutes = [c for c in sharded.plan(u).collectives if c.kind == "collective-permute"]
    assert len(permutes) == 7
    sharded.verify(u)
    sharded.check(u)
