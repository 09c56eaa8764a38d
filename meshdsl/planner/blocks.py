"""Blocks of a problem: equal layers become one block with many copies, all other nodes one with a single copy.

Two layers are equal here if they are so in every respect that a network of them knows of: their nodes have the same
states, costs and prices, and their values go to the same nodes, of this layer, of one so many further on, or of none.
What is worked out for a block is then true of all its copies. Choices are not tied: every copy keeps its own variables.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.exact import Ids
from meshdsl.planner.layers import NO_LAYERS
from meshdsl.planner.model import Model
from meshdsl.planner.numbering import array, numbered
from meshdsl.planner.paying import payers, terms

MANY = 8_000  # nodes from which on equal layers are looked for


class Block(NamedTuple):
    """Nodes, and the values that they make.

    Args:
      nodes: of the first copy. outside: nodes of other blocks, or of other copies, that read what these make.
      touched: those that make or read a value that goes from one layer to another, or to what is in no layer.
      copies: [copies, nodes and outside].
    """

    nodes: list[int]
    outside: list[int]
    touched: frozenset[int]
    copies: Ids


def blocks_of(model: Model, apart: bool) -> list[Block]:
    """The blocks of a model at its present prices; one alone if equal layers are not looked for, or there are none.

    Args:
      apart: whether they are looked for.
    """
    blocks = _Blocks(model, model.layers if apart and len(model.nodes) >= MANY else NO_LAYERS)
    return list(blocks.all())


class _Blocks:
    def __init__(self, model: Model, layers: Ids) -> None:
        self.model, self.layers, self.count = model, layers, len(model.nodes)
        self.layer, self.column = np.full(self.count, -1), np.arange(self.count)
        self.layer[layers] = np.arange(len(layers))[:, None]
        self.column[layers] = np.arange(layers.shape[1])
        self.wiring = wiring = model.wiring
        self.maker, self.reader = wiring.nodes[wiring.makers], wiring.nodes[wiring.read]
        self.touched = self._touched()

    def all(self) -> Iterator[Block]:
        """The block of what is in no equal layers, then theirs."""
        groups, alone = self._groups(), np.ones(self.count, dtype=np.bool_)
        for group in groups:
            alone[self.layers[group]] = False
        yield self._block(np.flatnonzero(alone), alone, np.zeros(1, dtype=np.intp))
        for group in groups:
            yield self._block(self.layers[group[0]], self.layer == group[0], np.array(group))

    def _block(self, nodes: Ids, inside: NDArray[np.bool_], group: Ids) -> Block:
        reads = inside[self.maker] & ~inside[self.reader]
        outside = np.unique(self.reader[reads])
        copies = np.tile(np.concatenate([nodes, outside]), (group.size, 1))
        if group.size > 1:
            ahead = self.layer[copies[0]] >= 0
            there = self.layer[copies[0, ahead]] - group[0] + group[:, None]
            copies[:, ahead] = self.layers[there, self.column[copies[0, ahead]]]
        touched = frozenset(copies[0, self.touched[copies[0]]].tolist())
        return Block(nodes.tolist(), outside.tolist(), touched, copies)

    def _groups(self) -> list[list[int]]:
        """Equal layers, where there are several."""
        if not self.layers.size:
            return []
        nodes, links, groups = self._of_nodes(), self._of_links(), dict[bytes, list[int]]()
        bounds = np.searchsorted(links[:, 0], np.arange(len(self.layers) + 1))
        for layer, row in enumerate(self.layers):
            here = links[bounds[layer] : bounds[layer + 1], 1:]
            groups.setdefault(nodes[row].tobytes() + here.tobytes(), []).append(layer)
        return [group for group in groups.values() if len(group) > 1]

    def _touched(self) -> NDArray[np.bool_]:
        """Whether nodes make or read a value that leaves its layer."""
        found, leaves = np.zeros(self.count, dtype=np.bool_), np.zeros(self.wiring.nodes.size, dtype=np.bool_)
        leaves[self.wiring.makers[self.layer[self.maker] != self.layer[self.reader]]] = True
        far = leaves[self.wiring.makers]
        found[self.maker[far]] = found[self.reader[far]] = True
        return found

    def _of_nodes(self) -> Ids:
        """What a node must have in common with those of its column: tables, states, what it pays, who knows of it."""
        pays = np.zeros(self.count, dtype=np.intp)
        if paying := payers(self.model):
            pays[paying] = 1 + numbered(terms(self.model, n) for n in paying)
        return np.stack([self.model.twins, numbered(map(id, self.model.states)), pays, self.touched], axis=1)

    def _of_links(self) -> Ids:
        """Per reading of a value, the layer it is made in, and what it must have in common with those of others."""
        model, wiring, first = self.model, self.wiring, self.wiring.first
        values = wiring.values[wiring.makers].tolist()
        there = np.where(self.layer[self.reader] >= 0, self.layer[self.reader] - self.layer[self.maker], self.count)
        columns = [
            self.layer[self.maker],
            self.column[self.maker],
            wiring.makers - first[self.maker],
            there,
            self.column[self.reader],
            wiring.read - first[self.reader],
            array(model.closures[v].number for v in values),
            array(model.trips(v) for v in values),
            self._priced(model.prices.read),
            self._priced(model.prices.later),
        ]
        links = np.stack(columns, axis=1)
        return links[np.lexsort((*columns[2::-1],))]

    def _priced(self, prices: Mapping[tuple[int, int], float]) -> Ids:
        """Prices of readings, as whole numbers."""
        found = np.zeros(self.wiring.nodes.size)
        if prices:
            nodes, ports = np.array(list(prices), dtype=np.intp).T
            found[self.wiring.first[nodes] + ports] = list(prices.values())
        return found[self.wiring.read].view(np.int64)
