"""Ambient state of jax around a call neither breaks the step nor leaks into it; what changes a program counts."""

import contextlib
import functools
import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshdsl as md
from meshdsl.api.ambient import MEANING, JaxSettings
from meshdsl.api.stages import SLOW_DEVICES
from tests.sweeps import swept

MESH = md.Mesh(data=4, model=2, topology=SLOW_DEVICES)  # on which plans of small steps divide as those of large ones
LAYOUTS = {"x": "data=S(0)"}
W, X = np.full((8, 8), 0.5, np.float32), np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)


def step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


def scanned(w, x):
    """Loops and constants of its own."""

    def body(w, row):
        return w - 0.01 * jnp.outer(row, row @ w) * jnp.arange(8, dtype=w.dtype)[None], jnp.sum(row)

    return jax.lax.scan(body, w, x)


def jax_mesh(kind, shape=(4, 2), names=("data", "model")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def legacy(mesh):
    """``with mesh:``, as before ``jax.set_mesh``; it warns in newer versions."""

    @contextlib.contextmanager
    def entered():
        with mesh:
            yield

    return entered()


AMBIENT = {
    "set_mesh, Auto": lambda: jax.set_mesh(jax_mesh(AxisType.Auto)),
    "set_mesh, Explicit": lambda: jax.set_mesh(jax_mesh(AxisType.Explicit)),
    "set_mesh, other axes": lambda: jax.set_mesh(jax_mesh(AxisType.Auto, (8,), ("d",))),
    "set_mesh, other axes, Explicit": lambda: jax.set_mesh(jax_mesh(AxisType.Explicit, (2, 4), ("a", "b"))),
    "set_mesh, one device": lambda: jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))),
    "use_abstract_mesh": lambda: jax.sharding.use_abstract_mesh(jax_mesh(AxisType.Explicit).abstract_mesh),
    "with mesh": lambda: legacy(jax_mesh(AxisType.Auto)),
    "default_device": lambda: jax.default_device(jax.devices()[3]),
    "enable_x64": lambda: jax.enable_x64(True),
    "default_matmul_precision": lambda: jax.default_matmul_precision("highest"),
    "numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "numpy_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "default_prng_impl": lambda: jax.default_prng_impl("rbg"),
    "threefry_partitionable": lambda: jax.threefry_partitionable(False),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "disable_jit": lambda: jax.disable_jit(),
    "log_compiles": lambda: jax.log_compiles(),
    "checking_leaks": lambda: jax.checking_leaks(),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
}


def placed(sharded, *args):
    return jax.device_put(args, sharded.input_shardings(*args)[0])


@functools.cache
def without(f):
    """The planned step, its arguments, results and printed plan without ambient state."""
    sharded = md.parallelize(f, MESH, LAYOUTS)
    args = placed(sharded, W, X)
    return sharded, args, jax.tree.map(np.asarray, sharded(*args)), str(sharded.plan(*args))


LOOPED = ["set_mesh, Explicit", "disable_jit", "debug_nans", "checking_leaks", "numpy_rank_promotion"]


@swept(("name", "f"), [*((name, step) for name in AMBIENT), *((name, scanned) for name in LOOPED)], every=2)
def test_plan_call_verify_and_check_as_without_it(name, f):
    alone, args, want, text = without(f)
    dtype = np.float64 if name == "enable_x64" else np.float32
    sharded = md.parallelize(f, MESH, LAYOUTS)
    with AMBIENT[name]():
        plan = sharded.plan(*args)
        for _ in range(2):
            got = sharded(*args)
        sharded.verify(*args)
        if f is step:
            assert sharded.check(*args).divided["data"] > 0.5
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6)
        assert a.dtype == b.dtype or a.dtype == dtype
    if name != "enable_x64":
        assert str(plan) == text
    if "mesh" in name:
        assert plan.fingerprint == alone.plan(*args).fingerprint  # a saved plan of one runs the other
    again = sharded(*args)  # nothing is left behind
    assert all(a.dtype == b.dtype for a, b in zip(again, alone(*args), strict=True))


@pytest.mark.parametrize("before", ["plan", "stages"])
def test_what_was_planned_inside_runs_outside(before):
    sharded = md.parallelize(step, MESH, LAYOUTS)
    with AMBIENT["set_mesh, Explicit"](), jax.disable_jit():
        getattr(sharded, before)(W, X)
    got, want = sharded(W, X), step(W, X)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)


