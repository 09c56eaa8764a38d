"""The printed plan: totals, arrays with their layouts, every collective with its reason.

Arrays of repeated layers or optimizer states that agree in type and layout share a row, such as
``params/layers/*/attn/{k,q,v}  x36``, and so do collectives that agree in everything that is shown. Placements ``B``
are not shown. The text depends on the plan alone.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B
from meshdsl.plan.types import LAUNCHES, Array, Collective, HostedArray, PlanData, PrefetchedLoop, RecomputedValue
from meshdsl.planner.limits import PROVE
from meshdsl.util.paths import Components, split_path
from meshdsl.util.text import bytes_text, count_text, percent_text, seconds_text, table

_LARGEST_BUFFERS = 2  # buffers at the memory peak that the first lines name
_HARDLY = 0.005  # share of the computation that counts as none
_DRAWN_RANKS = 16  # ranks up to which a pipeline's timeline is drawn
_TIMELINE_COLUMNS = 60  # characters of that timeline
_ALTERNATIVES = 4  # names in braces that a row shows


# ---- Rows of arrays --------------------------------------------------------------------------------------------------
# Paths become patterns: numbers are written as ``*``, and patterns that differ in a single component, as ``mu`` and
# ``nu`` of an optimizer do, are merged into ``{mu,nu}``. A number that all arrays of a row share is shown, so a row of
# one array has that array's path.

_NUMBER = re.compile(r"(?<=/)\d+(?=/|\b)")


@dataclass(frozen=True)
class ArrayGroup:
    """Arrays that agree in type, layout and pins, and share a row.

    Args:
      array: the first of them.
      parts: per component of their pattern, the alternatives.
      paths: paths of all of them, in components.
    """

    array: Array
    parts: tuple[Components, ...]
    paths: tuple[Components, ...]

    @property
    def count(self) -> int:
        """The number of arrays."""
        return len(self.paths)

    @property
    def name(self) -> str:
        """The common path: numbers that differ as ``*``, alternatives in braces."""
        texts_by_part = (tuple(dict.fromkeys(column)) for column in zip(*self.paths, strict=True))
        shown = (
            part if part != ("*",) or len(texts) > 1 else texts
            for part, texts in zip(self.parts, texts_by_part, strict=True)
        )
        return "/".join(map(_alternatives, shown)) or "(the result)"


def group_arrays(arrays: Iterable[Array]) -> list[ArrayGroup]:
    """The arrays in rows, in the order of the first array of each."""
    rows: dict[tuple[object, ...], ArrayGroup] = {}
    for array in arrays:
        parts = tuple((part,) for part in split_path(pattern(array.path)))
        key = (*_shared_facts(array), parts)
        seen = rows.get(key)
        path = split_path(array.path)
        rows[key] = replace(seen, paths=(*seen.paths, path)) if seen else ArrayGroup(array, parts, (path,))
    return _merged(list(rows.values()))


def pattern(text: str) -> str:
    """The text with ``*`` for every number that is a component of a path."""
    return _NUMBER.sub("*", text)


def common(texts: Iterable[str]) -> str:
    """The text itself if all are equal, else their pattern, which has to be the same."""
    first, *rest = dict.fromkeys(texts)
    return pattern(first) if rest else first


def _merged(groups: list[ArrayGroup]) -> list[ArrayGroup]:
    """Merges groups that agree in all components but one, until no two do."""
    done: list[ArrayGroup] = []
    keys: list[list[Hashable]] = []  # per row, and component that may differ, all else that has to agree
    rows_by_key: dict[Hashable, dict[int, None]] = {}
    for group in groups:
        own = _all_but_one(group)
        matches = [(at, i) for i, key in enumerate(own) for at in rows_by_key.get(key, ()) if keys[at][i] == key]
        if matches:
            into, i = min(matches)
            done[into] = _merge(done[into], group, i + 1)
            keys[into] = _all_but_one(done[into])
        else:
            into = len(done)
            done.append(group)
            keys.append(own)
        for key in keys[into]:
            rows_by_key.setdefault(key, {})[into] = None
    return done if len(done) == len(groups) else _merged(done)


def _all_but_one(group: ArrayGroup) -> list[Hashable]:
    """For every component but the first, everything that a group has to share to be merged in that component."""
    facts = _shared_facts(group.array)
    return [(facts, i, group.parts[:i], group.parts[i + 1 :]) for i in range(1, len(group.parts))]


def _merge(a: ArrayGroup, b: ArrayGroup, at: int) -> ArrayGroup:
    both = tuple(dict.fromkeys((*a.parts[at], *b.parts[at])))
    return ArrayGroup(a.array, (*a.parts[:at], both, *a.parts[at + 1 :]), a.paths + b.paths)


def _shared_facts(array: Array) -> tuple[object, ...]:
    return array.type, array.layout, array.pinned


def _alternatives(part: Components) -> str:
    if len(part) == 1:
        return part[0]
    more = [f"+{len(part) - _ALTERNATIVES}"] if len(part) > _ALTERNATIVES else []
    return "{" + ",".join([*part[:_ALTERNATIVES], *more]) + "}"


# ---- The text --------------------------------------------------------------------------------------------------------


def plan_text(plan: PlanData) -> str:
    """The whole plan as text, at most about 120 columns wide."""
    parts = (_title, _pipeline, _inputs, _outputs, _collectives, _loops, _remat, _host, _waterfall, _totals, _notes)
    return _text(*(part(plan) for part in parts))


def summary_text(plan: PlanData) -> str:
    """The costs of a plan, without its arrays and single collectives."""
    return _text(_title(plan), _pipeline(plan), _totals(plan))


def _text(*sections: Iterable[str]) -> str:
    return "\n\n".join("\n".join(lines) for section in sections if (lines := list(section)))


def layout_text(layout: Layout) -> str:
    """The placements other than ``B``, or ``B`` if there are none."""
    shown = [f"{axis}={placed}" for axis, placed in layout.placements if placed is not B] or ["B"]
    return " ".join([*shown, *([f"@{layout.memory}"] if layout.memory else [])])


def _compiled_title(plan: PlanData) -> Iterator[str]:
    yield f"{plan.name} on mesh {plan.mesh}, compiled by {plan.compiled}; seconds of topology {plan.topology.name}"
    exposed = f"{seconds_text(plan.simulated_seconds)} have no product beside them"
    yield f"  collectives          {seconds_text(plan.seconds)}, of which {exposed}"
    yield f"  memory               {bytes_text(plan.memory)} per device"
    runs = sum(c.trips for c in plan.collectives)
    yield f"  sent                 {bytes_text(plan.bytes)} per device and step, in {count_text(runs, 'tensor')}"


def _title(plan: PlanData) -> Iterator[str]:
    if plan.compiled:
        yield from _compiled_title(plan)
        return
    yield f"plan of {plan.name} on mesh {plan.mesh}, topology {plan.topology.name}"
    effort = f", effort {plan.effort}" if plan.gap and plan.effort != PROVE else ""
    bound = f"lower bound {seconds_text(plan.lower_bound)}, gap {percent_text(plan.gap)}{effort}"
    yield f"  predicted step time  {seconds_text(plan.seconds)}  ({bound})"
    overlapped = seconds_text(plan.simulated_seconds)
    yield f"  with overlap         {overlapped}  (communication hidden behind independent compute)"
    yield from _utilization(plan)
    yield f"  peak memory          {bytes_text(plan.memory)} per device{_largest_buffers(plan)}"
    if plan.host:
        counts = ("array", len(plan.host.arrays)), ("residual", len(plan.host.residuals))
        kept = ", ".join(count_text(count, kind) for kind, count in counts if count)
        kept = f"{kept}, {seconds_text(plan.host.seconds)} of transfers per step"
        yield f"  host memory          {bytes_text(plan.host_memory)} per device  ({kept})"
    runs = sum(c.trips for c in plan.collectives)
    yield f"  sent                 {bytes_text(plan.bytes)} per device and step, in {count_text(runs, 'collective')}"


def _utilization(plan: PlanData) -> Iterator[str]:
    """The compute bound and what takes the rest of the time, and the axes that repeat computation."""
    used = plan.utilization
    if used.compute_bound:
        largest = ", ".join(f"{reason} {seconds_text(seconds)}" for reason, seconds in used.largest_losses)
        lost = f"; lost to {largest}" if largest else ""
        yield f"  compute bound        {seconds_text(used.compute_bound)}  (MFU {percent_text(plan.mfu)}{lost})"
    launching = used.losses[:1] and used.losses[0][0] == LAUNCHES and used.losses[0][1] > plan.seconds / 2
    why = ": launch overhead dominates" if launching else ""
    for axis, share in used.divided:
        if 1 - share >= _HARDLY:
            part = f"{percent_text(1 - share)} of the " if share >= _HARDLY else ""
            yield f"  over {axis:<15} {part}computation repeated {plan.mesh.axis(axis)} times{why}"


def _largest_buffers(plan: PlanData) -> str:
    """The largest buffers that are live at the peak; those of repeated layers are added up."""
    by_pattern: dict[str, list[tuple[str, int]]] = {}
    for name, size in plan.held:
        by_pattern.setdefault(pattern(name), []).append((name, size))
    sums = [(common(name for name, _ in rows), sum(size for _, size in rows)) for rows in by_pattern.values()]
    largest = sorted(sums, key=lambda row: -row[1])[:_LARGEST_BUFFERS]
    return "; largest: " + ", ".join(f"{name} {bytes_text(size)}" for name, size in largest) if largest else ""


def _pipeline(plan: PlanData) -> Iterator[str]:
    """A pipeline's two predictions, what is sent between its stages, and the timeline and memory of its ranks."""
    found = plan.pipeline
    if found is None or found.costs is None:
        return
    forecast, costs = found.forecast, found.costs
    yield f"{found}"
    yield f"  in lockstep          {seconds_text(forecast.lockstep)}  (every rank waits for the end of each tick)"
    yield f"  asynchronous         {seconds_text(forecast.asynchronous)}  (every rank waits only for its own inputs)"
    sent = f"{count_text(costs.exchanges, 'collective')}, {costs.exchanges / found.ticks:.1f} per tick"
    yield f"  sent between stages  {sent}, {bytes_text(costs.sent)} per device and step"
    if found.ranks <= _DRAWN_RANKS:
        drawn = found.timeline(_TIMELINE_COLUMNS).splitlines()
        header = ("forward and backward tasks in lockstep, to scale", found.noun, "balance", "stash", "bytes", "memory")
        columns = (
            map(str, found.layers_by_rank),
            map(seconds_text, forecast.balance),
            map(str, found.stash),
            map(bytes_text, found.stash_bytes),
            map(bytes_text, found.memory),
        )
        yield ""
        yield from table([header, *zip(drawn, *columns, strict=True)])


