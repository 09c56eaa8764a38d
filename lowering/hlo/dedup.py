"""Dead code and common subexpressions of a lowered program are removed, as every backend of XLA does first.

The plan lists an exchange that two operations share once, and none without uses; the lowered program has both. So
before a lowered program is compared with a plan, it is cleaned: two instructions are one if they apply the same
operation to the same operands, whatever their names (value numbering, Alpern, Wegman and Zadeck 1988); computations are
compared by their instructions.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache

from meshdsl.lowering.hlo.parse import CALLED, Instruction, Module

_NEVER_MERGED = ("while", "conditional", "optimization-barrier")  # by XLA
_OWN = re.compile(r"channel_id=\d+|, metadata=\{[^}]*\}|, origin=\{.*?\}\}")


def deduplicate(module: Module) -> Module:
    """Returns the module with every live instruction once."""
    numbered = _Numbered(module)
    kept = {name: tuple(_first_read(numbered, name)) for name in module.computations}
    return Module(module.entry, kept, module.roots)


class _Numbered:
    """Value numbers of a module: equal numbers are equal values."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._numbers: dict[object, int] = {}
        self.computation = cache(self._computation)
        self.values = cache(self._values)

    def _computation(self, name: str) -> int:
        """The number of a computation: that of its root and of all its values."""
        values = self.values(name)
        root = values.get(self.module.roots.get(name, ""))
        return self._number((root, *sorted(values.values())))

    def _values(self, name: str) -> dict[str, int]:
        """Per instruction of a computation, the number of its value."""
        found: dict[str, int] = {}
        for line in self.module.computations.get(name, ()):
            own = line.name if line.opcode in _NEVER_MERGED else ""
            read = tuple(found.get(operand, operand) for operand in line.operands)
            found[line.name] = self._number((line.opcode, line.type, read, self._attributes(line), own))
        return found

    def _attributes(self, line: Instruction) -> str:
        plain = _OWN.sub("", line.attributes)
        return CALLED.sub(lambda match: f"{match.group(1)}={self.computation(match.group(2))}", plain)

    def _number(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _first_read(numbered: _Numbered, name: str) -> Iterator[Instruction]:
    """The live instructions of a computation, each value once."""
    lines, values = numbered.module.computations[name], numbered.values(name)
    needed = {values[line.name] for line in _read(lines, numbered.module.roots.get(name, ""))}
    for line in lines:
        if values[line.name] in needed:
            needed.remove(values[line.name])
            yield line


def _read(lines: Iterable[Instruction], root: str) -> Iterator[Instruction]:
    """The instructions that the root depends on."""
    by_name = {line.name: line for line in lines}
    waiting, seen = [root] if root in by_name else list(by_name), set[str]()
    while waiting:
        name = waiting.pop()
        if name in by_name and name not in seen:
            seen.add(name)
            yield by_name[name]
            waiting += by_name[name].operands
