"""Repeated layers: equal ones are one block with many copies, and all other nodes are one block with a single copy.

Two layers are equal here if nothing that a network of them depends on distinguishes them: their nodes have the same
states, costs and prices, and their values have consumers at the same nodes, of the same layer, of one at the same
distance, or outside of all layers. So a block is encoded once and replicated. Decisions are not tied: every copy keeps
its own variables.

Where more than a few equal layers follow each other, a *reduced* step omits those in the middle (see
``reduced_depth``); the first and the last ``encoding_layers_kept`` of a run remain.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.objective import memory_cost_key, priced_nodes
from meshdsl.planner.problem.layers import RepeatedLayers
from meshdsl.planner.problem.model import Model
from meshdsl.planner.problem.ports import End
from meshdsl.util.arrays import Ids, group_by, index_array, intern_ids, unique_sorted


class LayerBlock(NamedTuple):
    """Nodes, and the values that they produce.

    Args:
      nodes: of the first copy.
      outside: nodes of other blocks or copies that consume these values.
      boundary: nodes that produce or consume a value which crosses layers, or leaves them.
      layers: of the copies; -1 for the block of nodes in no repeated layer.
      copies: [copies, nodes and outside], their nodes.
    """

    nodes: list[int]
    outside: list[int]
    boundary: frozenset[int]
    layers: Ids
    copies: Ids

    @property
    def names(self) -> list[int]:
        """The nodes, and those outside."""
        return [*self.nodes, *self.outside]


class LayerBlocks:
    """The blocks of a model at its present prices: a single one if there are no repeated layers, or not ``enabled``.

    Attributes:
      blocks: first the one of nodes in no repeated layer.
      layers: [layers, nodes of a layer].
      layer, column: per node, where it is in ``layers``; -1 for no layer.
      previous, following: per layer, the last layer up to it, and the first one after it, that the reduced step keeps.
      representative: per node, the node of the reduced step that decides for it.
    """

    def __init__(self, model: Model, enabled: bool) -> None:
        self.model, self.count = model, len(model.nodes)
        self._wiring = wiring = model.wiring
        enabled = enabled and self.count >= model.limits.encoding_layers_nodes
        self._repeated = model.layers if enabled else RepeatedLayers.none(self.count, wiring)
        self.layers = self._repeated.nodes
        self.layer, self.column = self._repeated.layer, self._repeated.column
        self._producer, self._consumer = wiring.node_of[wiring.use_producers], wiring.node_of[wiring.uses]
        self._is_boundary = self._find_boundary()
        self._classes = self._classify()
        self._divide()

    def priced(self, model: Model) -> "LayerBlocks":
        """Returns the blocks at the prices of ``model``, which must not differ otherwise."""
        other = copy(self)
        other.model = model
        other._divide()
        return other

    # ---- the reduced step

    @property
    def drops_layers(self) -> bool:
        """Whether the reduced step omits any layers."""
        return not self._kept.all()

    def reduced_copies(self, block: LayerBlock) -> tuple[Ids, Ids]:
        """Returns the layers of a block that the reduced step keeps, and its copies there, moved next to each other."""
        if block.layers[0] < 0:
            return block.layers, block.copies
        kept = self._kept[block.layers]
        layers, copies = block.layers[kept, None], block.copies[kept]
        its = self.layer[copies]
        dropped = (its >= 0) & ~self._kept[its]
        nearest = np.where(its > layers, self.following[its], self.previous[its])
        copies[dropped] = self.layers[nearest[dropped], self.column[copies[dropped]]]
        return layers[:, 0], copies

    def weighted_copies(self, block: LayerBlock, weighs: bool) -> Iterator[tuple[int, Ids]]:
        """Yields the copies of a block in the reduced step, by weight.

        Args:
          weighs: the weight is the number of layers that a kept layer represents; else 1.
        """
        layers, copies = self.reduced_copies(block)
        weights = np.where((layers < 0) | (not weighs), 1, self._weights[layers])
        for weight in unique_sorted(weights).tolist():
            yield weight, copies[weights == weight]

    # ---- division into blocks

    def _divide(self) -> None:
        """Groups equal layers into blocks, and chooses the layers of the reduced step."""
        groups, layers = self._group_layers(), self.layers
        self._weights = _layer_weights(groups, len(layers), self.model.limits.encoding_layers_kept)
        self._kept = self._weights > 0
        kept = np.append(np.flatnonzero(self._kept), len(layers))
        following = np.searchsorted(kept, np.arange(len(layers)), side="right")
        self.previous, self.following = kept[following - 1], kept[following]
        self.representative = np.arange(self.count)
        self.representative[layers] = layers[self.previous]
        single = np.ones(self.count, dtype=np.bool_)
        for group in groups:
            single[layers[group]] = False
        self.blocks = [self._block(np.flatnonzero(single), single, np.array([-1]))]
        self.blocks += [self._block(layers[group[0]], self.layer == group[0], np.array(group)) for group in groups]

    def _block(self, nodes: Ids, inside: NDArray[np.bool_], group: Ids) -> LayerBlock:
        outside = unique_sorted(self._consumer[inside[self._producer] & ~inside[self._consumer]])
        names = np.concatenate([nodes, outside])
        boundary = frozenset(names[self._is_boundary[names]].tolist())
        copies, in_layers = np.tile(names, (group.size, 1)), self.layer[names] >= 0
        its = self.layer[names[in_layers]] - group[0] + group[:, None]
        copies[:, in_layers] = self.layers[its, self.column[names[in_layers]]]
        return LayerBlock(nodes.tolist(), outside.tolist(), boundary, group, copies)

    def _group_layers(self) -> list[list[int]]:
        """Returns equal layers, where there are several."""
        if not self.layers.size:
            return []
        equal = zip(self._classes, self._by_layer(self._node_prices(), self._use_prices()), strict=True)
        return [group.tolist() for group in group_by(intern_ids(equal)) if group.size > 1]

    def _classify(self) -> list[int]:
        """Returns a number for each layer, the same for layers that only prices may distinguish."""
        if not self.layers.size:
            return []
        model, wiring = self.model, self._wiring
        _, first, space = np.unique(model.spaces[wiring.use_producers], return_index=True, return_inverse=True)
        values = wiring.value_ids[wiring.use_producers[first]].tolist()
        domains = index_array(model.domain(v).number for v in values)[space]
        links = np.stack(
            [model.representative[self._consumer], domains, model.port_weights[wiring.use_producers]], axis=1
        )
        links = np.hstack([self._repeated.links[:, 1:], links[self._repeated.order]])
        nodes = np.stack([model.representative, self._is_boundary], axis=1)
        classes: list[int] = intern_ids(self._by_layer(nodes, links)).tolist()
        return classes

    def _by_layer(self, nodes: Ids, links: Ids) -> Iterator[tuple[bytes, bytes]]:
        """Yields, layer by layer, rows about its nodes and about its uses, given in the order of ``RepeatedLayers``."""
        bounds = np.searchsorted(self._repeated.links[:, 0], np.arange(len(self.layers) + 1))
        for layer, row in enumerate(self.layers):
            yield nodes[row].tobytes(), links[bounds[layer] : bounds[layer + 1]].tobytes()

    def _find_boundary(self) -> NDArray[np.bool_]:
        """Returns per node whether it produces or consumes a value that leaves its layer."""
        found, leaves = np.zeros(self.count, dtype=np.bool_), np.zeros(self._wiring.node_of.size, dtype=np.bool_)
        leaves[self._wiring.use_producers[self.layer[self._producer] != self.layer[self._consumer]]] = True
        crossing = leaves[self._wiring.use_producers]
        found[self._producer[crossing]] = found[self._consumer[crossing]] = True
        return found

    def _node_prices(self) -> Ids:
        """Returns a number per node, the same for nodes that pay the same for memory; 0 for none."""
        found = np.zeros(self.count, dtype=np.intp)
        if paying := priced_nodes(self.model):
            found[paying] = 1 + intern_ids(memory_cost_key(self.model, n) for n in paying)
        return found

    def _use_prices(self) -> Ids:
        """Returns [uses, kinds of price] in the order of ``RepeatedLayers``: bits of floats, equal where prices are."""
        prices = self.model.prices
        again = {end: price for end, (price, _) in prices.path_copy_unless.items()}
        meanwhile = {end: price for price, end in prices.path_copy_unless.values()}
        columns = [
            self._prices_of_uses(each) for each in (prices.copy, prices.waiting, prices.path_copy, again, meanwhile)
        ]
        return np.stack(columns, axis=1)[self._repeated.order]

    def _prices_of_uses(self, prices: Mapping[End, float]) -> Ids:
        found = np.zeros(self._wiring.node_of.size)
        if prices:
            nodes, ports = np.array(list(prices), dtype=np.intp).T
            found[self._wiring.first_port[nodes] + ports] = list(prices.values())
        return found[self._wiring.uses].view(np.int64)


def _layer_weights(groups: list[list[int]], count: int, kept: int) -> Ids:
    """Returns per layer how many layers' cost it carries in the reduced step; 0 for those that it omits.

    Of a run of equal layers it keeps the first and the last ``kept``.
    """
    weights = np.ones(count, dtype=np.intp)
    for group in map(np.array, groups):
        for run in np.split(group, np.flatnonzero(np.diff(group) != 1) + 1):
            remaining = np.delete(run, np.s_[kept:-kept])
            weights[run] = 0
            weights[remaining] = np.bincount(np.arange(run.size) * remaining.size // run.size)
    return weights
