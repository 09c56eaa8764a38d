"""``calibrate``: measure the costs of this machine's devices and mesh axes, for the planner.

    topology = md.calibrate(md.Mesh(data=4, model=2))
    mesh = md.Mesh(data=4, model=2, topology=topology)

    md.calibrate(md.Mesh(data=4, model=2), keep=True)      # for all later plans over this mesh that state no topology

Wrong constants give bad plans: with a datacenter GPU's constants, a toy model on a CPU is planned as "replicate
everything". So each constant is measured under the conditions of a step, in one compiled program over all devices at
once, which matters where virtual devices share a few cores.

    collectives        seconds = latency + bytes sent / bandwidth (the alpha-beta model, Hockney 1994), per mesh axis
    matrix products    FLOP/s of one device while all others multiply too, of float32, bfloat16, float8 and int8, and
                       how much slower thin products are
    convolutions       FLOP/s of depthwise convolutions, likewise
    elementwise        bytes read and written per second, likewise; on CPUs results go to fresh memory, as those of a
                       forward pass do
    overhead           seconds of the smallest operation

A measured program repeats its operation in a loop, so that launching the program costs little per operation; every
program runs several times, and the median counts. Links are fitted in relative error, so that small and large messages
have equal weight.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshdsl.layouts.machine import keep_topology, topology_of_kind
from meshdsl.layouts.topology import HOST, Link, Topology
from meshdsl.lowering.shardings import device_mesh
from meshdsl.shardings import StatedMesh, mesh_of

REPEATS = 7  # runs of each program
THIN = 32  # columns of a thin product
WINDOW = 5  # rows and columns of a depthwise convolution's kernel


@dataclass(frozen=True)
class _Sizes:
    """What is measured, large enough for the devices to show their rates.

    Args:
      messages: bytes of each.
      sent: bytes of all messages of a program; bounds the iterations of a collective.
      matrix: rows and columns of a square product.
      products: of a program.
      vector: elements of an elementwise operation.
      vectors: results that the elementwise program stores.
      image: shape of a depthwise convolution's input, NHWC.
      chain: smallest operations per iteration of their loop, whose own time is then small beside theirs.
    """

    messages: tuple[int, ...]
    sent: int
    matrix: int
    products: int
    vector: int
    vectors: int
    image: tuple[int, ...]
    chain: int


CPU = _Sizes((1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22), 1 << 23, 512, 2, 1 << 18, 16, (2, 16, 16, 32), 1)
# An H100 takes 50 us to start a program and 7 us for an iteration of a loop (jax 0.11.2); one of these products 1.5 ms.
ACCELERATOR = _Sizes(
    *((1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28), 1 << 30, 8192, 4, 1 << 26, 16, (32, 64, 64, 256), 32)
)
Body = Callable[[jax.Array], jax.Array]


def calibrate(mesh: StatedMesh, devices: Sequence[jax.Device] | None = None, keep: bool = False) -> Topology:
    """Measure ``mesh`` on ``devices``; takes well under a minute.

    Args:
      mesh: the axes to measure, of ours, of jax, or as text; a topology of its own is ignored.
      devices: the devices of the mesh, outermost axis first; default is the first of ``jax.devices()``.
      keep: write the topology to the user's folder of measured topologies, from where plans over a mesh of these axes
        and this kind of device take it if they state none.

    Returns:
      A topology with a link per axis, which fits meshes with these axes only: FLOP/s, bytes/s, seconds of latency.

    Raises:
      DeviceError: there are fewer devices than the mesh has.

    Example:
      >>> mesh = md.Mesh(data=4, model=2, topology=md.calibrate(md.Mesh(data=4, model=2)))
    """
    if devices is None and isinstance(mesh, jax.sharding.Mesh):
        devices = list(mesh.devices.flat)
    mesh = mesh_of(mesh)
    bench = _Bench(device_mesh(mesh, devices))
    device = bench.mesh.devices.flat[0]
    kind = device.device_kind
    preset = topology_of_kind(device.platform, kind).topology
    overhead = _overhead(bench)
    memory = _bandwidth(bench)
    axes = tuple((name, _link(bench, name, size)) for name, size in mesh if size > 1)
    slowest = min((link for _, link in axes), key=lambda link: link.bandwidth, default=Link(overhead, memory))
    half_side = _half_side(bench) if bench.platform == "cpu" else preset.half_side
    found = Topology(
        name="calibrated",
        flops16=_flops(bench, jnp.bfloat16, half_side),
        flops32=_flops(bench, jnp.float32, half_side),
        flops8=_flops(bench, jnp.float8_e4m3fn, half_side),
        ops8=_flops(bench, jnp.int8, half_side),
        half_side=half_side,
        grouped=_grouped(bench),
        memory_bandwidth=memory,
        memory=_memory(bench.mesh),
        overhead=overhead,
        backend=preset.backend,
        fusion=preset.fusion,
        asynchronous=preset.asynchronous,
        merges=preset.merges,
        beside_products=preset.beside_products,
        ragged=preset.ragged,
        **{name: getattr(preset, name) for name in HOST},
        links=(slowest,),
        axes=axes,
        source=f"measured on {bench.mesh.size} x {kind}",
    )
    if keep:
        keep_topology(found, kind, mesh)
    return found


@dataclass(frozen=True)
class _Bench:
    """Times an operation, repeated on every device of the mesh at once."""

    mesh: jax.sharding.Mesh

    @property
    def platform(self) -> str:
        """Return the platform of the devices, as jax names it."""
        return str(self.mesh.devices.flat[0].platform)

    @property
    def sizes(self) -> _Sizes:
        """Return the sizes for these devices."""
        return CPU if self.platform == "cpu" else ACCELERATOR

    def seconds(
        self, body: Body, shape: tuple[int, ...], loops: int, dtype: DTypeLike = jnp.float32, scale: float = 0.0
    ) -> float:
        """Return the median seconds of one ``body``, which maps one device's array of ``shape`` to another one."""
        whole = self.whole(lambda x: lax.fori_loop(0, loops, lambda _, y: body(y), x), shape, dtype, scale)
        return whole / loops

    def whole(self, local: Body, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32, scale: float = 0.0) -> float:
        """Return the median seconds of a program in which every device runs ``local`` on an array of ``shape``.

        The array is of normal random numbers times ``scale``: accelerators multiply zeros faster.
        """
        spec = PartitionSpec()
        run = jax.jit(jax.shard_map(local, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False))
        numbers = scale * jax.random.normal(jax.random.key(0), shape) if scale else jnp.zeros(shape)
        array = jax.device_put(numbers.astype(dtype), jax.sharding.NamedSharding(self.mesh, spec))
        run(array).block_until_ready()
        return median(_timed(run, array) for _ in range(REPEATS))


