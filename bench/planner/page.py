"""Writes docs/evidence/planner.md and its pictures.

Sections measured in this checkout are rewritten; the others are copied from the existing page.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.planner.pictures import draw_gaps, draw_times
from bench.planner.texts import AGAIN, AXES, CHECK, EQUATIONS, GAPS, INTRO, OVERLAP, PEERS, SHORT, SIZES, STEPS
from bench.report import page_section, summarised, table
from meshdsl.util.text import bytes_text, percent_text, seconds_text

DOCS, PAGE = Path(__file__).parent.parent.parent / "docs" / "evidence", "planner.md"
Rows = Sequence[Mapping[str, Any]]
Found = Mapping[str, Rows]
TITLES = {"greedy": "greedy", "names": "one name, one axis", "axis": "axis by axis"}


def write(found: Found, versions: str, folder: Path = DOCS) -> None:
    """Writes the page and draws its pictures.

    Args:
      found: rows by part; for a part without rows, the section of the existing page is preserved.
      versions: the versions that the figures were measured with.
      folder: the folder of the page.
    """
    file = folder / PAGE
    before = file.read_text() if file.exists() else ""
    parts = [INTRO]
    for part, (title, body) in SECTIONS.items():
        rows = found[part]
        parts += [title, *body(rows)] if rows else page_section(before, title)
        if rows and part in PICTURES:
            PICTURES[part](rows, folder)
    text = "\n".join((*parts, AGAIN, f"2 x86-64 cores, busy with other programs; {versions}\n"))
    file.write_text(summarised(text, SHORT, *re.findall("^Proved optimal: .*$", text, re.MULTILINE)))


def _gaps(rows: Rows) -> Iterator[str]:
    header = ("model", "mesh", "equations", "predicted step", "gap", "seconds")
    yield table(header, [(r["name"], r["mesh"], *_facts(r)) for r in rows])
    proved, largest = sum(r["gap"] == 0 for r in rows), percent_text(max(r["gap"] for r in rows))
    yield f"\nProved optimal: {proved} of {len(rows)}; the largest gap is {largest}."


def _facts(row: Mapping[str, Any]) -> tuple[object, ...]:
    return row["equations"], seconds_text(row["cost"]), percent_text(row["gap"]), f"{row['seconds']:.1f}"


def _check(rows: Rows) -> Iterator[str]:
    header = ("model", "operations and links", "cost", "bound", "seconds of HiGHS")
    yield table(header, [(r["name"], r["nodes"], *_solved(r), f"{r['seconds']:.1f}") for r in rows])


def _solved(row: Mapping[str, Any]) -> tuple[str, str]:
    return (f"{row['cost']:.9f}", f"{row['bound']:.9f}") if "cost" in row else ("not in 60 s", "")


def _peers(rows: Rows) -> Iterator[str]:
    header = ("model", "mesh", "ours", "sent", *(x for title in TITLES.values() for x in (title, "sent")))
    yield table(header, [(r["name"], r["mesh"], *_ours(r["ours"]), *_theirs(r)) for r in rows])
    for peer, title in TITLES.items():
        ratios = [r[peer][0] / r["ours"][0] for r in rows]
        better = sum(ratio > 1 + 1e-9 for ratio in ratios)
        worse = sum(ratio < 1 - 1e-9 for ratio in ratios)
        yield f"\nAgainst {title}: ours is faster in {better} of {len(rows)}, slower in {worse}."


def _ours(found: Sequence[float]) -> tuple[str, str]:
    return seconds_text(found[0]), bytes_text(found[1])


def _theirs(row: Mapping[str, Any]) -> Iterator[str]:
    for peer in TITLES:
        yield f"{row[peer][0] / row['ours'][0]:.4f}"
        yield bytes_text(row[peer][1])


def _steps(rows: Rows) -> Iterator[str]:
    peers = {**TITLES, "xla": "XLA partitioner"}
    header = ("model", "ours", "predicted", "sent", *(x for title in peers.values() for x in (title, "sent")))
    yield table(header, [(r["name"], *_run(r["ours"]), *(x for who in peers for x in _ratio(r[who]))) for r in rows])
    for who, title in peers.items():
        slower, faster = sum(r[who][1] > 1 for r in rows), sum(r[who][2] < 1 for r in rows)
        yield f"\n{title}: slower than ours in {slower} of {len(rows)}, faster in {faster}, beyond the interval."


def _run(found: Sequence[float]) -> tuple[str, str, str]:
    seconds, sent, predicted = found
    return seconds_text(seconds), seconds_text(predicted), bytes_text(sent)


def _ratio(found: Sequence[float]) -> tuple[str, str]:
    median, low, high, sent, predicted = found
    prediction = f" [{predicted:.2f}]" if predicted else ""
    return f"{median:.2f} ({low:.2f} to {high:.2f}){prediction}", bytes_text(sent)


def _equations(rows: Rows) -> Iterator[str]:
    yield table(("layers", "equations", "predicted step", "gap", "seconds"), [(r["layers"], *_facts(r)) for r in rows])


def _axes(rows: Rows) -> Iterator[str]:
    header = ("model", "axes", "equations", "predicted step", "gap", "seconds")
    yield table(header, [(r["name"], r["axes"], *_facts(r)) for r in rows])


def _sizes(rows: Rows) -> Iterator[str]:
    header = ("data", "model", "equations", "predicted step", "gap", "seconds")
    yield table(header, [(r["data"], r["model"], *_facts(r)) for r in rows])


def _overlap(rows: Rows) -> Iterator[str]:
    header = (
        "model",
        "mesh",
        "step",
        "with overlap",
        "sent",
        "seconds",
        "chosen so: step",
        "with overlap",
        "sent",
        "seconds",
    )
    yield table(header, [(r["name"], r["mesh"], *_timed(r["without"]), *_timed(r["with"])) for r in rows])
    shorter = sum(r["with"][1] < r["without"][1] * (1 - 1e-9) for r in rows)
    longer = sum(r["with"][1] > r["without"][1] * (1 + 1e-9) for r in rows)
    yield f"\nShorter with overlap in {shorter} of {len(rows)}, longer in {longer}."


def _timed(found: Sequence[float]) -> tuple[str, ...]:
    return seconds_text(found[0]), seconds_text(found[1]), bytes_text(found[2]), f"{found[3]:.1f}"


SECTIONS: dict[str, tuple[str, Callable[[Rows], Iterator[str]]]] = {
    "gaps": (GAPS, _gaps),
    "check": (CHECK, _check),
    "peers": (PEERS, _peers),
    "steps": (STEPS, _steps),
    "equations": (EQUATIONS, _equations),
    "axes": (AXES, _axes),
    "sizes": (SIZES, _sizes),
    "overlap": (OVERLAP, _overlap),
}
PICTURES: dict[str, Callable[[Rows, Path], None]] = {
    "gaps": lambda rows, folder: draw_gaps(rows, folder / "planner-gaps.svg"),
    "equations": lambda rows, folder: draw_times(rows, folder / "planner-time.svg"),
}
