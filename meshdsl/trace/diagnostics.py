"""Diagnostics of tracing: errors in terms of the step's own arguments, notes on ignored code, refused operations."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from meshdsl.errors import MeshDSLError, TraceError, faults, shortened
from meshdsl.ir.graph import Graph, Op, walk
from meshdsl.ir.rewrite import values
from meshdsl.trace.passes.canonicalize import PLACING
from meshdsl.trace.source import raised_at, raised_in_shard_map
from meshdsl.trace.spec_errors import SPEC_REMEDY, spec_faults

# ---- Errors ----------------------------------------------------------------------------------------------------------
# Exceptions of the step itself pass unchanged, with a note of the shapes that it was called with. Where the step needs
# a value, which a trace does not have, jax would name internal functions and flat arguments; that error is translated,
# as are those about specs that do not fit.


_OTHER_TRACE = "from different trace level"  # in flax's errors about objects of another function
_SHOWN = 16  # arrays in the note of an error, shared by the arguments
_NO_VALUE = "depends on the value"  # in jax's errors about values that a trace does not have
_ARGUMENT = re.compile(r"\bleaves\[(\d+)\]")
_REMEDY = (
    "a trace knows shapes, no values: choose with jnp.where or jax.lax.cond, loop with jax.lax, "
    "or pass what decides through static_argnames"
)
_PASS_OBJECTS = (
    "a function changes only the objects of nnx that are its arguments: pass them to the step, and inside it through "
    "nnx.grad, nnx.scan and so on in place of jax.grad, jax.lax.scan"
)
_NO_SUCH_AXIS = "jax asserts, without words, that a collective runs over axes of the shard_map around it"


@contextmanager
def translate_trace_errors(name: str, paths: Sequence[str], leaves: Sequence[Any]) -> Iterator[None]:
    """Translates errors of tracing, within a context, into terms of the step's arguments."""
    try:
        yield
    except MeshDSLError:
        raise
    except Exception as error:
        if _changes_a_captured_object(error):
            row = f"{raised_at(error)}: {str(error).splitlines()[0]}"
            raise TraceError(faults(f"{name} cannot be traced:", [row], _PASS_OBJECTS)) from error
        if rows := spec_faults(error):
            raise TraceError(faults(f"{name} cannot be traced:", rows, SPEC_REMEDY)) from error
        if not _asks_for_a_value(error):
            error.add_note(f"{name} was traced with {_called_with(paths, leaves)}")
            if isinstance(error, AssertionError) and raised_in_shard_map(error):
                error.add_note(f"{raised_at(error)}: {_NO_SUCH_AXIS}")
            raise
        raise TraceError(faults(f"{name} cannot be traced:", _rows(error, paths), _REMEDY)) from error


def _changes_a_captured_object(error: Exception) -> bool:
    """Whether flax refuses to change or to transform an object that a function closes over."""
    flax_errors = sys.modules.get("flax.errors")
    if flax_errors is None:
        return False
    return isinstance(error, flax_errors.TraceContextError) or _OTHER_TRACE in str(error)


def _asks_for_a_value(error: Exception) -> bool:
    kinds = (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.NonConcreteBooleanIndexError,
    )
    return isinstance(error, (*kinds, jax.errors.TracerIntegerConversionError)) or _NO_VALUE in str(error)


def _rows(error: Exception, paths: Sequence[str]) -> list[str]:
    """The line that needs a value, and the arguments that the value depends on."""
    text = str(error)
    numbers = dict.fromkeys(int(number) for number in _ARGUMENT.findall(text))
    cause = f"{raised_at(error)}: {text.partition(chr(10))[0]}"
    return [cause, *([f"it depends on {', '.join(paths[i] for i in numbers)}"] if numbers else [])]


