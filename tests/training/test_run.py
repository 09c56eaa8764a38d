"""Programs that are trained, and those that cannot be."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.api.program import parallelize_program
from meshdsl.errors import ArgumentError
from meshdsl.layouts.machine import keep_topology
from meshdsl.training.loop import Run
from meshdsl.training.run import has_known_rate, steps_of, train_program

SHAPE = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def step(w, batch):
    value, gradient = jax.value_and_grad(lambda w: jnp.mean((batch - w) ** 2))(w)
    return w - gradient, value


def program(step=step, init=lambda: jnp.zeros((8, 4)), args=(SHAPE, SHAPE), **more):
    return md.Program(step, args, init=init, batches=lambda: (np.full((8, 4), n, np.float32) for n in range(9)), **more)


def trained(program, folder):
    return train_program(parallelize_program(program, md.Mesh(data=4, model=2)), program, Run(3, folder))


def test_a_state_of_one_argument_and_any_batches(tmp_path):
    (w,), outcome = trained(program(layouts={"w": "data=S(0) model=B"}), tmp_path)
    alone = jnp.zeros((8, 4))
    for n in range(3):
        alone, _ = step(alone, jnp.full((8, 4), n))
    np.testing.assert_allclose(w, alone, rtol=1e-6)
    assert w.sharding.spec[0] == "data" and len(outcome.history.losses) == 3


@pytest.mark.parametrize(
    ("wrong", "row"),
    [
        (lambda w, batch: (w[:4], w.sum()), "result 0: float32[4,4]; w is float32[8,4]"),
        (lambda w, batch: w, "1 arrays; the state has 1, and the loss is one more"),
        (lambda w, batch: (w, w[0]), "the last result, float32[4], is not a loss: a loss is one number"),
    ],
)
def test_a_step_that_gives_something_else(wrong, row, tmp_path, nothing_is_compiled):
    with pytest.raises(ArgumentError) as error:
        trained(program(wrong), tmp_path)
    assert str(error.value) == f"the step does not return the state and the loss:\n  {row}\nreturn (*state, loss)"


def test_init_makes_another_number_of_arguments(tmp_path, nothing_is_compiled):
    with pytest.raises(ArgumentError, match="init: makes 2 arguments; the step takes 1 and a batch"):
        trained(program(init=lambda: (jnp.zeros(3), 1.0)), tmp_path)


def test_init_needs_arguments(tmp_path, nothing_is_compiled):
    def create(key, size=3):
        return jax.random.normal(key, (8, 4))

    said = r"init: create needs key, and is called without arguments; write lambda: create\(...\)"
    with pytest.raises(ArgumentError, match=said):
        trained(program(init=create), tmp_path)
    with pytest.raises(ArgumentError, match=said):
        md.parallelize(step, "data=4").init(create, SHAPE)
    with pytest.raises(ArgumentError, match="init: 3 is an int, not a function that makes arguments"):
        md.parallelize(step, "data=4").init(3, SHAPE)


def test_batches_that_are_none(tmp_path, nothing_is_compiled):
    with pytest.raises(ArgumentError, match=r"batches\(\): 3 is an int, not something that yields batches"):
        trained(replace(program(), batches=lambda: 3), tmp_path)


def test_a_batch_of_another_size_than_the_only_array_has(tmp_path):
    with pytest.raises(ArgumentError, match=r"the array: float32\[7,4\]; the step takes float32\[8,4\]"):
        trained(replace(program(), batches=lambda: [np.zeros((7, 4), np.float32)]), tmp_path)


def test_where_mfu_means_something(tmp_path, monkeypatch):
    def known(topology):
        mesh = md.Mesh(data=8, topology=topology)
        return has_known_rate(SimpleNamespace(mesh=mesh, topology=mesh.topology))

    monkeypatch.setenv("MESHDSL_TOPOLOGIES", str(tmp_path))
    assert not known("cpu") and not known("dgx-h100")
    measured = md.topology("dgx-h100")
    keep_topology(measured, "cpu", md.Mesh(data=8))
    assert known(measured) and not known("cpu")


def test_steps_that_nobody_states():
    with pytest.raises(ArgumentError, match="give --steps, or md"):
        steps_of(program())
    assert steps_of(program(steps=7)) == 7
    with pytest.raises(ArgumentError, match="steps: 'many' is a str, not a number of training steps"):
        program(steps="many")
