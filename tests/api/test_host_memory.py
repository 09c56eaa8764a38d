"""Arrays in the host's memory: equal numbers, where they lie, what plans say and files keep, faults."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.layouts.topology import Link

OPTIMIZER = optax.adam(1e-2)
MESH = md.Mesh(data=2, model=2, topology="cpu")
PINS = {"x": "data=S(0)", "params/w0": "model=S(0)"}


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
    ours, theirs = arguments(), arguments()
    for _ in range(3):
        ours, theirs = hosted(*ours[:2], args[2]), plain(*theirs[:2], args[2])
    assert_equal(ours, theirs)
    hosted.check(*ours[:2], args[2])
    assert kinds(ours[1]) == {"pinned_host"} and kinds((ours[0], ours[2:])) == {"device"}
    (_, places, _), _ = hosted.input_shardings(*args)
    assert all(place.memory_kind == "pinned_host" for place in jax.tree.leaves(places))
    made = hosted.init(lambda: arguments()[:2], args[2])
    assert kinds(made[1]) == {"pinned_host"} and kinds(made[0]) == {"device"}


@pytest.mark.parametrize("seed", range(3))
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


AT = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])


def test_memories_that_plans_do_not_know_are_refused():
    place = jax.NamedSharding(AT, jax.P("data"), memory_kind="unpinned_host")
    fault = r"memory_kind='unpinned_host' is not 'pinned_host' \(@host\) or 'device'; did you mean 'pinned_host'"
    with pytest.raises(md.ArgumentError, match=r"layouts\['x'\]: " + fault):
        md.parallelize(jnp.sin, MESH, {"x": place}).plan(jnp.ones(4))
    with pytest.raises(md.PinError, match=r"  x: " + fault):
        md.parallelize(jnp.sin, MESH, "as-given").plan(jax.device_put(jnp.ones(4), place))


def test_memories_stated_inside_a_step_and_constants_are_spoken_of():
    place = jax.NamedSharding(AT, jax.P("data"), memory_kind="pinned_host")

    def ends(x):
        y = jax.device_put(x * 2, jax.memory.Space.Host)
        z = jax.lax.with_sharding_constraint(x + 1, place)
        return jax.device_put(y, jax.memory.Space.Device), z, 3.0

    notes = md.parallelize(ends, MESH, outputs={"2": "@host"}).plan(jnp.ones((4, 4))).notes
    first = ends.__code__.co_firstlineno
    left = [note for note in notes if "leaves its operand on the device: inside a step no value is in the host" in note]
    assert [note.partition(" leaves")[0] for note in left] == [
        f"device_put at test_host_memory.py:{first + 1}",
        f"sharding_constraint at test_host_memory.py:{first + 2}",
    ]
    assert "output 2 is constant and stays on the device, although '@host' was asked for" in notes
    with pytest.raises(md.PinError, match="@host: inside the step values are on the device"):
        md.parallelize(lambda x: md.constrain(x, place), MESH).plan(jnp.ones((4, 4)))


def test_inspections_know_the_memory_of_arguments_and_results():
    place = jax.NamedSharding(AT, jax.P("data"), memory_kind="pinned_host")
    later = jax.jit(lambda m: jax.device_put(m, jax.memory.Space.Device) * 2, out_shardings=place)
    for mesh in (AT, AT.abstract_mesh):
        at = jax.NamedSharding(mesh, jax.P("data"), memory_kind="pinned_host")
        record = md.inspect(later, jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=at)).record
        assert [str(x.layout) for x in (*record.inputs, *record.outputs)] == ["data=S(0) model=B @host"] * 2


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


# ---- The planner's choice --------------------------------------------------------------------------------------------

ETHERNET = replace(md.topology("dgx-h100"), name="ethernet", links=(Link(5e-5, 2.5e9),))
SLOW = md.Mesh(data=2, topology=ETHERNET)


def wide(params, state, x):
    def loss(params):
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    updates, state = OPTIMIZER.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


def wide_arguments():
    params = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 2
    return params, jax.eval_shape(OPTIMIZER.init, params), jax.ShapeDtypeStruct((512, 1024), jnp.float32)


def planned(memory=None, mesh=SLOW, **options):
    sharded = md.parallelize(
        wide, mesh, md.data_parallel(), memory=memory, donate_argnums=(0, 1), effort="fast", **options
    )
    return sharded.plan(*wide_arguments())


@pytest.mark.sweep
def test_the_planner_moves_state_where_that_is_faster_than_dividing_and_computing_again():
    free = planned()
    limit = int(0.7 * free.memory)
    divided, again, hosted = planned(limit), planned(limit, remat="auto"), planned(limit, host="auto")
    assert hosted.memory <= limit and hosted.host_memory > 0
    assert hosted.seconds < 0.9 * min(divided.seconds, again.seconds)
    assert planned(limit, host="auto", remat="auto").seconds <= hosted.seconds
    assert all(array.path.startswith("state") for array in hosted.host.arrays)
    assert hosted.host.saved >= 0.5 * hosted.host_memory
    assert (hosted.host.fastest, hosted.host.kept) == (
        (free.memory, pytest.approx(free.seconds)),
        (divided.memory, pytest.approx(divided.seconds, rel=0.2)),  # before buckets
    )
    assert [step.name for step in hosted.waterfall][:2] == [
        "keep all",
        f"on the host, {len(hosted.host.arrays)} arrays",
    ]
    assert sum(step.bytes for step in hosted.waterfall[:-1]) == hosted.memory
    kept = md.parallelize(wide, SLOW, {"**": "data=B", "state/**": "@device"}, memory=limit, host="auto")
    with pytest.raises(md.MemoryLimitError, match="no plan fits"):
        kept.plan(*wide_arguments())


def test_nothing_moves_where_memory_is_not_short():
    plan = planned(host="auto")
    assert plan.host is None and plan.notes[-1].startswith("nothing is moved to the host's memory: the fastest plan")
    assert plan.seconds == planned().seconds


@pytest.mark.sweep
def test_a_limit_below_the_least_names_the_least_with_host_memory():
    with pytest.raises(md.MemoryLimitError) as without:
        planned("1MB")
    with pytest.raises(md.MemoryLimitError, match=r"with \d+ inputs in the host's memory \(host='auto'\)") as error:
        planned("1MB", host="auto")
    assert error.value.least < without.value.least


def test_inputs_that_are_read_where_memory_is_fullest_move_too_if_nothing_else_fits():
    def forward(stack, x):
        return jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, stack)[0]

    args = jax.ShapeDtypeStruct((4, 32, 32), jnp.float32), jax.ShapeDtypeStruct((8, 32), jnp.float32)
    hosted = md.parallelize(forward, MESH, {"**": "data=B model=B", "x": "@host"}).plan(*args)
    chosen = md.parallelize(forward, MESH, {"**": "data=B model=B"}, memory=hosted.memory, host="auto").plan(*args)
    assert chosen.memory <= hosted.memory and "x" in {array.path for array in chosen.host.arrays}


def deep(weights, x):
    def loss(weights):
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(jnp.sin(y @ w[0]) @ w[1]), None), x, weights)
        return (y**2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)


def deep_arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(key, (6, 32, 32)) / 6 for key in keys[:2]]
    return weights, jax.random.normal(keys[2], (2048, 32))


@pytest.mark.parametrize(
    "share, options",
    [(0.5, {"host": "auto"}), pytest.param(0.3, {"host": "auto", "remat": "auto"}, marks=pytest.mark.sweep)],
)
def test_residuals_wait_on_the_host_where_memory_is_short(tmp_path, share, options):
    args, pins = deep_arguments(), {"weights/**": "data=B model=B @device", "x": "data=S(0) model=S(0) @device"}
    free = md.parallelize(deep, MESH, pins, effort="fast").plan(*args)
    sharded = md.parallelize(deep, MESH, pins, memory=share * free.memory, effort="fast", **options)
    plan = sharded.plan(*args)
    assert plan.host and plan.host.residuals and plan.memory < share * free.memory
    assert bool(plan.recomputation.values) == ("remat" in options)
    assert plan.host_memory == sum(each.bytes for each in (*plan.host.arrays, *plan.host.residuals))
    sizes = {each.bytes for each in plan.host.residuals}
    layer = 2048 * 32 * 4 // 4  # over four devices; the loop may be divided
    assert sizes <= {layers * layer for layers in range(1, 7)} and sum(sizes) <= 6 * layer
    per_byte = 1 / MESH.topology.host_load + 1 / MESH.topology.host_store
    each = plan.host.residuals[0]
    assert each.seconds == pytest.approx(each.bytes * per_byte + each.bytes // layer * 2 * MESH.topology.overhead)
    assert f"on the host, {len(plan.host.residuals)} residual" in str(plan)
    for found, expected in zip(jax.tree.leaves(sharded(*args)), jax.tree.leaves(jax.jit(deep)(*args)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    plan.save(tmp_path / "plan.json")
    loaded = md.load_plan(tmp_path / "plan.json")
    again = md.parallelize(deep, MESH, pins, plan=loaded)
    assert loaded == plan and again.plan(*args).host == plan.host and "to_device" in plan.operations
    assert not free.diff(plan).different
    again.verify(*args)


@pytest.mark.sweep
def test_moved_arrays_give_the_same_numbers():
    def within(memory, **options):
        return md.parallelize(step, MESH, {"**": "data=B model=B"}, memory=memory, donate_argnums=(0, 1), **options)

    with pytest.raises(md.MemoryLimitError) as error:
        within("1kB").plan(*arguments())
    sharded = within(error.value.least - 1, host="auto")
    assert sharded.plan(*arguments()).host
    sharded.check(*arguments())
    assert "pinned_host" in kinds(sharded(*arguments())[1])


@pytest.mark.parametrize(
    "options, text",
    [
        ({"host": "auot"}, "host: 'auot' is not 'off' or 'auto'; did you mean 'auto'"),
        (
            {"host": "auto", "mesh": md.Mesh(data=2, topology="tpu-v4")},
            "host='auto': topology tpu-v4 states no host memory",
        ),
    ],
)
def test_faults_of_the_choice(options, text):
    with pytest.raises(md.MeshDSLError, match=text):
        planned(**options)
