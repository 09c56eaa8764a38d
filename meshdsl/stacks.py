"""Stacks of layers as stages: where nothing says what lies on the mesh axis ``pipe``, the layers of a program do."""

from collections.abc import Callable, Mapping

from meshdsl.ir import Op, Value
from meshdsl.ir import Program as Traced
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.rules import Rules
from meshdsl.pins import follows
from meshdsl.program import Program
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
    makers = {v.id: op for op in graph.ops for v in op.outputs}
    paths = {
        v.id: leaf.path for i, (v, leaf) in enumerate(zip(graph.inputs, program.inputs, strict=True)) if i in replaced
    }
    found: list[tuple[int, list[str]]] = []
    for op in graph.ops:
        if op.name == "scan" and op.phase == FORWARD:
            stacks = op.inputs[op.params["num_consts"] + op.params["num_carry"] :]
            origins = (origin(x, makers) for x in stacks if isinstance(x, Value))
            found.append((op.params["length"], [paths[x.id] for x in origins if x.id in paths]))
    return max((own for own in found if own[1]), default=(0, []))[1]


def origin(x: Value, makers: Mapping[int, Op]) -> Value:
    """What a stack was made of, cast or transposed."""
    while x.id in makers:
        read = [y for y in makers[x.id].inputs if isinstance(y, Value)]
        if len(read) != 1 or read[0].shape[:1] != x.shape[:1]:
            break
        x = read[0]
    return x
