"""A step that fails while it is traced.

What the step itself raises is the user's own and passes as it is, with a note of the shapes
that the step was called with. Where the step asks jax for a value that a trace does not have, the error
is ours: jax would name our functions and flat arguments, and the user knows neither.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from meshdsl.errors import MeshDSLError, TraceError, faults, shortened
from meshdsl.ir.graph import Graph, Op, walk
from meshdsl.trace.arguments import Call
from meshdsl.trace.passes.canonicalize import PLACING
from meshdsl.trace.source import raised_at

# ---- Failing ---------------------------------------------------------------------------------------------------------


_NO_VALUE = "depends on the value"  # how jax says that a trace has shapes only
_ARGUMENT = re.compile(r"\bleaves\[(\d+)\]")
_REMEDY = (
    "a trace knows shapes, no values: choose with jnp.where or jax.lax.cond, loop with jax.lax, "
    "or pass what decides through static_argnames"
)


@contextmanager
def translate_trace_errors(name: str, paths: Sequence[str], leaves: Sequence[Any]) -> Iterator[None]:
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


# ---- Notes -----------------------------------------------------------------------------------------------------------
# Notes: what the trace had to leave out, for the reader of the plan.


def note_constraints(traced: Graph, graph: Graph) -> list[str]:
    """One line per place where a layout was stated to no effect.

    Args:
      traced: before the clean-ups.
      graph: after them.
    """
    before = [op for _, op in walk(traced)]
    left = {str(op.source) for _, op in walk(graph) if op.name == "constrain"}
    jax_stated = _sources(op for op in before if op.name in PLACING)
    stated = _sources(op for op in before if op.name == "constrain")
    return [
        *(
            f"{name} at {at} is ignored: layouts come from the plan; state one with md.constrain"
            for at, name in jax_stated
        ),
        *(f"constrain at {at} has no effect: nothing reads its result" for at, _ in stated if at not in left),
    ]


def note_lost_changes(call: Call, leaves: Sequence[Any], arguments: Any, result: Any) -> Iterator[str]:
    """A line if the step changed arguments in place and does not return the change, which is then lost.

    Args:
      leaves: what the step was given.
      arguments: what it made of that: ``(args, kwargs)``.
    """
    args, kwargs = arguments
    dynamic = [x for i, x in enumerate(args) if i not in call.static]
    after = jax.tree.leaves((dynamic, {key: x for key, x in kwargs.items() if key not in call.static}))
    if len(after) != len(leaves):
        yield "the step changes the structure of its arguments in place, which is lost: return what it changes"
        return
    returned = {id(x) for x in jax.tree.leaves(result)}
    pairs = zip(call.paths, leaves, after, strict=True)
    paths = [path for path, x, y in pairs if x is not y and id(y) not in returned]
    if paths:
        what = f"{paths[0]} changes" if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more change"
        yield f"{what} in place, which is lost: return what the step changes"


def _sources(ops: Iterable[Op]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((str(op.source), op.name) for op in ops))


# ---- Opaque ----------------------------------------------------------------------------------------------------------
# What cannot run inside a planned step, refused before anything is planned.
#
# Most calls that nobody has a rule for are *opaque*: every device runs them on whole arrays, and
# the plan says so. A few would not compile so, or would do on every device what is to be done once.


PLANNED = "planned by meshdsl"  # the name scope of a planned step in another function


def check_opaque(name: str, graph: Graph) -> None:
    """TraceError names every operation of step ``name`` that cannot run inside it, with its line and a way out."""
    found = [(op, _REFUSED[op.name](op)) for _, op in walk(graph) if op.name in _REFUSED]
    rows = [f"{op.name} at {op.source}: {why}" for op, why in found if why]
    if rows:
        raise TraceError(faults(f"{name} cannot be planned:", dict.fromkeys(rows)))


def _shard_map(op: Op) -> str:
    mesh = ", ".join(f"{name}={size}" for name, size in op.params["mesh"].shape.items())
    if PLANNED in op.scope:
        return f"is planned already, on mesh {mesh}; call the step that it was made of, and parallelize the whole"
    return (
        f"runs on a mesh of its own ({mesh}), and meshes do not nest; call the function that it maps on whole arrays"
        " and state layouts with md.constrain, or state by md.rule how that function splits"
    )


def _debug(op: Op) -> str:
    ordered = op.params.get("ordered") or "Ordered" in str(op.params.get("effect"))
    return "is ordered, which jax does on one device only; leave ordered=True out" if ordered else ""


_REFUSED: dict[str, Callable[[Any], str]] = {
    "shard_map": _shard_map,
    "debug_callback": _debug,
    "debug_print": _debug,
}