def test_results_can_be_used_beside_arrays_on_the_ambient_mesh():
    mesh = jax_mesh(AxisType.Explicit)
    sharded = md.parallelize(step, MESH, LAYOUTS)
    with jax.set_mesh(mesh):
        w = jax.device_put(W, NamedSharding(mesh, PartitionSpec()))
        for _ in range(2):
            w, loss = sharded(w, X)
            assert float(loss + 1) > 1
        assert (w * 2).shape == jnp.tanh(w).shape
    assert float(jnp.sum(md.parallelize(step, MESH, LAYOUTS)(W, X)[0])) > 0


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec(("data", "model"))])
def test_arguments_on_an_explicit_mesh(spec):
    x = jax.device_put(X, NamedSharding(jax_mesh(AxisType.Explicit), spec))
    w = jax.device_put(W, NamedSharding(jax_mesh(AxisType.Explicit), PartitionSpec()))
    sharded = md.parallelize(step, MESH, LAYOUTS)
    for args in ((w, x), (W, x)):
        sharded.check(*args)
        sharded.verify(*args)
        np.testing.assert_allclose(sharded(*args)[0], step(W, X)[0], rtol=1e-5)
    assert len(sharded._stages) == 1


@pytest.mark.parametrize("name", [name for name in AMBIENT if "mesh" in name and "one device" not in name])
def test_inlined_under_an_ambient_mesh(name):
    sharded, want = md.parallelize(step, MESH, LAYOUTS), step(W, X)
    arguments = placed(sharded, W, X) if name in ("set_mesh, Auto", "with mesh") else (W, X)
    with AMBIENT[name]():
        got = jax.jit(lambda w, x: sharded(sharded(w, x)[0], x)[0])(*arguments)
        used = got if "other axes" in name else jax.jit(lambda w, x: sharded(w, x)[0] * 2 + 1)(*arguments)
    np.testing.assert_allclose(got, step(want[0], X)[0], rtol=1e-5)
    assert used.shape == (8, 8)


NAMED = {
    "with_sharding_constraint": lambda w, x: jax.lax.with_sharding_constraint(x, PartitionSpec("data")) @ w,
    "reshard": lambda w, x: jax.sharding.reshard(x, PartitionSpec("data")) @ w,
    "out_sharding": lambda w, x: jnp.einsum("ij,jk->ik", x, w, out_sharding=PartitionSpec("data")),
}


@pytest.mark.parametrize(
    ("kind", "f"),
    [
        (AxisType.Auto, "with_sharding_constraint"),
        (AxisType.Explicit, "with_sharding_constraint"),
        (AxisType.Explicit, "reshard"),
        (AxisType.Explicit, "out_sharding"),
    ],
)
def test_a_step_may_name_axes_of_the_ambient_mesh(kind, f):
    sharded = md.parallelize(NAMED[f], MESH)
    with jax.set_mesh(jax_mesh(kind)):
        got = sharded(W, X)
        sharded.check(W, X)
        sharded.verify(W, X)
    np.testing.assert_allclose(got, X @ W, rtol=1e-5)


@pytest.mark.parametrize("f", NAMED)
def test_a_step_inside_jit_may_name_them(f):
    sharded = md.parallelize(NAMED[f], MESH)
    with jax.set_mesh(jax_mesh(AxisType.Explicit)):
        np.testing.assert_allclose(jax.jit(lambda w, x: sharded(w, x) * 2)(W, X), X @ W * 2, rtol=1e-5)


@pytest.mark.parametrize("f", ["reshard", "out_sharding"])
def test_what_only_explicit_axes_can_hold_is_refused_on_others_as_by_jit(f):
    with jax.set_mesh(jax_mesh(AxisType.Auto)):
        for plan in (md.parallelize(NAMED[f], MESH).plan, jax.jit(NAMED[f])):
            with pytest.raises(ValueError, match="axis names that are of type Auto"):
                plan(W, X)


def test_an_explicit_mesh_adds_no_constraints():
    """jax states shardings of its own on Explicit axes, of both branches of ``jnp.where`` for one."""

    def chosen(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.where(x @ w > 0, x @ w, 0.0) ** 2))(w)

    sharded = md.parallelize(chosen, MESH, LAYOUTS)
    text = str(sharded.plan(W, X))
    with jax.set_mesh(jax_mesh(AxisType.Explicit)):
        assert str(md.parallelize(chosen, MESH, LAYOUTS).plan(W, X)) == text


