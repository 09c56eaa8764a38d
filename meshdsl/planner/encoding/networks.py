"""The two networks of a model: ``plans``, whose costs a plan can attain, and ``bounds``, which no plan can undercut.

They differ in *wide* values, with three or more consumers (``hubs`` encodes all others exactly):

* ``plans``: the consumers hang on a chain of hubs in program order, or on one hub where little is at stake. That is a
  particular resharding tree, so its cost can be attained; trees of other shapes are found later, when a plan is
  evaluated.
* ``bounds``: exact trees where they are small enough (``steiner_variables``), and else a relaxation (``fanout``).

Both start without the wide values, as one network per block of repeated layers (``blocks``), reduced as far as
possible. Then wide values are added to each, and the blocks are put together, as often as they occur
(``reduced_depth``).

Components: ``Domains`` -> ``HubEncoder`` -> ``FanoutEncoder``, each given to the next; ``NetworkBuilder`` owns them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from meshdsl.planner.encoding.blocks import LayerBlock, LayerBlocks
from meshdsl.planner.encoding.fanout import FanoutEncoder, TreeBudget, Underpaid
from meshdsl.planner.encoding.hubs import FORK, Domains, HubEncoder, Remaining
from meshdsl.planner.encoding.reduced_depth import Assembly
from meshdsl.planner.mrf.network import Memo, Network
from meshdsl.planner.objective import CostedPlan, priced_nodes
from meshdsl.planner.problem.model import Assignment, Model
from meshdsl.util.arrays import Ids


class _Part(NamedTuple):
    """A block, its reduced network, and its wide values, which are not in there."""

    block: LayerBlock
    network: Network
    wide: list[int]


class NetworkBuilder:
    """Networks of a model at its present memory prices; variable n is node n, hubs come after the nodes.

    Prices are added last: networks at other prices (``priced``) share most of the work.

    Args:
      remaining: nodes of which only some states remain.
      keep: nodes that are never eliminated.

    Attributes:
      domains: the states of the nodes.
      kept_with_trees: nodes that stay in ``bounds`` where any exact trees are allowed: those of ``keep``, and all that
        produce or consume a wide value.
    """

    def __init__(
        self, model: Model, remaining: Remaining = MappingProxyType({}), keep: frozenset[int] = frozenset()
    ) -> None:
        self._keep = keep
        self._encode(model, Domains(model, remaining), LayerBlocks(model, not remaining), Memo())
        wide = filter(self._hubs.is_wide, model.widely_used(FORK))
        self.kept_with_trees = keep.union(n for v in wide for n, _ in self._hubs.ends(v))
        self._reduce_parts()

    def priced(self, model: Model) -> "NetworkBuilder":
        """Returns a builder at the memory prices of ``model``, which must be a view of this one's (``Model.at``)."""
        other = copy(self)
        other._encode(model, self.domains.at(model), self._blocks.priced(model), self._memo.copy())
        other._reduce_parts()
        return other

    def _encode(self, model: Model, domains: Domains, blocks: LayerBlocks, memo: Memo) -> None:
        self.model, self.domains, self._blocks, self._memo = model, domains, blocks, memo
        self._hubs = HubEncoder(model, domains, memo)
        self._fanout = FanoutEncoder(self._hubs)
        self._planned: list[tuple[LayerBlock, Network]] = []  # blocks of ``plans``, once they are asked for
        self._reduced: dict[bool, Network] = {}  # ``reduced_plans`` by ``weigh_layers``

    def _reduce_parts(self) -> None:
        """Encodes all nodes and all values but the wide ones, block by block, and reduces these networks."""
        model, hubs, paying = self.model, self._hubs, frozenset(priced_nodes(self.model))
        self._parts: list[_Part] = []
        for block in self._blocks.blocks:
            network = Network(self._memo, len(self.domains.states))
            for n in block.nodes:
                hubs.add_node(network, n, n in paying)
            for n in block.outside:
                hubs.add_outside_node(network, n)
            values = [value for n in block.nodes for _, value in model.wiring.defined_values(n)]
            for value in values:
                hubs.add_value(network, value)
            network.reduce(self._largest, block.boundary | self.kept_with_trees)
            self._parts.append(_Part(block, network, list(filter(hubs.is_wide, values))))

    @property
    def _largest(self) -> int:
        return self.model.limits.encoding_reduction_entries

    def _with_wide_values(
        self, add: Callable[[Network, int], None], keep: frozenset[int]
    ) -> Iterator[tuple[LayerBlock, Network]]:
        """Yields the blocks with their wide values added, reduced."""
        for block, common, wide in self._parts:
            network = common.copy()
            for value in wide:
                add(network, value)
            network.reduce(self._largest, block.boundary | keep)
            yield block, network

    # ---- plans

    def plans(self) -> Network:
        """Returns the network whose costs can be attained."""
        parts = list(self._with_wide_values(self._add_to_plans, self._keep))
        network = Assembly(self._blocks, parts, self._memo).network
        network.reduce(self._largest, self._keep)
        return network

    def _add_to_plans(self, network: Network, value: int) -> None:
        if self._fanout.is_minor(value, self._least_node_cost):
            self._hubs.add_hub(network, value, dict.fromkeys(self._hubs.ends(value)[1:], 1.0))
        else:
            self._hubs.add_chain(network, value)

    @cached_property
    def _least_node_cost(self) -> float:
        """What all nodes cost at least, without any reshards."""
        return sum(float(states.cost.min()) * count for states, count in Counter(self.domains.states).items())

    @property
    def drops_layers(self) -> bool:
        """Whether ``reduced_plans`` omits repeated layers."""
        return self._blocks.drops_layers

    @property
    def plan_entries(self) -> int:
        """Entries of the pairwise tables of ``plans``, all layers included."""
        return sum(part.entries * len(block.copies) for block, part in self._plan_parts())

    def reduced_plans(self, weigh_layers: bool) -> Network:
        """Returns the network of plans of the reduced step; that of the whole step if no layers are repeated.

        Args:
          weigh_layers: whether layers of the reduced step cost as much as all layers that they represent together.
        """
        if weigh_layers not in self._reduced:
            parts = self._plan_parts()
            network = parts[0][1]
            if len(parts) > 1:
                network = Network(self._memo, len(self.domains.states))
                for block, part in parts:
                    for weight, copies in self._blocks.weighted_copies(block, weigh_layers):
                        network.add_replica(network.replicate(part.scaled(weight), block.names, copies))
                network.reduce(self._largest)
            self._reduced[weigh_layers] = network
        return self._reduced[weigh_layers]

    def whole_plan(self, chosen: Ids) -> Assignment:
        """Returns the plan of a state of ``reduced_plans``: omitted layers do as the last one before them."""
        return self.domains.rows(chosen[self._blocks.representative])

    def _plan_parts(self) -> list[tuple[LayerBlock, Network]]:
        if not self._planned:
            self._planned = list(self._with_wide_values(self._add_to_plans, frozenset()))
            if len(self._planned) == 1:  # there is nothing to put together
                self._planned[0][1].reduce(self._largest)
        return self._planned

    # ---- bounds

    def bounds(self, best: CostedPlan, trees: int = 0, underpaid: Underpaid = MappingProxyType({})) -> Assembly:
        """Returns the network whose minimum no plan can undercut, tight around the plan ``best``.

        Args:
          trees: entries that the exact trees of one value may have; if any, the nodes ``kept_with_trees`` stay.
          underpaid: values that get larger trees, with the assignments in which such a network counted too little.
        """
        budget = TreeBudget(self.model.limits, trees, underpaid)

        def add(network: Network, value: int) -> None:
            self._fanout.add(network, value, best, budget, underpaid.get(value, ()))

        keep = self.kept_with_trees if trees else frozenset[int]()
        assembly = Assembly(self._blocks, list(self._with_wide_values(add, keep)), self._memo)
        if assembly.reduced is None:
            assembly.network.reduce(self._largest, keep)
        return assembly

    def underpaid(self, rows: Assignment, best: CostedPlan, trees: int, underpaid: Underpaid) -> Underpaid:
        """Returns ``underpaid`` extended by the values that ``bounds`` undercounts most in the assignment ``rows``.

        All copies of a block are taken to do as the one in the middle.
        """
        found, budget = list[tuple[float, int, Assignment]](), TreeBudget(self.model.limits, trees, underpaid)
        for block, _, wide in self._parts:
            copies, like_middle = block.copies, rows.copy()
            like_middle[copies[0]] = rows[copies[len(copies) // 2]]
            for value in wide:
                cost = self._fanout.underpayment(value, like_middle, best, budget, underpaid.get(value, ()))
                found.append((cost * len(copies), value, like_middle))
        found.sort(key=lambda each: -each[0])
        extended, rest = dict(underpaid), self.model.limits.encoding_underpaid_share * sum(cost for cost, _, _ in found)
        for cost, value, assignment in found:
            if rest > 0:
                extended[value] = (*underpaid.get(value, ()), assignment)
            rest -= cost
        return extended
