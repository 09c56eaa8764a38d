"""Training of steps that change objects of nnx in place: ``meshdsl train``'s loop, checkpoints and resuming."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshdsl as md
from meshdsl.api.program import parallelize_program
from meshdsl.errors import ArgumentError
from meshdsl.training.batches import Batches, shuffled
from meshdsl.training.loop import Run
from meshdsl.training.run import train_program

MESH = md.Mesh(data=4, model=2)
draw = np.random.default_rng(0)
X = draw.normal(size=(64, 8)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.drop, self.tied = nnx.Dropout(0.2, rngs=rngs), self.up

    def __call__(self, x):
        return self.down(self.drop(self.tied(x)))


def init():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(1e-1, momentum=0.9), wrt=nnx.Param), jnp.zeros((), jnp.int32)


def descend(model, opt, batch):
    value, gradients = nnx.value_and_grad(lambda m: ((m(batch["x"]) - batch["x"]) ** 2).mean())(model)
    opt.update(model, gradients)
    return value


def in_place(model, opt, count, batch):
    return count + 1, descend(model, opt, batch)


def returning_all(model, opt, count, batch):
    value = descend(model, opt, batch)
    return model, opt, count + 1, value


def program(step, **changed):
    fields = {
        "layouts": {"batch/x": "data=S(0)"},
        "init": init,
        "batches": lambda: Batches(shuffled({"x": X}), 32),
        "evaluate": lambda model, opt, count: {"steps": opt.step[...], "count": count},
    }
    shapes = nnx.eval_shape(init)
    return md.Program(step, (*shapes, {"x": jax.ShapeDtypeStruct((32, 8), jnp.float32)}), **{**fields, **changed})


def trained(step, folder, steps, mesh=MESH):
    given = program(step)
    run = Run(steps, folder, save_every=2, evaluate_every=2)
    return train_program(parallelize_program(given, mesh), given, run)


def test_a_run_resumes_with_all_state(tmp_path, caplog):
    (model, opt, count), whole = trained(in_place, tmp_path / "whole", 4)
    assert int(count) == int(opt.step[...]) == 4
    trained(returning_all, tmp_path / "parts", 2)  # a step may return the objects
    (other, same, _), rest = trained(in_place, tmp_path / "parts", 4, md.Mesh(data=2, model=2))
    assert other.tied is other.up
    assert int(same.step[...]) == int(other.drop.rngs.count[...]) == 4
    assert rest.history.losses[-1] == pytest.approx(whole.history.losses[-1], rel=1e-4)
    np.testing.assert_allclose(model.up.kernel[...], other.up.kernel[...], rtol=1e-3, atol=1e-5)
    assert "planning" not in caplog.text  # each run plans once


def test_a_step_that_returns_too_little(tmp_path):
    given = program(lambda model, opt, count, batch: descend(model, opt, batch))
    with pytest.raises(ArgumentError, match="the step does not return the state and the loss"):
        train_program(parallelize_program(given, MESH), given, Run(1, tmp_path))
