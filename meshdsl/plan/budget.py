"""Communication budgets for tests: the most that a plan, or a compiled program, may communicate."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol, SupportsFloat, TypeAlias

from meshdsl.errors import ArgumentError, BudgetError, faults, is_a, nearest
from meshdsl.layouts.collective_cost import COLLECTIVES

Kinds: TypeAlias = Mapping[str, int] | Collection[str]


class Sent(Protocol):
    """The facts of a collective that a budget counts."""

    @property
    def kind(self) -> str:
        """Kind of the collective, as a plan names it."""
        ...

    @property
    def bytes(self) -> SupportsFloat:
        """Bytes that one device sends per iteration."""
        ...

    @property
    def trips(self) -> int:
        """Iterations per step."""
        ...


def check_budget(title: str, collectives: Iterable[Sent], most: float | None, kinds: Kinds | None) -> None:
    """Raises BudgetError if collectives exceed a budget; see ``Plan.assert_at_most``.

    Args:
      title: subject of the message, such as "the plan of step".
      collectives: the collectives of one step.
      most: largest number of bytes per device and step; None for no limit.
      kinds: largest number of runs per kind, or the kinds that may occur; None for no limit.

    Raises:
      BudgetError: more is sent; the message lists every excess.
      ArgumentError: ``most`` or ``kinds`` is not a budget; the message lists every fault.
    """
    wrong = [*_bytes_faults(most), *_kinds_faults(kinds)]
    if wrong:
        raise ArgumentError(faults("assert_at_most: not a budget:", wrong))
    sent = list(collectives)
    rows = [*_excess_bytes(sent, most), *_excess_runs(sent, kinds)]
    if rows:
        raise BudgetError(faults(f"{title} exceeds its budget:", rows))


def _bytes_faults(most: object) -> list[str]:
    valid = most is None or (isinstance(most, int | float) and not isinstance(most, bool) and most >= 0)
    return [] if valid else [f"bytes: {is_a(most)}, not a number of bytes"]


def _kinds_faults(kinds: object) -> list[str]:
    if kinds is None:
        return []
    if not isinstance(kinds, Collection) or isinstance(kinds, str):
        return [f"kinds: {is_a(kinds)}, not a list of kinds or a dict of kinds to numbers of runs"]
    rows = [f"kinds: no collective {kind!r}{nearest(kind, COLLECTIVES)}" for kind in kinds if kind not in COLLECTIVES]
    counts = kinds.items() if isinstance(kinds, Mapping) else ()
    return rows + [f"kinds[{kind!r}]: {is_a(n)}, not a number of runs" for kind, n in counts if not _is_count(n)]


def _is_count(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= 0


def _excess_bytes(sent: Iterable[Sent], most: float | None) -> Iterator[str]:
    total = round(sum(float(c.bytes) * c.trips for c in sent))
    if most is not None and total > most:
        yield f"bytes: {total} per device and step, at most {most} allowed"


def _excess_runs(sent: Iterable[Sent], kinds: Kinds | None) -> Iterator[str]:
    if kinds is None:
        return
    runs: dict[str, int] = {}
    for c in sent:
        runs[c.kind] = runs.get(c.kind, 0) + c.trips
    most = {kind: kinds.get(kind, 0) if isinstance(kinds, Mapping) else runs[kind] * (kind in kinds) for kind in runs}
    for kind, n in runs.items():
        if n > most[kind]:
            yield f"{kind}: runs {n} times per step, at most {most[kind]} allowed"
