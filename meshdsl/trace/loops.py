"""Loops and conditionals: equations that stay structured, their bodies graphs of their own.

The parameters get one spelling whatever the version of jax: ``num_consts`` and ``num_carry``
of a scan, ``cond_nconsts`` and ``body_nconsts`` of a while. Arrays that a body closes over come
in front of the consts that it has. A scan of one trip is read in place, as compilers have it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from meshdsl.ir import Graph, Value
from meshdsl.trace.graphs import Atom, broadcast_params
from meshdsl.trace.read import Frame, Site, closed, inline, read_graph, reader

Captured = dict[int, tuple[Any, Value]]
_SQUEEZE: dict[str, Any] = {"primitive": lax.squeeze_p, "params": {"dimensions": (0,)}}


@reader("scan")
def _scan(site: Site) -> Sequence[Atom]:
    given = site.eqn.params
    consts, carries = _scan_counts(given)
    if given["length"] == 1:
        return _only_trip(site, consts + carries, carries)
    body, captured = _body(site, given["jaxpr"])
    params = {
        "length": given["length"],
        "reverse": given["reverse"],
        "num_consts": len(captured) + consts,
        "num_carry": carries,
        "unroll": given.get("unroll", 1),
    }
    return _emit(site, "scan", (*_passed(site, captured), *site.inputs), params, _taking(body, captured))


def _only_trip(site: Site, kept: int, carries: int) -> Sequence[Atom]:
    """The body of a scan, from the first ``kept`` operands as they are and the only slices of the others."""
    slices = [site.emit("squeeze", (x,), (_slice_of(x),), **_SQUEEZE)[0] for x in site.inputs[kept:]]
    found = inline(closed(site.eqn.params["jaxpr"]), (*site.inputs[:kept], *slices), site.frame, site.place)
    return (*found[:carries], *(_stacked(site, x) for x in found[carries:]))


def _slice_of(x: Atom) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def _stacked(site: Site, x: Atom) -> Atom:
    shape = (1, *x.shape)
    params = broadcast_params(shape, range(1, len(shape)))
    made = jax.ShapeDtypeStruct(shape, x.dtype)
    return site.emit("broadcast_in_dim", (x,), (made,), primitive=lax.broadcast_in_dim_p, params=params)[0]


@reader("while")
def _while(site: Site) -> Sequence[Atom]:
    given = site.eqn.params
    asked, done = given["cond_nconsts"], given["cond_nconsts"] + given["body_nconsts"]
    condition, from_condition = _body(site, given["cond_jaxpr"])
    body, from_body = _body(site, given["body_jaxpr"])
    inputs = (
        *(*_passed(site, from_condition), *site.inputs[:asked]),
        *(*_passed(site, from_body), *site.inputs[asked:]),
    )
    params = {"cond_nconsts": len(from_condition) + asked, "body_nconsts": len(from_body) + done - asked}
    return _emit(site, "while", inputs, params, _taking(condition, from_condition), _taking(body, from_body))


@reader("cond")
def _cond(site: Site) -> Sequence[Atom]:
    read = [_body(site, branch) for branch in site.eqn.params["branches"]]
    captured = {key: array for _, each in read for key, (array, _) in each.items()}
    branches = [_taking(branch, _all_of(site, captured, each)) for branch, each in read]
    passed = [site.frame.constant(array) for array in captured.values()]
    return _emit(site, "cond", (site.inputs[0], *passed, *site.inputs[1:]), {}, *branches)


def _scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Consts and carries of a scan, in either spelling of its parameters."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _body(site: Site, jaxpr: Any) -> tuple[Graph, Captured]:
    frame = Frame(site.frame.ids, body=True)
    return read_graph(closed(jaxpr), frame, site.place), frame.captured


def _taking(body: Graph, captured: Captured) -> Graph:
    """The body with the inputs that captured arrays come in by."""
    return replace(body, inputs=(*(value for _, value in captured.values()), *body.inputs))


def _passed(site: Site, captured: Captured) -> list[Atom]:
    return [site.frame.constant(array) for array, _ in captured.values()]


def _all_of(site: Site, captured: dict[int, Any], own: Captured) -> Captured:
    """Inputs of one branch for what any branch captured."""
    return {key: own.get(key) or (array, site.frame.value(array)) for key, array in captured.items()}


def _emit(site: Site, name: str, inputs: Sequence[Atom], params: dict[str, Any], *bodies: Graph) -> Sequence[Atom]:
    effects = bool(site.eqn.effects)
    return site.emit(name, inputs, site.eqn.outvars, primitive=None, params=params, bodies=bodies, effects=effects)
