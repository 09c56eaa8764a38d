"""The problem over the states of all mesh axes jointly, as a network of pairwise tables.

Every node is a variable, whose states are its joint signatures. A value with one reader is a table
between its two nodes. A value with more readers is moved along a tree (a tensor gathered for one
reader is free for the next): its forks become variables, *hubs*, whose states are layouts. With
two readers there is one fork, and that is exact. With more there are two networks:

* ``plans``: the readers hang on a chain of hubs in program order, or on one hub where little is at
  stake. That is a tree of moves, so its cost can be paid; trees of other shapes are found later,
  when a plan is evaluated.
* ``bounds``: where the layouts that readers may ask for are few, the exact trees of ``sets``. Else a
  weighted mean over pairs of readers, each with a hub: no tree for all readers is cheaper than the tree
  for two of them. Plans in which such a mean missed much say which pairs count (``pairs``), and that exact
  trees are worth larger tables; or that the moves to the dearest reader alone say more (``dearest``). Exact trees as
  well where memory that is priced keeps a copy for the last of three readers (``forks``). Where little is at stake, or
  the readers are very many, one hub, the first fork, and a part of every reader's own moves from there, where the parts
  of any m - 1 of the m readers add up to at most one (a fork has at least two branches, and each costs at least any of
  its ends).

Both begin without those values, as one network per block of equal layers (``blocks``), reduced as far as it goes; at
last the blocks are put together, as often as they occur.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from meshdsl.planner.encoding.blocks import LayerBlock, LayerBlocks
from meshdsl.planner.encoding.fanout import FanoutEncoder, Missed
from meshdsl.planner.encoding.hubs import FORK, Left
from meshdsl.planner.encoding.reduced_depth import Assembly
from meshdsl.planner.mrf.network import Memo, Network
from meshdsl.planner.objective import CostedPlan, payers
from meshdsl.planner.problem.model import Assignment, Model
from meshdsl.util.arrays import Ids

LARGEST = 1 << 17  # entries that one step of reduction may touch
_ROOM = 1 << 26  # entries of the exact trees of all values that are worth more, from which on no more are added
_MOST = 0.9  # of what values pay too little, for which they are worth more


class _Part(NamedTuple):
    """A block, its network, reduced, and its values of many readers, which are not in there."""

    block: LayerBlock
    network: Network
    wide: list[int]


class NetworkBuilder(FanoutEncoder):
    """Networks of a model at its present memory prices; variable n is node n, hubs come after.

    Prices are added last: networks at other prices (``priced``) have most of the work behind them.

    Args:
      left: nodes of which only some states are in question.
      stays: nodes that are not eliminated.
    """

    def __init__(self, model: Model, left: Left = MappingProxyType({}), stays: frozenset[int] = frozenset()) -> None:
        super().__init__(model, left)
        self._wide, self._stays = list(filter(self._is_wide, model.read_by(FORK))), stays
        self.beside = stays.union(n for v in self._wide for n, _ in self._ends(v))
        self._begin(Memo(), LayerBlocks(model, not left))

    def priced(self, model: Model) -> "NetworkBuilder":
        """The same at the memory prices of a model that is this one's but for them (``Model.at``)."""
        other = copy(self)
        other.model = model
        other._begin(self._derived, self._blocks.priced(model))
        return other

    def _begin(self, derived: Memo, blocks: LayerBlocks) -> None:
        """Draw the networks of all values but those of many readers, prices included, reduced."""
        self._derive(derived.copy())
        paying = frozenset(payers(self.model))
        self._blocks = blocks
        self._planned: list[tuple[LayerBlock, Network]] = []  # the parts of plans, when they are first asked for
        self._searched: dict[bool, Network] = {}
        self._parts = [self._part(block, paying) for block in self._blocks.all]

    def _part(self, block: LayerBlock, paying: frozenset[int]) -> _Part:
        model, derived = self.model, self._derived
        network = Network(derived, len(self.states))
        for n in block.nodes:
            cost, rows = self.states[n].cost, self.states[n].rows
            network.add_variable(n, derived.sum(cost, self._price(n)) if n in paying else cost, rows)
        for n in block.outside:
            nothing = derived.get("nothing", (self.states[n].cost,), np.zeros_like)
            network.add_variable(n, nothing, self.states[n].rows)
        values = [value for n in block.nodes for _, value in model.wiring.makes(n)]
        for value in values:
            self._add(network, value)
            self._add_prices(network, value)
        network.reduce(LARGEST, block.touched | self.beside)
        return _Part(block, network, list(filter(self._is_wide, values)))

    def plans(self) -> Network:
        """The network whose costs can be paid."""
        parts = list(self._complete(self._add_plans(), self._stays))
        network = Assembly(self._blocks, parts, self._derived).network
        network.reduce(LARGEST, self._stays)
        return network

    @property
    def shortened(self) -> bool:
        """Whether plans are searched on a step that leaves out equal layers."""
        return self._blocks.shortens

    def searched(self) -> tuple[Network, int]:
        """That of the shorter step if there is one (see ``stretched``), and entries of the whole one."""
        if not self._planned:
            self._planned = list(self._complete(self._add_plans()))
        if self.model.weighs not in self._searched:
            self._searched[self.model.weighs] = self._shorter_plans()
        return self._searched[self.model.weighs], sum(part.entries * len(block.copies) for block, part in self._planned)

    def _shorter_plans(self) -> Network:
        if len(self._parts) == 1:
            network = self._planned[0][1]
        else:
            network = Network(self._derived, len(self.states))
            for block, part in self._planned:
                for weight, copies in self._blocks.weighted(block, self.model.weighs):
                    network.add_replica(network.replicate(part.scaled(weight), block.names, copies))
        network.reduce(LARGEST)
        return network

    def stretched(self, chosen: Ids) -> Assignment:
        """The plan that a state of every variable of ``searched`` stands for: layers left out do as those before."""
        return self._assigned(chosen[self._blocks.like])

    def _add_plans(self) -> Callable[[Network, int], None]:
        """How values of many readers are added to the network of plans."""
        least = sum(float(states.cost.min()) * count for states, count in Counter(self.states).items())

        def add(network: Network, value: int) -> None:
            source, *readers = self._ends(value)
            if self._is_little(value, least):
                self._star(network, value, dict.fromkeys(readers, 1.0))
            else:
                self._chain(network, value, source, readers)

        return add

    def bounds(self, best: CostedPlan, trees: int = 0, missed: Missed = MappingProxyType({})) -> Assembly:
        """That whose minimum no plan can undercut, tightest around the plan ``best``.

        Args:
          trees: entries that the exact trees of one value may have; if any may, all nodes beside shared values stay.
          missed: per value that is worth more, plans in which such a network has let it cost too little.
        """

        room = _ROOM

        def add(network: Network, value: int) -> None:
            nonlocal room
            if self._forks(network, value, best):
                return
            size = self._sets(network, value, self._most(value, trees, missed if room > 0 else {}))
            room -= size if value in missed else 0
            if not size:
                self._relaxed(network, value, best, missed.get(value, ()))

        keep = self.beside if trees else frozenset[int]()
        whole = Assembly(self._blocks, list(self._complete(add, keep)), self._derived)
        if whole.shorter is None:
            whole.network.reduce(LARGEST, keep)
        return whole

    def _complete(
        self, add: Callable[[Network, int], None], keep: frozenset[int] = frozenset()
    ) -> Iterator[tuple[LayerBlock, Network]]:
        """The parts with the values of many readers."""
        for block, common, wide in self._parts:
            network = common.copy()
            for value in wide:
                add(network, value)
            network.reduce(LARGEST, block.touched | keep)
            yield block, network

    def missed(self, rows: Assignment, best: CostedPlan, trees: int, missed: Missed) -> Missed:
        """``missed`` and, with the plan ``rows``, the values that pay too little in it in ``bounds``: most of that."""
        paid = sorted(self._paid_too_little(rows, best, trees, missed), key=lambda each: -each[0])
        found, left = dict(missed), _MOST * sum(cost for cost, _, _ in paid)
        for cost, value, like in paid:
            if left > 0:
                found[value] = (*missed.get(value, ()), like)
            left -= cost
        return found

    def _paid_too_little(
        self, rows: Assignment, best: CostedPlan, trees: int, missed: Missed
    ) -> Iterator[tuple[float, int, Assignment]]:
        """What values pay too little, in all equal layers as in the one in the middle, which the plan is given for."""
        for block, _, wide in self._parts:
            copies, like = block.copies, rows.copy()
            like[copies[0]] = rows[copies[len(copies) // 2]]
            for value in wide:
                exact = self._forks(None, value, best) or self._has_sets(value, self._most(value, trees, missed))
                if not exact:
                    yield self._missing(value, like, best, missed.get(value, ())) * len(copies), value, like
