"""A shorter step: one with fewer equal layers, whose messages are those of the whole one, or nearly.

What messages say settles within a few layers; those in between hear the same from either side. So the half edges of
the whole network get the messages of those that they are like in the shorter one. They need not be right, for any
messages prove a bound; and what many variables hear alike, they prove alike: it is worked out once. Only where values
skip a layer is more than that changed by what is left out, and the messages are passed once over the whole network.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.encoding.blocks import LayerBlock, LayerBlocks
from meshdsl.planner.mrf.network import UNDECIDED, EliminatedCopies, Memo, Network, Replica
from meshdsl.planner.mrf.trws import MessagePassing, Packed, half_edge_ends, pack
from meshdsl.util.arrays import Ids
from meshdsl.util.runtime import Deadline

if TYPE_CHECKING:
    from meshdsl.planner.mrf.kernels import Flat


# ---- Shorter ---------------------------------------------------------------------------------------------------------


_AT_A_TIME, _LEAST, _MOST = 4, 16, 96  # passes over the shorter network ...
_WORK = 2_000_000_000  # ... and entries that they touch together, before the bound must rise for more of them ...
_RISES = 5e-4  # ... by this part of the plan's cost
_SETTLED = 1e-6  # part of its cost by which plan or bound must change in any case
_NONE = -1


class ReducedDepth:
    """Fewer copies of equal layers, ``stamps``, and which of their variables those of the whole network are like.

    Nodes go by their numbers. All other variables are of a copy of a block: the whole network has numbered them in the
    order in which blocks were added.
    """

    def __init__(self, blocks: LayerBlocks) -> None:
        self.blocks, self.stamps, self._whole = blocks, list[Replica](), list[Replica]()
        self._all = Network(None, blocks.count)
        self._layer, self._column = [blocks.layer], [blocks.column]
        self._known: MessagePassing | None = None
        self._here: list[Ids] = []  # [layers and none, columns]: numbers in the shorter network

    def add(self, block: LayerBlock, part: Network, whole: Replica) -> None:
        """Add the copies of a block that are left.

        Args:
          part: its network. whole: all its copies in the whole network.
        """
        layers, copies = self.blocks.shorter(block)
        stamp = self._all.replicate(part, block.names, copies)
        self.stamps.append(stamp)
        self._whole.append(whole)
        named, columns = copies.shape[1], stamp.numbers.shape[1] - copies.shape[1]
        here = np.full((len(self.blocks.layers) + 1, columns), _NONE)
        here[layers] = stamp.numbers[:, named:]
        first = sum(other.shape[1] for other in self._here)
        self._here.append(here)
        self._layer.append(np.repeat(block.layers, columns))
        self._column.append(np.tile(first + np.arange(columns), len(whole.numbers)))

    @property
    def entries(self) -> int:
        """Entries of all tables."""
        return sum(stamp.part.entries * len(stamp.numbers) for stamp in self.stamps)

    def bound(self, limit: float) -> float:
        """What no states of all copies undercut by the messages of these, which are passed first.

        Args:
          limit: of entries of tables.
        """
        from meshdsl.planner.encoding.kernels import (
            bound_from_shared_messages,  # with its compiler, too much for those who plan nothing
        )

        few, every = pack(self.stamps, self._whole, limit=limit, float32_entries=1 << 20)
        known = self._settle(few)
        like = _like(known, every.flat, every.order, self)
        if self._reaches_far(every) or like.min(initial=0) < 0:
            messages = MessagePassing(every)
            _take(messages, known, like)
            messages.run(1)
            return messages.bound
        return bound_from_shared_messages(every, known, like)

    def _reaches_far(self, every: Packed) -> bool:
        """Whether variables of layers are neighbours that do not follow each other: what they hear differs then."""
        mine, its = (np.concatenate(self._layer)[ends] for ends in half_edge_ends(every.flat, every.order))
        return bool((np.abs(mine - its)[(mine >= 0) & (its >= 0)] > 1).any())

    def begin(self, messages: MessagePassing, limit: float) -> None:
        """Begin the messages of the whole network, which are none yet, with those of these copies."""
        known = self._known or self._settle(pack(self.stamps, limit=limit)[0])
        _take(messages, known, _like(known, messages.flat, messages.order, self))

    @property
    def states(self) -> Ids:
        """What messages between these copies point to, for all nodes; those left out do as the last one before them."""
        assert self._known is not None, "messages are passed first"
        most = max(int(stamp.numbers.max(initial=_NONE)) for stamp in self.stamps)
        chosen = np.full(1 + most, UNDECIDED)
        chosen[self._known.order] = self._known.decoded
        for part, variables, numbers in self.stamps:
            EliminatedCopies(part.eliminated, variables, numbers).decode(chosen)
        return np.asarray(chosen[self.blocks.like])

    def _settle(self, few: Packed) -> MessagePassing:
        """Messages between these copies, passed until they say no more; kept for the next time."""
        self._known = MessagePassing(few)
        _pass_on(self._known, self.blocks.model.clock)
        return self._known

    def like(self, sources: Ids, targets: Ids) -> tuple[Ids, Ids]:
        """The ends of the half edges that those of the whole network are like; -1 where there is none."""
        before, after = np.append(self.blocks.before, _NONE), np.append(self.blocks.after, _NONE)
        layer, column = np.concatenate(self._layer), np.concatenate(self._column)
        mine, its = layer[sources], layer[targets]
        first = np.where((mine < 0) | (its < 0), np.maximum(mine, its), np.minimum(mine, its))
        near = before[first]

        def of(variables: Ids, layers: Ids) -> Ids:
            return self._named(variables, np.where(layers == first, near, after[near]), layers < 0, column[variables])

        return of(sources, mine), of(targets, its)

    def _named(self, variables: Ids, layers: Ids, outside: NDArray[np.bool_], columns: Ids) -> Ids:
        """What variables are called in these layers; those in no layer are ``outside``."""
        nodes, known = variables < self.blocks.count, outside | (layers < len(self.blocks.layers))
        found = np.where(nodes & outside, variables, _NONE)
        inside, rest = nodes & known & ~outside, ~nodes & known
        found[inside] = self.blocks.layers[layers[inside], columns[inside]]
        found[rest] = np.hstack(self._here)[np.where(outside, _NONE, layers)[rest], columns[rest]]
        return found


def _pass_on(messages: MessagePassing, clock: Deadline) -> None:
    """Pass messages until neither the plan that they point to nor the bound changes, or too little for their work."""
    enough = max(_LEAST, _WORK // max(1, messages.entries))
    for passes in range(_AT_A_TIME, _MOST + 1, _AT_A_TIME):
        before = messages.cost, messages.lower
        messages.run(_AT_A_TIME)
        fell, rose = before[0] - messages.cost, messages.lower - before[1]
        least = _SETTLED * abs(messages.cost)
        if messages.gap <= _SETTLED or (fell <= least and rose <= least) or clock.is_up():
            break
        if passes >= enough and rose <= _RISES * abs(messages.cost):
            break


def _take(messages: MessagePassing, known: MessagePassing, like: Ids) -> None:
    """Take over the messages of half edges that are like those of the shorter network; there are none before."""
    from meshdsl.planner.mrf import kernels

    alike = like >= 0
    half = like[alike]
    stops = np.append(known.flat.out, known.sent.size)[half + 1]
    kernels.add_ranges(known.sent, messages.sent, known.flat.out[half], stops, messages.flat.out[alike])


def _like(known: MessagePassing, flat: "Flat", order: Ids, shorter: ReducedDepth) -> Ids:
    """Per half edge of the whole network, the one of the shorter network that it is like; -1 where there is none."""
    if not known.sent.size:
        return np.full(flat.to.size, _NONE)
    ends, others = _joined(*known.ends), _joined(*shorter.like(*half_edge_ends(flat, order)))
    by_end = np.argsort(ends)
    half = by_end[np.minimum(np.searchsorted(ends[by_end], others), ends.size - 1)]
    sizes, small = np.diff(flat.start)[flat.to], np.diff(known.flat.start)[known.flat.to]
    fits = (sizes == small[half]) & (sizes[flat.back] == small[known.flat.back[half]])
    found = np.where((ends[half] == others) & fits, half, _NONE)
    ahead = flat.back > np.arange(flat.back.size)  # both halves of an edge are like those of one
    found[flat.back[ahead]] = np.where(found[ahead] >= 0, known.flat.back[found[ahead]], _NONE)
    return found


def _joined(sources: Ids, targets: Ids) -> Ids:
    """One number per half edge."""
    return np.asarray((sources << 32) + targets)


# ---- Whole -----------------------------------------------------------------------------------------------------------
# The blocks of a step put together, each as often as it occurs.


class Assembly:
    """All copies of blocks; those that a shorter step leaves, if there are several blocks.

    Args:
      parts: the blocks and their networks.
    """

    def __init__(self, blocks: LayerBlocks, parts: Sequence[tuple[LayerBlock, Network]], derived: Memo) -> None:
        self._blocks, self._parts, self._all = blocks, parts, Network(derived, blocks.count)
        self._stamps = [self._all.replicate(part, block.names, block.copies) for block, part in parts]

    @cached_property
    def shorter(self) -> ReducedDepth | None:
        """The copies that a shorter step leaves."""
        if len(self._parts) == 1:
            return None
        found = ReducedDepth(self._blocks)
        for (block, part), stamp in zip(self._parts, self._stamps, strict=True):
            found.add(block, part, stamp)
        return found

    @property
    def entries(self) -> int:
        """Entries of all tables."""
        return sum(part.entries * len(block.copies) for block, part in self._parts)

    @cached_property
    def network(self) -> Network:
        """As a network of all variables."""
        if len(self._parts) == 1:
            return self._parts[0][1]
        for stamp in self._stamps:
            self._all.add_replica(stamp)
        return self._all
