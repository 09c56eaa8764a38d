"""Batches of text: shuffled windows whose position can be saved and restored.

The flat array of tokens is cut into windows that do not overlap; grain shuffles them anew in
every epoch. An iterator's ``get_state`` says where it stands; ``set_state`` puts a new one
at the same place, so a resumed run sees exactly the batches that it would have seen.
"""

from collections.abc import Iterator
from typing import Protocol, cast

import grain.python as grain
import numpy as np

from meshdsl.training.data import Tokens

Batch = dict[str, np.ndarray]


class BatchIterator(Protocol):
    """Batches without end, with a position that can be saved."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def get_state(self) -> dict[str, object]:
        """Where it stands, as JSON holds it."""

    def set_state(self, state: dict[str, object]) -> None:
        """Stand where ``state`` says."""


class Windows:
    """Windows of ``seq`` tokens and, one further, the tokens that they should predict."""

    def __init__(self, tokens: Tokens, seq: int) -> None:
        self._tokens = tokens
        self._seq = seq

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq

    def __getitem__(self, index: int) -> Batch:
        start = index * self._seq
        window = self._tokens[start : start + self._seq + 1].astype(np.int32)
        return {"inputs": window[:-1], "targets": window[1:]}


def text_batches(tokens: Tokens, batch: int, seq: int, seed: int = 0) -> BatchIterator:
    """Batches of shuffled windows without end: int32 ``inputs`` and ``targets`` ``[batch, seq]``."""
    windows = grain.MapDataset.source(Windows(tokens, seq)).seed(seed).shuffle().repeat()
    return cast(BatchIterator, iter(windows.batch(batch, drop_remainder=True).to_iter_dataset()))


def fixed_batches(tokens: Tokens, batch: int, seq: int, count: int = 8) -> list[Batch]:
    """The same ``count`` batches at every call, spread evenly over the tokens; for evaluation."""
    windows = Windows(tokens, seq)
    chosen = np.linspace(0, len(windows) - 1, count * batch).astype(int).reshape(count, batch)
    return [_stack([windows[i] for i in row]) for row in chosen.tolist()]


def _stack(windows: list[Batch]) -> Batch:
    return {name: np.stack([window[name] for window in windows]) for name in windows[0]}
