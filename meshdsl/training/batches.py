"""Batches that start at any step of a run, and their placement on the devices of a planned step.

Which record stands at which position of a run follows from the position alone. So a run resumes after any number of
batches with exactly the batches that it would have had, and a process of several reads only the rows that its devices
hold:

    Batches(shuffled({"images": images, "labels": labels}), batch=256)    # shuffled anew in every epoch

Records are read a batch at a time where they can be (``take``), else one by one through a grain ``MapDataset``. Of any
other iterable of batches every process makes whole batches and keeps its rows. A thread makes and places the next
batches while a step runs.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from sys import maxsize
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import grain.python as grain
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshdsl.errors import ArgumentError, faults, shortened
from meshdsl.ir.graph import array_type

# ---- Records ---------------------------------------------------------------------------------------------------------

Batch = dict[str, np.ndarray]


@runtime_checkable
class Records(Protocol):
    """Numbered records that are read several at a time."""

    def __len__(self) -> int: ...

    def take(self, positions: np.ndarray) -> Batch:
        """Returns the records at these positions, in new arrays; their number is the first dim of every array."""
        ...


class ArrayRecords:
    """The records of arrays whose first dim numbers them."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) != 1:
            rows = [f"{name}: {size} rows" for name, size in sizes.items()]
            raise ArgumentError(faults("arrays of one dataset differ in their number of rows:", rows))
        self._arrays = dict(arrays)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, position: int) -> Batch:
        return {name: array[position] for name, array in self._arrays.items()}

    def take(self, positions: np.ndarray) -> Batch:
        """Returns the rows at these positions."""
        return {name: array[positions] for name, array in self._arrays.items()}


Change = Callable[[Batch, np.ndarray, int], Batch]


class ShuffledRecords:
    """Records without end, in another random order in every epoch.

    Args:
      records: of one epoch.
      seed: of the order.
      change: ``(batch, positions, epoch) -> batch`` changes records at random, each by its position and epoch alone.
    """

    def __init__(self, records: Records, seed: int = 0, change: Change | None = None) -> None:
        self.records, self.seed, self.change = records, seed, change
        self._orders: dict[int, np.ndarray] = {}  # by epoch: of the last two

    def __len__(self) -> int:
        return maxsize

    def take(self, positions: np.ndarray) -> Batch:
        """Returns the records at these positions of all epochs."""
        epochs, rows = np.divmod(positions, len(self.records))
        if (epochs == epochs[0]).all():
            return self._of_epoch(int(epochs[0]), rows)
        found = np.unique(epochs).tolist()
        parts = [self._of_epoch(epoch, rows[epochs == epoch]) for epoch in found]
        order = np.argsort(np.concatenate([np.flatnonzero(epochs == epoch) for epoch in found]))
        return {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}

    def _of_epoch(self, epoch: int, rows: np.ndarray) -> Batch:
        chosen = self._order(epoch)[rows]
        batch = self.records.take(chosen)
        return self.change(batch, chosen, epoch) if self.change else batch

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            kept = {epoch - 1: self._orders[epoch - 1]} if epoch - 1 in self._orders else {}
            self._orders = {**kept, epoch: np.random.default_rng((self.seed, epoch)).permutation(len(self.records))}
        return self._orders[epoch]


def shuffled(source: Any, seed: int = 0) -> ShuffledRecords | grain.MapDataset:
    """Returns the records of a source without end, shuffled anew in every epoch.

    Args:
      source: a dict of arrays whose first dim numbers the records, ``Records``, or an object with ``len`` and ``[i]``,
        which is read one by one.
      seed: of the order.
    """
    records = ArrayRecords(source) if isinstance(source, Mapping) else source
    if isinstance(records, Records):
        return ShuffledRecords(records, seed)
    return grain.MapDataset.source(records).seed(seed).shuffle().repeat()


# ---- Batches of records ----------------------------------------------------------------------------------------------


