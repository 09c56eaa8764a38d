"""Bytes that the instructions of a compiled program read and write in the memory of their device.

An instruction reads its operands and writes its result; a fusion keeps what it computes inside in registers. What takes
a part of an operand reads that part, and what updates a part of one in place reads and writes that part:

    fusion(%stack, %i), calls=dynamic_slice(stack, i) * 2          one slice, read and written
    fusion(%stack, %x, %i), calls=dynamic_update_slice(stack, x)   x, read, and its place, read and written
    scatter(%table, %ids, %rows), to_apply=%add                    ids, rows, read, and their places, read and written

Control flow, views and the ends of asynchronous operations move nothing themselves. What collectives send and what is
copied from and to the host is not counted here, nor are products, whose seconds have their traffic in them.
"""

from collections.abc import Mapping, Sequence

from meshdsl.lowering.hlo.collectives import collective_kind
from meshdsl.lowering.hlo.flops import is_product
from meshdsl.lowering.hlo.parse import Instruction, Module, arrays, called

MOVES_NOTHING = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier partition-id replica-id "
    "while call conditional domain iota copy-start copy-done async-start async-update async-done "
    "slice-start slice-done get-dimension-size".split()
)
READS_PART = frozenset("dynamic-slice slice gather".split())
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that is written in place of a part of the first one
_MARKS = tuple(f'"{name}"' for name in ("AllocateBuffer", "AsyncCollectiveStart", "AsyncCollectiveDone"))  # of calls


def moved_bytes(line: Instruction, lines: Mapping[str, Instruction], module: Module) -> float:
    """Returns the bytes that one execution of an instruction reads and writes.

    Args:
      line: the instruction.
      lines: those of its computation, by name.
      module: the program.
    """
    if line.opcode in MOVES_NOTHING or _is_sent(line) or is_product(line):
        return 0.0
    if line.opcode == "fusion":
        return sum(_fused_bytes(module.computations.get(name, ()), module.roots.get(name, "")) for name in called(line))
    result = _bytes(line)
    if line.opcode in READS_PART:
        return 2 * result
    if line.opcode in _UPDATES:
        return _place_bytes(line, lines) + sum(_bytes(lines.get(name)) for name in line.operands[1:])
    return result + sum(_bytes(lines.get(name)) for name in dict.fromkeys(line.operands))


def _fused_bytes(inside: Sequence[Instruction], root: str) -> float:
    """What a fusion reads of its parameters and writes of its results."""
    lines = {line.name: line for line in inside}
    if root not in lines:
        return 0.0
    results = lines[root].operands if lines[root].opcode == "tuple" else (root,)
    results = tuple(name for name in results if name not in lines or not _is_sent(lines[name]))
    updates = [found for name in results if (found := _update(lines, name)) is not None]
    updated = {_source(lines, line.operands[0]) for line in updates}
    written = sum(_bytes(lines.get(name)) for name in results if _update(lines, name) is None)
    written += sum(_place_bytes(line, lines) for line in updates)
    parameters = [line for line in inside if line.opcode == "parameter" and line.name not in updated]
    return written + sum(_read_bytes(line, inside) for line in parameters)


def _update(lines: Mapping[str, Instruction], name: str) -> Instruction | None:
    """The update in place that a result is, seen through views and casts."""
    line = lines.get(_source(lines, name))
    return line if line is not None and line.opcode in _UPDATES else None


def _place_bytes(update: Instruction, lines: Mapping[str, Instruction]) -> float:
    """What an update in place reads and writes of the array that it changes; a scatter of several changes the first."""
    return 2 * _bytes(lines.get(update.operands[_UPDATES[update.opcode]]))


def _source(lines: Mapping[str, Instruction], name: str) -> str:
    """The name of the value that another is a view or a cast of."""
    while name in lines and lines[name].opcode in ("bitcast", "copy", "convert") and lines[name].operands:
        name = lines[name].operands[0]
    return name


def _read_bytes(parameter: Instruction, inside: Sequence[Instruction]) -> float:
    """What a fusion reads of a parameter: all of it, or the parts that are taken of it, seen through views."""
    names, parts = {parameter.name}, 0.0
    for line in inside:
        if names.isdisjoint(line.operands):
            continue
        if line.opcode == "bitcast":
            names.add(line.name)
        elif _is_sent(line):
            continue
        elif line.opcode in READS_PART and line.operands[0] in names:
            parts += _bytes(line)
        else:
            return _bytes(parameter)
    return min(parts, _bytes(parameter))


def _is_sent(line: Instruction) -> bool:
    """Whether an instruction is a collective, or marks the beginning or end of one."""
    kind = line.opcode.removesuffix("-done").removesuffix("-update")
    return bool(collective_kind(kind)) or any(mark in line.rest for mark in _MARKS)


def _bytes(line: Instruction | None) -> float:
    return 0.0 if line is None else float(sum(x.bytes for x in arrays(line.type)))
