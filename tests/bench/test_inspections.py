"""The page of inspected public programs, from made-up ones: jitted with the batch split, and by a program itself."""

import jax
import jax.numpy as jnp
import pytest

from bench.inspections import MESH, inspected, page
from bench.programs.adapter import Adapter, Training
from bench.programs.nested import at_first_call
from bench.programs.steps import jitted_step
from meshdsl.layouts.mesh import Mesh

MADE_UP = Adapter("a product", "somebody/made-up", "0" * 40, None, "large")


def train_step(w, batch):
    return w - jax.grad(lambda w: jnp.mean((jnp.tanh(batch @ w) - batch) ** 2))(w)


@pytest.fixture(scope="module")
def split():
    training = Training(train_step, (jnp.eye(64), jnp.ones((32, 64))), {"batch": 0}, lambda args, result, seed: args)
    return inspected(*jitted_step(training, Mesh.parse(MESH)))


def test_steps_of_others_have_their_batch_split(split):
    assert split["name"] == "train_step"
    assert split["bytes"] == 64 * 64 * 4 * 2 * 3 // 4  # the gradient, summed over data
    assert split["compared"]["repeated"][0]["times"] == 2


def test_programs_that_state_shardings_are_inspected_at_their_call():
    def train():
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        at = jax.NamedSharding(mesh, jax.P("x"))
        jax.jit(train_step, in_shardings=(at, at))(jnp.eye(64), jnp.ones((64, 64)))

    found = at_first_call(train, "jax.jit", "train_step", lambda _, jitted, args: inspected(jitted(), args))
    assert found["mesh"] == "x=8" and found["bytes"] > 0
    with pytest.raises(LookupError, match="other_step was not called"):
        at_first_call(train, "jax.jit", "other_step", lambda *_: None)


def test_the_page_says_what_is_sent_and_why_no_less(split):
    text = page({"made_up": MADE_UP}, {"made_up": split})
    row = next(line for line in text.splitlines() if line.startswith("| made_up"))
    assert "| a product | data=4,model=2 | 24.6 kB |" in row
    assert "are all-reduces" in row or "partial sums" in row or "| 0." in row
    assert "## made_up" in text and "Duplicated compute on line `test_inspections.py:" in text