def _timed(run: Body, array: jax.Array) -> float:
    start = time.perf_counter()
    run(array).block_until_ready()
    return time.perf_counter() - start


def _overhead(bench: _Bench) -> float:
    """Return the seconds of the smallest operation."""
    chain = bench.sizes.chain

    def operations(x: jax.Array) -> jax.Array:
        for _ in range(chain):
            x = x @ x
        return x

    return bench.seconds(operations, (8, 8), loops=200) / chain


def _bandwidth(bench: _Bench) -> float:
    """Return the bytes per second of one device that reads a vector, writes the next one, and on CPUs stores it.

    Memory that is new to the process is slow on CPUs; on accelerators what a loop stores is copied once more.
    """
    sizes = bench.sizes

    def halve(x: jax.Array) -> jax.Array:
        return x * 0.5 + 1.0

    if bench.platform != "cpu":
        return 2 * 4 * sizes.vector / bench.seconds(halve, (sizes.vector,), sizes.vectors)
    seconds = bench.whole(lambda x: lax.scan(lambda x, _: (halve(x), x), x, length=sizes.vectors)[1], (sizes.vector,))
    return 3 * 4 * sizes.vector * sizes.vectors / seconds


def _flops(bench: _Bench, dtype: DTypeLike, half_side: float) -> float:
    """Return the FLOP/s of one device in large matrix products; operands of 8 bits are added up in 32."""
    side, whole = bench.sizes.matrix, jnp.issubdtype(dtype, jnp.integer)
    sums = dtype if jnp.dtype(dtype).itemsize > 1 else jnp.int32 if whole else jnp.float32
    body = lambda x: lax.dot(x, x, preferred_element_type=sums).astype(dtype)  # noqa: E731
    square = bench.seconds(body, (side, side), bench.sizes.products, dtype, scale=1.0 if whole else side**-0.5)
    return 2 * side**3 / square * (1 + half_side / side) ** 3


