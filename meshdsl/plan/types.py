"""The plan as plain data: arrays, collectives, source lines and timings of one planned step.

``PlanData`` holds every field and every number derived from the fields. Everything that reads a plan (text, diff, file,
report, validation) is typed against it and imports this file alone; ``Plan`` in ``plan.py`` adds the operations that
users call. All figures are per device and step: ``bytes`` is what one device sends, ``seconds`` the planner's
objective, ``memory`` the predicted peak.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jax.sharding import PartitionSpec

from meshdsl.errors import LayoutError
from meshdsl.ir.graph import array_type
from meshdsl.ir.solution import Solution
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Topology
from meshdsl.planner.limits import PROVE
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.shardings import partition_spec
from meshdsl.util.lazy import Lazy
from meshdsl.util.paths import nearest_path
from meshdsl.util.text import count_text

# ---- The step's boundary and its collectives -------------------------------------------------------------------------


@dataclass(frozen=True)
class Array:
    """One input or output of the step.

    Args:
      path: argument name and keys; position or keys for outputs.
      shape: global shape.
      dtype: name of the dtype.
      layout: planned layout, with a placement for every mesh axis.
      pinned: mesh axes that the user fixed.
      follows: for an output, the path of the input that it aliases; empty otherwise.
      dims: names of the dims, "" for a dim without one; empty if no dim has a name.
      aliases: for an input, other paths that lead to the same array.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    pinned: tuple[str, ...] = ()
    follows: str = ""
    dims: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths of the array."""
        return (self.path, *self.aliases)

    @property
    def type(self) -> str:
        """Dtype and shape: ``float32[8,16]``, or ``float32[embed=8 hidden=16]``."""
        return array_type(self.dtype, self.shape, self.dims)


@dataclass(frozen=True)
class Collective:
    """One planned collective.

    Args:
      kind: all-gather, all-reduce, reduce-scatter, all-to-all or collective-permute.
      axes: mesh axes it runs over, outermost first.
      bytes: bytes that one device sends per iteration.
      trips: iterations per step; a guess if ``estimated`` (inside a ``while``).
      estimated: whether ``trips`` is a guess.
      seconds: predicted seconds per iteration.
      phase: forward, backward or optimizer.
      source: line of the user's program that it belongs to, ``file.py:12``.
      reason: the value that is resharded, its two layouts, and the consumer that needs the second.
      value: name of the value that is resharded.
      shape: global shape of that value.
      dtype: dtype of that value.
      parts: of a bucket, the collectives that are sent as this one; value and shape are those of the first.
      ring: of the hops of a ring, beside which products run in parts, the kind of collective that they replace; each
        hop counts as a trip. Empty for others.
      format: in which the value is sent, if that has fewer bits than its dtype, such as ``int8``; empty for others.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    trips: int
    estimated: bool
    seconds: float
    phase: str
    source: str
    reason: str
    value: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple["Collective", ...] = ()
    ring: str = ""
    format: str = ""

    @property
    def sent(self) -> str:
        """The kind, with the format if that has fewer bits: ``all-gather int8``."""
        return f"{self.kind} {self.format}".rstrip()


class PrefetchedLoop(NamedTuple):
    """A loop whose collectives run beside the compute of other iterations; see ``meshdsl.plan.prefetch``.

    Args:
      source: line of the loop, as collectives have it.
      phase: forward, backward or optimizer.
      trips: iterations per step.
      ahead: names of the slices whose collectives are sent one iteration ahead.
      behind: names of the stacked results whose collectives are sent one iteration behind.
      bytes: that one device holds from an iteration to the next, the second buffer.
      serial: seconds per step that these collectives would be waited for if they were sent where they are needed, of
        the simulation in ``meshdsl.plan.simulate``.
      exposed: seconds per step that they are waited for.
    """

    source: str
    phase: str
    trips: int
    ahead: tuple[str, ...]
    behind: tuple[str, ...]
    bytes: int
    serial: float
    exposed: float


class RecomputedValue(NamedTuple):
    """A value of the forward pass that the backward pass computes again instead of keeping it.

    Args:
      name: of the value, with the line of its operation.
      bytes: that one device would hold to keep it, as the fastest plan that keeps everything lays it out.
      seconds: per step, to compute it again, with what it is computed from where that is not kept either; collectives
        that are waited for are included.
      operations: that run twice for it.
    """

    name: str
    bytes: int
    seconds: float
    operations: int


