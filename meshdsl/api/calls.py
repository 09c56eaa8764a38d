"""Calls: which are of one kind and share all stages, and how their arguments reach the compiled program.

A call is known in two ways:

    kind    what it means: the tree of its arguments, their shapes and canonical dtypes, static arguments, settings of
            jax. Calls of one kind have one plan. A numpy array of int64 is an array of int32 to jax unless x64 is on,
            so both are of one kind.
    form    how it looks, read in a few C loops at every call: the tree, types of its leaves, settings. Every form has
            one kind; the first call of a form finds it, and the next ones go straight to the compiled program.

All calls take that way, with one shape or many, static arguments, keywords, numpy arrays or Python numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import attrgetter, methodcaller
from types import NoneType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshdsl.api.ambient import JaxSettings
from meshdsl.api.executable import Executable
from meshdsl.ir.graph import array_type
from meshdsl.layouts.layout import Layout
from meshdsl.plan.types import Array
from meshdsl.trace import Call
from meshdsl.trace.arguments import argument_names, check_values
from meshdsl.trace.objects import NO_OBJECTS, Binding, Objects
from meshdsl.trace.static_leaves import Static, static_indices

# ---- Kinds -----------------------------------------------------------------------------------------------------------


class LeafType(NamedTuple):
    """What jax makes of an argument: shape, canonical dtype, and whether it is weak as a Python number is."""

    shape: tuple[int, ...]
    dtype: Any
    weak: bool

    def __str__(self) -> str:
        return f"{'weak ' if self.weak else ''}{array_type(self.dtype, self.shape, ())}"


def leaf_type(x: Any) -> LeafType:
    """Return the type of an array, a shape without values, or a Python number."""
    aval = x if hasattr(x, "dtype") else jax.typeof(x)
    dtype = jax.dtypes.canonicalize_dtype(aval.dtype) if isinstance(aval.dtype, np.dtype) else aval.dtype
    return LeafType(tuple(aval.shape), dtype, bool(getattr(aval, "weak_type", False)))


@dataclass(frozen=True)
class CallKind:
    """The meaning of a call: calls of equal kinds share all stages.

    Args:
      tree: of the arguments that are arrays.
      static: other arguments by name, each with its type: 1, True and 1.0 are equal, but not the same.
      leaves: the types of the arrays.
      paths: their paths, for messages.
      lies: where they lie, if that pins them.
    """

    tree: Any
    static: tuple[tuple[str, type, Any], ...]
    leaves: tuple[LeafType, ...]
    settings: JaxSettings
    paths: tuple[str, ...] = field(compare=False)
    lies: tuple[Layout | None, ...] = ()

    @classmethod
    def of(cls, step: Callable[..., Any], call: Call) -> "CallKind":
        """Return the kind of a call of ``step`` under the present settings of jax."""
        names = argument_names(step, call.count)
        named = {"/".join(names[key]) if isinstance(key, int) else key: x for key, x in call.static.items()}
        static = tuple((name, type(named[name]), named[name]) for name in sorted(named))
        return cls(call.tree, static, tuple(map(leaf_type, call.leaves)), JaxSettings.current(), call.paths)

    @property
    def anywhere(self) -> "CallKind":
        """The kind of the same call with arguments that lie anywhere: both are traced alike."""
        return replace(self, lies=())

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Return the arguments as shapes: without values, devices and shardings."""
        return [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak) for x in self.leaves]

    def is_same_but_weak(self, other: "CallKind") -> bool:
        """Whether the two differ in nothing but weak types, and what a tree holds beside its arrays."""
        facts = attrgetter("static", "settings", "lies")
        return facts(self) == facts(other) and self.has_arrays_of(other)

    def has_arrays_of(self, other: "CallKind") -> bool:
        """Whether the arrays of the two have the same paths, shapes and dtypes."""
        return self.paths == other.paths and [x[:2] for x in self.leaves] == [x[:2] for x in other.leaves]

    def differences(self, before: "CallKind") -> list[str]:
        """Return a line per thing that is different from ``before``; of several arrays the first stands for all."""
        now, then = dict(zip(self.paths, self.leaves, strict=True)), dict(zip(before.paths, before.leaves, strict=True))
        changed = [f"{path} is {x} instead of {then[path]}" for path, x in now.items() if then.get(path, x) != x]
        found = [_first_of(changed, "changed"), _first_of([f"{path} is gone" for path in then if path not in now], "")]
        found.append(_first_of([f"{path} is new" for path in now if path not in then], ""))
        found += _static_changes(dict(_named(self.static)), dict(_named(before.static)))
        found += self.settings.differences(before.settings)
        lies = zip(self.paths, self.lies, before.lies, strict=False)
        found.append(
            _first_of([f"{path} lies as {at} instead of {was}" for path, at, was in lies if at != was], "moved")
        )
        lines = [line for line in found if line]
        if not lines and self.tree != before.tree:
            return ["what the tree of its arguments holds beside arrays changed"]
        return lines

    def unplanned(self, inputs: Sequence[Array]) -> list[str]:
        """Return a line per argument that differs from the inputs of a plan."""
        now = {path: (x.shape, str(x.dtype), str(x)) for path, x in zip(self.paths, self.leaves, strict=True)}
        then = {x.path: (x.shape, x.dtype, x.type) for x in inputs}
        absent = (None, None, "absent")
        pairs = ((path, then.get(path, absent), now.get(path, absent)) for path in dict.fromkeys((*then, *now)))
        return [f"{path}: {a[2]} in the plan, {b[2]} here" for path, a, b in pairs if a[:2] != b[:2]]


