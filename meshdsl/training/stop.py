"""Stopping cleanly: a run that is told to end finishes its step, saves, and says how to go on."""

import signal
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class Stop:
    """Hears SIGTERM and Ctrl-C while a run trains; a context manager. A second Ctrl-C ends it at once.

    With several processes jax hears SIGTERM, and all of them agree on the step after which they stop.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        if jax.process_count() == 1:
            self._before = {kind: signal.signal(kind, self._hear) for kind in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def after(self, step: int) -> bool:
        """Whether to stop after this step; every process asks after every step."""
        if jax.process_count() > 1:
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return self._asked

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        self._restore()

    def _restore(self) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)
        self._before = {}
