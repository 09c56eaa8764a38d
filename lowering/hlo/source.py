"""The user's line of every instruction of a compiled program.

Compilers state it in one of two notations: in the instruction itself, or as the number of a stack frame in the tables
at the head of the module. An instruction belongs to the innermost frame that is user code, else to that of a library.

    metadata={op_name="..." source_file="train.py" source_line=12}
    metadata={op_name="..." stack_frame_id=8}
"""

import re
from collections.abc import Iterator

from meshdsl.ir.graph import Source
from meshdsl.trace.source import file_kind

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_NAME = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
_OWN = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_STACK = re.compile(r"stack_frame_id=(\d+)")


class InstructionSources:
    """The lines of one module, read from its HLO text."""

    def __init__(self, text: str) -> None:
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
