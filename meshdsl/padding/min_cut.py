"""Where to pad and where to slice: the cut of fewest bytes around the heavy operations.

Every strand is padded or not. Matrix products and lookups are, and so is what the user said is
split; whatever has no strand is not, and neither is what enters and leaves a graph. A value
between the two sides is padded or sliced on its way, which copies it. The cheapest way to divide
the other strands is a minimum cut. For a vocabulary it puts the softmax between two products on
the padded side and the optimizer on the other: one parameter is padded, one gradient sliced.
Bodies of loops are part of the network, their bytes counted as often as they run: a parameter is
padded in front of the loop in which it is read, and a carry stays padded through all trips.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import combinations
from math import ceil, inf, prod

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from meshdsl.ir.graph import Atom, Graph, Op, TracedProgram, Value
from meshdsl.ir.index import GraphIndex, graph_index, ops_named
from meshdsl.layouts.mesh import Mesh
from meshdsl.padding.dim_groups import LOOKUPS, DimGroup, Port, dim_groups
from meshdsl.pins.conflicts import LONG

# ---- Cut -------------------------------------------------------------------------------------------------------------


HEAVY = ("dot_general", *LOOKUPS)
PADDED, PLAIN = 0, 1  # source and sink
_LARGEST = 1 << 29  # of the solver's integers
_Place = tuple[int, int]  # a value and its dim


def padded_groups(graph: Graph, sizes: Mapping[int, int]) -> dict[Op, list[DimGroup]]:
    """The strands to be padded, by their operation, in the graph and its bodies.

    Args:
      sizes: the lengths in question; other dims stay as they are.
    """
    if not sizes:
        return {}
    net = _Net(graph, sizes)
    padded = net.padded_side() if net.heavy else set()
    return by_operation(at for node, at in net.nodes.items() if node in padded)


def by_operation(found: Iterable[tuple[Op, DimGroup]]) -> dict[Op, list[DimGroup]]:
    """Strands by operation; those of loops also by the ends of their bodies, where they are returned."""
    together: dict[Op, list[DimGroup]] = {}
    for op, strand in found:
        together.setdefault(op, []).append(strand)
        for i, body in enumerate(op.bodies):
            ends = [(p - len(body.inputs), d) for at, (p, d) in strand.inside if at == i and p >= len(body.inputs)]
            together.setdefault(body.ops[-1], []).append(DimGroup(strand.size, tuple(ends)))
    return together


class _Net:
    """The network: a node per strand, what makes each dim of each value, and who reads it."""

    def __init__(self, graph: Graph, sizes: Mapping[int, int]) -> None:
        self.sizes = sizes
        self.nodes: dict[int, tuple[Op, DimGroup]] = {}
        self.heavy: list[int] = []
        self.makers: dict[_Place, int] = {}
        self.readers: dict[_Place, set[int]] = {}
        self.bytes: dict[int, int] = {}
        self.count = 2
        self._is_concerned = cache(lambda shape: any(n in sizes for n in shape))
        self._among = self._concerned(graph_index(graph))
        self._enter_graph(graph, {})

    def _enter_graph(self, graph: Graph, given: Mapping[Port, int]) -> None:
        """A graph whose inputs and results, in this order, belong to nodes around it."""
        for i, x in enumerate((*graph.inputs, *graph.returned)):
            self._connect(x, i >= len(graph.inputs), graph.trips, lambda d, i=i: given.get((i, d), PLAIN))  # type: ignore[misc]
        for op in graph.ops[:-1]:
            if op.bodies or op.id in self._among:
                self._enter(op, graph.trips)

    def _concerned(self, numbers: GraphIndex) -> set[int]:
        """Ids of the operations that make or read something with a dim in question."""
        concerned = np.array(list(map(self._is_concerned, numbers.shapes)), dtype=np.bool_)[numbers.shape]
        there = {*numbers.producer[concerned].tolist(), *numbers.use_position[concerned[numbers.use_value]].tolist()}
        return {op.id for at in there if (op := numbers.ops[at])}

    def _enter(self, op: Op, trips: int) -> None:
        covered: dict[Port, int] = {}
        inside: list[dict[Port, int]] = [{} for _ in op.bodies]
        for strand in dim_groups(op):
            if strand.size in self.sizes:
                node = self._new()
                self.nodes[node] = op, strand
                self.heavy += [node] if _is_heavy(op, strand) else []
                covered.update(dict.fromkeys(strand.ports, node))
                for at, port in strand.inside:
                    inside[at][port] = node
        for i, x in enumerate((*op.inputs, *op.outputs)):
            self._connect(x, i < len(op.inputs), trips, lambda d, i=i: covered.get((i, d), PLAIN))  # type: ignore[misc]
        for body, given in zip(op.bodies, inside, strict=True):
            self._enter_graph(body, given)

    def _connect(self, x: Atom, reads: bool, trips: int, node_at: Callable[[int], int]) -> None:
        """Every dim in question of a value with the node that reads or makes it."""
        if not isinstance(x, Value) or not self._is_concerned(x.shape):
            return
        self.bytes[x.id] = max(1, x.bytes * trips)
        for d in (d for d, n in enumerate(x.shape) if n in self.sizes):
            if reads:
                self.readers.setdefault((x.id, d), set()).add(node_at(d))
            else:
                self.makers[x.id, d] = node_at(d)

    def _new(self) -> int:
        self.count += 1
        return self.count - 1

    def padded_side(self) -> set[int]:
        """The nodes on the source's side of the minimum cut, as few as there can be."""
        capacity = self._edges()
        scale = min(1.0, _LARGEST / 2 / sum(c for c in capacity.values() if c < inf))
        rows, columns = zip(*capacity, strict=True)
        scaled = [_LARGEST if c == inf else max(1, int(c * scale)) for c in capacity.values()]
        shape = (self.count, self.count)
        net = csr_array((np.array(scaled, np.int32), (rows, columns)), shape=shape)
        rest = net - maximum_flow(net, PADDED, PLAIN).flow
        rest.eliminate_zeros()
        return set(breadth_first_order(rest, PADDED, return_predecessors=False).tolist())

    def _edges(self) -> dict[tuple[int, int], float]:
        """Capacities in bytes: what it costs if the first end is padded and the second is not."""
        found: dict[tuple[int, int], float] = {(PADDED, node): inf for node in self.heavy}
        for (value, d), readers in self.readers.items():
            maker = self.makers.get((value, d), PLAIN)
            if readers != {maker}:
                self._cross(found, maker, readers, self.bytes[value])
        return found

    def _cross(self, found: dict[tuple[int, int], float], maker: int, readers: set[int], size: int) -> None:
        """A value is sliced at most once, for all its plain readers, and padded at most once."""
        sliced, padded = self._new(), self._new()
        for first, second, cost in ((maker, sliced, size), (padded, maker, size)):
            found[first, second] = cost
        for reader in readers:
            found[sliced, reader] = found[reader, padded] = inf


