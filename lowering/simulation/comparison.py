"""A partitioned program run on simulated devices beside the program that it was made of, on the same random inputs.

The reference is the module that the partitioner was given: whole arrays, with shardings as annotations. Each device of
the partitioned module gets its blocks of the reference's arguments, and its results have to be its blocks of the
reference's results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from meshdsl.lowering.hlo.parse import Instruction, Module, arrays, members
from meshdsl.lowering.simulation import contraction, exchange, indexing, pointwise, shaping, windows
from meshdsl.lowering.simulation.interpreter import Body, Devices, Observer, Unfollowed, Value
from meshdsl.lowering.simulation.numbers import Array, Numbers, PrimeField, Reals, RoundedConstants
from meshdsl.lowering.simulation.operation import Operation, Unreadable, dtype_of, float_type, kind_of
from meshdsl.lowering.simulation.sharding import Blocks, blocks_of

FUNCTIONS = {
    **pointwise.FUNCTIONS,
    **shaping.FUNCTIONS,
    **contraction.FUNCTIONS,
    **windows.FUNCTIONS,
    **indexing.FUNCTIONS,
    **exchange.FUNCTIONS,
}
_NUDGE = 1e-12  # relative to an argument
_SMALL = 8  # half of the integers are below this, where indices are likely to be inside of arrays


@dataclass(frozen=True)
class ResultCheck:
    """A result of the partitioned program beside that of the reference.

    Args:
      index: its place among the results.
      differs: whether a device has another block than it should have.
      rounded: whether numbers are rounded, so that it may differ by chance.
      unfollowed: why it is not known, if it is not.
    """

    index: int
    differs: bool
    rounded: bool
    unfollowed: Unfollowed | None = None


@dataclass(frozen=True)
class ProgramPair:
    """A partitioned program and what it was made of.

    Args:
      reference: the module before the partitioner, or that of the step on one device. partitioned: what is compared.
      count: the number of devices.
      ends: the module whose parameters and results state how blocks are cut, default is the reference.
      kept: the arguments of the reference that the partitioned program takes, and ``ends``; default is all.
      given: arguments that are not random, by their places: integers and truth values.
    """

    reference: Module
    partitioned: Module
    count: int
    ends: Module | None = None
    kept: tuple[int, ...] | None = None
    given: Mapping[int, Array] = field(default_factory=dict)

    def compare(
        self,
        numbers: Numbers,
        seed: int,
        limit: float,
        whole: Observer | None = None,
        local: Observer | None = None,
        below: int | None = None,
    ) -> list[ResultCheck]:
        """Run both, and return what becomes of every result.

        Args:
          numbers: what floats are. seed: of the arguments. limit: elements that may be computed.
          whole, local: are told every value of the reference, and of the partitioned program.
          below: bound of all integers among the arguments; default is the longest dim, for half of them ``_SMALL``.

        Raises:
          TooLarge: more elements would be computed.
          Unreadable: the parameters or results of the modules are in no notation that is known.
        """
        given = self.arguments(numbers, seed, below)
        taken = given if self.kept is None else [given[i] for i in self.kept]
        lines = _parameters(self.reference) if self.ends is None else _parameters(self.ends)
        if self.ends is None and self.kept is not None:
            lines = [lines[i] for i in self.kept]
        entered = [self._blocks(x, parameter) for x, parameter in zip(taken, lines, strict=True)]
        before, after = self._bodies
        expected = Devices(self.reference, self.count, numbers, FUNCTIONS, limit, whole, before).run(given)
        found = Devices(self.partitioned, self.count, numbers, FUNCTIONS, limit, local, after).run(entered)
        blocks = self.result_blocks()
        results = zip(_flat(expected, len(blocks)), _flat(found, len(blocks)), blocks, strict=True)
        return [self._judged(i, numbers, *result) for i, result in enumerate(results)]

    @cached_property
    def _bodies(self) -> tuple[dict[str, Body], dict[str, Body]]:
        """Computations of both modules, read once for all runs."""
        return {}, {}

    def unstable(self, seed: int, limit: float) -> set[int]:
        """Returns the results of the reference that rounding errors change, in float64, for a seed.

        Errors are of its arguments, which change iterations that do not converge for random numbers, and of its
        constants, which change what would otherwise cancel, such as a sum of deviations from a mean.
        """
        numbers, rng = Reals(), np.random.default_rng(seed)
        given = self.arguments(numbers, seed)
        nudged = [
            x * (1 + _NUDGE * rng.standard_normal(x.shape)) if isinstance(x, np.ndarray) and x.dtype.kind in "fc" else x
            for x in given
        ]
        tried = (numbers, given), (RoundedConstants(rng), nudged)
        runs = (Devices(self.reference, self.count, each, FUNCTIONS, limit).run(x) for each, x in tried)
        count = len(self.result_blocks())
        pairs = enumerate(zip(*(_flat(run, count) for run in runs), strict=True))
        return {
            i for i, (a, b) in pairs if any(isinstance(x, Unfollowed) for x in (a, b)) or differs(numbers, b, [a[0]])
        }

    def arguments(self, numbers: Numbers, seed: int, below: int | None = None) -> list[Value]:
        """Returns arguments of the reference, random if none are given: small integers, since they may be indices."""
        rng = np.random.default_rng(seed)
        lines = _parameters(self.reference)
        longest = below or max((n for line in lines for x in arrays(line.type) for n in x.dims), default=1)
        return [
            self.given[i].astype(dtype_of(arrays(line.type)[0].dtype))[None]
            if i in self.given
            else self._argument(line, numbers, rng, longest, (i + seed) % 2, seed // 2 % 2)
            for i, line in enumerate(lines)
        ]

    def result(self) -> Operation:
        """Returns the operation of the partitioned program that makes its results."""
        module = self.partitioned
        root = module.roots[module.entry]
        return Operation(next(line for line in module.computations[module.entry] if line.name == root))

    def drawn_integer(self) -> Operation | None:
        """Returns the first argument that consists of random integers, which may be indices."""
        lines = enumerate(_parameters(self.reference))
        drawn = (Operation(line) for i, line in lines if i not in self.given)
        return next((each for each in drawn if each.kind == "int"), None)

    @staticmethod
    def _argument(
        line: Instruction, numbers: Numbers, rng: np.random.Generator, longest: int, turn: int, small: int
    ) -> Value:
        """A random argument; numbers that may choose a branch take turns, so that two inputs enter two branches."""
        (made,) = arrays(line.type)
        kind, shape = kind_of(made.dtype), (1, *made.dims)
        if kind == "float":
            drawn = numbers.random(rng, shape)
            if isinstance(numbers, PrimeField):
                return drawn
            drawn = np.abs(drawn) if made.dtype == "f8e8m0fnu" else drawn  # it has no sign
            return drawn.astype(float_type(made.dtype)).astype(np.float64)
        if kind == "bool":
            return rng.integers(0, 2, shape).astype(bool) if made.dims else np.array([turn == 0])
        if kind == "complex":
            if isinstance(numbers, PrimeField):
                return Unfollowed(Operation(line), "complex numbers")
            return numbers.random(rng, shape) + 1j * numbers.random(rng, shape)
        if kind != "int":
            raise Unreadable(f"an argument of type {line.type}")
        dtype = dtype_of(made.dtype)
        if dtype == np.uint32 and made.dims[-1:] == (2,):  # a key of random numbers
            return rng.integers(0, 2**32, shape, dtype=np.uint32)
        wide = rng.integers(0, min(longest, np.iinfo(dtype).max), shape)
        if not made.dims:
            return wide.astype(dtype) if turn else np.array([small], dtype)
        return np.where(rng.random(shape) < 0.5, wide, wide % _SMALL).astype(dtype)

    def _blocks(self, x: Value, parameter: Instruction) -> Value:
        if isinstance(x, Unfollowed):
            return x
        text = Operation(parameter).attributes.get("sharding", "{replicated}")
        blocks = blocks_of(text, x.ndim - 1, self.count)
        if all(count == 1 for count in blocks.counts):
            return x
        if any(n % count for n, count in zip(x.shape[1:], blocks.counts, strict=True)):
            raise Unreadable("an argument that is divided unevenly")
        return np.stack(blocks.cut(x))

    def result_blocks(self) -> list[Blocks]:
        """Returns which blocks of the results the devices have to have."""
        ends = self.ends or self.reference
        root = next(x for x in ends.computations[ends.entry] if x.name == ends.roots[ends.entry])
        shapes = arrays(root.type)
        text = Operation(root).attributes.get("sharding", "{replicated}")
        texts = members(text) if text.startswith("{{") else [text] * len(shapes)
        return [blocks_of(each, len(x.dims), self.count) for each, x in zip(texts, shapes, strict=True)]

    @staticmethod
    def _judged(index: int, numbers: Numbers, expected: Value, found: Value, blocks: Blocks) -> ResultCheck:
        if unknown := next((x for x in (expected, found) if isinstance(x, Unfollowed)), None):
            return ResultCheck(index, False, False, unknown)
        return ResultCheck(index, differs(numbers, found, blocks.cut(expected)), isinstance(numbers, Reals))


def _parameters(module: Module) -> list[Instruction]:
    """The parameters of a module, in order."""
    found = [line for line in module.computations[module.entry] if line.opcode == "parameter"]
    return sorted(found, key=lambda line: int(line.rest.split(")")[0]))


def differs(numbers: Numbers, found: Array, blocks: Sequence[Array]) -> bool:
    """Returns whether any device has other numbers than its block; what lies beyond the block does not count."""
    for device, block in enumerate(blocks):
        own = found[min(device, len(found) - 1)]
        if any(n < m for n, m in zip(own.shape, block.shape, strict=True)):
            return True
        own = own[tuple(slice(n) for n in block.shape)]
        if (numbers.differ(own, block) if block.dtype in (numbers.dtype, np.complex128) else own != block).any():
            return True
    return False


def _flat(value: Value, count: int) -> list[Value]:
    """The results of an entry; of one operation that makes them all, and cannot be followed, that for each."""
    if isinstance(value, Unfollowed):
        return [value] * count
    return list(value) if isinstance(value, tuple) else [value]
