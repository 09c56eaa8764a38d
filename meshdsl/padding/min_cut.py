"""Step 1: which dim groups to pad, by a minimum cut of copied bytes.

Every group is padded or plain. Products, convolutions and lookups are padded, since padding lets them be split, and so
is what the user constrained to be split; reductions and pooling are, if none of these has their length. Operations
without a group are plain, and so is the boundary of the step. A value between the two sides is padded or sliced on its
way, which copies it. The cheapest division of the other groups is a minimum s-t cut (Ford and Fulkerson 1956): source
and sink are the two sides, an edge costs the bytes of a copy.

    params/embed --pad--> dot_general ... softmax ... dot_general --slice--> optimizer
       plain                            padded                              plain

For a vocabulary the cut puts the softmax between two products on the padded side and the optimizer on the plain one:
one parameter is padded, one gradient sliced. Bodies of loops are part of the network, their bytes counted by
iterations: a parameter is padded before the loop that uses it, and a carry stays padded through all iterations.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import combinations
from math import ceil, inf, lcm, prod

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from meshdsl.ir.graph import Atom, Graph, Op, TracedProgram, Value
from meshdsl.ir.index import GraphIndex, graph_index, ops_named
from meshdsl.layouts.mesh import Mesh
from meshdsl.padding.resized_dims import padding_groups, with_merged
from meshdsl.pins.conflicts import LONG
from meshdsl.rules.dim_groups import LOOKUPS, POOLINGS, REDUCTIONS, DimAt, DimGroup

WORTH_PADDING = frozenset(("dot_general", "conv_general_dilated", *LOOKUPS))
WORTH_IF_ALONE = REDUCTIONS | POOLINGS  # for a length that nothing heavier has
PADDED, PLAIN = 0, 1  # nodes: source and sink
_CAPACITY_LIMIT = 1 << 29  # of an edge: the solver has 32-bit integers
_ValueDim = tuple[int, int]  # a value id and its dim

# ---- Which groups are padded -----------------------------------------------------------------------------------------


def padded_groups(graph: Graph, sizes: Mapping[int, int], reductions: bool = True) -> dict[Op, list[DimGroup]]:
    """Returns the groups to pad by their operation, in the graph and its bodies.

    Args:
      sizes: the lengths that may be padded; other dims stay as they are, but those that reshapes merge these into.
      reductions: whether reductions and pooling make a length worth padding that no product, window or lookup has.
    """
    if not sizes:
        return {}
    network = _CutNetwork(graph, sizes, reductions)
    padded = network.padded_side() if network.required else set()
    return by_operation(group for node, group in network.groups.items() if node in padded)


def by_operation(groups: Iterable[tuple[Op, DimGroup]]) -> dict[Op, list[DimGroup]]:
    """Returns groups by operation; those of loops also by the return of each body, which has them as operands."""
    found: dict[Op, list[DimGroup]] = {}
    for op, group in groups:
        found.setdefault(op, []).append(group)
        for i, body in enumerate(op.bodies):
            inputs = len(body.inputs)
            returned = tuple((p - inputs, d) for at, (p, d) in group.inside if at == i and p >= inputs)
            found.setdefault(body.ops[-1], []).append(DimGroup(group.size, returned))
    return found


class _CutNetwork:
    """The network: a node per group, and for each dim of each value the nodes of its producer and consumers."""

    def __init__(self, graph: Graph, sizes: Mapping[int, int], reductions: bool) -> None:
        self.sizes = with_merged(graph, sizes)
        self.groups: dict[int, tuple[Op, DimGroup]] = {}
        self.heavy: dict[int, list[int]] = {}  # by length, nodes that gain from padding
        self.light: dict[int, list[int]] = {}  # those that gain only if their length has no heavy ones
        self.producer: dict[_ValueDim, int] = {}
        self.consumers: dict[_ValueDim, set[int]] = {}
        self.bytes: dict[int, int] = {}
        self.count = 2
        self._has_candidate_dim = cache(lambda shape: any(n in self.sizes for n in shape))
        self._relevant = self._relevant_ops(graph_index(graph))
        self._add_graph(graph, {})
        heavy = {n: nodes for n, nodes in self.heavy.items() if n in sizes}
        light = {n: nodes for n, nodes in self.light.items() if reductions and n in sizes and n not in heavy}
        self.required = [node for nodes in (*heavy.values(), *light.values()) for node in nodes]
        self.preferred = [node for node, (_, group) in self.groups.items() if group.size in light]

    def _relevant_ops(self, index: GraphIndex) -> set[int]:
        """Returns ids of the operations that produce or use a value with a candidate dim."""
        relevant = np.array(list(map(self._has_candidate_dim, index.shapes)), dtype=np.bool_)[index.shape]
        positions = {*index.producer[relevant].tolist(), *index.use_position[relevant[index.use_value]].tolist()}
        return {op.id for at in positions if (op := index.ops[at])}

    def _add_graph(self, graph: Graph, boundary: Mapping[DimAt, int]) -> None:
        """Add a graph whose inputs, and counted on behind them returned values, belong to nodes around it."""
        for i, x in enumerate((*graph.inputs, *graph.returned)):
            self._connect(x, i >= len(graph.inputs), graph.trips, lambda d, i=i: boundary.get((i, d), PLAIN))  # type: ignore[misc]
        for op in graph.ops[:-1]:
            if op.bodies or op.id in self._relevant:
                self._add_op(op, graph.trips)

    def _add_op(self, op: Op, trips: int) -> None:
        nodes: dict[DimAt, int] = {}
        inside: list[dict[DimAt, int]] = [{} for _ in op.bodies]
        for group in padding_groups(op, self.sizes):
            node = self._new_node()
            self.groups[node] = op, group
            if _is_worth_padding(op, group):
                self.heavy.setdefault(group.size, []).append(node)
            elif op.name in WORTH_IF_ALONE:
                self.light.setdefault(group.size, []).append(node)
            nodes.update(dict.fromkeys(group.ports, node))
            for which, port in group.inside:
                inside[which][port] = node
        for i, x in enumerate((*op.inputs, *op.outputs)):
            self._connect(x, i < len(op.inputs), trips, lambda d, i=i: nodes.get((i, d), PLAIN))  # type: ignore[misc]
        for body, boundary in zip(op.bodies, inside, strict=True):
            self._add_graph(body, boundary)

    def _connect(self, x: Atom, uses: bool, trips: int, node_at: Callable[[int], int]) -> None:
        """Connect every candidate dim of a value with the node that uses or produces it there."""
        if not isinstance(x, Value) or not self._has_candidate_dim(x.shape):
            return
        self.bytes[x.id] = max(1, x.bytes * trips)
        for d in (d for d, n in enumerate(x.shape) if n in self.sizes):
            if uses:
                self.consumers.setdefault((x.id, d), set()).add(node_at(d))
            else:
                self.producer[x.id, d] = node_at(d)

    def _new_node(self) -> int:
        self.count += 1
        return self.count - 1

    def padded_side(self) -> set[int]:
        """Returns the nodes on the source's side of the minimum cut: as few as a minimum cut can have."""
        capacity = self._edges()
        scale = min(1.0, _CAPACITY_LIMIT / 2 / sum(c for c in capacity.values() if c < inf))
        rows, columns = zip(*capacity, strict=True)
        scaled = [_CAPACITY_LIMIT if c == inf else max(1, int(c * scale)) for c in capacity.values()]
        shape = (self.count, self.count)
        network = csr_array((np.array(scaled, np.int32), (rows, columns)), shape=shape)
        residual = network - maximum_flow(network, PADDED, PLAIN).flow
        residual.eliminate_zeros()
        return set(breadth_first_order(residual, PADDED, return_predecessors=False).tolist())

    def _edges(self) -> dict[tuple[int, int], float]:
        """Returns capacities: the bytes to copy if the first node is padded and the second is plain.

        A value is sliced at most once, for all of its plain consumers, and padded at most once. Each copy has a node of
        its own, which all of these consumers share. Where both sides copy as much, operations around reductions are
        padded: they are the work that can be split.
        """
        found: dict[tuple[int, int], float] = {(PADDED, node): 1.0 for node in self.preferred}
        found |= {(PADDED, node): inf for node in self.required}
        for (value, d), consumers in self.consumers.items():
            producer = self.producer.get((value, d), PLAIN)
            if consumers != {producer}:
                sliced, padded = self._new_node(), self._new_node()
                found[producer, sliced] = found[padded, producer] = self.bytes[value]
                for consumer in consumers:
                    found[sliced, consumer] = found[consumer, padded] = inf
        return found