def _inputs(plan: PlanData) -> Iterator[str]:
    if plan.inputs:
        header = ("input", "", "type", "layout", "pinned")
        yield from table([header, *map(_array_row, group_arrays(plan.inputs))])


def _array_row(group: ArrayGroup) -> Sequence[str]:
    array = group.array
    layout = layout_text(array.layout.named(array.dims))
    return (group.name, _times(group.count), array.type, layout, " ".join(array.pinned))


def _outputs(plan: PlanData) -> Iterator[str]:
    aliases = [array for array in plan.outputs if array.follows]
    if aliases:
        names = ", ".join(dict.fromkeys(split_path(array.follows)[0] for array in aliases))
        yield f"{len(aliases)} of {len(plan.outputs)} outputs alias inputs and keep their layout: {names}"
    rest = [array for array in plan.outputs if not array.follows]
    if rest:
        yield from table([("output", "", "type", "layout", "pinned"), *map(_array_row, group_arrays(rest))])


def _collectives(plan: PlanData) -> Iterator[str]:
    if not plan.collectives:
        yield "no collectives"
        return
    exposed = ["exposed"] if plan.exposed else []
    header = ("collective", "axes", "", "bytes", "trips", "time", *exposed, "phase", "source", "reason")
    rows = (row for each in collective_rows(plan.collectives, plan.exposed) for row in _rows(*each))
    yield from table([header, *rows])


