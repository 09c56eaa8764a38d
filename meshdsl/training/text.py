"""Batches of text: windows of tokens, and the tokens that follow them."""

import numpy as np

from meshdsl.training.batches import Batch, Batches, shuffled
from meshdsl.training.data import Tokens


class Windows:
    """Windows of ``seq`` tokens that do not overlap and, one further, the tokens that they should predict."""

    def __init__(self, tokens: Tokens, seq: int) -> None:
        self._tokens = tokens
        self._seq = seq

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq

    def __getitem__(self, index: int) -> Batch:
        start = index * self._seq
        window = self._tokens[start : start + self._seq + 1].astype(np.int32)
        return {"inputs": window[:-1], "targets": window[1:]}


def text_batches(tokens: Tokens, batch: int, seq: int, seed: int = 0) -> Batches:
    """Batches of shuffled windows without end: int32 ``inputs`` and ``targets`` ``[batch, seq]``."""
    return Batches(shuffled(Windows(tokens, seq), seed), batch, "tokens", seq)


def fixed_batches(tokens: Tokens, batch: int, seq: int, count: int = 8) -> list[Batch]:
    """The same ``count`` batches at every call, spread evenly over the tokens; for evaluation."""
    windows = Windows(tokens, seq)
    chosen = np.linspace(0, len(windows) - 1, count * batch).astype(int).reshape(count, batch)
    return [_stack([windows[i] for i in row]) for row in chosen.tolist()]


def _stack(windows: list[Batch]) -> Batch:
    return {name: np.stack([window[name] for window in windows]) for name in windows[0]}
