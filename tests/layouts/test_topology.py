"""Topologies: presets and their sources, what axes run over on a torus, meshes that nothing links."""

from dataclasses import replace

import pytest

from meshdsl.errors import ArgumentError, LayoutError
from meshdsl.layouts.collective_cost import exchange_price, hop_seconds
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import (
    Link,
    Topology,
    load_topology,
    preset_names,
    save_topology,
    topology,
    topology_text,
    with_host_of_preset,
    without_host_of_preset,
)

PRESETS = "cpu dgx-1v dgx-a100 dgx-h100 dgx-h200 gb200-nvl72 tpu-v4 tpu-v5e tpu-v5p tpu-v6e"
NODE = Topology("node", 1e12, 1e12, 1e11, 1e10, 0.0, (Link(1e-5, 1e10, devices=8),))


def bandwidths(name, **sizes):
    mesh = Mesh(topology=name, **sizes)
    return [mesh.topology.axis_links(mesh)[axis].bandwidth for axis in mesh.names]


def test_every_preset_states_its_source_and_reads_back(tmp_path):
    assert preset_names() == tuple(PRESETS.split())
    for name in preset_names():
        found = topology(name)
        assert (found.name, bool(found.source)) == (name, True)
        save_topology(found, tmp_path / "t.toml")
        assert load_topology(tmp_path / "t.toml") == found


@pytest.mark.parametrize(
    "name, inside", [("dgx-1v", 8), ("dgx-a100", 8), ("dgx-h100", 8), ("dgx-h200", 8), ("gb200-nvl72", 64)]
)
def test_switches_link_the_innermost_devices(name, inside):
    slow, fast = bandwidths(name, data=2, model=inside)
    assert fast > 7 * slow
    assert bandwidths(name, data=2, model=inside * 2) == [slow, slow]


def test_the_devices_of_an_axis_in_a_node_share_its_adapters():
    """As measured over 4 nodes of 8: nearly 8 times what one adapter sends (see dgx-h100.toml)."""

    def gathering(**sizes):
        mesh = Mesh(topology="dgx-h100", **sizes)
        links = mesh.topology.axis_links(mesh)
        return [links[axis].gathering / 4.7e10 for axis in mesh.names]

    assert gathering(data=32) == [pytest.approx(3.6e11 / 4.7e10)]  # 8 adapters, or NVLink if that is slower
    assert gathering(data=8, model=4)[0] == pytest.approx(2)
    assert gathering(pipe=2, data=4, model=8)[:2] == [1, 1]
    mesh = Mesh(topology="dgx-h100", data=32)
    seconds = {kind: exchange_price(kind, ("data",), mesh).seconds(1e12) for kind in ("all-gather", "all-to-all")}
    assert seconds["all-gather"] == pytest.approx(31e12 / 3.6e11, rel=1e-3)
    assert seconds["all-to-all"] == pytest.approx(31e12 / 32 / 4.7e10, rel=1e-3)  # every pair has something of its own


def test_short_messages_take_the_faster_way():
    link = Link(1e-4, 1e11, short=(1e-5, 1e10))
    mesh = Mesh(data=2, topology=Topology("two ways", 1e12, 1e12, 1e11, 1e10, 0.0, (link,)))
    found = exchange_price("all-reduce", ("data",), mesh)  # of n bytes, n are sent
    assert found.seconds(1e5) == pytest.approx(1e-5 + 1e5 / 1e10) and found.seconds(1e8) == pytest.approx(1e-4 + 1e-3)
    with pytest.raises(ArgumentError, match=r"short=\(1e-05,\) is not a latency and bandwidth above 0"):
        Link(1e-4, 1e11, short=(1e-5,))


def test_blocks_of_a_ring_move_one_way_around_a_torus():
    size = 9e7
    for mesh, latency, bandwidth in (
        (
            Mesh(data=16, topology=topology("tpu-v5e")),
            8e-6,
            4.5e10,
        ),  # a whole dim, which a gather uses both ways around
        (Mesh(data=4, topology=topology("tpu-v5e")), 8e-6, 4.5e10),  # a line: the last block goes back the other way
        (Mesh(data=8, topology=topology("dgx-h100")), 6.6e-5, 3.6e11),
    ):
        assert hop_seconds("data", size, mesh) == pytest.approx(latency + size / bandwidth)
    assert hop_seconds("data", 1e3, mesh) == pytest.approx(1.9e-5 + 1e3 / 2.1e11), "short messages go another way"


def test_each_axis_takes_a_dim_of_a_torus():
    assert bandwidths("tpu-v5e", data=16, model=16) == [9e10, 9e10]
    assert bandwidths("tpu-v5e", data=256) == [1.8e11]  # both dims at once
    assert bandwidths("tpu-v5e", data=4, model=4) == [4.5e10, 4.5e10]  # lines: only whole dims are closed
    assert bandwidths("tpu-v4", pipe=4, data=4, model=4) == [9e10] * 3  # a cube has rings of 4
    assert bandwidths("tpu-v4", data=2, model=8) == [4.5e10, 9e10]
    assert bandwidths("tpu-v4", data=16, model=256) == [9e10, 1.8e11]


def test_axes_without_a_dim_share_the_last_one_and_pods_are_linked_by_the_network():
    assert bandwidths("tpu-v5e", pipe=2, data=2, model=16) == [4.5e10, 4.5e10, 9e10]
    assert bandwidths("tpu-v5e", data=4, model=256) == [3.1e9, 1.8e11]
    assert bandwidths("tpu-v5p", data=6144) == [1.8e11 * 3]


def test_a_mesh_that_nothing_links():
    assert Mesh(data=8, topology=NODE).size == 8
    with pytest.raises(LayoutError, match="a mesh of 16 devices: topology node joins 8; make the mesh smaller, or"):
        Mesh(data=2, model=8, topology=NODE)
    with pytest.raises(ArgumentError, match=r"a torus of \[4, 4\] joins 16 devices, not 8"):
        Link(1e-6, 1e9, devices=8, torus=(4, 4))
    with pytest.raises(ArgumentError, match="torus='4x4' is not a list of lengths"):
        Link(1e-6, 1e9, devices=16, torus="4x4")


def test_host_memory_is_stated_whole_and_left_out_of_the_text_of_presets():
    preset = topology("dgx-h100")
    assert (preset.host_memory, preset.host_load) == (2.5e11, 5.4e10)
    left_out = without_host_of_preset(preset)
    assert left_out.host_memory == 0 and with_host_of_preset(left_out) == preset
    mine = replace(preset, name="mine")
    assert without_host_of_preset(mine) is mine and "host_load = 54000000000.0" in topology_text(mine)
    with pytest.raises(ArgumentError, match="topology mine: host_load, host_store is 0; host memory needs"):
        replace(mine, host_load=0.0, host_store=0.0)
