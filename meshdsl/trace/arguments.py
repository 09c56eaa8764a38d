"""Arguments of a step: flat arrays, and the path by which a glob names each.

A path is the argument's name and the keys below it: ``params/layers/0/w1``. Arguments of ``*args`` are ``args/0``,
``args/1``, ...; keyword arguments have their names. The ``value`` that flax adds below every variable is left out, so
the path of a weight in a flax model is ``params/layers/0/attn/wq/kernel``.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

from meshdsl.errors import TraceError, faults, is_a, nearest
from meshdsl.ir.graph import Leaf
from meshdsl.nd.named_array import has_names, names_of
from meshdsl.trace.static_leaves import hide, reveal
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
    """Raises TraceError for everything in ``found`` that is not an array."""
    rows = [f"{path or 'the result'}: {_alien(x)}" for path, x in found if not _is_array(x)]
    if rows:
        raise TraceError(faults(title, rows, remedy))


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


class Found(NamedTuple):
    """An array of a tree.

    Args:
      path: the path that globs match.
      dims: names of its dims, empty if it has none.
    """

    path: str
    array: Any
    dims: tuple[str, ...]


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
    """

    name: str
    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]
    tree: Any
    static: Mapping[int | str, Any]
    count: int

    def args(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the positional arguments with these leaves."""
        dynamic = iter(reveal(jax.tree_util.tree_unflatten(self.tree, leaves)[0]))
        return tuple(self.static[i] if i in self.static else next(dynamic) for i in range(self.count))

    def kwargs(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Returns the keyword arguments with these leaves."""
        static = {key: value for key, value in self.static.items() if isinstance(key, str)}
        return {**reveal(jax.tree_util.tree_unflatten(self.tree, leaves)[1]), **static}


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
    names = _argument_names(step, len(args))
    fixed = _static_keys(names, len(args), kwargs, static_argnums, static_argnames)
    static = {key: args[key] if isinstance(key, int) else kwargs[key] for key in fixed}
    _check_static(title, {"/".join(names[key]) if isinstance(key, int) else key: x for key, x in static.items()})
    dynamic = hide(tuple(x for i, x in enumerate(args) if i not in fixed))
    keywords = hide({key: x for key, x in kwargs.items() if key not in fixed})
    labels = [name for i, name in enumerate(names[: len(args)]) if i not in fixed]
    found = [each for label, value in zip(labels, dynamic, strict=True) for each in path_leaves(value, label)]
    found += [each for key in sorted(keywords) for each in path_leaves(keywords[key], (key,))]
    _check_arguments(title, found)
    return Call(
        title if title.isidentifier() else "step",
        tuple(each.array for each in found),
        tuple(each.path for each in found),
        tuple(each.dims for each in found),
        jax.tree_util.tree_structure((dynamic, keywords)),
        static,
        len(args),
    )


def step_name(step: Any) -> str:
    """Returns the name of a step, also inside ``functools.partial``; of an object, that of its class."""
    inner = step
    while isinstance(inner, partial):
        inner = inner.func
    return str(getattr(inner, "__name__", type(inner).__name__))


def typed_leaf(path: str, x: Any, dims: tuple[str, ...]) -> Leaf:
    """Returns the leaf at ``path`` with the shape and dtype of ``x``."""
    return Leaf(path, tuple(x.shape), x.dtype, bool(x.weak_type), dims)


def path_leaves(tree: Any, label: tuple[str, ...] = ()) -> list[Found]:
    """Returns every leaf of a pytree with its path, which starts with ``label``, and the names of its dims.

    Names are left out where their number differs from the rank, as for the factored moments of a weight.
    """
    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=has_names)[0]
    return [found for keys, node in nodes for found in _below(join_path((*label, *_components(keys))), node)]


def _below(path: str, node: Any) -> Iterable[Found]:
    dims = names_of(node)
    if dims is None:
        return [Found(path, node, ())]
    ranked = ((x, len(getattr(x, "shape", ()))) for x in jax.tree.leaves(node))
    return [Found(path, x, dims if rank == len(dims) else ()) for x, rank in ranked]


def _components(keys: Iterable[Any]) -> list[str]:
    """Keys as text, without the attribute of a flax variable that is its array."""
    parts = [_component(key) for key in keys]
    last = list(keys)[-1:]
    attribute = bool(last) and isinstance(last[0], jax.tree_util.GetAttrKey)
    return parts[:-1] if attribute and parts[-1] in ("value", "raw_value") else parts


def _component(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key).strip(".[]'\"")


def _argument_names(step: Callable[..., Any], count: int) -> list[tuple[str, ...]]:
    """The start of the path of each parameter, and of each argument of ``*args``."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except ValueError:  # some builtins have no signature
        parameters = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    named = [(p.name,) for p in parameters if p.kind in _POSITIONAL]
    starred = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    return named + [(starred, str(i)) for i in range(count - len(named))]


def _static_keys(
    names: Sequence[tuple[str, ...]],
    count: int,
    kwargs: Mapping[str, Any],
    nums: int | Sequence[int],
    given: str | Sequence[str],
) -> set[int | str]:
    """Positions and keywords that are static in this call; a name implies its position, and a position its name."""
    positions = {nums} if isinstance(nums, int) else set(nums)
    words = {given} if isinstance(given, str) else set(given)
    positions = {i % len(names) for i in positions if -len(names) <= i < len(names)}
    positions |= {i for i, name in enumerate(names) if name[0] in words and len(name) == 1}
    words |= {names[i][0] for i in positions}
    return {i for i in positions if i < count} | {word for word in words if word in kwargs}


def _check_arguments(step: str, found: Sequence[Found]) -> None:
    module = any(kind.__module__.startswith("flax.nnx") for each in found for kind in type(each.array).__mro__)
    split = "; a module that is no pytree through nnx.split before the step and nnx.merge inside" if module else ""
    arrays = [(each.path, each.array) for each in found]
    check_arrays(f"{step} cannot be traced:", arrays, "what is no array goes through static_argnames" + split)


def _check_static(step: str, found: Mapping[str, Any]) -> None:
    """Raises TraceError for static arguments that are not hashable."""
    rows = [f"{name}: {is_a(x)}, which cannot be hashed" for name, x in found.items() if not _is_hashable(x)]
    if rows:
        remedy = (
            "arrays are no static arguments; of what is none give a form that can be hashed, such as a tuple for a list"
        )
        raise TraceError(faults(f"{step} cannot be planned for these static arguments:", rows, remedy))


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


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
