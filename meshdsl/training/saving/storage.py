"""Where a run's files are: a folder, or a bucket such as ``gs://bucket/run`` or ``s3://bucket/run``.

Objects of a bucket are written whole: nothing is appended to them, and there are no locks. So a run in a bucket has its
lock there, and a local folder for what grows: metrics, events, the output of processes. The first process copies that
to the bucket before a checkpoint is completed, so that no checkpoint has more steps than the metrics beside it.

    gs://    orbax writes checkpoints to the bucket, every process its own shards.
    s3://    orbax cannot: it writes them to the local folder, which all processes share, and the first process copies
             each to the bucket before it is completed. A run on another machine begins with the newest two of them.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import tensorstore as ts

from meshdsl.errors import ArgumentError, CheckpointError, MeshDSLError, first_line

log = logging.getLogger("meshdsl")

LOCK = "run.lock"  # in the folder that all processes of a run share
DEADLINE = 20.0  # seconds in which storage answers
MAKE_ROOM = "make room, or give another folder"
_DIRECT, _STAGED = "gs://", "s3://"
_S3 = {"endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "aws_region": ("AWS_REGION", "AWS_DEFAULT_REGION")}
_BATCH = 8  # files that are copied at a time
_STATUS = re.compile(r"^[A-Z_]+: ")  # before messages of tensorstore


def is_remote(folder: Path | str) -> bool:
    """Whether a folder is in a bucket."""
    return str(folder).startswith((_DIRECT, _STAGED))


def is_staged(bucket: str) -> bool:
    """Whether checkpoints of a bucket are written to a local folder first."""
    return bucket.startswith(_STAGED)


def locate(text: str) -> tuple[Path, str]:
    """Returns the local folder of a run, and its folder in a bucket; empty for one that is local alone.

    Args:
      text: a path, ``file:///path``, ``gs://bucket/path`` or ``s3://bucket/path``.

    Raises:
      ArgumentError: it is in another kind of storage.
    """
    scheme, remote, rest = text.partition("://")
    if not remote or scheme == "file":
        return Path(rest or text.removeprefix("file:")), ""
    if not is_remote(text):
        raise ArgumentError(
            f"--folder {text}: runs are in folders, gs:// and s3://, not in {scheme}://\n"
            "mount that storage as a folder, or train into gs://bucket/run or s3://bucket/run"
        )
    if not rest.strip("/"):
        raise ArgumentError(f"--folder {text}: there is no bucket; write {scheme}://bucket/run")
    rest = rest.strip("/")
    return Path("runs") / rest, f"{scheme}://{rest}"


def check_backend(bucket: str) -> None:
    """Raises ArgumentError unless what reads and writes buckets is installed."""
    if not is_staged(bucket):
        with reported(f"{bucket} cannot be the folder of a run", ArgumentError):
            fsspec.get_filesystem_class("gcs")


def _open(folder: Path | str) -> ts.KvStore:
    """Returns the files of a folder, which is made if it is local, by their names."""
    scheme, _, rest = str(folder).partition("://")
    spec: dict[str, Any] = {"driver": "file", "path": f"{Path(folder).resolve()}/"}
    if is_remote(folder):
        bucket, _, path = rest.strip("/").partition("/")
        spec = {"driver": "gcs" if scheme == "gs" else scheme, "bucket": bucket, "path": f"{path}/" if path else ""}
    if is_staged(str(folder)):  # others than AWS that speak S3 are where the tools of AWS look for them as well
        for name, variables in _S3.items():
            found = [os.environ[each].rstrip("/") for each in variables if os.environ.get(each)]
            spec |= {name: found[0]} if found else {}
        if os.environ.get("AWS_ACCESS_KEY_ID"):
            spec["aws_credentials"] = {
                "type": "environment"
            }  # the default looks for files first, and logs that none is
    return ts.KvStore.open(spec).result(timeout=DEADLINE)


def names_in(folder: Path | str) -> list[str]:
    """Returns the names of all files in a folder and its sub-folders, as paths in it; none if there is no folder."""
    if not is_remote(folder):
        return [str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file()]
    found = _open(folder).list().result(timeout=DEADLINE)
    return sorted(name.decode() for name in found)


# ---- Files that grow -------------------------------------------------------------------------------------------------


class Mirror:
    """The files of a local folder, copied whole to a bucket.

    Args:
      folder: the local one; its sub-folders stay local.
      bucket: folder in a bucket.
    """

    def __init__(self, folder: Path, bucket: str) -> None:
        self._folder, self._bucket = folder, bucket
        self._copied: dict[str, tuple[int, int]] = {}  # size and time of files when they were copied

    def fetch(self) -> None:
        """Copies what is missing here, and records of which those here are no continuation: another machine went on."""
        with reported(f"{self._bucket} cannot be read"):
            self._folder.mkdir(parents=True, exist_ok=True)
            store = _open(self._bucket)
            for name in filter(_is_copied, names_in(self._bucket)):
                file = self._folder / name
                if file.exists() and file.suffix != ".jsonl":
                    continue
                content = store.read(name).result(timeout=DEADLINE).value
                if not file.exists() or not file.read_bytes().startswith(content):
                    temporary = file.with_name(f".{name}.{os.getpid()}")
                    temporary.write_bytes(content)
                    os.replace(temporary, file)

    def publish(self) -> None:
        """Copies the files that have changed since they were copied to the bucket."""
        with reported(f"{self._bucket} cannot be written"):
            store = _open(self._bucket)
            for file in sorted(self._folder.iterdir()):
                state = file.stat()
                found = state.st_size, state.st_mtime_ns
                if file.is_file() and _is_copied(file.name) and self._copied.get(file.name) != found:
                    store.write(file.name, file.read_bytes()).result()
                    self._copied[file.name] = found


def _is_copied(name: str) -> bool:
    """Whether a file of a run's folder is one of those that grow: no lock, no temporary file, in no sub-folder."""
    return "/" not in name and not name.startswith(".") and name != LOCK


