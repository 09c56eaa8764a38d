"""An instruction of HLO, read for interpretation: the types of its result, its operands, its attributes by name.

%gather.2 = f32[4,8]{1,0} gather(%param, %subtract), offset_dims={1}, slice_sizes={1,8}, metadata={...}
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from meshdsl.lowering.hlo.parse import ArrayType, Instruction, arrays, members
from meshdsl.lowering.simulation.numbers import Array

_INTEGER = re.compile(r"-?\d+")
_TOKEN = re.compile(r"[-+\w.]+")
_PAIR = re.compile(r"\(([^,()]+),([^,()]+)\)")
_NAN = re.compile(r"nan\(0x\w+\)")
_LAYOUT = re.compile(r"\]\{([\d,]*)")
_WIDTHS = {"2": 8, "4": 8}  # bits of integers below a byte


class Unreadable(Exception):
    """An instruction that this interpreter does not know; the message says what."""


@dataclass(frozen=True)
class Operation:
    """An instruction and what it says.

    Args:
      instruction: of a computation. read: those that it reads.
    """

    instruction: Instruction
    read: tuple[Instruction, ...] = ()

    @property
    def name(self) -> str:
        """Its name in the module."""
        return self.instruction.name

    @property
    def opcode(self) -> str:
        """Its opcode."""
        return self.instruction.opcode

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of its operands."""
        return self.instruction.operands

    @cached_property
    def types(self) -> list[ArrayType]:
        """The arrays of its result, tuples flattened."""
        return arrays(self.instruction.type)

    @property
    def type(self) -> ArrayType:
        """The only array of its result, or the first."""
        return self.types[0]

    @property
    def kind(self) -> str:
        """The kind of number of its result."""
        return kind_of(self.type.dtype)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of number of its operands."""
        return tuple(kind_of(found[0].dtype) if (found := arrays(x.type)) else "other" for x in self.read)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The dims of its result, major first, as it lies in memory."""
        match = _LAYOUT.search(self.instruction.type)
        minor = [int(n) for n in match.group(1).split(",") if n] if match else []
        return tuple(reversed(minor)) if minor else tuple(range(len(self.type.dims)))

    @cached_property
    def attributes(self) -> dict[str, str]:
        """The text behind the operands, by name."""
        parts = (part.strip() for part in members(f"({self.instruction.attributes})"))
        return {name: value for name, _, value in (part.partition("=") for part in parts) if value}

    def integers(self, name: str) -> tuple[int, ...]:
        """Returns the integers of an attribute; none if it is not stated."""
        return tuple(int(n) for n in _INTEGER.findall(self.attributes.get(name, "")))

    def integer(self, name: str, default: int = 0) -> int:
        """Returns the integer of an attribute."""
        return int(self.attributes.get(name, default))

    def computation(self, name: str) -> str:
        """Returns the name of the computation that it calls as ``to_apply``, ``body``, ..."""
        return self.attributes[name].lstrip("%")

    @cached_property
    def literal(self) -> Array:
        """The value of a constant: floats as float64, rounded to their type, since the text has fewer digits."""
        rest = self.instruction.rest
        text = rest[: len(rest) - len(self.instruction.attributes) - 1]
        if "..." in text:
            raise Unreadable("a constant whose numbers are left out of the text")
        kind = self.kind
        if kind == "complex":
            pairs = _PAIR.findall(text)
            return np.array([complex(float(x), float(y)) for x, y in pairs]).reshape(self.type.dims)
        tokens = _TOKEN.findall(_NAN.sub("nan", text))
        if kind == "bool":
            return np.array([token in ("true", "1") for token in tokens], bool).reshape(self.type.dims)
        if kind == "int":
            return np.array(list(map(int, tokens)), dtype_of(self.type.dtype)).reshape(self.type.dims)
        found = np.array(list(map(float, tokens)), np.float64)
        return found.astype(float_type(self.type.dtype)).astype(np.float64).reshape(self.type.dims)


def float_type(dtype: str) -> Any:
    """Returns the type of floats in numpy: ``f32``, ``bf16``, ``f8e4m3fn``."""
    if dtype == "bf16":
        return ml_dtypes.bfloat16
    size, _, form = dtype[1:].partition("e")
    return getattr(ml_dtypes, f"float{size}_e{form}") if form else np.dtype(f"float{size}")


def kind_of(dtype: str) -> str:
    """Returns ``float``, ``int``, ``bool`` or ``complex``; ``other`` for what holds no numbers."""
    if dtype == "pred":
        return "bool"
    if dtype[0] in "su" and dtype[1:].isdigit():
        return "int"
    return {"f": "float", "b": "float", "c": "complex"}.get(dtype[0], "other")


def dtype_of(dtype: str) -> np.dtype:
    """Returns numpy's dtype of integers and truth values."""
    if dtype == "pred":
        return np.dtype(bool)
    return np.dtype(f"{'int' if dtype[0] == 's' else 'uint'}{_WIDTHS.get(dtype[1:], dtype[1:])}")
