"""A step cut into parts by ``md.stage``, for a model that is no scan: which operation belongs to which stage.

Going through what is done per microbatch in order, every cut leads to the next time:

    time 0, 1, ... K    parts forward, the last with the loss
    time K+1, ... 2K    the gradients of parts K-1, ... 0, each of which the gradient of a cut leads to

So stage k does times k and 2K - k, and reads what other stages made only through the cuts on its two sides. What does
not come through any cut and does not lead to the first (targets, masks) belongs to no stage, and is made wherever it
is read. A sum of what several stages have made of one microbatch (tied parameters' gradients, penalties) is taken
after the loop, from the totals.

Where there are more parts than devices on the axis, neighbours are put together so that the largest stage takes the
least time (``partition_layers``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from meshdsl.errors import PipelineError, faults, shortened
from meshdsl.ir.graph import Atom, Graph, Op, Value
from meshdsl.ir.rewrite import makers_of, values
from meshdsl.layouts.placement import B, Split
from meshdsl.pipelining.time_axis import TimePlacement
from meshdsl.schedules.partition import partition_layers, share_faults
from meshdsl.schedules.spec import Pipeline

AFTER, FREE = -1, -2
_SHOWN = 6


@dataclass
class StageCut:
    """Between a stage and the next: the operation on the way forward, and the one on the way back."""

    forward: Op
    backward: Op | None = None


@dataclass
class StagePartition:
    """Which stage does what.

    Args:
      cuts: between stages, in order.
      sizes: parts per stage.
      times: per value that is made in turns, when; AFTER the loop, or FREE: wherever it is read.
    """

    graph: Graph
    placing: TimePlacement
    cuts: list[StageCut]
    sizes: tuple[int, ...] = ()
    times: dict[int, int] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The last stage."""
        return len(self.cuts)

    @property
    def forward_only(self) -> bool:
        """Whether no gradient goes back through a cut."""
        return all(cut.backward is None for cut in self.cuts)

    def stage(self, v: Value) -> int:
        """The stage that makes a value."""
        time = self.times[v.id]
        return self.last if time == FREE else min(time, 2 * self.last - time)

    def is_back(self, v: Value) -> bool:
        """Whether it is made on the way back, where the last stage does all it does if there is one."""
        time = self.times[v.id]
        return not self.forward_only and (time == FREE or time >= self.last)

    def seconds(self, known: Mapping[int, float]) -> tuple[list[float], list[float]]:
        """Seconds of every stage; and what they would be of the last one, which does not compute its forward again."""
        ahead, back = ([0.0] * (self.last + 1) for _ in range(2))
        for op in self.graph.ops[:-1]:
            time = self.times.get(op.outputs[0].id, AFTER)
            if op.id in known and time >= 0:
                (back if time > self.last else ahead)[self.stage(op.outputs[0])] += known[op.id]
        times = 1 if self.forward_only else 2
        both = list(zip(ahead, back, strict=True))
        return [times * f + b for f, b in both], [f + b for f, b in both]

    def handed(self, op: Op | None) -> list[tuple[Atom, Value]]:
        """What a cut hands on of each microbatch, before and after it."""
        pairs = zip(op.inputs, op.outputs, strict=True) if op else ()
        return [(x, v) for x, v in pairs if isinstance(self.placing.of(v), Split)]


def find_parts(
    graph: Graph, placing: TimePlacement, ranks: int, seconds: Mapping[int, float], asked: Pipeline
) -> StagePartition:
    """The parts of a step as stages.

    Args:
      ranks: stages.
      seconds: per operation that is done in turns, what it takes.
      asked: how many parts each stage has, if that was asked for.

    Raises PipelineError if there are too few parts, or if they read each other's values past the cuts.
    """
    ahead = [op for op in graph.ops if op.name == "stage" and not op.params["back"] and _is_turned(op, placing)]
    rows = list(share_faults(len(ahead) + 1, ranks, asked, "parts"))
    if asked.halves:
        rows.append(f"schedule {asked.name!r} halves the backward of a layer; use '1f1b', 'gpipe' or 'interleaved'")
    if asked.recompute != "stage":
        rows.append(f"recompute={asked.recompute!r} is for layers; parts are computed again, from what they are given")
    if rows:
        raise PipelineError(faults("the parts that md.stage cuts are no pipeline:", rows))
    fine = _Division(graph, placing, ahead)
    parts = fine.parts()
    each, at_last = parts.seconds(seconds)
    sizes = asked.layers or partition_layers(each, ranks * asked.chunks, at_last=at_last)
    kept = [ahead[i - 1] for i in list(accumulate(sizes))[:-1]]
    parts = _Division(graph, placing, kept, fine.backward).parts()
    parts.sizes = sizes
    return parts