class Recomputation(NamedTuple):
    """What a step computes again in its backward pass; see ``meshdsl.api.remat``.

    Args:
      ops: ids of the operations that run twice, in the program that keeps everything, with its loops divided.
      values: what is computed again, in the order of the backward pass.
      saved: bytes on a device that these are larger than what is kept to compute them from.
      fastest: bytes and seconds of the best plan found that keeps everything, without a memory limit.
      kept: bytes and seconds of the best plan found within the limit that keeps everything; None if there is none.
      spared: ids of results of ``ops`` that are kept all the same.
      hosted: ids of values that are kept in the host's memory (``plan.host.residuals``).
      divided: loops over layers that are two, by the ids of their forward scans, with the iterations of the first.
      stages: ``Pipeline.recompute`` by the planner's choice; empty if it is the user's. ``ops`` are then those of the
        program before it is cut into stages.
    """

    ops: tuple[int, ...]
    values: tuple[RecomputedValue, ...]
    saved: int
    fastest: tuple[int, float]
    kept: tuple[int, float] | None = None
    spared: tuple[int, ...] = ()
    hosted: tuple[int, ...] = ()
    divided: tuple[tuple[int, int], ...] = ()
    stages: str = ""

    @property
    def rewrite(self) -> tuple[tuple[int, ...], ...]:
        """What decides the rewritten program: ``ops``, ``spared``, ``hosted``."""
        return self.ops, self.spared, self.hosted

    @property
    def seconds(self) -> float:
        """Seconds per step of all that is computed again."""
        return sum(value.seconds for value in self.values)


class HostedArray(NamedTuple):
    """An input, with the result that replaces it, another result, or a residual, in the host's memory.

    Args:
      path: of the input, ``output`` and that of the result, or the name of the residual with the line of its operation.
      bytes: of the host's memory, per device.
      saved: bytes that a device holds less where its memory is fullest.
      seconds: per step, on the link to the host's memory.
    """

    path: str
    bytes: int
    saved: int
    seconds: float


class HostMemory(NamedTuple):
    """What a step keeps in the host's memory.

    Args:
      arrays: inputs in their order, then results that replace none of them.
      bytes: of the host's memory, per device.
      fastest: if the planner chose any of the arrays, bytes and seconds of the best plan found without that, and
        without a memory limit; where it chose residuals alone, ``plan.recomputation.fastest``.
      kept: bytes and seconds of the best plan found within the limit without its choice; None if there is none.
      residuals: values that wait there between forward and backward pass.
    """

    arrays: tuple[HostedArray, ...]
    bytes: int
    fastest: tuple[int, float] | None = None
    kept: tuple[int, float] | None = None
    residuals: tuple[HostedArray, ...] = ()

    @property
    def saved(self) -> int:
        """Bytes that a device holds less where its memory is fullest."""
        return sum(array.saved for array in (*self.arrays, *self.residuals))

    @property
    def seconds(self) -> float:
        """Seconds per step on the link to the host's memory."""
        return sum(array.seconds for array in (*self.arrays, *self.residuals))


class MemoryStep(NamedTuple):
    """A step from the fastest plan that keeps everything to a plan; the first and the last are whole plans.

    Args:
      name: what changes.
      bytes: of the peak, or by which it changes.
      seconds: of the step, or by which they change.
    """

    name: str
    bytes: int
    seconds: float


