"""Ahead-of-time compilation for absent devices: ``tpu-v5e:4x4`` is a slice of 16 TPUs, ``dgx-h100:2x8`` two GPU nodes.

The compiler is that of the real devices (JAX documentation, ahead-of-time lowering and compilation), so the compiled
program of a planned step and its memory are known before any device is rented. It comes in a wheel: ``libtpu`` for
TPUs, jax's CUDA plugin for GPUs, with a description of the GPU that it would otherwise query (``h100.txtpb``).
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, resources
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from typing import Any

import jax
from jax.experimental.topologies import get_topology_desc

from meshdsl.errors import DeviceError, nearest
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import topology


@dataclass(frozen=True)
class Compiler:
    """A compiler in a wheel.

    Args:
      package: the distribution that contains it.
      module: the module by which it is found.
      extra: the extra of meshdsl that installs it.
      requirement: the extra of jax that installs it.
      environment: environment variables that it needs on a host without its devices.
      describe: returns the description of devices to compile for, given their name and shape.
    """

    package: str
    module: str
    extra: str
    requirement: str
    environment: Mapping[str, str]
    describe: Callable[[str, tuple[int, ...]], Any]


@dataclass(frozen=True)
class AcceleratorKind:
    """A kind of devices to compile for: the compiler's name for them, and the shapes in which they are sold."""

    compiler: Compiler
    called: str
    shapes: tuple[str, ...]


def _tpus(called: str, shape: tuple[int, ...]) -> Any:
    one_device_per_chip = {"chip_config_name": "megacore"} if called == "v4" else {}
    return get_topology_desc(f"{called}:{_text(shape)}", "tpu", **one_device_per_chip)


def _gpus(called: str, shape: tuple[int, ...]) -> Any:
    nodes, gpus = (1, 1, *shape)[-2:]
    about = (resources.files("meshdsl.lowering") / f"{called}.txtpb").read_text()
    options = {"topology": f"1x{nodes}x{gpus}", "target_config": about}
    try:
        return get_topology_desc(called, "cuda", **options)
    except NotImplementedError:  # jax skipped the plugin because there is no GPU
        import_module("jax_plugins.xla_cuda12").initialize()
        return get_topology_desc(called, "cuda", **options)


# Without a TPU, libtpu queries a metadata server and logs every missing answer; its lockfile guards devices that this
# host does not have. The CUDA plugin does not start without a GPU otherwise.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_LIBTPU = Compiler("libtpu", "libtpu", "tpu", "tpu", _NO_TPU, _tpus)
_NO_GPU = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_CUDA = Compiler("jax-cuda12-plugin", "jax_cuda12_plugin", "cuda", "cuda12", _NO_GPU, _gpus)
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")  # Google Cloud documentation, TPU configurations
_CUBES = tuple("2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16".split())
_NODES = tuple("1 2 4 8 2x8 4x8 8x8 16x8 32x8 64x8 128x8".split())
KINDS = {
    "tpu-v4": AcceleratorKind(_LIBTPU, "v4", _CUBES),
    "tpu-v5e": AcceleratorKind(_LIBTPU, "v5e", _FLAT),
    "tpu-v5p": AcceleratorKind(_LIBTPU, "v5p", _CUBES),
    "tpu-v6e": AcceleratorKind(_LIBTPU, "v6e", _FLAT),
    "dgx-h100": AcceleratorKind(_CUDA, "h100", _NODES),
}


@dataclass(frozen=True)
class CompileTarget:
    """Devices to compile for; ``preset`` names their topology."""

    preset: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of devices."""
        return prod(self.shape)

    @property
    def memory(self) -> float:
        """Bytes of one device."""
        return topology(self.preset).memory

    @property
    def mesh(self) -> str:
        """A mesh of as many devices, as text: the last dim of the shape is ``model``, the others ``data``."""
        *outer, last = [n for n in self.shape if n > 1] or [1]
        return f"data={prod(outer)},model={last}"

    @property
    def compiler(self) -> str:
        """The name and version of the compiler."""
        package = KINDS[self.preset].compiler.package
        return f"{package} {version(package)}"

    @property
    def install(self) -> str:
        """The command that installs the compiler which this jax requires."""
        return f"pip install 'jax[{KINDS[self.preset].compiler.requirement}]=={jax.__version__}'"

    def __str__(self) -> str:
        return f"{self.preset}:{_text(self.shape)}"

    def devices(self, mesh: Mesh) -> list[jax.Device]:
        """Returns the devices, which can only be compiled for; DeviceError if the mesh has another number."""
        if mesh.size != self.size:
            raise DeviceError(
                f"mesh {mesh} has {mesh.size} devices, and target {self} {self.size}: {_remedy(self, mesh)}"
            )
        kind = KINDS[self.preset]
        compiler = kind.compiler
        if find_spec(compiler.module) is None:
            install = f"pip install 'meshdsl[{compiler.extra}]', or {compiler.package}"
            raise DeviceError(f"no compiler for target {self} is installed: {install}")
        try:
            with _without_devices(compiler.environment):
                found: list[jax.Device] = compiler.describe(kind.called, self.shape).devices
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            raise DeviceError(f"{self.compiler} does not compile for target {self}: {error}") from error
        return found


def parse_target(text: str) -> CompileTarget:
    """Returns the target written as ``tpu-v5e:4x4``; DeviceError with the nearest name if there is none."""
    if not isinstance(text, str):
        raise DeviceError(f"target={text!r} is not a name of devices to compile for, such as 'tpu-v5e:4x4'")
    name, _, shape = text.partition(":")
    if name not in KINDS:
        raise DeviceError(f"no target {text!r}{nearest(name, KINDS)} (NAME:SHAPE, such as tpu-v5e:4x4)")
    if shape not in KINDS[name].shapes:
        raise DeviceError(f"no target {text!r}{nearest(text, [f'{name}:{one}' for one in KINDS[name].shapes])}")
    return CompileTarget(name, tuple(map(int, shape.split("x"))))


def _remedy(target: CompileTarget, mesh: Mesh) -> str:
    fitting = [shape for shape in KINDS[target.preset].shapes if prod(map(int, shape.split("x"))) == mesh.size]
    other = f"--target {target.preset}:{fitting[0]}, or " if fitting else ""
    return f"take {other}a mesh of {target.size}"


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@contextmanager
def _without_devices(environment: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables within a context, where they are not set already."""
    added = {name: value for name, value in environment.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
