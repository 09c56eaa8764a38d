"""Alignment: where on a common grid the elements of dims lie whose lengths differ a little.

    u [2048]   u[1:] [2047]   u[:-1] [2047]   their difference [2047]   a pad of it [2048]

A dim of 2047 elements cannot be split where one of 2048 can. But it need not be: its elements can lie on the grid of
2048 places from an *offset* on, and the contents of the other places do not matter. Values between a slice and the
operation that restores or reduces the dim are then as long as the grid, and slices are shifts along it. This module
decides which dims are put on which grid, and at which offset; ``align_shifts`` rewrites the graph.

1. Dims that an operation treats alike have one offset: they are one *class* (``rules.dim_groups``, union-find).
2. Slices, pads, concatenations and updates shift one class against another. Classes of nearly equal length that are
   connected by shifts share a grid: the length among theirs that the mesh divides best (``roundness``).
3. A shift moves as many elements as offsets and start differ. The offsets that move the fewest bytes are found by
   coordinate descent from several starts. (The alignment of arrays by offsets, so that a data parallel program moves
   least, is due to Chatterjee, Gilbert, Schreiber and Teng: Optimal Evaluation of Array Expressions on Massively
   Parallel Machines, 1995.)

A stencil u[2:] - 2 u[1:-1] + u[:-2], written back to u[1:-1], is put at offset 1: then only its outer two operands
move, by one place each.

A much shorter dim can be put on a grid as well: sum(f(u[1024:])) is that of f(u), masked, and so is sum(f(u[::3])),
whose elements are at every third place. Nothing moves then, but f is computed where it is not needed, which pays only
if the dim is split. So these classes, the *far* ones, are only those of elementwise operations, products, reductions
and loops of these, and they are put on their grids only on request, after the others: for a variant of the program.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshdsl.ir.graph import Atom, Graph, Op, Value
from meshdsl.ir.index import producers
from meshdsl.layouts.roundness import Roundness
from meshdsl.rules.dim_groups import ELEMENTWISE, REDUCTIONS, RUNNING, DimGroup, dim_groups
from meshdsl.rules.indexing import COMBINE
from meshdsl.trace.passes.static_windows import SHORTER, Constants, Window, written_window

ValueDim = tuple[int, int]  # a value id and its dim
FIRST_AT_ITS_PLACE = ("argmax", "argmin", "top_k")  # they return positions, and the first of equal elements
FARTHEST = 8  # how many times as long as a far dim its grid may be
LOOPS = frozenset(("scan", "while", "cond"))
_MOVEMENT = frozenset("broadcast_in_dim iota transpose reshape squeeze slice split pad concatenate".split())
FAR_OPERATIONS = ELEMENTWISE | REDUCTIONS | RUNNING.keys() | LOOPS | _MOVEMENT | {"dot_general"}
ITERATIONS = 16  # a guess: how much more often a body runs than the graph around it


class Place(NamedTuple):
    """A dim on a grid.

    Args:
      length: places of the grid.
      offset: the place of the dim's first element.
      size: its elements.
      step: places from one element to the next.
    """

    length: int
    offset: int
    size: int
    step: int = 1

    @property
    def elements(self) -> range:
        """The places of the elements."""
        return range(self.offset, self.offset + self.step * (self.size - 1) + 1, self.step)


Placed = Mapping[ValueDim, Place]


@dataclass(frozen=True)
class Shift:
    """A dim of a result whose element ``j + start`` is element ``j`` of an operand's dim, for all ``j`` inside both.

    With a step, element ``j`` of the shorter dim is every ``step``-th one of the longer.
    """

    source: ValueDim
    result: ValueDim
    start: int
    step: int
    bytes: float  # of one element of the source's dim


# ---- Shifts of operations --------------------------------------------------------------------------------------------


class DimShift(NamedTuple):
    """A dim of an operation's result whose element ``j + start`` is element ``j`` of a dim of an operand.

    With a step, element ``j`` of the operand is element ``step * j + start`` of the result if that is longer, or that
    of the result element ``step * j - start`` of the operand if it is shorter.
    """

    operand: int
    dim: int
    result: int
    result_dim: int
    start: int
    step: int = 1


def shifted_dims(op: Op, constants: Constants) -> list[DimShift]:
    """Returns the shift of every dim that an operation cuts, pads, joins or updates, with strides where it has them."""
    if op.name == "split":
        dim, sizes = op.params["axis"], op.params["sizes"]
        return [DimShift(0, dim, i, dim, -int(sum(sizes[:i]))) for i in range(len(sizes))]
    if op.name == "slice":
        strides = op.params["strides"] or (1,) * len(op.inputs[0].shape)
        ends = enumerate(zip(op.inputs[0].shape, op.outputs[0].shape, op.params["start_indices"], strides, strict=True))
        return [DimShift(0, d, 0, d, -int(start), int(step)) for d, (n, m, start, step) in ends if n != m]
    if op.name == "pad":
        config = enumerate(op.params["padding_config"])
        moved = ((d, int(low), int(between) + 1) for d, (low, high, between) in config if low or high or between)
        return [DimShift(0, d, 0, d, low, step) for d, low, step in moved]
    if op.name == "concatenate":
        dim, at, found = op.params["dimension"], 0, []
        for i, x in enumerate(op.inputs):
            found.append(DimShift(i, dim, 0, dim, at))
            at += x.shape[dim]
        return found
    window = updated_window(op, constants)
    if window is None:
        return []
    update = 1 if op.name == "dynamic_update_slice" else 2
    whole = op.inputs[0].shape
    places = enumerate(window.places)
    return [
        DimShift(update, p, 0, d, window.starts[d]) for d, p in places if p is not None and window.sizes[d] != whole[d]
    ]


def updated_window(op: Op, constants: Constants) -> Window | None:
    """Returns the known window without strides that an operation writes, if it is one that writes."""
    if op.name not in COMBINE:
        return None
    window = written_window(op, constants)
    return None if window is None or max(window.strides, default=1) > 1 else window


# ---- Classes ---------------------------------------------------------------------------------------------------------


@dataclass
class DimClasses:
    """Union-find over dims of values, with what is known of them."""

    parent: dict[ValueDim, ValueDim] = field(default_factory=dict)
    size: dict[ValueDim, int] = field(default_factory=dict)
    reduced: set[ValueDim] = field(default_factory=set)
    fixed: set[ValueDim] = field(default_factory=set)
    boundary: set[ValueDim] = field(default_factory=set)
    near: set[ValueDim] = field(default_factory=set)  # dims of other operations than far classes may have
    constrained: set[ValueDim] = field(default_factory=set)  # dims that a constraint splits
    shifts: list[Shift] = field(default_factory=list)

    def find(self, at: ValueDim) -> ValueDim:
        """The representative of a dim's class."""
        root = at
        while (above := self.parent.get(root, root)) != root:
            root = above
        while at != root:
            self.parent[at], at = root, self.parent.get(at, at)
        return root

    def join(self, dims: Iterable[ValueDim]) -> None:
        """Makes dims one class."""
        first, *others = map(self.find, dims)
        for other in others:
            self.parent[self.find(other)] = self.find(first)

    def add(self, graph: Graph, weight: float, looped: bool = False) -> None:
        """Adds the operations of a graph and its bodies.

        Args:
          looped: it is the body of a loop or conditional, whose results are as long inside as outside.
        """
        constants = Constants(producers(graph))
        for op in graph.ops:
            for body in op.bodies:
                if op.name not in LOOPS:
                    self.near.update((v.id, d) for v in body.inputs for d in range(len(v.shape)))
                self.add(body, weight * ITERATIONS, op.name in LOOPS)
            atoms, groups = (*op.inputs, *op.outputs), aligned_groups(op)
            if (op.name not in FAR_OPERATIONS or op.manual) and not (looped and op.name == "return"):
                self.near.update((x.id, d) for x in atoms if isinstance(x, Value) for d in range(len(x.shape)))
            elif op.name == "reshape":
                kept = {port for group in groups for port in group.ports}
                self.near.update(
                    (x.id, d) for i, x in enumerate(atoms) for d in range(len(x.shape)) if (i, d) not in kept
                )
            for group in groups:
                dims = list(_value_dims(op, atoms, group))
                self.size.update(dict.fromkeys(dims, group.size))
                if dims:
                    self.join(dims)
                if group.fill is not None:
                    self.reduced.update(dims)
                    self.fixed.update(dims if op.name in FIRST_AT_ITS_PLACE else ())
            if op.name == "constrain":
                split = op.params["layout"].splitting
                self.constrained.update((x.id, d) for x in op.outputs for d in range(len(x.shape)) if split(d))
            self._add_shifts(op, constants, weight)

    def _add_shifts(self, op: Op, constants: Constants, weight: float) -> None:
        if isinstance(op.inputs[0] if op.inputs else None, Value) and updated_window(op, constants):
            for d, n in enumerate(op.outputs[0].shape):
                self.join(((op.inputs[0].id, d), (op.outputs[0].id, d)))
                self.size.update({(op.inputs[0].id, d): n, (op.outputs[0].id, d): n})
        for i, d, j, e, start, step in shifted_dims(op, constants):
            x, y = op.inputs[i], op.outputs[j]
            if isinstance(x, Value) and not jnp.issubdtype(x.dtype, jax.dtypes.extended):
                self.size.update({(x.id, d): x.shape[d], (y.id, e): y.shape[e]})
                self.shifts.append(Shift((x.id, d), (y.id, e), start, step, weight * x.bytes / max(1, x.shape[d])))


