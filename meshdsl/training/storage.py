"""Where a run's files are: a folder, or a bucket such as ``gs://bucket/run``.

Objects of a bucket are written whole: nothing is appended to them, and there are no locks. What a run needs of either
kind is here: files that are replaced only if they have not changed, and errors in one line that says what to do.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorstore as ts

from meshdsl.errors import CheckpointError, MeshDSLError, first_line

DEADLINE = 20.0  # seconds in which storage answers
MAKE_ROOM = "make room, or give another folder"
_SCHEME = "gs://"
_STATUS = re.compile(r"^[A-Z_]+: ")  # before messages of tensorstore


def is_remote(folder: Path | str) -> bool:
    """Whether a folder is in a bucket."""
    return str(folder).startswith(_SCHEME)


# ---- Files that several processes write ------------------------------------------------------------------------------


class SharedFile:
    """A small file that processes of any machine read and replace, each only what it has seen.

    Args:
      folder: a local folder, which is made, or one in a bucket.
      name: of the file.
    """

    def __init__(self, folder: Path | str, name: str) -> None:
        self._name = name
        if is_remote(folder):
            bucket, _, path = str(folder).removeprefix(_SCHEME).partition("/")
            spec = {"driver": "gcs", "bucket": bucket, "path": f"{path.rstrip('/')}/" if path else ""}
        else:
            spec = {"driver": "file", "path": f"{Path(folder).resolve()}/"}
        self._store = ts.KvStore.open(spec).result()

    def read(self) -> tuple[bytes | None, bytes]:
        """Returns the content, None if there is no such file, and its generation, which changes with every write."""
        found = self._store.read(self._name).result(timeout=DEADLINE)
        return found.value if found.state == "value" else None, found.stamp.generation

    def replace(self, content: bytes | None, generation: bytes) -> bytes:
        """Writes the file, or deletes it, if it still has this generation.

        Returns:
          The new generation; empty if the file had another one, and is as it was.
        """
        written = self._store.write(self._name, content, if_equal=generation).result(timeout=DEADLINE)
        found: bytes = written.generation
        return found


# ---- Errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def reported(what: str, kind: type[MeshDSLError] = CheckpointError) -> Iterator[None]:
    """Turns errors of storage within a block into one of a line: what failed, and why."""
    try:
        yield
    except MeshDSLError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise kind(f"{what}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Returns what is wrong with the storage, with a remedy where there is one that can be named."""
    text = _STATUS.sub("", first_line(error)).partition(" [")[0].replace("\0", "/") or type(error).__name__
    if full := re.search("No space left on device|Disk quota exceeded", str(error)):
        return f"{full.group()}: {MAKE_ROOM}"
    if isinstance(error, ImportError):
        return f"{text}; pip install 'meshdsl[gcs]'"
    if isinstance(error, TimeoutError):
        return f"no answer within {DEADLINE:g} s; check the network, and that there are credentials"
    if re.search("http_response_code='40[13]'|[Cc]redentials|Anonymous caller", str(error)):
        return f"{text}; gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS"
    if "bucket does not exist" in text:
        return f"{text.rstrip('.')}; make it, or correct its name"
    return text
