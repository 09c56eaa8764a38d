"""What the values of a partitioned program are, observed: blocks, copies or partial sums of values of the step.

A value that every device holds is compared with the values of the reference that it may stem from: those of the same
operation of the user's program, and those of its operands. Its type is the first layout under which the numbers agree:

    x=S(0) y=B    the devices along x have the blocks of dim 0, those along y the same
    x=P           the sum over x is the value

A value without a type is nothing that the step computes. That is no fault in itself: a piece of a block on its way to a
neighbour has none. A fault is looked for where a wrong result comes from, see ``faults``.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, permutations, product
from math import prod

import numpy as np

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, P, Placement, S
from meshdsl.lowering.hlo.collectives import scope_in
from meshdsl.lowering.simulation.comparison import differs
from meshdsl.lowering.simulation.interpreter import Unfollowed, Value
from meshdsl.lowering.simulation.numbers import Array, Numbers
from meshdsl.lowering.simulation.operation import Operation
from meshdsl.lowering.simulation.sharding import Blocks

_CANDIDATES = 200  # values of the reference that a value is compared with
_REDUCTIONS = {"sum": P, "max": P("max"), "min": P("min")}
_SOURCES = ("constant", "iota", "partition-id", "replica-id")


@dataclass(frozen=True)
class ObservedType:
    """What the devices hold of a value of the step.

    Args:
      whole: the operation of the reference that computes the value.
      layout: per mesh axis.
      factor: of the value; other than 1, the devices hold a multiple.
      permuted: whether devices hold blocks of each other.
    """

    whole: Operation
    layout: Layout
    factor: Fraction = Fraction(1)
    permuted: bool = False

    @property
    def partial(self) -> tuple[str, ...]:
        """The axes over which it is a partial sum."""
        return self.layout.partial()

    def __str__(self) -> str:
        multiple = f"{self.factor} times " if self.factor != 1 else ""
        moved = ", blocks of other devices" if self.permuted else ""
        return f"{multiple}{self.layout}{moved}"


@dataclass(frozen=True)
class Record:
    """A value of a run: where it was computed first."""

    computation: str
    operation: Operation
    value: Value


class Recording:
    """The values of a run, each instruction's of its first execution; an ``Observer``."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.places: dict[tuple[str, str], int] = {}

    def __call__(self, computation: str, operation: Operation, value: Value) -> None:
        """Records a value."""
        key = computation, operation.name
        if key not in self.places:
            self.places[key] = len(self.records)
            self.records.append(Record(computation, operation, value))

    def of(self, computation: str, name: str) -> Record | None:
        """Returns the record of an instruction, if it was executed."""
        at = self.places.get((computation, name))
        return None if at is None else self.records[at]


