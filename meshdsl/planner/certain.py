"""What is in memory while an operation of a graph runs, whatever the plan.

``Lives`` says of one plan what lives when. This says it of all: which operands and results an operation certainly
holds, and which values are needed after it that were made before. Left out is what may lie elsewhere: views, values
that are fused away; and in the body of a loop what may lie in memory of the graph around it. Of operands and a result
that may be written over one of them, which is then as large, the operands count, if they are among the rest.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from meshdsl.ir import Graph, Op, Value
from meshdsl.planner.places import Body, Places

Reading = tuple[int, int]  # op id, operand


@dataclass(frozen=True)
class Certain:
    """What one graph holds while its operation at a position runs.

    Args:
      read: by value id, where the operation reads it, or one before that is fused into this one or a later one.
      written: ids of its results.
      later: by value id, where it is last read, of values made before and needed afterwards.
      once: those of them that are read but once afterwards.
    """

    read: dict[int, Reading]
    written: tuple[int, ...]
    later: dict[int, Reading]
    once: frozenset[int]


def certain(graph: Graph, op: Op, places: Places, counted: frozenset[int], lies: Body | None = None) -> Certain:
    """What a graph holds while ``op`` runs.

    Args:
      counted: ids of the inputs that are the graph's own to hold.
      lies: of a body, how its values lie in the memory around it.
    """
    at, views = graph.ops.index(op), _views(graph, places)
    inputs = {v.id for v in graph.inputs}
    inside = (
        ((places.kept - inputs) | counted) - set(views) - (_elsewhere(graph, places, views, lies) if lies else set())
    )
    over, runs = _written_over(graph, places, at, views), places.within[id(graph)].runs
    reading = [place for k in range(at, -1, -1) if runs[k] >= at for place in _readings(graph.ops[k])]
    read = {v: place for v, place in reversed(reading) if v in inside and v not in over}
    made = counted | {v.id for before in graph.ops[:at] for v in before.outputs}
    waiting = (made & inside) - {v for v, _ in reading}
    later = {v: place for after in graph.ops[at + 1 :] for v, place in _readings(after) if v in waiting}
    under = {
        reuse.value: {v: place for place, v in reuse.over if v in inside and v not in later}
        for reuse in places.within[id(graph)].reuses.get(at, ())
        if reuse.value in inside  # else it lies elsewhere, and they may be there
    }
    read |= {v: place for operands in under.values() for v, place in operands.items()}
    written = tuple(v.id for v in op.outputs if v.id in inside and not under.get(v.id))
    readings = Counter(x.id for after in graph.ops[at + 1 :] for x in after.inputs if isinstance(x, Value))
    return Certain(read, written, later, frozenset(v for v in later if readings[v] == 1))


def _readings(op: Op) -> Iterator[tuple[int, Reading]]:
    """The values that an operation reads, each once, and where."""
    seen: set[int] = set()
    for i, value in enumerate(op.inputs):
        if isinstance(value, Value) and value.id not in seen:
            seen.add(value.id)
            yield value.id, (op.id, i)


def _views(graph: Graph, places: Places) -> dict[int, int]:
    """Per value that may be a view, what it views, by their ids."""
    ops = (graph.ops[at] for at in places.within[id(graph)].views)
    return {op.outputs[0].id: op.inputs[0].id for op in ops if isinstance(op.inputs[0], Value)}


def _written_over(graph: Graph, places: Places, at: int, views: dict[int, int]) -> set[int]:
    """Ids of the values that results of an operation may be written over, through views."""
    reuses = places.within[id(graph)].reuses.get(at, ())
    return _viewed({value for reuse in reuses for _, value in reuse.over}, views)


def _elsewhere(graph: Graph, places: Places, views: dict[int, int], lies: Body) -> set[int]:
    """Ids of the values of a body that may lie in memory around it: in a carry's place, or where it returns them."""
    found = {graph.inputs[i].id for i, _ in lies.carried}
    reuses = places.within[id(graph)].reuses
    for at, op in enumerate(graph.ops):
        found |= {v.id for v in op.outputs if views.get(v.id) in found}
        found |= {reuse.value for reuse in reuses.get(at, ()) if any(value in found for _, value in reuse.over)}
    return found | _viewed({v.id for v in graph.returned if isinstance(v, Value)}, views)


def _viewed(values: set[int], views: dict[int, int]) -> set[int]:
    """Values, and what they view."""
    found, left = set(values), list(values)
    while left:
        seen = views.get(left.pop())
        if seen is not None and seen not in found:
            found.add(seen)
            left.append(seen)
    return found
