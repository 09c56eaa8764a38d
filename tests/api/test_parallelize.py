"""parallelize: plans without devices, runs what it planned, places arguments, caches, refuses."""

import inspect
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshdsl as md
from meshdsl.api.options import memory_bytes
from meshdsl.errors import CheckError, DeviceError, LayoutError, MeshDSLError, PinError, PlanFileError, TraceError
from meshdsl.layouts import Layout, Mesh, S
from tests.api.two_matrices import LAYOUTS, MESH, arguments, close, shapes, step


@pytest.fixture(scope="module")
def sharded():
    return md.parallelize(step, MESH, LAYOUTS)


@pytest.fixture
def warnings(caplog):
    """The lines that meshdsl has logged."""
    caplog.set_level(logging.INFO, logger="meshdsl")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "meshdsl"]


def test_it_computes_what_the_step_computes(sharded):
    args = arguments()
    close(sharded(*args), step(*args))


def test_results_lie_as_the_plan_says(sharded):
    params, loss = sharded(*arguments())
    plan = sharded.plan(*arguments())
    assert plan.layout("params/w1").on("model") is S(1)
    assert plan.output_layout("0/w1") == plan.layout("params/w1")
    sizes = plan.layout("params/w1").local_shape((8, 16), MESH.sizes_by_name)
    assert params["w1"].sharding.shard_shape((8, 16)) == sizes
    assert loss.sharding.is_fully_replicated


def test_planning_needs_shapes_only(sharded):
    params, batch = arguments()
    assert sharded.plan(shapes(params), shapes(batch)) is sharded.plan(params, batch)


def test_planning_needs_no_devices():
    big = md.parallelize(step, Mesh(data=64, model=2), {"batch": "data=S(0)"})
    params, batch = arguments(rows=640)
    assert big.plan(shapes(params), shapes(batch)).mesh.size == 128
    with pytest.raises(DeviceError, match="mesh data=64,model=2 needs 128 devices, and there are 8"):
        big(params, batch)


def test_the_mesh_may_be_text():
    assert md.parallelize(step, "data=4,model=2").plan(*arguments()).mesh == MESH


def test_verify_and_check(sharded):
    args = jax.tree.map(jnp.asarray, arguments())
    assert sharded.verify(*args).equal
    assert sharded.check(*args).ok
    assert isinstance(sharded.lower(*args), jax.stages.Lowered)


def test_check_does_not_consume_donated_arguments():
    donating = md.parallelize(step, MESH, LAYOUTS, donate_argnums=0)
    params, batch = jax.tree.map(jnp.asarray, arguments())
    params, _ = donating(params, batch)
    donating.check(params, batch)
    assert not params["w1"].is_deleted()
    again, _ = donating(params, batch)
    assert params["w1"].is_deleted()
    assert not again["w1"].is_deleted()


def test_donation_by_name():
    donating = md.parallelize(step, MESH, LAYOUTS, donate_argnames="params")
    params, batch = arguments()
    params, _ = donating(params, batch)
    donating(params, batch)
    assert params["w1"].is_deleted()


@pytest.mark.parametrize("run", [lambda sharded, *args: sharded(*args), lambda sharded, *args: sharded.check(*args)])
def test_what_was_donated_is_not_read_again(run):
    donating = md.parallelize(step, MESH, LAYOUTS, donate_argnums=0)
    first, batch = donating(*arguments())[0], arguments()[1]
    second, _ = donating(first, batch)
    with pytest.raises(TraceError) as caught:
        run(donating, {"w1": first["w1"], "w2": second["w2"]}, batch)
    assert str(caught.value) == (
        "step cannot run on arrays that are gone:\n"
        "  params/w1: float32[8, 16] was donated to an earlier call, or deleted\n"
        "go on with what that call returned"
    )
    assert not second["w2"].is_deleted()


def test_check_of_a_step_with_shardings_of_its_own():
    devices = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(devices, PartitionSpec("rows"))

    def constrained(x):
        return jax.lax.with_sharding_constraint(x * 2, rows)

    own = md.parallelize(constrained, MESH, {"x": "data=S(0)"}, constraints="ignore")
    assert own.check(np.ones((8, 4), np.float32)).ok


def test_check_names_a_wrong_result():
    def noisy(x):
        jax.debug.callback(lambda: None)
        return x * counter()

    calls = []

    def counter():
        calls.append(0)
        return float(len(calls))

    with pytest.raises(CheckError, match="1 of 1 outputs differ from the unsharded step"):
        md.parallelize(noisy, Mesh(data=8)).check(jnp.ones(8))


def test_one_device_has_no_collectives():
    one = md.parallelize(step, Mesh(data=1, model=1), LAYOUTS)
    args = arguments()
    assert one.plan(*args).collectives == ()
    close(one(*args), step(*args))
    one.verify(*args)


def test_keyword_and_static_arguments():
    def scaled(x, power, *, shift):
        return x**power + shift

    run = md.parallelize(scaled, MESH, {"x": "data=S(0)"}, static_argnames="power")
    x = np.arange(8.0, dtype=np.float32)
    np.testing.assert_allclose(run(x, 2, shift=np.float32(1)), x**2 + 1)
    np.testing.assert_allclose(run(x, power=3, shift=np.float32(1)), x**3 + 1)
    with pytest.raises(TraceError) as caught:
        run(x, [2], shift=np.float32(1))
    assert str(caught.value) == (
        "scaled cannot be planned for these static arguments:\n  power: [2] is a list, which cannot be hashed\n"
        "arrays cannot be static; give anything else in a form that can be hashed, such as a tuple for a list"
    )


