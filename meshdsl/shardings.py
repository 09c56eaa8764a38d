"""JAX's own words for meshes and layouts, in ours and back.

    jax.make_mesh((4, 2), ("data", "model"))               md.Mesh(data=4, model=2), and its devices
    NamedSharding(mesh, P("data", None))                   data=S(0) model=B
    NamedSharding(mesh, P(("data", "model")))              data=S(0) model=S(0)
    NamedSharding(mesh, P("data", P.UNCONSTRAINED))        data=S(0), and no other axis splits dim 0
    NamedSharding(mesh, P(None, unreduced={"model"}))      model=P, the others B
    P("data", None), of an array on that mesh              data=S(0) model=B
    NamedSharding(mesh, spec, memory_kind="pinned_host")   the same @host

Only names of axes count: the mesh of a sharding may have other sizes, other devices or none (``AbstractMesh``). An axis
that it lacks is free. In a ``PartitionSpec``, an axis that it does not name is ``B``, as everywhere in JAX, while an
axis that a layout's text does not name is free. In the type of an array (``out_sharding=``, ``jax.sharding.reshard``),
so is an Auto axis that the spec does not name: what enters ``jax.sharding.auto_axes`` is resharded to ``P()`` over such
axes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as JaxMesh

from meshdsl.errors import LayoutError, NotationError, first_line, nearest
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.machine import FoundTopology, kept_topology, topology_of_kind
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, P, Placement, S
from meshdsl.layouts.topology import Topology

HOST_KIND, DEVICE_KIND = "pinned_host", "device"  # jax's names for the host's memory and the device's
Stated = Layout | str | NamedSharding | PartitionSpec  # a layout as users state it
StatedTree = Stated | Mapping[str, Any] | Sequence[Any]  # or a pytree of layouts
StatedMesh = Mesh | JaxMesh | AbstractMesh | str  # a mesh as users state it


def mesh_of(mesh: StatedMesh, topology: Topology | str | None = None) -> Mesh:
    """Returns the mesh that is named, ours, in jax or as text, with this topology unless it states one."""
    if isinstance(mesh, Mesh):
        return mesh if topology is None or mesh.states_topology else Mesh(topology=topology, **mesh.sizes_by_name)
    return Mesh.parse(mesh, topology) if isinstance(mesh, str) else Mesh(topology=topology, **dict(mesh.shape))


def topology_at_hand(mesh: Mesh | None = None, devices: Sequence[jax.Device] | None = None) -> FoundTopology:
    """Returns the topology of devices such as these, by default ``jax.devices()``, which starts jax's backend.

    Args:
      mesh: for which a measured topology may be kept; None leaves measured ones out.
      devices: of which the first counts. Where there is none, the topology of a CPU is assumed.
    """
    try:
        first = (jax.devices() if devices is None else devices)[0]
    except (RuntimeError, IndexError) as error:
        why = f"as jax finds no devices ({first_line(error)})"
        note = f"topology cpu is assumed, {why}; md.Mesh(..., topology=) states another"
        return replace(topology_of_kind("cpu", "cpu"), note=note, assumed=True)
    alone = jax.process_count() == 1  # hosts that keep different topologies would plan, and then run, differently
    found = kept_topology(first.device_kind, mesh) if mesh is not None and alone else None
    return found or topology_of_kind(first.platform, first.device_kind)


def stated_layout(stated: Any, rank: int, is_type: bool = False) -> tuple[Layout, tuple[int, ...]] | None:
    """Returns the layout of a sharding for an array of this rank, and the dims that no other axis may split.

    Args:
      stated: a ``NamedSharding``, or a ``PartitionSpec``, whose mesh is not known: the axes that it does not name split
        none of the dims that it constrains.
      is_type: the sharding is the type of the array, so that it says nothing of Auto axes.

    Returns:
      None for a sharding without named axes, such as that of one device.
    """
    if not isinstance(stated, NamedSharding | PartitionSpec):
        return None
    spec = stated if isinstance(stated, PartitionSpec) else stated.spec
    entries = dict(enumerate(spec.partitions))
    closed = tuple(dim for dim in range(rank) if entries.get(dim) is not PartitionSpec.UNCONSTRAINED)
    placed = _placements(spec)
    if len(closed) < rank or isinstance(stated, PartitionSpec):
        return Layout(**placed), closed
    types = zip(stated.mesh.axis_names, stated.mesh.axis_types, strict=True)
    free = [axis for axis, kind in types if is_type and kind is not AxisType.Explicit]
    others = [axis for axis in stated.mesh.axis_names if axis not in placed and axis not in free]
    return Layout(**placed, **dict.fromkeys(others, B)), ()


def layout_over(mesh: Mesh, stated: NamedSharding, rank: int) -> Layout:
    """Returns the layout of a sharding over the axes of a mesh, which may lack axes of one device."""
    layout, _ = stated_layout(stated, rank) or (Layout(), ())
    return Layout(**{axis: placed for axis, placed in layout.placements if axis in mesh.names})


def pin_of(stated: Stated, axes: Iterable[str]) -> Layout | str:
    """Returns a layout, or its text, as it is, and a sharding as a pin on a mesh with these axes.

    Raises:
      NotationError: it leaves some dims unconstrained and others whole, which a pin cannot say, or names an axis twice,
        or a memory that plans do not know.
    """
    if not isinstance(stated, NamedSharding | PartitionSpec):
        return stated
    spec = stated if isinstance(stated, PartitionSpec) else stated.spec
    placed = _placements(spec)
    memory = memory_of(stated)
    if PartitionSpec.UNCONSTRAINED not in spec.partitions:
        return Layout(**placed, **{axis: B for axis in axes if axis not in placed}).within(memory)
    whole = [dim for dim, entry in enumerate(spec.partitions) if entry is None]
    if whole:
        dims = ", ".join(map(str, whole))
        text = str(Layout(**placed)) or "model=B"
        raise NotationError(
            f"{spec} keeps dim {dims} whole and leaves others to the planner; a pin speaks of axes: name those that it "
            f"fixes, as in {text!r}, or leave all other dims UNCONSTRAINED"
        )
    return Layout(**placed).within(memory)


def memory_of(stated: Any) -> str:
    """Returns the memory that a sharding of jax names, as layouts do: ``"host"``, or ``""`` for the device's.

    Raises:
      NotationError: it is another one.
    """
    kind = getattr(stated, "memory_kind", None)
    if kind in (None, DEVICE_KIND, HOST_KIND):
        return "host" if kind == HOST_KIND else ""
    near = nearest(kind, (HOST_KIND, DEVICE_KIND))
    raise NotationError(f"memory_kind={kind!r} is not {HOST_KIND!r} (@host) or {DEVICE_KIND!r}{near}")


def axes_of(stated: Stated) -> tuple[str, ...]:
    """Returns the mesh axes that a pin names, in our words or in those of jax."""
    if isinstance(stated, NamedSharding | PartitionSpec):
        return tuple(_placements(stated if isinstance(stated, PartitionSpec) else stated.spec))
    return Layout.of(stated).axes


def _placements(spec: PartitionSpec) -> dict[str, Placement]:
    """Returns the placements of the axes that a spec names; NotationError if it names one twice."""
    placed: list[tuple[str, Placement]] = []
    for dim, entry in enumerate(spec.partitions):
        if entry is not PartitionSpec.UNCONSTRAINED:
            names = (entry,) if isinstance(entry, str) else entry or ()
            placed += [(axis, S(dim)) for axis in names]
    placed += [(axis, P) for axis in getattr(spec, "unreduced", ())]
    axes = [axis for axis, _ in placed]
    if twice := next((axis for axis in axes if axes.count(axis) > 1), ""):
        raise NotationError(f"{spec} names axis {twice!r} twice; an axis splits one dim")
    return dict(placed)


def partition_spec(layout: Layout, rank: int) -> PartitionSpec:
    """Returns the ``PartitionSpec`` of ``layout`` for ``rank`` dims; LayoutError for partial layouts."""
    if layout.partial():
        raise LayoutError(f"layout {layout} is partial over {', '.join(layout.partial())}: arrays hold S and B only")
    return PartitionSpec(*(_entry(layout.splitting(dim)) for dim in range(rank)))


def _entry(axes: Sequence[str]) -> str | tuple[str, ...] | None:
    return tuple(axes) if len(axes) > 1 else axes[0] if axes else None
