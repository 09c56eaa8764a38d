"""Where the tensor of a collective comes from and what becomes of it, in a compiled program.

Values are followed through instructions that only move or convert elements, into fusions, and out of combined and
asynchronous collectives. Nothing is followed out of a loop or a call, so every answer is for the computation that the
collective is in.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from meshdsl.lowering.hlo.parse import Instruction, Module, arrays, called

_MOVES = frozenset("bitcast copy reshape transpose convert get-tuple-element opt-barrier copy-start copy-done".split())
_SLICES = frozenset({"slice", "dynamic-slice"})
_LINEAR = _MOVES | set("add subtract negate parameter constant broadcast".split())
_INDEX = re.compile(r"\bindex=(\d+)")
_NUMBER = re.compile(r"^(\d+)\)")


class Dataflow:
    """The values of one module.

    Args:
      module: of a compiled program, whose instructions have names of their own.
    """

    def __init__(self, module: Module) -> None:
        self._module = module

    def is_sliced(self, name: str, part: int = 0) -> bool:
        """Whether a device keeps slices of a tensor, and nothing else reads it.

        Args:
          name: of the collective.
          part: of those that it combines.
        """
        readers = list(self._parts(name, part))
        return bool(readers) and all(self._keeps_a_slice(reader, of) for reader, of in readers)

    def is_argument(self, name: str, part: int = 0) -> bool:
        """Whether a collective sends an argument of its computation, a slice of one, or what a loop does not change."""
        line = self._line[name]
        return part < len(line.operands) and self._comes_from_argument(line.operands[part], self._inside[name])

    def is_accumulated(self, name: str, part: int = 0) -> bool:
        """Whether a loop does nothing but add a tensor to a value that it carries, and that nothing else reads."""
        inside = self._inside[name]
        root = self._line.get(self._module.roots.get(inside, ""))
        if root is None or root.opcode != "tuple":
            return False
        seen, waiting = {name}, list(self._parts(name, part))
        while waiting:
            reader, _ = waiting.pop()
            if reader.name == root.name or reader.name in seen:
                continue
            seen.add(reader.name)
            if not self._may_follow(reader):
                return False
            waiting += [(each, reader.name) for each in self._readers[inside].get(reader.name, ())]
        carried = {i for i, operand in enumerate(root.operands) if operand in seen}
        return bool(carried) and all(self._is_read_by(inside, i, seen) for i in carried)

    # ---- What reads a value

    def _parts(self, name: str, part: int) -> Iterator[tuple[Instruction, str]]:
        """The readers of one of the tensors of a collective, each with the name by which it reads it."""
        combined = self._line[name].type.startswith("(") and not self._line[name].opcode.endswith("-start")
        for reader in self._readers[self._inside[name]].get(name, ()):
            if reader.opcode.endswith("-done"):
                yield from self._parts(reader.name, part)
            elif not combined:
                yield reader, name
            elif (index := _INDEX.search(reader.rest)) and int(index.group(1)) == part:
                yield from ((each, reader.name) for each in self._readers[self._inside[name]].get(reader.name, ()))

    def _keeps_a_slice(self, reader: Instruction, of: str) -> bool:
        if reader.opcode == "dynamic-slice":  # by the device's number; a static one is equal on all devices
            return reader.operands[0] == of
        if reader.opcode == "fusion":
            places = [i for i, operand in enumerate(reader.operands) if operand == of]
            inputs = [self._parameter(name, i) for name in called(reader) for i in places]
            return bool(inputs) and all(each is not None and self._only_slices(each) for each in inputs)
        return reader.opcode in _MOVES and self._only_slices(reader)

    def _only_slices(self, line: Instruction) -> bool:
        readers = self._readers[self._inside[line.name]].get(line.name, ())
        return bool(readers) and all(self._keeps_a_slice(each, line.name) for each in readers)

    def _may_follow(self, line: Instruction) -> bool:
        if line.opcode == "fusion":
            return all(self._is_linear(x) for name in called(line) for x in self._module.computations[name])
        return self._is_linear(line) or line.opcode.endswith("-done")

    def _is_linear(self, line: Instruction) -> bool:
        """Whether an instruction moves, adds, or scales by a constant, so that it may as well come after a sum."""
        if line.opcode in ("multiply", "divide"):
            return any(map(self._is_constant, line.operands[line.opcode == "divide" :]))
        return line.opcode in _LINEAR

    def _is_constant(self, name: str) -> bool:
        line = self._line[name]
        while line.opcode in ("broadcast", *_MOVES) and line.operands:
            line = self._line[line.operands[0]]
        return line.opcode == "constant"

    def _is_read_by(self, inside: str, carried: int, names: set[str]) -> bool:
        """Whether a loop's carried value is read, by some of these instructions alone."""
        values = [
            line
            for line in self._module.computations[inside]
            if line.opcode == "get-tuple-element"
            and self._line[line.operands[0]].opcode == "parameter"
            and (index := _INDEX.search(line.rest))
            and int(index.group(1)) == carried
        ]
        readers = [each for value in values for each in self._readers[inside].get(value.name, ())]
        return bool(readers) and all(each.name in names for each in readers)

    # ---- What a value is made of

    def _comes_from_argument(self, name: str, inside: str) -> bool:
        line = self._line[name]
        if line.opcode == "parameter":
            return True
        if line.opcode == "get-tuple-element" and self._line[line.operands[0]].opcode == "parameter":
            index, root = _INDEX.search(line.rest), self._line.get(self._module.roots.get(inside, ""))
            if index is None or root is None or root.opcode != "tuple" or int(index.group(1)) >= len(root.operands):
                return True
            passed = self._line[root.operands[int(index.group(1))]]  # what the next iteration finds there
            while passed.opcode == "copy":
                passed = self._line[passed.operands[0]]
            return passed.rest == line.rest and passed.opcode == line.opcode
        if line.opcode in _MOVES or line.opcode in _SLICES:
            return self._comes_from_argument(line.operands[0], inside)
        if line.opcode == "fusion" and all(
            x.opcode in _MOVES | _SLICES | {"parameter", "constant"}
            for each in called(line)
            for x in self._module.computations[each]
        ):
            blocks = (x for x in line.operands if any(each.dims for each in arrays(self._line[x].type)))
            return any(self._comes_from_argument(x, inside) for x in blocks)
        return False

    def _parameter(self, computation: str, number: int) -> Instruction | None:
        lines = (x for x in self._module.computations.get(computation, ()) if x.opcode == "parameter")
        return next((x for x in lines if (n := _NUMBER.match(x.rest)) and int(n.group(1)) == number), None)

    # ---- Indexes

    @cached_property
    def _line(self) -> dict[str, Instruction]:
        return {line.name: line for lines in self._module.computations.values() for line in lines}

    @cached_property
    def _inside(self) -> dict[str, str]:
        return {line.name: name for name, lines in self._module.computations.items() for line in lines}

    @cached_property
    def _readers(self) -> dict[str, dict[str, list[Instruction]]]:
        found: dict[str, dict[str, list[Instruction]]] = {}
        for name, lines in self._module.computations.items():
            readers = found[name] = defaultdict(list)
            for line in lines:
                for operand in dict.fromkeys(line.operands):
                    readers[operand].append(line)
        return found
