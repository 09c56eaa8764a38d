"""Calls: equations that only wrap another jaxpr, read in place.

A ``remat`` that autodiff has been through recomputes the forward pass inside the backward
pass. What it starts from is hidden behind ``optimization_barrier``: XLA, and the clean-ups
here, would otherwise see that forward values are computed twice and keep them instead.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat

from jax.lax import optimization_barrier_p

from meshdsl.ir import Value
from meshdsl.trace.graphs import Atom
from meshdsl.trace.read import Site, closed, inline, reader

_BODY = ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "call", "callee")


@reader(
    *("jit", "pjit", "closed_call", "core_closed_call", "call", "core_call", "named_call"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"),
    *("custom_vmap_call", "linear_call", "composite", "remat_opt"),
)
def _call(site: Site) -> Sequence[Atom]:
    return _inlined(site, site.inputs)


@reader("remat", "remat2", "checkpoint")
def _remat(site: Site) -> Sequence[Atom]:
    params = site.eqn.params
    asked = params.get("prevent_cse", True)
    hidden: Iterable[bool] = asked if isinstance(asked, tuple) else repeat(bool(asked))
    if not params.get("differentiated", False):
        return _inlined(site, site.inputs)
    return _inlined(site, [_barrier(site, x) if hide else x for x, hide in zip(site.inputs, hidden, strict=False)])


@reader("optimization_barrier")
def _barriers(site: Site) -> Sequence[Atom]:
    """One operation per operand, so that operands keep layouts of their own."""
    return [_barrier(site, x) for x in site.inputs]


@reader("custom_linear_solve")
def _solve(site: Site) -> Sequence[Atom]:
    """Autodiff is over, so what is left of a linear solve is the solver; it lists its own constants and the operand."""
    lengths, bodies = site.eqn.params["const_lengths"], site.eqn.params["jaxprs"]
    before = lengths.matvec + lengths.vecmat
    consts = site.inputs[before : before + lengths.solve]
    return inline(closed(bodies.solve), (*consts, *site.inputs[sum(lengths) :]), site.frame, site.place)


def _inlined(site: Site, inputs: Sequence[Atom]) -> Sequence[Atom]:
    body = next(site.eqn.params[name] for name in _BODY if name in site.eqn.params)
    return inline(closed(body), inputs, site.frame, site.place)


def _barrier(site: Site, x: Atom) -> Atom:
    if not isinstance(x, Value):
        return x
    return site.emit("optimization_barrier", (x,), (x,), primitive=optimization_barrier_p, params={})[0]
