"""Compiled loops, which need no interpreter, beside other work.

A thread that comes out of such a loop asks for the interpreter and gets it after a *switch interval*, 5 ms in Python's
default; where a stage consists of hundreds of loops it would wait most of the time. So the interval is short meanwhile.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Protocol, TypeVar

T = TypeVar("T")
_INTERVAL = 2e-4  # seconds


class Start(Protocol):
    """Starts what runs beside other work."""

    def __call__(self, function: Callable[[], T], /) -> "Future[T]":
        """Call a function in a thread of its own."""
        ...


class _Often:
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


_OFTEN = _Often()


@contextmanager
def beside() -> Iterator[Start]:
    """What calls a function in a thread of its own while the block runs, which ends when both have."""
    with _OFTEN, ThreadPoolExecutor() as others:
        yield others.submit


def together(functions: Sequence[Callable[[], T]]) -> list[T]:
    """What functions return, which run beside each other if there are several."""
    if len(functions) == 1:
        return [functions[0]()]
    with beside() as start:
        return [started.result() for started in [start(function) for function in functions]]
