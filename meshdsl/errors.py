"""Every error of meshdsl, and the one shape they all have.

A fault is reported before anything is compiled, all faults at once, as

    <what failed>
      <argument>: <what was given> ... <what was expected>
      ...
    <remedy>

so a reader sees both values side by side and the nearest valid name.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class MeshDSLError(Exception):
    """Base of all errors raised by meshdsl."""


class NotationError(MeshDSLError):
    """Text that is no mesh, placement or layout; the message carries a caret."""


class LayoutError(MeshDSLError):
    """A layout that does not fit its tensor or its mesh."""


class PinError(MeshDSLError):
    """Pins that match nothing, contradict each other or cannot be met."""


class ArgumentError(MeshDSLError):
    """Arguments of a function of meshdsl that are not what it takes."""


class DimError(MeshDSLError):
    """Named dims that a tensor lacks, has twice or has in another size."""


class TraceError(MeshDSLError):
    """A step that cannot be traced or planned as it is called."""


class RuleError(MeshDSLError):
    """A rule that is none, that does not fit its operands, or that does not hold."""


class ScheduleError(MeshDSLError):
    """A pipeline schedule that cannot run, or that there is not."""


class PipelineError(MeshDSLError):
    """A step that cannot be run microbatch by microbatch, or stage by stage."""


class MemoryLimitError(MeshDSLError):
    """No plan was found that fits the memory limit."""


class DeviceError(MeshDSLError):
    """The devices at hand cannot hold the mesh."""


class PlanFileError(MeshDSLError):
    """A plan file of another version, another program or other arguments."""


class VerifyError(MeshDSLError):
    """The compiled program communicates otherwise than planned."""


class CheckError(MeshDSLError):
    """The sharded numbers differ from the unsharded step's."""


class BudgetError(MeshDSLError, AssertionError):
    """A plan that communicates more than a test allows."""


def is_a(x: object) -> str:
    """What was given instead: ``'p.json' is a str``; classes of other packages with the package's name."""
    package = type(x).__module__.partition(".")[0]
    name = type(x).__name__ if package in ("builtins", "meshdsl", "__main__") else f"{package}.{type(x).__name__}"
    shown = repr(x).partition("\n")[0][:60]
    return f"{shown} is {'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def nearest(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest of the known names, else all of them."""
    known = list(known)
    close = get_close_matches(str(name), known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""


def shortened(rows: Sequence[str], most: int = 8) -> list[str]:
    """The first rows, and how many more there are."""
    more = len(rows) - most
    return [*rows[:most], f"... and {more} more"] if more > 0 else list(rows)


def first_line(error: Exception) -> str:
    """What an error says, without the text and caret below."""
    return str(error).partition("\n")[0]


def faults(title: str, rows: Iterable[str], remedy: str = "") -> str:
    """The common text of an error: a title, one indented row per fault, a remedy."""
    lines = [title, *(f"  {row}" for row in rows)]
    return "\n".join([*lines, remedy] if remedy else lines)