def _loops(plan: PlanData) -> Iterator[str]:
    """What loops send beside the compute of other iterations, and what of it is waited for."""
    if plan.prefetched:
        header = (
            "prefetched loop",
            "phase",
            "trips",
            "exposed",
            "before",
            "second buffer",
            "sent ahead",
            "sent behind",
        )
        yield from table([header, *map(_loop_row, plan.prefetched)])


def _remat(plan: PlanData) -> Iterator[str]:
    """What the backward pass computes again."""
    if plan.recomputation is None or not plan.recomputation.values:
        return
    by_name: dict[str, list[RecomputedValue]] = {}
    for value in plan.recomputation.values:
        by_name.setdefault(value.name, []).append(value)
    sums = [
        (name, len(each), sum(v.bytes for v in each), sum(v.seconds for v in each), sum(v.operations for v in each))
        for name, each in by_name.items()
    ]
    rows = (
        (name, _times(count), bytes_text(size), seconds_text(seconds), str(operations))
        for name, count, size, seconds, operations in sorted(sums, key=lambda row: -row[2])
    )
    yield from table([("computed again", "", "saves", "takes", "operations"), *rows])


def _waterfall(plan: PlanData) -> Iterator[str]:
    """How the memory comes down from that of the fastest plan that keeps everything on the device."""
    if not plan.waterfall:
        return
    first, *changes, last = plan.waterfall
    steps = [(first.name, bytes_text(first.bytes), seconds_text(first.seconds))]
    steps += [(each.name, _signed(bytes_text, each.bytes), _signed(seconds_text, each.seconds)) for each in changes]
    steps.append((last.name, bytes_text(last.bytes), seconds_text(last.seconds)))
    yield from table([("memory", "peak", "step"), *steps])


