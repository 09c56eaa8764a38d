"""Every dtype that jax computes in is planned, moved by every collective, run, checked, verified and saved."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import meshdsl as md
from meshdsl.api.stages import SLOW_DEVICES
from meshdsl.ir.graph import Value, element_bits
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.topology import Link, Topology
from meshdsl.lowering.hlo.collectives import SENT_AS
from meshdsl.lowering.hlo.parse import arrays, parse_module
from meshdsl.lowering.local import Local
from meshdsl.lowering.local.collectives import gather, swap
from meshdsl.plan.report.data import report_data
from tests.sweeps import swept

SHORT_FLOATS = [name for name in dir(ml_dtypes) if name.startswith(("float8", "float4")) and hasattr(jnp, name)]
PACKED = ["int4", "uint4", "int2", "uint2"]
COMMON = ["bfloat16", "bool", "complex64"]
NO_SUM = ("bool", "float8_e8m0fnu")  # the latter has no zero
NO_ORDER = ("complex64",)


def dtype(name):
    return jnp.dtype(getattr(jnp, name)) if hasattr(jnp, name) else jnp.dtype(name)


def numbers(name, *shape):
    """Ones, and a row of twos (of two bits: minus two): no sum of a column rounds."""
    values = np.zeros(shape, np.float32)
    values[:: max(1, shape[0] // 4)] = 1
    values[1] = 2
    if name == "float8_e8m0fnu":
        values = 2**values
    return jnp.asarray(values * (1 + 2j) if name == "complex64" else values, dtype(name))


def agrees(step, layouts, *args, outputs=None, mesh="data=4"):
    """The plan of a step that computes and communicates as planned."""
    sharded = md.parallelize(step, mesh, layouts, outputs=outputs)
    sharded.check(*args)
    sharded.verify(*args)
    return sharded.plan(*args)


# ---- Collectives -----------------------------------------------------------------------------------------------------
# One array each, so that none is gathered for another's sake, and no latencies, so that none is sent with another.

APART = Topology("no latency", 1e10, 1e10, 4e9, 4e9, 0.0, (Link(latency=0.0, bandwidth=4.5e8),))

MOVES = {
    "gathered": (lambda x: x, "data=B", "all-gather"),
    "turned": (lambda x: x, "data=S(1)", "all-to-all"),
    "rolled": (lambda x: jnp.roll(x, 1, axis=0), "data=S(0)", "collective-permute"),
}
SUMS = {
    "sum": (lambda x: total(x), "data=B", "all-reduce"),
    "part": (lambda x: total(x), "data=S(0)", "reduce-scatter"),
    "copy": (lambda x: md.constrain(x, "data=P"), "data=B", "all-reduce"),
}
EXTREMES = {
    "highest": (lambda x: lax.reduce_max(x, (0,)), "data=B", "all-reduce"),
    "lowest": (lambda x: lax.reduce_min(x, (0,)), "data=S(0)", "all-to-all"),
    "least": (lambda x: md.constrain(x, 'data=P("max")'), "data=B", "all-reduce"),
}


def total(x):
    return lax.reduce(x, np.zeros((), x.dtype), lax.add, (0,))


def moves(name):
    return MOVES | ({} if name in NO_SUM else SUMS) | ({} if name in NO_ORDER else EXTREMES)


def all_moved(name):
    def step(x):
        return {key: move(x[key]) for key, (move, _, _) in moves(name).items()}

    ends = {key: end for key, (_, end, _) in moves(name).items()}
    return md.parallelize(step, md.Mesh(data=4, topology=APART), {"x/**": "data=S(0)"}, outputs=ends)


@swept("name", [*SHORT_FLOATS, *PACKED, *COMMON], every=2)
def test_every_collective(name, tmp_path):
    sharded, x = all_moved(name), {key: numbers(name, 16, 8) for key in moves(name)}
    sharded.check(x)
    sharded.verify(x)
    plan = sharded.plan(x)
    assert {c.kind for c in plan.collectives} >= {kind for _, _, kind in moves(name).values()} - {"reduce-scatter"}
    plan.save(tmp_path / "plan.json")
    assert str(md.load_plan(tmp_path / "plan.json")) == str(plan)


def test_halves_and_quarters_of_bytes_are_priced():
    gathered = {}
    for name in ("int8", "int4", "float4_e2m1fn", "uint2"):
        sharded = md.parallelize(lambda x: x, "data=4", {"x": "data=S(0)"}, outputs={"": "data=B"})
        plan = sharded.plan(jax.ShapeDtypeStruct((1024, 8), dtype(name)))
        gathered[name] = plan.bytes, plan.memory
    sent, held = gathered["int8"]
    assert gathered["int4"] == gathered["float4_e2m1fn"] == (sent // 2, held // 2)
    assert gathered["uint2"][0] == sent
    assert held // 4 <= gathered["uint2"][1] < held // 2


def test_two_bits_are_sent_and_verified_as_bytes():
    sharded = md.parallelize(lambda x: x, "data=4", {"x": "data=S(0)"}, outputs={"": "data=B"})
    (line,) = sharded.verify(jax.ShapeDtypeStruct((1024, 8), dtype("int2"))).lines
    assert line.planned == line.compiled == 3 * 256 * 8


@pytest.mark.parametrize("name", ["int4", "uint2", "float4_e2m1fn", "float8_e5m2"])
def test_bytes_are_those_of_the_compilers_buffers(name):
    x = jax.ShapeDtypeStruct((64, 3), dtype(name))
    held = jax.jit(lambda x: x.T).lower(x).compile().memory_analysis()
    assert held.argument_size_in_bytes == Value(0, x.shape, x.dtype).bytes


def test_the_table_of_widened_dtypes_is_what_the_compiler_does():
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    where = Local({"x": 2}, (), ())
    for name in [*SHORT_FLOATS, *PACKED, "bfloat16", "float16", "float32", "int8", "uint32", "bool", "complex64"]:
        x = jax.ShapeDtypeStruct((4, 8), dtype(name))
        every = jax.shard_map(
            lambda x: (gather(x, ("x",), 0), swap(x, where, ("x",), (1, 0))),
            mesh=mesh,
            in_specs=PartitionSpec("x"),
            out_specs=(PartitionSpec(), PartitionSpec("x")),
            check_vma=False,
        )
        module = parse_module(jax.jit(every).lower(x).compile().as_text())
        lines = [line for some in module.computations.values() for line in some if line.opcode in COLLECTIVES]
        sent = {array.dtype for line in lines for array in arrays(line.type)}
        own = {array.dtype for array in arrays(jax.jit(lambda x: x).lower(x).as_text("hlo").split("->")[1])}
        assert len(lines) == 2
        assert sent == set(SENT_AS["cpu"].get(name, own)), name


# ---- Keys ------------------------------------------------------------------------------------------------------------


def implementations():
    """Every kind of keys that this version of jax has."""
    for name in ("threefry2x32", "rbg", "unsafe_rbg", "threefry4x32", "philox2x32", "philox4x32"):
        try:
            jax.random.key(0, impl=name)
        except ValueError:
            continue
        yield name


@swept("kind", list(implementations()), every=2)
def test_keys(kind, tmp_path):
    keys = jax.random.split(jax.random.key(1, impl=kind), (8, 4))
    draws = not kind.startswith("philox")  # XLA does not compile these under shard_map

    def step(k, n):
        drawn = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (4,))))(k["drawn"]) if draws else 0
        fold = jax.random.fold_in if draws else lambda key, _: key
        _, last = lax.scan(lambda c, key: (c + 1, fold(key, c)), 0, k["scanned"][:, 0])
        return {
            "gathered": k["gathered"],
            "turned": k["turned"],
            "rolled": jnp.roll(k["rolled"], 1, axis=0),
            "turned_around": k["turned_around"][::-1],
            "joined": jnp.concatenate([k["joined"], k["joined"]]),
            "row": k["row"][n],
            "rows": k["rows"][jnp.arange(4) * 2 - n],
            "chosen": jnp.where(jnp.arange(8)[:, None] > n, k["chosen"], k["chosen"][:, ::-1]),
            "drawn": drawn,
            "scanned": last,
        }

    names = "gathered turned rolled turned_around joined row rows chosen drawn scanned".split()
    ends = {"gathered": "data=B", "turned": "data=S(1)", "rolled": "data=S(0)", "turned_around": "data=S(0)"}
    sharded = md.parallelize(step, "data=4", {"k/**": "data=S(0)"}, outputs=ends)
    given = dict.fromkeys(names, keys), np.int32(3)
    sharded.check(*given)
    sharded.verify(*given)
    plan = sharded.plan(*given)
    plan.save(tmp_path / "plan.json")
    assert str(md.load_plan(tmp_path / "plan.json")) == str(plan)
    held = jax.random.key_data(keys).nbytes
    assert element_bits(keys.dtype) == 8 * held // keys.size
    shown = [row["bytes"] for row in report_data(plan)["arrays"] if row["type"].startswith("key")]
    assert sum(shown) == len(names) * held // 4


def test_rows_of_keys_are_set():
    def step(k):
        return k.at[jnp.array([1, 5])].set(k[0]), k.at[2:11:4].set(k[9]), k[1:] == k[:-1]

    keys = jax.random.split(jax.random.key(3), 16)
    agrees(step, {"k": "data=S(0)"}, keys)


# ---- Computations ----------------------------------------------------------------------------------------------------


def test_float0_gradients_of_integers_are_returned():
    def step(w, n):
        return jax.value_and_grad(lambda w, n: jnp.sum(w * n), argnums=(0, 1), allow_int=True)(w, n)

    agrees(step, {"n": "data=S(0)"}, jnp.ones((8, 4)), jnp.arange(32).reshape(8, 4))


@swept("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int4", "bfloat16"], every=2)
def test_training_with_short_weights(name):
    """Products in the short dtype with a longer result, scaled, its gradient, in a loop."""

    def loss(w, scale, x):
        short = (w / scale).astype(dtype(name))

        def layer(h, short):
            product = lax.dot_general(
                h.astype(jnp.bfloat16),
                short.astype(jnp.bfloat16),
                (((1,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            return jnp.tanh(product * scale), None

        return jnp.mean(lax.scan(layer, x, short)[0] ** 2)

    def step(w, scale, x):
        return w - 0.1 * jax.grad(loss)(w, scale, x), (w / scale).astype(dtype(name))

    w = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 8)), jnp.float32)
    agrees(
        step,
        {"x": "data=S(0)", "w": "data=S(1)"},
        w,
        np.float32(0.5),
        jnp.ones((16, 8)),
        mesh=md.Mesh(data=4, model=2, topology=SLOW_DEVICES),
        outputs={"1": "data=B model=B"},
    )


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e8m0fnu", "int4", "uint2"])
def test_tables_are_looked_up_and_written(name):
    table, at = numbers(name, 16, 8), jnp.asarray([3, 1, 15, 0])

    def step(table, at):
        rows = table[at]
        return rows, table.at[at].set(rows[::-1]), lax.dynamic_slice_in_dim(table, at[0], 4)

    agrees(step, {"table": "data=S(0)"}, table, at, outputs={"0": "data=B", "1": "data=S(0)", "2": "data=B"})


@pytest.mark.parametrize("name", ["float8_e5m2", "uint4", "float8_e4m3fn"])
def test_halos_sorts_and_positions(name):
    def step(x):
        return (
            x[1:] + x[:-1],
            jnp.argmax(x, axis=0),
            jnp.sort(x, axis=0),
            lax.cummax(x, axis=0),
            jnp.pad(x, ((1, 2), (0, 0))),
        )

    agrees(step, {"x": "data=S(0)"}, numbers(name, 16, 4))


def test_complex_numbers_of_128_bits():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)) + 1j, jnp.complex128)
        plan = agrees(lambda x: x * 2j, {"x": "data=S(0)"}, x, outputs={"": "data=S(1)"})
        assert [(c.kind, c.bytes) for c in plan.collectives] == [("all-to-all", 16 * 8 * 16 // 4 * 3 // 4)]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn"])
def test_maxima_over_devices_keep_nan_and_infinities(name):
    x = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
    x[3, 0], x[5, 1], x[7, 2], x[:, 3], x[:, 4] = np.nan, np.inf, -np.inf, -0.0, -abs(x[:, 4])
    given = jnp.asarray(x).astype(dtype(name))
    mesh, ends = md.Mesh(data=4, topology=APART), {"*": "data=B"}
    sharded = md.parallelize(lambda x: (x.max(0), x.min(0)), mesh, {"x": "data=S(0)"}, outputs=ends)
    assert {c.kind for c in sharded.plan(given).collectives} == {"all-reduce"}
    for got, expected in zip(sharded(given), (given.max(0), given.min(0)), strict=True):
        np.testing.assert_array_equal(got.astype(jnp.float32), expected.astype(jnp.float32))
    sharded.verify(given)
