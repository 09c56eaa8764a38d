"""The difference of two plans: layouts, collectives and totals, each before and after, and its text.

Collectives are compared by their purpose: kind, axes, phase and reason, without source lines, since adding a line to a
file or moving a function to another changes no communication. Collectives that both plans have are listed only where
their number of runs, bytes or seconds differ.

Of compiled programs that ``md.inspect`` has read, time is that of the collectives, one after the other. They are beside
a plan by kind, axes and what the source line reads, since a compiler states no reasons.

The text begins with the verdict: another program or jax, if so, and what became worse or better. Totals, mesh, topology
and program, collectives by the change of their time, and layouts follow; layouts of repeated layers that changed in the
same way share a row.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isclose

from meshdsl.plan.text import common, layout_text, pattern
from meshdsl.plan.types import Array, Collective, PlanData
from meshdsl.util.html import tables_html
from meshdsl.util.text import bytes_text, change_text, seconds_text, table

Rows = Sequence[Sequence[str]]
_LINE = re.compile(r" \([^()]*:\d+\)")  # the source lines in a reason
# How reasons ended in plans that were saved by earlier versions, and how they end today.
_EARLIER_ENDS = (
    (re.compile(r": the step returns it$"), ", returned by the step"),
    (re.compile(r": the loop's body returns it$"), ", returned by the loop's body"),
    (re.compile(r": ([^:]+) reads it$"), r", needed by \1"),
    (re.compile(r": ([^:]+) states it$"), r", specified by \1"),
)
_TOLERANCE = 1e-9  # relative difference of seconds, a sum of floats, that counts as none
_SOURCES = 3  # source lines that a row of the text names
_DIFFERENT = {
    "program": "different program: the step itself changed; if that is meant, save the new plan",
    "jax": "different jax: another version traces the step differently; plan with the one that the plan was made with",
}
_SENT = "predicted time of collectives"
_TOTALS = {"seconds": "predicted step time", "bytes": "sent per device and step", "memory": "peak memory per device"}


# ---- Diff ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CostTotals:
    """Collectives of one purpose, per step.

    Args:
      runs: iterations of all of them.
      bytes: bytes that one device sends.
      seconds: predicted seconds.
      lines: source lines that they belong to, which are not compared.
    """

    runs: int = 0
    bytes: int = 0
    seconds: float = 0.0
    lines: tuple[str, ...] = field(default=(), compare=False)

    def plus(self, c: Collective) -> "CostTotals":
        """The totals with one more collective."""
        lines = tuple(dict.fromkeys((*self.lines, c.source)))
        return CostTotals(
            self.runs + c.trips, self.bytes + c.trips * c.bytes, self.seconds + c.trips * c.seconds, lines
        )

    def is_close(self, other: "CostTotals") -> bool:
        """Whether both are equal, up to the rounding of summed seconds."""
        equal = (self.runs, self.bytes) == (other.runs, other.bytes)
        return equal and isclose(self.seconds, other.seconds, rel_tol=_TOLERANCE)

    def __str__(self) -> str:
        return f"x{self.runs} {bytes_text(self.bytes)} {seconds_text(self.seconds)}" if self.runs else "none"


@dataclass(frozen=True)
class PlanDiff:
    """The differences of two plans, each as (name, before, after); false if there are none.

    ``print`` it to read it.

    Args:
      made_for: mesh, topology, program and pipeline, where they differ.
      layouts: inputs, and outputs that do not have the layout of an input they alias, where they differ.
      collectives: collectives per purpose, where they differ.
      totals: seconds, bytes and memory, where they differ.
      loops: what loops send ahead and behind, where that differs.
      compiled: whether one of both is a compiled program, so that seconds are those of the collectives.
      changes: relative change of these totals: 0.1 if the second plan has 10% more.
      different: ``"program"`` if the plans are of different programs, ``"jax"`` if different versions of jax traced
        these, which alone can make them differ; empty if they are of one program, or of equal inputs in forms
        (microbatches, padding, another mesh) that cannot be compared.
    """

    made_for: tuple[tuple[str, str, str], ...]
    layouts: tuple[tuple[str, str, str], ...]
    collectives: tuple[tuple[str, CostTotals, CostTotals], ...]
    totals: tuple[tuple[str, str, str], ...]
    changes: dict[str, float]
    different: str = ""
    loops: tuple[tuple[str, str, str], ...] = ()
    compiled: bool = False

    def __bool__(self) -> bool:
        return bool(self.made_for or self.layouts or self.collectives or self.totals or self.loops)

    def __str__(self) -> str:
        return diff_text(self)

    def _repr_html_(self) -> str:
        return diff_html(self)


def diff_plans(before: PlanData, after: PlanData) -> PlanDiff:
    """The differences of ``after`` from ``before``."""
    compiled, mixed = bool(before.compiled or after.compiled), bool(before.compiled) != bool(after.compiled)
    a, b = _amounts(before, compiled), _amounts(after, compiled)
    totals = tuple((name, _AMOUNT[name](a[name]), _AMOUNT[name](b[name])) for name in a)
    totals = tuple(row for row in totals if row[1] != row[2])
    implied = _implied_by_inputs(before) & _implied_by_inputs(after)
    different = "" if mixed else _different(before, after)
    made_for = tuple(row for row in _changes(before, after, _made_for) if not (mixed and row[0] == "program"))
    versions = (("jax", before.jax, after.jax),) if different == "jax" else ()
    return PlanDiff(
        made_for=(*made_for, *versions),
        layouts=tuple(row for row in _changes(before, after, _layouts) if row[0] not in implied),
        collectives=_collectives(before, after, mixed),
        totals=totals,
        changes={name: b[name] / a[name] - 1 if a[name] else float("inf") for name, *_ in totals},
        different=different,
        loops=() if mixed else _changes(before, after, _loops),
        compiled=compiled,
    )


def _form(plan: PlanData) -> tuple[object, ...]:
    """On what the fingerprint of one program depends."""
    hosted, again = tuple(array.path for array in plan.host.arrays) if plan.host else (), plan.recomputation
    padded = plan.padded, plan.regions, plan.checkpoints, plan.alternatives
    return *padded, plan.pipeline and plan.pipeline.asked, tuple(plan.mesh), hosted, again and again.rewrite


def _takes(plan: PlanData) -> list[tuple[object, ...]]:
    """The inputs, which are the same in all forms of one program."""
    return [(x.path, x.shape, x.dtype) for x in plan.inputs]


def _different(before: PlanData, after: PlanData) -> str:
    if before.fingerprint == after.fingerprint or (_form(before) != _form(after) and _takes(before) == _takes(after)):
        return ""
    return "jax" if before.jax and after.jax and before.jax != after.jax else "program"


def _changes(
    before: PlanData, after: PlanData, read: Callable[[PlanData], Iterable[tuple[str, str]]]
) -> tuple[tuple[str, str, str], ...]:
    a, b = dict(read(before)), dict(read(after))
    names = dict.fromkeys((*a, *b))
    return tuple((n, a.get(n, "none"), b.get(n, "none")) for n in names if a.get(n) != b.get(n))


def _made_for(plan: PlanData) -> Iterator[tuple[str, str]]:
    yield "mesh", str(plan.mesh)
    yield "topology", f"{plan.topology.name} {_speeds(plan)}"
    yield "made by", plan.compiled or "the planner"
    yield "program", f"{plan.name} {plan.fingerprint[:12]}"
    if plan.low_bits:
        yield "low_bits", plan.low_bits
    yield from plan.alternatives
    if plan.pipeline:
        found, asked = plan.pipeline, plan.pipeline.asked
        stages = f", {asked.name} over {found.axis}, bubble {found.bubble:.1%}" if found.axis else ""
        yield "pipeline", f"{asked.microbatches} microbatches{stages}"


def _speeds(plan: PlanData) -> str:
    """Latencies and bandwidths of a topology, which tell measured ones apart."""
    t = plan.topology
    links = [speed for link in (*t.links, *dict(t.axes).values()) for speed in dict.fromkeys((link, link.for_short))]
    return " ".join(f"{link.latency:g}s+{link.bandwidth:g}B/s" for link in links)


def _layouts(plan: PlanData) -> Iterator[tuple[str, str]]:
    for side, arrays in (("", plan.inputs), ("output ", plan.outputs)):
        yield from ((f"{side}{array.path}", _typed_layout(array)) for array in arrays)


def _loops(plan: PlanData) -> Iterator[tuple[str, str]]:
    """What each loop sends ahead and behind; lines may move, so loops go by their place among those that do."""
    for i, loop in enumerate(plan.prefetched):
        sent = (f"{how} {', '.join(names)}" for how, names in (("ahead", loop.ahead), ("behind", loop.behind)) if names)
        yield f"loop {i + 1}, {loop.phase}", "; ".join(sent)


def _implied_by_inputs(plan: PlanData) -> set[str]:
    """The outputs that have the layout of the input they alias."""
    inputs = {array.path: array.layout for array in plan.inputs}
    return {f"output {array.path}" for array in plan.outputs if inputs.get(array.follows) == array.layout}


def _typed_layout(array: Array) -> str:
    return f"{array.type} {layout_text(array.layout.named(array.dims))}"


def _collectives(before: PlanData, after: PlanData, mixed: bool) -> tuple[tuple[str, CostTotals, CostTotals], ...]:
    a, b, none = _costs(before, mixed), _costs(after, mixed), CostTotals()
    pairs = ((name, a.get(name, none), b.get(name, none)) for name in dict.fromkeys((*a, *b)))
    return tuple((name, was, now) for name, was, now in pairs if not was.is_close(now))


def _costs(plan: PlanData, by_line: bool) -> dict[str, CostTotals]:
    """The costs by purpose, or by what the source line reads."""
    found: dict[str, CostTotals] = {}
    texts = {line.source: line.text.strip() for line in plan.lines}
    for c in plan.collectives:
        why = texts[c.source] if by_line else f"{c.phase} {pattern(_reason(c))}"
        purpose = f"{c.kind} {','.join(c.axes)} {why}"
        found[purpose] = found.get(purpose, CostTotals()).plus(c)
    return found


def _reason(collective: Collective) -> str:
    """Returns the reason without source lines, in today's words whichever version saved the plan."""
    reason = _LINE.sub("", collective.reason)
    for earlier, today in _EARLIER_ENDS:
        reason = earlier.sub(today, reason)
    return reason


