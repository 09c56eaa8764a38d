"""A program as it was lowered, without what any compiler drops: results that nobody reads, and work that is said twice.

The plan lists a piece of a value that two operations fetch alike once, and nothing that is fetched for nobody;
the lowered program has both, and every backend of XLA removes them first. So a program that is compared before it
is compiled is cleaned here: two instructions are one if they do the same with the same operands, whatever their
names; names of computations are told apart by what these do.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache

from meshdsl.lowering.hlo.parse import CALLED, Instruction, Module

_NEVER_ONE = ("while", "conditional", "optimization-barrier")  # to XLA, which leaves them alone
_OWN = re.compile(r"channel_id=\d+|, metadata=\{[^}]*\}|, origin=\{.*?\}\}")


def deduplicate(module: Module) -> Module:
    """The module with every instruction that is read, once."""
    numbered = _Numbered(module)
    kept = {name: tuple(_first_read(numbered, name)) for name in module.computations}
    return Module(module.entry, kept, module.roots)


class _Numbered:
    """Values of a module by what they are: equal numbers are equal values."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._numbers: dict[object, int] = {}
        self.computation = cache(self._computation)
        self.values = cache(self._values)

    def _computation(self, name: str) -> int:
        """The number of a computation: of all it does, in order."""
        values = self.values(name)
        root = values.get(self.module.roots.get(name, ""))
        return self._number((root, *sorted(values.values())))

    def _values(self, name: str) -> dict[str, int]:
        """Per instruction of a computation, the number of its value."""
        found: dict[str, int] = {}
        for line in self.module.computations.get(name, ()):
            own = line.name if line.opcode in _NEVER_ONE else ""
            read = tuple(found.get(operand, operand) for operand in line.operands)
            found[line.name] = self._number((line.opcode, line.type, read, self._attributes(line), own))
        return found

    def _attributes(self, line: Instruction) -> str:
        plain = _OWN.sub("", line.attributes)
        return CALLED.sub(lambda match: f"{match.group(1)}={self.computation(match.group(2))}", plain)

    def _number(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _first_read(numbered: _Numbered, name: str) -> Iterator[Instruction]:
    """The instructions of a computation that are read, each value once."""
    lines, values = numbered.module.computations[name], numbered.values(name)
    needed = {values[line.name] for line in _read(lines, numbered.module.roots.get(name, ""))}
    for line in lines:
        if values[line.name] in needed:
            needed.remove(values[line.name])
            yield line


def _read(lines: Iterable[Instruction], root: str) -> Iterator[Instruction]:
    """What the result is made of."""
    by_name = {line.name: line for line in lines}
    waiting, seen = [root] if root in by_name else list(by_name), set[str]()
    while waiting:
        name = waiting.pop()
        if name in by_name and name not in seen:
            seen.add(name)
            yield by_name[name]
            waiting += by_name[name].operands
