"""The last batch of an evaluation, and other pins that do not divide: loosened or padded where asked, else an error."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import meshdsl as md
from meshdsl.api.stages import SLOW_DEVICES
from meshdsl.errors import ArgumentError, PinError, PlanFileError
from tests.sweeps import swept

ROWS, WIDTH, CLASSES = 30, 8, 12
BATCH = {"batch/**": "data=S(0)"}
DATA = md.Mesh(data=4, topology=SLOW_DEVICES)  # on which plans of small steps divide as those of large ones


def arguments(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    params = {"w": rng.normal(size=(WIDTH, CLASSES)), "b": rng.normal(size=CLASSES)}
    batch = {"x": rng.normal(size=(rows, WIDTH)).astype(np.float32), "y": rng.integers(0, CLASSES, rows)}
    return jax.tree.map(lambda x: x.astype(np.float32), params), batch


def logits_of(params, batch):
    return jnp.tanh(batch["x"] @ params["w"] + params["b"])


def loss_of(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch), batch["y"]).mean()


def evaluate(params, batch):
    logits = logits_of(params, batch)
    return {"loss": loss_of(params, batch), "accuracy": (logits.argmax(-1) == batch["y"]).mean()}


def per_example(params, batch):
    logits = logits_of(params, batch)
    return jax.nn.softmax(logits), logits.max(-1), jnp.argsort(logits, -1)


def normalised(params, batch):
    """Statistics of the batch, as batch norm has them."""
    h = logits_of(params, batch)
    h = (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5)
    return jnp.square(h).sum(), h.std(0), jnp.median(h, axis=1).mean()


def train(params, batch):
    value, gradients = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def constrained(params, batch):
    hidden = md.constrain(logits_of(params, batch), "data=S(0)")
    return jnp.sum(jnp.exp(hidden), axis=0)


def contrastive(params, batch):
    """Rows against rows: both dims of the similarities are the batch."""
    h = logits_of(params, batch)
    similar = h @ h.T - 1e3 * jnp.eye(len(h))
    return jax.nn.logsumexp(similar, axis=1).mean(), jnp.diagonal(jax.nn.softmax(similar)).sum()


def in_scan(params, batch):
    def trip(h, w):
        return jnp.tanh(h + (h @ w) @ w.T), jnp.abs(h).max()

    last, most = lax.scan(trip, batch["x"], jnp.stack([params["w"], 0.5 * params["w"]]))
    return last.mean(), most, jnp.linalg.norm(last)


def extremes(params, batch):
    h = logits_of(params, batch)
    return h.min(0), jnp.argmax(h, 0), jnp.prod(h, 0), (h > 0).all(0), (h > 0.9).any(), lax.top_k(h[:, 0], 3)


def sequence_of_statistics(params, batch):
    """Running and sorted along the batch; devices hand totals on, or the batch is put together."""
    h = logits_of(params, batch)
    return lax.cumsum(h, 0).mean(), jnp.sort(h, 0)[0], jnp.where(h > 0, h, 0).sum() / jnp.maximum((h > 0).sum(), 1)


def without_rows_of_its_own(params, batch):
    weights = jax.nn.one_hot(batch["y"], CLASSES)
    return weights.T @ logits_of(params, batch), weights.sum(0)


def flattened(params, batch):
    """Tokens of all sequences in one dim, as the loss of a language model has them."""
    logits = (batch["x"][:, :, None] * params["w"][None]).reshape(-1, CLASSES)
    return jax.nn.log_softmax(logits @ params["w"].T).mean(), logits.max(0)


STEPS = [evaluate, per_example, normalised, train, constrained, contrastive, in_scan, extremes,
         sequence_of_statistics, without_rows_of_its_own, flattened]  # fmt: skip


@swept("step", STEPS, ids=lambda step: step.__name__, every=2)
def test_padded_numbers_are_those_of_the_step(step):
    sharded, args = md.parallelize(step, "data=4,model=2", BATCH, uneven="pad"), arguments()
    plan = sharded.plan(*args)
    assert dict(plan.padded)[ROWS] == 32
    assert plan.layout("batch/x").on("data") is md.B
    sharded.check(*args)
    assert sharded.check(*args, divide="most").divided["data"] > 0.5
    sharded.verify(*args)


@pytest.mark.parametrize("step", [train, constrained], ids=lambda step: step.__name__)
def test_replicated_numbers_are_those_of_the_step(step):
    sharded, args = md.parallelize(step, DATA, BATCH, uneven="replicate"), arguments()
    plan = sharded.plan(*args)
    assert plan.layout("batch/x") == md.Layout(data=md.B)
    assert plan.padded == ()
    assert sharded.check(*args).divided["data"] > 0


def test_devices_compute_their_own_rows():
    """Of 32 padded rows, each device has 8, and a few sums are all that is sent."""
    mesh = md.Mesh(data=4, topology="dgx-h100")
    args = jax.eval_shape(
        lambda: (
            {"w": jnp.zeros((4096, 4096)), "b": jnp.zeros(4096)},
            {"x": jnp.zeros((30, 4096)), "y": jnp.zeros(30, jnp.int32)},
        )
    )
    padded, whole = (
        md.parallelize(loss_of, mesh, {**BATCH, "params/**": "data=B"}, uneven=how).plan(*args)
        for how in ("pad", "replicate")
    )
    assert padded.bytes < 100 and padded.memory < whole.memory * 1.1
    assert (
        "batch/x float32[30,4096], batch/y int32[30]: data=S(0) does not divide; data=B at the boundary, padded and "
        "split inside (uneven='pad')"
    ) in padded.notes


@pytest.mark.parametrize("rows", [1, 3, 29, 33])
def test_every_number_of_rows(rows):
    sharded, args = md.parallelize(evaluate, "data=4", BATCH, uneven="pad"), arguments(rows)
    assert dict(sharded.plan(*args).padded) == {rows: -(-rows // 4) * 4}
    sharded.check(*args)


def test_an_evaluation_whose_last_batch_is_smaller(caplog):
    sharded = md.parallelize(evaluate, "data=4", BATCH, uneven="pad")
    params, _ = arguments()
    with caplog.at_level(logging.WARNING, "meshdsl"):
        for rows in (128, 128, 30, 128, 30):
            batch = arguments(rows, rows)[1]
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
                sharded(params, batch),
                evaluate(params, batch),
            )
    said = [r.getMessage() for r in caplog.records if "does not divide" in r.getMessage()]
    assert said == [
        "evaluate: batch/x float32[30,8], batch/y int32[30]: data=S(0) does not divide; data=B at the boundary, padded "
        "and split inside (uneven='pad')"
    ]
    assert sharded.plan(params, arguments(128)[1]).layout("batch/x") == md.Layout(data=md.S(0))
    assert any("data=S(0) does not divide" in note for note in sharded.plan(params, arguments()[1]).notes)


def test_axes_that_divide_stay():
    """30 rows divide over x=2, not over x=2 and y=2 together; y is loosened, and the other dim's axis is kept."""
    layouts = {"batch/*": "x=S(0) y=S(0)", "params/w": "z=S(1)"}
    sharded, args = md.parallelize(evaluate, "x=2,y=2,z=2", layouts, uneven="replicate"), arguments()
    plan = sharded.plan(*args)
    assert plan.layout("batch/x").on("x") is md.S(0)
    assert plan.layout("batch/x").on("y") is md.B and plan.layout("params/w").on("z") is md.S(1)
    sharded.check(*args)
    padded = md.parallelize(evaluate, "x=2,y=2,z=2", layouts, uneven="pad")
    assert dict(padded.plan(*args).padded)[ROWS] == 32
    padded.check(*args)


