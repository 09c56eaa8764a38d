"""Manual axes: where a value is one device's block, because the user's program divides it by ``jax.shard_map``.

    op                   its operands are manual over     its results are manual over
    -----------------------------------------------------------------------------------
    enter_shard_map      op.manual                        op.manual and the shard_map's axes
    leave_shard_map      op.manual and those axes         op.manual
    any other            op.manual, or less               op.manual
    loop, conditional    ports are manual inside as outside, and over op.manual

"Or less": a body may read values that are equal on all devices, such as a constant.
"""

from collections.abc import Iterator, Mapping

from meshdsl.ir.graph import Atom, Graph, Op, Value, walk
from meshdsl.ir.loops import body_operands
from meshdsl.util.lazy import memoize_by_object

BOUNDARY = ("enter_shard_map", "leave_shard_map")
Axes = tuple[str, ...]


@memoize_by_object
def manual_values(graph: Graph) -> Mapping[int, Axes]:
    """Returns the result of ``find_manual``, computed once per graph; only for graphs that are not renumbered later."""
    return find_manual(graph)


def find_manual(graph: Graph) -> Mapping[int, Axes]:
    """Returns, by value id, the axes over which a value is manual, for the values of a graph that are, bodies too."""
    if not any(op.manual or op.name in BOUNDARY for _, op in walk(graph)):
        return {}
    return dict(_of_graph(graph, {}))


def read_axes(op: Op) -> Axes:
    """Returns the axes over which the operands of an operation may be manual."""
    return (*op.manual, *dict(op.params["sizes"])) if op.name == "leave_shard_map" else op.manual


def made_axes(op: Op) -> Axes:
    """Returns the axes over which the results of an operation are manual."""
    return (*op.manual, *dict(op.params["sizes"])) if op.name == "enter_shard_map" else op.manual


def _of_graph(graph: Graph, known: Mapping[int, Axes]) -> Iterator[tuple[int, Axes]]:
    """Yields the manual values of a graph whose inputs have the axes that are known."""
    here = dict(known)
    for op in graph.ops:
        if op.bodies:
            for body, operands in zip(op.bodies, body_operands(op), strict=True):
                pairs = zip(body.inputs, operands, strict=True)
                inside = {v.id: axes for v, x in pairs if (axes := _joined(op.manual, here, x))}
                yield from _of_graph(body, inside)
        if axes := made_axes(op):
            here.update((v.id, axes) for v in op.outputs)
    yield from here.items()


def _joined(manual: Axes, known: Mapping[int, Axes], x: Atom) -> Axes:
    more = known.get(x.id, ()) if isinstance(x, Value) else ()
    return tuple(dict.fromkeys((*manual, *more)))
