"""The blocks of a step put together, each as often as it occurs."""

from collections.abc import Sequence
from functools import cached_property

from meshdsl.planner.blocks import Block, Blocks
from meshdsl.planner.derived import Derived
from meshdsl.planner.network import Network
from meshdsl.planner.shorter import Shorter


class Whole:
    """All copies of blocks; those that a shorter step leaves, if there are several blocks.

    Args:
      parts: the blocks and their networks.
    """

    def __init__(self, blocks: Blocks, parts: Sequence[tuple[Block, Network]], derived: Derived) -> None:
        self._blocks, self._parts, self._all = blocks, parts, Network(derived, blocks.count)
        self._stamps = [self._all.numbered(part, block.names, block.copies) for block, part in parts]

    @cached_property
    def shorter(self) -> Shorter | None:
        """The copies that a shorter step leaves."""
        if len(self._parts) == 1:
            return None
        found = Shorter(self._blocks)
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
            self._all.stamp(stamp)
        return self._all
