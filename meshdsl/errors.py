"""The exceptions of meshdsl, and their common format.

Faults are reported before anything is compiled, all of them at once, in the words of the user's program:

    <what failed>
      <argument>: <given value> ... <expected value>; <nearest valid name>
      ...
    <remedy>

All exceptions derive from :class:`MeshDSLError` and are exported by ``meshdsl``: ``except md.PinError``.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class MeshDSLError(Exception):
    """Base class of all exceptions of meshdsl."""


class NotationError(MeshDSLError):
    """A text that is not a mesh, placement, layout or list of dims; the message marks the place with a caret."""


class LayoutError(MeshDSLError):
    """A layout that does not fit its tensor or its mesh, or an input that a plan does not have."""


class PinError(MeshDSLError):
    """Pins that match no array, contradict each other or cannot be met."""


class ArgumentError(MeshDSLError):
    """Invalid arguments of a function of meshdsl."""


class DimError(MeshDSLError):
    """Named dims that a tensor lacks, has twice or has with another size."""


class TraceError(MeshDSLError):
    """A step that cannot be traced, or arguments that it cannot be called with."""


class RuleError(MeshDSLError):
    """A sharding rule that cannot be parsed, does not fit its operands, or does not hold."""


class ScheduleError(MeshDSLError):
    """A pipeline schedule that is unknown or cannot run."""


class PipelineError(MeshDSLError):
    """A step that cannot be split into microbatches or pipeline stages."""


class MemoryLimitError(MeshDSLError):
    """No plan within the memory limit was found."""


class DeviceError(MeshDSLError):
    """The available devices do not match the mesh or the target."""


class PlanFileError(MeshDSLError):
    """A plan file that is damaged, or belongs to another version, program, mesh or arguments."""


class VerifyError(MeshDSLError):
    """A compiled program whose communication differs from the plan."""


class CheckError(MeshDSLError):
    """Results of the sharded step that differ from those of the unsharded step."""


class BudgetError(MeshDSLError, AssertionError):
    """A plan or program that communicates more than a test allows; also an AssertionError."""


def is_a(x: object) -> str:
    """Return ``"'p.json' is a str"``; classes of other packages are prefixed with the package's name."""
    package = type(x).__module__.partition(".")[0]
    name = type(x).__name__ if package in ("builtins", "meshdsl", "__main__") else f"{package}.{type(x).__name__}"
    shown = repr(x).partition("\n")[0][:60]
    return f"{shown} is {'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def nearest(name: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest of the known names, else a list of all of them."""
    known = list(known)
    close = get_close_matches(str(name), known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""


def shortened(rows: Sequence[str], most: int = 8) -> list[str]:
    """Return the first rows, and a row with the number of others."""
    more = len(rows) - most
    return [*rows[:most], f"... and {more} more"] if more > 0 else list(rows)


def first_line(error: Exception) -> str:
    """Return the first line of a message, without the text and caret below it."""
    return str(error).partition("\n")[0]


def faults(title: str, rows: Iterable[str], remedy: str = "") -> str:
    """Return a message in the common format: a title, an indented row per fault, a remedy."""
    lines = [title, *(f"  {row}" for row in rows)]
    return "\n".join([*lines, remedy] if remedy else lines)
