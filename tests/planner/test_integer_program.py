"""Plans and bounds against HiGHS on an integer program of the whole problem (``integer``)."""

import jax
import jax.numpy as jnp
import optax
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.layouts.topology import Link
from meshdsl.pins import make_pins
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model
from meshdsl.trace import trace
from tests.planner.graphs import ONE, STEPS, TWO, problem_of, searched, shape
from tests.planner.integer import Whole


def attend(w, x):
    q, k, v = jnp.split(x @ w["in"], 3, axis=-1)
    return x + jax.nn.softmax(q @ k.T) @ v @ w["out"]


def train(loss, optimizer):
    def step(w, state, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(w, updates), state, value

    return step


def perceptron(w, x):
    return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"] - x) ** 2)


def attention(w, x):
    return jnp.mean(attend(w, attend(w, x)) ** 2)


W = {"up": shape(64, 256), "down": shape(256, 64)}
A = {"in": shape(64, 192), "out": shape(64, 64)}
ADAM, SGD = optax.adam(1e-3), optax.sgd(1e-3, momentum=0.9)
# Devices and links for which many layouts cost about the same.
NEAR = md.Topology("near", 1e9, 1e9, 2e9, 4e9, 1e-6, (Link(1e-5, 2e8),))
MEDIUM = {
    "perceptron and adam": (train(perceptron, ADAM), (W, jax.eval_shape(ADAM.init, W), shape(512, 64))),
    "attention and momentum": (train(attention, SGD), (A, jax.eval_shape(SGD.init, A), shape(128, 64))),
}


def agrees(model):
    found, bound = searched(model)
    cost, proved = Whole(model, found.cost / 1e6).solve(60)
    assert cost == pytest.approx(found.cost, rel=1e-9), "the plan is as cheap as the integer program's"
    assert proved == pytest.approx(cost, rel=1e-9)
    assert model.scale.seconds(cost) * (1 - 3e-9) <= bound <= model.scale.seconds(cost) * (1 + 1e-9)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("mesh", [ONE, TWO], ids=str)
def test_small_steps(name, mesh):
    agrees(problem_of(name, mesh))


@pytest.mark.parametrize("name", MEDIUM)
def test_training_steps(name):
    step, args = MEDIUM[name]
    program, mesh = trace(step, args), md.Mesh(x=4, topology=NEAR)
    agrees(Model(make_problem(program, mesh, make_pins(program, mesh))))


@pytest.mark.parametrize("name", ["dlrm", "gpt2-124m"])
def test_models(name):
    whole, mesh = models.build(name, "data"), md.Mesh(data=8, topology="dgx-h100")
    program = trace(whole.step, whole.args)
    agrees(Model(make_problem(program, mesh, make_pins(program, mesh, rules=md.Rules("batch:data")))))
