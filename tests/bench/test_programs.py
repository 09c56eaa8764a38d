"""Adapters to public training programs, on a made-up checkout: absent, imported with stubs, measured, on the page."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.programs import REGISTRY, adapters
from bench.programs.__main__ import main
from bench.programs.adapter import Adapter, Training, commit_of
from bench.programs.measure import MESHES, measure
from bench.programs.nested import first_call
from bench.programs.page import page, ratios
from bench.programs.steps import as_published, compare_in_a_row, copied, in_a_row, on_mesh, xla_program
from bench.step import bytes_sent
from meshdsl.api.stages import SLOW_DEVICES
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B

AUTHORS = """
import jax
import jax.numpy as jnp
import tensorflow_datasets as tfds
from clu.metric_writers import create_default_writer


class Reader(tfds.core.Reader):
    pass


@tfds.decorators.cached
def read():
    return create_default_writer()


def init():
    return {"w": jnp.eye(16), "m": jnp.zeros((16, 16))}


def train_step(state, batch):
    def loss(w):
        return jnp.mean((jnp.tanh(batch @ w) - 1) ** 2)

    value, gradient = jax.value_and_grad(loss)(state["w"])
    m = 0.9 * state["m"] + jax.lax.pmean(gradient, "batch")
    return {"w": state["w"] - 0.1 * m, "m": m}, jax.lax.pmean(value, "batch"), value
"""


def build(size):
    from made_up_train import init, train_step

    def batch(seed):
        return np.random.default_rng(seed).normal(size=(16, 16)).astype(np.float32)

    args = (init(), batch(0))
    args = args if size == "small" else jax.eval_shape(lambda: args)
    return Training(train_step, args, {"batch": 0}, lambda _, result, seed: (result[0], batch(seed)), "batch")


MADE_UP = Adapter(
    *("a perceptron", "someone/perceptron", "0" * 40, build, "16 rows"),
    changed=("`jax.pmap` becomes `md.parallelize`",),
    folders=("source",),
    stubs=("tensorflow_datasets", "clu"),
)


@pytest.fixture
def checkouts(tmp_path):
    folder = tmp_path / "someone+perceptron" / "source"
    folder.mkdir(parents=True)
    (folder / "made_up_train.py").write_text(AUTHORS)
    return tmp_path


@pytest.mark.sweep
def test_a_program_is_measured_from_its_checkout(checkouts):
    checkout, file = MADE_UP.checkout(checkouts), checkouts / "perceptron.json"
    for part in ("small", "large"):
        measure(MADE_UP, part, checkout, file)
    assert str(checkout / "source") not in sys.path and "tensorflow_datasets" not in sys.modules
    facts = json.loads(file.read_text())
    for mesh in MESHES:
        assert facts["small"][mesh]["in a row"] < 2e-4 and facts["small"][mesh]["shares"][1]["data"] > 0.5
        assert facts["small"][mesh]["outputs"] == 7  # state, next batch, and the last result
    assert set(ratios(facts["large"])) == {"free", "between"} and facts["large"]["XLA bytes"] > 0
    assert facts["large"]["seconds, batch alone"] > 0
    text = page({"perceptron": MADE_UP}, {"perceptron": facts})
    assert text.count("| perceptron |") == 2 + len(MESHES) and "`jax.pmap` becomes `md.parallelize`" in text
    assert "Not measured" not in text
    assert "Not measured yet: other" in page({"perceptron": MADE_UP, "other": MADE_UP}, {"perceptron": facts})


def test_a_step_that_trains_otherwise_is_reported(checkouts, monkeypatch):
    """Planned steps that get other batches than the author's end elsewhere."""
    monkeypatch.setattr("bench.programs.measure.MESHES", MESHES[:1])
    checkout, file = MADE_UP.checkout(checkouts), checkouts / "perceptron.json"

    def other(size):
        made = build(size)
        return replace(made, next_args=lambda args, result, seed: made.next_args(args, result, seed + on(result)))

    def on(result):
        return len(result[1].sharding.device_set)  # the author's results are read from the first device

    measure(replace(MADE_UP, build=other), "small", checkout, file)
    facts = json.loads(file.read_text())
    assert "differ from the unsharded step" in facts["small"][MESHES[0]]["error"]
    first_line = facts["small"][MESHES[0]]["error"].splitlines()[0]
    assert f"| **{first_line}** |" in page({"perceptron": MADE_UP}, {"perceptron": facts})


