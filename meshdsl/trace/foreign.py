"""Primitives of other libraries: read as the JAX code that they run.

A library can bind primitives of its own, to have its say under ``vmap`` or ``grad``. Both are
over when a step has been traced; what is left is what the primitive computes, and a library
mostly says that in JAX (its ``impl``). So the equation is replaced by the equations of that
function. What cannot be traced (it reads values, or calls out of JAX) stays one operation, and
so does a primitive of JAX itself, or one that has a rule.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from meshdsl.rules import RULES


def written_out(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr of a foreign primitive's implementation, if it is one in JAX."""
    primitive = eqn.primitive
    if primitive.name in RULES or eqn.effects or _is_native(primitive.impl):
        return None
    run = partial(primitive.impl, **primitive.get_bind_params(eqn.params))
    try:
        found = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(*t) for t in _types(eqn.invars)))
    except Exception:  # whatever foreign code raises on values it cannot read
        return None
    same = _types(found.jaxpr.outvars) == _types(eqn.outvars)
    return found if same and not _binds(found.jaxpr, primitive) else None


def _types(atoms: Iterable[Any]) -> list[tuple[Any, Any]]:
    return [(x.aval.shape, x.aval.dtype) for x in atoms]


def _is_native(impl: Callable[..., Any]) -> bool:
    """Whether JAX compiles the primitive by itself, or has no way to run it alone, or we read it ourselves."""
    while isinstance(impl, partial):
        impl = impl.func
    return str(getattr(impl, "__module__", "jax")).partition(".")[0] in ("jax", "meshdsl")


def _binds(jaxpr: Jaxpr, primitive: Any) -> bool:
    """Whether the primitive is used again, at any depth."""
    return any(eqn.primitive is primitive or any(_binds(j, primitive) for j in _inside(eqn)) for eqn in jaxpr.eqns)


def _inside(eqn: JaxprEqn) -> Iterable[Jaxpr]:
    for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
        if isinstance(x, ClosedJaxpr | Jaxpr):
            yield x.jaxpr if isinstance(x, ClosedJaxpr) else x
