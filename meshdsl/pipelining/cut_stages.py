"""Stages of a step that ``md.stage`` cuts into parts: which operation belongs to which stage.

For models that are no scan of equal layers, the user marks the boundaries, and every part between two cuts may differ:

    x = md.stage(encode(x))         part 0 | cut | part 1 | cut | part 2 with the loss
    x = md.stage(decode(x))

Going through the operations of a microbatch in order, every cut leads to the next *time*:

    times 0, 1, ... K     the parts forward, the last with the loss
    times K+1, ... 2K     the gradients of parts K-1, ... 0; the gradient of a cut leads from one to the next

Stage k runs times k and 2K - k, and uses what other stages computed only through its two cuts. What depends on no cut
and leads to no first cut (targets, masks) is FREE: recomputed wherever it is used. A sum of contributions of several
stages (gradients of tied parameters, penalties) is taken AFTER the loop, from their totals.

If there are more parts than stages, neighbouring parts are merged so that the largest stage takes least time
(``schedules.partition``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from meshdsl.errors import PipelineError, faults, shortened
from meshdsl.ir.graph import Atom, Graph, Op, Value
from meshdsl.ir.index import producers
from meshdsl.ir.rewrite import values
from meshdsl.layouts.placement import B, Split
from meshdsl.pipelining.time_axis import TimePlacement
from meshdsl.schedules.partition import partition_faults, partition_layers
from meshdsl.schedules.spec import Pipeline

AFTER, FREE = -1, -2  # times besides 0 ... 2K
_FAULTS_LISTED = 6  # faults that an error lists before it counts the rest
_NOT_A_PIPELINE = "the parts that md.stage cuts cannot be a pipeline:"

# ---- The partition ---------------------------------------------------------------------------------------------------


@dataclass
class StageCut:
    """The boundary between a stage and the next: the cut of activations, and the cut of their gradients."""

    forward: Op
    backward: Op | None = None


@dataclass
class StagePartition:
    """The stages of a step.

    Args:
      cuts: the boundaries, in order.
      sizes: parts per stage.
      times: time per value id that is computed per microbatch: 0 ... 2K, AFTER or FREE.
    """

    graph: Graph
    placement: TimePlacement
    cuts: list[StageCut]
    sizes: tuple[int, ...] = ()
    times: dict[int, int] = field(default_factory=dict)

    @property
    def last_stage(self) -> int:
        """The number of the last stage, K."""
        return len(self.cuts)

    @property
    def forward_only(self) -> bool:
        """Whether no gradient passes a cut."""
        return all(cut.backward is None for cut in self.cuts)

    def stage(self, v: Value) -> int:
        """Returns the stage that computes a value; FREE ones count as the last stage's."""
        time = self.times[v.id]
        return self.last_stage if time == FREE else min(time, 2 * self.last_stage - time)

    def is_backward(self, v: Value) -> bool:
        """Returns whether a backward task computes a value; the last stage does all of its work in its backward."""
        time = self.times[v.id]
        return not self.forward_only and (time == FREE or time >= self.last_stage)

    def seconds(self, known: Mapping[int, float]) -> tuple[list[float], list[float]]:
        """Returns the seconds of every stage, and those it would take as the last one.

        A stage that is not the last recomputes its forward in its backward.

        Args:
          known: seconds per operation id.
        """
        forward, backward = ([0.0] * (self.last_stage + 1) for _ in range(2))
        for op in self.graph.ops[:-1]:
            time = self.times.get(op.outputs[0].id, AFTER)
            if op.id in known and time >= 0:
                (backward if time > self.last_stage else forward)[self.stage(op.outputs[0])] += known[op.id]
        runs = 1 if self.forward_only else 2
        both = list(zip(forward, backward, strict=True))
        return [runs * f + b for f, b in both], [f + b for f, b in both]

    def sent(self, op: Op | None) -> list[tuple[Atom, Value]]:
        """Returns what a cut sends of each microbatch, before and after it."""
        pairs = zip(op.inputs, op.outputs, strict=True) if op else ()
        return [(x, v) for x, v in pairs if isinstance(self.placement.of(v), Split)]


def find_partition(
    graph: Graph, placement: TimePlacement, ranks: int, seconds: Mapping[int, float], pipeline: Pipeline
) -> StagePartition:
    """Returns the stages of a step.

    Args:
      ranks: devices along the axis of the stages.
      seconds: what each operation that runs per microbatch takes.
      pipeline: the schedule, and the parts per stage if the user gave them.

    Raises PipelineError if there are too few parts, or if parts use each other's values past the cuts.
    """
    cuts = [
        op
        for op in graph.ops
        if op.name == "stage" and not op.params["back"] and any(isinstance(placement.of(v), Split) for v in op.outputs)
    ]
    rows = list(partition_faults(len(cuts) + 1, ranks, pipeline, "parts"))
    if pipeline.splits_backward:
        rows.append(
            f"schedule {pipeline.name!r} splits the backward of a layer; parts take '1f1b', 'gpipe' or 'interleaved'"
        )
    if pipeline.recompute != "stage":
        rows.append(
            f"recompute={pipeline.recompute!r} applies to scanned layers; parts are recomputed from their inputs"
        )
    if rows:
        raise PipelineError(faults(_NOT_A_PIPELINE, rows))
    finest = _TimeAssignment(graph, placement, cuts)
    parts = finest.partition()
    per_part, as_last = parts.seconds(seconds)
    sizes = pipeline.layers or partition_layers(per_part, ranks * pipeline.chunks, at_last=as_last)
    boundaries = [cuts[i - 1] for i in list(accumulate(sizes))[:-1]]
    merged = _TimeAssignment(graph, placement, boundaries, finest.backward).partition()
    merged.sizes = sizes
    return merged


