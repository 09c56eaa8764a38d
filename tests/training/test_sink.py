"""Several steps in one dispatch."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.api.program import parallelize_program
from meshdsl.api.sink import SunkStep
from meshdsl.errors import ArgumentError, NonFiniteError
from meshdsl.training.loop import Run, restore_newest
from meshdsl.training.observing.metrics import read_metrics
from meshdsl.training.run import train_program
from meshdsl.training.sink import Sink, parse_sink
from tests.training import test_in_place, tiny

MESH = md.Mesh(data=4, model=2)
SHARDED = parallelize_program(tiny.program, MESH)


def trained(folder, steps=23, program=tiny.program, **options):
    run = Run(steps, folder, save_every=5, evaluate_every=10, **options)
    return train_program(SHARDED if program.step is tiny.step else parallelize_program(program, MESH), program, run)


def test_losses_and_state_are_those_of_single_steps(tmp_path):
    (w, key), alone = trained(tmp_path / "alone")
    (sunk, same), together = trained(tmp_path / "together", sink=5)
    assert together.history == alone.history and len(alone.history.losses) == 23
    np.testing.assert_array_equal(w, sunk)
    assert key == same and sunk.sharding == w.sharding
    lines = [line for line in read_metrics(tmp_path / "together" / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 24))
    assert lines[5]["seconds"] == lines[9]["seconds"]  # an equal share each
    trained(tmp_path / "parts", steps=13)  # resumed between multiples of 5
    assert trained(tmp_path / "parts", sink=5)[1].history.losses == alone.history.losses


def test_an_iteration_communicates_as_planned():
    def step(frozen, w, batch):  # what does not change is gathered in each iteration nevertheless
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(batch @ frozen) @ w) ** 2))(w)
        return frozen, w - gradient, value

    args = [jax.ShapeDtypeStruct((size, 64), jnp.float32) for size in (64, 64, 512)]
    sharded = md.parallelize(step, MESH, {"*": "data=S(0) model=B"}, donate_argnums=(0, 1))
    planned = {(line.kind, line.axes): line.planned for line in sharded.verify(*args).lines}
    lines = SunkStep(sharded.stages(*args), 4, 1).verify().lines
    assert {(line.kind, line.axes): line.compiled for line in lines} == {key: 4 * n for key, n in planned.items()}
    assert planned["all-gather", "data"] == 2 * 64 * 64 * 4 * 3 / 4


def test_batches_that_end_or_fail_within_a_dispatch(tmp_path):
    def batches(error):
        yield from [{"x": np.ones((32, 16), np.float32), "y": np.ones((32, 8), np.float32)}] * 8
        if error:
            raise error

    failing, ending = (replace(tiny.program, batches=lambda e=e: batches(e)) for e in (OSError("gone"), None))
    with pytest.raises(OSError, match="gone"):
        trained(tmp_path / "failing", 20, failing, sink=5)
    assert restore_newest(Run(20, tmp_path / "failing"), (jnp.zeros((16, 8)), jax.random.key(0)))[0] == 8
    assert trained(tmp_path / "ending", 20, ending, sink=5)[1].done == 8


def test_a_loss_that_is_not_finite_is_that_of_its_step(tmp_path):
    def step(x, batch):
        return x + 1, jnp.where(x < 7, x, jnp.nan)

    shape = jax.ShapeDtypeStruct((), jnp.float32)
    program = md.Program(step, (shape, shape), init=lambda: jnp.zeros(()), batches=lambda: [np.float32(0)] * 20)
    with pytest.raises(NonFiniteError, match="the loss of step 8 is nan; the newest checkpoint is after step 5"):
        trained(tmp_path, 20, program, sink=5)


def test_what_is_faster_is_measured_and_taken(tmp_path, capsys):
    sink = Sink(5, None, None, None, measured=True)
    counts, taken = sink.counts(3, 60), []
    for _ in range(7 + 3):  # to 5, 6 and one more up to a multiple, then three of 5
        taken.append(next(counts))
    assert taken == [1] * 7 + [5] * 3 and sink.is_measured(3)
    for count in taken:
        sink.add(count, 2e-3 if count == 1 else 1e-3)
    assert sink.decide() == "5 steps in one dispatch take 1 ms each, 2 ms one at a time: taken 5 at a time"
    assert [*counts] == [5] * 7 and not sink.is_measured(3)
    assert (
        trained(tmp_path / "auto", 40, sink=5, measures_sink=True)[1].history.losses
        == trained(tmp_path / "alone", 40)[1].history.losses
    )
    assert "5 steps in one dispatch take" in capsys.readouterr().out


def test_sizes():
    assert parse_sink("auto", 50, 30) == (10, True) and parse_sink("25", 50, 100) == (25, False)
    said = "--sink 8 has to divide --save-every 50 and --evaluate-every 20: 5 does, or change these"
    with pytest.raises(ArgumentError, match=said):
        parse_sink("8", 50, 20)
    with pytest.raises(ArgumentError, match="--sink many: neither a number of steps nor 'auto'"):
        parse_sink("many", 50, 50)


def test_steps_that_change_objects_in_place_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="steps that change objects in place run one at a time"):
        trained(tmp_path, 10, test_in_place.program(test_in_place.in_place), sink=5)
