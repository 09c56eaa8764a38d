"""One table of layout rules for many models: dims that a step lacks are listed once; strict rules refuse them."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from tests.pins.test_axis_rules import ARGS, MESH, fault, loss, pins, step

OWN = "batch:data hidden:model"
SHARED = f"experts:expert {OWN} kv_heads:(model,data) vocab:model"
SAID = "rules name dims that this step lacks: experts, kv_heads, vocab"


def notes(rules, step=step, args=ARGS, **options):
    plan = md.parallelize(step, MESH, rules=rules, **options).plan(*args)
    return [note for note in plan.notes if note.startswith("rules ")]


def test_other_names_pin_nothing():
    assert pins(SHARED) == pins(OWN)


def test_a_note_of_the_plan_lists_them_once():
    assert notes(SHARED) == [SAID] and notes(OWN) == []


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("batch:data hiden:model", "hiden (did you mean 'hidden'?)"),
        (md.Rules("batch:data vocab:model", params="embed:data experts:model"), "vocab, params experts"),
        (md.Rules("batch:data", params="batch:model", optimizer="layers:data"), "params batch, optimizer layers"),
        (md.Rules("batch:data", activations="hidden:model heads:model"), "activations heads"),
        ("batch:data layers:pipe experts:(expert,data)", "layers, experts"),
    ],
)
def test_names_of_every_table(rules, said):
    assert notes(rules) == [f"rules name dims that this step lacks: {said}"]


def test_a_kind_of_arrays_that_the_step_lacks():
    """Without optimizer state there is nothing that its table could pin."""

    def plain(params, batch):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))

    args = ARGS[0], ARGS[2]
    rules = md.Rules("batch:data", params="embed:data", optimizer="embed:data")
    assert notes(rules, plain, args) == ["rules name dims that this step lacks: optimizer embed"]
    assert pins(rules, step=plain, args=args)["params/up"] == "data=S(0)"


def test_inference():
    assert notes(SHARED, loss, (ARGS[0], ARGS[2])) == [SAID]


def test_names_of_flax():
    model = nn.Dense(64, kernel_init=nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "hidden")))
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((8, 16)))

    def applied(params, x):
        return model.apply(nn.unbox(params), x)

    rules = "hidden:model batch:data heads:model"
    said = ["rules name dims that this step lacks: batch, heads"]
    assert notes(rules, applied, (params, jax.ShapeDtypeStruct((8, 16), jnp.float32))) == said


def test_the_log_says_it_once(caplog):
    caplog.set_level(logging.INFO, logger="meshdsl")
    sharded = md.parallelize(loss, MESH, rules=SHARED)
    params = jax.tree.map(lambda x: jnp.ones(x.shape), ARGS[0])
    for rows in (32, 64):
        for _ in range(2):
            sharded(params, md.named(jnp.ones((rows, 16)), "batch embed"))
    assert [r.getMessage() for r in caplog.records if "rules" in r.getMessage()] == [f"loss: {SAID}"]


def test_microbatches_and_other_pins_keep_the_note():
    assert notes(SHARED, pipeline=md.Pipeline(microbatches=2)) == [SAID]
    sharded = md.parallelize(loss, MESH, rules=SHARED)
    sharded.plan(ARGS[0], ARGS[2])
    again = sharded.with_pins({"x": "model=B"}).plan(ARGS[0], ARGS[2])
    assert [note for note in again.notes if note.startswith("rules ")] == [SAID]


def test_a_table_of_which_nothing_applies_is_a_fault():
    assert fault("experts:model") == ["rules: no array has a dim 'experts'; known: hidden, embed, batch"]
    assert fault(md.Rules(params="batch:data")) == ["rules: no parameter has a dim 'batch'; known: hidden, embed"]
    plain = fault("batch:data", step=lambda x: 2 * x, args=(jnp.ones((8, 8)),))
    assert plain == ["rules: no array has a dim 'batch'; md.named gives dims their names"]


def test_strict_rules():
    assert fault(md.Rules("batch:data hiden:model embed:dat experts:expert", strict=True)) == [
        "rules: embed:dat: no axis 'dat' in the mesh; did you mean 'data'?",
        "rules: experts:expert: no axis 'expert' in the mesh; known: data, model",
        "rules: no array has a dim 'hiden'; did you mean 'hidden'?",
        "rules: no array has a dim 'experts'; known: hidden, embed, batch",
    ]
    strict = md.Rules(OWN, strict=True)
    assert pins(strict) == pins(OWN)
    assert eval(f"md.{strict!r}") == strict != md.Rules(OWN) and str(strict) == OWN


def test_axes_of_names_that_the_step_has_are_checked():
    assert fault("batch:dta experts:expert") == ["rules: batch:dta: no axis 'dta' in the mesh; did you mean 'data'?"]
