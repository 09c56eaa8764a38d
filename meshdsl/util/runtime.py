"""Compiled loops, which need no interpreter, beside other work.

A thread that comes out of such a loop asks for the interpreter and gets it after a *switch interval*, 5 ms in Python's
default; where a stage consists of hundreds of loops it would wait most of the time. So the interval is short meanwhile.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from threading import Lock
from typing import ParamSpec, Protocol, TypeVar

# ---- Beside ----------------------------------------------------------------------------------------------------------


T = TypeVar("T")
_INTERVAL = 2e-4  # seconds


class Submit(Protocol):
    """Starts what runs beside other work."""

    def __call__(self, function: Callable[[], T], /) -> "Future[T]":
        """Call a function in a thread of its own."""
        ...


class _ShortSwitchInterval:
    """Hands the interpreter over often, as long as some block asks for it; several threads may have one."""

    def __init__(self) -> None:
        self._lock, self._blocks, self._before = Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._blocks:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _INTERVAL))
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                sys.setswitchinterval(self._before)


_OFTEN = _ShortSwitchInterval()


@contextmanager
def worker_pool() -> Iterator[Submit]:
    """What calls a function in a thread of its own while the block runs, which ends when both have."""
    with _OFTEN, ThreadPoolExecutor() as others:
        yield others.submit


def run_parallel(functions: Sequence[Callable[[], T]]) -> list[T]:
    """What functions return, which run beside each other if there are several."""
    if len(functions) == 1:
        return [functions[0]()]
    with worker_pool() as start:
        return [started.result() for started in [start(function) for function in functions]]


# ---- Collector -------------------------------------------------------------------------------------------------------
# Stages that make millions of objects and drop few, without the cyclic garbage collector.
#
# It walks over all that is alive again and again, which takes a quarter of planning a step of 20,000 operations, and
# finds nothing: what a stage makes lives until it returns. What it drops is freed at once, unless it is in a cycle.


P = ParamSpec("P")


def gc_paused(function: Callable[P, T]) -> Callable[P, T]:
    """The function with the collector off while it runs, and on again afterwards if it was."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        on = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if on:
                gc.enable()

    return run


# ---- Clock -----------------------------------------------------------------------------------------------------------
# The time that planning may take, if somebody has said so.
#
# What the planner spends is counted in work, so that the same step has the same plan everywhere. A limit in seconds is
# another thing: where it is reached, what would only improve the plan or its bound is left out.


class Deadline:
    """Asked between the parts of a search whether there is time for another.

    Args:
      seconds: from now on; None for any time.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds, self._end = seconds, None if seconds is None else time.perf_counter() + seconds
        self.has_stopped = False

    def expired(self) -> bool:
        """Whether time is up; who asks leaves something out then."""
        self.has_stopped |= self._end is not None and time.perf_counter() >= self._end
        return self.has_stopped
