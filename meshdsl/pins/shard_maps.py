"""The mesh that the user's shard_maps were written for, compared with the mesh of the plan.

A shard_map names the axes it divides over, and its body has the shapes of their blocks. So the plan's mesh must have
these axes, with as many devices and in the same order. Axes that a shard_map leaves automatic need no counterpart.
"""

from collections.abc import Iterator

from meshdsl.errors import PinError, faults, nearest
from meshdsl.ir.graph import Op, TracedProgram
from meshdsl.ir.index import ops_named
from meshdsl.ir.manual import BOUNDARY
from meshdsl.layouts.mesh import Mesh


def check_shard_map_meshes(program: TracedProgram, mesh: Mesh) -> None:
    """Raises PinError if shard_maps of the program divide over axes that the mesh lacks or has otherwise."""
    found = (
        f"shard_map at {op.source}: {why}" for op in ops_named(program.graph, *BOUNDARY) for why in _faults(op, mesh)
    )
    rows = list(dict.fromkeys(found))
    if rows:
        title = f"the shard_maps of {program.name} do not fit the mesh {mesh}:"
        raise PinError(faults(title, rows, _remedy(mesh)))


def _faults(op: Op, mesh: Mesh) -> Iterator[str]:
    for name, size in op.params["sizes"]:
        if name not in mesh.names:
            yield f"divides over {name}={size}, and the mesh has no axis {name!r}{nearest(name, mesh.names)}"
        elif mesh.axis(name) != size:
            yield f"divides over {name}={size}, and the mesh has {name}={mesh.axis(name)}"
    theirs = [name for name, _ in op.params["mesh"] if name in mesh.names]
    ours = [name for name in mesh.names if name in theirs]
    if theirs != ours:
        yield f"has its axes in the order {', '.join(theirs)}, and the mesh has them in the order {', '.join(ours)}"


def _remedy(mesh: Mesh) -> str:
    return f"plan on the mesh that they name, or give them this one: jax.make_mesh({mesh.sizes}, {mesh.names})"
