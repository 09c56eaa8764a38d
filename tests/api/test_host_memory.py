"""Arrays in the host's memory: equal numbers, where they lie, what plans say and files keep, faults."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.lowering.verify import VerifyReport

OPTIMIZER = optax.adam(1e-2)
MESH = md.Mesh(data=2, model=2, topology="cpu")
PINS = {"x": "data=S(0)", "params/w0": "model=S(1)"}


def step(params, state, x):
    def loss(params):
        def layer(y, w):
            return jnp.tanh(y @ w), None

        y, _ = jax.lax.scan(layer, jnp.tanh(x @ params["w0"]), params["stack"])
        return jnp.mean((y @ params["w1"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value, x


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "w0": jax.random.normal(keys[0], (16, 32)) / 4,
        "stack": jax.random.normal(keys[1], (3, 32, 32)) / 6,
        "w1": jax.random.normal(keys[2], (32, 8)) / 6,
    }
    return params, OPTIMIZER.init(params), jax.random.normal(keys[3], (64, 16))


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_state_on_the_host_stays_there_and_changes_no_bit():
    args = arguments()
    plain = md.parallelize(step, MESH, PINS, donate_argnums=(0, 1))
    hosted = md.parallelize(step, MESH, {**PINS, "state/**": "@host"}, donate_argnums=(0, 1))
    before, after = plain.plan(*args), hosted.plan(*args)
    assert after.layout("state/0/mu/w0").memory == "host" and str(after.layout("state/0/mu/w0")).endswith("@host")
    assert after.memory < before.memory - 0.6 * after.host_memory
    sent = 2 * sum(array.bytes for array in after.host.arrays) / MESH.topology.host_load
    overhead = 2 * len(after.host.arrays) * MESH.topology.overhead
    assert after.host.seconds == pytest.approx(sent + overhead)
    assert after.lower_bound <= after.seconds and "kept on the host" in str(after)
    for sharded in (plain, hosted):
        hosted.check(*args)
    report: VerifyReport = hosted.verify(*args)
    assert str(report)
    ours, theirs = arguments(), arguments()
    for _ in range(3):
        ours, theirs = hosted(*ours[:2], args[2]), plain(*theirs[:2], args[2])
    assert_equal(ours, theirs)
    assert kinds(ours[1]) == {"pinned_host"} and kinds((ours[0], ours[2:])) == {"device"}
    (_, places, _), _ = hosted.input_shardings(*args)
    assert all(place.memory_kind == "pinned_host" for place in jax.tree.leaves(places))
    made = hosted.init(lambda: arguments()[:2], args[2])
    assert kinds(made[1]) == {"pinned_host"} and kinds(made[0]) == {"device"}


@pytest.mark.parametrize("seed", range(4))
def test_any_inputs_and_results_on_the_host_give_the_same_numbers(seed):
    args, draw = arguments(), random.Random(seed)
    plain = md.parallelize(step, MESH, PINS)
    plan = plain.plan(*args)
    paths = [array.path for array in plan.inputs]
    chosen = {path: draw.choice(("@host", "@host", "@device")) for path in paths if draw.random() < 0.7}
    outputs = {"2": "@host"} if draw.random() < 0.5 else {"3": "data=S(0) @host"}
    donated = draw.choice([(), (0,), (0, 1)])
    hosted = md.parallelize(step, MESH, {**PINS, **chosen}, outputs=outputs, donate_argnums=donated)
    found = hosted.plan(*args)
    assert {x.path for x in found.inputs if x.layout.memory} == {p for p, memory in chosen.items() if memory == "@host"}
    assert [str(c) for c in found.collectives] == [str(c) for c in hosted.plan(*args).collectives]
    hosted.check(*args)
    hosted.verify(*args)
    if all(a.layout == b.layout.within("") for a, b in zip(plan.inputs, found.inputs, strict=True)):
        assert_equal(hosted(*arguments()), plain(*arguments()))


def test_a_plan_file_keeps_what_is_on_the_host(tmp_path):
    args = arguments()
    plan = md.parallelize(step, MESH, {"state/**": "@host"}).plan(*args)
    plan.save(tmp_path / "plan.json")
    loaded = md.load_plan(tmp_path / "plan.json")
    assert loaded == plan and str(loaded) == str(plan) and loaded.host_memory == plan.host_memory > 0
    assert kinds(md.parallelize(step, loaded.mesh, plan=loaded)(*args)[1]) == {"pinned_host"}
    with pytest.raises(md.PlanFileError, match="input state/0/mu/w1: @host in the plan, pinned to @device here"):
        md.parallelize(step, loaded.mesh, {"state/0/mu/w1": "@device"}, plan=loaded).plan(*args)
    difference = md.parallelize(step, MESH).plan(*args).diff(plan)
    assert ("state/0/mu/w1", "@host") in [(name, after.split()[-1]) for name, _, after in difference.layouts]
    assert not difference.different


def test_a_sharding_of_jax_states_the_memory_too():
    mesh = jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    place = jax.NamedSharding(mesh, jax.P("model"), memory_kind="pinned_host")
    plan = md.parallelize(step, MESH, {"state/0/mu/w0": place}).plan(*arguments())
    assert plan.layout("state/0/mu/w0") == md.Layout.parse("data=B model=S(0) @host")


def test_results_follow_the_memory_in_a_jit_around_them():
    sharded = md.parallelize(lambda m, x: (m * 0.5 + x, x.sum()), MESH, {"m": "@host"})
    m, x = jnp.ones((8, 8)), jnp.ones((8, 8))
    looped = jax.jit(lambda m, x: jax.lax.scan(lambda m, _: (sharded(m, x)[0], None), m, length=2)[0])
    np.testing.assert_array_equal(looped(m, x), jnp.full((8, 8), 1.75))


@pytest.mark.parametrize(
    "change, text",
    [
        ({"topology": "gb200-nvl72"}, "@host: topology gb200-nvl72 states no host memory; presets that do are cpu,"),
        ({"topology": replace(MESH.topology, host_memory=1e3)}, "the arrays @host need .* topology cpu has 1 kB"),
        ({"layouts": {"state/**": "data=S(0) @hots"}}, "no memory '@hots'; did you mean 'host'"),
        ({"layouts": {"x": "@host @device"}}, "a second memory is named; a value lives in one"),
    ],
)
def test_faults(change, text):
    mesh = md.Mesh(data=2, model=2, topology=change.get("topology", "cpu"))
    with pytest.raises(md.MeshDSLError, match=text):
        md.parallelize(step, mesh, change.get("layouts", {"state/**": "@host"})).plan(*arguments())


def test_values_inside_a_step_are_on_the_device():
    with pytest.raises(md.PinError, match="@host: inside the step values are on the device; layouts= and outputs= say"):
        md.parallelize(lambda x: md.constrain(x * 2, "data=S(0) @host"), MESH).plan(jnp.ones((4, 4)))
