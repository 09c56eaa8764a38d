"""A partitioned program run on simulated devices beside the program that it was made of, on the same random inputs.

The reference is the module that the partitioner was given: whole arrays, with shardings as annotations. Each device of
the partitioned module gets its blocks of the reference's arguments, and its results have to be its blocks of the
reference's results.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshdsl.lowering.hlo.parse import Instruction, Module, arrays, members
from meshdsl.lowering.simulation import contraction, exchange, indexing, pointwise, shaping, windows
from meshdsl.lowering.simulation.interpreter import Devices, Observer, Unfollowed, Value
from meshdsl.lowering.simulation.numbers import Array, Numbers, PrimeField, Reals
from meshdsl.lowering.simulation.operation import Operation, Unreadable, dtype_of, kind_of
from meshdsl.lowering.simulation.sharding import Blocks, blocks_of

FUNCTIONS = {
    **pointwise.FUNCTIONS,
    **shaping.FUNCTIONS,
    **contraction.FUNCTIONS,
    **windows.FUNCTIONS,
    **indexing.FUNCTIONS,
    **exchange.FUNCTIONS,
}
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
      reference: the module before the partitioner. partitioned: after it.
      count: the number of devices.
    """

    reference: Module
    partitioned: Module
    count: int

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
        entered = [self._blocks(x, parameter) for x, parameter in zip(given, self._parameters, strict=True)]
        expected = Devices(self.reference, self.count, numbers, FUNCTIONS, limit, whole).run(given)
        found = Devices(self.partitioned, self.count, numbers, FUNCTIONS, limit, local).run(entered)
        ends = zip(_flat(expected), _flat(found), self.result_blocks(), strict=True)
        return [self._judged(i, numbers, *end) for i, end in enumerate(ends)]

    def arguments(self, numbers: Numbers, seed: int, below: int | None = None) -> list[Value]:
        """Returns random arguments of the reference: small integers, since they may be indices."""
        rng = np.random.default_rng(seed)
        lengths = [n for line in self._parameters for x in arrays(line.type) for n in x.dims]
        return [self._argument(line, numbers, rng, below or max(lengths, default=1)) for line in self._parameters]

    @staticmethod
    def _argument(line: Instruction, numbers: Numbers, rng: np.random.Generator, longest: int) -> Value:
        (made,) = arrays(line.type)
        kind, shape = kind_of(made.dtype), (1, *made.dims)
        if kind == "float":
            return numbers.random(rng, shape)
        if kind == "bool":
            return rng.integers(0, 2, shape).astype(bool)
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
        return np.where(rng.random(shape) < 0.5, wide, wide % _SMALL).astype(dtype)

    @property
    def _parameters(self) -> list[Instruction]:
        """The parameters of the reference, in order."""
        found = [line for line in self.reference.computations[self.reference.entry] if line.opcode == "parameter"]
        return sorted(found, key=lambda line: int(line.rest.split(")")[0]))

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
        entry = self.reference.entry
        root = next(x for x in self.reference.computations[entry] if x.name == self.reference.roots[entry])
        shapes = arrays(root.type)
        text = Operation(root).attributes.get("sharding", "{replicated}")
        texts = members(text) if text.startswith("{{") else [text] * len(shapes)
        return [blocks_of(each, len(x.dims), self.count) for each, x in zip(texts, shapes, strict=True)]

    @staticmethod
    def _judged(index: int, numbers: Numbers, expected: Value, found: Value, blocks: Blocks) -> ResultCheck:
        if unknown := next((x for x in (expected, found) if isinstance(x, Unfollowed)), None):
            return ResultCheck(index, False, False, unknown)
        return ResultCheck(index, differs(numbers, found, blocks.cut(expected)), isinstance(numbers, Reals))


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


def _flat(value: Value) -> list[Value]:
    return [x for part in value for x in _flat(part)] if isinstance(value, tuple) else [value]
