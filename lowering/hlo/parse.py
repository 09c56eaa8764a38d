"""A parser of HLO text: computations, instructions, types, calls, and how often each instruction runs.

module      ::= computation ...                              one of them is the entry
computation ::= [ENTRY] name (parameters) -> type { instruction ... }
instruction ::= [ROOT] name = type opcode(operands), attributes
type        ::= dtype[dims]{layout} | (type, type, ...)
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from math import prod

# ---- Text ------------------------------------------------------------------------------------------------------------


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{\s*$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_BRACKET_OR_COMMA = re.compile(r"[()\[\]{},]")
_PARENTHESIS = re.compile(r"[()]")
_COMMENT = re.compile(r"/\*.*?\*/")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
CALLED = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"')
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_INTEGER = re.compile(r"[su](?:8|16|32|64)\[\](?:\{.*\})?")
_CALLERS = ("while", "call", "fusion", "conditional", "async-start", "custom-call")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    rest: str

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands; some compilers write their types before them."""
        inside = self._brackets
        names = (part.split()[-1] for part in members(inside) if part.strip())
        return tuple(name.lstrip("%") for name in names)

    @cached_property
    def attributes(self) -> str:
        """The text behind the operands."""
        return self.rest[len(self._brackets) - 1 :]

    @cached_property
    def _brackets(self) -> str:
        opened = f"({self.rest}"
        return opened[: _closing(opened, 0) + 1]


@dataclass(frozen=True)
class Module:
    """Computations by name, and the name of the root instruction of each; the first line names the module."""

    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]
    roots: Mapping[str, str]
    head: str = ""


@dataclass(frozen=True)
class ArrayType:
    """One array of a type."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> Fraction:
        """The size of the array; dtypes below a byte count their bits."""
        bits = re.search(r"\d+", self.dtype)
        return Fraction(prod(self.dims) * (int(bits.group()) if bits else {"pred": 8}.get(self.dtype, 0)), 8)


def arrays(type: str) -> list[ArrayType]:
    """Returns every array of a type, tuples flattened."""
    found = _ARRAY.findall(type)
    return [ArrayType(dtype, tuple(int(n) for n in dims.replace("<=", "").split(",") if n)) for dtype, dims in found]


def members(text: str) -> list[str]:
    """Returns the members of a tuple type."""
    parts, depth, start = list[str](), 0, 1
    for match in _BRACKET_OR_COMMA.finditer(text, 1, len(text) - 1):
        char = match.group()
        if char != ",":
            depth += 1 if char in "([{" else -1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start : len(text) - 1]]


def parse_module(text: str) -> Module:
    """Returns the module of HLO ``text``."""
    entry = inside = head = ""
    computations: dict[str, list[Instruction]] = {}
    roots: dict[str, str] = {}
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            inside = match.group(2)
            computations.setdefault(inside, [])
            entry = inside if match.group(1) else entry
        elif inside and (match := _NAME.match(line)):
            computations[inside].append(_instruction(match.group(2), match.group(3)))
            roots |= {inside: match.group(2)} if match.group(1) else {}
        elif line.startswith("HloModule "):
            head = line
    return Module(entry, {name: tuple(lines) for name, lines in computations.items()}, roots, head)


def _instruction(name: str, text: str) -> Instruction:
    text = _COMMENT.sub("", text)
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    match = _OPCODE.match(text, end)
    opcode = match.group(1) if match else ""
    return Instruction(name, text[:end], opcode, text[match.end() :] if match else text[end:])


def _closing(text: str, start: int) -> int:
    depth = 0
    for match in _PARENTHESIS.finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


def called(line: Instruction) -> list[str]:
    """Returns the computations that an instruction calls, without reducers of single elements."""
    if line.opcode in _CALLERS:
        branches = (name.strip().lstrip("%") for match in _BRANCHES.findall(line.rest) for name in match.split(","))
        return [name for _, name in CALLED.findall(line.rest)] + list(branches)
    return []


def trip_count(loop: Instruction, module: Module) -> int | None:
    """Returns the trip count that the compiler states, else the constant in the condition, else None."""
    if match := _TRIPS.search(loop.rest):
        return int(match.group(1))
    condition = next(name for role, name in CALLED.findall(loop.rest) if role == "condition")
    lines = list(_all_lines(condition, module))
    bounds = {line.rest.split(")")[0] for line in lines if line.opcode == "constant" and _INTEGER.fullmatch(line.type)}
    compares = [line for line in lines if line.opcode == "compare"]
    if len(bounds) == len(compares) == 1 and "direction=LT" in compares[0].rest:
        return int(bounds.pop())
    return None


def _all_lines(name: str, module: Module) -> Iterator[Instruction]:
    for line in module.computations.get(name, ()):
        yield line
        for callee in called(line):
            yield from _all_lines(callee, module)


# ---- Execution counts ------------------------------------------------------------------------------------------------
# A loop's body runs as often as the loop's trip count, everything else once; loops with an unknown trip count count
# once, and the instructions inside are marked.


@dataclass(frozen=True)
class InstructionSite:
    """An instruction and how often it runs.

    Args:
      inside: the computation around it.
      trips: executions per run of the program.
      known: every enclosing loop has a known trip count.
    """

    instruction: Instruction
    inside: str
    trips: int = 1
    known: bool = True


def executed(module: Module, wanted: Callable[[Instruction], bool]) -> tuple[InstructionSite, ...]:
    """Returns every wanted instruction reachable from the entry; a TPU's chain of fusions counts once."""

    @cache
    def within(name: str) -> tuple[InstructionSite, ...]:
        lines = module.computations.get(name, ())
        starts = any("AsyncCollectiveStart" in line.rest for line in lines)
        return tuple(site for line in lines if starts or "chain_id=" not in line.rest for site in of(line, name))

    def of(line: Instruction, inside: str) -> Iterator[InstructionSite]:
        if wanted(line):
            yield InstructionSite(line, inside)
            return
        trips = trip_count(line, module) if line.opcode == "while" else 1
        for name in called(line):
            for site in within(name):
                yield replace(site, trips=site.trips * (trips or 1), known=site.known and trips is not None)

    return within(module.entry)