class Batches:
    """Batches of ``batch`` records each; iterating yields whole batches, from the first.

    Args:
      records: ``Records``, or a grain dataset of dicts of arrays without the batch dim; at least ``batch`` of them. A
        repeated dataset never ends.
      batch: records in a batch.
      unit: name of what a run counts per second, such as tokens.
      units: number of these in a record.

    Raises:
      ArgumentError: there are fewer records than a batch has.

    Example:
        batches = Batches(shuffled({"x": x, "y": y}), batch=256)
    """

    def __init__(self, records: Records | grain.MapDataset, batch: int, unit: str = "examples", units: int = 1) -> None:
        if len(records) < batch:
            raise ArgumentError(f"batch={batch} of {len(records)} records: give more records or a smaller batch")
        self.records, self.batch, self.unit, self.units = records, batch, unit, units

    def __iter__(self) -> Iterator[Batch]:
        return self.rows(range(self.batch))

    def rows(self, rows: Sequence[int], done: int = 0) -> Iterator[Batch]:
        """Yields these rows of every batch, after the first ``done`` batches."""
        if isinstance(self.records, Records):
            last = len(self.records) // self.batch
            numbers = count(done) if len(self.records) == maxsize else range(done, last)
            at = np.asarray(rows)
            return (self.records.take(number * self.batch + at) for number in numbers)
        selected = grain.MapDataset.source(_SelectedRows(self, rows, done)).batch(len(rows), drop_remainder=True)
        return cast(Iterator[Batch], iter(selected.to_iter_dataset()))  # threads read ahead