def test_outputs_and_rules_and_constraints():
    def step(params, batch):
        h = logits_of(params, batch)
        return md.constrain(h, "data=S(0)"), h.sum(0)

    args = arguments()
    for how in ("pad", "replicate"):
        sharded = md.parallelize(step, DATA, BATCH, outputs={"0": "data=S(0)"}, uneven=how)
        assert sharded.plan(*args).outputs[0].layout == md.Layout(data=md.B)
        sharded.check(*args)

    x = md.named(np.ones((30, 8), np.float32), "batch embed")
    for how in ("pad", "replicate"):
        ruled = md.parallelize(lambda x: jnp.tanh(x.array).sum(), DATA, rules="batch:data", uneven=how)
        assert ruled.check(x).ok


def test_keys_are_replicated():
    """Random keys have no padding."""

    def step(keys, x):
        return jax.vmap(jax.random.uniform)(keys).sum() + x.sum()

    args = jax.random.split(jax.random.key(0), 30), np.ones((30, 4), np.float32)
    md.parallelize(step, "data=4", {"*": "data=S(0)"}, uneven="pad").check(*args)


def test_without_the_option_the_error_names_it():
    with pytest.raises(PinError) as error:
        md.parallelize(evaluate, "data=4", BATCH).plan(*arguments())
    near = "dim 0 of size 30 does not divide over data=4; nearest sizes that work: 28, 32"
    assert str(error.value) == (
        "the pins of evaluate do not fit, on mesh data=4:\n"
        f"  layouts['batch/**']: batch/x float32[30,8]: {near}\n"
        f"  layouts['batch/**']: batch/y {jnp.asarray(arguments()[1]['y']).dtype}[30]: {near}\n"
        "arguments: params, batch; '*' is one path component, '**' any number; "
        "uneven='pad' or uneven='replicate' takes pins that do not divide"
    )
    with pytest.raises(PinError, match=r"constrain at test_uneven_pins.py:\d+: .*\n.*; uneven='pad' or"):
        md.parallelize(constrained, "data=4").plan(*arguments())


