"""Names of source lines: ``file.py:12``, the same on every machine.

Where files of one name are in one program, each is named with as many of its folders as tell it
from the others.
"""

from collections.abc import Iterable
from pathlib import PurePath

from meshdsl.ir import Source


class Places:
    """Names of the lines of all operations of a program."""

    def __init__(self, sources: Iterable[Source]) -> None:
        files = {source.file for source in sources if source.file}
        self.files = {file: _shortest(file, files) for file in files}

    def of(self, source: Source) -> str:
        """The line's name; ``?`` if it is not known."""
        return f"{self.files[source.file]}:{source.line}" if source.file else str(source)


def _shortest(file: str, files: set[str]) -> str:
    """The file with no more folders than it needs to be told from the others."""
    parts, others = PurePath(file).parts, [PurePath(other).parts for other in files if other != file]
    alike = (n for n in range(1, len(parts)) if all(other[-n:] != parts[-n:] for other in others))
    return "/".join(parts[-next(alike, len(parts)) :])