def test_a_page_says_what_bytes_above_the_limit_buy():
    large = {"plan seconds": 1.0, "seconds": 1.0, "gap": 0.0, "operations": 3, "XLA bytes": 100.0, "bytes": 130.0}
    found = {"perceptron": {"large": large}}
    assert "perceptron, 1.30: cause not known" in page({"perceptron": MADE_UP}, found)
    large |= {"seconds, batch alone": 2.0}
    assert "over `model` as well: 1 s predicted instead of 2 s" in page({"perceptron": MADE_UP}, found)


def test_a_step_inside_a_training_function_is_found():
    def train(rows):
        @partial(jax.jit, donate_argnums=0)
        def train_step(w, batch):
            return w - batch.mean()

        scale = jax.jit(lambda w: 2 * w)
        for _ in range(3):
            w = train_step(scale(jnp.ones(4)), rows)
        raise AssertionError(w)

    step, args = first_call(lambda: train(jnp.ones(4)), "jax.jit", "train_step")
    assert np.array_equal(step(*args), np.ones(4)) and jax.jit(step)(*args).shape == (4,)
    with pytest.raises(LookupError, match="other_step was not called"):
        first_call(lambda: jax.jit(jnp.sin)(1.0), "jax.jit", "other_step")


def test_modules_of_equinox_are_trained_as_their_author_does():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(16, 16, 16, 1, activation=jnp.tanh, key=jax.random.key(0))

    def train_step(model, batch):
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(batch) - batch) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    def batch(seed):
        return np.random.default_rng(seed).normal(size=(16, 16)).astype(np.float32)

    training = Training(
        train_step, (model, batch(0)), {"batch": 0}, lambda args, result, seed: (result[0], batch(seed))
    )
    mesh = Mesh.parse(MESHES[0], SLOW_DEVICES)
    published = as_published(training, mesh)
    expected = in_a_row(published, training, copied(training.args))
    report = compare_in_a_row(on_mesh(training, mesh), published, training, expected)
    assert report.worst < 2e-4 and len(report.leaves) == 2 * 6 + 2  # the model twice, next batch, loss


def test_a_step_of_which_nothing_is_split_is_replicated_by_xla():
    training = Training(lambda x: x @ x, (jnp.eye(16),), {}, lambda args, result, seed: (result,))
    mesh = Mesh.parse(MESHES[0])
    compiled, *layouts = xla_program(training, mesh)
    assert bytes_sent(compiled.as_text(), mesh) == 0
    assert layouts == [[Layout(data=B, model=B)]] * 2


def test_absent_checkouts_are_named_with_their_commits(tmp_path, monkeypatch, capsys):
    assert MADE_UP.checkout(tmp_path) is None
    monkeypatch.setattr(sys, "argv", ["programs", "--results", str(tmp_path), "--page", str(tmp_path / "page.md")])
    main()
    said = capsys.readouterr().out
    assert "google/flax at 18f8f311c275" in said and said.count("\n") == 1
    monkeypatch.setattr(sys, "argv", [*sys.argv, "imagenet", "--checkouts", str(tmp_path)])
    main()
    assert (
        "imagenet: no checkout" in capsys.readouterr().out
        and "Not measured yet: imagenet," in (tmp_path / "page.md").read_text()
    )


def test_a_checkout_says_its_commit(checkouts):
    checkout = MADE_UP.checkout(checkouts)
    assert commit_of(checkout) is None
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    assert len(commit_of(checkout)) == 40


def test_every_program_has_an_adapter():
    found = adapters()
    assert found.keys() == REGISTRY.keys()
    for each in found.values():
        assert len(each.commit) == 40 and each.repository.count("/") == 1 and len(each.changed) <= 5
