"""What memory holds at least while an operation of the outermost graph runs, as a sum over single operands and results.

Predicted memory (``memory``, ``lives``) depends on a whole plan: copies are shared, come early where they are smaller,
lie over one another. Some of them are there in any case, each as large as one node's state says:

    inputs that are never given up           in their own layout, at every operation
    what the operation reads                 in the layout in which it reads it; once, if such an input lies so
    what it writes                           in its own layout

Left out is what may lie elsewhere: views, values that are fused away, operands that a result may be written over. So
the sum is no more than the predicted memory of any plan, and a bound may price it (``dual``).
"""

from collections.abc import Iterator

import numpy as np

from meshdsl.ir import Graph, Op, Value
from meshdsl.planner.exact import Costs
from meshdsl.planner.extract import Choice
from meshdsl.planner.model import Model
from meshdsl.planner.pairs import End
from meshdsl.planner.places import Places, places_of
from meshdsl.planner.tables import per_axis


class Floor:
    """Nodes' ports that are in memory while operation ``op`` of the outermost graph runs.

    ``ends`` are there in any case, ``copies`` where they differ from the input that they are a copy of.

    Args:
      donated: positions of the inputs that are given up.
    """

    def __init__(self, model: Model, donated: frozenset[int], op: Op) -> None:
        graph, self.model = model.problem.program.graph, model
        fixed = {v.id for i, v in enumerate(graph.inputs) if i not in donated}
        read = list(_read(model, op, fixed))
        own = [model.problem.defined[v] for v in sorted(fixed)]
        self.ends = (*own, *(end for v, end in read if v not in fixed), *_written(model, op))
        self.copies = tuple(end for v, end in read if v in fixed)
        self._narrow = bool(places_of(graph, model.mesh.topology.backend).reads.all)

    def bytes(self, choice: Choice) -> float:
        """Of a plan."""
        ends = (*self.ends, *(end for end in self.copies if self._is_copy(end, choice)))
        return float(sum(self.shares(end)[tuple(choice.rows[end[0]])] for end in ends))

    def _is_copy(self, end: End, choice: Choice) -> bool:
        n, p = end
        m, q = self.model.problem.defined[self.model.nodes[n].ports[p].value.id]
        return self.model.layout(n, p, choice.rows[n]) != self.model.layout(m, q, choice.rows[m])

    def shares(self, end: End) -> Costs:
        """Bytes of a port at least, per joint state of its node."""
        n, p = end
        value = self.model.nodes[n].ports[p].value
        size = value.bytes * min(1.0, 2 / value.itemsize) if self._narrow else value.bytes
        split = self.model.tables[n].codes[p] < len(value.shape)
        return np.asarray(per_axis(self.model.mesh, split) * size)


def _read(model: Model, op: Op, fixed: set[int]) -> Iterator[tuple[int, End]]:
    """The values that an operation reads and that are in memory, each once, with a port that reads them."""
    graph = model.problem.program.graph
    places = places_of(graph, model.mesh.topology.backend)
    views = _views(graph, places)
    inside = (
        (places.kept | {v.id for v in graph.inputs}) - set(views) - (_written_over(graph, places, op, views) - fixed)
    )
    readers = {port.reader: (n, p) for n, node in enumerate(model.nodes) for p, port in enumerate(node.ports)}
    seen = set[int]()
    for i, value in enumerate(op.inputs):
        if isinstance(value, Value) and value.id in inside - seen and (op.id, i) in readers:
            seen.add(value.id)
            yield value.id, readers[op.id, i]


def _written(model: Model, op: Op) -> Iterator[End]:
    """The ports of an operation's results that are in memory."""
    graph = model.problem.program.graph
    places = places_of(graph, model.mesh.topology.backend)
    views = _views(graph, places)
    known = (v.id for v in op.outputs if v.id in places.kept and v.id not in views)
    return (model.problem.defined[v] for v in known if v in model.problem.defined)


def _views(graph: Graph, places: Places) -> dict[int, int]:
    """Per value that may be a view, what it views, by their ids."""
    ops = (graph.ops[at] for at in places.within[id(graph)].views)
    return {op.outputs[0].id: op.inputs[0].id for op in ops if isinstance(op.inputs[0], Value)}


def _written_over(graph: Graph, places: Places, op: Op, views: dict[int, int]) -> set[int]:
    """Ids of the values that results of an operation may be written over, through views."""
    reuses = places.within[id(graph)].reuses.get(graph.ops.index(op), ())
    found = {value for reuse in reuses for _, _, value in reuse.over}
    left = list(found)
    while left:
        seen = views.get(left.pop())
        if seen is not None and seen not in found:
            found.add(seen)
            left.append(seen)
    return found
