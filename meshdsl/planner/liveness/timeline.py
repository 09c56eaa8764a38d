"""A program as arrays for liveness, and the copies of its values under a choice of layouts.

Plans of a program differ only in which copies of its values there are, and how large they are. Which op uses which
value at which position, which ops are fused and which values may share memory (``aliasing``) is equal for all plans.
It is worked out once (``Timeline``), so that the memory of a plan takes a few passes over arrays
(``liveness_kernels``).

Positions, values and uses are numbered by ``ir.index.GraphIndex``. Copies are numbered, too: the copy of a value in
the layout of its producer has the number of the value, and resharded copies have the numbers after these.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.ir.graph import Graph
from meshdsl.ir.host import hosted_values
from meshdsl.ir.index import Flags, GraphIndex, Use
from meshdsl.ir.rings import ProductRing
from meshdsl.ir.solution import Bucket
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.reshard import ReshardStep
from meshdsl.planner.liveness.aliasing import BufferAliases, OperandUses, buffer_aliases
from meshdsl.util.arrays import Ids, index_array, object_id
from meshdsl.util.lazy import memoize_by_object

# ---- Facts of a program ----------------------------------------------------------------------------------------------


class TimelineArrays(NamedTuple):
    """The arrays that the compiled loops need.

    Args:
      first_use: [positions + 1], the first use at each.
      runs_at: [positions], the one at which an op runs.
      is_entry: [positions], whether inputs enter there.
      is_input: [values].
      materialized: [values], whether they are written to memory.
      viewed: uses of values that are viewed, the last ones first.
      views: the value that is the view, for each.
      reuse_at: positions of results that may overwrite an operand, in order.
      reuse_results: these results.
      reuse_options: [results + 1], the first option of each.
      reuse_uses: [options], uses that may be overwritten.
      carried: inputs of bodies that share the memory of a carry.
      carried_back: the use that returns the carry, for each; -1 for a literal.
      returned: uses that return a value directly as a result of the enclosing op; -1 for a literal.
    """

    first_use: Ids
    runs_at: Ids
    is_entry: Flags
    is_input: Flags
    materialized: Flags
    viewed: Ids
    views: Ids
    reuse_at: Ids
    reuse_results: Ids
    reuse_options: Ids
    reuse_uses: Ids
    carried: Ids
    carried_back: Ids
    returned: Ids


class HalfWidth(NamedTuple):
    """Which copies are stored in 16 bits instead of 32 (see ``OperandUses``).

    Args:
      uses: copies that these use are, ...
      full_uses: ... except those that one of these uses;
      values: the producers' copies of these values are, ...
      full_values: ... and those of these are not.
    """

    uses: Ids
    full_uses: Ids
    values: Ids
    full_values: Ids


class Timeline:
    """The facts of a program that are equal for all plans.

    Attributes:
      index: positions, values and uses.
      step: range of the outermost graph.
      has_memory: [values], whether the producer's copy takes memory: materialized values, and inputs that are not in
        the memory of an enclosing graph.
      ruled: positions of ops with custom rules, which need workspaces.
      filled_early: values that have memory before they are produced, ...
      filled_at: ... and the position from which on.
    """

    def __init__(self, graph: Graph, aliases: BufferAliases) -> None:
        self.index = index = aliases.index
        self.step = index.root
        self.ruled = tuple(np.flatnonzero(index.positions_named(["ruled"])).tolist())
        self.arrays = _arrays(aliases)
        blocks = zip(index.blocks, aliases.bodies, strict=True)
        sliced = (index.first_result[block.start - 1] + i for block, body in blocks for i in sorted(body.sliced))
        self.has_memory = np.where(self.arrays.is_input, index.mask(index_array(sliced)), self.arrays.materialized)
        self.filled_early = aliases.filled_early
        starts = index_array(block.start for block in index.blocks)
        self.filled_at = starts[index.block_of[index.producer[self.filled_early]]]
        self.half_width = _half_width(index, aliases.operand_uses, graph)
        self._hosted = index.mask_of(hosted_values(graph))

    def never_overwritten(self, donated: Iterable[int]) -> Flags:
        """Returns a mask of the inputs on the device that no result overwrites; those at some positions are donated."""
        fixed = self.arrays.is_input & ~self._hosted
        fixed[self.arrays.carried] = False
        fixed[list(donated)] = False
        return fixed


@memoize_by_object
def timeline_of(graph: Graph, backend: str) -> Timeline:
    """Returns the facts of a program for a backend, which are worked out once."""
    return Timeline(graph, buffer_aliases(graph, backend))


def _arrays(aliases: BufferAliases) -> TimelineArrays:
    index, is_entry = aliases.index, np.array([op is None for op in aliases.index.ops])
    blocks = list(zip(index.blocks, aliases.bodies, strict=True))

    views, at = aliases.views[::-1], index.first_result[aliases.views[::-1]]
    viewed = index.use_numbers_at(views, np.zeros_like(views))
    is_view = viewed >= 0
    is_view[is_view] = index.element_counts[index.use_value[viewed[is_view]]] == index.element_counts[at[is_view]]

    carries = ((b.start - 1, i, b.stop - 1, back) for b, body in blocks for i, back in body.carried)
    entries, inputs, ends, back = index_array(chain.from_iterable(carries)).reshape(-1, 4).T
    returned = ((block.stop - 1, i) for block, body in blocks for i in body.returned)
    return TimelineArrays(
        index.first_use,
        aliases.runs_at,
        is_entry,
        is_entry[index.producer],
        aliases.materialized,
        viewed[is_view],
        at[is_view],
        *aliases.reuses,
        index.first_result[entries] + inputs,
        index.use_numbers_at(ends, back),
        index.use_numbers_at(*index_array(chain.from_iterable(returned)).reshape(-1, 2).T),
    )


def _half_width(index: GraphIndex, uses: OperandUses, graph: Graph) -> HalfWidth:
    inputs = {v.id for v in graph.inputs}
    return HalfWidth(
        index.use_numbers(uses.all),
        index.use_numbers(uses.full),
        index.numbers_of(uses.values - uses.full_values - inputs),
        index.numbers_of(uses.full_values | inputs),
    )


# ---- Copies under a choice of layouts --------------------------------------------------------------------------------

NOWHERE = -2  # last position of a copy without memory


class ReshardedCopies(NamedTuple):
    """Reshard steps, in order: the value of each, and the numbers of the layouts before and after."""

    values: Ids
    before: Ids
    after: Ids


class Copies(NamedTuple):
    """All copies of a program.

    Args:
      values: of each copy.
      layouts: of each copy.
      sources: the copy that it is resharded from, or -1.
      bytes: per device.
      used: [uses], the copy that is used.
    """

    values: Ids
    layouts: Ids
    sources: Ids
    bytes: Ids
    used: Ids


@dataclass(frozen=True, eq=False)
class CopyTimeline:
    """A program under a choice of layouts.

    Args:
      layouts: all that occur; elsewhere they are numbered by their positions here.
      own: [values], the layout of the producer.
      used: [uses], the layout that the consumer needs.
      resharded: the steps that make these copies.
      buckets: steps that are sent as one, all in front of one operation.
      rings: products that run in parts.
      rounded: per step in fewer bits, the position of the value, the layout that it leads to, and bytes of the parts.
    """

    timeline: Timeline
    mesh: Mesh
    layouts: Sequence[Layout]
    own: Ids
    used: Ids
    resharded: ReshardedCopies
    buckets: Sequence[Bucket] = ()
    rings: Sequence[ProductRing] = ()
    rounded: Sequence[tuple[int, int, int]] = ()

    @cached_property
    def copies(self) -> Copies:
        """The copies that are produced or used."""
        count, use_value = self.own.size, self.timeline.index.use_value
        values = np.concatenate((use_value, self.resharded.values, self.resharded.values))
        layouts = np.concatenate((self.used, self.resharded.before, self.resharded.after))
        others = layouts != self.own[values]
        keys, at = np.unique(values[others] * len(self.layouts) + layouts[others], return_inverse=True)
        numbers = values.copy()
        numbers[others] = count + at
        used, before, after = np.split(numbers, [use_value.size, use_value.size + self.resharded.values.size])
        sources = np.full(count + keys.size, -1)
        sources[after[::-1]] = before[::-1]  # of several steps to one layout, the first
        values = np.concatenate((np.arange(count), keys // len(self.layouts)))
        layouts = np.concatenate((self.own, keys % len(self.layouts)))
        bits = np.where(self._is_half_width(used, values.size), 16, self.timeline.index.bits[values])
        return Copies(values, layouts, sources, -(-bits * self._elements(values, layouts) // 8), used)

    @cached_property
    def sent_together(self) -> tuple[tuple[int, Ids, int], ...]:
        """Per bucket, the position where it is sent, the copies that are there from then on, and its workspace."""
        if not self.buckets:
            return ()
        index, copies, number = self.timeline.index, self.copies, self._number
        position = {op.id: at for at, op in enumerate(index.ops) if op}
        found = []
        for bucket in self.buckets:
            made = list[int]()
            for value, layout in bucket.steps:
                copy = number[index.number_of(value), self.layouts.index(layout)]
                while copy >= self.own.size:  # what it is made from, too
                    made.append(copy)
                    copy = int(copies.sources[copy])
            found.append((position[bucket.before], index_array(made), bucket.workspace))
        return tuple(found)

    @cached_property
    def _number(self) -> dict[tuple[int, int], int]:
        """The number of a copy by value and layout."""
        values, layouts = self.copies.values.tolist(), self.copies.layouts.tolist()
        return dict(zip(zip(values, layouts, strict=True), count(), strict=False))

    @cached_property
    def rounded_parts(self) -> tuple[tuple[int, int], ...]:
        """Per step in fewer bits, the copy that it makes and the bytes of the parts that it is made from."""
        return tuple((self._number[value, layout], size) for value, layout, size in self.rounded)

    @cached_property
    def in_parts(self) -> tuple[tuple[int, int], ...]:
        """Per ring, the position where it runs, and its workspace."""
        position = {op.id: at for at, op in enumerate(self.timeline.index.ops) if op} if self.rings else {}
        return tuple((position[ring.products[0].op.id], ring.workspace) for ring in self.rings)

    def part(self, value: int) -> tuple[int, int]:
        """Returns the elements of a value's own copy on one device, and all of its elements."""
        (local,) = self._elements(np.array([value]), self.own[[value]]).tolist()
        return local, max(1, prod(self.timeline.index.values[value].shape))

    def _is_half_width(self, used: Ids, count: int) -> NDArray[np.bool_]:
        """Returns a mask of the copies that are stored in 16 bits instead of 32."""
        half, found = self.timeline.half_width, np.zeros(count, dtype=np.bool_)
        found[used[half.uses]] = True
        found[used[half.full_uses]] = False
        found[half.full_values] = False
        found[half.values] = True
        return found

    def _elements(self, values: Ids, layouts: Ids) -> Ids:
        """Returns the elements of values in layouts that one device holds; each (shape, layout) is computed once."""
        shapes, sizes = self.timeline.index.shapes, self.mesh.sizes_by_name
        pairs = self.timeline.index.shape[values] * len(self.layouts) + layouts
        elements = np.zeros(len(shapes) * len(self.layouts), dtype=np.intp)
        elements[pairs] = 1
        for key in np.flatnonzero(elements).tolist():
            shape, layout = divmod(key, len(self.layouts))
            elements[key] = prod(self.layouts[layout].local_shape(shapes[shape], sizes))
        return np.asarray(elements[pairs])


