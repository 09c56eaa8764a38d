"""What jitted functions of others communicate, and the best plan of the same steps beside it."""

from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshdsl as md
from meshdsl.api.jitted_calls import inspect_script
from meshdsl.errors import ArgumentError, BudgetError, PlanFileError
from meshdsl.lowering.aot_targets import KINDS
from meshdsl.lowering.elsewhere import compiled_elsewhere

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
TOPOLOGY = "dgx-h100"


def shape(dims, *spec, dtype=jnp.float32, mesh=MESH):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def fsdp(w, batch, rate, mode):
    assert mode == "train"
    gradient = jax.grad(lambda w: jnp.mean((jnp.tanh(batch @ w) - batch) ** 2))(w)
    return w - rate * gradient


def fsdp_arguments(mesh=MESH):
    return shape((256, 256), "data", mesh=mesh), shape((512, 256), "data", mesh=mesh)


@pytest.fixture(scope="module")
def inspected():
    step = jax.jit(fsdp, static_argnames="mode", out_shardings=fsdp_arguments()[0].sharding)
    return md.inspect(step, *fsdp_arguments(), rate=0.1, mode="train", topology=TOPOLOGY)


def test_collectives_by_line(inspected):
    gather, reduce = sorted(inspected.collectives, key=lambda c: c.kind)
    assert (gather.kind, gather.axes, gather.bytes, gather.trips) == (
        "all-gather",
        ("data",),
        256 * 256 * 4 * 3 // 4,
        1,
    )
    assert gather.note == "gathers a whole argument" and gather.phase == "forward"
    assert (reduce.kind, reduce.bytes, reduce.phase) == ("all-reduce", 2 * gather.bytes, "backward")
    assert reduce.note == "all-reduces what lies split: a reduce-scatter would do"
    assert "test_inspect.py" in gather.source and "jnp.tanh(batch @ w)" in gather.text
    assert inspected.bytes == gather.bytes + reduce.bytes
    assert 0 < inspected.seconds < 1e-3
    assert "3.355e+07 FLOPs per device" in str(
        inspected
    )  # three products of 512 x 256 x 256 over 8 devices, twice over
    inspected.assert_at_most(inspected.bytes, {"all-gather": 1, "all-reduce": 1})
    with pytest.raises(BudgetError, match="compiled program of fsdp exceeds its budget"):
        inspected.assert_at_most(inspected.bytes - 1)


def test_beside_the_best_plan(inspected):
    found = inspected.compare()
    assert (
        found.plan.layout("w")
        == found.plan.output_layout(found.plan.outputs[0].path)
        == md.Layout.of("data=S(0) model=B")
    )
    assert found.ratio == 1.5
    (line,) = found.worst
    assert (line.bytes, line.planned) == (inspected.bytes, found.plan.bytes)
    assert "reduce-scatter(data)" in line.instead
    assert found.constrained_bytes == inspected.bytes  # of the forward product; the gradient has no line of its own
    text = str(found)
    assert (
        "1.50 times the bytes of the plan" in text
        and "save nothing (compiled)" in text
        and "with_sharding_constraint" in text
    )


def test_constraints_that_help():
    elsewhere = {}  # in a file of which the plan has nothing
    exec(compile("def unused(x):\n    return x * 2\n", "unused.py", "exec"), elsewhere)

    def attention(q, k, v):
        elsewhere["unused"](q)
        q, k, v = (x.reshape(*x.shape[:2], 8, 8) for x in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).sum()

    arguments = [shape((8, 128, 64), "data", "model") for _ in range(3)]
    found = md.inspect(jax.jit(jax.grad(attention)), *arguments, topology=TOPOLOGY).compare()
    assert found.ratio > 1.2
    assert found.plan.bytes <= found.constrained_bytes < found.inspection.bytes


def net(state, batch):
    def loss(state):
        return jnp.mean((jnp.tanh(batch @ state["w"]) @ state["v"] - batch) ** 2)

    return jax.tree.map(lambda x, g: x - g, state, jax.grad(loss)(state))


def test_plans_of_small_steps_compute_no_more_than_the_program():
    """At this size, every device does it all before a message arrives; that plan would say nothing."""
    state = {"w": shape((32, 64)), "v": shape((64, 32))}
    found = md.inspect(jax.jit(net), state, shape((64, 32), "data"), topology=TOPOLOGY).compare()
    assert found.slowdown > 1 and found.plan.bytes > 0
    assert "times as slow, so that it computes no more than the program" in str(found)


