"""Reading the user's ``jax.shard_map``: its body is inlined between operations that enter and leave it.

    y = shard_map(body, in_specs=P("data"), out_specs=P())(x)

      b = enter_shard_map x     a device's block, of the local shape
      c = psum b                the body, operation by operation, at local shapes: ``data`` is manual there
      y = leave_shard_map c

So loops, gradients and kernels in a body need nothing of their own. What a spec calls unreduced is a partial sum
outside, and one device's summand inside. The body's operations carry the names of the manual axes (``Op.manual``), and
a collective becomes an operation with parameters of one spelling in all versions of jax:

    axes    the mesh axes it runs over, in the user's order
    moved   those among them over which anything moves
    groups  parts of the axis, if it runs in each by itself
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType

from meshdsl.errors import TraceError, faults
from meshdsl.ir.graph import Atom, Graph, Op, TracedProgram, walk
from meshdsl.ir.index import ops_named
from meshdsl.ir.manual import BOUNDARY
from meshdsl.rules.shard_map import moved_axes
from meshdsl.trace.diagnostics import PLANNED
from meshdsl.trace.read_jaxpr import CallSite, closed, inline, reader
from meshdsl.trace.spec_errors import NO_SPECS

# ---- Boundary --------------------------------------------------------------------------------------------------------


@reader("shard_map")
def _shard_map(site: CallSite) -> Sequence[Atom]:
    params, place = site.eqn.params, site.place
    mesh, new = tuple(params["mesh"].shape.items()), params["newly_manual_axes"]
    sizes = tuple((name, size) for name, size in mesh if name in new)
    body = closed(params["jaxpr"])

    def cross(name: str, x: Atom, made: Any, spec: Any) -> Atom:
        about: dict[str, Any] = {
            "spec": _spec(spec, len(x.shape)),
            "unreduced": tuple(n for n, _ in mesh if n in spec.unreduced),
        }
        about |= {"sizes": sizes, "mesh": mesh, "explicit": AxisType.Explicit in params["mesh"].axis_types}
        return site.emit(name, (x,), (made,), params={**about, "by": "shard_map"})[0]

    arguments = zip(site.inputs, body.jaxpr.invars, params["in_specs"], strict=True)
    blocks = [cross("enter_shard_map", x, v, spec) for x, v, spec in arguments]
    known = {**dict(place.manual), **dict(sizes)}
    manual = tuple((name, known[name]) for name in dict.fromkeys((*(n for n, _ in mesh), *known)) if name in known)
    returned = inline(body, blocks, site.frame, place._replace(manual=manual))
    results = zip(returned, site.eqn.outvars, params["out_specs"], strict=True)
    return [cross("leave_shard_map", x, v, spec) for x, v, spec in results]


def _spec(spec: Any, rank: int) -> tuple[tuple[str, ...], ...]:
    """The axes that split each dim, major first."""
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec.partitions]
    return tuple(entries) + ((),) * (rank - len(entries))


# ---- Collectives -----------------------------------------------------------------------------------------------------


_SPELLINGS = {
    "psum": ("psum", "psum_invariant", "unreduced_psum"),
    "pmax": ("pmax", "unreduced_pmax"),
    "pmin": ("pmin", "unreduced_pmin"),
    "all_gather": ("all_gather", "all_gather_invariant", "all_gather_reduced"),
    "reduce_scatter": ("reduce_scatter", "unreduced_reduce_scatter"),
    "all_to_all": ("all_to_all",),
    "ragged_all_to_all": ("ragged_all_to_all",),
    "ppermute": ("ppermute",),
    "pbroadcast": ("pbroadcast", "pbroadcast_dynamic"),
}
_NAMES = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings}
_MORE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "all_gather": lambda given: {"dim": given["all_gather_dimension"], "tiled": given["tiled"]},
    "reduce_scatter": lambda given: {"dim": given["scatter_dimension"], "tiled": given["tiled"]},
    "all_to_all": lambda given: {"split": given["split_axis"], "join": given["concat_axis"]},
    "ppermute": lambda given: {"pairs": tuple((int(a), int(b)) for a, b in given["perm"])},
    "pbroadcast": lambda given: {name: given[name] for name in ("source",) if name in given},
}


_REDUCED: dict[str, Callable[[jax.Array, tuple[int, ...]], jax.Array]] = {
    "psum": lax.reduce_sum,
    "pmax": lax.reduce_max,
    "pmin": lax.reduce_min,
}


@reader(*_NAMES)
def _collective(site: CallSite) -> Sequence[Atom]:
    """The collective over the named axes, after a reduction over the dims among the axes.

    Under ``vmap``, a collective over the mapped axis takes the dim's position in place of the axis's name: it is a
    reduction of the whole array. ``vmap`` leaves no other collectives: a gathered axis is broadcast, an exchanged one
    transposed, a permuted one looked up.
    """
    given, name = site.eqn.params, _NAMES[site.eqn.primitive.name]
    stated = given["axes"] if "axes" in given else given["axis_name"]
    stated = stated if isinstance(stated, tuple) else (stated,)
    axes = tuple(axis for axis in stated if not isinstance(axis, int))
    dims = tuple(int(axis) for axis in stated if isinstance(axis, int))
    inputs = list(site.inputs)
    if dims or not axes:
        x = jax.ShapeDtypeStruct(inputs[0].shape, inputs[0].dtype)
        reduced = jax.make_jaxpr(lambda x: _REDUCED[name](x, dims))(x)
        inputs = inline(reduced, inputs, site.frame, site.place)
    if not axes:
        return inputs
    groups = given.get("axis_index_groups")
    groups = None if groups is None else tuple(tuple(map(int, group)) for group in groups)
    params: dict[str, Any] = {"axes": axes, "moved": axes, "groups": groups}
    if groups and all(len(group) == 1 for group in groups):
        params["moved"] = ()
    if name in _MORE:
        params |= _MORE[name](given)
    if name == "ragged_all_to_all":  # the array that is written to, which is as large as the result, comes first
        inputs[:2] = inputs[1::-1]
    if name == "ppermute":
        counted = tuple(name for name in dict(site.place.manual) if name in axes)  # in mesh order, as jax counts
        params["moved"] = moved_axes(counted or axes, dict(site.place.manual), params["pairs"])
    return site.emit(name, inputs, site.eqn.outvars, primitive=site.eqn.primitive, params=params)


# ---- Types -----------------------------------------------------------------------------------------------------------
# Over Explicit axes, ``jax.shard_map`` without ``in_specs`` takes those of the types of its operands. Calls with arrays
# that lie elsewhere have one plan, so the blocks of a body may not depend on where an argument lies.


def explicit_specs(program: TracedProgram) -> list[tuple[str, Any]]:
    """Returns line and spec of every array that enters a shard_map over Explicit axes."""
    entries = ops_named(program.graph, "enter_shard_map")
    return [(str(op.source), op.params["spec"]) for op in entries if op.params["explicit"]]


def check_stated_specs(untyped: TracedProgram, typed: TracedProgram) -> None:
    """Raises TraceError if shard_maps over Explicit axes divide otherwise where arguments have types."""
    known = explicit_specs(typed)
    rows = [f"shard_map at {line}: {NO_SPECS}" for line, spec in explicit_specs(untyped) if (line, spec) not in known]
    if rows:
        raise TraceError(faults(f"{untyped.name} cannot be planned:", dict.fromkeys(rows)))


# ---- Refused ---------------------------------------------------------------------------------------------------------


_ASYNCHRONOUS = ("_start", "_done")
_TO_ONE = ("psend", "precv")


def check_shard_maps(name: str, graph: Graph) -> None:
    """Raises TraceError for operations of a body that cannot run in a planned step, with lines and remedies."""
    found = [(op, why) for _, op in walk(graph) if (why := _refused(op))]
    rows = [f"{op.called} at {op.source}: {why}" for op, why in found]
    if rows:
        raise TraceError(faults(f"{name} cannot be planned:", dict.fromkeys(rows)))


def _refused(op: Op) -> str:
    if op.name in BOUNDARY and PLANNED in op.scope:
        mesh = ", ".join(f"{name}={size}" for name, size in op.params["mesh"])
        return f"is planned already, on mesh {mesh}; call the step that it was made of, and parallelize the whole"
    named = [axis for axes in op.params["spec"] for axis in axes] if op.name in BOUNDARY else []
    if twice := next((axis for axis in named if named.count(axis) > 1), ""):
        specs = "in_specs" if op.name == "enter_shard_map" else "out_specs"
        return f"its {specs} name axis {twice!r} twice; an axis splits one dim"
    base = op.name.removesuffix("_start").removesuffix("_done")
    if op.name in _TO_ONE or (op.name.endswith(_ASYNCHRONOUS) and base in _NAMES):
        return "is not known here; write the collective that waits, such as lax.ppermute or lax.psum"
    if op.name not in _SPELLINGS:
        return ""
    groups = op.params["groups"] or ()
    if len({len(group) for group in groups}) > 1 or (groups and len(op.params["axes"]) > 1):
        which = "over several axes" if len(op.params["axes"]) > 1 else "of different sizes"
        return f"runs in groups {which} (axis_index_groups); give the mesh an axis for them, and name that"
    strange = [str(axis) for axis in op.params["axes"] if axis not in op.manual]
    return f"runs over {', '.join(strange)}, over which no shard_map around it divides" if strange else ""
