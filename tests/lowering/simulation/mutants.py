"""Faulty variants of partitioned programs: a collective dropped, doubled, moved, or with other groups or operands."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshdsl.lowering.hlo.collectives import replica_groups, source_target_pairs
from meshdsl.lowering.hlo.parse import parse_module

_LINE = re.compile(r"^(\s+(?:ROOT )?)(%\S+) = (\S+) ([\w-]+)\(([^)]*)\)(.*)$")
_DEVICES = r"(?:, device_ids=\((?:\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))?"
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    rf"|mesh\[[^\]]*\]{_DEVICES} \{{[^}}]*\}})"
)
_PAIRS = re.compile(r"source_target_pairs=\{.*?\}\}")
_UNARY = ("tanh", "exponential", "sine", "cosine", "rsqrt", "sqrt", "abs", "logistic", "log")
SUMS = ("all-reduce", "reduce-scatter")
MOVES = ("all-gather", "all-to-all")


@dataclass(frozen=True)
class Mutant:
    """A faulty program: how it is faulty, the line that is, its text, and the instruction that has another value."""

    kind: str
    line: str
    text: str
    name: str


def mutants(text: str, devices: int, rng: np.random.Generator) -> Iterator[Mutant]:
    """All variants of a partitioned program; of groups and operands, one each, drawn at random."""
    lines, live = text.splitlines(), _live(text)
    for at, line in enumerate(lines):
        match = _LINE.match(line)
        if (
            match is None
            or match[2].removeprefix("%") not in live
            or ("to_apply" not in line and match[4] not in (*MOVES, "collective-permute"))
        ):
            continue
        for kind, changed in _changed(lines, at, match, devices, rng):
            stop = at + (2 if kind == "moved" else 1)
            end = _LINE.match(changed[-1])
            assert end is not None
            text = "\n".join([*lines[:at], *changed, *lines[stop:]])
            yield Mutant(kind, line.strip(), text, end[2].removeprefix("%"))


def _live(text: str) -> set[str]:
    """The instructions that a root is computed from: partitioners leave others behind."""
    module, found = parse_module(text), set[str]()
    for computation, lines in module.computations.items():
        reads, waiting = {line.name: line.operands for line in lines}, [module.roots.get(computation, "")]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += [operand for operand in reads.get(name, ()) if operand in reads]
    return found


def _changed(
    lines: list[str], at: int, match: re.Match[str], devices: int, rng: np.random.Generator
) -> Iterator[tuple[str, list[str]]]:
    head, name, made, opcode, operands, rest = match.groups()
    if opcode == "all-reduce" and "," not in operands:
        yield "dropped", [f"{head}{name} = {made} copy({operands})"]
        if not _is_idempotent(lines, rest):
            first = f"{head.replace('ROOT ', '')}{name}.first = {made} all-reduce({operands}){rest}"
            yield "doubled", [first, f"{head}{name} = {made} all-reduce({name}.first){rest}"]
        if moved := _moved(lines, at, match):
            yield "moved", moved
    if opcode in (*SUMS, *MOVES):
        groups = [list(group) for group in replica_groups(rest, devices)]
        for other in _other_groups(groups, devices, opcode, rng):
            text = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in other) + "}"
            yield "groups", [f"{head}{name} = {made} {opcode}({operands}){_GROUPS.sub('replica_groups=' + text, rest)}"]
    if opcode == "collective-permute":
        pairs = source_target_pairs(rest)
        targets = [target for _, target in pairs]
        turned = [(source, targets[i - 1]) for i, (source, _) in enumerate(pairs)]
        if len(pairs) > 1:
            text = "source_target_pairs={" + ",".join(f"{{{a},{b}}}" for a, b in turned) + "}"
            yield "pairs", [f"{head}{name} = {made} {opcode}({operands}){_PAIRS.sub(text, rest)}"]
    if other := _other_operand(lines, at, operands, rng):
        yield "operand", [f"{head}{name} = {made} {opcode}({other}){rest}"]


def _other_groups(
    groups: list[list[int]], devices: int, opcode: str, rng: np.random.Generator
) -> Iterator[list[list[int]]]:
    """Groups of other devices: for sums of any size, for other collectives of the same."""
    size, known = len(groups[0]), {frozenset(group) for group in groups}
    sizes = [n for n in range(2, devices + 1) if devices % n == 0] if opcode == "all-reduce" else [size]
    ways = []
    for n in sizes:
        blocks = np.arange(devices).reshape(-1, n)
        ways += [blocks.tolist(), blocks.reshape(n, -1).T.tolist()]
    if opcode in MOVES:
        ways += [[list(reversed(group)) for group in groups]]
        known = {frozenset()}
    ways = [way for way in ways if {frozenset(g) for g in way} != known and way != groups]
    if ways:
        yield ways[int(rng.integers(len(ways)))]


def _is_idempotent(lines: list[str], rest: str) -> bool:
    """Whether a collective may be run twice: it is a maximum, a minimum, or of truth values."""
    name = re.search(r"to_apply=(%[\w.\-]+)", rest)
    assert name is not None
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{name[1]} ("))
    body = lines[start : lines.index("}", start)]
    return any(f" {opcode}(" in line for line in body for opcode in ("maximum", "minimum", "or", "and"))


def _other_operand(lines: list[str], at: int, operands: str, rng: np.random.Generator) -> str:
    """Another value of the same type that is computed before."""
    types, copies, above = dict[str, str](), dict[str, str](), list[str]()
    for line in reversed(lines[:at]):
        if line.endswith("{") and not line.startswith(" "):
            break
        if match := _LINE.match(line):
            types[match[2]] = match[3].split("{")[0]
            if match[4] == "copy":
                copies[match[2]] = match[5]
            if match[4] not in ("constant", "iota", "broadcast", "copy", "reshape", "bitcast", "convert"):
                above.append(match[2])
    if "," in operands or operands not in types:
        return ""
    own = operands
    while own in copies:
        own = copies[own]
    alike = [name for name in above if name not in (own, operands) and types[name] == types[operands]]
    return alike[int(rng.integers(len(alike)))] if alike else ""


def _moved(lines: list[str], at: int, match: re.Match[str]) -> list[str]:
    """The function of one value that reads a sum, then the sum, in place of both, if they are in lines that follow."""
    head, name, made, _, operands, rest = match.groups()
    if at + 1 == len(lines) or "ROOT" in head or (after := _LINE.match(lines[at + 1])) is None:
        return []
    if after[4] not in _UNARY or after[5] != name or after[3] != made:
        return []
    return [
        f"{head}{name} = {made} {after[4]}({operands})",
        f"{after[1]}{after[2]} = {made} all-reduce({name}){rest}",
    ]