def test_arguments_that_had_better_lie_split():
    state = {"w": shape((256, 2048)), "v": shape((2048, 256))}
    found = md.inspect(jax.jit(net), state, shape((256, 256), "data"), topology=TOPOLOGY).compare()
    ends = found.saving_ends
    assert 2 * ends.bytes < found.inspection.bytes and ends.plan.bytes < found.plan.bytes
    assert {path: spec.index(("data", "model")) for path, spec in ends.arguments.items()} == {
        "state/w": 1,
        "state/v": 0,
    }
    assert "in_shardings and out_shardings P(" in str(found)
    assert found.facts["free_ends"]["bytes"] == ends.bytes


def test_duplicated_compute():
    def step(w, x):
        return jnp.tanh(x @ w).sum() + (x @ w.T).sum()

    found = md.inspect(jax.jit(step), shape((64, 64)), shape((32, 64), "data"), topology=TOPOLOGY).compare()
    (line,) = found.repeated
    assert (line.times, line.axes, "x @ w" in line.text) == (2, ("model",), True)
    assert "duplicated compute: 50% of the product FLOPs" in str(
        found
    ) and "2 devices of model compute the same" in str(found)


def stated(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, PartitionSpec(*spec)))


def resharded(x):
    """XLA cannot go from one of these layouts to the other but through whole arrays."""
    return stated(jnp.sin(stated(jnp.tanh(x), ("data", "model"))), None, "model", "data") * 2


def microbatches(w, batches):
    def add(total, batch):
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(batch @ w["a"]) @ w["b"]) ** 2)(w)
        return jax.tree.map(jnp.add, total, gradient), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), batches)[0]


def layers(w, x):
    """Every layer's gradient is another: nothing is added up."""
    return jax.grad(lambda w: (jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0] ** 2).sum())(w)


def products(w, batches):
    """The product of sums is not the sum of products."""
    return jax.lax.scan(lambda c, x: (c * (x.T @ x), None), w, batches)[0]


@pytest.mark.parametrize(
    ("step", "arguments", "notes"),
    [
        (
            resharded,
            [shape((8, 16, 32), ("data", "model"))],
            {"gathered whole, then sliced: involuntary rematerialisation"},
        ),
        (
            microbatches,
            [{"a": shape((64, 128)), "b": shape((128, 64))}, shape((4, 32, 64), None, "data")],
            {"reduces in each of 4 iterations; once behind the loop would do"},
        ),
        (products, [shape((64, 64)), shape((4, 32, 64), None, "data")], {""}),
        (lambda x: (x.T @ x)[3:5], [shape((512, 64), "data")], {""}),
        (layers, [shape((4, 64, 64)), shape((32, 64), "data")], {""}),
        (
            layers,
            [shape((4, 64, 64), None, "data"), shape((32, 64), "data")],
            {"gathers a layer of an argument in each iteration", ""},
        ),
        (
            lambda w, x: stated(jnp.tanh(x @ w), "data", "model"),
            [shape((64, 128), "data", "model"), shape((512, 64), "data")],
            {"gathers a whole argument"},
        ),
    ],
    ids=[
        "involuntary rematerialisation",
        "microbatches",
        "products",
        "own slice",
        "layers",
        "split layers",
        "weights split twice",
    ],
)
def test_names_of_waste(step, arguments, notes):
    found = md.inspect(jax.jit(step), *arguments, topology=TOPOLOGY)
    assert {c.note for c in found.collectives if c.bytes > 100} == notes