def test_new_shapes_plan_again_with_one_line(warnings):
    fresh = md.parallelize(step, MESH, LAYOUTS)
    fresh(*arguments())
    fresh(*arguments())
    assert warnings() == []
    fresh(*arguments(rows=32))
    fresh(*arguments(rows=32))
    assert warnings() == ["planning step again: batch is float32[32,8] instead of float32[16,8]"]
    close(fresh(*arguments()), step(*arguments()))


@pytest.mark.parametrize("others", [np.asarray, jnp.asarray], ids=["numpy", "uncommitted"])
def test_committed_arrays_are_moved_with_one_warning(others, warnings):
    params, batch = jax.tree.map(others, arguments())
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(None, "rows")))
    fresh = md.parallelize(step, MESH, LAYOUTS)
    close(fresh(params, placed), step(params, batch))
    fresh(params, placed)
    assert warnings() == [
        "step: 1 arguments, batch first, are committed to another layout than planned; each call copies 512 B"
    ]


def test_uncommitted_arrays_are_placed_without_a_word(sharded, warnings):
    args = jax.tree.map(jnp.asarray, arguments())
    close(sharded(*args), step(*args))
    assert warnings() == []


def test_results_go_in_again_without_a_move(sharded, warnings):
    params, batch = arguments()
    for _ in range(3):
        params, _ = sharded(params, batch)
    assert warnings() == []


def test_it_goes_by_the_name_of_the_step():
    def train(params, batch):
        """One step."""

    sharded = md.parallelize(train, MESH)
    assert (sharded.__name__, sharded.__doc__) == ("train", "One step.")
    assert str(inspect.signature(sharded)) == "(params, batch)"
    assert repr(sharded) == "<train on mesh data=4,model=2>"
    assert repr(md.parallelize(partial(train, {}), MESH)) == repr(sharded)


def test_what_jax_looks_for_is_found(sharded):
    params, batch = arguments()
    with jax.debug_nans(True):
        close(sharded(params, batch), step(params, batch))
        with pytest.raises(FloatingPointError, match="step returns NaNs or infinities in 0/w1, 0/w2, 1"):
            sharded(params, np.nan * batch)
    assert np.isnan(sharded(params, np.nan * batch)[1])


def test_outputs_can_be_pinned():
    pinned = md.parallelize(step, MESH, LAYOUTS, outputs={"0/w2": "data=S(1) model=B"})
    args = arguments()
    assert pinned.plan(*args).output_layout("0/w2") == Layout.parse("data=S(1) model=B")
    close(pinned(*args), step(*args))
    pinned.verify(*args)


def test_a_loaded_plan_runs(sharded, tmp_path):
    sharded.plan(*arguments()).save(tmp_path / "p.json")
    plan = md.load_plan(tmp_path / "p.json")
    loaded = md.parallelize(step, MESH, plan=plan)
    assert loaded.plan(*arguments()) is plan
    close(loaded(*arguments()), step(*arguments()))
    loaded.verify(*arguments())


def test_the_same_inputs_plan_to_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        md.parallelize(step, MESH, LAYOUTS).plan(*arguments()).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_loaded_plan_refuses_other_shapes(sharded):
    loaded = md.parallelize(step, MESH, plan=sharded.plan(*arguments()))
    with pytest.raises(PlanFileError) as caught:
        loaded(*arguments(rows=32))
    assert str(caught.value) == (
        "the plan of step does not match this call of step:\n"
        "  input batch: float32[16,8] in the plan, float32[32,8] here\n"
        "plan again without plan= and save the new plan"
    )


def test_a_loaded_plan_refuses_another_program(sharded):
    def other(params, batch):
        return jax.tree.map(lambda p: p * jnp.sum(batch), params), jnp.sum(batch)

    with pytest.raises(PlanFileError, match="operations: "):
        md.parallelize(other, MESH, plan=sharded.plan(*arguments())).plan(*arguments())


def test_bad_pins_are_found_before_compilation():
    with pytest.raises(PinError, match=r"layouts\['parms/\*'\]: matches no input; did you mean 'params/\*'\?"):
        md.parallelize(step, MESH, {"parms/*": "data=B"}).plan(*arguments())


def test_an_unknown_path_of_a_plan(sharded):
    with pytest.raises(LayoutError, match=r"no input 'parms/w1' in the plan; did you mean 'params/w1'\?"):
        sharded.plan(*arguments()).layout("parms/w1")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("60GiB", 60 * 2**30),
        ("500MB", 5e8),
        ("1.5 GB", 1.5e9),
        ("100", 100),
        (1e9, 1e9),
        (None, None),
        ("2Ki", 2048),
        ("655 kB", 655e3),
    ],
)
def test_memory_sizes(text, size):
    assert memory_bytes(text) == size


def test_what_is_no_memory_size():
    with pytest.raises(MeshDSLError) as caught:
        memory_bytes("12 apples")
    assert str(caught.value) == "memory='12 apples' is not a size; write bytes, or text like '60GiB' or '500MB'"


def test_program_is_a_value():
    program = md.Program(step, arguments())
    assert (program.layouts, program.rules, program.pipeline, program.init) == (None,) * 4
    with pytest.raises(AttributeError):
        program.step = None
