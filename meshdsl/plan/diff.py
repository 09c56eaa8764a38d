"""The difference of two plans: layouts, collectives and totals, each before and after.

Collectives are compared by what they are for: kind, axes, phase, source and reason. Those that
both plans have are listed only where their number, bytes or trips differ.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshdsl.plan.group import pattern
from meshdsl.plan.table import table
from meshdsl.plan.text import layout_text
from meshdsl.plan.value import Array, Collective, Plan
from meshdsl.units import bytes_text, seconds_text


@dataclass(frozen=True)
class Cost:
    """Collectives of one purpose: how many, and per step their runs, bytes and seconds."""

    number: int = 0
    runs: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def plus(self, c: Collective) -> "Cost":
        """With one more collective."""
        return Cost(
            self.number + 1, self.runs + c.trips, self.bytes + c.trips * c.bytes, self.seconds + c.trips * c.seconds
        )

    def __str__(self) -> str:
        return f"x{self.runs} {bytes_text(self.bytes)} {seconds_text(self.seconds)}" if self.number else "none"


@dataclass(frozen=True)
class PlanDiff:
    """What differs, as (what, before, after); empty parts differ in nothing. False if all are empty.

    Args:
      made_for: mesh, topology, program.
      layouts: per input and output.
      collectives: per purpose.
      totals: bytes, seconds, memory.
    """

    made_for: tuple[tuple[str, str, str], ...]
    layouts: tuple[tuple[str, str, str], ...]
    collectives: tuple[tuple[str, Cost, Cost], ...]
    totals: tuple[tuple[str, str, str], ...]

    def __bool__(self) -> bool:
        return bool(self.made_for or self.layouts or self.collectives or self.totals)

    def __str__(self) -> str:
        parts = {
            "planned for": self.made_for,
            "layouts": self.layouts,
            "collectives": self.collectives,
            "totals": self.totals,
        }
        shown = [_section(title, rows) for title, rows in parts.items() if rows]
        return "\n\n".join(shown) or "the plans are equal"


def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """What ``after`` does differently from ``before``."""
    return PlanDiff(
        made_for=_changes(before, after, _made_for),
        layouts=_changes(before, after, _layouts),
        collectives=_collectives(before, after),
        totals=_changes(before, after, _totals),
    )


def _section(title: str, rows: Sequence[tuple[str, object, object]]) -> str:
    lines = table([(title, "before", "after"), *((what, str(a), str(b)) for what, a, b in rows)])
    return "\n".join(lines)


def _changes(
    before: Plan, after: Plan, read: Callable[[Plan], Iterable[tuple[str, str]]]
) -> tuple[tuple[str, str, str], ...]:
    a, b = dict(read(before)), dict(read(after))
    names = dict.fromkeys((*a, *b))
    return tuple((n, a.get(n, "none"), b.get(n, "none")) for n in names if a.get(n) != b.get(n))


def _made_for(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "mesh", str(plan.mesh)
    yield "topology", f"{plan.topology.name} {_speeds(plan)}"
    yield "program", f"{plan.name} {plan.fingerprint[:12]}"


def _speeds(plan: Plan) -> str:
    """The speeds of a topology, which a measured one has of its own."""
    t = plan.topology
    links = [way for link in (*t.links, *dict(t.axes).values()) for way in dict.fromkeys((link, link.for_short))]
    return " ".join(f"{link.latency:g}s+{link.bandwidth:g}B/s" for link in links)


def _layouts(plan: Plan) -> Iterator[tuple[str, str]]:
    for side, arrays in (("", plan.inputs), ("output ", plan.outputs)):
        yield from ((f"{side}{array.path}", _typed_layout(array)) for array in arrays)


def _typed_layout(array: Array) -> str:
    return f"{array.type} {layout_text(array.layout.named(array.dims))}"


def _collectives(before: Plan, after: Plan) -> tuple[tuple[str, Cost, Cost], ...]:
    a, b = _costs(before), _costs(after)
    names = dict.fromkeys((*a, *b))
    none = Cost()
    return tuple((n, a.get(n, none), b.get(n, none)) for n in names if a.get(n) != b.get(n))


def _costs(plan: Plan) -> dict[str, Cost]:
    found: dict[str, Cost] = {}
    for c in plan.collectives:
        purpose = f"{c.kind} {','.join(c.axes)} {c.phase} {pattern(c.reason)}"
        found[purpose] = found.get(purpose, Cost()).plus(c)
    return found


def _totals(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "bytes", bytes_text(plan.bytes)
    yield "seconds", seconds_text(plan.seconds)
    yield "memory", bytes_text(plan.memory)