def test_loops_and_explicit_axes():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def step(layers, x):
        def layer(x, w):
            whole = jax.sharding.reshard(w, PartitionSpec(None, None))
            return jnp.tanh(x @ whole), None

        return (jax.lax.scan(layer, x, layers)[0] ** 2).sum()

    arguments = shape((6, 2048, 2048), None, "data", mesh=mesh), shape((32768, 2048), "data", mesh=mesh)
    with jax.set_mesh(mesh):
        found = md.inspect(jax.jit(step), *arguments, topology=TOPOLOGY)
    gathers = [c for c in found.collectives if c.kind == "all-gather"]
    assert [(c.axes, c.trips, c.bytes) for c in gathers] == [(("data",), 6, 2048 * 2048 * 4 * 3 // 4)]
    beside = found.compare()
    assert abs(beside.plan.bytes - found.bytes) <= 1  # fractions of a byte


def test_static_arguments_by_position_take_no_name_from_others():
    step = jax.jit(lambda w, times, batch: (batch @ w) * times, static_argnums=1)
    found = md.inspect(step, shape((64, 64)), 3, shape((32, 64), "data"), topology=TOPOLOGY)
    assert [(x.path, x.shape) for x in found.compare().plan.inputs] == [
        ("argument_0", (64, 64)),
        ("argument_1", (32, 64)),
    ]


def test_shard_map():
    @jax.jit
    @partial(jax.shard_map, mesh=MESH, in_specs=PartitionSpec("data"), out_specs=PartitionSpec(), check_vma=False)
    def total(x):
        return jax.lax.psum(x.sum(0), ("data", "model")) / 2

    found = md.inspect(total, shape((8, 16), "data"), topology=TOPOLOGY)
    assert [(c.kind, c.axes, c.bytes) for c in found.collectives] == [
        ("all-reduce", ("data", "model"), 16 * 4 * 7 // 4)
    ]


def test_axes_of_one_device_are_left_out_unless_a_shard_map_names_them():
    mesh = jax.make_mesh((1, 8), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    x, spec = shape((16, 8), ("stage", "data"), mesh=mesh), PartitionSpec(("stage", "data"))
    found = md.inspect(jax.jit(lambda x: jnp.tanh(x).sum(0)), x)
    assert found.mesh.names == ("data",) and found.compare().plan.mesh.names == ("data",)
    doubled = md.inspect(jax.jit(lambda x: 2 * x, out_shardings=x.sharding), x)
    assert [str(at.layout) for at in (*doubled.record.inputs, *doubled.record.outputs)] == ["data=S(0)"] * 2
    assert str(doubled.compare().plan.outputs[0].layout) == "data=S(0)"
    mapped = jax.shard_map(lambda x: jnp.tanh(x), mesh=mesh, in_specs=spec, out_specs=spec)
    assert md.inspect(jax.jit(mapped), x).mesh.names == ("stage", "data")


def test_constraints_are_written_into_the_step_as_it_is():
    """What its author states stays: the shard_map, and the constraint that splits the batch."""
    total = jax.shard_map(
        lambda x: jax.lax.psum(x.sum(0), "data"),
        mesh=MESH,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    at = fsdp_arguments()[0].sharding

    def own(w, batch):
        batch = jax.lax.with_sharding_constraint(batch, NamedSharding(MESH, PartitionSpec("data")))
        return fsdp(w, batch, 0.1, "train"), total(batch)

    step = jax.jit(own, out_shardings=(at, None))
    found = md.inspect(step, *fsdp_arguments(), topology=TOPOLOGY).compare()
    assert found.worst and found.constrained_bytes == found.inspection.bytes


def test_files_of_one_name(tmp_path):
    """Lines are matched with those of the plan, which tells files apart by their folders."""
    layers = []
    for folder, text in (
        ("a", "def layer(x, w):\n    return x @ w\n"),
        ("b", "def layer(x):\n    return abs(x) + 1\n"),
    ):
        file = tmp_path / folder / "layers.py"
        file.parent.mkdir()
        file.write_text(text)
        namespace = {}
        exec(compile(text, str(file), "exec"), namespace)
        layers.append(namespace["layer"])

    def step(w, x):
        gradient = jax.grad(lambda w: layers[1](layers[0](x, w)).sum())(w)
        return w - gradient

    at = shape((256, 256), "data")
    found = md.inspect(jax.jit(step, out_shardings=at.sharding), at, shape((512, 256), "data"), topology=TOPOLOGY)
    (line,) = found.compare().worst
    assert line.source == "a/layers.py:2" and line.bytes > line.planned > 0 and line.statements


@pytest.mark.parametrize(
    ("step", "arguments", "mesh", "said"),
    [
        (fsdp, fsdp_arguments(), None, r"step=fsdp is not jitted: give jax.jit\(fsdp"),
        (md.parallelize(fsdp, "data=8"), fsdp_arguments(), None, "plan and verify say the same"),
        (jax.jit(jnp.sin), (jnp.ones(4),), None, r"no argument and no result lies on a mesh.*in_shardings="),
        (jax.jit(jnp.sin), (shape((8,), "data"),), "data=4", "mesh=data=4 has 4 devices, and sin runs on 8"),
    ],
    ids=["plain", "planned", "one device", "another mesh"],
)
def test_bad_input(step, arguments, mesh, said):
    with pytest.raises(ArgumentError, match=said):
        md.inspect(step, *arguments, mesh=mesh)


def test_numbers_that_a_compiler_widens_are_said_to_be():
    w, x = shape((64, 64), dtype=jnp.bfloat16), shape((32, 64), "data", dtype=jnp.bfloat16)
    found = md.inspect(jax.jit(lambda w, x: (x.T @ (x @ w)).sum(0)), w, x, topology=TOPOLOGY)
    assert "send bfloat16 as float32" in str(found.compare())


def test_shapes_on_abstract_meshes():
    def on(size):
        return shape((64, 8), "data", mesh=jax.sharding.AbstractMesh((size,), ("data",)))

    assert md.inspect(jax.jit(lambda x: x.sum(0)), on(4), topology=TOPOLOGY).bytes == 8 * 4 * 2 * 3 // 4
    with pytest.raises(ArgumentError, match=r'mesh of 1024 devices, and \d+ are here: .*"jax_num_cpu_devices", 1024'):
        md.inspect(jax.jit(jnp.sin), on(1024))


def test_a_script_with_more_devices_than_there_are(tmp_path):
    file = tmp_path / "large.py"
    file.write_text("import jax\njax.make_mesh((1024, 2), ('a', 'b'))\n")
    with pytest.raises(ArgumentError, match=r"a mesh of 2048 devices, and \d+ are here: --devices 2048 makes virtual"):
        inspect_script(file)


def constrained(layers, x):
    def layer(x, w):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(MESH, PartitionSpec("data")))
        return jax.jit(jnp.tanh)(x @ w), None

    return (jax.lax.scan(layer, x, layers)[0].astype(jnp.float32) ** 2).sum()


LAYERS = shape((4, 512, 512), None, "data", dtype=jnp.bfloat16), shape((1024, 512), "data", dtype=jnp.bfloat16)


def test_other_devices_than_the_step_names():
    step = jax.jit(jax.grad(constrained))
    traced = step.trace(*LAYERS)
    others = jax.devices()[:8][::-1]
    moved = compiled_elsewhere(traced, traced.lower().compile(), others)
    assert list(jax.tree.leaves(moved.input_shardings)[0].mesh.devices.flat) == others


@pytest.mark.parametrize("target", ["tpu-v5e:2x4", "dgx-h100:8"])
def test_absent_devices(target):
    if find_spec(KINDS[target.partition(":")[0]].compiler.module) is None:
        pytest.skip(f"no compiler for {target}")
    found = md.inspect(jax.jit(jax.grad(constrained)), *LAYERS, target=target)
    assert found.target.startswith(target) and found.mesh.topology.name == target.partition(":")[0]
    assert {c.trips for c in found.collectives} == {4}
    assert 0 < found.exposed_seconds <= found.seconds
    assert f"compiled for {target}" in str(found)
    of_blocks = md.inspect(jax.jit(jax.grad(mapped)), shape((8, 16)), shape((8, 16), "data"), target=target)
    assert {(c.kind, c.axes) for c in of_blocks.collectives} >= {("collective-permute", ("data",))}


def mapped(w, x):
    """A ring in a loop, in a shard_map."""

    def blocks(w, x):
        def hop(x, _):
            return jax.lax.ppermute(jnp.tanh(x @ w.T @ w), "data", [(i, (i + 1) % 4) for i in range(4)]), None

        first = x * (jax.lax.axis_index("data") + 1)
        return jax.lax.psum((jax.lax.scan(hop, first, length=3)[0] ** 2).sum(), "data")

    specs = PartitionSpec(), PartitionSpec("data")
    return jax.shard_map(blocks, mesh=MESH, in_specs=specs, out_specs=PartitionSpec())(w, x)


def test_shard_maps_on_other_devices():
    step = jax.jit(jax.value_and_grad(mapped))
    args = jnp.arange(128.0).reshape(8, 16) / 128, jnp.arange(128.0).reshape(8, 16) / 64
    traced = step.trace(shape((8, 16)), shape((8, 16), "data"))
    others = jax.devices()[:8][::-1]
    moved = compiled_elsewhere(traced, traced.lower().compile(), others)
    at = jax.tree.leaves(moved.input_shardings)
    assert list(at[0].mesh.devices.flat) == others
    got = moved(*map(jax.device_put, args, at))
    for x, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(step(*args)), strict=True):
        assert jnp.allclose(jax.device_get(x), jax.device_get(wanted), rtol=1e-5)


SCRIPT = """
import sys
import jax, jax.numpy as jnp
from functools import partial
from neighbour import summed
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
x = jax.device_put(jnp.ones((64, int(sys.argv[1]))), NamedSharding(mesh, P("data")))

@jax.jit
def total(x, step):
    return summed(x) + step

@jax.jit
def alone(x):
    return x + 1

@partial(jax.jit, static_argnames="scale")
def mean(x, scale):
    return (x * scale).mean(0)

alone(jnp.ones(3))
for _ in range(3):
    y = mean(x, scale=2)
assert y.shape == (16,), y
for step in range(3):
    total(x, step)
raise SystemExit(0)
"""


def test_a_script_as_it_is(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("def summed(x):\n    return x.sum()\n")
    found, total = inspect_script(file, ["16"], topology=TOPOLOGY)
    assert (total.name, total.collectives[0].source) == ("total", "neighbour.py:2")
    assert (found.name, found.bytes) == ("mean", 16 * 4 * 2 * 7 // 8)
    assert found.collectives[0].text == "return (x * scale).mean(0)"
    assert found.compare().plan.bytes == found.bytes
    (again,) = inspect_script(file, ["24"], "mean")
    assert again.bytes == 24 * 4 * 2 * 7 // 8  # and the script ended before it failed
    with pytest.raises(ArgumentError, match=r"no jitted function 'maen' over several devices; did you mean 'mean'\?"):
        inspect_script(file, ["16"], "maen")
    assert jax.jit.__module__.startswith("jax")


def test_a_script_with_pjit(tmp_path):
    file = tmp_path / "old.py"
    file.write_text(
        "import jax, jax.numpy as jnp\n"
        "from jax.experimental.pjit import pjit\n"
        "from jax.sharding import PartitionSpec as P\n"
        "mean = pjit(lambda x: x.mean(0), in_shardings=P('data'), out_shardings=P())\n"
        "with jax.sharding.Mesh(jax.devices(), ('data',)):\n"
        "    mean(jnp.ones((64, 16)))\n"
    )
    (found,) = inspect_script(file, topology=TOPOLOGY)
    assert found.bytes == 16 * 4 * 2 * 7 // 8
    assert "pjit" not in vars(jax.experimental.pjit)


def test_wrappers_of_libraries():
    """They call a jitted function with arguments of their own making."""
    eqx, nnx = pytest.importorskip("equinox"), pytest.importorskip("flax.nnx")
    batch = jax.device_put(jnp.ones((64, 64)), shape((64, 64), "data").sharding)

    @eqx.filter_jit
    def mean(model, x):
        return jax.vmap(model)(x).mean(0)

    @nnx.jit
    def mean_of_objects(model, x):
        return model(x).mean(0)

    models = eqx.nn.Linear(64, 32, key=jax.random.key(0)), nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    for step, model in zip((mean, mean_of_objects), models, strict=True):
        found = md.inspect(step, model, batch, topology=TOPOLOGY)
        assert (found.name, found.bytes) == (step.__name__, 32 * 4 * 2 * 3 // 4)
        assert found.compare().plan.mesh.names == ("data", "model")


def test_records_are_saved_compared_and_drawn_as_plans_are(inspected, tmp_path):
    file = tmp_path / "sent.json"
    inspected.save(file)
    record = md.load_plan(file)
    assert record == inspected.record and not record.diff(inspected) and not inspected.diff(record)
    assert (record.bytes, record.memory, record.seconds) == (inspected.bytes, inspected.memory, inspected.seconds)
    assert [str(record.layout(path)) for path in ("w", "rate")] == ["data=S(0) model=B", "data=B model=B"]
    assert str(record).startswith("fsdp on mesh data=4,model=2, compiled by XLA; seconds of topology dgx-h100\n")
    record.assert_at_most(inspected.bytes)
    inspected.report(tmp_path / "sent.html", inspected.compare().plan)
    page = (tmp_path / "sent.html").read_text()
    assert "compiled by XLA" in page and "Gap to the optimum" not in page
    with pytest.raises(PlanFileError, match="it is no plan, but what a program sends that XLA compiled") as caught:
        md.parallelize(lambda w: w * 2, record.mesh, plan=record).plan(fsdp_arguments()[0])
    assert len(str(caught.value).splitlines()) == 3


def test_differences_of_records(inspected):
    found = inspected.diff(inspected.compare().plan)
    assert found.changes["bytes"] == pytest.approx(-1 / 3) and not found.different
    names = {name.split(" gradient")[0] for name, *_ in found.collectives}
    assert names == {"all-reduce data", "reduce-scatter data"}
    assert "predicted time of collectives" in str(found) and "made by" in str(found)
    whole = jax.jit(partial(fsdp, mode="train"), out_shardings=NamedSharding(MESH, PartitionSpec()))
    other = inspected.diff(md.inspect(whole, *fsdp_arguments(), rate=0.1, topology=TOPOLOGY))
    assert other.different == "program" and other.changes["bytes"] > 0 and len(other.layouts) == 1
    with pytest.raises(ArgumentError, match="not a plan"):
        inspected.diff("sent.json")
