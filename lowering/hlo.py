"""Collectives of a compiled program, read from its HLO text, loops counted.

    computation ::= name (parameters) -> type { instruction ... }
    instruction ::= name = type opcode(operands), attributes

Collectives stand in the entry computation or in one that is called from it: a loop's body
runs as often as the loop's trip count says, everything else once. What one device sends
follows from the type of the result, with the formulas of the move table:

    all-gather          R (k-1)/k         R = bytes of the result, k = devices of a group
    all-reduce          2 R (k-1)/k
    reduce-scatter      R (k-1)
    all-to-all          R (k-1)/k
    collective-permute  R

This works for any program, also for those that the XLA partitioner made: groups that are no
product of mesh axes are reported with ``axes=None`` and their size.

Backends differ in details that are undone here: asynchronous ``-start``/``-done`` pairs count
once, several tensors combined into one instruction count with all their bytes, and a CPU sends
bfloat16 as float32 (the instruction's scope tells the planned dtype; see ``promoted``).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.groups import axes_of_groups, axes_of_pairs, replica_groups, source_target_pairs

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{\s*$")
_NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"')
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SCOPE = re.compile(rf"(?:{'|'.join(KINDS)})\([\w,]*\) (\w+)")
_CONSTANT = re.compile(r"^[su](?:8|16|32|64)\[\]")


@dataclass(frozen=True)
class CompiledCollective:
    """A collective in a compiled program.

    Args:
      kind: as in a plan. axes: mesh axes in mesh order; None if the groups are no axes.
      group: devices that exchange. bytes: what one device sends per trip.
      trips: executions per run of the program; loops of unknown length count once.
      known: every enclosing loop has a known trip count.
      promoted: sent in float32 by this backend, counted in the narrower dtype of the plan.
      scope: the name stack it was traced under.
    """

    kind: str
    axes: tuple[str, ...] | None
    group: int
    bytes: Fraction
    trips: int
    known: bool
    promoted: bool
    scope: str


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    rest: str


@dataclass(frozen=True)
class Module:
    """Computations by name."""

    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]


def compiled_collectives(text: str, mesh: Mesh) -> tuple[CompiledCollective, ...]:
    """Every collective of the program with compiled HLO ``text`` that joins more than one device."""
    module = parse_module(text)
    found = (_collective(site, mesh) for site in _sites(module))
    return tuple(c for c in found if c.group > 1)


def parse_module(text: str) -> Module:
    """The computations of HLO ``text``."""
    entry, computations, body = "", {}, None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            body = computations.setdefault(match.group(2), [])
            entry = match.group(2) if match.group(1) else entry
        elif body is not None and (match := _NAME.match(line)):
            body.append(_instruction(match.group(1), match.group(2)))
    return Module(entry, {name: tuple(lines) for name, lines in computations.items()})


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    match = _OPCODE.match(text, end)
    opcode = match.group(1) if match else ""
    return Instruction(name, text[:end], opcode, text[match.end() :] if match else text[end:])


def _closing(text: str, start: int) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    return len(text)


@dataclass(frozen=True)
class _Site:
    """A collective where it stands; ``inside`` is the computation around it."""

    instruction: Instruction
    inside: str
    trips: int = 1
    known: bool = True


def _sites(module: Module) -> tuple[_Site, ...]:
    """Every collective that is reached from the entry, with its trips."""

    @cache
    def within(name: str) -> tuple[_Site, ...]:
        return tuple(site for line in module.computations.get(name, ()) for site in of(line, name))

    def of(line: Instruction, name: str) -> Iterator[_Site]:
        if _kind(line.opcode):
            yield _Site(line, name)
            return
        trips = _trips(line, module) if line.opcode == "while" else 1
        for called in _called(line):
            for site in within(called):
                yield replace(site, trips=site.trips * (trips or 1), known=site.known and trips is not None)

    return within(module.entry)


def _kind(opcode: str) -> str:
    base = opcode.removesuffix("-start")
    return base if base in KINDS else ""


def _called(line: Instruction) -> list[str]:
    if line.opcode in ("while", "call", "fusion", "conditional", "async-start", "custom-call"):
        branches = (name.strip().lstrip("%") for match in _BRANCHES.findall(line.rest) for name in match.split(","))
        return [name for _, name in _CALLED.findall(line.rest)] + list(branches)
    return []


def _trips(loop: Instruction, module: Module) -> int | None:
    """Trip count the compiler knows, else the constant that the condition compares with, else None."""
    if match := _TRIPS.search(loop.rest):
        return int(match.group(1))
    condition = next(name for role, name in _CALLED.findall(loop.rest) if role == "condition")
    lines = list(_all_lines(condition, module))
    bounds = {line.rest.split(")")[0] for line in lines if line.opcode == "constant" and _CONSTANT.match(line.type)}
    compares = [line for line in lines if line.opcode == "compare"]
    if len(bounds) == len(compares) == 1 and "direction=LT" in compares[0].rest:
        return int(bounds.pop())
    return None


def _all_lines(name: str, module: Module) -> Iterator[Instruction]:
    for line in module.computations.get(name, ()):
        yield line
        for called in _called(line):
            yield from _all_lines(called, module)


def _collective(site: _Site, mesh: Mesh) -> CompiledCollective:
    line, sizes = site.instruction, mesh.sizes_by_name
    kind = _kind(line.opcode)
    if kind == "collective-permute":
        axes: tuple[str, ...] | None = axes_of_pairs(source_target_pairs(line.rest), sizes)
        group = mesh.size if axes else 1
    else:
        groups = replica_groups(line.rest, mesh.size)
        axes, group = axes_of_groups(groups, sizes), len(groups[0])
    scope = _scope(line)
    shrink = _promotion(scope, line.type)
    sent = _SENT[kind](_result_bytes(line) * shrink, group)
    if kind == "all-reduce" and "all-reduce-scatter" in site.inside:  # a TPU's fusion with the slice that follows
        kind, sent = "reduce-scatter", sent / 2
    return CompiledCollective(kind, axes, group, sent, site.trips, site.known, shrink != 1, scope)


_SENT: dict[str, Callable[[Fraction, int], Fraction]] = {
    "all-gather": lambda result, k: result * (k - 1) / k,
    "all-reduce": lambda result, k: 2 * result * (k - 1) / k,
    "reduce-scatter": lambda result, k: result * (k - 1),
    "all-to-all": lambda result, k: result * (k - 1) / k,
    "ragged-all-to-all": lambda result, k: result * (k - 1) / k,
    "collective-permute": lambda result, k: result,
    "collective-broadcast": lambda result, k: result,
}


def _result_bytes(line: Instruction) -> Fraction:
    """Bytes of the result; an asynchronous start returns operand and result, except all-reduce-start."""
    text = line.type
    if line.opcode.endswith("-start") and line.opcode != "all-reduce-start":
        text = _parts(text)[1]
    return sum((_array_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(text)), Fraction(0))


def _parts(text: str) -> list[str]:
    """The members of a tuple type."""
    parts, depth = [""], 0
    for char in text[1:-1]:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _array_bytes(dtype: str, dims: str) -> Fraction:
    count = 1
    for n in dims.replace("<=", "").split(","):
        count *= int(n) if n else 1
    return Fraction(count * _bits(dtype), 8)


def _bits(dtype: str) -> int:
    match = re.search(r"\d+", dtype)
    return int(match.group()) if match else {"pred": 8}.get(dtype, 0)


def _scope(line: Instruction) -> str:
    match = _OP_NAME.search(line.rest)
    return match.group(1) if match else ""


def _promotion(scope: str, type: str) -> Fraction:
    """Planned over compiled bits where a backend widened a 16-bit float, else 1."""
    planned = _SCOPE.findall(scope)
    widened = planned and planned[-1] in ("bfloat16", "float16") and {d for d, _ in _ARRAY.findall(type)} <= {"f32"}
    return Fraction(1, 2) if widened else Fraction(1)