_AMOUNT: dict[str, Callable[[float], str]] = {"seconds": seconds_text, "bytes": bytes_text, "memory": bytes_text}


def _amounts(plan: PlanData, compiled: bool) -> dict[str, float]:
    sent = sum(c.seconds * c.trips for c in plan.collectives)
    return {"seconds": sent if compiled else plan.seconds, "bytes": plan.bytes, "memory": plan.memory}


# ---- Text ------------------------------------------------------------------------------------------------------------


def diff_text(diff: PlanDiff) -> str:
    """The differences, the costliest first."""
    if not diff:
        return "the plans are equal"
    return "\n\n".join([_verdict(diff), *("\n".join(table(rows)) for rows in _tables(diff))])


def diff_html(diff: PlanDiff) -> str:
    """The same for notebooks."""
    return tables_html(_verdict(diff) if diff else "the plans are equal", _tables(diff))


def _tables(diff: PlanDiff) -> Iterator[Rows]:
    """Tables of what differs, each with its head."""
    heads = (
        ("total", "before", "after", "change"),
        ("planned for", "before", "after"),
        ("change", "before", "after", "collective"),
        ("layout", "", "type", "before", "after"),
        ("prefetched loop", "before", "after"),
    )
    found = (_total_rows(diff), diff.made_for, _collective_rows(diff), _layout_rows(diff), diff.loops)
    yield from ([head, *rows] for head, rows in zip(heads, found, strict=True) if rows)