def _host(plan: PlanData) -> Iterator[str]:
    """What is kept in the host's memory."""
    if plan.host is None:
        return
    listed = {array.path: array for array in plan.host.arrays}
    groups = [(each.name, list(each.paths)) for each in group_arrays(x for x in plan.inputs if x.path in listed)]
    inputs = [(name, [listed["/".join(path)] for path in paths]) for name, paths in groups]
    taken = {array.path for _, each in inputs for array in each}
    others = [(array.path, [array]) for path, array in listed.items() if path not in taken]
    residuals: dict[str, list[HostedArray]] = {}
    for residual in plan.host.residuals:
        residuals.setdefault(residual.path, []).append(residual)
    rows = [
        (
            name,
            _times(len(each)),
            bytes_text(sum(array.bytes for array in each)),
            bytes_text(sum(array.saved for array in each)),
            seconds_text(sum(array.seconds for array in each)),
        )
        for name, each in [*inputs, *others, *residuals.items()]
    ]
    yield from table([("kept on the host", "", "bytes", "saved at the peak", "transfers"), *rows])


def _signed(text: Callable[[float], str], number: float) -> str:
    return f"{'-' if number < 0 else '+'}{text(abs(number))}"


def _loop_row(loop: PrefetchedLoop) -> Sequence[str]:
    seconds, names = (loop.exposed, loop.serial), (loop.ahead, loop.behind)
    sent = (common_names(each) for each in names)
    return (loop.source, loop.phase, str(loop.trips), *map(seconds_text, seconds), bytes_text(loop.bytes), *sent)


def common_names(names: Sequence[str]) -> str:
    """Names in one line; those of repeated layers are one."""
    by_pattern: dict[str, list[str]] = {}
    for name in names:
        by_pattern.setdefault(pattern(name), []).append(name)
    return ", ".join(common(each) + (f" {_times(len(each))}" if len(each) > 1 else "") for each in by_pattern.values())


def collective_rows(
    collectives: Sequence[Collective], exposed: Sequence[float] = ()
) -> list[tuple[Collective, int, float | None]]:
    """Collectives that agree in everything shown, as one with their common reason, and their number, in order.

    Args:
      collectives: of a plan.
      exposed: seconds of each that are not hidden, of which every row has the sum; None in all rows if there are none.
    """
    found: dict[tuple[object, ...], list[int]] = {}
    for i, c in enumerate(collectives):
        key = (
            c.kind,
            c.axes,
            c.bytes,
            c.trips,
            c.estimated,
            c.phase,
            c.source,
            pattern(c.reason),
            c.seconds,
            c.parts,
            c.ring,
            c.format,
        )
        found.setdefault(key, []).append(i)
    return [
        (
            replace(collectives[row[0]], reason=common(collectives[i].reason for i in row)),
            len(row),
            sum(exposed[i] for i in row) if exposed else None,
        )
        for row in found.values()
    ]


def _rows(c: Collective, n: int, exposed: float | None) -> Iterator[Sequence[str]]:
    """A collective, and below it what is sent in it, which has no time of its own."""
    yield _row(c, n, exposed)
    for part, count, _ in collective_rows(c.parts):
        _, axes, times, size, trips, _, *rest = _row(part, count, None)
        yield ("  of it", axes, times, size, trips, "", *([] if exposed is None else [""]), *rest)


def _row(c: Collective, n: int, exposed: float | None) -> Sequence[str]:
    trips = f"~{c.trips}" if c.estimated else str(c.trips)
    reason = c.reason.replace(f" ({c.source})", "")
    times = [seconds_text(c.seconds * c.trips * n), *([] if exposed is None else [seconds_text(exposed)])]
    kind = f"{c.ring} ring" if c.ring else c.sent
    return (kind, ",".join(c.axes), _times(n), bytes_text(c.bytes), trips, *times, c.phase, c.source, reason)


def _totals(plan: PlanData) -> Iterator[str]:
    sums: dict[tuple[str, str], list[float]] = {}
    for c in plan.collectives:
        total = sums.setdefault((c.sent, ",".join(c.axes)), [0, 0, 0.0])
        for i, more in enumerate((c.trips, c.trips * c.bytes, c.trips * c.seconds)):
            total[i] += more
    if sums:
        rows = [(*key, str(n), bytes_text(size), seconds_text(time)) for key, (n, size, time) in sorted(sums.items())]
        yield from table([("total per step", "axes", "runs", "bytes", "time"), *rows])


def _notes(plan: PlanData) -> Iterator[str]:
    if plan.notes:
        yield "notes"
        yield from (f"  {note}" for note in plan.notes)


def _times(count: int) -> str:
    return f"x{count}" if count > 1 else ""
