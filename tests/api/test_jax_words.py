"""Meshes, PartitionSpec and NamedSharding of jax wherever ours are taken."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshdsl as md


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


W, X = jnp.ones((16, 32)) / 7, jnp.arange(8 * 16, dtype=jnp.float32).reshape(8, 16) / 100


def concrete():
    return jax.make_mesh((4, 2), ("data", "model"))


def test_a_mesh_of_jax_names_axes_and_devices():
    devices = list(reversed(jax.devices()))[:4]
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2), ("data", "model"))
    sharded = md.parallelize(step, mesh, {"x": "data=S(0)"})
    result = sharded(W, X)
    assert list(result.sharding.mesh.devices.flat) == devices
    np.testing.assert_allclose(result, step(W, X), rtol=1e-6)
    assert sharded.plan(W, X).mesh == md.Mesh(data=2, model=2)


def test_an_abstract_mesh_plans_without_devices():
    plan = md.parallelize(step, AbstractMesh((64, 8), ("data", "model")), {"x": "data=B"}).plan(W, X)
    assert plan.mesh == md.Mesh(data=64, model=8)


@pytest.mark.parametrize("as_sharding", [False, True])
def test_a_spec_pins_every_axis_of_the_mesh(as_sharding):
    spec = P("data", None)
    stated = NamedSharding(concrete(), spec) if as_sharding else spec
    plan = md.parallelize(step, concrete(), {"x": stated, "w": P(None, ("data", "model"))}).plan(W, X)
    assert plan.layout("x") == md.Layout(data=md.S(0), model=md.B)
    assert plan.layout("w") == md.Layout.parse("data=S(1) model=S(1)")
    assert plan.partition_specs() == {"w": P(None, ("data", "model")), "x": P("data", None)}


def test_dims_left_unconstrained_are_free():
    plan = md.parallelize(step, concrete(), {"x": P("data", P.UNCONSTRAINED)}).plan(W, X)
    assert plan.input("x").pinned == ("data",)


def test_a_spec_for_a_result():
    sharded = md.parallelize(step, concrete(), {"x": P("data")}, outputs={"*": P("model")})
    assert sharded(W, X).sharding.spec[0] == "model"
    sharded.verify(W, X)
    sharded.check(W, X)


@pytest.mark.parametrize("stated", [P("data"), P("data", P.UNCONSTRAINED), P(None, "model")])
def test_constrain_takes_a_spec(stated):
    def constrained(w, x):
        return md.constrain(jnp.tanh(x @ w), stated) * 2

    sharded = md.parallelize(constrained, concrete(), {"x": "data=S(0)", "w": "model=S(1)"})
    (op,) = [op for op in sharded.stages(W, X).program.graph.ops if op.name == "constrain"]
    layout = sharded.plan(W, X).solution.layouts[op.outputs[0].id]
    assert layout.on("data") == (md.S(0) if stated[0] == "data" else md.B)
    assert stated != P("data") or layout.on("model") == md.B
    sharded.check(W, X)
    np.testing.assert_array_equal(constrained(W, X), jnp.tanh(X @ W) * 2)


def test_a_constrained_spec_under_vmap_keeps_its_dims():
    def constrained(w, xs):
        return jax.vmap(lambda x: md.constrain(jnp.tanh(x @ w), P("data")))(xs)

    sharded = md.parallelize(constrained, concrete())
    xs = jnp.stack([X, X + 1])
    (op,) = [op for op in sharded.stages(W, xs).program.graph.ops if op.name == "constrain"]
    assert op.params["closed"] == (1, 2)
    layout = sharded.plan(W, xs).solution.layouts[op.outputs[0].id]
    assert layout.on("data") == md.S(1)
    assert not layout.splitting(2)


def test_watch_and_pin_changes_take_jax_words():
    with md.watch(concrete()) as comm:
        jax.jit(jnp.sum, in_shardings=NamedSharding(concrete(), P("data")))(X)
    assert [c.axes for c in comm.collectives] == [("data",)]
    changed = md.parallelize(step, concrete()).with_pins({"w": P("model")}).plan(W, X)
    assert changed.layout("w") == md.Layout(data=md.B, model=md.S(0))


@pytest.mark.parametrize(
    ("layouts", "text"),
    [
        ({"x": P("dat")}, "layouts['x']: no axis 'dat' in the mesh; did you mean 'data'?"),
        ({"x": P(None, None, "data")}, "x float32[8,16]: data=S(2)"),
    ],
)
def test_a_spec_that_does_not_fit(layouts, text):
    with pytest.raises(md.PinError) as error:
        md.parallelize(step, concrete(), layouts).plan(W, X)
    assert text in str(error.value)


def test_a_spec_that_is_no_pin_says_what_to_write():
    with pytest.raises(md.ArgumentError, match="keeps dim 0 whole and leaves others to the planner"):
        md.parallelize(step, concrete(), {"x": P(None, P.UNCONSTRAINED, "model")})


def test_a_spec_that_names_an_axis_twice_is_refused():
    text = r"P\('data', 'data'\) names axis 'data' twice"
    with pytest.raises(md.ArgumentError, match=rf"layouts\['x'\]: {text}"):
        md.parallelize(step, concrete(), {"x": P("data", "data")})
    with pytest.raises(md.NotationError, match=text):
        md.constrain(X, P("data", "data"))


def test_a_tree_of_shardings_is_a_pin_per_leaf():
    def step(params, counts, x):
        return {name: w - x.T @ (x @ w) for name, w in params.items()}, counts

    params = {"up": jnp.ones((8, 16)), "down": jnp.ones((8, 4))}
    counts, x = (jnp.zeros(4), [jnp.zeros(2)]), jnp.ones((16, 8))
    specs = {"up": P(None, "model"), "down": None}
    layouts = {"params": specs, "counts": (P(), [P("model")]), "x": {}, "x*": "data=S(0)"}
    with pytest.raises(md.PinError, match=r"layouts\['x'\]: \{\}"):
        md.parallelize(step, "data=4,model=2", layouts).plan(params, counts, x)
    layouts.pop("x")
    plan = md.parallelize(step, "data=4,model=2", layouts).plan(params, counts, x)
    pinned = {array.path: (str(array.layout), array.pinned) for array in plan.inputs if array.pinned}
    assert pinned == {
        "params/up": ("data=B model=S(1)", ("data", "model")),
        "counts/0": ("data=B model=B", ("data", "model")),
        "counts/1/0": ("data=B model=S(0)", ("data", "model")),
        "x": ("data=S(0) model=B", ("data",)),
    }
    table = md.data_parallel() | {"params": {"up": "model=S(1)", "down": P()}}
    assert table.globs == {"params/up": "model=S(1)", "params/down": P()}
    assert md.Program(step, (params, counts, x), layouts={"params": specs}).layouts == {"params": specs}
    with pytest.raises(md.PinError, match=r"layouts\['params/middle'\]: matches no input"):
        md.parallelize(step, "data=4,model=2", {"params": {"middle": P("data")}}).plan(params, counts, x)


def test_trees_of_specs_of_flax_are_pins():
    linear = nn.Dense(16, kernel_init=nn.with_partitioning(nn.initializers.ones_init(), (None, "model")))
    boxed = jax.eval_shape(linear.init, jax.random.key(0), jnp.ones((8, 8)))
    layouts = {"variables": nn.get_partition_spec(boxed)}
    planned = md.parallelize(lambda variables, x: linear.apply(variables, x), "data=4,model=2", layouts)
    plan = planned.plan(nn.unbox(boxed), jnp.ones((8, 8)))
    assert str(plan.layout("variables/params/kernel")) == "data=B model=S(1)"
    assert all(array.pinned for array in plan.inputs[:2])
    with nnx.use_eager_sharding(False):
        start = nnx.with_partitioning(nnx.initializers.ones_init(), (None, "model"))
        model = nnx.Linear(8, 16, kernel_init=start, rngs=nnx.Rngs(0))
    specs = nnx.get_partition_spec(nnx.state(model))
    plan = md.parallelize(lambda model, x: model(x), "data=4,model=2", {"model": specs}).plan(model, jnp.ones((8, 8)))
    assert str(plan.layout("model/kernel")) == "data=B model=S(1)" and plan.input("model/kernel").pinned
