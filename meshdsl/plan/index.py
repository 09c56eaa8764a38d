"""What a plan's text asks of a program, whatever the plan: who makes and reads its values, and where they stand."""

from weakref import WeakKeyDictionary

from meshdsl.ir import Graph, Op, Value, walk
from meshdsl.plan.places import Places


class Index:
    """The operations of a graph and its bodies, in program order; of the graph itself it does not keep hold.

    Args:
      ops: with the bodies that they stand in, if they do. order: per op id, its position among them.
      makers: by value id, what makes it. homes: the value, and the body that it is in, if it is.
      readers: by value id, the operations that read it, and as which operand.
      sources: the lines that they come from. places: what those are called.
    """

    def __init__(self, graph: Graph) -> None:
        self.ops = [(None if home is graph else home, op) for home, op in walk(graph)]
        self.order = {op.id: i for i, (_, op) in enumerate(self.ops)}
        self.makers: dict[int, Op] = {}
        self.readers: dict[int, list[tuple[Op, int]]] = {}
        self.homes: dict[int, tuple[Value, Graph | None]] = {v.id: (v, None) for v in graph.inputs}
        for home, op in self.ops:
            for v in op.outputs:
                self.makers[v.id], self.homes[v.id] = op, (v, home)
            for body in op.bodies:
                self.homes.update((v.id, (v, body)) for v in body.inputs)
            for i, x in enumerate(op.inputs):
                if isinstance(x, Value):
                    self.readers.setdefault(x.id, []).append((op, i))
        sources = {id(op.source): op.source for _, op in self.ops}  # most are one of few objects
        self.sources = list(dict.fromkeys(sources.values()))
        self.places = Places(self.sources)


_KNOWN: WeakKeyDictionary[Graph, Index] = WeakKeyDictionary()


def index_of(graph: Graph) -> Index:
    """The index of a graph, worked out once."""
    if graph not in _KNOWN:
        _KNOWN[graph] = Index(graph)
    return _KNOWN[graph]
