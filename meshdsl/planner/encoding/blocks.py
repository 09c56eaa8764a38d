"""Blocks of a problem: equal layers become one block with many copies, all other nodes one with a single copy.

Two layers are equal here if they are so in every respect that a network of them knows of: their nodes have the same
states, costs and prices, and their values go to the same nodes, of this layer, of one so many further on, or of none.
What is worked out for a block is then true of all its copies. Choices are not tied: every copy keeps its own variables.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.objective import payers, terms
from meshdsl.planner.problem.layers import RepeatedLayers
from meshdsl.planner.problem.model import Model
from meshdsl.util.arrays import Ids, array, group_by, intern_ids, unique_sorted

MANY = 8_000  # nodes from which on equal layers are looked for
FEW = 3  # equal layers in a row that the shorter step has at either end


class LayerBlock(NamedTuple):
    """Nodes, and the values that they make.

    Args:
      nodes: of the first copy. outside: nodes of other blocks, or of other copies, that read what these make.
      touched: those that make or read a value that goes from one layer to another, or to what is in no layer.
      layers: of the copies; -1 if this is what is in no equal layers.
      copies: [copies, nodes and outside].
    """

    nodes: list[int]
    outside: list[int]
    touched: frozenset[int]
    layers: Ids
    copies: Ids

    @property
    def names(self) -> list[int]:
        """The nodes, and those outside."""
        return [*self.nodes, *self.outside]


class LayerBlocks:
    """The blocks of a model at its present prices; one alone if equal layers are not looked for, or there are none.

    Where more than a few equal layers follow each other, a *shorter* step leaves out those in the middle.

    Args:
      apart: whether they are looked for.

    ``layers``, ``layer``, ``column``: as in ``RepeatedLayers``. ``before`` and ``after``: the last layer up to
    each, and the
    first one after it, of the shorter step. ``like``: per node, the one of that step that decides for it.
    """

    def __init__(self, model: Model, apart: bool) -> None:
        self.model, self.count = model, len(model.nodes)
        self._wiring = wiring = model.wiring
        self._equal = model.layers if apart and self.count >= MANY else RepeatedLayers.none(self.count, wiring)
        self.layers = self._equal.nodes
        self.layer, self.column = self._equal.layer, self._equal.column
        self._maker, self._reader = wiring.nodes[wiring.makers], wiring.nodes[wiring.read]
        self._touched = self._leaving()
        self._kinds = self._without_prices()  # per layer
        self._divide()

    def priced(self, model: Model) -> "LayerBlocks":
        """The same at the prices of a model that is this one's but for them."""
        other = copy(self)
        other.model = model
        other._divide()
        return other

    def _divide(self) -> None:
        """Into blocks, and say what the shorter step leaves out."""
        groups, layers = self._groups(), self.layers
        self._weights = _shared_out(groups, len(layers))
        self._stays = self._weights > 0
        left = np.append(np.flatnonzero(self._stays), len(layers))
        following = np.searchsorted(left, np.arange(len(layers)), side="right")
        self.before, self.after = left[following - 1], left[following]
        self.like = np.arange(self.count)
        self.like[layers] = layers[self.before]
        self.all = list(self._blocks(groups))

    def _blocks(self, groups: list[list[int]]) -> Iterator[LayerBlock]:
        """The block of what is in no equal layers, then theirs."""
        alone = np.ones(self.count, dtype=np.bool_)
        for group in groups:
            alone[self.layers[group]] = False
        yield self._block(np.flatnonzero(alone), alone, np.array([-1]))
        for group in groups:
            yield self._block(self.layers[group[0]], self.layer == group[0], np.array(group))

    def _block(self, nodes: Ids, inside: NDArray[np.bool_], group: Ids) -> LayerBlock:
        outside = unique_sorted(self._reader[inside[self._maker] & ~inside[self._reader]])
        names = np.concatenate([nodes, outside])
        touched = frozenset(names[self._touched[names]].tolist())
        return LayerBlock(nodes.tolist(), outside.tolist(), touched, group, self._copies(names, group))

    def _copies(self, names: Ids, group: Ids) -> Ids:
        """What nodes of the first layer of a group are in all of them."""
        copies, ahead = np.tile(names, (group.size, 1)), self.layer[names] >= 0
        there = self.layer[names[ahead]] - group[0] + group[:, None]
        copies[:, ahead] = self.layers[there, self.column[names[ahead]]]
        return copies

    def shorter(self, block: LayerBlock) -> tuple[Ids, Ids]:
        """The layers that the shorter step leaves of a block, and their copies, next to each other."""
        if block.layers[0] < 0:
            return block.layers, block.copies
        stays = self._stays[block.layers]
        layers, copies = block.layers[stays, None], block.copies[stays]
        there = self.layer[copies]
        gone = (there >= 0) & ~self._stays[there]
        near = np.where(there > layers, self.after[there], self.before[there])
        copies[gone] = self.layers[near[gone], self.column[copies[gone]]]
        return layers[:, 0], copies

    @property
    def shortens(self) -> bool:
        """Whether the shorter step leaves out any layers."""
        return not self._stays.all()

    def weighted(self, block: LayerBlock, weighs: bool) -> Iterator[tuple[int, Ids]]:
        """The copies of a block that the shorter step leaves, by how many layers' cost they bear if it ``weighs``."""
        layers, copies = self.shorter(block)
        weights = np.where((layers < 0) | (not weighs), 1, self._weights[layers])
        for weight in unique_sorted(weights).tolist():
            yield weight, copies[weights == weight]

    def _groups(self) -> list[list[int]]:
        """Equal layers, where there are several."""
        if not self.layers.size:
            return []
        equal = zip(self._kinds, self._by_layer(self._pays(), self._prices()), strict=True)
        return [group.tolist() for group in group_by(intern_ids(equal)) if group.size > 1]

    def _without_prices(self) -> list[int]:
        """A number for each layer, the same for those that are equal but for prices."""
        if not self.layers.size:
            return []
        model, wiring = self.model, self._wiring
        _, first, space = np.unique(model.spaces[wiring.makers], return_index=True, return_inverse=True)
        values = wiring.values[wiring.makers[first]].tolist()
        closures = array(model.closure(v).number for v in values)[space]
        links = np.stack([model.alike[self._reader], closures, model.often[wiring.makers]], axis=1)
        links = np.hstack([self._equal.links[:, 1:], links[self._equal.order]])
        kinds: list[int] = intern_ids(self._by_layer(np.stack([model.alike, self._touched], axis=1), links)).tolist()
        return kinds

    def _by_layer(self, nodes: Ids, links: Ids) -> Iterator[tuple[bytes, bytes]]:
        """What nodes are, and readings in the order of ``RepeatedLayers``, layer by layer."""
        bounds = np.searchsorted(self._equal.links[:, 0], np.arange(len(self.layers) + 1))
        for layer, row in enumerate(self.layers):
            yield nodes[row].tobytes(), links[bounds[layer] : bounds[layer + 1]].tobytes()

    def _leaving(self) -> NDArray[np.bool_]:
        """Whether nodes make or read a value that leaves its layer."""
        found, leaves = np.zeros(self.count, dtype=np.bool_), np.zeros(self._wiring.nodes.size, dtype=np.bool_)
        leaves[self._wiring.makers[self.layer[self._maker] != self.layer[self._reader]]] = True
        far = leaves[self._wiring.makers]
        found[self._maker[far]] = found[self._reader[far]] = True
        return found

    def _pays(self) -> Ids:
        """A number for what each node pays."""
        pays = np.zeros(self.count, dtype=np.intp)
        if paying := payers(self.model):
            pays[paying] = 1 + intern_ids(terms(self.model, n) for n in paying)
        return pays

    def _prices(self) -> Ids:
        """What readings pay, in the order of ``RepeatedLayers``."""
        prices = self.model.prices
        again = {end: price for end, (price, _) in prices.again.items()}
        meanwhile = {end: price for price, end in prices.again.values()}
        columns = [self._paid(each) for each in (prices.read, prices.later, prices.kept, again, meanwhile)]
        return np.stack(columns, axis=1)[self._equal.order]

    def _paid(self, prices: Mapping[tuple[int, int], float]) -> Ids:
        """Prices of readings, as whole numbers."""
        found = np.zeros(self._wiring.nodes.size)
        if prices:
            nodes, ports = np.array(list(prices), dtype=np.intp).T
            found[self._wiring.first[nodes] + ports] = list(prices.values())
        return found[self._wiring.read].view(np.int64)


def _shared_out(groups: list[list[int]], count: int) -> Ids:
    """Of how many layers each bears the cost in the shorter step; 0 for those that it leaves out.

    Of layers of one group that follow each other it has the first and the last few.
    """
    weights = np.ones(count, dtype=np.intp)
    for group in map(np.array, groups):
        for run in np.split(group, np.flatnonzero(np.diff(group) != 1) + 1):
            left = np.delete(run, np.s_[FEW:-FEW])
            weights[run] = 0
            weights[left] = np.bincount(np.arange(run.size) * left.size // run.size)
    return weights