def test_other_faults_stay_errors():
    for how in ("pad", "replicate"):
        with pytest.raises(PinError, match=r"data=S\(3\) is out of range"):
            md.parallelize(evaluate, "data=4", {"batch/x": "data=S(3)"}, uneven=how).plan(*arguments())
    with pytest.raises(
        ArgumentError, match="uneven: 'padd' is not 'error' or 'replicate' or 'pad'; did you mean 'pad'"
    ):
        md.parallelize(evaluate, "data=4", uneven="padd")


def test_a_saved_plan_runs_under_the_same_option(tmp_path):
    args = arguments()
    plan = md.parallelize(evaluate, "data=4", BATCH, uneven="pad").plan(*args)
    plan.save(tmp_path / "plan.json")
    loaded = md.load_plan(tmp_path / "plan.json")
    assert loaded == plan
    md.parallelize(evaluate, "data=4", BATCH, plan=loaded, uneven="pad").check(*args)
    with pytest.raises(PinError, match="uneven='pad' or"):
        md.parallelize(evaluate, "data=4", BATCH, plan=loaded).plan(*args)
    with pytest.raises(PlanFileError):
        md.parallelize(evaluate, "data=4", BATCH, plan=loaded, uneven="replicate").plan(*args)


def test_other_pins_and_explanations():
    args = arguments()
    sharded = md.parallelize(evaluate, "data=4", uneven="pad")
    sharded.plan(*args)
    other = sharded.with_pins(BATCH)
    assert dict(other.plan(*args).padded)[ROWS] == 32
    other.check(*args)
    assert str(other.explain("params/w", *args))


def test_programs_and_searches():
    program = md.Program(evaluate, arguments(), BATCH, uneven="pad")
    found = md.search(program, devices=4, axes=("data",))
    assert dict(found.candidates[0].plan.padded)[ROWS] == 32
    with pytest.raises(ArgumentError, match="uneven: 3 is not 'error' or 'replicate' or 'pad'"):
        md.Program(evaluate, arguments(), uneven=3)


def test_microbatches_are_replicated():
    """In microbatches of 15 rows a constraint would split every other row; the pin is loosened."""
    sharded = md.parallelize(train, DATA, BATCH, pipeline=md.Pipeline(2), uneven="pad")
    plan = sharded.plan(*arguments())
    assert any("data=B at the boundary (uneven='replicate')" in note for note in plan.notes)
    sharded.check(*arguments())


@pytest.mark.parametrize("uneven", ["replicate", "pad"])
def test_layers_that_do_not_divide_over_stages_are_a_pipeline(uneven):
    def step(params, batch):
        def loss(params):
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["layers"])
            return jnp.mean((x @ params["head"]) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    params, batch = {"layers": jnp.ones((3, 8, 8)) / 8, "head": jnp.ones((8, 5))}, {"x": jnp.ones((8, 8))}
    pins = {"params/layers": "pipe=S(0)", "params/head": "pipe=S(1)", **BATCH}
    sharded = md.parallelize(step, "pipe=2,data=2", pins, pipeline=md.Pipeline(2), uneven=uneven)
    plan = sharded.plan(params, batch)
    assert plan.pipeline.layers in ((1, 2), (2, 1))
    assert [note.partition(";")[0] for note in plan.notes if "does not divide" in note] == [
        "params/head float32[8,5]: pipe=S(1) does not divide"
    ]
    sharded.check(params, batch)


def test_short_rows_are_padded_in_every_variant():
    """30 rows are too short to be padded unasked; padding both widths without them would be faster."""

    def step(params, batch):
        return jnp.sum(jnp.tanh(jnp.tanh(batch["x"] @ params["up"]) @ params["down"]))

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    params, batch = {"up": shape(4001, 4003), "down": shape(4003, 4001)}, {"x": shape(ROWS, 4001)}
    plan = md.parallelize(step, "data=8", BATCH, uneven="pad").plan(params, batch)
    assert dict(plan.padded)[ROWS] == 32
    assert any("(30) is padded to 32 inside the step, as a constraint splits it" in note for note in plan.notes)