class _SelectedRows:
    """The given rows of all batches of a grain dataset after the first ``done``, as one flat source of records."""

    def __init__(self, batches: Batches, rows: Sequence[int], done: int) -> None:
        self._batches, self._rows, self._done = batches, rows, done

    def __len__(self) -> int:
        size = len(self._batches.records)
        return size if size == maxsize else (size // self._batches.batch - self._done) * len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        number, row = divmod(index, len(self._rows))
        records = cast(grain.MapDataset, self._batches.records)
        return cast(Batch, records[(self._done + number) * self._batches.batch + self._rows[row]])


def describe(batches: Iterable[Any]) -> str:
    """Returns what decides which batches these are, as far as it is known."""
    if not isinstance(batches, Batches):
        return type(batches).__name__
    records = batches.records
    if isinstance(records, ShuffledRecords):
        return f"batches of {batches.batch}, {len(records.records)} records, seed {records.seed}"
    count = f"{len(records)} records of " if len(records) < maxsize else ""
    return f"batches of {batches.batch}, {count}{type(records).__name__}"


# ---- Feeds: batches from a step on, placed on devices ----------------------------------------------------------------

Feed: TypeAlias = Callable[[int], Iterator[Any]]  # number of batches to skip -> the batches after them


def host_feed(batches: Iterable[Any]) -> Feed:
    """A feed of whole batches, without placement."""
    if isinstance(batches, Batches):
        return lambda done: batches.rows(range(batches.batch), done)
    return lambda done: map(_copied, islice(iter(batches), done, None))


def _copied(batch: Any) -> Any:
    """The batch in arrays of its own: it is read ahead, and its maker may use one buffer for all."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch)


def sharded_feed(batches: Iterable[Any], example: Any, shardings: Any) -> "PlacedBatches":
    """A feed of batches with the structure of ``example``, placed in ``shardings``.

    Args:
      batches: ``Batches``, or an iterable of whole batches.
      example: the step's last argument, arrays or ``jax.ShapeDtypeStruct``.
      shardings: the same tree of ``NamedSharding``.
    """
    return PlacedBatches(batches, example, shardings)


class PlacedBatches:
    """A feed of batches on the devices, one by one or several stacked; see ``sharded_feed``."""

    def __init__(self, batches: Iterable[Any], example: Any, shardings: Any) -> None:
        self._batches = batches
        self._leaves, self._tree = jax.tree.flatten(example)
        self._paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(example)]
        self._shardings = jax.tree.leaves(shardings)
        self._rows: Sequence[int] | None = None
        if isinstance(batches, Batches):
            self._rows = _local_rows(batches.batch, self._leaves, self._shardings)
        count = None if self._rows is None else len(self._rows)
        self._types = [(x.shape if count is None else (count, *x.shape[1:]), x.dtype) for x in self._leaves]
        self._places: dict[int, list[_Blocks]] = {}  # of so many batches

    def __call__(self, done: int) -> Iterator[Any]:
        """The batches after the first ``done``."""
        return map(self._place, self._read(done))

    def stacked(self, done: int, counts: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """Yields the batches after the first ``done``, so many at a time, with their number; several as stacked arrays.

        If the batches end or raise an error before so many are read, those that there are come one by one; not in one
        process of several, for the others may have read so many.
        """
        batches = self._read(done)
        for wanted in counts:
            found: list[list[np.ndarray]] = []
            ended: Exception | None = None
            try:
                while len(found) < wanted:
                    found.append(next(batches))
            except Exception as error:  # StopIteration as well
                ended = error
            if ended is None and wanted > 1:
                yield wanted, self._put([np.stack(each) for each in zip(*found, strict=True)], wanted)
            elif ended is None or isinstance(ended, StopIteration) or jax.process_count() == 1:
                yield from ((1, self._place(each)) for each in found)
            if isinstance(ended, StopIteration):
                return
            if ended is not None:
                raise ended

    def _read(self, done: int) -> Iterator[list[np.ndarray]]:
        """The arrays of the batches after the first ``done``: of this process's rows, if they are read by rows."""
        if isinstance(self._batches, Batches) and self._rows is not None:
            return map(self._arrays, self._batches.rows(self._rows, done))
        return map(self._arrays, islice(iter(self._batches), done, None))

    def _arrays(self, batch: Any) -> list[np.ndarray]:
        fresh = isinstance(self._batches, Batches)  # others may use one buffer for all
        leaves = [_canonical(np.asarray(x) if fresh else np.array(x)) for x in jax.tree.leaves(batch)]
        if [(x.shape, x.dtype) for x in leaves] != self._types:
            self._refuse(leaves)
        return leaves

    def _place(self, arrays: list[np.ndarray]) -> Any:
        return jax.tree.unflatten(self._tree, self._put(arrays, 1))

    def _put(self, arrays: list[np.ndarray], count: int) -> list[jax.Array]:
        if count not in self._places:
            leaves = zip(self._leaves, self._shardings, strict=True)
            self._places[count] = [_Blocks(x, at, count, self._rows) for x, at in leaves]
        return [blocks.put(x) for blocks, x in zip(self._places[count], arrays, strict=True)]

    def _refuse(self, leaves: list[np.ndarray]) -> None:
        expected = [array_type(dtype, shape, ()) for shape, dtype in self._types]
        got = [array_type(x.dtype, x.shape, ()) for x in leaves]
        if len(got) != len(expected):
            rows = [f"{len(got)} arrays; the step's last argument has {len(expected)}: {', '.join(self._paths)}"]
        else:
            pairs = zip(self._paths, got, expected, strict=True)
            rows = [f"{path or 'the array'}: {a}; the step takes {b}" for path, a, b in pairs if a != b]
        raise ArgumentError(faults("a batch does not match the step's last argument:", shortened(rows)))


class _Blocks:
    """The blocks of an array of batches that devices of this process hold.

    Args:
      leaf: the array of one batch.
      at: where it is placed.
      count: number of batches; several are stacked.
      rows: of the batch that this process reads, in order; None for all.
    """

    def __init__(self, leaf: Any, at: NamedSharding, count: int, rows: Sequence[int] | None) -> None:
        stack = (count,) if count > 1 else ()
        self._at = NamedSharding(at.mesh, PartitionSpec(*(None for _ in stack), *at.spec))
        self._shape, self._dim = (*stack, *leaf.shape), len(stack)
        self._rows = None if rows is None or len(rows) == self._shape[self._dim] else rows

    def put(self, local: np.ndarray) -> jax.Array:
        """Returns the array, of the rows that this process has read; ``device_put`` would take twice as long."""
        rows = self._rows
        if rows is None:
            return jax.make_array_from_callback(self._shape, self._at, local.__getitem__)

        def block(index: Any) -> np.ndarray:
            return cast(np.ndarray, local[_local_index(index, self._dim, self._shape, rows)])

        return jax.make_array_from_callback(self._shape, self._at, block)


def _local_index(index: Any, dim: int, shape: tuple[int, ...], rows: Sequence[int]) -> Any:
    """Returns the index of a block among the rows that this process reads; ``dim`` has the rows."""
    if not index:
        return index
    at = np.searchsorted(rows, np.arange(shape[dim])[index[dim]])
    dense = len(at) > 0 and at[-1] - at[0] == len(at) - 1
    return (*index[:dim], slice(int(at[0]), int(at[-1]) + 1) if dense else at, *index[dim + 1 :])


def _canonical(x: np.ndarray) -> np.ndarray:
    """Returns the array in the dtype that it has in jax, which takes 64 bits for 32 unless told otherwise."""
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False) if x.dtype.kind in "iufc" else x


