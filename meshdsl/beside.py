"""Compiled loops, which need no interpreter, beside other work.

A thread that comes out of such a loop asks for the interpreter and gets it after a *switch interval*, 5 ms in Python's
default; where a stage consists of hundreds of loops it would wait most of the time. So the interval is short meanwhile.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_INTERVAL = 2e-4  # seconds


@contextmanager
def beside(function: Callable[[], T]) -> Iterator["Future[T]"]:
    """Call the function in a thread of its own while the block runs, which ends when both have."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, _INTERVAL))
    try:
        with ThreadPoolExecutor(1) as other:
            yield other.submit(function)
    finally:
        sys.setswitchinterval(interval)
