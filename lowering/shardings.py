"""The boundary of the planned step: device meshes, shardings of the user's arrays, and their placement.

A layout at this boundary is ``S`` or ``B`` on every axis and becomes a ``PartitionSpec``: per dim the axes that split
it, major first. Partial values exist only inside.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

from meshdsl.errors import DeviceError
from meshdsl.ir.graph import TracedProgram
from meshdsl.ir.host import hosted_outputs
from meshdsl.ir.solution import Solution
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B
from meshdsl.shardings import HOST_KIND, partition_spec


def device_mesh(mesh: Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Returns a jax mesh of the first ``mesh.size`` of ``devices`` (default: all of ``jax.devices()``).

    Raises:
      DeviceError: there are fewer.
    """
    found, types = devices_for(mesh, devices), (AxisType.Auto,) * len(mesh.names)
    if devices is None:  # jax orders them by the links of the machine
        return jax.make_mesh(mesh.sizes, mesh.names, axis_types=types, devices=found)
    return jax.sharding.Mesh(np.array(found).reshape(mesh.sizes), mesh.names, axis_types=types)


def devices_for(mesh: Mesh, devices: Sequence[jax.Device] | None = None) -> list[jax.Device]:
    """Returns the first ``mesh.size`` of ``devices`` (default: all of ``jax.devices()``).

    Raises:
      DeviceError: there are fewer.
    """
    found = list(jax.devices() if devices is None else devices)
    if len(found) < mesh.size:
        kind = f" ({found[0].platform})" if found else ""
        there = f"there are {len(found)}{kind}" if devices is None else f"devices= has {len(found)}{kind}"
        raise DeviceError(f"mesh {mesh} needs {mesh.size} devices, and {there}\n{_remedy(mesh, devices)}")
    return found[: mesh.size]


def _remedy(mesh: Mesh, devices: Sequence[jax.Device] | None) -> str:
    if devices is not None:
        return "give more of jax.devices(), or a smaller mesh"
    setting = f"jax.config.update('jax_num_cpu_devices', {mesh.size})"
    return f"To try it on one CPU: JAX_NUM_CPU_DEVICES={mesh.size}, or before anything runs {setting}"


def named_sharding(layout: Layout, rank: int, mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding on ``mesh`` of an array of ``rank`` dims in ``layout``."""
    found = NamedSharding(mesh, partition_spec(layout, rank))
    return found.with_memory_kind(HOST_KIND) if layout.memory == "host" else found


def input_layouts(program: TracedProgram, solution: Solution) -> tuple[Layout, ...]:
    """Returns the layout of every input of the step, flat."""
    return _placed((solution.layouts[value.id] for value in program.graph.inputs), program.graph.hosted)


def output_layouts(program: TracedProgram, solution: Solution) -> tuple[Layout, ...]:
    """Returns the layout of every output of the step, flat; literals are ``B``."""
    last, whole = program.graph.ops[-1], Layout(**dict.fromkeys(solution.mesh.names, B))
    found = (solution.uses.get((last.id, i), whole) for i in range(len(last.inputs)))
    return _placed(found, hosted_outputs(program.graph))


def _placed(layouts: Iterable[Layout], hosted: Collection[int]) -> tuple[Layout, ...]:
    """Returns the layouts, some in the host's memory."""
    return tuple(layout.within("host") if i in hosted else layout for i, layout in enumerate(layouts))


def shardings(layouts: Iterable[Layout], leaves: Iterable[Any], mesh: jax.sharding.Mesh) -> tuple[NamedSharding, ...]:
    """Returns one sharding per leaf; leaves are anything with a shape.

    Arrays without elements are whole: jax cannot read results whose blocks the compiler makes of another shape.
    """
    pairs = zip(layouts, leaves, strict=True)
    return tuple(named_sharding(Layout() if 0 in x.shape else layout, len(x.shape), mesh) for layout, x in pairs)


def place(arrays: Sequence[Any], targets: Sequence[NamedSharding]) -> list[jax.Array]:
    """Returns the arrays on the mesh, each in its sharding; arrays that have it already are not copied."""
    placed: list[jax.Array] = jax.device_put(list(arrays), list(targets))
    return placed
