"""The topology of the devices at hand: which preset a kind of device belongs to, and what was measured on this machine.

    platform and device kind, as jax names them       topology
    gpu  NVIDIA H100 80GB HBM3                        dgx-h100
    gpu  NVIDIA A100-SXM4-40GB                        dgx-a100 with 40 GB of memory
    tpu  TPU v5 lite                                  tpu-v5e
    cpu  cpu                                          cpu
    gpu  NVIDIA H100 PCIe                             dgx-h100, which is an assumption: nobody stated the links
    any  of which this mesh was calibrated and kept   as measured

Everything here is a function of names, so it is the same with and without devices. A preset is that of the whole
machine: it prices meshes larger than the devices at hand too. A measured topology holds for the mesh that it was
measured on alone; ``md.calibrate(mesh, keep=True)`` writes it to a folder of the user's.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Topology, load_topology, save_topology, topology

FOLDER = "MESHDSL_TOPOLOGIES"  # environment variable: where measured topologies are kept

# Presets by the names that CUDA and libtpu give devices, those of TPUs as in ``jax.experimental.pallas.tpu``.
KINDS: Mapping[str, str] = {
    "cpu": "cpu",
    "NVIDIA A100-SXM4-40GB": "dgx-a100",
    "NVIDIA A100-SXM4-80GB": "dgx-a100",
    "NVIDIA GB200": "gb200-nvl72",
    "NVIDIA H100 80GB HBM3": "dgx-h100",
    "NVIDIA H200": "dgx-h200",
    "Tesla V100-SXM2-16GB": "dgx-1v",
    "Tesla V100-SXM2-32GB": "dgx-1v",
    "TPU v4": "tpu-v4",
    "TPU v5": "tpu-v5p",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5e": "tpu-v5e",
    "TPU v5p": "tpu-v5p",
    "TPU v6 lite": "tpu-v6e",
    "TPU v6e": "tpu-v6e",
}
MEMORY: Mapping[str, float] = {
    "NVIDIA A100-SXM4-40GB": 4.0e10,
    "Tesla V100-SXM2-16GB": 1.6e10,
}  # bytes, not the preset's

# What is assumed of any other kind, by the first pattern in its platform and name: the nearest chip that has a preset.
NEAREST = (
    (r"B[123]00", "gb200-nvl72"),
    ("H200", "dgx-h200"),
    ("H[18]00|H20", "dgx-h100"),
    ("V100", "dgx-1v"),
    ("gpu|cuda|rocm", "dgx-a100"),
    ("tpu", "tpu-v4"),
    ("", "cpu"),
)


@dataclass(frozen=True)
class FoundTopology:
    """The topology of the devices at hand, and how it was found.

    Args:
      note: a sentence for the plan; empty if the name alone says it.
      assumed: no preset is that of these devices.
    """

    topology: Topology
    note: str = ""
    assumed: bool = False


def topology_of_kind(platform: str, kind: str) -> FoundTopology:
    """Returns the topology of a kind of device, or the nearest one as an assumption.

    Args:
      platform: ``jax.Device.platform``.
      kind: ``jax.Device.device_kind``.

    Example:
      >>> topology_of_kind("gpu", "NVIDIA H100 80GB HBM3").topology.name
      'dgx-h100'
    """
    if kind in KINDS:
        preset = topology(KINDS[kind])
        note = f"topology {preset.name}: that of the devices at hand, {kind}" if platform != "cpu" else ""
        return FoundTopology(replace(preset, memory=MEMORY[kind]) if kind in MEMORY else preset, note)
    name = next(name for pattern, name in NEAREST if re.search(pattern, f"{platform} {kind}"))
    return FoundTopology(
        topology(name),
        f"topology {name} is assumed: none is known of devices of kind {kind!r}; state one, md.Mesh(..., topology=), "
        "or measure them: md.calibrate(mesh, keep=True) or 'meshdsl topology calibrate --keep'",
        assumed=True,
    )


def kept_topology(kind: str, mesh: Mesh) -> FoundTopology | None:
    """Returns the topology that was measured for a mesh of this kind of device and kept; None if there is none."""
    file = kept_file(kind, mesh)
    if not file.is_file():
        return None
    found = load_topology(file)
    return FoundTopology(found, f"topology {found.name}: {found.source}, kept on this machine")


def keep_topology(found: Topology, kind: str, mesh: Mesh) -> Path:
    """Writes a measured topology to where ``kept_topology`` reads it, and returns the file."""
    file = kept_file(kind, mesh)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_topology(found, file)
    return file


def kept_file(kind: str, mesh: Mesh) -> Path:
    """Returns the file of the measured topology of a mesh, in the folder that ``MESHDSL_TOPOLOGIES`` names."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get(FOLDER) or cache / "meshdsl" / "topologies")
    return folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', kind)}_{str(mesh).replace('=', '-').replace(',', '_')}.toml"
