"""Batches of shuffled records, whose position in a run is the number of steps done.

Records are a grain ``MapDataset``: record ``i`` is known from ``i`` alone, so a run goes on after any number of
batches with exactly those it would have had, and a process of several reads only the rows that its devices hold.

    Batches(shuffled({"images": images, "labels": labels}), batch=256)    # shuffled anew in every epoch
"""

from collections.abc import Iterator, Mapping, Sequence
from sys import maxsize
from typing import Any, cast

import grain.python as grain
import numpy as np

from meshdsl.errors import ArgumentError, faults

Batch = dict[str, np.ndarray]


class Batches:
    """Batches of ``batch`` records each; iterating gives whole ones, from the first.

    Args:
      records: dicts of arrays without the batch dim, at least ``batch`` of them; repeated ones never end.
      unit: what a run counts per second, such as tokens.
      units: how many of these a record has.
    """

    def __init__(self, records: grain.MapDataset, batch: int, unit: str = "examples", units: int = 1) -> None:
        if len(records) < batch:
            raise ArgumentError(f"batch={batch} of {len(records)} records: give more records or a smaller batch")
        self.records, self.batch, self.unit, self.units = records, batch, unit, units

    def __iter__(self) -> Iterator[Batch]:
        return self.rows(range(self.batch))

    def rows(self, rows: Sequence[int], done: int = 0) -> Iterator[Batch]:
        """These rows of every batch, after the first ``done`` batches; read ahead by threads."""
        chosen = grain.MapDataset.source(_Rows(self, rows, done)).batch(len(rows), drop_remainder=True)
        return cast(Iterator[Batch], iter(chosen.to_iter_dataset()))


class _Rows:
    """Some rows of all batches from one on, as a flat source."""

    def __init__(self, batches: Batches, rows: Sequence[int], done: int) -> None:
        self._batches, self._rows, self._done = batches, rows, done

    def __len__(self) -> int:
        size = len(self._batches.records)
        return size if size == maxsize else (size // self._batches.batch - self._done) * len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        number, row = divmod(index, len(self._rows))
        return cast(Batch, self._batches.records[(self._done + number) * self._batches.batch + self._rows[row]])


class Rows:
    """Records of arrays whose first dim counts them."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) != 1:
            rows = [f"{name}: {size} rows" for name, size in sizes.items()]
            raise ArgumentError(faults("arrays of one data set differ in their number of rows:", rows))
        self._arrays = dict(arrays)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, index: int) -> Batch:
        return {name: array[index] for name, array in self._arrays.items()}


def shuffled(source: Any, seed: int = 0) -> grain.MapDataset:
    """The records of a source (``len`` and ``[i]``, or a dict of arrays) without end, shuffled anew in every epoch."""
    records = Rows(source) if isinstance(source, Mapping) else source
    return grain.MapDataset.source(records).seed(seed).shuffle().repeat()