# ---- Checkpoints that were written elsewhere -------------------------------------------------------------------------


class CheckpointCopies:
    """Copies of checkpoints in a bucket that orbax cannot write to; the first process makes them.

    Args:
      folder: the local one, with a folder for each number of steps.
      bucket: folder in a bucket.
      last: the file of a checkpoint that is copied last, so that a copy without it is none.
      keep: number of copies to keep; older ones are deleted.
      keep_every: copies of checkpoints after multiples of this many steps are kept as well.
    """

    FETCHED = 2  # checkpoints that a run on another machine begins with: if one is damaged, the one before it is used

    def __init__(self, folder: Path, bucket: str, last: str, keep: int, keep_every: int | None = None) -> None:
        self._folder, self._bucket, self._last = folder, bucket, last
        self._keep, self._keep_every = keep, keep_every

    def add(self, step: int, place: Path) -> None:
        """Copies the files of the checkpoint after ``step`` steps, and deletes copies that are not to be kept.

        Later ones are of a run that was given up: of damaged checkpoints, say, which are set aside here. What is left
        of copies that were not completed is deleted as well.
        """
        with reported(f"{self._bucket} cannot be written"):
            store, found = _open(self._bucket), names_in(self._bucket)
            whole = self._steps(found)
            begun = {int(first) for first, _, _ in (name.partition("/") for name in found) if first.isdigit()}
            self._delete(store, sorted(each for each in begun if each >= step or each not in whole))
            names = sorted(names_in(place), key=lambda name: (name == self._last, name))
            for some in (*_batches(names[:-1]), names[-1:]):
                for written in [store.write(f"{step}/{name}", (place / name).read_bytes()) for name in some]:
                    written.result()
            steps, every = [step, *(each for each in whole if each < step)], self._keep_every
            self._delete(store, [each for each in steps[self._keep :] if not every or each % every])

    def fetch(self) -> None:
        """Copies the newest checkpoints here, as far as they are not here.

        Those here that the bucket does not have are of another run, or the bucket would have had them first. They are
        renamed to ``stale-STEP``.
        """
        with reported(f"{self._bucket} cannot be read"):
            store, names = _open(self._bucket), names_in(self._bucket)
            steps = self._steps(names)
            for place in list(self._folder.iterdir()) if self._folder.exists() else []:
                if place.name.isdigit() and not (int(place.name) in steps and self._is_copy(store, place)):
                    stale = place.with_name(f"stale-{place.name}")
                    shutil.rmtree(stale, ignore_errors=True)
                    place.rename(stale)
                    log.warning("%s is of another run than %s; it is now %s", place, self._bucket, stale.name)
            for step in steps[: self.FETCHED]:
                place, temporary = self._folder / str(step), self._folder / f"fetched-{step}"
                if place.exists():
                    continue
                shutil.rmtree(temporary, ignore_errors=True)
                for some in _batches([name.removeprefix(f"{step}/") for name in names if name.startswith(f"{step}/")]):
                    for name, read in [(name, store.read(f"{step}/{name}")) for name in some]:
                        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                        (temporary / name).write_bytes(read.result().value)
                temporary.rename(place)

    def _is_copy(self, store: ts.KvStore, place: Path) -> bool:
        """Whether a local checkpoint is the one that the bucket has of its step."""
        found = store.read(f"{place.name}/{self._last}").result()
        return (place / self._last).is_file() and found.value == (place / self._last).read_bytes()

    def _steps(self, names: Sequence[str]) -> list[int]:
        """The steps of the copies that are whole, the newest first, of a bucket with objects of these names."""
        parts = (name.partition("/") for name in names)
        return sorted((int(step) for step, _, name in parts if name == self._last and step.isdigit()), reverse=True)

    def _delete(self, store: ts.KvStore, steps: list[int]) -> None:
        for step in steps:
            store.write(f"{step}/{self._last}", None).result()  # from here on it is no copy
            store.delete_range(ts.KvStore.KeyRange(f"{step}/", f"{step}0")).result()  # "0" comes after "/"