def nearest_kind(kind: CallKind, others: Sequence[CallKind]) -> CallKind:
    """Return the one of ``others`` with the fewest differences; of several, the last."""

    def distance(other: CallKind) -> tuple[int, int]:
        then = dict(zip(other.paths, other.leaves, strict=True))
        arrays = sum(then.get(path) != x for path, x in zip(kind.paths, kind.leaves, strict=True))
        return len(kind.differences(other)), arrays

    return min(reversed(others), key=distance)


def _named(static: Sequence[tuple[str, type, Any]]) -> Iterator[tuple[str, tuple[type, Any]]]:
    return ((name, (kind, x)) for name, kind, x in static)


def _static_changes(now: Mapping[str, Any], then: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*now, *then)):
        if now.get(name) != then.get(name):
            said = [repr(table[name][1]) if name in table else "not given" for table in (now, then)]
            yield f"static argument {name} is {said[0]} instead of {said[1]}"


def _first_of(lines: Sequence[str], verb: str) -> str:
    more = len(lines) - 1
    return "" if not lines else f"{lines[0]} and {more} more{f' {verb}' if verb else ''}" if more else lines[0]


# ---- Forms -----------------------------------------------------------------------------------------------------------

_AVAL, _NONE = repeat("aval"), repeat(None)
_is_deleted = methodcaller("is_deleted")


def leaf_forms(tree: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return how leaves look: leaves that look alike are passed alike.

    An array looks like its abstract value, which has the mesh if it is placed on one, a numpy array like its shape and
    dtype, and a Python number like its type. A leaf that is part of the tree looks like its value.
    """
    types, looks = tuple(map(type, leaves)), tuple(map(getattr, leaves, _AVAL, _NONE))
    if NoneType not in map(type, looks):  # comparing looks with None would call a method of each
        return types, looks
    looks = tuple([_look(x) if aval is None else aval for x, aval in zip(leaves, looks, strict=True)])
    static = static_indices(tree, leaves)
    return types, (tuple([Static(x) if i in static else looks[i] for i, x in enumerate(leaves)]) if static else looks)


def _look(x: Any) -> Any:
    return (tuple(x.shape), x.dtype) if hasattr(x, "dtype") else None


class CallForm:
    """How calls of one form run.

    Args:
      executable: of their kind.
      inputs: the flat inputs of one such call.
      tree: the tree of its arguments, static ones left out.
      leaves: of that tree.
      binding: finds the objects of nnx among the arguments; None if there are none.
    """

    def __init__(
        self,
        executable: Executable,
        inputs: Sequence[Any],
        tree: Any,
        leaves: Sequence[Any],
        binding: Binding | None,
    ) -> None:
        static = set(static_indices(tree, leaves))
        arrays = [i for i, x in enumerate(inputs) if isinstance(x, jax.Array)]
        self.executable, self.call, self.binding = executable, executable.call, binding
        self.unflatten = executable.unflatten
        self.arrays = arrays if len(arrays) < len(inputs) else None  # all
        self.passed = [i for i in range(len(leaves)) if i not in static] if static else None  # all
        self.unplaced = [i for i in arrays if not isinstance(inputs[i].sharding, NamedSharding)]

    def inputs(self, arguments: Any, leaves: Sequence[Any]) -> tuple[Sequence[Any], Objects] | None:
        """Return the flat inputs and the objects of a call; None if its objects share variables in another way."""
        if self.binding is not None:
            return self.binding.find(arguments, self.executable.program.out_tree)
        return (leaves if self.passed is None else [leaves[i] for i in self.passed]), NO_OBJECTS

    def run(self, inputs: Sequence[Any], objects: Objects) -> Any:
        """Run the step and return its result; see ``outputs``.

        Args:
          inputs: flat.
          objects: of the call, which get their new state.
        """
        outputs, placed = self.outputs(inputs)
        return self.unflatten(outputs) if self.unflatten else self.executable.finish(outputs, placed, objects)

    def outputs(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Run the step and return its outputs, and the inputs where they were placed.

        Raises:
          TraceError: an argument was donated to an earlier call.
        """
        executable = self.executable
        if any(map(_is_deleted, inputs if self.arrays is None else [inputs[i] for i in self.arrays])):
            program = executable.program  # compiled ahead of time, it would read what is gone
            check_values(program.name, [leaf.path for leaf in program.inputs], inputs)
        try:  # the compiled program checks shapes, dtypes and shardings faster than Python could
            return executable.run(inputs, self.unplaced, self.call) if self.unplaced else (self.call(*inputs), inputs)
        except ValueError:
            moved = {*executable.moved(inputs)}.difference(self.unplaced)
            if not moved:
                raise
            return executable.run(inputs, [*self.unplaced, *sorted(moved)], self.call)
