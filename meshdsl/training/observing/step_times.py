"""Where the time of a run's steps goes, device memory, and which process takes longest.

The loop calls ``StepTimes.per_step`` when it has waited for a loss, so that the seconds of all steps add up to those of
the run. What is neither waiting for input, compiling, saving nor evaluating is computing: Python and devices work at
the same time, and only a profile tells them apart.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import jax

_PAUSE = 0.5  # seconds between two looks at the memory of devices
_OUTLIER = 0.1  # of a step: by how much a process takes longer than others that is named


class StepTimes:
    """Seconds since the last steps were recorded, by part."""

    def __init__(self) -> None:
        self._parts = {"input": 0.0}
        self._start = self._compared = time.perf_counter()
        self._busy, self._steps = 0.0, 0

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Counts the time of a block: input, compile, save or evaluation; dispatch is a part of computing."""
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        if part in ("input", "dispatch"):
            self._busy += spent
        if part != "dispatch":
            self._parts[part] = self._parts.get(part, 0.0) + spent

    def per_step(self, steps: int) -> dict[str, float]:
        """Returns seconds per step since the last call: in all, and of each part."""
        now = time.perf_counter()
        total, self._start = now - self._start, now
        parts, self._parts = self._parts, {"input": 0.0}
        parts["compute"] = total - sum(parts.values())
        self._steps += steps
        return {"seconds": total / steps, **{f"{part} seconds": spent / steps for part, spent in parts.items()}}

    def busy_per_step(self) -> tuple[float, float]:
        """Returns seconds per step since the last call in which this process did not wait for devices, and in all."""
        now, steps = time.perf_counter(), max(1, self._steps)
        busy, total = self._busy / steps, (now - self._compared) / steps
        self._busy, self._steps, self._compared = 0.0, 0, now
        return busy, total


class SlowestProcess(NamedTuple):
    """The process that took longest, its seconds per step, and the median of the others."""

    process: int
    seconds: float
    others: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "SlowestProcess":
        """Returns the slowest of several processes."""
        process = max(range(len(seconds)), key=seconds.__getitem__)
        return cls(process, seconds[process], median((*seconds[:process], *seconds[process + 1 :])))

    def delays(self, step: float) -> bool:
        """Whether steps of so many seconds are notably longer by it."""
        return self.seconds - self.others > _OUTLIER * step


class DeviceMemory:
    """The most memory that a device of this process has held, looked up twice a second."""

    def __init__(self) -> None:
        self._next = 0.0

    def peak(self) -> int | None:
        """Returns bytes; None between two looks, and where the backend does not say."""
        now = time.monotonic()
        if now < self._next:
            return None
        found = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
        known = [size for size in found if size is not None]
        self._next = now + _PAUSE if known else float("inf")
        return max(known, default=None)
