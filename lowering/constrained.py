"""A jaxpr with sharding constraints on values of some lines, as its author would write ``with_sharding_constraint``.

Everything else stays as it is, shardings that the author states among it. Bodies of loops, branches and calls are
rewritten too; those of ``jax.shard_map`` and of kernels are not, since their values are parts.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.sharding import NamedSharding

from meshdsl.ir.graph import Source
from meshdsl.trace.source import SourceContext

Place = Callable[[Source, Any], NamedSharding | None]
_WHOLE = frozenset(
    "jit pjit closed_call core_call checkpoint remat2 scan while cond custom_jvp_call custom_vjp_call".split()
)


def constrained(closed: ClosedJaxpr, place: Place) -> ClosedJaxpr:
    """Returns the same program, its values constrained.

    Args:
      place: from the line and the type of a value to its sharding; None to leave it alone.
    """
    changed: ClosedJaxpr = _inside(closed, place, SourceContext())
    return changed


def _constrained(jaxpr: Jaxpr, place: Place, around: SourceContext) -> Jaxpr:
    equations: list[Any] = []
    for each in jaxpr.eqns:
        context = around.at(each.source_info)
        if each.primitive.name in _WHOLE:
            params = {name: _inside(x, place, context) for name, x in each.params.items()}
            equations.append(each.replace(params=params))
            continue
        outs, stated = list(each.outvars), []
        for i, out in enumerate(outs):
            at = place(context.source, out.aval)
            if at is not None:
                outs[i] = Var(out.aval)
                (statement,) = jax.make_jaxpr(_statement(at))(out.aval).jaxpr.eqns
                stated.append(statement.replace(invars=[outs[i]], outvars=[out], source_info=each.source_info))
        equations += [each.replace(outvars=outs), *stated]
    changed: Jaxpr = jaxpr.replace(eqns=equations)
    return changed


def _statement(at: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.lax.with_sharding_constraint(x, at)


def _inside(x: Any, place: Place, around: SourceContext) -> Any:
    """A parameter of an equation, with constraints in its jaxprs."""
    if isinstance(x, Jaxpr):  # from jax 0.12 on, a ClosedJaxpr is one
        return _constrained(x, place, around)
    if isinstance(x, ClosedJaxpr):
        return ClosedJaxpr(_constrained(x.jaxpr, place, around), x.consts)
    if type(x) is tuple:
        return tuple(_inside(each, place, around) for each in x)
    return x
