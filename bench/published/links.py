"""Fits the links of the presets to measured collectives: one line for short messages and one for long ones.

python -m bench.published.links

A message takes the minimum of the two lines, as libraries switch between protocols for short and long messages. Each
line is fitted to its range of sizes by relative errors; the ranges are separated where the mean absolute logarithmic
error is smallest. The lines are copied into the presets by hand (``layouts/topologies``).
"""

import numpy as np

from bench.published.case import rows
from bench.report import table
from meshdsl.calibrate import fit_link
from meshdsl.layouts.topology import Link

LEAST, FEWEST = 32768, 3  # smallest message in bytes; fewest points per line
HEADER = ("hardware", "messages", "one line", "median error", "largest", "short and long", "median error", "largest")


def main() -> None:
    """Prints the table of fitted lines."""
    measured = [row for row in rows("collective_busbw") if row["collective"] == "all_reduce" and row["time_us"]]
    series = dict.fromkeys((row["hardware"], int(row["ranks"])) for row in measured)
    lines = []
    for hardware, ranks in series:
        chosen = [r for r in measured if (r["hardware"], int(r["ranks"])) == (hardware, ranks)]
        points = sorted((float(r["bytes"]), float(r["time_us"]) / 1e6) for r in chosen if float(r["bytes"]) >= LEAST)
        if len(points) >= 2 * FEWEST:
            size, seconds = np.array(points).T
            lines.append((f"{hardware}, {ranks} ranks", len(points), *_fits(2 * size * (ranks - 1) / ranks, seconds)))
    print(table(HEADER, lines))


def _fits(sent: np.ndarray, seconds: np.ndarray) -> tuple[str, ...]:
    one = (fit_link(sent, seconds),)
    pairs = [
        (fit_link(sent[:k], seconds[:k]), fit_link(sent[k:], seconds[k:])) for k in range(FEWEST, len(sent) - FEWEST)
    ]
    two = min(pairs, key=lambda pair: np.mean(np.abs(np.log(_seconds(pair, sent) / seconds))))
    return tuple(text for links in (one, two) for text in (_text(links), *_errors(_seconds(links, sent) / seconds)))


def _seconds(links: tuple[Link, ...], sent: np.ndarray) -> np.ndarray:
    return np.min([link.latency + sent / link.bandwidth for link in links], axis=0)


def _text(links: tuple[Link, ...]) -> str:
    return "; ".join(f"{1e6 * link.latency:.1f} us, {link.bandwidth / 1e9:.1f} GB/s" for link in links)


def _errors(ratio: np.ndarray) -> tuple[str, str]:
    errors = np.abs(ratio - 1)
    return f"{np.median(errors):.1%}", f"{errors.max():.1%}"


if __name__ == "__main__":
    main()