def _local_rows(batch: int, leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[int]:
    """The rows of a batch that devices of this process hold, of any of its arrays."""
    rows: set[int] = set()
    for leaf, at in zip(leaves, shardings, strict=True):
        if not leaf.shape or leaf.shape[0] != batch:
            taken = array_type(leaf.dtype, leaf.shape, ())
            raise ArgumentError(f"batches of {batch} rows do not match {taken} in the step's last argument")
        blocks = at.addressable_devices_indices_map(leaf.shape).values()
        rows.update(*(range(batch)[block[0]] for block in blocks if block))
    return sorted(rows)


# ---- Reading ahead ---------------------------------------------------------------------------------------------------

_PATIENCE = 0.5  # seconds between two looks whether to wait longer


class ReadingStopped(Exception):
    """The next item was not there when it was no longer waited for."""


class BatchesEnded(Exception):
    """The batches of this process, which is one of several, are fewer than the run has steps."""


def at_least(items: Iterator[Any], count: int) -> Iterator[Any]:
    """Yields the first ``count`` items; BatchesEnded is raised where one is missing."""
    for _ in range(count):
        try:
            item = next(items)
        except StopIteration:
            raise BatchesEnded from None
        yield item


class ReadAhead(Iterator[Any]):
    """An iterator whose next items a thread makes meanwhile; a context manager, which ends the thread.

    Args:
      items: what is read; an exception that it raises is raised where its item would be.
      depth: number of items to make ahead.
      stops: whether to wait no longer for an item; then ReadingStopped is raised.
      margin: an item is returned only if so many after it are known, so that as many are left when reading one fails;
        it can be changed.
      fails: called once when reading has failed, and so many items are left, before the first of these is returned.
    """

    def __init__(
        self,
        items: Iterator[Any],
        depth: int = 2,
        stops: Callable[[], bool] = lambda: False,
        margin: int = 0,
        fails: Callable[[], None] = lambda: None,
    ) -> None:
        self._items, self._stops, self._fails = items, stops, fails
        self._depth, self.margin = depth, margin
        self._ready: deque[Any] = deque()
        self._end: BaseException | None = None  # what reading ended with; StopIteration as well
        self._said = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="read ahead", daemon=True)

    def __enter__(self) -> "ReadAhead":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=1)

    @property
    def failure(self) -> Exception | None:
        """What reading has failed with; the items before it may not all have been returned."""
        return None if isinstance(self._end, StopIteration) or not isinstance(self._end, Exception) else self._end

    @property
    def left(self) -> int:
        """The number of items that have been read and not returned."""
        return len(self._ready)

    def wait(self) -> None:
        """Waits until more than ``margin`` items are left, or reading has ended."""
        with self._changed:
            while len(self._ready) <= self.margin and self._end is None:
                if not self._changed.wait(_PATIENCE) and self._stops():
                    raise ReadingStopped

    def __next__(self) -> Any:
        self.wait()
        with self._changed:
            says = self.failure is not None and not self._said and len(self._ready) >= self.margin > 0
        if says:
            self._said = True
            self._fails()
        with self._changed:
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
        assert self._end is not None
        raise self._end

    def _read(self) -> None:
        while self._end is None:
            try:
                item = next(self._items)
            except BaseException as error:
                with self._changed:
                    self._end = error
                    self._changed.notify_all()
                return
            with self._changed:
                while len(self._ready) >= max(self._depth, self.margin + 1) and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                self._ready.append(item)
                self._changed.notify_all()
