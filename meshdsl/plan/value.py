"""Plan: the planner's answer as a value to read, save, compare and run.

It holds the solution (a row for every operation, a layout for every value, the moves between
them), which is what runs, and beside it what a reader wants to know: the arrays at the step's
boundary by path, and every collective with its size, how often it runs, and why it is there.

All figures are per device and step: ``bytes`` is what one device sends, ``seconds`` the
objective the planner minimised, ``memory`` the predicted peak.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshdsl.errors import ArgumentError, BudgetError, LayoutError, faults, is_a, nearest
from meshdsl.globs import nearest_path
from meshdsl.ir import array_type
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.move import COLLECTIVES
from meshdsl.layouts.topology import Topology
from meshdsl.pipeline.spec import Pipeline
from meshdsl.planner.solution import Solution

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
      fingerprint: of the traced program; a plan runs only what it was made for.
      operations: how many operations of each name the program has.
      held: what fills the memory at its fullest point, as (name, bytes), largest first.
      notes: what the reader should know, such as operations without a rule.
      padded: lengths of dims that are padded inside the step, each with what it is padded to.
      pipeline: how the step takes its batch in microbatches, if it does.
    """

    name: str
    fingerprint: str
    operations: Mapping[str, int]
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    collectives: tuple[Collective, ...]
    held: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    solution: Solution
    padded: tuple[tuple[int, int], ...] = ()
    pipeline: Pipeline | None = None

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

    def assert_at_most(
        self, bytes: int | None = None, kinds: Mapping[str, int] | Collection[str] | None = None
    ) -> None:
        """Raise BudgetError, an AssertionError, if the plan communicates more than this.

        Args:
          bytes: per device and step.
          kinds: how often each kind may run in a step, or which kinds may; no others may.

        ArgumentError for what is no budget.
        """
        wrong = [*_no_bytes(bytes), *_no_kinds(kinds)]
        if wrong:
            raise ArgumentError(faults("assert_at_most cannot compare a plan with this:", wrong))
        rows = [*_over_bytes(self, bytes), *_over_kinds(self, kinds)]
        if rows:
            raise BudgetError(faults(f"the plan of {self.name} on {self.mesh} exceeds its budget:", rows))

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


def _over_bytes(plan: Plan, most: int | None) -> list[str]:
    if most is None or plan.bytes <= most:
        return []
    return [f"bytes: {plan.bytes} per device and step, at most {most} allowed"]


def _over_kinds(plan: Plan, kinds: Mapping[str, int] | Collection[str] | None) -> list[str]:
    if kinds is None:
        return []
    runs: dict[str, int] = {}
    for c in plan.collectives:
        runs[c.kind] = runs.get(c.kind, 0) + c.trips
    most = {kind: kinds.get(kind, 0) if isinstance(kinds, Mapping) else runs[kind] * (kind in kinds) for kind in runs}
    return [
        f"{kind}: runs {n} times a step, at most {most[kind]} allowed" for kind, n in runs.items() if n > most[kind]
    ]
