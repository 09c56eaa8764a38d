"""The topology of the devices at hand, told from names of devices alone; what was measured and kept comes first."""

import pickle

import pytest

from meshdsl.layouts.machine import KINDS, MEMORY, keep_topology, kept_topology, topology_of_kind
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Link, Topology, topology

MEASURED = Topology("calibrated", 1e12, 1e12, 1e11, 1e10, 0.0, (Link(1e-5, 1e10),), source="measured on 8 x cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_every_known_kind_is_a_preset_with_the_memory_of_the_device(kind):
    found = topology_of_kind("gpu", kind)
    preset = topology(KINDS[kind])
    assert found.topology.memory == MEMORY.get(kind, preset.memory)
    assert (found.topology == preset, found.assumed) == (kind not in MEMORY, False)
    assert found.note == f"topology {preset.name}: that of the devices at hand, {kind}"


def test_a_cpu_is_the_preset_that_the_first_line_of_a_plan_names():
    assert topology_of_kind("cpu", "cpu").topology is topology("cpu")
    assert topology_of_kind("cpu", "cpu").note == ""


@pytest.mark.parametrize(
    "platform, kind, name",
    [
        ("gpu", "NVIDIA H100 PCIe", "dgx-h100"),
        ("gpu", "NVIDIA GH200 480GB", "dgx-h200"),
        ("gpu", "NVIDIA B200", "gb200-nvl72"),
        ("gpu", "NVIDIA L4", "dgx-a100"),
        ("rocm", "AMD Instinct MI300X", "dgx-a100"),
        ("tpu", "TPU v3", "tpu-v4"),
        ("METAL", "Apple M3", "cpu"),
    ],
)
def test_of_an_unknown_kind_the_nearest_topology_is_assumed(platform, kind, name):
    found = topology_of_kind(platform, kind)
    assert (found.topology, found.assumed) == (topology(name), True)
    assert found.note == (
        f"topology {name} is assumed: none is known of devices of kind {kind!r}; state one, md.Mesh(..., topology=), "
        "or measure them: md.calibrate(mesh, keep=True) or 'meshdsl topology calibrate --keep'"
    )


def test_a_measured_topology_is_kept_for_its_mesh_and_kind_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHDSL_TOPOLOGIES", str(tmp_path / "new"))
    mesh = Mesh(data=4, model=2)
    assert kept_topology("NVIDIA H100 80GB HBM3", mesh) is None
    assert keep_topology(MEASURED, "NVIDIA H100 80GB HBM3", mesh).parent == tmp_path / "new"
    found = kept_topology("NVIDIA H100 80GB HBM3", mesh)
    assert found.topology == MEASURED and found.note == "topology calibrated: measured on 8 x cpu, kept on this machine"
    assert kept_topology("NVIDIA H100 80GB HBM3", Mesh(data=2, model=4)) is None
    assert kept_topology("cpu", mesh) is None


def test_a_mesh_remembers_whether_its_topology_was_stated():
    for mesh in (Mesh(data=4), Mesh(data=4, topology="cpu")):
        copied = pickle.loads(pickle.dumps(mesh))
        assert copied == mesh and copied.states_topology == mesh.states_topology
    assert Mesh(data=4) == Mesh(data=4, topology="cpu")
    assert not Mesh.parse("data=4").states_topology and Mesh.parse("data=4", "cpu").states_topology