def aligned_groups(op: Op) -> list[DimGroup]:
    """Returns the dim groups of an operation that can be put on a grid."""
    return [group for group in dim_groups(op) if group.column is None]


def _value_dims(op: Op, atoms: tuple[Atom, ...], group: DimGroup) -> Iterator[ValueDim]:
    """The dims of values that a group ties, inside bodies too."""
    yield from ((atoms[i].id, d) for i, d in group.ports if isinstance(atoms[i], Value))
    for which, (i, d) in group.inside:
        body = op.bodies[which]
        x = (*body.inputs, *body.returned)[i]
        if isinstance(x, Value):
            yield x.id, d


# ---- Grids and offsets -----------------------------------------------------------------------------------------------


def aligned_dims(graph: Graph, roundness: Roundness, far: bool = False) -> dict[ValueDim, Place]:
    """Returns the dims of a graph and its bodies that are put on a grid longer than they are.

    Args:
      roundness: how well the mesh divides a length.
      far: instead of those of nearly equal length, put those on a grid that are much shorter, and only reduced or put
        back, and need not move.
    """
    if not _has_shifts(graph, far):
        return {}
    classes = DimClasses()
    classes.add(graph, 1.0)
    classes.boundary = {classes.find((v.id, d)) for v in graph.inputs for d in range(len(v.shape))}
    size = {classes.find(at): n for at, n in classes.size.items()}
    marks = classes.reduced, classes.fixed, classes.constrained
    reduced, fixed, constrained = ({classes.find(at) for at in marked} for marked in marks)
    shifts = (s for s in classes.shifts if far or s.step == 1)
    ends = [(classes.find(s.source), classes.find(s.result), s) for s in shifts]
    places: dict[ValueDim, Place] = {}
    if far:
        near = {*map(classes.find, classes.near), *classes.boundary}
        places = {c: p for c, p in _far_places(ends, size, reduced, roundness).items() if c not in near}
        places = {c: p for c, p in places.items() if c not in fixed or (p.offset, p.step) == (0, 1)}
    for component in () if far else _components(size, ends):
        own = {size[c] for c in component if c in classes.boundary}
        grid = max((size[c] for c in component), key=lambda n: _suits(n, n in own, roundness))
        kept = {c for c in component if c in constrained and roundness.degree(grid) % roundness.degree(size[c])}
        short = {c for c in component if _gains(size[c], grid, roundness)} - kept
        touching = [(a, b, s) for a, b, s in ends if a in short or b in short]
        put_back = any(a in short and size[b] == grid for a, b, _ in touching)
        if short and (put_back or short & reduced):
            offsets = _offsets(
                {c: grid - size[c] for c in sorted(short)}, fixed, touching, {c for c in component if size[c] == grid}
            )
            places.update((c, Place(grid, offset, size[c])) for c, offset in offsets.items())
    return {at: places[c] for at in classes.size if (c := classes.find(at)) in places}