# ---- Assigning times -------------------------------------------------------------------------------------------------


class _TimeAssignment:
    """One pass over a step that assigns a time to every value computed per microbatch.

    Args:
      cuts: the cuts that are boundaries; others are the identity.
      backward: per id of a cut of gradients, the id of the forward cut that it belongs to; found if not given.
    """

    def __init__(
        self, graph: Graph, placement: TimePlacement, cuts: Sequence[Op], backward: Mapping[int, int] | None = None
    ) -> None:
        self.graph, self.placement, self.cuts = graph, placement, [StageCut(op) for op in cuts]
        self.numbers = {op.id: i for i, op in enumerate(cuts)}
        self.is_paired, self.backward = backward is not None, dict(backward or {})
        self.leading, self.faults = self._leading() if cuts else set[int](), list[str]()
        self.times = {v.id: FREE for v in graph.inputs if isinstance(placement.of(v), Split)}

    def partition(self) -> StagePartition:
        """Returns the partition; raises PipelineError if parts use each other's values past the cuts."""
        for op in self.graph.ops[:-1]:
            if self.placement.is_per_microbatch(op):
                time = self._time_after_cut(op) if op.name == "stage" else self._time(op)
                self.times.update((v.id, time) for v in op.outputs)
        if self.faults:
            rows = shortened(list(dict.fromkeys(self.faults)), _FAULTS_LISTED)
            raise PipelineError(faults(_NOT_A_PIPELINE, rows))
        return StagePartition(self.graph, self.placement, self.cuts, times=self.times)

    def _leading(self) -> set[int]:
        """Returns ids of operations that lead to the first cut and use anything but the batch: those of part 0."""
        producer_of = producers(self.graph)
        pending, found = [self.cuts[0].forward], set[int]()
        while pending:
            op = pending.pop()
            above = [producer_of[v.id] for v in values(op.inputs) if v.id in producer_of]
            above = [each for each in above if self.placement.is_per_microbatch(each)]
            pending += [each for each in above if each.id not in found]
            found |= {each.id for each in above}
        parameters = {v.id for v in self.graph.inputs if self.placement.of(v) is B}
        for op in self.graph.ops:
            if any(v.id in parameters for v in values(op.inputs)):
                parameters |= {v.id for v in op.outputs}
        return {op.id for op in self.graph.ops if op.id in found and any(v.id in parameters for v in op.outputs)}

    def _operand_times(self, op: Op) -> set[int]:
        return {self.times[v.id] for v in values(op.inputs) if v.id in self.times} - {FREE}

    def _time(self, op: Op) -> int:
        """Returns when an operation that is no cut runs."""
        used, last = self._operand_times(op), len(self.cuts)
        if not used:
            return 0 if op.id in self.leading else FREE
        time = max(used)
        of_stage = {time, 2 * last - time} if time > last else {time}
        if AFTER not in used and used <= of_stage:
            return time
        if any(isinstance(self.placement.of(x), Split) for x in values(op.inputs)):
            parts = ", ".join(str(t) for t in sorted({min(t, 2 * last - t) for t in used - {AFTER}}))
            text = f"values of parts {parts}; pass them through md.stage"
            what = "a sum over all parts, which is known after the loop" if AFTER in used else text
            self.faults.append(f"{op.called} at {op.source} reads {what}")
            return time
        return AFTER

    def _time_after_cut(self, op: Op) -> int:
        """Returns the time that a cut leads to."""
        used = self._operand_times(op)
        time = max(used, default=FREE)
        if op.params["back"]:
            return self._time_after_gradient_cut(op, len(self.cuts) if time == FREE else time)
        if op.id not in self.numbers:
            return time
        if not used <= {self.numbers[op.id]}:
            self.faults.append(f"md.stage at {op.source} does not follow the cut before it: parts form a chain")
        return self.numbers[op.id] + 1

    def _time_after_gradient_cut(self, op: Op, time: int) -> int:
        cut = 2 * len(self.cuts) - time - 1
        if not self.is_paired and 0 <= cut < len(self.cuts):
            self.backward[op.id] = self.cuts[cut].forward.id
        if self.backward.get(op.id) not in self.numbers:
            return time
        self.cuts[self.numbers[self.backward[op.id]]].backward = op
        return time + 1
