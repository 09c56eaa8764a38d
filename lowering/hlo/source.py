"""The user's line of every instruction of a compiled program.

Compilers state it in one of two notations: in the instruction itself, or as the number of a stack frame in the tables
at the head of the module. An instruction belongs to the innermost frame that is user code, else to that of a library.
What the partitioner inserts on an argument has neither; it belongs to the line that reads it first. What it inserts on
a result belongs to the line that makes it.

    metadata={op_name="..." source_file="train.py" source_line=12}
    metadata={op_name="..." stack_frame_id=8}
    metadata={op_name="params['w']"}
"""

import re
from collections.abc import Iterator
from functools import cached_property

from meshdsl.ir.graph import Source
from meshdsl.lowering.hlo.parse import Instruction, Module
from meshdsl.trace.source import file_kind

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_NAME = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
_OWN = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_STACK = re.compile(r"stack_frame_id=(\d+)")
_STATED = re.compile(r"stack_frame_id=|source_line=")


class InstructionSources:
    """The lines of one module.

    Args:
      text: its HLO text. module: the same, parsed.
    """

    def __init__(self, text: str, module: Module) -> None:
        self._module = module
        files: dict[int, str] = {}
        functions: dict[int, str] = {}
        places: dict[int, Source] = {}
        self._frames: dict[int, tuple[Source, int]] = {}  # line, and number of the calling frame; 0 if there is none
        for table, line in _rows(text):
            if table in ("FileNames", "FunctionNames") and (match := _NAME.match(line)):
                (files if table == "FileNames" else functions)[int(match[1])] = match[2]
            elif table == "FileLocations" and (match := _LOCATION.match(line)):
                number, file, function, at = map(int, match.groups())
                places[number] = Source(files.get(file, ""), at, functions.get(function, ""))
            elif table == "StackFrames" and (match := _FRAME.match(line)):
                self._frames[int(match[1])] = places.get(int(match[2]), Source()), int(match[3] or 0)
        # some versions number callers from 1 for "none": then the first frame seems to call itself
        self._shift = int(any(number == caller for number, (_, caller) in self._frames.items()))

    def metadata(self, name: str, own: str) -> str:
        """Returns the attributes that state the line of an instruction: its ``own``, or those of the next that do.

        That is what reads it; where nothing that does states a line, what it reads.
        """
        if _STATED.search(own):
            return own
        return self._nearest(name, self._readers) or self._nearest(name, self._read) or own

    def _nearest(self, name: str, beside: dict[str, list[Instruction]]) -> str:
        """The attributes of the nearest instruction that states a line; empty if none does."""
        waiting, seen = [name], set[str]()
        while waiting:
            if (name := waiting.pop(0)) not in seen:
                seen.add(name)
                for each in beside.get(name, ()):
                    if _STATED.search(each.rest):
                        return each.rest
                    waiting.append(each.name)
        return ""

    @cached_property
    def _readers(self) -> dict[str, list[Instruction]]:
        """The instructions that read each one, in program order."""
        found: dict[str, list[Instruction]] = {}
        for line in (line for lines in self._module.computations.values() for line in lines):
            for operand in line.operands:
                found.setdefault(operand, []).append(line)
        return found

    @cached_property
    def _read(self) -> dict[str, list[Instruction]]:
        """The instructions that each one reads."""
        made = {line.name: line for lines in self._module.computations.values() for line in lines}
        return {name: [made[each] for each in line.operands if each in made] for name, line in made.items()}

    def of(self, metadata: str) -> Source:
        """Returns the line in the attributes of an instruction; a source without a file if there is none."""
        library = Source()
        for each in self._stack(metadata):
            kind = file_kind(each.file) if each.file else ""
            if kind == "user":
                return each
            if kind == "library" and not library.file:
                library = each
        return library

    def _stack(self, metadata: str) -> Iterator[Source]:
        """The frames of an instruction, innermost first."""
        if match := _STACK.search(metadata):
            number, seen = int(match[1]), set[int]()
            while number in self._frames and number not in seen:
                seen.add(number)
                source, caller = self._frames[number]
                yield source
                number = caller - self._shift
        elif match := _OWN.search(metadata):
            yield Source(match[1], int(match[2]))


def _rows(text: str) -> Iterator[tuple[str, str]]:
    """The rows of the tables at the head of a module, each with the name of its table."""
    table = ""
    for line in text.splitlines():
        if line.rstrip() in _TABLES:
            table = line.rstrip()
        elif line.endswith("{"):
            return  # the first computation
        elif table:
            yield table, line
