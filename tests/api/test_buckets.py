"""Small collectives that are sent as one: planned, priced, bounded, lowered, verified and saved."""

from dataclasses import replace
from math import inf

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import PlanFileError
from meshdsl.planner.solve import SearchResult

RNG = np.random.default_rng(0)


def params(layers, d=64, dtype=jnp.float32):
    def draw(*shape):
        return jnp.asarray(RNG.normal(size=shape) / 8, dtype)

    return {f"l{i}": {"w": draw(d, d), "b": draw(d)} for i in range(layers)}


def step(p, m, batch):
    """Momentum with gradients that are clipped by their global norm."""

    def loss(p):
        h = batch
        for layer in p.values():
            h = jnp.tanh(h @ layer["w"] + layer["b"])
        return jnp.mean((h - batch) ** 2)

    value, g = jax.value_and_grad(loss)(p)
    norm = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(g)))
    m = jax.tree.map(lambda m, g: 0.9 * m + g / jnp.maximum(1, norm), m, g)
    return jax.tree.map(lambda p, m: p - 0.1 * m, p, m), m, value


def batch(rows=256, d=64):
    return jnp.asarray(RNG.normal(size=(rows, d)), jnp.float32)


def runs(plan):
    return sum(c.trips for c in plan.collectives)


def checked(step, mesh, pins, args):
    """The plan, after its program was compared with it in bytes, collectives and numbers."""
    sharded = md.parallelize(step, mesh, pins)
    report, plan = sharded.verify(*args), sharded.plan(*args)
    sharded.check(*args)
    assert all(line.compiled_runs == line.runs or any("combined" in n for n in report.notes) for line in report.lines)
    assert plan.lower_bound <= plan.seconds
    return plan


@pytest.mark.parametrize("mesh", ["data=8", "data=4,model=2"])
def test_the_free_plan_of_small_layers_is_data_parallel_with_one_sum(mesh):
    """Each sum by itself costs a latency, and then other plans, which send more, would be faster."""
    p = params(5)
    plan = checked(step, mesh, {"batch": "data=S(0)"}, (p, p, batch()))
    (sent,) = plan.collectives
    whole = 5 * (64 * 64 + 64) * 4 + 4
    assert (sent.kind, len(sent.parts), runs(plan)) == ("all-reduce", 11, 1)
    assert plan.bytes == sent.bytes <= 1.1 * 2 * whole * 7 / 8 and sum(c.bytes for c in sent.parts) >= sent.bytes - 11
    assert "11 sent as one: partial sum" in str(plan) and "  of it     data" in str(plan)


@pytest.mark.parametrize("d, effort, proofs", [(64, "default", 3), (256, "default", 2), (256, "prove", 3)])
def test_plans_without_buckets_are_proved_only_where_one_latency_counts(monkeypatch, d, effort, proofs):
    """Bounds without latencies, and with those that no bucket shares, hold for such plans but for that one."""
    asked, certify = list[float](), SearchResult.certify
    monkeypatch.setattr(SearchResult, "certify", lambda self, enough=inf: asked.append(enough) or certify(self, enough))
    p = params(3, d)
    plan = md.parallelize(step, "data=8", {"batch": "data=S(0)"}, effort=effort).plan(p, p, batch(d=d))
    assert any(c.parts for c in plan.collectives) and 0 < plan.lower_bound < plan.seconds
    assert len(asked) == proofs


def test_gradients_are_summed_before_the_learning_rate_where_they_can_wait_for_each_other():
    """Behind its product with the learning rate each is needed at once, by the subtraction from its parameter."""

    def recurrent(p, batch):
        def loss(p):
            zeros = jnp.zeros((batch.shape[1], 32))
            h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(x @ p["x"] + h @ p["h"]), None), zeros, batch)
            return jnp.mean((h @ p["o"]) ** 2)

        value, g = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, g), value

    p = {name: jnp.ones((16 if name == "x" else 32, 32)) / 32 for name in "xho"}
    plan = checked(recurrent, "data=8", {"batch": "data=S(1)"}, (p, batch(8 * 64, 16).reshape(8, 64, 16)))
    assert [(c.kind, len(c.parts)) for c in plan.collectives] == [("all-reduce", 4)]
    assert plan.gap < 0.01


def test_the_bound_holds_for_buckets_in_place_of_collectives_of_several_kinds():
    """Sums over other axes cannot share a latency, but where all are over the same ones they can."""

    def convolved(w, batch):
        def loss(w):
            n = batch.shape[1]
            spectrum = jnp.fft.rfft(batch, 2 * n, axis=1) * jnp.fft.rfft(w, 2 * n, axis=1).T
            return jnp.mean(jax.nn.gelu(jnp.fft.irfft(spectrum, 2 * n, axis=1)[:, :n]) ** 2)

        value, g = jax.value_and_grad(loss)(w)
        return w - 0.1 * g, value

    args = jnp.ones((32, 40)), batch(16 * 40, 32).reshape(16, 40, 32)
    pins = {"batch": "data=S(0)"}
    plain = md.parallelize(convolved, "data=4,model=2", {"w": "data=B model=B", "batch": "data=S(0) model=B"})
    plan = checked(convolved, "data=4,model=2", pins, args)
    assert plan.lower_bound <= plan.seconds <= plain.plan(*args).seconds
    assert plan.gap < 0.05


