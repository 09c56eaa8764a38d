"""The printed difference of two plans: what got worse, then what did it.

The first line is the verdict; totals, what the plans were made for, collectives by how much more or less time they
take, and layouts follow. Layouts of repeated layers that changed alike share a row.
"""

from collections.abc import Iterator, Sequence

from meshdsl.plan.diff import Cost, PlanDiff
from meshdsl.plan.group import common, pattern
from meshdsl.plan.table import table
from meshdsl.units import seconds_text

_LINES = 3
_WORDS = {"seconds": "predicted step time", "bytes": "sent per device and step", "memory": "peak memory per device"}


def diff_text(diff: PlanDiff) -> str:
    """All that differs, the costliest first."""
    if not diff:
        return "the plans are equal"
    sections = (_totals(diff), _made_for(diff), _collectives(diff), _layouts(diff))
    return "\n\n".join("\n".join(lines) for section in ([_verdict(diff)], *sections) if (lines := list(section)))


def _verdict(diff: PlanDiff) -> str:
    """What got worse and what better, in words."""
    found: dict[str, list[str]] = {"worse": [], "better": []}
    for name, change in diff.changes.items():
        found["worse" if change > 0 else "better"].append(f"{_WORDS[name]} {_percent(change)}")
    said = [f"{how}: {', '.join(what)}" for how, what in found.items() if what]
    return "; ".join(said) or "changed, at the same time, bytes and memory"


def _totals(diff: PlanDiff) -> Iterator[str]:
    if diff.totals:
        rows = [(_WORDS[name], was, now, _percent(diff.changes[name])) for name, was, now in diff.totals]
        yield from table([("total", "before", "after", "change"), *rows])


def _made_for(diff: PlanDiff) -> Iterator[str]:
    if diff.made_for:
        yield from table([("planned for", "before", "after"), *diff.made_for])


def _collectives(diff: PlanDiff) -> Iterator[str]:
    if diff.collectives:
        by_change = sorted(diff.collectives, key=lambda row: -abs(_more(row)))
        yield from table([("change", "before", "after", "collective"), *map(_collective_row, by_change)])


def _collective_row(row: tuple[str, Cost, Cost]) -> Sequence[str]:
    what, before, after = row
    lines = (after if after.runs else before).lines
    shown = ", ".join([*lines[:_LINES], *(["..."] if len(lines) > _LINES else [])])
    more = _more(row)
    sign = "+" if more > 0 else "-" if more < 0 else ""
    return f"{sign}{seconds_text(abs(more))}", str(before), str(after), f"{what}, at {shown}"


def _more(row: tuple[str, Cost, Cost]) -> float:
    _, before, after = row
    return after.seconds - before.seconds


def _layouts(diff: PlanDiff) -> Iterator[str]:
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, before, after in diff.layouts:
        alike.setdefault((pattern(name), before, after), []).append(name)
    rows = [(common(names), _times(len(names)), *_apart(*key[1:])) for key, names in alike.items()]
    if rows:
        yield from table([("layout", "", "type", "before", "after"), *rows])


def _apart(before: str, after: str) -> Sequence[str]:
    """Type and both layouts; where the type differs too, it stays with them."""
    (was, _, old), (now, _, new) = (text.partition("] ") for text in (before, after))
    return (f"{was}]", old, new) if was == now else ("", before, after)


def _percent(change: float) -> str:
    return f"{change:+.1%}" if change < float("inf") else "from nothing"


def _times(count: int) -> str:
    return f"x{count}" if count > 1 else ""
