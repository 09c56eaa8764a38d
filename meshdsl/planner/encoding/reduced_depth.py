"""Bounds of a deep step from the messages of a shallow one: the same step with fewer repeated layers.

Messages converge within a few layers; those in between receive the same from both sides. So every half edge of the
whole network takes the message of its *counterpart* in the reduced network. These need not be the messages that would
be passed there, since any messages prove a bound; and variables that receive equal messages prove equal parts of it,
which are evaluated once (``kernels.bound_from_shared_messages``). Only where values skip a layer does the omission
change more than that; then messages are passed once over the whole network.

``Assembly`` puts the blocks of a step together: all copies as a network, and, if there are several blocks, those of the
reduced step as a ``ReducedDepth``.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.encoding.blocks import LayerBlock, LayerBlocks
from meshdsl.planner.limits import SearchLimits
from meshdsl.planner.mrf.network import UNDECIDED, EliminatedCopies, Memo, Network, Replica
from meshdsl.planner.mrf.trws import MessagePassing, Packed, half_edge_ends, pack
from meshdsl.util.arrays import Ids
from meshdsl.util.runtime import Deadline

if TYPE_CHECKING:
    from meshdsl.planner.mrf.kernels import FlatNetwork

_NONE = -1

# ---- Assembly --------------------------------------------------------------------------------------------------------


class Assembly:
    """All copies of the blocks of a step.

    Args:
      parts: the blocks with their networks.
    """

    def __init__(self, blocks: LayerBlocks, parts: Sequence[tuple[LayerBlock, Network]], memo: Memo) -> None:
        self._blocks, self._parts, self._all = blocks, parts, Network(memo, blocks.count)
        self._replicas = [self._all.replicate(part, block.names, block.copies) for block, part in parts]

    @cached_property
    def reduced(self) -> "ReducedDepth | None":
        """The copies in the reduced step; None if there is only one block."""
        if len(self._parts) == 1:
            return None
        found = ReducedDepth(self._blocks)
        for (block, part), replica in zip(self._parts, self._replicas, strict=True):
            found.add(block, part, replica)
        return found

    @property
    def entries(self) -> int:
        """Entries of all pairwise tables of all copies."""
        return sum(part.entries * len(block.copies) for block, part in self._parts)

    @cached_property
    def network(self) -> Network:
        """The network of all copies."""
        if len(self._parts) == 1:
            return self._parts[0][1]
        for replica in self._replicas:
            self._all.add_replica(replica)
        return self._all


# ---- Reduced depth ---------------------------------------------------------------------------------------------------


class ReducedDepth:
    """Replicas of the blocks in the reduced step, and the counterparts there of all variables of the whole step.

    Nodes keep their numbers. Every other variable belongs to a copy of a block; the whole network has numbered these in
    the order in which blocks were added.

    Attributes:
      replicas: by block.
    """

    def __init__(self, blocks: LayerBlocks) -> None:
        self.blocks, self.replicas, self._whole = blocks, list[Replica](), list[Replica]()
        self._all = Network(None, blocks.count)
        self._layer, self._column = [blocks.layer], [blocks.column]  # of all variables of the whole network
        self._messages: MessagePassing | None = None
        self._numbers: list[Ids] = []  # per block, [layers and no layer, columns]: numbers in the reduced network

    def add(self, block: LayerBlock, part: Network, whole: Replica) -> None:
        """Adds the remaining copies of a block.

        Args:
          part: its network.
          whole: all its copies in the whole network.
        """
        layers, copies = self.blocks.reduced_copies(block)
        replica = self._all.replicate(part, block.names, copies)
        self.replicas.append(replica)
        self._whole.append(whole)
        named, columns = copies.shape[1], replica.numbers.shape[1] - copies.shape[1]
        numbers = np.full((len(self.blocks.layers) + 1, columns), _NONE)
        numbers[layers] = replica.numbers[:, named:]
        first = sum(other.shape[1] for other in self._numbers)
        self._numbers.append(numbers)
        self._layer.append(np.repeat(block.layers, columns))
        self._column.append(np.tile(first + np.arange(columns), len(whole.numbers)))

    @property
    def entries(self) -> int:
        """Entries of all pairwise tables of the reduced step."""
        return sum(each.part.entries * len(each.numbers) for each in self.replicas)

    def bound(self, limit: float) -> float:
        """Passes messages over the reduced step, and returns the lower bound that they prove on the whole one.

        Args:
          limit: entries of tables are clipped at this cost.
        """
        from meshdsl.planner.encoding.kernels import bound_from_shared_messages  # imports the compiler

        entries = self._limits.mrf_float32_entries
        reduced, whole = pack(self.replicas, self._whole, limit=limit, float32_entries=entries)
        known = self._converge(reduced)
        counterparts = self._half_edge_counterparts(known, whole.flat, whole.order)
        if self._skips_layers(whole) or counterparts.min(initial=0) < 0:
            messages = MessagePassing(whole)
            _copy_messages(known, messages, counterparts)
            messages.run(1)
            return messages.bound
        return bound_from_shared_messages(whole, known, counterparts)

    def initialize(self, messages: MessagePassing, limit: float) -> None:
        """Starts the messages of the whole network, all of them still zero, from those of the reduced step."""
        known = self._messages or self._converge(pack(self.replicas, limit=limit)[0])
        _copy_messages(known, messages, self._half_edge_counterparts(known, messages.flat, messages.order))

    @property
    def decoded(self) -> Ids:
        """The states of all nodes that the messages decode to; omitted layers do as the last one before them."""
        assert self._messages is not None, "messages are passed first"
        most = max(int(replica.numbers.max(initial=_NONE)) for replica in self.replicas)
        chosen = np.full(1 + most, UNDECIDED)
        chosen[self._messages.order] = self._messages.decoded
        for part, variables, numbers in self.replicas:
            EliminatedCopies(part.eliminated, variables, numbers).decode(chosen)
        return np.asarray(chosen[self.blocks.representative])

    def counterparts(self, sources: Ids, targets: Ids) -> tuple[Ids, Ids]:
        """Returns the variables of the reduced step that correspond to both ends of half edges; -1 for none.

        An edge within a layer corresponds to that of the last kept layer before it, and an edge to a later layer to the
        one between that and the next kept layer.
        """
        previous, following = np.append(self.blocks.previous, _NONE), np.append(self.blocks.following, _NONE)
        layer, column = np.concatenate(self._layer), np.concatenate(self._column)
        mine, its = layer[sources], layer[targets]
        first = np.where((mine < 0) | (its < 0), np.maximum(mine, its), np.minimum(mine, its))
        kept = previous[first]

        def counterpart(variables: Ids, layers: Ids) -> Ids:
            at = np.where(layers == first, kept, following[kept])
            return self._numbers_at(variables, at, layers < 0, column[variables])

        return counterpart(sources, mine), counterpart(targets, its)

    def _numbers_at(self, variables: Ids, layers: Ids, outside: NDArray[np.bool_], columns: Ids) -> Ids:
        """Returns the numbers of variables in the given layers of the reduced step; those ``outside`` are in none."""
        is_node, exists = variables < self.blocks.count, outside | (layers < len(self.blocks.layers))
        found = np.where(is_node & outside, variables, _NONE)
        inside, others = is_node & exists & ~outside, ~is_node & exists
        found[inside] = self.blocks.layers[layers[inside], columns[inside]]
        found[others] = np.hstack(self._numbers)[np.where(outside, _NONE, layers)[others], columns[others]]
        return found

    def _half_edge_counterparts(self, known: MessagePassing, flat: "FlatNetwork", order: Ids) -> Ids:
        """Returns, per half edge of the whole network, its counterpart in the reduced one; -1 for none."""
        if not known.sent.size:
            return np.full(flat.to.size, _NONE)
        keys, wanted = _pair_keys(*known.ends), _pair_keys(*self.counterparts(*half_edge_ends(flat, order)))
        by_key = np.argsort(keys)
        half = by_key[np.minimum(np.searchsorted(keys[by_key], wanted), keys.size - 1)]
        sizes, its_sizes = np.diff(flat.start)[flat.to], np.diff(known.flat.start)[known.flat.to]
        same = (sizes == its_sizes[half]) & (sizes[flat.back] == its_sizes[known.flat.back[half]])
        found = np.where((keys[half] == wanted) & same, half, _NONE)
        ahead = flat.back > np.arange(flat.back.size)  # both halves of an edge must correspond to halves of one edge
        found[flat.back[ahead]] = np.where(found[ahead] >= 0, known.flat.back[found[ahead]], _NONE)
        return found

    def _skips_layers(self, whole: Packed) -> bool:
        """Whether any variables of layers that do not follow each other are neighbours, so that messages differ."""
        mine, its = (np.concatenate(self._layer)[ends] for ends in half_edge_ends(whole.flat, whole.order))
        return bool((np.abs(mine - its)[(mine >= 0) & (its >= 0)] > 1).any())

    def _converge(self, reduced: Packed) -> MessagePassing:
        """Passes messages over the reduced step until they converge, and keeps them."""
        self._messages = MessagePassing(reduced)
        _pass_until_converged(self._messages, self.blocks.model.deadline, self._limits)
        return self._messages

    @property
    def _limits(self) -> SearchLimits:
        return self.blocks.model.limits


def _pass_until_converged(messages: MessagePassing, clock: Deadline, limits: SearchLimits) -> None:
    """Passes messages until neither the decoded cost nor the bound changes, or too little for the work."""
    step = limits.encoding_depth_passes_step
    enough = max(limits.encoding_depth_passes, limits.encoding_depth_work // max(1, messages.entries))
    for passes in range(step, limits.encoding_depth_passes_most + 1, step):
        cost, lower = messages.cost, messages.lower
        messages.run(step)
        fell, rose = cost - messages.cost, messages.lower - lower
        least = limits.encoding_depth_converged * abs(messages.cost)
        if messages.gap <= limits.encoding_depth_converged or (fell <= least and rose <= least) or clock.expired():
            break
        if passes >= enough and rose <= limits.encoding_depth_rise * abs(messages.cost):
            break


def _copy_messages(known: MessagePassing, messages: MessagePassing, counterparts: Ids) -> None:
    """Copies messages to the half edges that have a counterpart; all messages must be zero before."""
    from meshdsl.planner.mrf import kernels

    has_one = counterparts >= 0
    half = counterparts[has_one]
    stops = np.append(known.flat.out, known.sent.size)[half + 1]
    kernels.add_ranges(known.sent, messages.sent, known.flat.out[half], stops, messages.flat.out[has_one])


def _pair_keys(sources: Ids, targets: Ids) -> Ids:
    """Returns one number per pair of variables."""
    return np.asarray((sources << 32) + targets)