def _is_worth_padding(op: Op, group: DimGroup) -> bool:
    """Returns whether an operation gains from padding, or the user constrained the dim to be split."""
    if op.name == "constrain":
        return bool(op.params["layout"].splitting(group.ports[0][1]))
    return op.name in WORTH_PADDING


# ---- Candidate lengths -----------------------------------------------------------------------------------------------


def padded_sizes(program: TracedProgram, mesh: Mesh, reductions: bool = True) -> dict[int, int]:
    """Returns the lengths that padding would make divisible, longest first, with the padded lengths.

    Args:
      reductions: as ``padded_groups`` takes it.
    """
    lengths = {n for shape in graph_index(program.graph).shapes for n in shape}
    blocks = _constrained_blocks(program.graph, mesh)
    uneven = {n: padded_length(n, mesh, blocks.get(n, 1)) for n in lengths if padded_length(n, mesh) > n}
    chosen = padded_groups(program.graph, uneven, reductions)
    found = {group.size for groups in chosen.values() for group in groups}
    return {n: uneven[n] for n in sorted(found & uneven.keys(), reverse=True)}


def padded_length(n: int, mesh: Mesh, constrained: int = 1) -> int:
    """Returns ``n`` rounded up to a multiple of the most devices that may split it into blocks of LONG or more.

    Args:
      constrained: blocks into which constraints split it, whose multiple it is as well.
    """
    blocks = lcm(constrained, _blocks(n, mesh))
    return ceil(n / blocks) * blocks


def _blocks(n: int, mesh: Mesh) -> int:
    products = {prod(axes) for count in range(len(mesh.sizes) + 1) for axes in combinations(mesh.sizes, count)}
    return max((k for k in products if n >= LONG * k), default=1)


def constrained_sizes(graph: Graph, mesh: Mesh) -> dict[int, int]:
    """Returns the lengths that constraints split although they do not divide, padded so that they do."""
    return {n: padded_length(n, mesh, k) for n, k in _constrained_blocks(graph, mesh).items() if n % k}


def _constrained_blocks(graph: Graph, mesh: Mesh) -> dict[int, int]:
    """Returns the lengths that constraints split, and into how many blocks."""
    blocks: dict[int, int] = {}
    for op in ops_named(graph, "constrain"):
        for d, n in enumerate(op.outputs[0].shape):
            count = prod(mesh.axis(axis) for axis in op.params["layout"].splitting(d) if axis in mesh.names)
            blocks[n] = lcm(count, blocks.get(n, 1))
    return blocks
