import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshdsl.ir.graph import walk
from meshdsl.ir.index import producers
from meshdsl.ir.rewrite import values
from meshdsl.lowering.interpreter import run_graph
from meshdsl.lowering.reference import WholeTarget
from meshdsl.recomputation import recomputing
from meshdsl.recomputation.levels import kept_effects, recomputable
from meshdsl.trace import trace
from meshdsl.trace.read_jaxpr import RECOMPUTED, REMATTED
from tests.recomputation.steps import arguments, microbatched, scanned, unrolled


def run(program, args, compiled=True):
    """Results. If nothing is compiled, loops included, nothing is fused, and equal operations give equal bits."""

    def run(*leaves):
        return run_graph(program.graph, leaves, WholeTarget({}))

    with jax.disable_jit(not compiled):
        return [np.asarray(x) for x in (jax.jit(run) if compiled else run)(*jax.tree.leaves(args))]


@pytest.mark.parametrize("step", [unrolled, microbatched])
def test_any_choice_gives_the_same_numbers(step):
    args = arguments()
    program, draw = trace(step, args), random.Random(step.__name__)
    ops, expected = sorted(recomputable(program)), run(program, args)
    made = recomputing(program, {op for op in ops if draw.random() < 0.6})
    assert made.residuals
    for found, wanted in zip(run(made.program, args), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_copies_give_the_same_bits():
    args = arguments()
    program = trace(scanned, args)
    made = recomputing(program, recomputable(program)).program
    for found, wanted in zip(run(made, args, compiled=False), run(program, args, compiled=False), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_scan_runs_again_without_the_results_that_are_kept():
    args = arguments()
    program = trace(scanned, args)
    ops, expected = recomputable(program), run(program, args, compiled=False)
    (inner,) = (op for _, op in walk(program.graph) if op.id in ops and op.name == "scan")

    def results_again(spared):
        made = recomputing(program, ops, spared).program
        for found, wanted in zip(run(made, args, compiled=False), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
        return [len(op.outputs) for _, op in walk(made.graph) if op.name == "scan" and REMATTED in op.scope]

    (whole,) = results_again(())
    assert [results_again([v.id]) for v in inner.outputs[1:]] == [[whole - 1]] * (len(inner.outputs) - 1)
    assert results_again([v.id for v in inner.outputs]) == []


def test_copies_are_not_moved_with_a_broadcast_that_reads_them():
    @jax.custom_vjp
    def spread(s):
        return jnp.sin(s)

    def forward(s):
        wide = jnp.broadcast_to(jnp.tanh(s)[:, None], (8, 4))
        return jnp.sin(s), (wide, jnp.sin(wide))

    def backward(kept, g):
        wide, sines = kept
        return ((jax.lax.broadcast_in_dim(wide, (2, 8, 4), (1, 2)) * sines).sum((0, 2)) * g,)

    spread.defvjp(forward, backward)
    x = jnp.linspace(-1, 1, 8)
    program = trace(lambda x: jax.grad(lambda x: (spread(x * 2) ** 2).sum())(x), (x,))
    made = recomputing(program, recomputable(program)).program
    np.testing.assert_array_equal(run(made, (x,), compiled=False)[0], run(program, (x,), compiled=False)[0])


def test_the_program_stays_as_it_was():
    program = trace(scanned, arguments())
    before = [(op.name, op.phase, [x.id for x in op.inputs]) for _, op in walk(program.graph)]
    recomputing(program, recomputable(program))
    assert [(op.name, op.phase, [x.id for x in op.inputs]) for _, op in walk(program.graph)] == before


def test_a_loop_over_layers_stacks_only_its_carry():
    weights, x, _ = arguments()

    def step(weights, x):
        def loss(weights):
            y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(jnp.sin(y @ w) @ w), None), x, weights)
            return (y**2).sum()

        return jax.grad(loss)(weights)

    program = trace(step, (weights[0], x))

    def stacks(p):
        return next(op.outputs[1:] for op in p.graph.ops if op.name == "scan" and op.phase == "forward")

    assert len(stacks(program)) >= 4  # jax 0.12 keeps one less
    made = recomputing(program, recomputable(program)).program
    assert [v.shape for v in stacks(made)] == [(2, *x.shape)]
    again = [op.name for _, op in walk(made.graph) if REMATTED in op.scope]
    assert again.count("dot_general") == 2 and "optimization_barrier" not in again


def test_what_checkpoint_keeps_stays():
    weights, x, _ = arguments()

    def step(weights, x):
        layer = jax.checkpoint(lambda y, w: jnp.tanh(jnp.sin(y @ w) @ w))

        def loss(weights):
            y = x * 2
            for w in weights:
                y = layer(y, w)
            return (jnp.cos(y) ** 2).sum()

        return jax.grad(loss)(weights)

    program = trace(step, (list(weights[0]), x))
    made = recomputing(program, recomputable(program)).program

    def kept(graph):
        """Phases of what the user's barriers read."""
        makers = producers(graph)
        barriers = [op for op in graph.ops if op.name == "optimization_barrier" and not op.scope.endswith(RECOMPUTED)]
        return [makers[x.id].phase for op in barriers for x in values(op.inputs) if x.id in makers]

    assert kept(made.graph) == kept(program.graph) and "forward" in kept(made.graph)


def test_effects_run_once():
    def step(w, x):
        def loss(w):
            y = jnp.sin(x @ w)
            fixed = jax.lax.stop_gradient(y)
            z = jax.experimental.io_callback(lambda y: y, jax.ShapeDtypeStruct(y.shape, y.dtype), fixed)
            return (jnp.cos(z * y) ** 2).sum()

        return jax.grad(loss)(w)

    program = trace(step, (jnp.ones((8, 8)), jnp.ones((4, 8))))
    assert [op.name for op in kept_effects(program)] == ["io_callback"]
    made = recomputing(program, recomputable(program)).program
    assert sum(op.name == "io_callback" for _, op in walk(made.graph)) == 1