def _verdict(diff: PlanDiff) -> str:
    """Whether the program is another, and what became worse and what better, in words."""
    found: dict[str, list[str]] = {"worse": [], "better": []}
    for name, change in diff.changes.items():
        found["worse" if change > 0 else "better"].append(f"{_total(diff, name)} {_percent(change)}")
    verdicts = [f"{how}: {', '.join(what)}" for how, what in found.items() if what]
    costs = "; ".join(verdicts) or "changed, with equal step time, bytes and memory"
    return f"{_DIFFERENT[diff.different]}\n{costs}" if diff.different else costs


def _total_rows(diff: PlanDiff) -> Rows:
    return [(_total(diff, name), was, now, _percent(diff.changes[name])) for name, was, now in diff.totals]


def _total(diff: PlanDiff, name: str) -> str:
    return _SENT if diff.compiled and name == "seconds" else _TOTALS[name]


def _collective_rows(diff: PlanDiff) -> Rows:
    return [_collective_row(row) for row in sorted(diff.collectives, key=lambda row: -abs(_added_seconds(row)))]


def _collective_row(row: tuple[str, CostTotals, CostTotals]) -> Sequence[str]:
    purpose, before, after = row
    lines = (after if after.runs else before).lines
    shown = ", ".join([*lines[:_SOURCES], *(["..."] if len(lines) > _SOURCES else [])])
    added = _added_seconds(row)
    sign = "+" if added > 0 else "-" if added < 0 else ""
    return f"{sign}{seconds_text(abs(added))}", str(before), str(after), f"{purpose}, at {shown}"


def _added_seconds(row: tuple[str, CostTotals, CostTotals]) -> float:
    _, before, after = row
    return after.seconds - before.seconds


def _layout_rows(diff: PlanDiff) -> Rows:
    by_change: dict[tuple[str, str, str], list[str]] = {}
    for name, before, after in diff.layouts:
        by_change.setdefault((pattern(name), before, after), []).append(name)
    return [(common(names), _times(len(names)), *_type_and_layouts(*key[1:])) for key, names in by_change.items()]


def _type_and_layouts(before: str, after: str) -> Sequence[str]:
    """The common type and both layouts; where the types differ, each is shown before its layout."""
    (was, _, old), (now, _, new) = (text.partition("] ") for text in (before, after))
    return (f"{was}]", old, new) if was == now else ("", before, after)


def _percent(change: float) -> str:
    return change_text(change) if change < float("inf") else "from zero"


def _times(count: int) -> str:
    return f"x{count}" if count > 1 else ""
