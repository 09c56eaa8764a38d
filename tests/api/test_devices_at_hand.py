"""Steps over meshes that state no topology: planned with that of the devices at hand, which the plan says."""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl import shardings
from meshdsl.layouts.machine import keep_topology, topology_of_kind

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def double(x):
    return x * 2


@pytest.fixture
def devices_are(monkeypatch):
    """``devices_are(platform, kind)`` makes all devices at hand of another kind."""

    def pretend(platform, kind):
        monkeypatch.setattr(shardings, "topology_of_kind", lambda *_: topology_of_kind(platform, kind))

    return pretend


def test_on_a_cpu_plans_are_those_of_the_preset():
    assert md.parallelize(double, "data=8").plan(X).topology is md.topology("cpu")
    assert md.parallelize(double, "data=8").plan(X).notes == ()


@pytest.mark.parametrize("mesh", ["data=64", md.Mesh(data=64), jax.sharding.AbstractMesh((64,), ("data",))])
def test_the_found_topology_prices_any_mesh_and_is_said(mesh, devices_are, caplog):
    devices_are("gpu", "NVIDIA H100 80GB HBM3")
    sharded = md.parallelize(double, mesh, {"x": "data=S(0)"})
    plan = sharded.plan(X)
    assert plan.topology == md.topology("dgx-h100")
    assert "topology dgx-h100: that of the devices at hand, NVIDIA H100 80GB HBM3" in str(plan)
    assert not caplog.records
    assert sharded.with_pins({"x": "data=B"}).plan(X).topology.name == "dgx-h100"
    assert md.parallelize(double, mesh, plan=plan).plan(X) is plan


def test_a_stated_topology_stays(devices_are):
    devices_are("gpu", "NVIDIA H100 80GB HBM3")
    plan = md.parallelize(double, md.Mesh(data=8, topology="tpu-v5e")).plan(X)
    assert (plan.topology.name, plan.notes) == ("tpu-v5e", ())


def test_an_assumption_is_a_warning(devices_are, caplog):
    devices_are("gpu", "NVIDIA L4")
    with caplog.at_level(logging.WARNING, "meshdsl"):
        plan = md.parallelize(double, "data=8").plan(X)
        md.search(double, X, devices=2, axes=("data",))
    said = [record.getMessage() for record in caplog.records]
    assert said == [plan.notes[0]] * 2
    assert said[0].startswith(
        "topology dgx-a100 is assumed: none is known of devices of kind 'NVIDIA L4'; state one, md.Mesh(..., topology=)"
    )


def test_a_mesh_that_does_not_fit_the_found_topology(devices_are):
    devices_are("gpu", "NVIDIA H100 80GB HBM3")
    with pytest.raises(md.LayoutError) as caught:
        md.parallelize(double, "data=2,model=12").plan(X)
    assert str(caught.value).endswith(
        "\nthe topology is that of the devices at hand; md.Mesh(..., topology=) states another"
    )


def test_without_devices_a_cpu_is_assumed(monkeypatch):
    def none():
        raise RuntimeError("Unable to initialize backend 'tpu': the TPU is in use")

    monkeypatch.setattr(jax, "devices", none)
    found = shardings.topology_at_hand()
    assert found.topology is md.topology("cpu") and found.assumed
    assert "as jax finds no devices (Unable to initialize backend 'tpu': the TPU is in use)" in found.note


def test_what_was_measured_and_kept_is_used_and_said(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHDSL_TOPOLOGIES", str(tmp_path))
    measured = replace(md.topology("cpu"), name="calibrated", source="measured on 2 x cpu", overhead=2e-5)
    keep_topology(measured, jax.devices()[0].device_kind, md.Mesh(data=2))
    plan = md.parallelize(double, "data=2").plan(X)
    assert plan.topology == measured
    assert plan.notes == ("topology calibrated: measured on 2 x cpu, kept on this machine",)
    assert md.parallelize(double, "data=4").plan(X).topology.name == "cpu"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert md.parallelize(double, "data=2").plan(X).topology.name == "cpu"
    assert md.search(double, X, devices=2, axes=("data",)).best.plan.topology.name == "cpu"  # one for all meshes


def test_a_mesh_of_all_devices():
    assert md.Mesh.auto() == md.Mesh(data=8) and not md.Mesh.auto().states_topology
    assert str(md.Mesh.auto("fsdp", model=2)) == "fsdp=4,model=2"
    assert md.Mesh.auto(topology="dgx-h100").topology.name == "dgx-h100"
    with pytest.raises(md.LayoutError, match=r"Mesh.auto\(model=3\): 8 devices do not divide into groups of 3"):
        md.Mesh.auto(model=3)
    with pytest.raises(md.NotationError, match=r"Mesh.auto\(4\): not the name of an axis; write Mesh.auto\('data', "):
        md.Mesh.auto(4)
    with pytest.raises(md.NotationError, match=r"Mesh.auto\(data=...\): the outermost axis 'data' takes the devices"):
        md.Mesh.auto(data=2)


def test_fsdp_on_the_devices_at_hand():
    def step(w, batch):
        return w - jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)

    w, batch = jnp.ones((256, 256)), jnp.ones((64, 256))
    sharded = md.parallelize(step, md.Mesh.auto(), md.fsdp())
    assert str(sharded.plan(w, batch).layout("w")) == "data=S(0)"
    sharded.check(w, batch)
