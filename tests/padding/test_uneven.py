"""A vocabulary that does not divide over the devices: planned, run, checked, verified, saved."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.api.plan_variants import plan_best_variant
from meshdsl.errors import MemoryLimitError, PinError
from meshdsl.padding.min_cut import padded_length, padded_sizes
from meshdsl.pins import UserPins, make_pins
from meshdsl.planner.limits import DEFAULT_LIMITS
from meshdsl.trace import trace
from tests.planner.graphs import solved

VOCAB, WIDTH, TOKENS = 103, 16, 32
ADAM = optax.adam(1e-2)


def integer_labels(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def one_hot(logits, labels):
    return -(jax.nn.one_hot(labels, logits.shape[-1]) * jax.nn.log_softmax(logits)).sum(-1).mean()


def step_of(loss, pin=None, optimizer=ADAM):
    """A language model of nothing but an embedding, tied to the logits, and a bias on them."""

    def step(params, state, ids, labels):
        def objective(params):
            logits = params["embed"][ids] @ params["embed"].T + params["bias"]
            return loss(md.constrain(logits, pin) if pin else logits, labels)

        value, gradients = jax.value_and_grad(objective)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def arguments(vocab=VOCAB, width=WIDTH, tokens=TOKENS, optimizer=ADAM):
    rng = np.random.default_rng(0)
    params = {"embed": rng.normal(size=(vocab, width)), "bias": rng.normal(size=vocab)}
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    return params, optimizer.init(params), rng.integers(0, vocab, tokens), rng.integers(0, vocab, tokens)


@pytest.mark.parametrize(
    ("loss", "mesh", "pin"),
    [
        (integer_labels, "data=4,model=2", "data=S(0) model=S(1)"),
        (integer_labels, "model=8", "model=S(1)"),
        (one_hot, "data=4,model=2", "data=S(1) model=S(1)"),
        (one_hot, "model=8", "model=S(1)"),
    ],
)
def test_logits_split_over_the_vocabulary(loss, mesh, pin):
    sharded = md.parallelize(step_of(loss, pin), mesh)
    plan = sharded.plan(*arguments())
    assert plan.padded == ((103, 104),)
    assert any("(103) is padded to 104 inside the step, as a constraint splits it" in note for note in plan.notes)
    sharded.check(*arguments())
    sharded.verify(*arguments())


def test_a_padding_that_pays_runs_and_is_saved(tmp_path):
    step, args = step_of(integer_labels), arguments(1009, 256, 512)
    plan = md.parallelize(step, "model=8").plan(*args)
    assert plan.padded == ((1009, 1016),)
    plan.save(tmp_path / "plan.json")
    loaded = md.load_plan(tmp_path / "plan.json")
    assert loaded == plan and not loaded.diff(plan)
    again = md.parallelize(step, "model=8", plan=loaded)
    again.check(*args)
    again.verify(*args)


def test_gpt2s_vocabulary_on_8_devices():
    """Planning alone: the padded vocabulary is split, and the step is faster for it."""
    params = jax.eval_shape(lambda: {"embed": jnp.zeros((50257, 768)), "bias": jnp.zeros(50257)})
    ids = jax.ShapeDtypeStruct((2048,), jnp.int32)
    step, args = step_of(integer_labels), (params, jax.eval_shape(ADAM.init, params), ids, ids)
    mesh = md.Mesh(model=8, topology="dgx-h100")
    planned = plan_best_variant(trace(step, args), mesh, UserPins())
    program, plan = planned.program, planned.plan
    plain = trace(step, args)
    assert plan.padded == ((50257, 50264),)
    assert plan.seconds < 0.9 * solved(plain, mesh, make_pins(plain, mesh)).seconds
    (logits,) = (op.outputs[0] for op in program.graph.ops if op.name == "exp")
    assert logits.shape == (2048, 50264)
    assert plan.solution.layouts[logits.id] == md.Layout(model=md.S(1))
    (note,) = plan.notes
    said = r"dim 0 of params/embed \(50257\) is padded to 50264 inside the step: [\d.]+ .?s; without, [\d.]+ .?s"
    assert re.fullmatch(said, note) and note in str(plan)


def test_what_does_not_pay_is_left_and_the_plan_says_so():
    plan = md.parallelize(step_of(integer_labels), "data=8").plan(*arguments())
    (note,) = plan.notes
    assert plan.padded == ()
    said = r"dim 0 of params/embed \(103\) does not divide over the mesh and is left unpadded: padded to 104, .*; .*"
    assert re.fullmatch(said, note)


def test_what_nothing_heavy_reads_is_left_and_the_plan_says_so():
    plan = md.parallelize(jnp.exp, "data=8").plan(np.ones(103, np.float32))
    unused = "no product, convolution, lookup or reduction uses it"
    assert plan.notes == (f"dim 0 of x (103) does not divide over the mesh and is left unpadded: {unused}",)


def test_a_step_that_fits_only_padded():
    """Without padding every device holds the whole product: 63 rows do not divide either, and are too few to pad."""
    args = jax.ShapeDtypeStruct((63, 8), jnp.float32), jax.ShapeDtypeStruct((8, 100_001), jnp.float32)
    plan = md.parallelize(lambda x, w: jnp.square(x @ w).sum(), "model=8", memory="12MB").plan(*args)
    assert plan.padded == ((100_001, 100_008),) and plan.memory < 12e6
    assert plan.notes[0].endswith("; without, exceeds the memory limit")
    with pytest.raises(MemoryLimitError, match="memory=1 MB per device"):
        md.parallelize(lambda x, w: jnp.square(x @ w).sum(), "model=8", memory="1MB").plan(*args)


def microbatched(carried, pin=None, arranged=lambda x: x):
    """Gradients of microbatches, summed over all of them or followed at once: the vocabulary is a const or a carry."""

    def objective(params, batch):
        logits = params["embed"][batch[0]] @ params["embed"].T + params["bias"]
        return integer_labels(md.constrain(logits, pin) if pin else logits, batch[1])

    def descend(params, g):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, g)

    def step(params, ids, labels):
        def trip(carry, batch):
            g = jax.grad(objective)(arranged(carry) if carried else params, batch)
            return (descend(arranged(carry), g) if carried else jax.tree.map(jnp.add, carry, g)), None

        start = params if carried else jax.tree.map(jnp.zeros_like, params)
        result, _ = jax.lax.scan(trip, start, (ids, labels))
        return result if carried else descend(params, result)

    return step


def microbatches(count, *sizes):
    params, _, *batch = arguments(*sizes)
    return params, *(x.reshape(count, -1) for x in batch)


@pytest.mark.parametrize(("carried", "mesh"), [(False, "data=4,model=2"), (True, "model=8")], ids=["const", "carry"])
def test_a_loop_hands_a_vocabulary_on_padded(carried, mesh):
    sharded, args = md.parallelize(microbatched(carried, "model=S(1)"), mesh), microbatches(2)
    plan = sharded.plan(*args)
    assert plan.padded == ((103, 104),)
    assert not any("on every trip" in note for note in plan.notes)
    sharded.check(*args)
    sharded.verify(*args)


@pytest.mark.parametrize("carried", [False, True], ids=["const", "carry"])
def test_a_padded_vocabulary_is_put_together_once_after_the_loop(carried):
    plan = md.parallelize(microbatched(carried), "model=8").plan(*microbatches(4, 2017, 192, 1024))
    assert plan.padded == ((2017, 2024),)
    assert any(c.trips == 4 for c in plan.collectives)
    assert not [c for c in plan.collectives if c.trips == 4 and {*c.shape} <= {2017, 2024, 192}]


def test_a_loop_that_cannot_hand_it_on_padded_pads_it_on_every_trip():
    """What is sorted has no padding."""
    step = microbatched(True, "model=S(1)", lambda params: jax.tree.map(lambda x: jnp.sort(x, axis=0), params))
    sharded, args = md.parallelize(step, "model=8"), microbatches(2)
    (note,) = sharded.plan(*args).notes
    assert re.search(r"; scan at test_uneven.py:\d+ carries it unpadded and pads it in every iteration$", note)
    sharded.check(*args)


def test_lengths():
    mesh = md.Mesh(data=4, model=2)
    assert [padded_length(n, mesh) for n in (50257, 103, 64, 63, 33, 31, 17, 7)] == [50264, 104, 64, 64, 36, 32, 18, 7]
    program = trace(step_of(integer_labels), arguments())
    assert padded_sizes(program, mesh) == {103: 104}
    assert padded_sizes(program, md.Mesh(data=1)) == {}


def test_a_very_large_step_is_not_planned_again_for_lengths_that_each_axis_divides():
    """68 divides over 4 devices, and over 2, but not over 8; 103 over none."""

    def notes(vocab, limits=DEFAULT_LIMITS):
        program = trace(step_of(integer_labels), arguments(vocab))
        return " ".join(plan_best_variant(program, md.Mesh(data=4, model=2), UserPins(), limits=limits).plan.notes)

    untried = "dim 0 of params/embed and 4 more (68) is left unpadded: every mesh axis divides it"
    assert "(68) does not divide over the mesh and is left unpadded: padded to 72, " in notes(68)
    few = replace(DEFAULT_LIMITS, solve_variant_operations=3)
    assert untried in notes(68, few)
    assert "padded to 104" in notes(103, few)


def test_a_pinned_input_stays_an_error():
    with pytest.raises(PinError, match="left free, it is padded inside the step where that pays"):
        md.parallelize(step_of(integer_labels), "model=8", layouts={"params/embed": "model=S(0)"}).plan(*arguments())
