"""The traced graph computes what the step computes, bit by bit, before and after every clean-up."""

import jax
import numpy as np
import pytest
from flax import nnx

from meshdsl.ir.check import check_graph
from meshdsl.ir.graph import TracedProgram
from meshdsl.layouts.roundness import POWERS_OF_TWO
from meshdsl.trace import trace
from meshdsl.trace.annotate import annotate
from meshdsl.trace.passes import passes
from meshdsl.trace.read_jaxpr import read_jaxpr
from tests.sweeps import swept
from tests.trace.interpreter import run
from tests.trace.steps import STEPS, key


def equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def reference(step, args):
    with jax.disable_jit():
        return step(*args)


@swept("name", STEPS, left=("gpt scan", "gpt remat", "gpt list"))
def test_step(name):
    step, args = STEPS[name]
    equal(run(trace(step, args), *args), reference(step, args))


@pytest.mark.parametrize("name", [name for name in STEPS if "gpt" not in name])
def test_after_each_pass(name):
    step, args = STEPS[name]
    closed, shape = jax.make_jaxpr(step, return_shape=True)(*args)
    graph, want = read_jaxpr(closed), reference(step, args)
    for run_pass in (lambda g: g, *passes(POWERS_OF_TWO), annotate):
        graph = run_pass(graph)
        check_graph(graph)
        equal(run(TracedProgram(graph, (), (), out_tree=jax.tree.structure(shape)), *args), want)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.norm(self.inner(x))
        for layer in self.layers:
            x = nnx.gelu(layer(x))
        return x


def test_flax_model():
    graphdef, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def step(params, rest, x):
        def loss(params, rest):
            model = nnx.merge(graphdef, params, rest, copy=True)
            value = (model(x) ** 2).mean()
            return value, nnx.state(model, nnx.BatchStat)

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, rest)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), stats, value

    args = (params, rest, key(0, 6, 4))
    program = trace(step, args)
    equal(run(program, *args), reference(step, args))
    paths = [leaf.path for leaf in program.inputs]
    assert paths[:4] == ["params/inner/bias", "params/inner/kernel", "params/layers/0/bias", "params/layers/0/kernel"]
    assert paths[-3:] == ["rest/norm/mean", "rest/norm/var", "x"]
    assert [leaf.path for leaf in program.outputs][:2] == ["0/inner/bias", "0/inner/kernel"]
