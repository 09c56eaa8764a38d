"""``Plan``: the planner's answer as a value to read, save, compare and run.

A plan holds the solution (a signature for every operation, a layout for every value, a resharding tree between them),
which is what runs, and the facts that a reader wants to know: the arrays at the step's boundary by path, and every
collective with its bytes, its iterations and its reason. The fields are those of ``PlanData``; the operations of this
class are one-line calls of the modules that do the work.
"""

from dataclasses import dataclass
from os import PathLike
from typing import Protocol, runtime_checkable

from meshdsl.errors import ArgumentError, is_a
from meshdsl.plan.budget import Kinds, check_budget
from meshdsl.plan.diff import PlanDiff, diff_plans
from meshdsl.plan.file import read_plan, save_plan
from meshdsl.plan.report.page import save_report, summary_html
from meshdsl.plan.text import plan_text
from meshdsl.plan.types import PlanData


@runtime_checkable
class Recorded(Protocol):
    """What has a record in the form of a plan: a compiled program, as ``md.inspect`` has read it."""

    @property
    def record(self) -> "Plan":
        """The record."""
        ...

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the record to a plan file."""
        ...


@dataclass(frozen=True)
class Plan(PlanData):
    """A planned step; ``print`` it to read it.

    The figures ``seconds``, ``bytes``, ``memory``, ``lower_bound`` and ``gap`` are per device and step. Equal inputs
    give an equal plan, and an equal plan gives an equal file.

    Example:
      >>> plan = md.parallelize(step, md.Mesh(data=4), md.data_parallel()).plan(params, batch)
      >>> plan.save("plan.json")
      >>> plan.assert_at_most(bytes=2_000_000)
      >>> print(plan.partition_specs()["batch"] == jax.P("data", None), plan.memory < 1e6)
      True True
    """

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan to a file; the same plan gives the same bytes.

        Raises:
          PlanFileError: the file cannot be written.
        """
        save_plan(self, path)

    def diff(self, other: "Plan | Recorded") -> PlanDiff:
        """Returns how ``other`` differs from this plan; empty (false) if it does not.

        Of a compiled program that ``md.inspect`` has read, and a plan, communication is compared line by line.

        Raises:
          ArgumentError: ``other`` is not a plan.
        """
        after = other.record if isinstance(other, Recorded) else other
        if not isinstance(after, PlanData):
            raise ArgumentError(f"diff: {is_a(other)}, not a plan; md.load_plan(file) reads one")
        return diff_plans(self, after)

    def report(self, path: str | PathLike[str], against: "Plan | Recorded | None" = None) -> None:
        """Writes the plan as one HTML page that works offline.

        Args:
          path: file to write.
          against: a second plan to compare with; the page itself can also open plan files.

        Raises:
          ArgumentError: ``path`` is not a path, or ``against`` not a plan.
          MeshDSLError: the file cannot be written.
        """
        save_report(self, path, against.record if isinstance(against, Recorded) else against)

    def assert_at_most(self, bytes: float | None = None, kinds: Kinds | None = None) -> None:
        """Fails a test whose plan communicates more than its budget.

        Args:
          bytes: largest number of bytes that one device may send per step.
          kinds: largest number of runs per step for each kind of collective, or the kinds that may occur at all;
            kinds that are not listed may not occur.

        Raises:
          BudgetError: the plan exceeds the budget (an AssertionError, so that pytest shows it as a failure).
          ArgumentError: ``bytes`` or ``kinds`` is not a budget.
        """
        check_budget(f"the plan of {self.name} on {self.mesh}", self.collectives, bytes, kinds)

    def _repr_html_(self) -> str:
        """Totals and costliest lines, for notebooks."""
        return summary_html(self)

    def __str__(self) -> str:
        return plan_text(self)

    def __repr__(self) -> str:
        return f"<Plan of {self.name} on {self.mesh}: {len(self.collectives)} collectives, {self.bytes} bytes>"


def load_plan(path: str | PathLike[str]) -> Plan:
    """Reads a plan that ``Plan.save`` wrote.

    Args:
      path: the plan file.

    Raises:
      PlanFileError: the file cannot be read, is not a plan file, has another version, or was damaged; the message
        names every faulty entry.

    Example:
      >>> md.parallelize(step, "data=8").plan(params, batch).save("plan.json")
      >>> plan = md.load_plan("plan.json")
      >>> md.parallelize(step, plan.mesh, plan=plan).plan(params, batch) == plan
      True
    """
    return Plan(**vars(read_plan(path)))