def _is_turned(op: Op, placing: TimePlacement) -> bool:
    return any(isinstance(placing.of(v), Split) for v in op.outputs)


class _Division:
    """One way through a step.

    Args:
      ahead: the cuts forward; others are none.
      backward: per cut on the way back, the id of the one forward; found if not given.
    """

    def __init__(
        self, graph: Graph, placing: TimePlacement, ahead: Sequence[Op], backward: Mapping[int, int] | None = None
    ) -> None:
        self.graph, self.placing, self.cuts = graph, placing, [StageCut(op) for op in ahead]
        self.numbers = {op.id: i for i, op in enumerate(ahead)}
        self.known, self.backward = backward is not None, dict(backward or {})
        self.first, self.wrong = self._leading() if ahead else set[int](), list[str]()
        self.times = {v.id: FREE for v in graph.inputs if isinstance(placing.of(v), Split)}

    def parts(self) -> StagePartition:
        """The parts; PipelineError if they are no stages."""
        for op in self.graph.ops[:-1]:
            if self.placing.in_turns(op):
                time = self._cut(op) if op.name == "stage" else self._time(op)
                self.times.update((v.id, time) for v in op.outputs)
        if self.wrong:
            title = "the parts that md.stage cuts are no pipeline:"
            raise PipelineError(faults(title, shortened(list(dict.fromkeys(self.wrong)), _SHOWN)))
        return StagePartition(self.graph, self.placing, self.cuts, times=self.times)

    def _leading(self) -> set[int]:
        """Ids of operations that lead to the first cut and read anything but the batch."""
        makers = makers_of(self.graph)
        pending, found = [self.cuts[0].forward], set[int]()
        while pending:
            op = pending.pop()
            above = [makers[v.id] for v in values(op.inputs) if v.id in makers and self.placing.in_turns(makers[v.id])]
            pending += [each for each in above if each.id not in found]
            found |= {each.id for each in above}
        given = {v.id for v in self.graph.inputs if self.placing.of(v) is B}
        for op in self.graph.ops:
            if any(v.id in given for v in values(op.inputs)):
                given |= {v.id for v in op.outputs}
        return {i for i in found for op in self.graph.ops if op.id == i and any(v.id in given for v in op.outputs)}

    def _reads(self, op: Op) -> set[int]:
        """The times of what an operation reads."""
        return {self.times[v.id] for v in values(op.inputs) if v.id in self.times} - {FREE}

    def _time(self, op: Op) -> int:
        """When an operation runs that is no cut."""
        read, last = self._reads(op), len(self.cuts)
        if not read:
            return 0 if op.id in self.first else FREE
        time = max(read)
        beside = {time, 2 * last - time} if time > last else {time}
        if AFTER not in read and read <= beside:
            return time
        if any(isinstance(self.placing.of(x), Split) for x in values(op.inputs)):
            past = ", ".join(str(t) for t in sorted({min(t, 2 * last - t) for t in read - {AFTER}}))
            text = f"values of parts {past}; hand them on through md.stage"
            of = "a sum over all parts, which is known after the loop" if AFTER in read else text
            self.wrong.append(f"{op.called} at {op.source} reads {of}")
            return time
        return AFTER

    def _cut(self, op: Op) -> int:
        read = self._reads(op)
        time = max(read, default=FREE)
        if op.params["back"]:
            return self._back(op, len(self.cuts) if time == FREE else time)
        if op.id not in self.numbers:
            return time
        if not read <= {self.numbers[op.id]}:
            self.wrong.append(f"md.stage at {op.source} does not follow the one before it: parts come one by one")
        return self.numbers[op.id] + 1

    def _back(self, op: Op, time: int) -> int:
        """The time after a cut on the way back."""
        cut = 2 * len(self.cuts) - time - 1
        if not self.known and 0 <= cut < len(self.cuts):
            self.backward[op.id] = self.cuts[cut].forward.id
        if self.backward.get(op.id) not in self.numbers:
            return time
        self.cuts[self.numbers[self.backward[op.id]]].backward = op
        return time + 1
