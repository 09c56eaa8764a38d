"""What a plan, or a compiled program, may communicate at most: for tests."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol, SupportsFloat, TypeAlias

from meshdsl.errors import ArgumentError, BudgetError, faults, is_a, nearest
from meshdsl.layouts.collective_cost import COLLECTIVES

Kinds: TypeAlias = Mapping[str, int] | Collection[str]


class Sent(Protocol):
    """What a budget counts of a collective: ``bytes`` that one device sends per trip, and how often."""

    @property
    def kind(self) -> str:
        """As a plan names it."""
        ...

    @property
    def bytes(self) -> SupportsFloat:
        """What one device sends per trip."""
        ...

    @property
    def trips(self) -> int:
        """Executions."""
        ...


def check_budget(title: str, collectives: Iterable[Sent], most: float | None, kinds: Kinds | None) -> None:
    """Compare; see ``Plan.assert_at_most``.

    Args:
      title: what it is that communicates, as a message begins.

    BudgetError if more is sent, ArgumentError for what is no budget.
    """
    wrong = [*_no_bytes(most), *_no_kinds(kinds)]
    if wrong:
        raise ArgumentError(faults("assert_at_most cannot compare with this:", wrong))
    sent = list(collectives)
    rows = [*_over_bytes(sent, most), *_over_kinds(sent, kinds)]
    if rows:
        raise BudgetError(faults(f"{title} exceeds its budget:", rows))


def _no_bytes(most: object) -> list[str]:
    fine = most is None or (isinstance(most, int | float) and not isinstance(most, bool) and most >= 0)
    return [] if fine else [f"bytes: {is_a(most)}, not a number of bytes"]


def _no_kinds(kinds: object) -> list[str]:
    """Faults of a budget by kinds: other kinds than there are, and numbers that are none."""
    if kinds is None:
        return []
    if not isinstance(kinds, Collection) or isinstance(kinds, str):
        return [f"kinds: {is_a(kinds)}, not a list of kinds or a dict of kinds to runs"]
    rows = [f"kinds: no collective {kind!r}{nearest(kind, COLLECTIVES)}" for kind in kinds if kind not in COLLECTIVES]
    counts = kinds.items() if isinstance(kinds, Mapping) else ()
    return rows + [f"kinds[{kind!r}]: {is_a(n)}, not a number of runs" for kind, n in counts if not _is_count(n)]


def _is_count(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= 0


def _over_bytes(sent: Iterable[Sent], most: float | None) -> Iterator[str]:
    total = round(sum(float(c.bytes) * c.trips for c in sent))
    if most is not None and total > most:
        yield f"bytes: {total} per device and step, at most {most} allowed"


def _over_kinds(sent: Iterable[Sent], kinds: Kinds | None) -> Iterator[str]:
    if kinds is None:
        return
    runs: dict[str, int] = {}
    for c in sent:
        runs[c.kind] = runs.get(c.kind, 0) + c.trips
    most = {kind: kinds.get(kind, 0) if isinstance(kinds, Mapping) else runs[kind] * (kind in kinds) for kind in runs}
    for kind, n in runs.items():
        if n > most[kind]:
            yield f"{kind}: runs {n} times a step, at most {most[kind]} allowed"
