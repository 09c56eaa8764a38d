"""Interleaved timing, ratios with confidence intervals, markdown tables, and sections of pages.

Programs are compared in rounds of one step each, so that other load on the machine affects all of them equally. The
reported figure is the median of the per-round ratios.
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
    """Returns the seconds of every round by program, after one round of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step())
            seconds[name].append(time.perf_counter() - start)
    return {name: np.array(times[1:]) for name, times in seconds.items()}


def ratio(ours: np.ndarray, peer: np.ndarray, samples: int = 4000) -> Ratio:
    """Returns the median of ``ours / peer`` over the rounds, with a 95% bootstrap interval."""
    ratios = ours / peer
    chosen = np.random.default_rng(0).integers(0, len(ratios), (samples, len(ratios)))
    low, high = np.percentile(np.median(ratios[chosen], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def summarised(page: str, *lines: str) -> str:
    """Returns a page of evidence with these lines as the summary below its title; the site folds what follows it."""
    title, _, text = page.partition("\n\n")
    summary = "\n> ".join(("**In short.** " + lines[0], *lines[1:]))
    return f"{title}\n\n> {summary}\n\n{text}"


def page_section(page: str, title: str) -> list[str]:
    """Returns the lines of a section of a page, from its title to the next heading; empty if there is none."""
    first = title.strip().splitlines()[0]
    lines = page.splitlines()
    if first not in lines:
        return []
    start = lines.index(first)
    end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("## ")), len(lines))
    return ["", *"\n".join(lines[start:end]).rstrip().split("\n")]


def machine() -> str:
    """Returns the devices, cores and versions that a table was measured on."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{len(jax.devices())} x {device.device_kind} on {cores} cores ({platform.machine()}), " + versions()


def versions() -> str:
    """Returns the versions of Python and jax."""
    return f"Python {platform.python_version()}, jax {jax.__version__}"