def _grouped(bench: _Bench) -> float:
    """Return the FLOP/s of one device in depthwise convolutions."""
    image = bench.sizes.image
    kernel = jnp.ones((WINDOW, WINDOW, 1, image[-1]))
    body = lambda x: lax.conv_general_dilated(  # noqa: E731
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=image[-1]
    )
    return 2 * prod(image) * WINDOW**2 / bench.seconds(body, image, loops=2)


def _half_side(bench: _Bench) -> float:
    """Return the side at which a product runs at half its rate, from a square product and a thin one.

    On accelerators the thin one would show the rate of memory, not of products.
    """
    side = bench.sizes.matrix
    square = bench.seconds(lambda x: x @ x, (side, side), loops=2)
    thin = bench.seconds(lambda x: jnp.tile(x @ x[:, :THIN], side // THIN), (side, side), loops=2)
    copy = bench.seconds(lambda x: jnp.tile(x[:, :THIN] * 0.5, side // THIN), (side, side), loops=2)
    return half_side_of(square, max(thin - copy, 0.0) * side / THIN, side)


def half_side_of(square: float, thin: float, side: int) -> float:
    """Return the ``h`` in [0, side] with ``thin / square = (1 + h / THIN) / (1 + h / side)``, for equal FLOPs."""
    ratio = thin / square
    return max(0.0, min((ratio - 1) / max(1 / THIN - ratio / side, 1 / side), float(side)))


def _link(bench: _Bench, axis: str, size: int) -> Link:
    """Return the link that fits all-reduces and all-gathers of several sizes over ``axis``."""
    rows = [_reduce(bench, axis, size, n) for n in bench.sizes.messages]
    rows += [_gather(bench, axis, size, n) for n in bench.sizes.messages]
    sent, seconds = np.array(rows).T
    return fit_link(sent, seconds)


def fit_link(sent: np.ndarray, seconds: np.ndarray) -> Link:
    """Return the link whose ``latency + sent / bandwidth`` is closest to ``seconds`` in relative error."""
    weighted = np.stack([1 / seconds, sent / seconds], axis=1)
    latency, per_byte = np.linalg.lstsq(weighted, np.ones_like(seconds), rcond=None)[0]
    fastest = float((seconds / sent).min())
    return Link(latency=max(float(latency), 1e-7), bandwidth=1 / max(float(per_byte), fastest / 10))


def _reduce(bench: _Bench, axis: str, size: int, n: int) -> tuple[float, float]:
    """Return the bytes that one device sends in an all-reduce of ``n`` bytes, and the seconds."""
    body = lambda x: lax.psum(x, axis) * 0.5  # noqa: E731
    return 2 * n * (size - 1) / size, bench.seconds(body, (n // 4,), _loops(bench, n))


def _gather(bench: _Bench, axis: str, size: int, n: int) -> tuple[float, float]:
    """Return the bytes that one device sends in an all-gather with a result of ``n`` bytes, and the seconds."""
    part = n // 4 // size

    def body(x: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(lax.all_gather(x, axis, tiled=True), lax.axis_index(axis), part)

    return n * (size - 1) / size, bench.seconds(body, (part,), _loops(bench, n))


def _loops(bench: _Bench, n: int) -> int:
    return max(2, min(20, bench.sizes.sent // n))


def _memory(mesh: jax.sharding.Mesh) -> float:
    """Return the bytes of memory per device; CPU devices of one host share its memory evenly."""
    stats = mesh.devices.flat[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return float(prod(map(os.sysconf, ("SC_PAGE_SIZE", "SC_PHYS_PAGES"))) // mesh.size)


class _CallableModule(ModuleType):
    """The type of this module, which makes ``md.calibrate(mesh)`` work in any order of imports.

    ``md.calibrate`` is the function until something imports ``meshdsl.calibrate``: then Python sets the attribute of
    the package to the module. The type of a module may be replaced (Python data model, 3.3.2.1), here by one with a
    ``__call__``.
    """

    def __call__(self, mesh: StatedMesh, devices: Sequence[jax.Device] | None = None, keep: bool = False) -> Topology:
        """See :func:`calibrate`."""
        return calibrate(mesh, devices, keep)


sys.modules[__name__].__class__ = _CallableModule
