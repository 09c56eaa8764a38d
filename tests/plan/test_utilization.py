"""The compute bound of a plan and what takes the rest of its time; how the printed plan says what is repeated."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.layouts.topology import Link, Topology
from meshdsl.plan.file import read_plan

PLAIN = Topology("plain", 1e12, 5e11, 1e11, 1e12, 1e-5, (Link(1e-6, 1e10),))
X, W = jax.ShapeDtypeStruct((512, 256), jnp.float32), jax.ShapeDtypeStruct((256, 256), jnp.float32)
FOUR = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
PRODUCT = 2 * 512 * 256 * 256  # FLOPs


def train(w, x, keep=False):
    layer = lambda w, x: jnp.tanh(x @ w) @ w  # noqa: E731
    wrapped = layer if keep else jax.checkpoint(layer)
    return w - jax.grad(lambda w: jnp.mean(wrapped(w, jnp.sin(x)) ** 2))(w)


def loop(w, x):
    return jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ w), x)


def mapped(w, x):
    spec = jax.sharding.PartitionSpec("data")
    run = jax.shard_map(lambda x: x @ x.T, mesh=FOUR, in_specs=spec, out_specs=spec)
    return run(x) @ jnp.ones((128, 4)), w


def lines(plan):
    return str(plan).split("\n\n")[0].splitlines()


@pytest.mark.parametrize("step", [train, loop])
@pytest.mark.parametrize("topology", ["cpu", "dgx-h100", PLAIN])
@pytest.mark.parametrize("layouts", [None, {"x": "data=S(0)"}, {"**": "data=B model=B"}])
def test_the_bound_and_the_losses_are_the_predicted_time(step, topology, layouts):
    plan = md.parallelize(step, md.Mesh(data=4, model=2, topology=topology), layouts).plan(W, X)
    used = plan.utilization
    assert used.compute_bound + sum(seconds for _, seconds in used.losses) == pytest.approx(plan.seconds)
    assert used.losses == tuple(sorted(used.losses, key=lambda loss: -loss[1]))
    assert 0 < plan.mfu < 1


def test_flops_are_those_of_all_devices_and_iterations_at_the_rate_of_their_types():
    plan = md.parallelize(loop, md.Mesh(data=4, topology=PLAIN), {"x": "data=S(0)"}).plan(W, X)
    assert plan.utilization.flops == 5 * PRODUCT
    assert plan.utilization.compute_bound == pytest.approx(5 * PRODUCT / 4 / 5e11)
    assert plan.mfu == pytest.approx(plan.utilization.compute_bound / plan.seconds)


def test_recomputation_is_no_use_of_the_devices():
    mesh = md.Mesh(data=4, topology=PLAIN)
    again, kept = (md.parallelize(lambda w, x, k=k: train(w, x, k), mesh, md.data_parallel()) for k in (False, True))
    again, kept = (sharded.plan(W, X).utilization for sharded in (again, kept))
    assert again.flops == kept.flops and dict(again.losses)["recomputation"] > 0
    assert "recomputation" not in dict(kept.losses)


def test_a_shard_map_divides_its_work():
    plan = md.parallelize(mapped, md.Mesh(data=4, topology=PLAIN), {"x": "data=S(0)"}).plan(W, X)
    used = plan.utilization
    assert used.flops == 4 * 2 * 128 * 128 * 256 + 2 * 512 * 128 * 4
    assert used.compute_bound + sum(seconds for _, seconds in used.losses) == pytest.approx(plan.seconds)


def test_the_printed_plan_says_what_is_repeated_and_why():
    small = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plan = md.parallelize(loop, md.Mesh(data=64, topology="dgx-h100"), {"**": "data=B"}).plan(small, small)
    assert "  over data            computation repeated 64 times: launch overhead dominates" in lines(plan)
    assert lines(plan)[3].startswith("  compute bound        0.12 ns  (MFU 0.0013%; lost to launch overhead ")
    assert lines(plan)[3].partition("lost to ")[2].startswith("launch overhead 9 us, ")


def test_rounding_is_no_loss():
    def solve(a, b):
        return jnp.linalg.solve(a @ a.T + jnp.eye(64), b)

    a, b = (jax.ShapeDtypeStruct((64, n), jnp.float32) for n in (64, 8))
    used = md.parallelize(solve, md.Mesh(data=1, topology="cpu")).plan(a, b).utilization
    assert all(seconds > 1e-9 * used.compute_bound for _, seconds in used.losses)


def test_a_loss_that_hardly_counts_is_not_named():
    mesh = md.Mesh(data=8, topology=replace(PLAIN, overhead=1e-10))
    plan = md.parallelize(loop, mesh, {"x": "data=S(0)"}).plan(W, X)
    assert plan.utilization.losses[-1][0] == "launch overhead" and "launch" not in lines(plan)[3]


def test_a_part_that_is_repeated():
    def step(x, w):
        return md.constrain(x, "data=S(0)") @ w, md.constrain(w @ w, "data=B")

    pins = {"x": "data=S(0)", "w": "data=B"}
    mesh = md.Mesh(data=4, topology=replace(PLAIN, links=(Link(1.0, 1e10),)))
    plan = md.parallelize(step, mesh, pins, {"0": "data=S(0)", "1": "data=B"}).plan(X, W)
    (said,) = [line for line in lines(plan) if line.startswith("  over data")]
    assert said == "  over data            33% of the computation repeated 4 times"


def test_nothing_is_said_of_axes_that_divide_everything_and_of_steps_without_products():
    mesh = md.Mesh(data=4, topology=PLAIN)
    plan = md.parallelize(lambda x: jnp.sin(x), mesh, {"x": "data=S(0)"}).plan(X)
    assert plan.mfu == 0 and len(lines(plan)) == 5


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb"])
@pytest.mark.parametrize("recompute", ["stage", "none"])
def test_the_compute_bound_of_a_pipeline_is_that_of_the_step_without_stages(schedule, recompute):
    def step(stack, x):
        def loss(stack):
            return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0] ** 2)

        return jax.tree.map(lambda w, g: w - g, stack, jax.grad(loss)(stack))

    stack = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    pipeline = md.Pipeline(microbatches=4, schedule=schedule, recompute=recompute)
    mesh, args = md.Mesh(pipe=2, topology=PLAIN), (stack, jax.ShapeDtypeStruct((64, 64), jnp.float32))
    plan = md.parallelize(step, mesh, {"stack": "pipe=S(0)"}, pipeline=pipeline).plan(*args)
    whole = md.parallelize(step, mesh, {"stack": "pipe=S(0)"}).plan(*args)
    used = plan.utilization
    assert used.flops == whole.utilization.flops == 3 * 4 * 2 * 64**3
    assert used.compute_bound == pytest.approx(used.flops / 2 / 5e11)
    assert used.compute_bound + sum(seconds for _, seconds in used.losses) == pytest.approx(plan.seconds)
    assert dict(used.losses)["bubble and all other work"] > 0 < plan.mfu < 0.5
    assert dict(used.divided)["pipe"] > 0.5
    assert "  (MFU " in lines(plan)[3]


def test_bodies_of_shard_maps_in_stages_count_on_all_devices():
    mesh = jax.sharding.AbstractMesh((2, 2), ("pipe", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jax.sharding.PartitionSpec("data")

    def layer(x, w):
        def inside(x, w):
            return jnp.tanh(x @ w)

        specs = {"in_specs": (rows, jax.sharding.PartitionSpec()), "out_specs": rows}
        return jax.shard_map(inside, mesh=mesh, axis_names={"data"}, **specs)(x, w), None

    def step(stack, x):
        loss = lambda stack: jnp.mean(jax.lax.scan(layer, x, stack)[0] ** 2)  # noqa: E731
        return stack - jax.grad(loss)(stack)

    layouts, args = (
        {"stack": "pipe=S(0)"},
        (jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)),
    )
    planned = md.parallelize(step, md.Mesh(pipe=2, data=2, topology=PLAIN), layouts, pipeline=md.Pipeline(4))
    used = planned.plan(*args).utilization
    assert used.flops == 3 * 4 * 2 * 64**3


@pytest.mark.parametrize("devices", [1, 4])
def test_it_is_saved(tmp_path, devices):
    plan = md.parallelize(train, md.Mesh(data=devices, topology=PLAIN)).plan(W, X)
    plan.save(tmp_path / "p.json")
    assert read_plan(tmp_path / "p.json").utilization == plan.utilization
