"""A step that fails while it is traced.

What the step itself raises is the user's own and passes as it is, with a note of the shapes
that the step was called with. Where the step asks jax for a value that a trace does not have, the error
is ours: jax would name our functions and flat arguments, and the user knows neither.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from meshdsl.errors import MeshDSLError, TraceError, faults, shortened
from meshdsl.trace.source import raised_at

_NO_VALUE = "depends on the value"  # how jax says that a trace has shapes only
_ARGUMENT = re.compile(r"\bleaves\[(\d+)\]")
_REMEDY = (
    "a trace knows shapes, no values: choose with jnp.where or jax.lax.cond, loop with jax.lax, "
    "or pass what decides through static_argnames"
)


@contextmanager
def user_terms(name: str, paths: Sequence[str], leaves: Sequence[Any]) -> Iterator[None]:
    """Says what fails while the step is traced in terms of its own arguments."""
    try:
        yield
    except MeshDSLError:
        raise
    except Exception as error:
        if not _asks_for_a_value(error):
            error.add_note(f"{name} was traced with {_called_with(paths, leaves)}")
            raise
        raise TraceError(faults(f"{name} cannot be traced:", _rows(error, paths), _REMEDY)) from error


def _asks_for_a_value(error: Exception) -> bool:
    kinds = (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.NonConcreteBooleanIndexError,
    )
    return isinstance(error, (*kinds, jax.errors.TracerIntegerConversionError)) or _NO_VALUE in str(error)


def _rows(error: Exception, paths: Sequence[str]) -> list[str]:
    """What was asked for and where, and the arguments that it comes from."""
    text = str(error)
    numbers = dict.fromkeys(int(number) for number in _ARGUMENT.findall(text))
    said = f"{raised_at(error)}: {text.partition(chr(10))[0]}"
    return [said, *([f"it depends on {', '.join(paths[i] for i in numbers)}"] if numbers else [])]


def _called_with(paths: Sequence[str], leaves: Sequence[Any]) -> str:
    shown = (f"{path} {jax.typeof(x)}" for path, x in zip(paths, leaves, strict=True))
    return ", ".join(shortened(list(shown))) or "no arrays"
