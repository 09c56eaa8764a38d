"""Data sinking: which steps of a run go in one dispatch, and whether that is faster.

Steps are taken ``size`` at a time where as many are left before the end, from multiples of ``size`` on, so that
checkpoints and evaluations, which come after multiples of it, see every state that they would have seen. Where both
ways are to be measured, the first steps are

    1 + size or a few more     one at a time; the first one is not counted
    3 * size                   in three dispatches; the first one is not counted

and the way that took less time per step is taken for the rest of the run. All processes follow the first one.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import gcd
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshdsl.errors import ArgumentError
from meshdsl.util.text import seconds_text

LARGEST = 16  # steps of one dispatch, where both ways are measured
_GROUPS = 3  # dispatches of several steps in the measurement
_GAIN = 0.95  # of the time of single steps, that several in one dispatch may take at most


def check_sink(size: int, save_every: int, evaluate_every: int) -> None:
    """Raises ArgumentError unless checkpoints and evaluations come after multiples of ``size`` steps."""
    if save_every % size or evaluate_every % size:
        common = gcd(save_every, evaluate_every)
        nearest = max(n for n in range(1, size + 1) if common % n == 0)
        raise ArgumentError(
            f"--sink {size} has to divide --save-every {save_every} and --evaluate-every {evaluate_every}: "
            f"{nearest} does, or change these"
        )


def parse_sink(text: str, save_every: int, evaluate_every: int) -> tuple[int, bool]:
    """Returns the size that ``--sink`` states, and whether both ways are to be measured.

    ``auto`` is the largest size up to ``LARGEST`` after whose multiples checkpoints and evaluations come.

    Raises:
      ArgumentError: it is neither a number of steps nor ``auto``, or does not divide.
    """
    if text == "auto":
        common = gcd(save_every, evaluate_every)
        return max(n for n in range(1, LARGEST + 1) if common % n == 0), True
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"--sink {text}: neither a number of steps nor 'auto'")
    check_sink(int(text), save_every, evaluate_every)
    return int(text), False


@dataclass
class Sink:
    """The dispatches of a run.

    Args:
      size: steps in one dispatch.
      step: ``step(*state, batches) -> (*state, losses)``.
      compile: compiles it, and if it is called with True, the single step too.
      feed: ``feed(done, counts)`` yields a number of batches and the batches, stacked if there are several, for each
        of ``counts``.
      measured: whether both ways are to be measured.
    """

    size: int
    step: Callable[..., Any]
    compile: Callable[[bool], Any]
    feed: Callable[[int, Iterator[int]], Iterator[tuple[int, Any]]]
    measured: bool = False
    _seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})  # per step, by several?
    _together: bool = True
    _decided: threading.Event = field(default_factory=threading.Event)

    def prepare(self, done: int, steps: int) -> None:
        """Compiles what a run calls, so that none of its steps waits for that."""
        self.compile(self.measured or bool(done % self.size or steps % self.size))

    def counts(self, done: int, steps: int) -> Iterator[int]:
        """Yields the number of steps of each dispatch; after those that are measured, waits for ``decide``."""
        first, groups = done, 0
        while done < steps:
            fits = done % self.size == 0 and done + self.size <= steps
            if not self.measured:
                together = fits
            elif groups < _GROUPS:
                together = fits and done - first > self.size
            else:
                self._decided.wait()
                together = fits and self._together
            groups += together
            count = self.size if together else 1
            yield count
            done += count

    def add(self, count: int, seconds: float) -> None:
        """Adds the seconds per step of a dispatch."""
        if not self._decided.is_set():
            self._seconds[count > 1].append(seconds)

    def is_measured(self, groups: int) -> bool:
        """Whether so many dispatches of several steps complete the measurement, which has not been decided."""
        return self.measured and groups >= _GROUPS and not self._decided.is_set()

    def decide(self) -> str:
        """Decides what is taken, and returns a line that says so."""
        single, several = (median(times[1:]) for times in (self._seconds[False], self._seconds[True]))
        faster = np.array(several < _GAIN * single)
        if jax.process_count() > 1:
            faster = multihost_utils.broadcast_one_to_all(faster)
        self._together = bool(faster)
        self.release()
        taken = f"{self.size} at a time" if self._together else "one at a time"
        times = f"{seconds_text(several)} each, {seconds_text(single)} one at a time"
        return f"{self.size} steps in one dispatch take {times}: taken {taken}"

    def release(self) -> None:
        """Ends the waiting of ``counts``; the run may have ended."""
        self._decided.set()
