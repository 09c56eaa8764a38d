"""Compilers of devices that are not there: ``tpu-v5e:4x4`` is a slice of 16 TPU v5e, for which ``libtpu`` compiles.

The compiler is the one that a real slice has (JAX documentation, ahead-of-time lowering and compilation), so what it
makes of a planned step, and whether that fits its memory, is known before any TPU is rented. Shapes are those that can
be had (Google Cloud documentation, TPU configurations).
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from math import prod

import jax
from jax.experimental.topologies import get_topology_desc

from meshdsl.errors import DeviceError, nearest
from meshdsl.layouts.mesh import Mesh

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = tuple("2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16".split())
# Without a TPU, libtpu asks a metadata server what it runs on, and complains of every answer that it does not get;
# its lock is there for the devices, of which there are none.
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Generation:
    """A generation of devices that can be compiled for.

    Args:
      called: by its compiler.
      shapes: of slices, in devices.
      options: that the compiler needs, such as for the two cores of a chip to be one device.
    """

    called: str
    shapes: tuple[str, ...]
    options: Mapping[str, str]


GENERATIONS = {
    "tpu-v4": Generation("v4", _CUBES, {"chip_config_name": "megacore"}),
    "tpu-v5e": Generation("v5e", _FLAT, {}),
    "tpu-v5p": Generation("v5p", _CUBES, {}),
    "tpu-v6e": Generation("v6e", _FLAT, {}),
}


@dataclass(frozen=True)
class Target:
    """Devices to compile for; ``preset`` is the topology that says what they cost."""

    preset: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many there are."""
        return prod(self.shape)

    @property
    def mesh(self) -> str:
        """A mesh of as many devices, with the axes of most examples: the last dim of the slice is ``model``."""
        *outer, last = [n for n in self.shape if n > 1] or [1]
        return f"data={prod(outer)},model={last}"

    @property
    def compiler(self) -> str:
        """Its name and version."""
        return f"libtpu {version('libtpu')}"

    def __str__(self) -> str:
        return f"{self.preset}:{'x'.join(map(str, self.shape))}"

    def devices(self, mesh: Mesh) -> list[jax.Device]:
        """The devices, to compile for and nothing else; DeviceError if they are not as many as the mesh's."""
        if mesh.size != self.size:
            raise DeviceError(
                f"mesh {mesh} has {mesh.size} devices, and target {self} {self.size}: {_remedy(self, mesh)}"
            )
        if find_spec("libtpu") is None:
            raise DeviceError(f"no compiler for target {self} is installed: pip install 'meshdsl[tpu]', or libtpu")
        generation, name = GENERATIONS[self.preset], str(self).partition(":")[2]
        try:
            with _without_devices():
                found = get_topology_desc(f"{generation.called}:{name}", "tpu", **generation.options)
        except jax.errors.JaxRuntimeError as error:
            raise DeviceError(f"{self.compiler} does not compile for target {self}: {error}") from error
        return found.devices


def parse_target(text: str) -> Target:
    """The target written ``tpu-v5e:4x4``; DeviceError with the nearest name if there is none."""
    if not isinstance(text, str):
        raise DeviceError(f"target={text!r} is no name of devices to compile for, such as 'tpu-v5e:4x4'")
    name, _, shape = text.partition(":")
    if name not in GENERATIONS:
        raise DeviceError(f"no target {text!r}{nearest(name, GENERATIONS)}; its shape follows, as in tpu-v5e:4x4")
    if shape not in GENERATIONS[name].shapes:
        known = GENERATIONS[name].shapes
        raise DeviceError(f"no target {text!r}{nearest(f'{name}:{shape}', [f'{name}:{one}' for one in known])}")
    return Target(name, tuple(map(int, shape.split("x"))))


def _remedy(target: Target, mesh: Mesh) -> str:
    fitting = [shape for shape in GENERATIONS[target.preset].shapes if prod(map(int, shape.split("x"))) == mesh.size]
    other = f"--target {target.preset}:{fitting[0]}, or " if fitting else ""
    return f"take {other}a mesh of {target.size}"


@contextmanager
def _without_devices() -> Iterator[None]:
    """What libtpu reads when it starts, where it is not said already."""
    said = {name: value for name, value in _ALONE.items() if name not in os.environ}
    os.environ.update(said)
    try:
        yield
    finally:
        for name in said:
            del os.environ[name]