def test_init_under_an_ambient_mesh():
    sharded = md.parallelize(step, MESH, LAYOUTS)
    with AMBIENT["set_mesh, Explicit"]():
        w = sharded.init(lambda: jnp.full((8, 8), 0.5), X)
        sharded(w, X)
    np.testing.assert_array_equal(np.asarray(w), W)


# ---- What changes a program ------------------------------------------------------------------------------------------


def noisy(key, x):
    return x + jax.random.normal(key, x.shape), jax.random.bits(jax.random.PRNGKey(3), (8,))


MEANINGFUL = {
    "enable_x64": (lambda x: (x * 2, jnp.arange(8) * 1.5), (np.arange(8.0),)),
    "default_matmul_precision": (lambda w, x: x @ w, (W, X)),
    "default_prng_impl": (lambda x: x + jax.random.uniform(jax.random.key(1), (8,)), (np.arange(8, dtype=np.float32),)),
    "threefry_partitionable": (noisy, (jax.random.key(0), X)),
}


@pytest.mark.parametrize("name", MEANINGFUL)
def test_settings_that_change_the_program_hold_for_each_call(name):
    f, args = MEANINGFUL[name]
    sharded = md.parallelize(f, MESH)
    for inside in (False, True, False):
        with AMBIENT[name]() if inside else contextlib.nullcontext():
            got, want = sharded(*args), jax.jit(lambda *args: f(*args))(*args)  # jax.jit(f) would be kept
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5)
    assert len(sharded._stages) == 2


def test_stages_run_under_the_settings_of_their_call():
    sharded, x = md.parallelize(lambda x: x * jnp.arange(8), MESH), np.arange(8.0)
    with jax.enable_x64(True):
        stages = sharded.stages(x)
    assert stages.planned.program.outputs[0].dtype == np.float64
    assert "tensor<8xf64>" in stages.executable.lowered.as_text()


def test_precision_reaches_the_compiled_program():
    sharded = md.parallelize(lambda w, x: x @ w, MESH)
    with jax.default_matmul_precision("highest"):
        stages = sharded.stages(W, X)
    assert "HIGHEST" in stages.executable.lowered.as_text()


def test_the_log_names_the_setting(caplog):
    caplog.set_level(logging.INFO, logger="meshdsl")
    sharded = md.parallelize(lambda x: x * 2, MESH)
    sharded(np.arange(8.0))
    with jax.enable_x64(True):
        sharded(np.arange(8.0))
    assert [record.getMessage() for record in caplog.records] == [
        "planning step again: x is float64[8] instead of float32[8]; jax_enable_x64 is True instead of False"
    ]


def test_a_strict_promotion_is_the_steps():
    with jax.numpy_dtype_promotion("strict"), pytest.raises(Exception, match="implicit dtype promotion"):
        md.parallelize(lambda x, i: x + i, MESH).plan(X, np.arange(8))


# ---- What holds for a call -------------------------------------------------------------------------------------------


def test_nans_are_reported_by_the_call_and_not_by_check():
    def bad(x):
        return {"ok": x, "bad": jnp.log(x)}

    sharded = md.parallelize(bad, MESH)
    with jax.debug_nans(True):
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="bad returns NaNs or infinities in bad"):
                sharded(-np.ones(8, np.float32))
        sharded.check(-np.ones(8, np.float32))
    assert np.isnan(sharded(-np.ones(8, np.float32))["bad"]).all()


def test_implicit_transfers_are_refused_as_by_jit():
    sharded = md.parallelize(step, MESH, LAYOUTS)
    args = placed(sharded, W, X)
    sharded(*args)
    with jax.transfer_guard("disallow"):
        sharded(*args)
        sharded(jnp.asarray(args[0]), args[1])
        for f in (sharded, jax.jit(step)):
            with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
                f(W, X)


def test_settings_inside_are_those_that_were_read():
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        settings = JaxSettings.current()
    assert settings != JaxSettings.current()
    for context in (settings.applied, settings.lowering):
        with AMBIENT["set_mesh, Explicit"](), jax.debug_nans(True), context():
            assert jax.sharding.get_mesh().empty and not jax.config.jax_debug_nans
            assert jax.config.jax_enable_x64 and jnp.arange(3.0).dtype == np.float64
    assert not jax.config.jax_enable_x64


def test_the_page_names_tests_that_exist():
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "calls.md").read_text(encoding="utf-8")
    table = page.partition("## The state of jax around a call")[2]
    named = set(re.findall(r"`(test_\w+)`", table))
    assert len(named) > 5 and named <= set(globals())
    assert all(name.removeprefix("jax_") in page for name in MEANING)
