"""Compilers of devices that are not there: names, what is compared, and what is said when a step does not fit."""

import sys
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.errors import DeviceError, VerifyError
from meshdsl.lowering.aot_targets import KINDS, CompileTarget, parse_target

MESH = md.Mesh(data=4, model=2)
compiles = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, which compiles for TPUs, is not installed")


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(w, batch):
    def loss(w):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, w)[0] ** 2)

    return w - 0.1 * jax.grad(loss)(w)


ARGS = array(3, 256, 256), array(512, 256)


def test_a_target_has_as_many_devices_as_its_shape():
    target = parse_target("tpu-v5p:2x4x4")
    assert (target.size, target.preset, str(target), target.mesh) == (
        *(32, "tpu-v5p", "tpu-v5p:2x4x4"),
        "data=8,model=4",
    )
    assert parse_target("tpu-v5p:2x2x1").mesh == "data=2,model=2"
    assert parse_target("tpu-v6e:1x1").mesh == "data=1,model=1"
    assert all(md.topology(name) for name in KINDS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpu-v5x:4x4", "no target 'tpu-v5x:4x4'; did you mean 'tpu-v5"),
        ("tpu-v5e:4x5", "no target 'tpu-v5e:4x5'; did you mean 'tpu-v5e:4x"),
        ("cpu:8", r"no target 'cpu:8'.* \(NAME:SHAPE, such as tpu-v5e:4x4\)"),
        ("dgx-h100:3x8", "no target 'dgx-h100:3x8'; did you mean 'dgx-h100:"),
        (array(4), "is not a name of devices to compile for, such as 'tpu-v5e:4x4'"),
    ],
)
def test_unknown_targets_name_the_nearest(text, message):
    with pytest.raises(DeviceError, match=message):
        md.parallelize(step, MESH).verify(*ARGS, target=text)


def test_a_target_that_the_mesh_does_not_fit():
    message = "mesh data=4,model=2 has 8 devices, and target tpu-v5e:4x4 16: take --target tpu-v5e:2x4, or a mesh of 16"
    with pytest.raises(DeviceError, match=message):
        md.parallelize(step, MESH).verify(*ARGS, target="tpu-v5e:4x4")


def test_a_compiler_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.setattr("meshdsl.lowering.aot_targets.find_spec", lambda name: None)
    with pytest.raises(DeviceError, match="no compiler for target tpu-v5e:2x4 is installed: pip install 'meshdsl"):
        md.parallelize(step, MESH).verify(*ARGS, target="tpu-v5e:2x4")


@compiles
def test_what_was_lowered_for_a_tpu_is_the_plan():
    sharded = md.parallelize(step, MESH, {"w": "data=S(1) model=S(2)", "batch": "data=S(0)"})
    report, plan = sharded.verify(*ARGS, target="tpu-v5e:2x4"), sharded.plan(*ARGS)
    assert report.equal and sum(line.compiled for line in report.lines) == plan.bytes
    assert report.held.memory == plan.memory and report.held.compiled_memory > 0
    assert report.held.flops == report.held.compiled_flops == 3 * 3 * 2 * 512 * 256**2 / 8
    assert str(report).startswith("compiled for tpu-v5e:2x4 by libtpu ")


@pytest.mark.skipif(find_spec("jax_cuda12_plugin") is None, reason="jax's CUDA plugin is not installed")
def test_what_was_lowered_for_gpus_is_the_plan():
    sharded = md.parallelize(step, MESH, {"w": "data=S(1) model=S(2)", "batch": "data=S(0)"})
    report, plan = sharded.verify(*ARGS, target="dgx-h100:8"), sharded.plan(*ARGS)
    assert report.equal and sum(line.compiled for line in report.lines) == plan.bytes
    assert report.held.flops == report.held.compiled_flops > 0
    with pytest.raises(VerifyError, match=r"does not fit dgx-h100:1: the plan needs .*: .*, of 80 GB"):
        large = md.parallelize(lambda x: x @ x.T, md.Mesh(data=1, topology="cpu"), memory="1TB")
        large.verify(array(2**18, 2**15), target="dgx-h100:1")


def test_a_program_that_jax_cannot_read(monkeypatch):
    def unread(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure: async-update should have 1 operands")

    monkeypatch.setattr("jax.stages.Compiled.as_text", unread)
    monkeypatch.setattr(CompileTarget, "devices", lambda self, mesh: jax.devices()[: mesh.size])
    monkeypatch.setattr(CompileTarget, "compiler", "libtpu 0.0.52")
    message = (
        r"cannot read the program that libtpu 0.0.52 compiled for tpu-v5e:2x4: .* 1 operands; install .*'jax\[tpu\]=="
    )
    with pytest.raises(DeviceError, match=message):
        md.parallelize(step, MESH).verify(*ARGS, target="tpu-v5e:2x4")


@compiles
def test_a_step_that_does_not_fit_says_what_the_compiler_needs():
    sharded = md.parallelize(lambda x: (x @ x) @ (x.T @ x), md.Mesh(data=1, model=1, topology="cpu"), memory="1TB")
    with pytest.raises(VerifyError, match=r"does not fit tpu-v5e:1x1: the plan needs .*; libtpu .*: .*HBM"):
        sharded.verify(array(2**16, 2**16), target="tpu-v5e:1x1")
