"""The difference of two plans: layouts, collectives and totals, each before and after.

Collectives are compared by what they are for: kind, axes, phase and reason, wherever the line stands: who adds a line
to a file, or moves a function to another one, changes no communication. Those that both plans have are listed
only where their runs, bytes or seconds differ.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isclose

from meshdsl.plan.text import common, layout_text, pattern
from meshdsl.plan.types import Array, Collective, PlanData
from meshdsl.util.text import bytes_text, seconds_text, table

# ---- Diff ------------------------------------------------------------------------------------------------------------


_PLACE = re.compile(r" \([^()]*:\d+\)")
_SAME = 1e-9


@dataclass(frozen=True)
class CostTotals:
    """Collectives of one purpose: per step their runs, bytes and seconds, and the lines they belong to."""

    runs: int = 0
    bytes: int = 0
    seconds: float = 0.0
    lines: tuple[str, ...] = field(default=(), compare=False)

    def plus(self, c: Collective) -> "CostTotals":
        """With one more collective."""
        lines = tuple(dict.fromkeys((*self.lines, c.source)))
        return CostTotals(
            self.runs + c.trips, self.bytes + c.trips * c.bytes, self.seconds + c.trips * c.seconds, lines
        )

    def is_like(self, other: "CostTotals") -> bool:
        """Whether they are the same, but for the last digits of a sum."""
        sent = (self.runs, self.bytes) == (other.runs, other.bytes)
        return sent and isclose(self.seconds, other.seconds, rel_tol=_SAME)

    def __str__(self) -> str:
        return f"x{self.runs} {bytes_text(self.bytes)} {seconds_text(self.seconds)}" if self.runs else "none"


@dataclass(frozen=True)
class PlanDiff:
    """What differs, as (what, before, after); empty parts differ in nothing. False if all are empty.

    Args:
      made_for: mesh, topology, program, pipeline.
      layouts: per input, and per output that does not lie as an input that it replaces.
      collectives: per purpose.
      totals: bytes, seconds, memory.
      changes: by how much the totals that differ have grown, as parts of what they were; negative if they shrank.
    """

    made_for: tuple[tuple[str, str, str], ...]
    layouts: tuple[tuple[str, str, str], ...]
    collectives: tuple[tuple[str, CostTotals, CostTotals], ...]
    totals: tuple[tuple[str, str, str], ...]
    changes: dict[str, float]

    def __bool__(self) -> bool:
        return bool(self.made_for or self.layouts or self.collectives or self.totals)

    def __str__(self) -> str:

        return diff_text(self)


def diff_plans(before: PlanData, after: PlanData) -> PlanDiff:
    """What ``after`` does differently from ``before``."""
    totals, a, b = _changes(before, after, _totals), _amounts(before), _amounts(after)
    told = _told_by_inputs(before) & _told_by_inputs(after)
    return PlanDiff(
        made_for=_changes(before, after, _made_for),
        layouts=tuple(row for row in _changes(before, after, _layouts) if row[0] not in told),
        collectives=_collectives(before, after),
        totals=totals,
        changes={name: b[name] / a[name] - 1 if a[name] else float("inf") for name, *_ in totals},
    )


def _changes(
    before: PlanData, after: PlanData, read: Callable[[PlanData], Iterable[tuple[str, str]]]
) -> tuple[tuple[str, str, str], ...]:
    a, b = dict(read(before)), dict(read(after))
    names = dict.fromkeys((*a, *b))
    return tuple((n, a.get(n, "none"), b.get(n, "none")) for n in names if a.get(n) != b.get(n))


def _made_for(plan: PlanData) -> Iterator[tuple[str, str]]:
    yield "mesh", str(plan.mesh)
    yield "topology", f"{plan.topology.name} {_speeds(plan)}"
    yield "program", f"{plan.name} {plan.fingerprint[:12]}"
    if plan.pipeline:
        found, asked = plan.pipeline, plan.pipeline.asked
        stages = f", {asked.name} over {found.axis}, bubble {found.bubble:.1%}" if found.axis else ""
        yield "pipeline", f"{asked.microbatches} microbatches{stages}"


def _speeds(plan: PlanData) -> str:
    """The speeds of a topology, which a measured one has of its own."""
    t = plan.topology
    links = [way for link in (*t.links, *dict(t.axes).values()) for way in dict.fromkeys((link, link.for_short))]
    return " ".join(f"{link.latency:g}s+{link.bandwidth:g}B/s" for link in links)


def _layouts(plan: PlanData) -> Iterator[tuple[str, str]]:
    for side, arrays in (("", plan.inputs), ("output ", plan.outputs)):
        yield from ((f"{side}{array.path}", _typed_layout(array)) for array in arrays)


def _told_by_inputs(plan: PlanData) -> set[str]:
    """The outputs that lie as the inputs that they replace."""
    inputs = {array.path: array.layout for array in plan.inputs}
    return {f"output {array.path}" for array in plan.outputs if inputs.get(array.follows) == array.layout}


def _typed_layout(array: Array) -> str:
    return f"{array.type} {layout_text(array.layout.named(array.dims))}"


def _collectives(before: PlanData, after: PlanData) -> tuple[tuple[str, CostTotals, CostTotals], ...]:
    a, b, none = _costs(before), _costs(after), CostTotals()
    pairs = ((name, a.get(name, none), b.get(name, none)) for name in dict.fromkeys((*a, *b)))
    return tuple((name, was, now) for name, was, now in pairs if not was.is_like(now))


def _costs(plan: PlanData) -> dict[str, CostTotals]:
    found: dict[str, CostTotals] = {}
    for c in plan.collectives:
        purpose = f"{c.kind} {','.join(c.axes)} {c.phase} {pattern(_PLACE.sub('', c.reason))}"
        found[purpose] = found.get(purpose, CostTotals()).plus(c)
    return found


def _amounts(plan: PlanData) -> dict[str, float]:
    return {"seconds": plan.seconds, "bytes": plan.bytes, "memory": plan.memory}


def _totals(plan: PlanData) -> Iterator[tuple[str, str]]:
    yield "seconds", seconds_text(plan.seconds)
    yield "bytes", bytes_text(plan.bytes)
    yield "memory", bytes_text(plan.memory)


# ---- Diff text -------------------------------------------------------------------------------------------------------
# The printed difference of two plans: what got worse, then what did it.
#
# The first line is the verdict; totals, what the plans were made for, collectives by how much more or less time they
# take, and layouts follow. Layouts of repeated layers that changed alike share a row.


_LINES = 3
_WORDS = {"seconds": "predicted step time", "bytes": "sent per device and step", "memory": "peak memory per device"}


def diff_text(diff: PlanDiff) -> str:
    """All that differs, the costliest first."""
    if not diff:
        return "the plans are equal"
    sections = (_totals_text(diff), _made_for_text(diff), _collectives_text(diff), _layouts_text(diff))
    return "\n\n".join("\n".join(lines) for section in ([_verdict(diff)], *sections) if (lines := list(section)))


def _verdict(diff: PlanDiff) -> str:
    """What got worse and what better, in words."""
    found: dict[str, list[str]] = {"worse": [], "better": []}
    for name, change in diff.changes.items():
        found["worse" if change > 0 else "better"].append(f"{_WORDS[name]} {_percent(change)}")
    said = [f"{how}: {', '.join(what)}" for how, what in found.items() if what]
    return "; ".join(said) or "changed, with equal step time, bytes and memory"


def _totals_text(diff: PlanDiff) -> Iterator[str]:
    if diff.totals:
        rows = [(_WORDS[name], was, now, _percent(diff.changes[name])) for name, was, now in diff.totals]
        yield from table([("total", "before", "after", "change"), *rows])


def _made_for_text(diff: PlanDiff) -> Iterator[str]:
    if diff.made_for:
        yield from table([("planned for", "before", "after"), *diff.made_for])


def _collectives_text(diff: PlanDiff) -> Iterator[str]:
    if diff.collectives:
        by_change = sorted(diff.collectives, key=lambda row: -abs(_more(row)))
        yield from table([("change", "before", "after", "collective"), *map(_collective_row, by_change)])


def _collective_row(row: tuple[str, CostTotals, CostTotals]) -> Sequence[str]:
    what, before, after = row
    lines = (after if after.runs else before).lines
    shown = ", ".join([*lines[:_LINES], *(["..."] if len(lines) > _LINES else [])])
    more = _more(row)
    sign = "+" if more > 0 else "-" if more < 0 else ""
    return f"{sign}{seconds_text(abs(more))}", str(before), str(after), f"{what}, at {shown}"


def _more(row: tuple[str, CostTotals, CostTotals]) -> float:
    _, before, after = row
    return after.seconds - before.seconds


def _layouts_text(diff: PlanDiff) -> Iterator[str]:
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
    return f"{change:+.1%}" if change < float("inf") else "from zero"


def _times(count: int) -> str:
    return f"x{count}" if count > 1 else ""