class ObservedTypes:
    """The types of the values of a partitioned run.

    Args:
      whole, local: values of the reference and of the partitioned program. numbers: of both. mesh: names the axes.
    """

    def __init__(self, whole: Recording, local: Recording, numbers: Numbers, mesh: Mesh) -> None:
        self._local, self._numbers, self._mesh = local, numbers, mesh
        self._axes = [name for name, size in mesh if size > 1]
        sizes = tuple(size for _, size in mesh)
        places = np.stack(np.unravel_index(np.arange(mesh.size), sizes), 1)
        self._places = {name: places[:, i] for i, (name, _) in enumerate(mesh)}
        self._known: dict[int, ObservedType | None] = {}  # by identity of the array
        self._constant: set[int] = set()
        self._wholes = [each for each in whole.records if isinstance(each.value, np.ndarray)]
        self._named = defaultdict[str, list[Record]](list)
        for each in self._wholes:
            self._named[scope_in(each.operation.instruction.attributes)].append(each)
        self._find()

    def of(self, value: Value) -> ObservedType | None:
        """Returns the type of an array of the partitioned run; None if it has none."""
        return self._known.get(id(value))

    def explained(self, value: Value) -> bool:
        """Returns whether a value is one of the step's, or depends on none of its arguments."""
        if isinstance(value, tuple):
            return all(map(self.explained, value))
        return self.of(value) is not None or id(value) in self._constant

    def constant(self, value: Value) -> bool:
        """Returns whether a value depends on no argument of the step."""
        return id(value) in self._constant

    def faulty(self, record: Record) -> ObservedType | None:
        """Returns the type of a value that has none but for a factor, or for the order of its blocks."""
        if not isinstance(record.value, np.ndarray):
            return None
        for each in self._candidates(record):
            for layout, blocks in self._layouts(record.value.shape[1:], each.value.shape[1:]):
                if (found := self._almost(record.value, each, layout, blocks)) is not None:
                    return found
        return None

    def _find(self) -> None:
        for record in self._local.records:
            if isinstance(record.value, np.ndarray) and id(record.value) not in self._known:
                if self._is_constant(record):
                    self._constant.add(id(record.value))
                else:
                    self._known[id(record.value)] = self._observed(record)

    def _is_constant(self, record: Record) -> bool:
        if record.operation.opcode in _SOURCES or id(record.value) in self._constant:
            return True
        read = [self._local.of(record.computation, name) for name in record.operation.operands]
        is_input = record.operation.opcode in ("parameter", "get-tuple-element", "while", "conditional")
        return bool(read) and not is_input and all(x is not None and id(x.value) in self._constant for x in read)

    def _observed(self, record: Record) -> ObservedType | None:
        value, tried = record.value, set[int]()
        for each in self._candidates(record):
            if id(each.value) in tried or each.value.dtype != value.dtype:
                continue
            tried.add(id(each.value))
            for layout, blocks in self._layouts(value.shape[1:], each.value.shape[1:]):
                if (found := self._agreeing(value, each.value, layout, blocks)) is not None:
                    return ObservedType(each.operation, found)
        return None

    def _candidates(self, record: Record) -> Iterator[Record]:
        """Values of the reference that a value may be of, the likeliest first; zeros are of any, and so of none."""
        rank = record.value.ndim
        scope = scope_in(record.operation.instruction.attributes)
        yield from (each for each in self._named.get(scope, ()) if scope and each.value.ndim == rank)
        if not record.value.any():
            return
        read = [self._local.of(record.computation, name) for name in record.operation.operands]
        wholes = {known.whole.name for x in read if x is not None and (known := self.of(x.value)) is not None}
        yield from (each for each in self._wholes if each.operation.name in wholes and each.value.ndim == rank)
        others = (each for each in self._wholes if each.value.ndim == rank and each.operation.opcode not in _SOURCES)
        yield from (each for each, _ in zip(others, range(_CANDIDATES), strict=False))

    # ---- Layouts -----------------------------------------------------------------------------------------------------

    def _layouts(self, local: Sequence[int], whole: Sequence[int]) -> Iterator[tuple[dict[str, Placement], Blocks]]:
        """The ways to divide dims over axes that lead from one shape to the other."""
        dims = [d for d, (m, n) in enumerate(zip(local, whole, strict=True)) if m != n]
        if any(local[d] > whole[d] for d in dims):
            return
        for chosen in product([None, *dims], repeat=len(self._axes)):
            sizes = [
                prod(self._mesh.axis(a) for a, c in zip(self._axes, chosen, strict=True) if c == d)
                for d in range(len(whole))
            ]
            if any(-(-n // size) != m for m, n, size in zip(local, whole, sizes, strict=True)):
                continue
            split = [(a, d) for a, d in zip(self._axes, chosen, strict=True) if d is not None]
            shared = len({d for _, d in split}) < len(split)
            for order in permutations(split) if shared else [tuple(split)]:
                places = np.zeros((self._mesh.size, len(whole)), np.int64)
                for axis, d in order:
                    places[:, d] = places[:, d] * self._mesh.axis(axis) + self._places[axis]
                yield {axis: S(d) for axis, d in order}, Blocks(tuple(sizes), places)

    def _agreeing(self, value: Array, whole: Array, split: dict[str, Placement], blocks: Blocks) -> Layout | None:
        """The layout under which a value is one of the step, with partial sums over axes that divide nothing."""
        expected = blocks.cut(whole)
        if not differs(self._numbers, value, expected):
            return self._layout(split)
        if value.dtype == bool:
            return None
        free = [axis for axis in self._axes if axis not in split]
        for count in range(1, len(free) + 1):
            for axes in combinations(free, count):
                for kind, placed in _REDUCTIONS.items():
                    if not differs(self._numbers, self._reduced(value, axes, kind), expected):
                        return self._layout(split, dict.fromkeys(axes, placed))
        return None

    def _layout(self, split: dict[str, Placement], partial: dict[str, Placement] | None = None) -> Layout:
        placed = dict.fromkeys(self._axes, B) | split | (partial or {})
        shared = len(set(split.values())) < len(split)  # axes of one dim are written major first
        order = [*split, *(axis for axis in self._axes if axis not in split)] if shared else self._axes
        return Layout(**{axis: placed[axis] for axis in order})

    def _reduced(self, value: Array, axes: Sequence[str], kind: str) -> Array:
        """A value reduced over axes, for every device."""
        sizes = tuple(size for _, size in self._mesh)
        value = np.broadcast_to(value, (self._mesh.size, *value.shape[1:]))
        grid = value.reshape(*sizes, *value.shape[1:])
        dims = tuple(self._mesh.names.index(axis) for axis in axes)
        floats = value.dtype == self._numbers.dtype
        if kind == "sum":
            made = self._numbers.total(grid, dims) if floats else grid.sum(dims, dtype=value.dtype)
        else:
            keys = self._numbers.order(grid) if floats else grid
            made = (np.max if kind == "max" else np.min)(keys, axis=dims)
            made = self._numbers.ordered(made) if floats else made
        return np.broadcast_to(np.expand_dims(made, dims), grid.shape).reshape(value.shape)

    def _almost(self, value: Array, whole: Record, split: dict[str, Placement], blocks: Blocks) -> ObservedType | None:
        expected = blocks.cut(whole.value)
        if value.dtype != whole.value.dtype or value.dtype == bool or not any(block.any() for block in expected):
            return None
        for factor in range(2, self._mesh.size + 1):
            if not differs(self._numbers, value, [self._times(block, factor) for block in expected]):
                return ObservedType(whole.operation, self._layout(split), Fraction(factor))
            if not differs(self._numbers, self._times(value, factor), expected):
                return ObservedType(whole.operation, self._layout(split), Fraction(1, factor))
        if len(value) > 1 and split and len({block.shape for block in expected}) == 1:
            taken = [any(not differs(self._numbers, own[None], [block]) for block in expected) for own in value]
            if all(taken):
                return ObservedType(whole.operation, self._layout(split), permuted=True)
        return None

    def _times(self, x: Array, factor: int) -> Array:
        if x.dtype != self._numbers.dtype:
            return x * x.dtype.type(factor)
        return self._numbers.multiply(x, self._numbers.of(np.array(factor)))


def unfollowed(value: Value) -> Unfollowed | None:
    """Returns why a value could not be computed, if it could not."""
    parts = value if isinstance(value, tuple) else (value,)
    return next((x for x in parts if isinstance(x, Unfollowed)), None)