def copy_timeline(
    graph: Graph,
    mesh: Mesh,
    own: Mapping[int, Layout],
    uses: Mapping[Use, Layout],
    trees: Mapping[int, Sequence[ReshardStep]],
    buckets: Sequence[Bucket] = (),
    rings: Sequence[ProductRing] = (),
) -> CopyTimeline:
    """Returns a program under a choice of layouts.

    Args:
      own: per value id, the layout of the producer.
      uses: per use, the layout that the consumer needs.
      trees: per value id, the reshard steps that make its other copies.
      buckets: steps that are sent as one.
      rings: products that run in parts.
    """
    timeline, layouts = timeline_of(graph, mesh.topology.backend), dict[Layout, int]()
    values = timeline.index.values
    steps = [(i, step) for i, v in enumerate(values) for step in trees.get(v.id, ())]

    def numbers(of: Iterable[Layout]) -> Ids:
        found = list(of)
        distinct = {object_id(layout): layout for layout in found}  # most are one of few objects
        number = {key: layouts.setdefault(layout, len(layouts)) for key, layout in distinct.items()}
        return index_array(map(number.__getitem__, map(object_id, found)))

    produced, used = numbers(own[v.id] for v in values), numbers(map(uses.__getitem__, timeline.index.uses))
    ends = numbers(step.before for _, step in steps), numbers(step.after for _, step in steps)
    resharded = ReshardedCopies(index_array(i for i, _ in steps), *ends)
    sizes = mesh.sizes_by_name
    rounded = [(i, layouts[step.after], step.rounded_bytes(sizes)) for i, step in steps if step.format]
    return CopyTimeline(timeline, mesh, tuple(layouts), produced, used, resharded, buckets, rings, rounded)
