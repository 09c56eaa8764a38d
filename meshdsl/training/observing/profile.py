"""A profile of some steps of a run, by jax's profiler: ``--profile 10:13``.

The trace is of the first process, without its Python functions, and begins and ends when the devices are idle.
"""

import logging
import time
from pathlib import Path

import jax

from meshdsl.errors import ArgumentError, first_line

log = logging.getLogger("meshdsl")


def parse_profile(text: str | None) -> tuple[int, int] | None:
    """Returns the first and the last step that ``--profile`` states.

    Raises:
      ArgumentError: it is not of the form ``10:13``.
    """
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ArgumentError(f"--profile {text}: not the first and the last step, such as 10:13")
    return int(first), int(last)


class Profile:
    """Traces the dispatches of a run that contain some steps.

    Args:
      folder: where the trace is written.
      steps: the first and the last one; None for none.

    Attributes:
      steps: number of steps traced.
      seconds: per step, while they were traced.
    """

    def __init__(self, folder: Path, steps: tuple[int, int] | None) -> None:
        self.folder, self._range = folder, steps
        self.steps, self.seconds = 0, 0.0
        self._first, self._started = 0, 0.0
        self._on = False

    def begins(self, done: int, count: int) -> bool:
        """Whether the trace begins with the next dispatch, of ``count`` steps."""
        return self._range is not None and done + count >= self._range[0] and done < self._range[1] and not self._on

    def ends(self, done: int) -> bool:
        """Whether the trace ends after so many steps."""
        return self._on and self._range is not None and done >= self._range[1]

    def start(self, done: int) -> None:
        """Begins the trace; if that fails, a warning says so."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(str(self.folder), profiler_options=options)
        except Exception as error:  # of the profiler's library, or another trace
            log.warning("no profile: %s", first_line(error))
            self._range = None
            return
        self._on, self._first, self._started = True, done, time.perf_counter()

    def stop(self, done: int) -> None:
        """Ends the trace, if it has begun."""
        if not self._on:
            return
        self.steps, self._on, self._range = done - self._first, False, None
        self.seconds = (time.perf_counter() - self._started) / max(1, self.steps)
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            log.warning("no profile: %s", first_line(error))
            self.steps = 0
