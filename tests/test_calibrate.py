"""Calibration: fits are exact on exact data, and what is measured can be used, saved and read."""

import math

import jax
import numpy as np
import pytest

from meshdsl.calibrate import CPU, THIN, calibrate, fit_link, half_side_of
from meshdsl.errors import MeshDSLError
from meshdsl.layouts import Link, Mesh, Topology, topology
from meshdsl.layouts.topology import load_topology, preset_names, save_topology


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("topologies")


@pytest.fixture(scope="module")
def measured(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHDSL_TOPOLOGIES", str(folder))
        return calibrate(Mesh(data=2, model=1), jax.devices()[:2], keep=True)


def test_a_fit_recovers_latency_and_bandwidth():
    sent = np.array([1e3, 1e5, 1e7])
    link = fit_link(sent, 2e-5 + sent / 3e9)
    assert (link.latency, link.bandwidth) == (pytest.approx(2e-5), pytest.approx(3e9))


def test_a_fit_stays_physical_on_noise():
    link = fit_link(np.array([1e3, 1e4, 1e5]), np.array([3e-5, 2e-5, 1e-5]))
    assert link.latency > 0 and 0 < link.bandwidth < math.inf


def test_every_figure_is_a_sane_measurement(measured):
    assert measured.name == "calibrated"
    assert 1e8 < measured.flops32 < 1e15 and 1e7 < measured.flops16 < 1e16
    assert 1e7 < measured.flops8 < 1e17 and 1e7 < measured.ops8 < 1e17
    assert 1e8 < measured.memory_bandwidth < 1e13
    assert 1e-8 < measured.overhead < 1e-2 and measured.memory > 1e8
    ((axis, link),) = measured.axes
    assert axis == "data" and 1e-7 <= link.latency < 1e-1 and 1e6 < link.bandwidth < 1e13


def test_a_mesh_takes_it(measured):
    mesh = Mesh(data=2, model=1, topology=measured)
    assert mesh.topology.axis_links(mesh)["data"] == dict(measured.axes)["data"]


def test_it_is_kept_for_its_mesh_and_kind_of_device(measured, folder):
    (file,) = folder.iterdir()
    assert (file.name, load_topology(file)) == ("cpu_data-2_model-1.toml", measured)


def test_files_round_trip(measured, tmp_path):
    for value in (measured, *map(topology, preset_names()), _strange()):
        save_topology(value, tmp_path / "t.toml")
        assert load_topology(tmp_path / "t.toml") == value


def test_a_file_that_is_no_topology_is_named(tmp_path):
    file = tmp_path / "t.toml"
    file.write_text("flops16 = 1.0\nflop32 = 1.0\n[[links]]\nlatency = 1.0\n")
    with pytest.raises(MeshDSLError) as caught:
        load_topology(file)
    assert str(caught.value) == (
        f"'{file}' is not a topology:\n"
        "  flop32: no such name; did you mean 'flops32'?\n"
        "  name, flops32, memory_bandwidth, memory, overhead: missing\n"
        "  links[0]: bandwidth: missing"
    )
    for text in ("flops16 = ", "links = 3", "axes = [1]", "links = [3]", 'axes = {"data" = 3}', "name = 3"):
        file.write_text(text)
        with pytest.raises(MeshDSLError, match="is not a topology"):
            load_topology(file)


def _strange() -> Topology:
    links = (Link(1e-6, 1e300, 8), Link(2e-6, 1e9))
    return Topology('a "b" \\', 1.0, 2.0, 3.0, 4.0, 5e-06, links, (("x y", Link(1e-5, 7.0)),), source="line\nline")


def test_the_half_side_of_products_that_follow_the_law():
    for half in (0.0, 8.0, 50.0):
        assert half_side_of(1 + half / CPU.matrix, 1 + half / THIN, CPU.matrix) == pytest.approx(half)


def test_a_half_side_from_noise_is_sane():
    assert half_side_of(2.0, 1.0, CPU.matrix) == 0.0
    assert 0.0 < half_side_of(1.0, 1e6, CPU.matrix) <= CPU.matrix