def _far_places(
    ends: "Ends", size: Mapping[ValueDim, int], reduced: set[ValueDim], roundness: Roundness
) -> dict[ValueDim, Place]:
    """The places of classes that are reduced, or padded, on the one grid to which all of their shifts put them.

    They may put them there at several places, if these are near: then some shifts move a few elements.
    """
    found: dict[ValueDim, set[Place]] = {}
    for a, b, s in ends:
        found.setdefault(a, set()).add(Place(size[b], s.start, size[a], s.step))
        found.setdefault(b, set()).add(Place(size[a], -s.start, size[b], s.step))
    padded = {a for a, b, _ in ends if size[a] < size[b]}
    chosen: dict[ValueDim, Place] = {}
    for c in found.keys() & (reduced | padded):
        in_order = sorted(found[c])
        first, middle, last = in_order[0], in_order[(len(in_order) - 1) // 2], in_order[-1]
        fits = 1 < first.size < first.length <= FARTHEST * first.size
        one_grid = all((p.length, p.step) == (first.length, first.step) for p in in_order)
        near = last.offset - first.offset <= max(1, first.length // SHORTER)
        inside = first.offset >= 0 and last.elements[-1] < last.length
        split_as_well = first.step > 1 and first.step * first.size == first.length and roundness.is_round(first.size)
        if fits and one_grid and near and inside and not split_as_well:
            chosen[c] = middle
    return chosen


def _has_shifts(graph: Graph, far: bool) -> bool:
    """Whether an operation shifts one dim against another of nearly its length; with ``far``, of any other length."""
    constants = Constants(producers(graph))
    pairs = (
        (op.inputs[i].shape[d], op.outputs[j].shape[e], step)
        for op in graph.ops
        for i, d, j, e, _, step in shifted_dims(op, constants)
    )
    return any(n != m and (far or (step == 1 and _near(*sorted((n, m))))) for n, m, step in pairs) or any(
        _has_shifts(body, far) for op in graph.ops for body in op.bodies
    )


Ends = list[tuple[ValueDim, ValueDim, Shift]]  # shifts with the classes of both sides


def _components(size: Mapping[ValueDim, int], ends: Ends) -> list[list[ValueDim]]:
    """The classes that are connected by shifts between nearly equal lengths."""
    joined = DimClasses()
    for a, b, _ in ends:
        if _near(*sorted((size[a], size[b]))):
            joined.join((a, b))
    found: dict[ValueDim, list[ValueDim]] = {}
    for a, b, _ in ends:
        for c in (a, b):
            found.setdefault(joined.find(c), []).append(c)
    return [list(dict.fromkeys(classes)) for classes in found.values()]


def _near(n: int, grid: int) -> bool:
    return n > 0 and grid > 2 and 0 <= grid - n <= max(1, grid // SHORTER)


def _gains(n: int, grid: int, roundness: Roundness) -> bool:
    """Whether a dim of ``n`` elements is easier to split on the grid, and not much longer."""
    few = grid - n <= max(1, grid // (2 * SHORTER)) or roundness.degree(n) < 2 * roundness.enough
    rounder = roundness.degree(n) < roundness.degree(grid) or roundness.devices(n) < roundness.devices(grid)
    return _near(n, grid) and rounder and few


def _suits(n: int, own: bool, roundness: Roundness) -> tuple[int, ...]:
    """A key that is larger for lengths that are easier to split.

    Args:
      own: an argument of the step has this length, which decides among round ones.
    """
    devices = roundness.devices(n)
    return min(devices, roundness.enough), own, devices, roundness.degree(n), n


def _offsets(
    room: Mapping[ValueDim, int], fixed: set[ValueDim], own: Ends, whole: set[ValueDim]
) -> dict[ValueDim, int]:
    """Offsets between 0 and ``room`` at which shifts move the fewest bytes.

    Args:
      fixed: classes whose elements have to stay in front.
      whole: classes that are as long as the grid.
    """
    free = {c: () if c in fixed else range(n + 1) for c, n in room.items()}
    touching: dict[ValueDim, Ends] = {c: [] for c in room}
    for a, b, s in own:
        if (a in room or a in whole) and (b in room or b in whole):
            for c in {a, b} & room.keys():
                touching[c].append((a, b, s))

    def moved(ends: Ends, at: Mapping[ValueDim, int]) -> float:
        found = {(s.source, s.start + at.get(b, 0) - at.get(a, 0)): s.bytes for a, b, s in ends}
        return sum(abs(distance) * size for (_, distance), size in found.items())

    def descend(at: dict[ValueDim, int]) -> tuple[float, dict[ValueDim, int]]:
        changed = True
        while changed:
            changed = False
            for c, choices in free.items():
                costs = {at[c]: moved(touching[c], at)}
                costs.update((x, moved(touching[c], {**at, c: x})) for x in choices if x not in costs)
                best = min(costs, key=lambda x: costs[x])
                changed |= costs[best] < costs[at[c]]
                at[c] = best
        every = [end for end in own if end[0] in room or end[1] in room]
        known = [(a, b, s) for a, b, s in every if (a in room or a in whole) and (b in room or b in whole)]
        return moved(known, at), at

    starts = [{c: 0 if c in fixed else round(share * n) for c, n in room.items()} for share in (0.5, 0, 1)]
    return min(map(descend, starts), key=lambda found: found[0])[1]
