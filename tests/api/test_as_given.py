"""``layouts="as-given"``: arguments that lie sharded pin their inputs, with a note in the plan; faults by path."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import meshdsl as md
from meshdsl.api.program import parallelize_program
from meshdsl.api.stages import SLOW_DEVICES

MESH = md.Mesh(data=4, model=2, topology=SLOW_DEVICES)
DEVICES = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def step(w, x, count):
    gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient, count + 1


def at(*spec, mesh=DEVICES):
    return NamedSharding(mesh, PartitionSpec(*spec))


def arguments(*w_spec):
    w = jax.device_put(np.ones((8, 16), np.float32), at(*w_spec))
    return w, jax.device_put(np.ones((8, 8), np.float32), at("data")), jnp.zeros((), jnp.int32)


def test_arguments_that_lie_sharded_are_pins_with_their_origin():
    sharded = md.parallelize(step, MESH, "as-given")
    args = arguments(None, "model")
    plan = sharded.plan(*args)
    assert str(plan.layout("w")) == "data=B model=S(1)" and str(plan.layout("x")) == "data=S(0) model=B"
    assert [array.pinned for array in plan.inputs] == [("data", "model"), ("data", "model"), ()]
    assert plan.notes == (
        "as-given: pinned as they lie: w, x",
        "as-given: left to the planner, since they lie on no mesh yet: count",
    )
    sharded.check(*args)
    sharded.verify(*args)


def test_shapes_with_a_sharding_are_pinned_alike():
    shapes = [
        jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=at("model", mesh=AbstractMesh((4, 2), ("data", "model")))),
        jax.ShapeDtypeStruct((8, 8), jnp.float32),
        0,
    ]
    plan = md.parallelize(step, MESH, "as-given").plan(*shapes)
    assert str(plan.layout("w")) == "data=B model=S(0)"
    assert [array.path for array in plan.inputs if array.pinned] == ["w"]


def test_results_go_round_without_another_plan_and_other_places_have_their_own(caplog):
    sharded = md.parallelize(step, MESH, "as-given")
    w, x, count = arguments(None, "model")
    with caplog.at_level(logging.INFO, "meshdsl"):
        for _ in range(3):
            w, count = sharded(w, x, count)
        assert len({id(stages) for stages in sharded._stages.values()}) == 1 and not caplog.records
        moved = sharded(jax.device_put(w, at("model", None)), x, count)[0]
    (record,) = caplog.records
    assert record.getMessage() == "planning step again: w lies as model=S(0) data=B instead of model=S(1) data=B"
    assert moved.sharding.is_equivalent_to(at("model", None), 2)
    assert sharded(w, x, count)[0].sharding.is_equivalent_to(at(None, "model"), 2)


def test_arguments_that_are_traced_are_left_to_the_planner():
    args = arguments(None, "model")
    inside = jax.jit(lambda *args: md.parallelize(step, MESH, "as-given")(*args))(*args)
    expected = step(*args)
    assert jnp.allclose(inside[0], expected[0], atol=1e-6) and inside[1] == 1


def test_arrays_on_explicit_axes_lie_where_they_are():
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    w = jax.device_put(np.ones((8, 16), np.float32), at(("model", "data"), mesh=explicit))
    sharded = md.parallelize(step, MESH, "as-given")
    assert str(sharded.plan(w, np.ones((8, 8), np.float32), 0).layout("w")) == "model=S(0) data=S(0)"
    result = sharded(w, np.ones((8, 8), np.float32), 0)[0]
    assert result.sharding.is_equivalent_to(w.sharding, 2) and result.sharding.mesh == explicit


def test_globs_are_changed_on_top():
    sharded = md.parallelize(step, MESH, "as-given").with_pins({"w": "model=S(0)"})
    array = sharded.plan(*arguments(None, "model")).input("w")
    assert (str(array.layout), array.pinned) == ("data=B model=S(0)", ("data", "model"))


def test_what_does_not_lie_on_the_mesh_is_listed_by_path():
    other = jax.make_mesh((2, 4), ("data", "model"))
    w = jax.device_put(np.ones((8, 16), np.float32), at("data", mesh=other))
    x = jax.device_put(np.ones((8, 8), np.float32), jax.devices()[3])
    with pytest.raises(md.PinError) as caught:
        md.parallelize(step, MESH, "as-given").plan(w, x, 0)
    assert str(caught.value) == (
        "layouts='as-given': arguments of step do not lie on mesh data=4,model=2:\n"
        "  w: lies on mesh data=2,model=4\n"
        f"  x: is committed to one device, {jax.devices()[3]}\n"
        "jax.device_put(x, NamedSharding(mesh, spec)) moves an array; layouts= by globs pins without moving"
    )


def test_axes_of_one_device_do_not_tell_meshes_apart():
    w = jax.device_put(np.ones((8, 16), np.float32), at("data", mesh=jax.make_mesh((8, 1), ("data", "expert"))))
    plan = md.parallelize(step, md.Mesh(data=8, model=1, topology=SLOW_DEVICES), "as-given").plan(
        w, np.ones((8, 8), np.float32), 0
    )
    assert str(plan.layout("w")) == "data=S(0) model=B"


def test_another_word():
    with pytest.raises(
        md.ArgumentError, match="layouts: 'as_given' is neither 'as-given' nor a dict of layouts by globs; write "
    ):
        md.parallelize(step, MESH, "as_given")


def test_a_program_pins_its_arguments_as_they_lie():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arguments()[:2])
    program = md.Program(step, (*shapes, jnp.int32(0)), layouts="as-given")
    assert "as-given: pinned as they lie: w, x" in parallelize_program(program, MESH).plan(*program.args).notes
    with pytest.raises(md.ArgumentError, match="layouts: 'as-given' pins arguments to the one mesh that they lie on"):
        md.search(program, devices=8)
    with pytest.raises(md.ArgumentError, match="layouts: 'given' is a str, neither a dict of layouts by globs nor 'as"):
        md.Program(step, shapes, layouts="given")
