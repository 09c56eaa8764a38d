"""``layouts="as-given"``: arguments that already lie sharded pin their inputs as they lie.

    argument                                                   its input
    array on a mesh of these axes, or shape with ``sharding``  pinned on every axis of that mesh
    array not committed to devices, numpy array, tracer        left to the planner
    array on another mesh, on one device, without named axes   an error: it cannot lie so on this mesh

Meshes are the same if axes of several devices have the same names and sizes in the same order; which devices these are
does not matter here. Shapes without values may lie on an ``AbstractMesh``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshdsl.errors import NotationError, PinError, faults, shortened
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.shardings import layout_over, memory_of

AS_GIVEN = "as-given"
_SHOWN = 8  # faults that are listed
_NAMED = 3  # arrays that a note names


@dataclass(frozen=True)
class GivenLayouts:
    """Where the arguments of a call lie.

    Args:
      paths: of all arguments.
      layouts: per argument, the layout in which it lies; None if it lies nowhere yet.
    """

    paths: tuple[str, ...]
    layouts: tuple[Layout | None, ...]

    @staticmethod
    def of(name: str, paths: Sequence[str], leaves: Sequence[Any], mesh: Mesh) -> "GivenLayouts":
        """Returns where arguments lie on ``mesh``; PinError lists all that lie otherwise."""
        rows: list[str] = []
        found = tuple(_given(path, x, mesh, rows) for path, x in zip(paths, leaves, strict=True))
        if rows:
            title = f"layouts='{AS_GIVEN}': arguments of {name} do not lie on mesh {mesh}:"
            remedy = (
                "jax.device_put(x, NamedSharding(mesh, spec)) moves an array; layouts= by globs pins without moving"
            )
            raise PinError(faults(title, shortened(rows, _SHOWN), remedy))
        return GivenLayouts(tuple(paths), found)

    @property
    def pins(self) -> dict[str, Layout]:
        """The layouts by path."""
        return {path: at for path, at in zip(self.paths, self.layouts, strict=True) if at is not None}

    @property
    def notes(self) -> tuple[str, ...]:
        """Which inputs are pinned as they lie, and which are left to the planner, in sentences."""
        free = [path for path, at in zip(self.paths, self.layouts, strict=True) if at is None]
        texts = (("pinned as they lie", list(self.pins)), ("left to the planner, since they lie on no mesh yet", free))
        return tuple(f"{AS_GIVEN}: {what}: {', '.join(shortened(paths, _NAMED))}" for what, paths in texts if paths)


def place_of(x: Any) -> jax.sharding.Sharding | None:
    """Returns the sharding of an array that is committed to devices, or of a shape that has one; None for all else."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return None
    placed = isinstance(x, jax.ShapeDtypeStruct) or x.committed
    at: jax.sharding.Sharding | None = x.sharding if placed else None
    return at


def _given(path: str, x: Any, mesh: Mesh, rows: list[str]) -> Layout | None:
    """Returns where an argument lies; appends a fault if that is not on ``mesh``."""
    at = place_of(x)
    if at is None:
        return None
    if not isinstance(at, NamedSharding):
        if mesh.size == len(at.device_set) == 1:
            return None
        rows.append(f"{path}: {_elsewhere(at)}")
        return None
    wide = {axis: size for axis, size in at.mesh.shape.items() if size > 1}
    if list(wide.items()) != [(axis, size) for axis, size in mesh if size > 1]:
        own = ",".join(f"{axis}={size}" for axis, size in at.mesh.shape.items())
        rows.append(f"{path}: lies on mesh {own}")
        return None
    layout = layout_over(mesh, at, len(x.shape))
    if layout.partial():
        rows.append(f"{path}: is partial over {', '.join(layout.partial())}; only S and B cross the boundary of a step")
        return None
    try:
        return layout.within(memory_of(at))
    except NotationError as error:
        rows.append(f"{path}: {error}")
        return None


def _elsewhere(at: jax.sharding.Sharding) -> str:
    """Returns the text of a sharding without named axes."""
    devices = sorted(map(str, at.device_set))
    if len(devices) == 1:
        return f"is committed to one device, {devices[0]}"
    return f"has a {type(at).__name__} over {len(devices)} devices, which names no mesh axes"
