"""Faults of the pins of one array, and minimal sets of pins that contradict each other.

Any layout of a value can be resharded to any other, so pins of different values never conflict; only pins of one array
can. Of those, only the parts in force matter, which no later pin overrides:

    "**": data=S(0)   "x": model=S(0)   "*": pod=S(1)        x float32[4], on data=4,model=2,pod=2

Each is valid for x alone. ``**`` and ``x`` together split four rows into eight, whatever ``*`` adds, so these two are
reported. Layout rules are split into their entries, one per dim.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import combinations
from math import prod

from meshdsl.errors import nearest
from meshdsl.ir.graph import Leaf
from meshdsl.layouts.axis_rules import entry
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Placement, S, Split
from meshdsl.schedules.pipelined import Pipelined

# ---- minimal contradictory sets --------------------------------------------------------------------------------------

Named = tuple[str, Layout]  # a pin and its name in messages


def merge(pins: Iterable[Layout]) -> Layout:
    """Returns the pins merged in order; the last pin that names an axis decides it."""
    merged: dict[str, Placement] = {}
    for pin in pins:
        merged = {n: p for n, p in merged.items() if n not in pin.axes} | dict(pin.placements)
    return Layout(**merged)


def entries(rule: Layout, dims: Sequence[str]) -> list[Named]:
    """Returns the entries of layout rules that apply to an array with these dims, as named pins."""
    split = [(dim, rule.splitting(i)) for i, dim in enumerate(dims)]
    return [
        (f"rule {entry(dim, axes)}", Layout(**dict.fromkeys(axes, rule.on(axes[0])))) for dim, axes in split if axes
    ]


def contradictions(
    pins: Sequence[Named], wrong: Callable[[Layout], Sequence[str]]
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields minimal sets of contradictory pins with their faults; after each, its last pin is removed.

    Args:
      wrong: the faults of a layout; a layout with fewer axes than a valid one must be valid too.
    """
    remaining = _in_force(pins)
    while found := next(_at_fault(remaining, wrong), None):
        some, texts = found
        yield ", ".join(f"{name} says {pin}" for name, pin in some), texts
        remaining = [pin for pin in remaining if pin is not some[-1]]


def _in_force(pins: Sequence[Named]) -> list[Named]:
    """Returns every pin with the axes that no later pin names."""
    later: set[str] = set()
    found: list[Named] = []
    for name, pin in reversed(pins):
        mine = {axis: placed for axis, placed in pin.placements if axis not in later}
        later.update(mine)
        found += [(name, Layout(**mine))] if mine else []
    return found[::-1]


def _at_fault(
    pins: Sequence[Named], wrong: Callable[[Layout], Sequence[str]]
) -> Iterator[tuple[Sequence[Named], Sequence[str]]]:
    """Yields contradictory sets of pins, smallest first."""
    for size in range(1, len(pins) + 1):
        for some in combinations(pins, size):
            texts = wrong(merge(pin for _, pin in some))
            if texts:
                yield some, texts


# ---- faults of one pin -----------------------------------------------------------------------------------------------

UNEVEN = "does not divide over"
LONG = 8  # elements per shard from which a dim may be padded, which then adds less than an eighth


def leaf_faults(
    name: str, leaf: Leaf, pin: Layout, mesh: Mesh, uneven: Collection[str] = (), loose: bool = False
) -> list[str]:
    """Returns a row per fault of ``pin`` for one array: unknown dims, uneven splits.

    Args:
      uneven: axes over which the first dim need not divide.
      loose: uneven splits are no faults.
    """
    pin = pin.numbered(leaf.dims)
    rows = [text for axis, p in pin.placements if isinstance(p, Split) for text in _dim_fault(leaf, axis, p)]
    for dim, axes, blocks in () if loose else uneven_dims(leaf.shape, pin, mesh):
        if not (dim == 0 and set(axes) <= set(uneven)):
            named, size = leaf.dims[dim] if leaf.dims else dim, leaf.shape[dim]
            rows.append(f"dim {named} of size {size} {UNEVEN} {sized(axes, mesh)}; {_near(size, blocks)}")
    what = f"{name} {leaf.type}".lstrip() if rows else ""
    return [f"{what}: {row}" for row in rows]


def uneven_dims(shape: Sequence[int], pin: Layout, mesh: Mesh) -> Iterator[tuple[int, list[str], int]]:
    """Yields the dims that do not divide over the axes that split them, with these axes and their number of blocks."""
    for dim, size in enumerate(shape if pin.placements else ()):
        axes = [axis for axis in pin.splitting(dim) if axis in mesh.names]
        blocks = prod(map(mesh.axis, axes))
        if size % blocks:
            yield dim, axes, blocks


def uneven_axes(leaf: Leaf, mesh: Mesh, pipeline: Pipelined | None) -> Collection[str]:
    """Returns the axes over which the first dim of an array need not divide, since its layers are assigned to stages.

    The axis of the stages is unknown until they are found; until then it may be any.
    """
    if pipeline is None or pipeline.loads or (pipeline.axis and leaf.shape[:1] != (sum(pipeline.layers),)):
        return ()
    return (pipeline.axis,) if pipeline.axis else mesh.names


def without_uneven(leaf: Leaf, pin: Layout, mesh: Mesh, pipeline: Pipelined | None) -> Layout:
    """Returns the pin, without the axis of the stages if the layers do not divide over it."""
    axis = pipeline.axis if pipeline else ""
    uneven = axis in uneven_axes(leaf, mesh, pipeline) and leaf.shape[0] % mesh.axis(axis) > 0
    free = uneven and pin.numbered(leaf.dims).on(axis) is S(0)
    return Layout(**{n: p for n, p in pin.placements if n != axis}) if free else pin


def divisible(shape: Sequence[int], pin: Layout, mesh: Mesh) -> Layout:
    """Returns the pin with those axes replicated over which a dim does not divide: of several, the minor-most ones."""
    placed = dict(pin.placements)
    for dim, size in enumerate(shape):
        blocks = 1
        for axis in pin.splitting(dim):
            blocks *= mesh.axis(axis)
            placed[axis] = placed[axis] if size % blocks == 0 else B
    return Layout(**placed)


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


def sized(axes: Sequence[str], mesh: Mesh) -> str:
    """Returns the axes with their sizes, and the product if there are several."""
    each = " ".join(f"{axis}={mesh.axis(axis)}" for axis in axes)
    return f"{each} ({prod(map(mesh.axis, axes))} blocks)" if len(axes) > 1 else each
