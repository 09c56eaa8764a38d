"""What is wrong with a pin of one array."""

from collections.abc import Collection, Sequence
from math import prod

from meshdsl.errors import nearest
from meshdsl.ir import Leaf
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import S, Split
from meshdsl.pipeline.pipelined import Pipelined

LONG = 8  # elements per block from which on a dim is padded where that pays: by less than an eighth


def leaf_faults(name: str, leaf: Leaf, pin: Layout, mesh: Mesh, uneven: Collection[str] = ()) -> list[str]:
    """What is wrong with ``pin`` for one array: dims that it does not have, uneven splits.

    Args:
      uneven: axes over which the first dim need not divide.
    """
    pin = pin.numbered(leaf.dims)
    rows = [text for axis, p in pin.placements if isinstance(p, Split) for text in _dim_fault(leaf, axis, p)]
    for dim, size in enumerate(leaf.shape if pin.placements else ()):
        axes = [axis for axis in pin.splitting(dim) if axis in mesh.names]
        blocks = prod(mesh.axis(axis) for axis in axes)
        if size % blocks and not (dim == 0 and set(axes) <= set(uneven)):
            named = leaf.dims[dim] if leaf.dims else dim
            over = _sized(axes, mesh)
            rows.append(f"dim {named} of size {size} does not divide over {over}; {_near(size, blocks)}")
    what = f"{name} {leaf.type}".lstrip() if rows else ""
    return [f"{what}: {row}" for row in rows]


def uneven_axes(leaf: Leaf, mesh: Mesh, pipeline: Pipelined | None) -> Collection[str]:
    """Axes over which the first dim of an array need not divide, as its layers are dealt out to the stages there.

    Which axis has the stages is known once they are found; until then it may be any.
    """
    if pipeline is None or pipeline.loads or (pipeline.axis and leaf.shape[:1] != (sum(pipeline.layers),)):
        return ()
    return (pipeline.axis,) if pipeline.axis else mesh.names


def without_uneven(leaf: Leaf, pin: Layout, mesh: Mesh, pipeline: Pipelined | None) -> Layout:
    """The pin of an array, which lies on the axis of the stages as it may if its layers do not divide over them."""
    axis = pipeline.axis if pipeline else ""
    uneven = axis in uneven_axes(leaf, mesh, pipeline) and leaf.shape[0] % mesh.axis(axis) > 0
    free = uneven and pin.numbered(leaf.dims).on(axis) is S(0)
    return Layout(**{n: p for n, p in pin.placements if n != axis}) if free else pin


def _dim_fault(leaf: Leaf, axis: str, placed: Split) -> list[str]:
    rank = len(leaf.shape)
    numbers = f"its dims are 0 to {rank - 1}" if rank else "it is a scalar and cannot be split"
    if isinstance(placed.dim, str):
        if leaf.dims:
            return [f"{axis}={placed}: it has no dim {placed.dim!r}{nearest(placed.dim, leaf.dims)}"]
        return [f"{axis}={placed} names a dim, but the array has no named dims; {numbers}"]
    return [] if 0 <= placed.dim < rank else [f"{axis}={placed} is out of range; {numbers}"]


def _near(size: int, blocks: int) -> str:
    below = size // blocks * blocks
    free = "; left free, it is padded inside the step where that pays" if size >= LONG * blocks else ""
    return "nearest sizes that work: " + ", ".join(str(n) for n in (below, below + blocks) if n) + free


def _sized(axes: Sequence[str], mesh: Mesh) -> str:
    """The axes with their sizes, and the product if there are several."""
    each = " ".join(f"{axis}={mesh.axis(axis)}" for axis in axes)
    return f"{each} ({prod(map(mesh.axis, axes))} blocks)" if len(axes) > 1 else each