# ---- The step in program order ---------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A line of the user's source, as it read when the plan was made.

    Args:
      source: name of the line, as collectives have it: ``file.py:12``, with folders where two files share a name.
      function: function that the line's operations come from; empty for a context line without operations.
      text: the line without its line break; empty if the source could not be read.
    """

    source: str
    function: str
    text: str


class Span(NamedTuple):
    """A run of equal operations that cost something, one after the other.

    Args:
      line: index into the plan's lines.
      name: name of the operation.
      phase: forward, backward or optimizer.
      trips: iterations per step.
      operations: number of operations in the run.
      seconds: predicted seconds per iteration of computing, device-local reshard steps included.
      memory: predicted bytes per device at the fullest point before the next span begins.
      collectives: number of collectives, in the plan's order, that the span waits for.
    """

    line: int
    name: str
    phase: str
    trips: int
    operations: int
    seconds: float
    memory: int
    collectives: int


_LARGEST_LOSSES = 3  # reasons why a step takes longer than the compute bound
_NEGLIGIBLE_LOSS = 1e-4  # share of the step's time up to which a loss is not named
LAUNCHES = "launch overhead"  # the loss by starting operations
_ROUNDING = 1e-8  # relative error of a sum of seconds, up to which a plan is as good as its bound


def relative_gap(seconds: float, lower_bound: float) -> float:
    """Returns ``(seconds - lower_bound) / seconds``; 0 if that is rounding."""
    gap = (seconds - lower_bound) / seconds if seconds else 0.0
    return gap if gap > _ROUNDING else 0.0


class Utilization(NamedTuple):
    """How well a step uses its devices; see ``meshdsl.plan.utilization``.

    Args:
      divided: per mesh axis of several devices, the part of the compute that it divides, from 0 to 1.
      flops: of the matrix products and convolutions of a step, on all devices together; recomputation does not count.
      compute_bound: seconds in which the devices could do these; 0 where that is not known.
      losses: what takes the rest of the predicted time, as (reason, seconds), largest first.
    """

    divided: tuple[tuple[str, float], ...] = ()
    flops: float = 0.0
    compute_bound: float = 0.0
    losses: tuple[tuple[str, float], ...] = ()

    @property
    def largest_losses(self) -> tuple[tuple[str, float], ...]:
        """The losses that are named to people."""
        least = _NEGLIGIBLE_LOSS * (self.compute_bound + sum(seconds for _, seconds in self.losses))
        return tuple(loss for loss in self.losses[:_LARGEST_LOSSES] if loss[1] > least)


class Timing(NamedTuple):
    """Where the time of a step goes, and its length with communication hidden behind independent compute.

    Args:
      exposed: per collective of the plan, the seconds per step that are not hidden; empty if that is not known.
    """

    spans: tuple[Span, ...] = ()
    simulated_seconds: float = 0.0
    utilization: Utilization = Utilization()
    exposed: tuple[float, ...] = ()


# ---- The plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanData:
    """Every field of a plan, and the numbers derived from them.

    Args:
      name: name of the step.
      identity: ``fingerprint``, computed when it is first used.
      operations: number of operations per operation name.
      inputs: inputs of the step.
      outputs: outputs of the step.
      collectives: collectives in program order of the operations that wait for them.
      held: buffers that are live at the memory peak, as (name, bytes), largest first.
      notes: remarks for the reader, such as operations without a rule.
      solution: the planner's answer, which is what runs.
      padded: dims that are padded inside the step, as (length, padded length).
      regions: whether parts of dims that are only reduced are computed where they lie.
      pipeline: microbatches and stages, if the step has them.
      lines: source lines of the operations with some context, ordered by file and line.
      timing: ``spans``, ``simulated_seconds``, ``exposed`` and ``utilization``, computed when one is first used.
      jax: version of jax that traced the step, which does not make plans unequal; empty in older files.
      prefetched: the loops that send collectives ahead or behind, in program order.
      recomputation: what the planner chose to compute again in the backward pass, or to send to the host until then.
      checkpoints: the step's ``jax.checkpoint`` is as written; else it was taken out (``remat="replace"``).
      effort: with which the step was planned, which does not make plans unequal either.
      host: what is kept in the host's memory, if anything.
      compiled: of the record of a compiled program (``meshdsl.plan.compiled``), the compiler; empty for plans.
      low_bits: the text of the error budget within which collectives may round; empty if all send in full.
      alternatives: the functions taken of ``md.alternatives``, by the name of what was chosen.
    """

    name: str
    identity: Lazy[str]
    operations: Mapping[str, int]
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    collectives: tuple[Collective, ...]
    held: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    solution: Solution
    padded: tuple[tuple[int, int], ...] = ()
    pipeline: Pipelined | None = None
    lines: tuple[Line, ...] = ()
    timing: Lazy[Timing] = field(default_factory=lambda: Lazy.known(Timing()))
    regions: bool = False
    jax: str = field(default="", compare=False)
    prefetched: tuple[PrefetchedLoop, ...] = ()
    recomputation: Recomputation | None = None
    checkpoints: bool = True
    effort: str = field(default=PROVE, compare=False)
    host: HostMemory | None = None
    compiled: str = ""
    low_bits: str = ""
    alternatives: tuple[tuple[str, str], ...] = ()

    @property
    def fingerprint(self) -> str:
        """Hash of the traced program; a plan runs only the program it was made for."""
        return self.identity.value

    @property
    def spans(self) -> tuple[Span, ...]:
        """The step in program order; together with the collectives their seconds add up to the plan's."""
        return self.timing.value.spans

    @property
    def simulated_seconds(self) -> float:
        """Predicted seconds of one step with communication hidden behind independent compute.

        ``meshdsl.plan.simulate`` computes it by list scheduling. ``seconds``, which the planner minimises, has one
        thing after the other.
        """
        return self.timing.value.simulated_seconds

    @property
    def exposed(self) -> tuple[float, ...]:
        """Per collective, in the plan's order, the seconds per step in which the device only waits for it.

        Their sum is that by which the simulated step is longer than its computation; empty in a plan loaded from a file
        that has none.
        """
        return self.timing.value.exposed

    @property
    def utilization(self) -> Utilization:
        """What each axis divides, the compute bound, and what takes the rest of the predicted time."""
        return self.timing.value.utilization

    @property
    def mfu(self) -> float:
        """Model FLOP utilization: the compute bound by the predicted seconds; 0 if it is not known."""
        return self.utilization.compute_bound / self.seconds if self.seconds else 0.0

    @property
    def mesh(self) -> Mesh:
        """Mesh that the step was planned for."""
        return self.solution.mesh

    @property
    def topology(self) -> Topology:
        """Costs of the mesh and its devices that the planner assumed."""
        return self.solution.mesh.topology

    @property
    def bytes(self) -> int:
        """Bytes that one device sends in one step."""
        return sum(c.bytes * c.trips for c in self.collectives)

    @property
    def seconds(self) -> float:
        """Predicted seconds of one step: the planner's objective."""
        return self.solution.seconds

    @property
    def memory(self) -> int:
        """Predicted peak memory in bytes per device."""
        return self.solution.peak

    @property
    def host_memory(self) -> int:
        """Bytes of the host's memory per device, in which ``host`` lists the arrays."""
        return self.host.bytes if self.host else 0

    @property
    def waterfall(self) -> tuple[MemoryStep, ...]:
        """The way from the fastest plan that keeps everything to this one; empty if the planner chose nothing else.

        What layouts, gathered copies and live ranges change is what is left: they differ between both plans.
        """
        found, host = self.recomputation, self.host
        fastest = (host.fastest if host else None) or (found.fastest if found else None)
        if fastest is None:
            return ()
        first, changes = MemoryStep("keep all", *fastest), list[MemoryStep]()
        hosted = [("array", host.arrays if host.fastest else ()), ("residual", host.residuals)] if host else []
        for kind, arrays in hosted:
            if arrays:
                saved, seconds = sum(each.saved for each in arrays), sum(each.seconds for each in arrays)
                changes.append(MemoryStep(f"on the host, {count_text(len(arrays), kind)}", -saved, seconds))
        if found and found.values:
            again = f"computed again, {count_text(len(found.values), 'value')}"
            changes.append(MemoryStep(again, -found.saved, found.seconds))
        rest = MemoryStep(
            "layouts and live ranges",
            self.memory - first.bytes - sum(each.bytes for each in changes),
            self.seconds - first.seconds - sum(each.seconds for each in changes),
        )
        return (first, *changes, rest, MemoryStep("this plan", self.memory, self.seconds))

    @property
    def lower_bound(self) -> float:
        """Seconds that no plan of this program under these pins can be below.

        Plans with buckets are among them where buckets matter (``meshdsl.api.buckets``); elsewhere, every collective is
        sent by itself.
        """
        return self.solution.lower_bound

    @property
    def gap(self) -> float:
        """Relative distance from the optimum, at most: (seconds - lower_bound) / seconds; 0 if that is rounding."""
        return relative_gap(self.seconds, self.lower_bound)

    def input(self, path: str) -> Array:
        """The input at ``path``, one of its paths; LayoutError with the nearest path if there is none."""
        return _find(self.inputs, path, "input")

    def layout(self, path: str) -> Layout:
        """Layout of the input at ``path``; LayoutError with the nearest path if there is none."""
        return self.input(path).layout

    def partition_specs(self) -> dict[str, PartitionSpec]:
        """The layouts of all inputs in JAX's words, by path, for a mesh of jax with the axes of this one.

        An array that several paths lead to is listed under each.

        Example:
          >>> plan.partition_specs()["params/w1"]
          PartitionSpec(None, 'model')
        """
        return {path: partition_spec(x.layout, len(x.shape)) for x in self.inputs for path in x.paths}

    def output_layout(self, path: str) -> Layout:
        """Layout of the output at ``path``; LayoutError with the nearest path if there is none."""
        return _find(self.outputs, path, "output").layout


def _find(arrays: tuple[Array, ...], path: str, noun: str) -> Array:
    found = next((array for array in arrays if path in array.paths), None)
    if found is None:
        known = [each for array in arrays for each in array.paths]
        raise LayoutError(f"no {noun} {path!r} in the plan{nearest_path(str(path), known)}")
    return found
