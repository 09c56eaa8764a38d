"""The Python runtime: worker threads for compiled loops, the garbage collector, and deadlines."""

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from threading import Lock
from typing import ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

# ---- Threads ---------------------------------------------------------------------------------------------------------
# Compiled loops release the interpreter lock, so they run in parallel with other work. A thread that leaves a loop
# requests the lock and gets it after a *switch interval*, 5 ms by default; a stage of hundreds of loops would mostly
# wait. So the interval is short while workers run.

_SWITCH_INTERVAL = 2e-4  # seconds


class Submit(Protocol):
    """Starts a function in a worker thread."""

    def __call__(self, function: Callable[[], T], /) -> "Future[T]":
        """Returns the future of the function's result."""
        ...


class _ShortSwitchInterval:
    """Context with a short switch interval; blocks may nest, and overlap in several threads."""

    def __init__(self) -> None:
        self._lock, self._blocks, self._previous = Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._blocks:
                self._previous = sys.getswitchinterval()
                sys.setswitchinterval(min(self._previous, _SWITCH_INTERVAL))
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                sys.setswitchinterval(self._previous)


_SHORT_SWITCH_INTERVAL = _ShortSwitchInterval()


@contextmanager
def worker_pool() -> Iterator[Submit]:
    """Yields ``submit``, which runs a function in a worker thread; leaving the block joins all workers."""
    with _SHORT_SWITCH_INTERVAL, ThreadPoolExecutor() as workers:
        yield workers.submit


def run_parallel(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Returns the results of functions, in order; several run in worker threads, a single one in this thread."""
    if len(functions) == 1:
        return [functions[0]()]
    with worker_pool() as submit:
        return [future.result() for future in [submit(function) for function in functions]]


# ---- Garbage collector -----------------------------------------------------------------------------------------------


def gc_paused(function: Callable[P, T]) -> Callable[P, T]:
    """Returns the function with the cyclic garbage collector off while it runs; afterwards it is as before.

    For stages that create millions of objects and drop few. The collector traverses all live objects over and over,
    which takes a quarter of planning a step of 20,000 operations, and finds nothing: objects of a stage live until it
    returns. Dropped objects are freed at once by reference counting, unless they are in a cycle.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if was_enabled:
                gc.enable()

    return run


# ---- Deadlines -------------------------------------------------------------------------------------------------------


class Deadline:
    """A limit on wall time that the parts of a search check between them.

    The planner counts its work in table entries, so that the same step has the same plan everywhere. A limit in seconds
    is an exception that the user makes: once it has passed, parts that only improve the plan or its bound are skipped.

    Args:
      seconds: from now on; None for no limit.

    Attributes:
      has_stopped: whether any check has found it expired, so that something was skipped.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds, self._end = seconds, None if seconds is None else time.perf_counter() + seconds
        self.has_stopped = False

    def expired(self) -> bool:
        """Whether the time is up; a caller that learns so must skip its part."""
        self.has_stopped |= self._end is not None and time.perf_counter() >= self._end
        return self.has_stopped
