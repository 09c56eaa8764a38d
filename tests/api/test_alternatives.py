"""``md.alternatives``: of functions with equal results, the one whose plan is fastest is taken, and what runs is it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.api import stages
from meshdsl.errors import ArgumentError, MemoryLimitError, PlanFileError, TraceError

WIDE, ROWS = 64, 32


def filled(*shape):
    return np.random.default_rng(sum(shape)).normal(0, 0.3, shape).astype(np.float32)


def by_columns(x, w):
    return jnp.tanh(x @ w["up"]) @ w["down"]


def by_rows(x, w):
    """The same, with products of all pairs of an element and a weight."""
    return jnp.sum(jnp.tanh(jnp.sum(x[:, :, None] * w["up"], 1))[:, :, None] * w["down"], 1)


PRODUCT = md.alternatives("product", {"pairs": by_rows, "product": by_columns})
NORM = md.alternatives("norm", {"mean": lambda x: jnp.mean(x**2), "sum": lambda x: jnp.sum(x**2) / x.size})


def loss(w, x):
    out, _ = jax.lax.scan(lambda x, _: (PRODUCT(x, w), None), x, length=2)
    return NORM(out)


def step(w, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w, x))


W, X = {"up": filled(16, WIDE), "down": filled(WIDE, 16)}, filled(ROWS, 16)
PINS = {"x": "data=S(0)"}


def test_the_fastest_is_taken_and_runs():
    sharded = md.parallelize(step, "data=8", PINS)
    plan = sharded.plan(W, X)
    assert dict(plan.alternatives)["product"] == "product"
    note = next(note for note in plan.notes if note.startswith("alternatives of product: product is taken; pairs "))
    only = md.parallelize(
        lambda w, x: jax.grad(lambda w, x: NORM(by_columns(by_columns(x, w), w)))(w, x), "data=8", PINS
    )
    assert "product" in note and only.plan(W, X).alternatives
    assert any("dot_general" in name for name in plan.operations) and sharded.verify(W, X).equal
    assert sharded.check(W, X).ok  # beside the first function


def test_each_is_planned_as_if_it_were_alone():
    """The plan is that of the step that says one function."""
    seconds = {}
    for name, function in {"pairs": by_rows, "product": by_columns}.items():

        def alone(w, x, function=function):
            return jnp.mean(function(function(x, w), w) ** 2)

        seconds[name] = md.parallelize(alone, "data=8", PINS).plan(W, X).seconds

    def both(w, x):
        return jnp.mean(PRODUCT(PRODUCT(x, w), w) ** 2)

    plan = md.parallelize(both, "data=8", PINS).plan(W, X)
    assert plan.seconds == pytest.approx(min(seconds.values()))
    assert dict(plan.alternatives) == {"product": min(seconds, key=seconds.get)}


def test_a_step_that_fits_with_none_says_what_each_needs():
    with pytest.raises(MemoryLimitError, match=r"no plan fits memory=100 B per device") as error:
        md.parallelize(step, "data=8", PINS, memory="100B").plan(W, X)
    note = error.value.__notes__[0]
    assert note.startswith("alternatives of product: none has a plan; pairs does not fit: the least found has ")


def test_a_saved_plan_runs_what_it_took(tmp_path):
    plan = md.parallelize(step, "data=8", PINS).plan(W, X)
    plan.save(tmp_path / "p.json")
    loaded = md.load_plan(tmp_path / "p.json")
    assert loaded == plan and loaded.alternatives == plan.alternatives
    again = md.parallelize(step, "data=8", PINS, plan=loaded)
    assert again.verify(W, X).equal
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), again(W, X), jax.jit(step)(W, X))
    renamed = md.alternatives("product", {"pairs": by_rows, "matrix": by_columns})
    with pytest.raises(ArgumentError, match=r"alternatives 'product': 'product' is none of pairs, matrix"):
        md.parallelize(lambda w, x: renamed(x, w), "data=8", plan=loaded).plan(W, X)
    with pytest.raises(PlanFileError):
        md.parallelize(lambda w, x: by_columns(x, w), "data=8", plan=loaded).plan(W, X)


def test_search_plans_every_choice_that_its_bound_does_not_exclude():
    found = md.search(step, W, X, devices=8, topology="dgx-h100", axes=("data", "model"))
    assert len(found.candidates) == 4 * 4 and dict(found.best.config.taken)["product"] == "product"
    assert "product=product,norm=" in str(found) and found.best.plan.alternatives == found.best.config.taken


def test_what_does_not_fit_is_left_out():
    kept = partial(by_columns, w=W)
    layer = md.alternatives("residuals", {"kept": kept, "recomputed": jax.checkpoint(kept)})

    def one(x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(jax.lax.scan(lambda x, _: (layer(x), None), x, length=6)[0])))(x)

    x = filled(256, 16)
    curve = md.parallelize(one, "data=8", PINS).frontier(x, points=3)
    assert [dict(each.plan.alternatives)["residuals"] for each in curve.points] == ["recomputed", "kept"]
    least = curve.points[0].plan.memory
    plan = md.parallelize(one, "data=8", PINS, memory=f"{least}").plan(x)
    assert plan.memory == least and plan.alternatives == (("residuals", "recomputed"),)
    assert "recomputed is taken; kept does not fit: the least found has " in plan.notes[-1]


def test_a_function_that_refuses_is_left_out():
    def refuse(x, w):
        raise ArgumentError("no sequence of 32 rows")

    chosen = md.alternatives("product", {"product": by_columns, "ring": refuse})
    plan = md.parallelize(lambda w, x: chosen(x, w), "data=8", PINS).plan(W, X)
    assert plan.notes[-1].endswith("ring cannot be planned: no sequence of 32 rows")


def test_shapes_that_jax_refuses_are_left_out():
    refuse = md.alternatives("product", {"product": by_columns, "square": lambda x, w: x.reshape(7, 7)})
    plan = md.parallelize(lambda w, x: refuse(x, w), "data=8", PINS).plan(W, X)
    text = "alternatives 'product': square refuses its arguments: cannot reshape array of shape (32, 16)"
    assert f"square cannot be planned: {text}" in plan.notes[-1]
    found = md.search(lambda w, x: refuse(x, w), W, X, devices=8, topology="dgx-h100", axes=("data",))
    assert dict(found.best.config.taken) == {"product": "product"}
    assert "square refuses its arguments" in str(found)


def test_the_frontier_leaves_out_what_has_no_plan():
    """A constraint that the mesh does not divide is found when the function is planned, not when it is traced."""
    uneven = md.alternatives(
        "rows", {"free": lambda x: x[:7] * 2, "split": lambda x: 2 * md.constrain(x[:7], "data=S(0)")}
    )
    sharded = md.parallelize(lambda x: uneven(x), "data=8", PINS)
    assert "split cannot be planned: constrain at " in sharded.plan(X).notes[-1]
    assert sharded.frontier(X, points=2).points


def test_weak_types_alone_plan_nothing(monkeypatch):
    def scaled(w, x, rate):
        return jax.tree.map(lambda w, g: w - rate * g, w, jax.grad(loss)(w, x))

    sharded = md.parallelize(scaled, "data=8", PINS)
    first = sharded.plan(W, X, 0.1)
    monkeypatch.setattr("meshdsl.api.stages.plan_best_variant", lambda *args, **kwargs: pytest.fail("planned again"))
    assert sharded.plan(W, X, np.float32(0.1)) == first and dict(first.alternatives)["product"] == "product"
    assert sharded.plan(W, X, jnp.float32(0.1)).notes[-1] == first.notes[-1]


def test_other_programs_of_weak_types_keep_layouts_and_functions(monkeypatch):
    """They are planned once, between the layouts of the first call, with its functions."""
    pins = []
    planned = stages.plan_best_variant

    def recorded(program, mesh, user_pins, *args, **kwargs):
        pins.append(user_pins)
        return planned(program, mesh, user_pins, *args, **kwargs)

    monkeypatch.setattr(stages, "plan_best_variant", recorded)

    def scaled(w, x, rate):
        return jax.tree.map(lambda w: rate * w, w), PRODUCT(x, w).sum()

    narrow = jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), W)
    sharded = md.parallelize(scaled, "data=8", PINS)
    first, second = (sharded.plan(narrow, X, rate) for rate in (0.1, np.float32(0.1)))
    assert first.alternatives == second.alternatives and len(pins) == 3
    assert set(pins[2].layouts) == {x.path for x in first.inputs} > set(pins[0].layouts)
    assert [x.layout for x in first.inputs] == [x.layout for x in second.inputs]


@pytest.mark.parametrize("wrap", [lambda layer: layer, jax.checkpoint], ids=["plain", "checkpoint"])
def test_any_used_result_offers_the_choice(wrap):
    """Autodiff drops results that the loop does not use, such as a count or a loss beside the activations."""

    def beside(layer, x, w):
        return {"rows": jnp.arange(3), "loss": jnp.sum(x), "out": layer(x, w), "width": WIDE, "cache": None}

    layer = md.alternatives("layer", {"pairs": partial(beside, by_rows), "product": partial(beside, by_columns)})

    def loss(w, x):
        out, _ = jax.lax.scan(lambda x, _: (wrap(lambda x, w: layer(x, w)["out"])(x, w), None), x, length=2)
        return jnp.sum(out**2)

    sharded = md.parallelize(lambda w, x: jax.grad(loss)(w, x), "data=8", PINS)
    assert sharded.plan(W, X).alternatives == (("layer", "product"),) and sharded.check(W, X).ok


def test_other_pins_choose_anew():
    split = {"x": "data=B", "w/up": "data=S(1)", "w/down": "data=S(0)"}
    sharded = md.parallelize(step, "data=8", PINS)
    sharded.plan(W, X)
    plan, alone = sharded.with_pins(split).plan(W, X), md.parallelize(step, "data=8", split).plan(W, X)
    assert plan.alternatives == alone.alternatives and plan.seconds == pytest.approx(alone.seconds)
    notes = [note for note in plan.notes if note.startswith("alternatives of ")]
    assert len(notes) == 2 and all("; pairs " in note or "; mean " in note or " sum " in note for note in notes)


def test_search_sees_what_only_one_function_offers():
    outer = md.alternatives("outer", {"pairs": by_rows, "inner": lambda x, w: PRODUCT(x, w)})
    found = md.search(lambda w, x: outer(x, w), W, X, devices=8, topology="dgx-h100", axes=("data",))
    taken = sorted(each.config.functions for each in found.candidates)
    assert taken == ["outer=inner,product=pairs", "outer=inner,product=product", "outer=pairs"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: md.alternatives("a b", {"one": len, "two": len}), r"alternatives: 'a b' is no name"),
        (lambda: md.alternatives("a", {"one": len}), r"alternatives 'a': 1 given, there is nothing to choose"),
        (lambda: md.alternatives("a", {"one": len, "two": 2}), r"alternatives 'a': two 2 is an int, not a function"),
    ],
)
def test_bad_arguments(call, text):
    with pytest.raises(ArgumentError, match=text):
        call()


def test_other_results_are_an_error():
    other = md.alternatives("cast", {"wide": lambda x: x, "narrow": lambda x: x.astype(jnp.bfloat16)})
    with pytest.raises(TraceError, match=r"with 'narrow', .* returns result bfloat16\[32,16\] instead of .*float32"):
        md.parallelize(lambda x: other(x), "data=8").plan(X)


def test_one_name_of_different_functions_is_an_error():
    first = md.alternatives("product", {"pairs": by_rows, "product": by_columns})
    second = md.alternatives("product", {"product": by_columns, "pairs": by_rows})
    with pytest.raises(
        ArgumentError, match=r"alternatives 'product' at .*: of product, pairs, elsewhere of pairs, product"
    ):
        md.parallelize(lambda w, x: first(x, w) + second(x, w), "data=8").plan(W, X)


def test_jitted_functions_are_traced_anew():
    """Caches of jax tell the choices apart."""
    inner = jax.jit(lambda x, w: PRODUCT(x, w))
    for _ in range(2):
        plan = md.parallelize(lambda w, x: inner(x, w), "data=8", PINS).plan(W, X)
        assert dict(plan.alternatives) == {"product": "product"} and "pairs" in plan.notes[-1]