def _called_with(paths: Sequence[str], leaves: Sequence[Any]) -> str:
    """The types of all arguments; of one with many arrays the first ones, so that those behind it are named too."""
    by_argument: dict[str, list[str]] = {}
    for path, x in zip(paths, leaves, strict=True):
        by_argument.setdefault(path.partition("/")[0], []).append(f"{path} {jax.typeof(x)}")
    most = max(2, _SHOWN // max(1, len(by_argument)))
    return ", ".join(row for rows in by_argument.values() for row in shortened(rows, most)) or "no arrays"


# ---- Notes -----------------------------------------------------------------------------------------------------------
# Remarks for the reader of the plan on code without effect.


_HOST_REMEDY = (
    "inside a step no value is in the host's memory; '@host' in layouts= and outputs= keeps arguments and results there"
)


def note_expectations(graph: Graph) -> list[str]:
    """Returns notes on the places of ``expect_iterations`` that no loop takes anything from; ``graph`` is as read."""
    given = {op.outputs[0].id: op.source for _, op in walk(graph) if op.name == "expect_iterations"}
    loops = [op for _, op in walk(graph) if op.name == "while" and "iterations" in op.params]
    taken = {given[x.id] for op in loops for x in values(op.inputs) if x.id in given}
    where = "a while must take its result as it is, in the same function, and read it in its condition"
    idle = (source for source in dict.fromkeys(given.values()) if source not in taken)
    return [f"expect_iterations at {source} says nothing about any loop: {where}" for source in idle]


def note_constraints(read: Graph, traced: Graph, graph: Graph) -> tuple[list[str], list[str]]:
    """Returns one line per place where a layout constraint is ignored, and per place where it has no effect.

    Args:
      read: the graph as it was read.
      traced: the graph before the passes, maybe without constraints of jax.
      graph: the graph after them.
    """
    kept, left = _constraints(traced), _constraints(graph)
    dropped = [place for place in _constraints(read) if place not in kept]
    placing = [op for _, op in walk(traced) if op.name in PLACING]
    nameless = _sources(op for op in placing if not op.params.get("memory"))
    unmoved = _sources(op for op in placing if op.params.get("memory"))
    ignored = [f"{name} at {at} is ignored, as constraints='ignore' says" for at, name in dropped]
    ignored += [f"{name} at {at} is ignored: its sharding names no mesh axes" for at, name in nameless]
    ignored += [f"{name} at {at} leaves its operand on the device: {_HOST_REMEDY}" for at, name in unmoved]
    return ignored, [
        f"{name} at {at} has no effect: nothing reads its result" for at, name in kept if (at, name) not in left
    ]


def _constraints(graph: Graph) -> list[tuple[str, str]]:
    """Line and name of every constraint in a graph."""
    return _sources(op for _, op in walk(graph) if op.name == "constrain")


def _sources(ops: Iterable[Op]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((str(op.source), op.called) for op in ops))


# ---- Refused operations ----------------------------------------------------------------------------------------------
# Most operations without a rule are *opaque*: every device runs them on whole arrays, and the plan has a note. A few
# would not compile so, or would repeat an effect on every device; these are refused before anything is planned.


PLANNED = "planned by meshdsl"  # the name scope of a planned step in another function


def check_opaque(name: str, graph: Graph) -> None:
    """Raises TraceError if operations cannot run inside a planned step, with their lines and remedies."""
    found = [(op, _REFUSED[op.name](op)) for _, op in walk(graph) if op.name in _REFUSED]
    rows = [f"{op.name} at {op.source}: {why}" for op, why in found if why]
    if rows:
        raise TraceError(faults(f"{name} cannot be planned:", dict.fromkeys(rows)))


def _debug(op: Op) -> str:
    ordered = op.params.get("ordered") or "Ordered" in str(op.params.get("effect"))
    return "is ordered, which jax does on one device only; leave ordered=True out" if ordered else ""


def _inspect(op: Op) -> str:
    return "shows the sharding that a compiler chose; those of a planned step are in its plan: print(sharded.plan(...))"


def _stateful(op: Op) -> str:
    return "draws other numbers on every device; use jax.random.uniform and a key"


def _philox(op: Op) -> str:
    """Every draw needs high words of products inside one operation of jax, which XLA cannot compile on a mesh."""
    kinds = {x.dtype.name for x in (*op.inputs, *op.outputs)} & {"key<phx2>", "key<phx4>"}
    if not kinds and not op.name.startswith("philox"):
        return ""
    return "hashes a Philox key, which XLA cannot compile on a mesh; use a key of jax.random.key(seed) or impl='rbg'"


_REFUSED: dict[str, Callable[[Any], str]] = {
    "inspect_sharding": _inspect,
    "rng_uniform": _stateful,
    "debug_callback": _debug,
    "debug_print": _debug,
    **dict.fromkeys(("random_bits", "random_fold_in", "random_gamma", "random_seed", "random_split"), _philox),
    **dict.fromkeys(("philox2x32", "philox4x32"), _philox),
}
