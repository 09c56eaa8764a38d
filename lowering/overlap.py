"""Overlap as planned and as compiled: the seconds of communication that the schedule has beside products.

A plan promises to hide seconds: those of its collectives in which its simulation computes something. A compiler decides
what is kept of that, and ``meshdsl.lowering.hlo.schedule`` reads what it decided. Both sides are added up per kind of
collective and set of mesh axes, like bytes: a compiled collective counts as what its scope says was planned, an
all-reduce that a compiler made of a reduce-scatter as the latter.

What has to agree are the *exposed* seconds, not hidden or not covered: a compiler that combines collectives leaves
less to cover, and one that sends more bytes exposes more. A plan's simulation hides communication behind any
computation, and a schedule is read for products only, so a part (``LEAST``) is enough.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshdsl.errors import ArgumentError, OverlapError, faults, nearest
from meshdsl.lowering.hlo.collectives import planned_kind
from meshdsl.lowering.hlo.schedule import ScheduledCollective
from meshdsl.util.text import bytes_text, seconds_text, table

LEAST = 0.85  # share of the seconds that a plan hides that a program may not expose
JUDGEMENTS = ("error", "warn", "ignore")  # what becomes of a program that hides less
_NAMED = 3  # instructions that a row names
Key = tuple[str, str]  # kind, axes
_Row = tuple[str, str, str, str, str, str]  # kind, axes, bytes, trips, schedule, what stands beside it


@dataclass(frozen=True)
class PlannedOverlap:
    """The collectives of a plan of one kind over one set of axes, in seconds per step.

    Args:
      sent: how long they take.
      hidden: how much of that the plan calls hidden.
    """

    sent: float
    hidden: float


@dataclass(frozen=True)
class OverlapLine:
    """Both sides for one kind of collective and set of axes, in seconds per step.

    Args:
      sent, hidden: as planned.
      compiled: seconds of the compiled collectives.
      covered: how much of that the compiled schedule has beside products.
      synchronous: compiled collectives with nothing beside them, of ``count``.
    """

    kind: str
    axes: str
    sent: float
    hidden: float
    compiled: float
    covered: float
    synchronous: int
    count: int

    @property
    def exposed(self) -> float:
        """Seconds of the compiled collectives that nothing covers."""
        return self.compiled - self.covered

    @property
    def kept(self) -> float:
        """Seconds sent as planned that the program does not expose, since it covers them or combines collectives."""
        return max(0.0, self.sent - self.exposed)


@dataclass(frozen=True)
class OverlapReport:
    """What a compiled program does while it communicates.

    Args:
      scheduled: every compiled collective, in the order of the schedule.
      lines: planned and compiled seconds per kind and axes.
      axes: per compiled collective, its axes as text.
      known: whether the plan's promise can be compared: no loop runs for an unknown number of iterations, and the plan
        says what it hides.
      replayed: seconds of the compiled schedule at the plan's prices (``meshdsl.lowering.hlo.schedule``).
      computing: seconds of its computation alone.
      simulated: ``plan.simulated_seconds``; 0 if the plan does not say.
    """

    scheduled: tuple[ScheduledCollective, ...]
    lines: tuple[OverlapLine, ...]
    axes: tuple[str, ...]
    known: bool
    replayed: float = 0.0
    computing: float = 0.0
    simulated: float = 0.0

    @property
    def hidden(self) -> float:
        """Seconds per step that the plan calls hidden."""
        return sum(line.hidden for line in self.lines)

    @property
    def covered(self) -> float:
        """Seconds per step that the schedule has beside products."""
        return sum(line.covered for line in self.lines)

    @property
    def kept(self) -> bool:
        """Whether the program hides what the plan does; so does one that cannot be compared."""
        return not self.known or sum(line.kept for line in self.lines) >= LEAST * self.hidden

    @property
    def summary(self) -> str:
        """Both sides in one line."""
        sent = sum(one.seconds * one.sent.trips for one in self.scheduled)
        planned = f"; the plan hides {seconds_text(self.hidden)} of {seconds_text(sum(x.sent for x in self.lines))}"
        covers = f"the program sends for {seconds_text(sent)}, {seconds_text(self.covered)} of that beside products"
        return covers + (planned if self.known else "")

    @property
    def replay(self) -> str:
        """Seconds of the compiled schedule and of the plan, in one line; empty if they cannot be compared."""
        if not (self.known and self.replayed and self.simulated):
            return ""
        compiled, planned = map(seconds_text, (self.replayed, self.simulated))
        return f"replayed at the plan's prices, the compiled schedule takes {compiled}; the plan predicts {planned}"

    def rows(self) -> list[Sequence[str]]:
        """The table of compiled collectives; those that agree in all that is shown share a row."""
        counts: dict[_Row, int] = defaultdict(int)
        sums: dict[_Row, list[float]] = {}
        for axes, one in zip(self.axes, self.scheduled, strict=True):
            trips = str(one.sent.trips) if one.sent.known else f"~{one.sent.trips}"
            how = "asynchronous" if one.asynchronous else "synchronous"
            key = _kind(one), axes, bytes_text(float(one.sent.bytes)), trips, how, _beside(one)
            counts[key] += 1
            total = sums.setdefault(key, [0.0, 0.0])
            total[0] += one.seconds * one.sent.trips
            total[1] += one.covered * one.sent.trips
        header = ("compiled", "axes", "", "bytes", "trips", "schedule", "time", "covered", "beside")
        rows: list[Sequence[str]] = [header]
        for key, (seconds, covered) in sums.items():
            kind, at, size, trips, how, beside = key
            many = f"x{counts[key]}" if counts[key] > 1 else ""
            times = seconds_text(seconds), seconds_text(covered) if how == "asynchronous" else ""
            rows.append((kind, at, many, size, trips, how, *times, beside))
        return rows

    def error(self, target: str) -> OverlapError:
        """The error of a program that covers too little: both sides per kind and axes."""
        short = [line for line in self.lines if line.kept < line.hidden]
        planned, compiled = sum(x.sent - x.hidden for x in self.lines), sum(x.exposed for x in self.lines)
        title = f"the program compiled for {target} exposes {seconds_text(compiled)} of communication per step, "
        title += f"and the plan {seconds_text(planned)}:"
        rows = [("collective", "axes", "sent", "plan hides", "compiled", "covered", ""), *map(_short, short)]
        remedy = "plan.seconds counts nothing as hidden: choose by it (overlap=False), or accept the difference with "
        return OverlapError(faults(title, list(table(rows)), f"{remedy}exposed='warn' or 'ignore' (--exposed)"))


def _kind(one: ScheduledCollective) -> str:
    planned = planned_kind(one.sent.scope)
    return f"{one.sent.kind} of {planned}" if planned not in ("", one.sent.kind) else one.sent.kind


def _beside(one: ScheduledCollective) -> str:
    more = [f"+{len(one.beside) - _NAMED}"] if len(one.beside) > _NAMED else []
    return ", ".join([*one.beside[:_NAMED], *more])


def _short(line: OverlapLine) -> Sequence[str]:
    seconds = map(seconds_text, (line.sent, line.hidden, line.compiled, line.covered))
    return (line.kind, line.axes, *seconds, f"{line.synchronous} of {line.count} synchronous")


def compare_overlap(
    planned: Mapping[Key, PlannedOverlap] | None, scheduled: Sequence[ScheduledCollective], axes: Sequence[str]
) -> OverlapReport:
    """Returns both sides.

    Args:
      planned: per kind and axes; None if the plan does not say what it hides.
      scheduled: the compiled collectives.
      axes: per compiled collective, its axes as text.
    """
    keys = _planned_keys(planned or {}, scheduled, axes)
    lines = []
    for key in sorted({*(planned or {}), *keys}):
        here = [one for at, one in zip(keys, scheduled, strict=True) if at == key]
        seconds, covered = (sum(getattr(one, name) * one.sent.trips for one in here) for name in ("seconds", "covered"))
        promise = (planned or {}).get(key, PlannedOverlap(0.0, 0.0))
        synchronous = sum(not one.asynchronous for one in here)
        lines.append(OverlapLine(*key, promise.sent, promise.hidden, seconds, covered, synchronous, len(here)))
    known = planned is not None and all(one.sent.known for one in scheduled)
    return OverlapReport(tuple(scheduled), tuple(lines), tuple(axes), known)


def _planned_keys(
    planned: Mapping[Key, PlannedOverlap], scheduled: Sequence[ScheduledCollective], axes: Sequence[str]
) -> list[Key]:
    """Per compiled collective, the kind and axes of the planned ones that it belongs to.

    A compiler that turns a reduce-scatter into an all-reduce drops its scope: an all-reduce without one, over axes
    where the plan has reduce-scatters and the program none, is theirs.
    """
    keys = [(planned_kind(one.sent.scope) or one.sent.kind, at) for one, at in zip(scheduled, axes, strict=True)]
    keys = [key if key in planned else (one.sent.kind, key[1]) for key, one in zip(keys, scheduled, strict=True)]
    before, after = ({at for kind, at in side if kind == "reduce-scatter"} for side in (planned, keys))
    missing = before - after
    return [
        ("reduce-scatter", at) if kind == "all-reduce" and at in missing and not one.sent.scope else (kind, at)
        for (kind, at), one in zip(keys, scheduled, strict=True)
    ]


def planned_overlap(
    keys: Sequence[Key], seconds: Sequence[float], exposed: Sequence[float]
) -> dict[Key, PlannedOverlap] | None:
    """Returns what a plan hides per kind and axes; None if it does not say.

    Args:
      keys: per planned collective, kind and axes.
      seconds: per step, of each.
      exposed: seconds per step of each that the plan does not hide.
    """
    if len(exposed) != len(keys):
        return None
    found: dict[Key, PlannedOverlap] = {}
    for key, sent, waits in zip(keys, seconds, exposed, strict=True):
        before = found.get(key, PlannedOverlap(0.0, 0.0))
        found[key] = PlannedOverlap(before.sent + sent, before.hidden + max(0.0, sent - waits))
    return found


def check_judgement(exposed: object) -> None:
    """Raise ArgumentError unless ``exposed`` says what becomes of a program that hides less than its plan."""
    if exposed not in JUDGEMENTS:
        raise ArgumentError(
            f"exposed: no way {exposed!r} to judge a program that hides less{nearest(exposed, JUDGEMENTS)}"
        )
