"""Steps written for ``jax.pmap`` give the numbers of ``jax.pmap``; axis names that mean nothing are errors."""

import jax
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from meshdsl.errors import ArgumentError, MeshDSLError
from tests.api.pmapped_steps import CASES, PARAMS, X, Y, pmapped, sgd
from tests.sweeps import swept


def close(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def sharded(case, mesh="data=8", **options):
    options.setdefault("axis_names", {"batch": "data"})
    return md.parallelize(case.step, mesh, case.layouts, case.outputs, **options)


@swept("name", CASES, every=2)
def test_numbers_of_pmap(name):
    case = CASES[name]
    step = sharded(case)
    close(step(*case.args), pmapped(case))
    assert step.check(*case.args).ok
    step.verify(*case.args)
    assert not step.plan(*case.args).notes


# ---- Several mesh axes, several names --------------------------------------------------------------------------------


def test_a_name_over_two_mesh_axes():
    both = "data=S(0) fsdp=S(0)"
    for axes in ("(data,fsdp)", ("data", "fsdp")):
        step = md.parallelize(sgd, "data=4,fsdp=2", {"x": both, "y": both}, axis_names={"batch": axes})
        close(step(PARAMS, X, Y), pmapped(CASES["sgd"]))


def place(x):
    return x * 0 + lax.axis_index("batch")


@pytest.mark.parametrize("order", ["data=S(0) fsdp=S(0)", "fsdp=S(0) data=S(0)"])
def test_places_count_in_the_order_of_the_name(order):
    step = md.parallelize(place, "data=4,fsdp=2", {"x": order}, axis_names={"batch": "(data,fsdp)"})
    first_of_each = step(np.zeros((16, 1), np.float32))[::2, 0]
    major_is_data = order.startswith("data")
    np.testing.assert_array_equal(first_of_each, np.arange(8) if major_is_data else [0, 2, 4, 6, 1, 3, 5, 7])
    step.verify(np.zeros((16, 1), np.float32))


def test_mesh_axes_beside_those_of_the_name_are_planned_freely():
    step = sharded(CASES["synchronised statistics"], "data=8,model=1")
    close(step(PARAMS, X, Y), pmapped(CASES["synchronised statistics"]))


def nested(w, x):
    h = x @ lax.all_gather(w, "model", axis=1, tiled=True)
    total = lax.psum(h.sum(), ("batch", "model"))
    mine = lax.dynamic_slice_in_dim(h, lax.axis_index("model") * w.shape[1], w.shape[1], 1)
    return mine - lax.pmean(mine, "batch") + total, lax.pmax(mine.max(), "model"), lax.axis_index("batch")


def test_two_names():
    w, x = np.cos(np.arange(32.0, dtype=np.float32)).reshape(8, 4), X
    layouts = {"x": "data=S(0)", "w": "model=S(1)"}
    names = {"batch": "data", "model": "model"}
    step = md.parallelize(nested, "data=4,model=2", layouts, {"0": "data=S(0) model=S(1)"}, axis_names=names)
    over_model = jax.vmap(nested, axis_name="model", in_axes=(2, None), out_axes=(2, None, None))
    over_batch = jax.vmap(over_model, axis_name="batch", in_axes=(None, 0))
    blocks, largest, place = over_batch(np.moveaxis(w.reshape(8, 2, 2), 1, 2), x.reshape(4, 4, 8))
    whole = np.moveaxis(blocks, 3, 2).reshape(16, 4)  # device rows, rows, columns, device columns
    close(step(w, x), (whole, largest, place))
    assert step.check(w, x).ok
    step.verify(w, x)


# ---- Names that are found --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", [False, True])
def test_the_only_axis_that_splits_arguments_is_found(mapped):
    case = CASES["sgd"]
    step = jax.pmap(case.step, axis_name="batch") if mapped else case.step
    found = md.parallelize(step, "data=8", case.layouts)
    close(found(*case.args), pmapped(case))
    assert found.check(*case.args).ok
    note = "axis name 'batch' means mesh axis data, which splits the batch; axis_names= states it"
    assert found.plan(*case.args).notes == (note,)


def test_a_step_of_pmap_without_collectives_sees_blocks():
    mapped = jax.pmap(lambda x: x - x.mean(0))
    step = md.parallelize(mapped, "data=8", {"x": "data=S(0)"})
    close(step(X), mapped(X.reshape(8, 2, -1)).reshape(X.shape))


def test_a_name_is_found_whatever_collective_comes_first():
    """jax has two texts for a name that nothing binds."""
    found = md.parallelize(lambda x: lax.all_gather(x, "batch").sum((0, 1)), "data=8", {"x": "data=S(0)"})
    close(found(X), X.sum(0))


def test_a_mesh_axis_of_the_same_name_is_found():
    def step(x):
        return x - lax.pmean(x.mean(0), "rows")

    found = md.parallelize(step, "rows=4,columns=2", {"x": "rows=S(0) columns=S(1)"})
    close(found(X), X - X.mean(0))


def test_other_pins_trace_such_a_step_again():
    def local(x):
        return x - x.mean(0) + 0 * lax.axis_index("batch")

    one = md.parallelize(local, "a=2,b=4", {"x": "a=S(0)"}, axis_names={"batch": "a"})
    close(one(X), (X.reshape(2, 8, -1) - X.reshape(2, 8, -1).mean(1, keepdims=True)).reshape(X.shape))
    columns = one.with_pins({"x": "a=S(1)"})
    close(columns(X), X - X.mean(0))


def test_a_differing_result_in_place_of_a_shared_argument_is_noted():
    def drifting(state, x):
        return 0.9 * state + 0.1 * x.mean(0), lax.pmean(x.mean(), "batch")

    step = md.parallelize(drifting, "data=8", {"x": "data=S(0)"}, axis_names={"batch": "data"})
    state, _ = step(np.zeros(8, np.float32), X)
    assert state.shape == (64,)
    (note,) = step.plan(np.zeros(8, np.float32), X).notes
    assert note == (
        "0 replaces state, which all devices of 'batch' share, but differs between them at the end "
        "(jax.lax.pmean(..., 'batch') averages it), and is returned as one block per device"
    )


# ---- Bad input -------------------------------------------------------------------------------------------------------


def fault(step, mesh, layouts, args, **options):
    with pytest.raises(MeshDSLError) as caught:
        md.parallelize(step, mesh, layouts, **options).plan(*args)
    return str(caught.value)


def test_axis_names_that_are_no_axes_of_the_mesh():
    with pytest.raises(ArgumentError) as caught:
        md.parallelize(sgd, "data=8", axis_names={"batch": "dat", "other": 3, "third": ("data", "data")})
    assert str(caught.value) == (
        "invalid arguments of parallelize(sgd, ...):\n"
        "  axis_names['batch']: no axis 'dat' in the mesh; did you mean 'data'?\n"
        "  axis_names['other']: 3 is an int, not a mesh axis; write 'data', or '(data,fsdp)' for several\n"
        "  axis_names['third']: axis 'data' is named twice"
    )


@pytest.mark.usefixtures("nothing_is_compiled")
def test_a_name_that_is_not_stated():
    line = sgd.__code__.co_firstlineno + 5
    said = fault(sgd, "data=8", CASES["sgd"].layouts, (PARAMS, X, Y), axis_names={"batches": "data"})
    assert said == (
        "sgd has collectives over an unknown axis:\n"
        f"  pmapped_steps.py:{line}: axis name 'batch' is none of those stated; did you mean 'batches'?\n"
        "state the mesh axis, or axes, over which the batch is split: axis_names={'batch': 'data'}"
    )


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize(
    ("layouts", "said"),
    [
        ({}, "no argument is pinned split"),
        ({"x": "data=S(0)", "params/w": "model=S(1)"}, "data splits x, model splits params/w"),
        ({"x": "data=S(0) model=S(1)"}, "data splits x, model splits x"),
    ],
)
def test_a_name_that_cannot_be_found(layouts, said):
    line = sgd.__code__.co_firstlineno + 5
    assert fault(sgd, "data=4,model=2", layouts, (PARAMS, X, Y)) == (
        "sgd has collectives over an unknown axis:\n"
        f"  pmapped_steps.py:{line}: axis name 'batch' means no mesh axis that could be found: {said}\n"
        "state the mesh axis, or axes, over which the batch is split: axis_names={'batch': 'data'}"
    )


def test_no_argument_is_split():
    assert fault(sgd, "data=8", {}, (PARAMS, X, Y), axis_names={"batch": "data"}) == (
        "sgd has no batch for its devices:\n"
        "  axis_names['batch']: no argument is split over mesh axis data\n"
        "pin the arguments of which every device has its own block, such as layouts={'y': 'data=S(0)'}"
    )


def test_a_batch_that_does_not_divide():
    said = fault(sgd, "data=8", CASES["sgd"].layouts, (PARAMS, X[:12], Y[:12]), axis_names={"batch": "data"})
    assert "layouts['x']: x float32[12,8]: dim 0 of size 12 does not divide over data=8" in said


def test_errors_of_the_step_say_what_a_device_sees():
    with pytest.raises(TypeError) as caught:
        md.parallelize(sgd, "data=8", {"x": "data=S(0)"}, axis_names={"batch": "data"}).plan(PARAMS, X, Y)
    note = "one device of 'batch' has x float32[2,8] as pinned, and all of the other arguments"
    assert note in caught.value.__notes__


def test_two_names_of_one_mesh_axis():
    with pytest.raises(md.ArgumentError) as caught:
        md.parallelize(lambda x: jax.lax.psum(x, ("batch", "host")), "data=4,model=2", {"x": "data=S(0)"}).plan(X)
    _, row, remedy = str(caught.value).splitlines()
    assert row.endswith("axis names 'batch' and 'host' would both mean mesh axis data")
    assert remedy.endswith("axis_names={'batch': 'data', 'host': 'model'}")