def test_all_sums_are_one_where_other_plans_send_several_kinds():
    """At prices where every kind shares latencies, reduce-scatters and all-gathers take the place of some sums."""

    def mixture(p, x, y):
        def loss(p):
            weight, mean, log_scale = jnp.split(jnp.tanh(x @ p["up"]) @ p["down"], 3, axis=-1)
            density = jax.scipy.stats.norm.logpdf(y[:, None], mean, jnp.exp(log_scale))
            return -jnp.mean(jax.nn.logsumexp(jax.nn.log_softmax(weight) + density, axis=-1))

        value, g = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - 0.01 * g, p, g), value

    p = {"up": batch(8, 96) / 3, "down": batch(96, 15) / 10}
    plan = checked(
        mixture, "data=4,model=2", {"x": "data=S(0)", "y": "data=S(0)"}, (p, batch(48, 8), batch(48, 1)[:, 0])
    )
    assert [c.kind for c in plan.collectives if c.parts] == ["all-reduce"]
    assert plan.gap < 0.05


@pytest.mark.parametrize("split", ["S(0)", "S(1)"])
def test_scattered_gradients_and_gathered_parameters_are_buckets(split):
    p = params(4)
    pins = {"batch": "data=S(0)", "p/**": "data=B", "m/**/w": f"data={split}", "m/**/b": "data=S(0)"}
    plan = checked(step, "data=8", pins, (p, p, batch()))
    assert {(c.kind, len(c.parts)) for c in plan.collectives} >= {("reduce-scatter", 8), ("all-gather", 8)}


def test_buckets_inside_loops_are_sent_in_every_iteration():
    def normalized(w, batch):
        def layer(h, w):
            mean, square = jnp.mean(h, 0), jnp.mean(h * h, 0)
            return jnp.tanh((h - mean) * jax.lax.rsqrt(square - mean**2 + 1e-3)) @ w, None

        return jax.lax.scan(layer, batch, w)[0]

    args = jnp.asarray(RNG.normal(size=(3, 64, 64)) / 8, jnp.float32), batch()
    plan = checked(normalized, "data=8", {"w": "data=B", "batch": "data=S(0)"}, args)
    assert [(c.trips, len(c.parts)) for c in plan.collectives] == [(3, 2)]


def test_short_floats_are_sent_as_such():
    p = params(3, dtype=jnp.bfloat16)
    pins = {"batch": "data=S(0)", "p/**": "data=B", "m/**": "data=B"}
    plan = checked(step, "data=8", pins, (p, p, batch().astype(jnp.bfloat16)))
    buckets = [c for c in plan.collectives if c.parts]
    assert buckets and all({part.dtype for part in c.parts} == {c.dtype} for c in buckets)


def test_large_collectives_stay_alone():
    """Their copies cost more than the latency that a bucket saves."""
    shapes = jax.eval_shape(lambda: (params(2, 1024), params(2, 1024), batch(512, 1024)))
    pins = {"batch": "data=S(0)", "p/**": "data=B", "m/**": "data=B"}
    plan = md.parallelize(step, "data=8", pins).plan(*shapes)
    assert [sorted(len(part.shape) for part in c.parts) for c in plan.collectives if c.parts] == [[0, 1, 1]]
    assert any(c.shape == (1024, 1024) for c in plan.collectives)


# ---- Files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved():
    p = params(3)
    args = p, p, batch()
    pins = {"batch": "data=S(0)", "p/**": "data=B", "m/**": "data=B"}
    return args, pins, md.parallelize(step, "data=8", pins).plan(*args)


def test_a_file_holds_buckets_and_what_is_in_them(saved, tmp_path):
    args, _, plan = saved
    plan.save(tmp_path / "plan.json")
    again = md.load_plan(tmp_path / "plan.json")
    assert again == plan and str(again) == str(plan) and again.collectives[0].parts
    assert md.parallelize(step, "data=8", plan=again).verify(*args).equal


def test_a_bucket_that_cannot_be_sent_is_refused(saved):
    args, _, plan = saved
    (bucket,) = plan.solution.buckets
    for wrong in (
        replace(bucket, before=min(op for op in plan.solution.rows)),  # before the sums are there
        replace(bucket, steps=bucket.steps[1:]),
        replace(bucket, seconds=bucket.seconds / 2),
    ):
        other = replace(plan, solution=replace(plan.solution, buckets=(wrong,)))
        with pytest.raises(PlanFileError, match="cannot be sent as one there"):
            md.parallelize(step, "data=8", plan=other).plan(*args)
