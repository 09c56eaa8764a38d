"""Where a run's files are: a folder, or a bucket such as ``gs://bucket/run``.

Objects of a bucket are written whole: nothing is appended to them, and there are no locks. So a run in a bucket has its
checkpoints and its lock there, and a local folder for what grows: metrics, events, the output of processes. The first
process copies that to the bucket before a checkpoint is completed, so that no checkpoint has more steps than the
metrics beside it.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import tensorstore as ts
from etils import epath

from meshdsl.errors import ArgumentError, CheckpointError, MeshDSLError, first_line

LOCK = "run.lock"  # in the folder that all processes of a run share
DEADLINE = 20.0  # seconds in which storage answers
MAKE_ROOM = "make room, or give another folder"
_SCHEME = "gs://"
_STATUS = re.compile(r"^[A-Z_]+: ")  # before messages of tensorstore


def is_remote(folder: Path | str) -> bool:
    """Whether a folder is in a bucket."""
    return str(folder).startswith(_SCHEME)


def locate(text: str) -> tuple[Path, str]:
    """Returns the local folder of a run, and its folder in a bucket; empty for one that is local alone.

    Args:
      text: a path, ``file:///path`` or ``gs://bucket/path``.

    Raises:
      ArgumentError: it is in another kind of storage.
    """
    scheme, remote, rest = text.partition("://")
    if not remote or scheme == "file":
        return Path(rest or text.removeprefix("file:")), ""
    if f"{scheme}://" == _SCHEME and not rest.strip("/"):
        raise ArgumentError(f"--folder {text}: there is no bucket; write gs://bucket/run")
    if f"{scheme}://" != _SCHEME:
        raise ArgumentError(
            f"--folder {text}: orbax writes checkpoints to folders and to gs://, not to {scheme}://\n"
            "mount that storage as a folder, or train into gs://bucket/run"
        )
    rest = rest.strip("/")
    return Path("runs") / rest, f"{_SCHEME}{rest}"


def check_backend(bucket: str) -> None:
    """Raises ArgumentError unless what reads and writes buckets is installed."""
    with reported(f"{bucket} cannot be the folder of a run", ArgumentError):
        fsspec.get_filesystem_class("gcs")


# ---- Files that grow -------------------------------------------------------------------------------------------------


class Mirror:
    """The files of a local folder, copied whole to a bucket.

    Args:
      folder: the local one; its sub-folders stay local.
      bucket: folder in a bucket.
    """

    def __init__(self, folder: Path, bucket: str) -> None:
        self._folder, self._bucket = folder, epath.Path(bucket)
        self._copied: dict[str, tuple[int, int]] = {}  # size and time of files when they were copied

    def fetch(self) -> None:
        """Copies what is missing here, and records of which those here are no continuation: another machine went on."""
        with reported(f"{self._bucket} cannot be read"):
            self._folder.mkdir(parents=True, exist_ok=True)
            for name in _files(self._bucket):
                file = self._folder / name
                if file.exists() and file.suffix != ".jsonl":
                    continue
                content = (self._bucket / name).read_bytes()
                if not file.exists() or not file.read_bytes().startswith(content):
                    temporary = file.with_name(f".{name}.{os.getpid()}")
                    temporary.write_bytes(content)
                    os.replace(temporary, file)

    def publish(self) -> None:
        """Copies the files that have changed since they were copied to the bucket."""
        with reported(f"{self._bucket} cannot be written"):
            for name in _files(epath.Path(self._folder)):
                state = (self._folder / name).stat()
                found = state.st_size, state.st_mtime_ns
                if self._copied.get(name) != found:
                    (self._bucket / name).write_bytes((self._folder / name).read_bytes())
                    self._copied[name] = found


def _files(folder: epath.Path) -> list[str]:
    """Names of the files that are directly in a folder, but for temporary ones and the lock."""
    if not folder.exists():
        return []
    found = [each for each in folder.iterdir() if not each.name.startswith(".") and each.name != LOCK]
    return [each.name for each in found if not each.is_dir()]


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
    text = _STATUS.sub("", first_line(error)).partition(" [")[0].replace(r"\x00", "/") or type(error).__name__
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
