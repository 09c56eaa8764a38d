"""Plan: the planner's answer as a value to read, save, compare and run.

It holds the solution (a row for every operation, a layout for every value, the moves between
them), which is what runs, and beside it what a reader wants to know: the arrays at the step's
boundary by path, and every collective with its size, how often it runs, and why it is there.

All figures are per device and step: ``bytes`` is what one device sends, ``seconds`` the
objective the planner minimised, ``memory`` the predicted peak.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from meshdsl.errors import ArgumentError, LayoutError, is_a
from meshdsl.ir.graph import array_type
from meshdsl.ir.solution import Solution
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Topology
from meshdsl.plan.budget import Kinds, check_budget
from meshdsl.plan.types import Line, Span, Timing
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.util.lazy import Lazy
from meshdsl.util.paths import nearest_path

if TYPE_CHECKING:
    from meshdsl.plan.diff import PlanDiff


@dataclass(frozen=True)
class Array:
    """One input or output of the step.

    Args:
      path: argument name and keys; for outputs position or keys.
      layout: as planned, every axis named.
      pinned: the axes that the user fixed.
      follows: for outputs, the path of the input that it replaces; else empty.
      dims: names of its dims, "" for a dim without one; empty if they have none.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    pinned: tuple[str, ...] = ()
    follows: str = ""
    dims: tuple[str, ...] = ()

    @property
    def type(self) -> str:
        """Its dtype and shape: ``float32[8,16]``, or ``float32[embed=8 hidden=16]``."""
        return array_type(self.dtype, self.shape, self.dims)


@dataclass(frozen=True)
class Collective:
    """One planned collective.

    Args:
      kind: all-gather, all-reduce, reduce-scatter, all-to-all or collective-permute.
      axes: mesh axes it runs over, major first.
      bytes: what one device sends per trip.
      trips: how often it runs in a step; a guess if ``estimated`` (inside a ``while``).
      seconds: predicted, per trip.
      phase: forward, backward or optimizer.
      source: the user's line that it belongs to, ``file.py:12``.
      reason: what is moved, how, and who needs it.
      value: name of the tensor that is moved; shape, dtype: of the whole tensor.
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


@dataclass(frozen=True)
class Plan:
    """A planned step; ``print`` it to read it.

    Args:
      name: of the step.
      identity: the ``fingerprint``, which is worked out when it is first read.
      operations: how many operations of each name the program has.
      held: what fills the memory at its fullest point, as (name, bytes), largest first.
      notes: what the reader should know, such as operations without a rule.
      padded: lengths of dims that are padded inside the step, each with what it is padded to.
      pipeline: how the step takes its batch in microbatches, if it does.
      lines: of the source, file by file, with some around those that have operations.
      timing: ``spans`` and ``simulated_seconds``, which are worked out when one of them is first read.
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

    @property
    def fingerprint(self) -> str:
        """Of the traced program; a plan runs only what it was made for."""
        return self.identity.value

    @property
    def spans(self) -> tuple[Span, ...]:
        """The step in program order; with the collectives their seconds add up to the plan's."""
        return self.timing.value.spans

    @property
    def simulated_seconds(self) -> float:
        """Predicted seconds of one step if collectives that nobody waits for run beside the computation.

        See ``meshdsl.plan.simulate``; ``seconds``, which the planner minimises, has one thing after the other.
        """
        return self.timing.value.simulated_seconds

    @property
    def mesh(self) -> Mesh:
        """The mesh it was planned for."""
        return self.solution.mesh

    @property
    def topology(self) -> Topology:
        """What the mesh was taken to cost."""
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
        """Predicted bytes per device at the fullest point."""
        return self.solution.peak

    @property
    def lower_bound(self) -> float:
        """Seconds that no plan of this program under these pins can beat."""
        return self.solution.lower_bound

    @property
    def gap(self) -> float:
        """How far from the optimum the plan can be at most: (seconds - lower_bound) / seconds."""
        return (self.seconds - self.lower_bound) / self.seconds if self.seconds else 0.0

    def layout(self, path: str) -> Layout:
        """Layout of the input at ``path``; LayoutError with the nearest path when there is none."""
        return _find(self.inputs, path, "input").layout

    def output_layout(self, path: str) -> Layout:
        """Layout of the output at ``path``; LayoutError with the nearest path when there is none."""
        return _find(self.outputs, path, "output").layout

    def save(self, path: str | Path) -> None:
        """Write the plan to a file; the same plan gives the same bytes."""
        from meshdsl.plan.file import save_plan

        save_plan(self, path)

    def diff(self, other: "Plan") -> "PlanDiff":
        """What ``other`` does differently; empty (false) if nothing. ArgumentError if it is no plan."""
        from meshdsl.plan.diff import diff_plans

        if not isinstance(other, Plan):
            raise ArgumentError(f"diff: {is_a(other)}, not a plan; md.load_plan(file) reads one")
        return diff_plans(self, other)

    def report(self, path: str | Path, against: "Plan | None" = None) -> None:
        """Write the plan as one HTML page that needs nothing but a browser.

        Args:
          against: a second plan to compare with; the page also takes plan files.

        ArgumentError for what is no path or no plan, MeshDSLError if the file cannot be written.
        """
        from meshdsl.plan.report import save_report

        save_report(self, path, against)

    def assert_at_most(self, bytes: float | None = None, kinds: Kinds | None = None) -> None:
        """Raise BudgetError, an AssertionError, if the plan communicates more than this.

        Args:
          bytes: per device and step.
          kinds: how often each kind may run in a step, or which kinds may; no others may.

        ArgumentError for what is no budget.
        """
        check_budget(f"the plan of {self.name} on {self.mesh}", self.collectives, bytes, kinds)

    def _repr_html_(self) -> str:
        """For notebooks."""
        from meshdsl.plan.report import summary_html

        return summary_html(self)

    def __str__(self) -> str:
        from meshdsl.plan.text import plan_text

        return plan_text(self)

    def __repr__(self) -> str:
        return f"<Plan of {self.name} on {self.mesh}: {len(self.collectives)} collectives, {self.bytes} bytes>"


def _find(arrays: tuple[Array, ...], path: str, noun: str) -> Array:
    found = next((array for array in arrays if array.path == path), None)
    if found is None:
        raise LayoutError(f"no {noun} {path!r} in the plan{nearest_path(str(path), [array.path for array in arrays])}")
    return found
