"""Interleaved timing, ratios with intervals, tables, and sections of pages.

Programs that are compared take turns, one step each, so that whatever else the machine does
hits all of them alike. What counts is the median of the ratios of one round.
"""

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios with its 95% bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def interleave(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of every round by program; one more round goes first and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step())
            seconds[name].append(time.perf_counter() - start)
    return {name: np.array(times[1:]) for name, times in seconds.items()}


def ratio(ours: np.ndarray, peer: np.ndarray, samples: int = 4000) -> Ratio:
    """``ours / peer`` round by round."""
    ratios = ours / peer
    chosen = np.random.default_rng(0).integers(0, len(ratios), (samples, len(ratios)))
    low, high = np.percentile(np.median(ratios[chosen], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def percent(gap: float) -> str:
    """A gap, small as it may be."""
    return "0" if gap == 0 else f"{gap:.4%}" if gap >= 1e-6 else "below 0.0001%"


def page_section(page: str, title: str) -> list[str]:
    """A section of a page, from its first line to the next heading; nothing if it is not there."""
    first = title.strip().splitlines()[0]
    lines = page.splitlines()
    if first not in lines:
        return []
    start = lines.index(first)
    end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("## ")), len(lines))
    return ["", *"\n".join(lines[start:end]).rstrip().split("\n")]


def machine() -> str:
    """Where a table was measured."""
    device, cores = jax.devices()[0], len(_cores())
    return f"{len(jax.devices())} x {device.device_kind} on {cores} cores ({platform.machine()}), " + versions()


def versions() -> str:
    """The versions that matter."""
    return f"Python {platform.python_version()}, jax {jax.__version__}"


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
