"""Stacks of layers as stages: where nothing says what lies on the mesh axis ``pipe``, the layers of a program do."""

from collections.abc import Callable, Mapping

from meshdsl.ir import Program as Traced
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.rules import Rules
from meshdsl.pins import follows
from meshdsl.program import Program
from meshdsl.trace.graphs import makers_of, origin, values
from meshdsl.trace.phases import FORWARD

AXIS = "pipe"


def staged_layouts(program: Program, rules: Rules, traced: Callable[[], Traced]) -> Mapping[str, Layout | str]:
    """The program's own layouts, and where nothing lies on the axis of stages, its layers do.

    Args:
      rules: that it is planned under.
      traced: gives the program as it is traced, where that is needed.
    """
    own = dict(program.layouts or {})
    ruled = any(AXIS in axes for table in rules.tables.values() for axes in table.values())
    if ruled or any(AXIS in Layout.of(layout).axes for layout in own.values()):
        return own
    return {**dict.fromkeys(stacked(traced()), f"{AXIS}=S(0)"), **own}


def stacked(program: Traced) -> list[str]:
    """The parameters that the longest forward scan over parameters goes over: stacks of layers."""
    graph, replaced = program.graph, {i for i in follows(program.inputs, program.outputs) if i is not None}
    makers = makers_of(graph)
    paths = {
        v.id: leaf.path for i, (v, leaf) in enumerate(zip(graph.inputs, program.inputs, strict=True)) if i in replaced
    }
    found: list[tuple[int, list[str]]] = []
    for op in graph.ops:
        if op.name == "scan" and op.phase == FORWARD:
            stacks = op.inputs[op.params["num_consts"] + op.params["num_carry"] :]
            origins = (origin(x, makers) for x in values(stacks))
            found.append((op.params["length"], [paths[x.id] for x in origins if x.id in paths]))
    return max((own for own in found if own[1]), default=(0, []))[1]
