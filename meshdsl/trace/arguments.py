"""Arguments of a step: flat arrays, and the path by which a glob names each.

A path is the argument's name and the keys below it: ``params/layers/0/w1``. Arguments of ``*args`` are ``args/0``,
``args/1``, ...; keyword arguments have their names.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from meshdsl.errors import TraceError, faults, is_a, nearest
from meshdsl.trace.leaves import Found, components, path_leaves
from meshdsl.trace.objects import NO_OBJECTS, Objects, flatten_objects, holds_objects
from meshdsl.trace.static_leaves import hide, reveal
from meshdsl.util.arrays import is_hashable
from meshdsl.util.paths import join_path

# ---- Values ----------------------------------------------------------------------------------------------------------
# Shapes without values can be planned, lowered and verified, but not run, and neither can an array whose buffer was
# donated or deleted. XLA does not check: on the CPU it reads the freed memory.


def check_values(name: str, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raises TraceError for arguments that are shapes without values, or arrays whose buffers are gone."""
    found = list(zip(paths, leaves, strict=True))
    shapes = [f"{path}: {_typed(x)} without values" for path, x in found if isinstance(x, jax.ShapeDtypeStruct)]
    gone = [f"{path}: {_typed(x)} was donated to an earlier call, or deleted" for path, x in found if is_gone(x)]
    if shapes or gone:
        what = "shapes" if shapes else "arrays that are gone"
        remedy = "plan, lower and verify take shapes" if shapes else "go on with what that call returned"
        raise TraceError(faults(f"{name} cannot run on {what}:", [*shapes, *gone], remedy))


def is_gone(x: Any) -> bool:
    """Whether the array's buffer was donated or deleted."""
    is_deleted = getattr(x, "is_deleted", None)  # of jax's arrays; faster than isinstance
    return is_deleted is not None and not isinstance(x, jax.core.Tracer) and is_deleted()


def check_arrays(title: str, found: Iterable[tuple[str, Any]], remedy: str) -> None:
    """Raises TraceError for everything in ``found`` that is not an array; a ``jax.Ref`` has a remedy of its own."""
    aliens = [(path, x) for path, x in found if not _is_array(x)]
    if aliens:
        rows = [f"{path or 'the result'}: {_alien(x)}" for path, x in aliens]
        raise TraceError(faults(title, rows, "" if all(isinstance(x, jax.Ref) for _, x in aliens) else remedy))


def check_captured(name: str, captured: Sequence[Any]) -> None:
    """Raises TraceError for closed-over arrays that can be changed in place."""
    rows = [f"a value that it closes over: {_alien(x)}" for x in captured if isinstance(x, jax.Ref)]
    if rows:
        raise TraceError(faults(f"{name} cannot be planned:", rows))