def _is_heavy(op: Op, strand: DimGroup) -> bool:
    """Operations that are worth the padding, and dims that the user said are split."""
    if op.name == "constrain":
        return bool(op.params["layout"].splitting(strand.ports[0][1]))
    return op.name in HEAVY


# ---- Lengths ---------------------------------------------------------------------------------------------------------
# Lengths of dims that could be padded, so that they divide over a mesh.


def padded_sizes(program: TracedProgram, mesh: Mesh) -> dict[int, int]:
    """The candidates, longest first: lengths that could be padded, and to what."""
    lengths = {n for shape in graph_index(program.graph).shapes for n in shape}
    uneven = {n: m for n in lengths if (m := padded_length(n, mesh)) > n}
    found = {strand.size for strands in padded_groups(program.graph, uneven).values() for strand in strands}
    return {n: uneven[n] for n in sorted(found, reverse=True)}


def padded_length(n: int, mesh: Mesh) -> int:
    """``n``, rounded up to a multiple of as many devices as may split it."""
    products = {prod(axes) for count in range(len(mesh.sizes) + 1) for axes in combinations(mesh.sizes, count)}
    blocks = max((k for k in products if n >= LONG * k), default=1)
    return ceil(n / blocks) * blocks


def stated_sizes(graph: Graph, mesh: Mesh) -> Iterator[int]:
    """Lengths that the user said are split although they do not divide."""
    for op in ops_named(graph, "constrain"):
        for d, n in enumerate(op.outputs[0].shape):
            axes = [axis for axis in op.params["layout"].splitting(d) if axis in mesh.names]
            if n % prod(mesh.axis(axis) for axis in axes):
                yield n
