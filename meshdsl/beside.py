"""Compiled loops, which need no interpreter, beside other work.

A thread that comes out of such a loop asks for the interpreter and gets it after a *switch interval*, 5 ms in Python's
default; where a stage consists of hundreds of loops it would wait most of the time. So the interval is short meanwhile.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

Start = Callable[[Callable[[], float]], "Future[float]"]
_INTERVAL = 2e-4  # seconds


@contextmanager
def beside() -> Iterator[Start]:
    """What calls a function in a thread of its own while the block runs, which ends when both have."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, _INTERVAL))
    try:
        with ThreadPoolExecutor() as others:
            yield others.submit
    finally:
        sys.setswitchinterval(interval)
