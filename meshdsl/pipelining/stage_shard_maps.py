"""The user's ``jax.shard_map`` in the stages of a pipeline: freed of the axis whose devices are the stages.

A stage's layers are vmapped over the ranks, whose dim is split over the axis of the stages. So in a layer, this axis
has to be automatic. ``jax.shard_map`` divides over all axes of its mesh unless ``axis_names`` says otherwise; but a
body whose specs do not name an axis has the same values on all devices along it, if it does not ask where a device is:

    the boundary, an operation    the same without the axis
    psum over data, pipe          psum over data, times the devices along pipe
    pmax, pmin over data, pipe    over data
    a residual, of all devices    of the devices along data

Anything else over that axis is refused. So are shard_maps in parts that ``md.stage`` cuts, which run as branches of
one operation on whole arrays.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from meshdsl.errors import PipelineError, faults
from meshdsl.ir.graph import Atom, Graph, Op, walk
from meshdsl.ir.index import producers
from meshdsl.ir.loops import ABSENT, loop_ports
from meshdsl.ir.manual import BOUNDARY, find_manual
from meshdsl.ir.rewrite import Table, copied, fresh_ids, in_bodies, new_value, renumber, substitute, values, with_ops
from meshdsl.layouts.mesh import Mesh
from meshdsl.pipelining.shard_map_rows import PASSED, REDUCTIONS
from meshdsl.rules.shard_map import KINDS, split_dim
from meshdsl.trace.read_jaxpr import written

_OF_ONE_STAGE = ("ragged_all_to_all", "pbroadcast")  # read positions, of which every stage would have its own


def without_stage_axis(name: str, graph: Graph, layers: Sequence[Op], axis: str, mesh: Mesh) -> Graph:
    """Returns the graph of a step whose shard_maps in layers leave the axis of the stages to the pipeline.

    It is the graph itself if they did.

    Args:
      layers: the scans over layers.

    Raises PipelineError if layers need that axis.
    """
    chosen = {op.id for op in (*layers, *_constants(graph, layers, axis))}
    tops = [op for op in graph.ops if op.id in chosen]
    inside = [op for top in tops for op in (top, *(inner for body in top.bodies for _, inner in walk(body)))]
    residuals = _residuals(graph, {op.id for op in inside}, axis)
    rows = [f"{op.called} at {op.source}: {why}" for op in inside if (why := _fault(op, axis, residuals))]
    if rows:
        others = ", ".join(repr(other) for other in mesh.names if other != axis)
        remedy = f"call jax.shard_map in the layer, with axis_names={{{others}}}"
        raise PipelineError(faults(f"the layers of {name} cannot be stages over {axis}:", dict.fromkeys(rows), remedy))
    if not any(axis in (*op.manual, *_mapped(op)) for op in inside):
        return graph
    whole = copied(graph)
    ids = fresh_ids(whole)

    def freed(graph: Graph, which: Collection[int] | None = None) -> Graph:
        table, ops = Table(), list[Op]()
        for v in (*graph.inputs, *(v for op in graph.ops for v in op.outputs)):
            if v.id in residuals:
                dim = residuals[v.id]
                v.shape = (*v.shape[:dim], v.shape[dim] // mesh.axis(axis), *v.shape[dim + 1 :])
        for op in graph.ops:
            op = substitute(op, table)
            is_free = which is None or op.id in which
            ops += _freed(in_bodies(freed, op), axis, mesh, ids, table) if is_free else (op,)
        return with_ops(graph, ops)

    made = freed(whole, chosen)
    renumber(made)
    return made


def _mapped(op: Op) -> Collection[str]:
    """The axes of a boundary of a ``jax.shard_map``."""
    return dict(op.params["sizes"]) if op.name in BOUNDARY else ()


def _constants(graph: Graph, layers: Sequence[Op], axis: str) -> Iterator[Op]:
    """Yields the operations that make what bodies in the layers read of bodies outside: constants that jax hoists."""
    producer_of, manual, seen = producers(graph), find_manual(graph), set[int]()
    pending = [*layers]
    while pending:
        op = pending.pop()
        through = op.name == "enter_shard_map" and split_dim(op, axis) is not None
        for v in values(op.inputs):
            if (through or axis in manual.get(v.id, ())) and v.id in producer_of and v.id not in seen:
                seen.add(v.id)
                pending.append(producer_of[v.id])
                yield producer_of[v.id]


def _residuals(graph: Graph, inside: Collection[int], axis: str) -> dict[int, int]:
    """Returns, by id, the dim in which an array has the equal blocks of all devices along the axis side by side.

    With ``check_vma=False``, autodiff passes residuals so from body to body. There are none if anything else than a
    body reads one.

    Args:
      inside: ids of the operations that are freed of the axis.
    """
    dims: dict[int, int] = {}
    before = -1
    while before != len(dims):
        before = len(dims)
        for _, op in walk(graph):
            if op.id in inside and op.name == "leave_shard_map" and (dim := split_dim(op, axis)) is not None:
                dims[op.outputs[0].id] = dim
            for members in _aliases(op):
                known = [dims[x.id] - stacked for x, stacked in members if x.id in dims]
                dims.update((x.id, known[0] + stacked) for x, stacked in members if known)

    def is_passed(op: Op, x: Atom) -> bool:
        if op.name == "enter_shard_map":
            return op.id in inside and split_dim(op, axis) == dims[x.id]
        return bool(op.bodies) or op.name in PASSED or (op.name == "return" and op is not graph.ops[-1])

    reads = ((op, x) for _, op in walk(graph) for x in op.inputs if x.id in dims)
    return dims if all(is_passed(op, x) for op, x in reads) else {}


def _aliases(op: Op) -> Iterator[list[tuple[Atom, int]]]:
    """Yields values of one content that an operation passes, with the leading dims that each has in addition."""
    if op.name in PASSED:
        yield from ([(x, 0), (v, 0)] for x, v in zip(op.inputs, op.outputs, strict=True))
    for port in loop_ports(op):
        outside: list[Atom] = [op.inputs[port.operand]] if port.operand != ABSENT else []
        outside += [op.outputs[port.result]] if port.result != ABSENT else []
        inside: list[Atom] = [op.bodies[body].inputs[at] for body, at in port.inputs]
        inside += [op.bodies[body].returned[at] for body, at in port.outputs]
        yield [*((x, int(port.stacked)) for x in outside), *((x, 0) for x in inside)]


def refuse_in_parts(name: str, parts: Iterable[Op]) -> None:
    """Raises PipelineError if operations of parts that ``md.stage`` cuts belong to a shard_map."""
    nested = (inner for op in parts for body in op.bodies for _, inner in walk(body))
    found = [op for op in (*parts, *nested) if op.name in BOUNDARY]
    if found:
        rows = [
            f"shard_map at {op.source}: is in a part that md.stage cuts, which runs on whole arrays" for op in found
        ]
        remedy = "write its body with whole arrays, or the parts as a scan over layers"
        raise PipelineError(faults(f"{name} does not run as a pipeline:", dict.fromkeys(rows), remedy))


# ---- Operations of a layer -------------------------------------------------------------------------------------------


def _fault(op: Op, axis: str, residuals: Collection[int]) -> str:
    """Returns why an operation of a layer cannot be in a stage."""
    if op.name in BOUNDARY:
        array = (op.inputs if op.name == "enter_shard_map" else op.outputs)[0]
        divides = split_dim(op, axis) is not None and array.id not in residuals
        needs = divides or axis in op.params["unreduced"]
        return f"divides over {axis}, whose devices are the stages" if needs else ""
    if op.name in _OF_ONE_STAGE and len(op.inputs) > 1:
        return "has no form for several stages at once"
    if op.name == "axis_index":
        stated = op.params["axis_name"]
        needs = axis in (stated if isinstance(stated, tuple) else (stated,))
    else:
        plain = op.name in REDUCTIONS and op.params["groups"] is None
        needs = op.name in KINDS and axis in op.params["axes"] and not plain
    return f"runs over {axis}, whose devices are the stages" if needs else ""


def _freed(op: Op, axis: str, mesh: Mesh, ids: Iterator[int], table: Table) -> Iterator[Op]:
    """Yields what an operation of a layer is without the axis; ``table`` gets the values that replace its results."""
    op = replace(op, params=dict(op.params), manual=_without(axis, op.manual))
    if op.name in BOUNDARY:
        op.params["sizes"] = tuple((name, size) for name, size in op.params["sizes"] if name != axis)
        op.params["spec"] = tuple(_without(axis, axes) for axes in op.params["spec"])
    if op.name not in KINDS or axis not in op.params["axes"]:
        yield op
        return
    (x,), (result,) = op.inputs, op.outputs
    op.params.update({name: _without(axis, op.params[name]) for name in ("axes", "moved")})
    if op.params["axes"]:
        op.outputs = (new_value(result, ids),)
        x = op.outputs[0]
        yield op
    if op.name == "psum":
        product, x = written(lambda x: x * mesh.axis(axis), [x], ids, op)
        yield from product
    table[result.id] = x


def _without(axis: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in axes if name != axis)