def _batches(names: list[str]) -> Iterator[list[str]]:
    return (names[i : i + _BATCH] for i in range(0, len(names), _BATCH))


# ---- Files that several processes write ------------------------------------------------------------------------------


class SharedFile:
    """A small file that processes of any machine read and replace, each only what it has seen.

    Args:
      folder: a local folder, which is made, or one in a bucket.
      name: of the file.
    """

    def __init__(self, folder: Path | str, name: str) -> None:
        self._name, self._store = name, _open(folder)

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
        raise kind(f"{what}: {reason(error, what)}") from error


def reason(error: Exception, what: str = "") -> str:
    """Returns what is wrong with the storage, with a remedy where there is one that can be named.

    Args:
      what: what failed, which begins with the place.
    """
    text = _STATUS.sub("", first_line(error)).partition(" [")[0].replace(r"\x00", "/") or type(error).__name__
    if full := re.search("No space left on device|Disk quota exceeded", str(error)):
        return f"{full.group()}: {MAKE_ROOM}"
    if isinstance(error, ImportError):
        return f"{text}; pip install 'meshdsl[gcs]'"
    if isinstance(error, TimeoutError):
        return f"no answer within {DEADLINE:g} s; check the network, and that there are credentials"
    if re.search("http_response_code='40[13]'|[Cc]redentials|Anonymous caller", str(error)):
        log_in = ("aws configure", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        if not is_staged(what):
            log_in = ("gcloud auth application-default login", "GOOGLE_APPLICATION_CREDENTIALS")
        return f"{text}; {log_in[0]}, or set {log_in[1]}"
    if "bucket does not exist" in text or "NoSuchBucket" in text:
        return f"{text.rstrip('.')}; make it, or correct its name"
    return text
