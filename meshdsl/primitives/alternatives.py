"""``md.alternatives``: functions with equal results, of which the planner takes the one that makes the step fastest.

    attend = md.alternatives("attention", {"gathered": attention, "ring": partial(ring_attention, blocks=8)})
    out = attend(query, key, value)

A step is traced and planned once per function, and the fastest plan that fits the memory is kept. The functions taken
are a context of jax, part of the key under which it caches traced functions, so no function is traced with one choice
and used with another. In the traced step, identities of the results say which function was taken, and of which: of all
results, as jax drops those that a loop does not use.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from meshdsl.errors import ArgumentError, is_a

_TAKEN = jax.make_user_context(None)
_WORD = re.compile(r"[\w.+-]+")
alternatives_p = Primitive("alternatives")


def alternatives(name: str, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function that is one of several with equal results: the planner takes the one whose plan is fastest.

    Every one is traced and planned in the whole step; those whose plans do not fit the memory are left out. The plan
    says which was taken, and what the others would take; ``check`` compares the numbers with those of the first one.
    Without a planner, the first one is called.

    Args:
      name: what is chosen, such as ``"attention"``; wherever a step says this name, the same function is taken.
        Several names are chosen one after the other, in the order of the step.
      functions: by name, two or more, with the same arguments, and results of the same shapes and types, at least one
        of them an array that the step uses. Names are of letters, digits and ``_.+-``.

    Raises:
      ArgumentError: a name has other characters, or there are fewer than two functions.

    Example:
      >>> square = md.alternatives("square", {"product": lambda x: x * x, "power": lambda x: x**2})
      >>> int(square(3))
      9
    """
    wrong = [x for x in (name, *functions) if not (isinstance(x, str) and _WORD.fullmatch(x))]
    if wrong:
        raise ArgumentError(f"alternatives: {wrong[0]!r} is no name; write letters, digits and _.+- alone")
    if len(functions) < 2:
        raise ArgumentError(f"alternatives {name!r}: {len(functions)} given, there is nothing to choose; give two")
    for key, function in functions.items():
        if not callable(function):
            raise ArgumentError(f"alternatives {name!r}: {key} {is_a(function)}, not a function")
    default, names = next(iter(functions)), tuple(functions)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        taken = dict(_TAKEN.value or ()).get(name, default)
        if taken not in functions:
            known = ", ".join(functions)
            raise ArgumentError(f"alternatives {name!r}: {taken!r} is none of {known}; plan the step again")
        try:
            result = functions[taken](*args, **kwargs)
        except (TypeError, ValueError) as error:
            if taken == default:
                raise
            raise ArgumentError(f"alternatives {name!r}: {taken} refuses its arguments: {error}") from error
        mark = partial(alternatives_p.bind, name=name, taken=taken, names=names)
        return jax.tree.map(lambda x: mark(x) if isinstance(x, jax.Array) else x, result)

    return chosen


def taking(choices: Iterable[tuple[str, str]]) -> AbstractContextManager[Any]:
    """Return a context in which these functions are taken: pairs of what is chosen, and the name of the function."""
    manager: AbstractContextManager[Any] = _TAKEN(tuple(sorted(choices)) or None)
    return manager


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **taken: Any) -> tuple[Any, Any]:
    return alternatives_p.bind(primals[0], **taken), tangents[0]


alternatives_p.def_impl(lambda x, **taken: x)
alternatives_p.def_abstract_eval(lambda x, **taken: x)
mlir.register_lowering(alternatives_p, lambda context, x, **taken: [x])
ad.primitive_jvps[alternatives_p] = _jvp
batching.primitive_batchers[alternatives_p] = lambda args, dims, **taken: (
    alternatives_p.bind(*args, **taken),
    dims[0],
)
