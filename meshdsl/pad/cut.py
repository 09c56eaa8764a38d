"""Where to pad and where to slice: the cut of fewest bytes around the heavy operations.

Every strand is padded or not. Matrix products and lookups are, and so is what the user said is
split; whatever has no strand is not, and neither is what enters and leaves a graph. A value
between the two sides is padded or sliced on its way, which copies it. The cheapest way to divide
the other strands is a minimum cut. For a vocabulary it puts the softmax between two products on
the padded side and the optimizer on the other: one parameter is padded, one gradient sliced.
"""

from collections.abc import Mapping
from math import prod

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from meshdsl.ir import Graph, Op, Value
from meshdsl.pad.strands import LOOKUPS, Strand, strands

HEAVY = ("dot_general", *LOOKUPS)
PADDED, PLAIN = 0, 1  # source and sink
_ENDLESS = 1 << 29
_Place = tuple[int, int]  # a value and its dim


def padded_strands(graph: Graph, sizes: Mapping[int, int]) -> dict[int, list[Strand]]:
    """The strands to be padded, by the position of their operation in the graph.

    Args:
      sizes: the lengths in question; other dims stay as they are.
    """
    net = _Net(graph, sizes)
    if not net.heavy:
        return {}
    side = net.padded_side()
    found: dict[int, list[Strand]] = {}
    for node, (at, strand) in net.nodes.items():
        if node in side:
            found.setdefault(at, []).append(strand)
    return found


class _Net:
    """The network: a node per strand, what makes each dim of each value, and who reads it."""

    def __init__(self, graph: Graph, sizes: Mapping[int, int]) -> None:
        self.sizes = sizes
        self.nodes: dict[int, tuple[int, Strand]] = {}
        self.heavy: list[int] = []
        self.makers: dict[_Place, int] = {}
        self.readers: dict[_Place, set[int]] = {}
        self.values = {v.id: v for v in (*graph.inputs, *(v for op in graph.ops for v in op.outputs))}
        self.count = 2
        for at, op in enumerate(graph.ops):
            self._enter(at, op)

    def _enter(self, at: int, op: Op) -> None:
        covered: dict[tuple[int, int], int] = {}
        for strand in strands(op):
            if strand.size in self.sizes:
                node = self._new()
                self.nodes[node] = at, strand
                self.heavy += [node] if _is_heavy(op, strand) else []
                covered.update(dict.fromkeys(strand.ports, node))
        for i, x in enumerate((*op.inputs, *op.outputs)):
            for d in range(len(x.shape)) if isinstance(x, Value) else ():
                self._connect(i < len(op.inputs), (x.id, d), covered.get((i, d), PLAIN))  # type: ignore[union-attr]

    def _connect(self, reads: bool, place: _Place, node: int) -> None:
        if reads:
            self.readers.setdefault(place, set()).add(node)
        else:
            self.makers[place] = node

    def _new(self) -> int:
        self.count += 1
        return self.count - 1

    def padded_side(self) -> set[int]:
        """The nodes on the source's side of the minimum cut, as few as there can be."""
        capacity = self._edges()
        total = sum(c for c in capacity.values() if c < _ENDLESS)
        scale = min(1.0, _ENDLESS / 2 / max(1, total))
        rows, columns = zip(*capacity, strict=True)
        scaled = [c if c == _ENDLESS else max(1, int(c * scale)) for c in capacity.values()]
        shape = (self.count, self.count)
        net = csr_array((np.array(scaled, np.int32), (rows, columns)), shape=shape)
        rest = net - maximum_flow(net, PADDED, PLAIN).flow
        rest.eliminate_zeros()
        return set(breadth_first_order(rest, PADDED, return_predecessors=False).tolist())

    def _edges(self) -> dict[tuple[int, int], int]:
        """Capacities in bytes: what it costs if the first end is padded and the second is not."""
        found = {(PADDED, node): _ENDLESS for node in self.heavy}
        for (value, d), readers in self.readers.items():
            maker = self.makers.get((value, d), PLAIN)
            if readers != {maker}:
                self._cross(found, maker, readers, self._bytes(value))
        return found

    def _cross(self, found: dict[tuple[int, int], int], maker: int, readers: set[int], size: int) -> None:
        """A value is sliced at most once, for all its plain readers, and padded at most once."""
        sliced, padded = self._new(), self._new()
        for first, second, cost in ((maker, sliced, size), (padded, maker, size)):
            found[first, second] = cost
        for reader in readers:
            found[sliced, reader] = found[reader, padded] = _ENDLESS

    def _bytes(self, value: int) -> int:
        return max(1, prod(self.values[value].shape) * self.values[value].itemsize)


def _is_heavy(op: Op, strand: Strand) -> bool:
    """Operations that are worth the padding, and dims that the user said are split."""
    if op.name == "constrain":
        return bool(op.params["layout"].splitting(strand.ports[0][1]))
    return op.name in HEAVY
