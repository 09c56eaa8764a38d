"""The printed search: every plan, the fastest first, then what was not planned, and why, in few rows."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from meshdsl.plan.table import table
from meshdsl.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from meshdsl.searched import Candidate

_HEAD = ("mesh", "microbatches", "schedule", "step", "gap", "bubble", "sent", "memory")
_REASONS = 8


def search_text(candidates: Sequence["Candidate"]) -> str:
    """The candidates in two tables; those without a plan that have one reason share a row."""
    planned = [_row(each) for each in candidates if each.plan]
    left = list(_left(candidates))
    tables = (table([_HEAD, *planned]) if planned else (), table(left) if len(left) > 1 else ())
    return "\n\n".join("\n".join(lines) for one in tables if (lines := list(one)))


def _row(each: "Candidate") -> tuple[str, ...]:
    plan = each.plan
    assert plan is not None
    bubble = "" if each.bubble is None else f"{each.bubble:.1%}"
    costs = seconds_text(plan.seconds), f"{plan.gap:.1%}", bubble, bytes_text(plan.bytes), bytes_text(plan.memory)
    return each.mesh, _count(each), each.way.schedule, *costs


def _left(candidates: Sequence["Candidate"]) -> Iterator[tuple[str, ...]]:
    """Rows of what has no plan."""
    alike: dict[tuple[str, str, str], list[Candidate]] = {}
    for each in (each for each in candidates if not each.plan):
        alike.setdefault((_count(each), each.way.schedule, each.fault), []).append(each)
    yield "not planned", "microbatches", "schedule", "because"
    for (count, schedule, fault), rows in list(alike.items())[:_REASONS]:
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        yield f"{rows[0].mesh}{more}", count, schedule, fault
    rest = list(chain.from_iterable(list(alike.values())[_REASONS:]))
    if rest:
        pruned = sum(each.pruned for each in rest)
        yield f"... {len(rest)} more", "", "", f"{pruned} pruned, {len(rest) - pruned} that cannot be planned"


def _count(each: "Candidate") -> str:
    return str(each.microbatches) if each.microbatches > 1 else ""
