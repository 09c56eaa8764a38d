"""Changes in place that a call cannot give back to its caller, and that would silently be lost.

A step runs on tracers, once. Values that it writes into objects of nnx among its arguments are written back after every
call (``objects``). Anything else that it writes into exists only while it is traced:

* an argument that is a dict, a list or another mutable pytree is a copy of the caller's;
* what the step closes over, ``self`` of a method, and globals are the caller's own, but would hold tracers afterwards.

Writing into an argument may be meant for the step alone, as in ``batch["x"] = batch["x"] / 255``. So there it is an
error only if the step itself does nothing with the new value, and does not return it either. A tracer left in
the surroundings is always an error, and they are restored.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Literal

from meshdsl.errors import TraceError, faults
from meshdsl.ir.graph import Source
from meshdsl.trace.objects import is_object, is_unit
from meshdsl.trace.source import SourceContext, file_kind

_CONTAINER_LIMIT = 20_000  # containers around a step that are watched
_ITEM_LIMIT = 1_000  # a container of more items is data rather than state: its items are not searched for containers
_LIBRARIES = ("builtins", "numpy", "jax", "jaxlib", "flax", "optax", "haiku", "equinox", "meshdsl")  # of no interest
_REMEDY = "return what the step changes, or hold it in an nnx.Variable or nnx.Module that is an argument"


class Change(NamedTuple):
    """A new value in a place that the caller will not see.

    Args:
      place: in the user's terms.
      value: the tracer there.
      lost: it is lost whatever the step does with the value; else only if nothing uses it.
    """

    place: str
    value: Any
    lost: bool


# ---- Arguments -------------------------------------------------------------------------------------------------------


class ArgumentSlots(NamedTuple):
    """The leaves of arguments by their keys, and the containers around them; objects of nnx count as leaves."""

    leaves: dict[tuple[Any, ...], Any]
    containers: dict[tuple[Any, ...], Any]


def slots(tree: Any) -> ArgumentSlots:
    """Returns the leaves and containers of a tree of arguments."""
    containers: dict[tuple[Any, ...], Any] = {}

    def visit(keys: tuple[Any, ...], node: Any) -> bool:
        containers[tuple(keys)] = node
        return is_unit(node)

    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=visit, is_leaf_takes_path=True)[0]
    return ArgumentSlots({tuple(keys): leaf for keys, leaf in found}, containers)


def changed_arguments(
    before: ArgumentSlots, after: ArgumentSlots, given: Iterable[Any], result: Any, path: Callable[[Sequence[Any]], str]
) -> Iterator[Change]:
    """Yields new values in arguments that the step does not return.

    Args:
      given: the leaves that the step was called with.
      path: the path of keys.
    """
    returned: set[int] = set()

    def note(node: Any) -> bool:
        returned.add(id(node))
        return is_object(node)

    jax.tree.leaves(result, is_leaf=note)
    known = set(map(id, given))
    for keys, value in after.leaves.items():
        if not isinstance(value, jax.core.Tracer) or id(value) in known:
            continue
        container = after.containers[keys[:-1]]
        grown = isinstance(container, list) and keys not in before.leaves
        if id(container) not in returned and (grown or id(value) not in returned):
            plain = isinstance(container, dict | tuple) or (isinstance(container, list) and not grown)
            yield Change(path(keys), value, not plain)


# ---- Surroundings ----------------------------------------------------------------------------------------------------


class Container(NamedTuple):
    """Something mutable that a step reaches without its arguments.

    Args:
      table: a list, a deque, a dict (or the attributes of an object), or the cell of a variable that a function closes
        over.
      form: the name of one of its slots.
      names: the only slots that count; None for all.
    """

    table: Any
    form: str
    names: frozenset[str] | None = None

    def contents(self) -> dict[Any, Any]:
        """Returns what is in each slot."""
        if isinstance(self.table, CellType):
            try:
                return {None: self.table.cell_contents}
            except ValueError:  # empty
                return {}
        if isinstance(self.table, list | deque):
            return dict(enumerate(self.table))
        if self.names is None:
            return dict(self.table)
        return {name: self.table[name] for name in self.names if name in self.table}

    def restore(self, before: Mapping[Any, Any], keys: Iterable[Any]) -> None:
        """Puts back what was in these slots."""
        if isinstance(self.table, list | deque):
            self.table.clear()
            self.table.extend(before.values())
        elif isinstance(self.table, CellType):
            if before:
                self.table.cell_contents = before[None]
            else:
                del self.table.cell_contents
        else:
            for key in keys:
                if key in before:
                    self.table[key] = before[key]
                else:
                    del self.table[key]


@dataclass(frozen=True)
class Surroundings:
    """The containers that a step reaches without its arguments, and their contents before the step ran."""

    found: tuple[tuple[Container, Mapping[Any, Any]], ...]

    @classmethod
    def of(cls, roots: Mapping[str, Any]) -> "Surroundings":
        """Returns the surroundings of functions and objects, each with the name it is called by."""
        return cls(tuple((each, each.contents()) for each in islice(_containers(roots), _CONTAINER_LIMIT)))

    def changes(self) -> list[Change]:
        """Returns the places that hold new tracers; what was there before is put back."""
        found = []
        for each, before in self.found:
            fresh = {key: x for key, x in each.contents().items() if key not in before or before[key] is not x}
            traced = {key: leaf for key, x in fresh.items() if (leaf := _tracer(x)) is not None}
            found += [Change(each.form.format(key), leaf, lost=True) for key, leaf in traced.items()]
            if traced:
                each.restore(before, traced)
        return found


def _tracer(x: Any) -> Any:
    """Returns a tracer in a tree, or None."""
    try:
        leaves = jax.tree.leaves(x, is_leaf=is_unit)
    except (TypeError, ValueError):  # keys that have no order
        return None
    return next((leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)), None)


def _containers(roots: Mapping[str, Any]) -> Iterator[Container]:
    """Yields the containers below functions and objects: closures, globals that are used, attributes, items."""
    seen: set[int] = set()
    pending = deque(roots.items())
    while pending:
        name, x = pending.popleft()
        if id(x) in seen or isinstance(x, jax.Array | type | ModuleType) or is_object(x):
            continue
        seen.add(id(x))
        found: list[Container] = []
        if isinstance(x, partial):
            pending += [(name, x.func), *((f"{name}.args[{i}]", a) for i, a in enumerate(x.args)), *x.keywords.items()]
        elif isinstance(x, MethodType):
            pending += [("self", x.__self__), (name, x.__func__)]
        elif isinstance(x, FunctionType):
            if file_kind(x.__code__.co_filename) == "user":
                found = list(_scopes(x))
                pending += _defaults(x)
        elif isinstance(x, tuple):
            pending += [(f"{name}[{i}]", item) for i, item in enumerate(x)]
        elif isinstance(x, list | deque | dict):
            found = [Container(x, name + "[{!r}]")]
        elif isinstance(attributes := getattr(x, "__dict__", None), dict):
            if "__wrapped__" in attributes:  # a function in jax.jit, for example
                pending.append((name, attributes["__wrapped__"]))
            elif type(x).__module__.partition(".")[0] not in _LIBRARIES:
                found = [Container(attributes, name + ".{}")]
                if callable(x):
                    pending.append((name, type(x).__call__))
        for each in found:
            yield each
            items = each.contents()
            if len(items) <= _ITEM_LIMIT:
                pending += [(each.form.format(key), item) for key, item in items.items()]


def _scopes(function: FunctionType) -> Iterator[Container]:
    """Yields the variables around a function that it closes over or uses."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield Container(cell, name)
    yield Container(function.__globals__, "{}", frozenset(_names(function.__code__)))


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the parameters of a function that have defaults, which all calls share."""
    values, count = function.__defaults__ or (), function.__code__.co_argcount
    yield from zip(function.__code__.co_varnames[count - len(values) : count], values, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


# ---- The error -------------------------------------------------------------------------------------------------------


def check_nothing_lost(name: str, changes: Sequence[Change], traced: ClosedJaxpr | None, step: Source) -> list[str]:
    """Returns notes on changes for the step only; raises TraceError for those that are lost, with their lines.

    Args:
      traced: the step with the new values as its last results; None if they belong to functions inside it, and could
        not be returned.
      step: the line of the step, for values of which no line is known.
    """
    rows, notes = [], []
    for i, change in enumerate(changes, -len(changes)):
        line, used = _origin(traced, i, len(changes)) if traced else (None, True)
        what = f"{change.place} is changed in place at {line or step}"
        if change.lost or not used:
            rows.append(what)
        else:
            notes.append(f"{what}: the caller does not see it")
    if rows:
        raise TraceError(faults(f"{name} changes what a call cannot give back:", dict.fromkeys(rows), _REMEDY))
    return notes


def _origin(traced: ClosedJaxpr, index: int, count: int) -> tuple[Source | None, bool]:
    """Returns the line that computes a result, and whether the other results depend on it, as far as is known.

    Args:
      index: of the result.
      count: the last results, which do not count as other ones.
    """
    jaxpr = traced.jaxpr
    wanted = jaxpr.outvars[index]
    needed = {x for x in jaxpr.outvars[:-count] if not isinstance(x, Literal)}
    line, found = None, False
    for eqn in reversed(jaxpr.eqns):
        if wanted in eqn.outvars:
            line, found = SourceContext().at(eqn.source_info).source, True
        if eqn.effects or needed.intersection(eqn.outvars):
            needed |= {x for x in eqn.invars if not isinstance(x, Literal)}
    return (line if line and line.file else None), not found or wanted in needed