def _typed(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _alien(x: Any) -> str:
    if isinstance(x, jax.Ref):
        return f"{_typed(x)} can be changed in place (jax.Ref); pass its value, and return the new one"
    if hasattr(x, "dtype"):
        return f"an array of {x.dtype} holds no numbers"
    return f"{is_a(x)}, not an array"


def _is_array(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return isinstance(x, bool | int | float | complex) or (
        dtype is not None
        and hasattr(x, "shape")
        and getattr(dtype, "kind", "V") not in "OSUmM"
        and not isinstance(x, jax.Ref)
    )


# ---- Calls -----------------------------------------------------------------------------------------------------------


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Call:
    """One call of a step, flattened.

    Args:
      name: the name of the step.
      leaves: the arrays, or their shapes, in order.
      paths: the path of each leaf.
      dims: names of the dims of each leaf, empty if it has none.
      tree: the tree of ``(positional, keywords)`` without static arguments, static leaves hidden.
      static: static arguments by position or keyword.
      count: the number of positional arguments, static ones included.
      names: the start of the path of each positional argument that is not static.
      objects: the objects of nnx among the arguments.
    """

    name: str
    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]
    tree: Any
    static: Mapping[int | str, Any]
    count: int
    names: tuple[tuple[str, ...], ...] = ()
    objects: Objects = NO_OBJECTS

    def path(self, keys: Sequence[Any]) -> str:
        """Returns the path of keys in the tree."""
        return join_path(_path_of(self.names, keys))

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments, ``args`` and ``kwargs``, with these leaves."""
        return self.with_static(reveal(self.tree.unflatten(leaves)))

    def with_static(self, dynamic: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments ``args`` and ``kwargs`` of these dynamic and the static ones."""
        positional, keywords = iter(dynamic[0]), dynamic[1]
        static = {key: value for key, value in self.static.items() if isinstance(key, str)}
        args = tuple(self.static[i] if i in self.static else next(positional) for i in range(self.count))
        return args, {**keywords, **static}

    def settle(self, placed: Sequence[Any]) -> list[Any]:
        """Returns the leaves where a call placed them, except those that the caller has committed to devices.

        The caller's objects hold the new arrays from now on, so that later calls need not place them again.
        """
        kept = [x if getattr(x, "committed", False) else y for x, y in zip(self.leaves, placed, strict=True)]
        self.objects.replace(self.leaves, kept)
        return kept


def flatten_call(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Call:
    """Flattens a call; TraceError if the signature differs, or arguments are neither arrays nor static."""
    title = step_name(step)
    _check_signature(title, step, args, kwargs)
    names = argument_names(step, len(args))
    fixed = static_keys(step, len(args), kwargs, static_argnums, static_argnames)
    static = {key: args[key] if isinstance(key, int) else kwargs[key] for key in fixed}
    _check_static(title, {"/".join(names[key]) if isinstance(key, int) else key: x for key, x in static.items()})
    dynamic = hide(tuple(x for i, x in enumerate(args) if i not in fixed))
    keywords = hide({key: x for key, x in kwargs.items() if key not in fixed})
    labels = tuple(name for i, name in enumerate(names[: len(args)]) if i not in fixed)
    if holds_objects((dynamic, keywords)):
        found, tree, objects = flatten_objects((dynamic, keywords), partial(_path_of, labels))
    else:
        tree, objects = jax.tree_util.tree_structure((dynamic, keywords)), NO_OBJECTS
        found = [each for start, value in zip(labels, dynamic, strict=True) for each in path_leaves(value, start)]
        found += [each for key in sorted(keywords) for each in path_leaves(keywords[key], (key,))]
    _check_arguments(title, found)
    return Call(
        title if title.isidentifier() else "step",
        tuple(each.array for each in found),
        tuple(each.path for each in found),
        tuple(each.dims for each in found),
        tree,
        static,
        len(args),
        labels,
        objects,
    )


def _path_of(names: Sequence[tuple[str, ...]], keys: Sequence[Any]) -> tuple[str, ...]:
    """Returns the components of the path of keys in a tree of positional arguments and keywords."""
    side, argument, *below = keys
    return (*((argument.key,) if side.idx else names[argument.idx]), *components(below))


def step_name(step: Any) -> str:
    """Returns the name of a step, also inside ``functools.partial``; of an object, that of its class."""
    inner = step
    while isinstance(inner, partial):
        inner = inner.func
    return str(getattr(inner, "__name__", type(inner).__name__))


def argument_names(step: Callable[..., Any], count: int) -> list[tuple[str, ...]]:
    """Returns the start of the path of each parameter, and of each argument of ``*args``."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except ValueError:  # some builtins have no signature
        parameters = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    named = [(p.name,) for p in parameters if p.kind in _POSITIONAL]
    starred = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    return named + [(starred, str(i)) for i in range(count - len(named))]


def static_keys(
    step: Callable[..., Any],
    count: int,
    keywords: Iterable[str],
    nums: int | Sequence[int],
    given: str | Sequence[str],
) -> set[int | str]:
    """Returns which of ``count`` positional arguments and of these keywords are static.

    A static name implies its position, and a static position its name.
    """
    names = argument_names(step, count)
    positions = {nums} if isinstance(nums, int) else set(nums)
    words = {given} if isinstance(given, str) else set(given)
    positions = {i % len(names) for i in positions if -len(names) <= i < len(names)}
    positions |= {i for i, name in enumerate(names) if name[0] in words and len(name) == 1}
    words |= {names[i][0] for i in positions}
    return {i for i in positions if i < count} | words.intersection(keywords)


def _check_arguments(step: str, found: Sequence[Found]) -> None:
    arrays = [(each.path, each.array) for each in found]
    check_arrays(f"{step} cannot be traced:", arrays, "pass values that are not arrays through static_argnames")


def _check_static(step: str, found: Mapping[str, Any]) -> None:
    """Raises TraceError for static arguments that are not hashable."""
    rows = [f"{name}: {is_a(x)}, which cannot be hashed" for name, x in found.items() if not is_hashable(x)]
    if rows:
        remedy = "arrays cannot be static; give anything else in a form that can be hashed, such as a tuple for a list"
        raise TraceError(faults(f"{step} cannot be planned for these static arguments:", rows, remedy))


def _check_signature(name: str, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises TraceError unless the step's signature accepts these arguments."""
    try:
        taken = inspect.signature(step)
    except ValueError:  # some builtins have no signature
        return
    try:
        taken.bind(*args, **kwargs)
    except TypeError as error:
        known = list(taken.parameters)
        rows = [f"{key}: no such argument{nearest(key, known)}" for key in kwargs if key not in known]
        raise TraceError(
            faults(f"{name} cannot be called with these arguments:", [str(error), *rows], f"it takes {taken}")
        ) from error
