"""Lower bounds on the resharding cost of values with three or more consumers.

Where a value's exact trees (``steiner_variables``) are too large, it is relaxed. Every relaxation is a lower bound on
the cost of any tree to all consumers, and is chosen to be tight at the incumbent plan:

* **pairs**: a weighted mean over pairs of consumers, each pair exact on a hub of its own, since no tree to all
  consumers is cheaper than the tree to two of them. The mean over all pairs of m consumers counts only 2/m of a reshard
  that a single consumer needs. Which consumer that is, assignments show in which the mean was too low: then only the
  pairs that are most expensive there count.
* **max reader**: the cost of resharding to the most expensive consumer alone. It counts one consumer's reshard in
  full, whichever that is, but no second one.
* **first fork**: one hub, the first fork of the tree, and a part of every consumer's own reshard from there. The parts
  of any m - 1 of the m consumers add up to at most one: a fork has at least two branches, and each costs at least the
  reshard to any of its leaves. It serves values that matter little, or have too many consumers for pairs.

A value is *underpaid* in an assignment if its encoding counts less than the cost of its cheapest tree there. The next
network gives the most underpaid values larger exact trees, or weighs other pairs.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from meshdsl.planner.costs.steiner import steiner_tree
from meshdsl.planner.encoding.hubs import HubEncoder, HubTables
from meshdsl.planner.encoding.steiner_variables import (
    PortLayouts,
    ThreeConsumers,
    add_fork_variable,
    add_subset_variable,
    fork_entries,
    reachable_sets_of,
)
from meshdsl.planner.limits import SearchLimits
from meshdsl.planner.mrf.network import Network
from meshdsl.planner.objective import CostedPlan
from meshdsl.planner.problem.model import Assignment, Model
from meshdsl.planner.problem.ports import End
from meshdsl.util.arrays import Costs, Ids

Underpaid = Mapping[int, tuple[Assignment, ...]]  # by value, assignments in which a network counted too little for it
Pair = tuple[End, End]

# ---- Costs in a plan -------------------------------------------------------------------------------------------------
# What a value's reshards cost in an assignment, per iteration: exactly, and as each relaxation counts them. ``ends``
# are the producer, then the consumers.


def _layouts_in(model: Model, ends: Sequence[End], rows: Assignment) -> list[int]:
    return [int(model.layout_ids(n, p, rows[n])) for n, p in ends]


def tree_cost(model: Model, value: int, ends: Sequence[End], rows: Assignment) -> float:
    """Returns the cost of the cheapest tree to the given consumers."""
    own, *read = _layouts_in(model, ends, rows)
    domain, exact = model.domain(value), model.limits.costs_exact_targets
    return steiner_tree(domain.costs, domain.transit_costs, own, read, exact)[0]


def pairs_cost(model: Model, value: int, source: End, pairs: Mapping[Pair, float], rows: Assignment) -> float:
    """Returns the weighted mean over pairs of consumers."""
    return sum(weight * tree_cost(model, value, [source, *pair], rows) for pair, weight in pairs.items())


def max_reader_cost(model: Model, value: int, ends: Sequence[End], rows: Assignment) -> float:
    """Returns the cost of the most expensive consumer's reshard."""
    own, *read = _layouts_in(model, ends, rows)
    return float(model.domain(value).costs[own, read].max())


def first_fork_cost(model: Model, value: int, ends: Sequence[End], rows: Assignment, shares: Sequence[float]) -> float:
    """Returns the cost of the cheapest hub with the consumers' shares of the reshards from there."""
    own, *read = _layouts_in(model, ends, rows)
    domain = model.domain(value)
    onward = sum(domain.costs[:, layout] * share for layout, share in zip(read, shares, strict=True) if share)
    return float((domain.transit_costs[own] + onward).min())


# ---- Pairs and shares ------------------------------------------------------------------------------------------------


def weighted_pairs(
    model: Model, value: int, ends: Sequence[End], rows: Assignment, underpaid: Sequence[Assignment]
) -> dict[Pair, float]:
    """Returns pairs of consumers with weights that add up to one.

    These are pairs whose tree costs as much as that of all consumers in the plan ``rows``, or else all pairs.

    Args:
      underpaid: assignments in which pairs counted too little; each gives equal weight to those most expensive in it.
    """
    whole, every = tree_cost(model, value, ends, rows), list(combinations(ends[1:], 2))
    tight = [pair for pair in every if tree_cost(model, value, [ends[0], *pair], rows) >= whole]
    pairs = tight or every
    weights = dict.fromkeys(pairs, 0.0)
    for plan in underpaid or [rows]:
        costs = [tree_cost(model, value, [ends[0], *pair], plan) for pair in pairs]
        most = [pair for pair, cost in zip(pairs, costs, strict=True) if cost >= max(costs)]
        for pair in most:
            weights[pair] += 1 / len(most) / max(1, len(underpaid))
    return {pair: weight for pair, weight in weights.items() if weight}


def first_fork_shares(model: Model, ends: Sequence[End], rows: Assignment) -> tuple[float, ...]:
    """Returns the part of each consumer's own reshard that counts: more for those that reshard in the plan ``rows``."""
    own, *read = _layouts_in(model, ends, rows)
    moving = [layout != own for layout in read]
    if 0 < sum(moving) < len(read):
        return tuple(1 / sum(moving) if moves else 0.0 for moves in moving)
    return (1 / (len(read) - 1),) * len(read)


# ---- Max reader ------------------------------------------------------------------------------------------------------
# As an auxiliary variable: its states are an own layout with a cost level, and it takes one table per end. A level
# allows all layouts of a consumer whose reshard costs no more. Costs that differ by little are one level, at the least
# of them, and so are all that exceed what any better plan can spend.


def add_max_reader_bound(
    network: Network, tables: HubTables, value: int, ends: Sequence[PortLayouts], ceiling: float, most: int
) -> int:
    """Adds the cost of a value's most expensive reshard to a network.

    Args:
      ends: its producer, then its consumers.
      ceiling: cost from which on reshards are not distinguished.
      most: entries that the tables may have.

    Returns their entries; 0 if they would be more than ``most``, and nothing is added.
    """
    ratio = tables.model.limits.encoding_cost_level

    def make(own: Ids, *reads: Ids) -> tuple[Costs, ...]:
        made, costs = np.unique(own), [tables.moves(value, np.unique(own), read) for read in reads]
        at, least, up_to = _cost_levels(np.hstack(costs), ceiling, ratio)
        if at.size * (own.size + sum(read.size for read in reads)) > most:
            return (least,)
        source = made[at][:, None] == own[None]
        readers = [cost[at] <= up_to[:, None] for cost in costs]
        return least, *(np.where(allowed, 0.0, np.inf) for allowed in (source, *readers))

    key = ("max reader", tables.model.domain(value).number, tables.model.weight(value), ceiling, most)
    costs, *edges = network.memo.get(key, tuple(read for _, read in ends), make)
    if edges:
        hub = network.new_variable(costs, None, ends[0][0])
        for (node, _), table in zip(ends, edges, strict=True):
            network.add(hub, node, table)
    return sum(table.size for table in edges)


def _cost_levels(costs: Costs, ceiling: float, ratio: float) -> tuple[Ids, Costs, Costs]:
    """Groups the costs of each row whose ratio is small; returns per group its row, the least and the greatest cost."""
    capped = np.minimum(costs, ceiling)
    steps = np.floor(np.log(np.maximum(capped, 1.0)) / np.log(ratio)).astype(np.intp)
    count = int(steps.max(initial=0)) + 1
    groups, place = np.unique((np.arange(len(costs))[:, None] * count + steps).ravel(), return_inverse=True)
    least, up_to = np.full(groups.size, np.inf), np.zeros(groups.size)
    np.minimum.at(least, place, capped.ravel())
    np.maximum.at(up_to, place, costs.ravel())
    return groups // count, least, up_to


# ---- Encoder ---------------------------------------------------------------------------------------------------------


class TreeBudget:
    """Entries that exact trees may have: those of one value, and those of all underpaid values together.

    The budget is spent in the order in which values are added; when it is exhausted, underpaid values get what all
    others get.

    Args:
      each: entries for a value that is not underpaid.
    """

    def __init__(self, limits: SearchLimits, each: int, underpaid: Underpaid) -> None:
        self._limits, self._each, self._underpaid = limits, each, underpaid
        self._left = limits.encoding_tree_entries_total

    def entries(self, value: int, consumers: int) -> int:
        """Returns the entries for a value: more where pairs of consumers are too many, or have failed twice."""
        if value not in self._underpaid or self._left <= 0:
            return self._each
        limits = self._limits
        if consumers > limits.encoding_pair_consumers or len(self._underpaid[value]) > 1:
            return limits.encoding_tree_entries_most
        return max(self._each, limits.encoding_tree_entries)

    def spend(self, value: int, entries: int) -> None:
        """Notes the entries that a value has taken."""
        if value in self._underpaid:
            self._left -= entries


class FanoutEncoder:
    """Adds wide values to the network of bounds, and tells how much it undercounts them in an assignment.

    Args:
      hubs: the encoder of the same model.
    """

    def __init__(self, hubs: HubEncoder) -> None:
        self._hubs, self._model, self._limits = hubs, hubs.model, hubs.model.limits

    def add(
        self, network: Network, value: int, best: CostedPlan, budget: TreeBudget, underpaid: Sequence[Assignment]
    ) -> None:
        """Adds a wide value: its exact trees if the budget allows, and else a relaxation that is tight at ``best``.

        Args:
          underpaid: assignments in which an earlier relaxation counted too little.
        """
        if forks := self._fork_variable(value, best):
            add_fork_variable(network, self._hubs.tables, value, forks)
            return
        ends = self._ends(value)
        most = budget.entries(value, len(ends) - 1)
        size = add_subset_variable(network, self._hubs.tables, value, self._port_layouts(ends), most)
        budget.spend(value, size)
        if not size:
            self._add_relaxation(network, value, best, underpaid)

    def underpayment(
        self, value: int, rows: Assignment, best: CostedPlan, budget: TreeBudget, underpaid: Sequence[Assignment]
    ) -> float:
        """Returns by how much the encoding of ``add`` undercounts a wide value in the assignment ``rows``."""
        model, ends = self._model, self._ends(value)
        if self._fork_variable(value, best):
            return 0.0
        reads = [self._hubs.domains.layouts(end) for end in ends]
        if reachable_sets_of(self._hubs.memo, reads, budget.entries(value, len(ends) - 1), self._limits) is not None:
            return 0.0
        exact = tree_cost(model, value, ends, rows)
        if not exact:
            return 0.0
        if self._prefers_first_fork(value, best, underpaid):
            counted = first_fork_cost(model, value, ends, rows, first_fork_shares(model, ends, best.rows))
        elif self._prefers_max_reader(value, best, underpaid):
            counted = max_reader_cost(model, value, ends, rows)
        else:
            pairs = weighted_pairs(model, value, ends, best.rows, underpaid)
            counted = pairs_cost(model, value, ends[0], pairs, rows)
        return max(0.0, exact - counted) * model.weight(value)

    def is_minor(self, value: int, cost: float) -> bool:
        """Whether a value matters too little for more than one hub in a plan of that cost."""
        return self._hubs.stake(value) < self._limits.encoding_hub_stake * cost

    def _ends(self, value: int) -> Sequence[End]:
        return self._hubs.ends(value)

    def _port_layouts(self, ends: Sequence[End]) -> list[PortLayouts]:
        return [(n, self._hubs.domains.layouts((n, port))) for n, port in ends]

    def _fork_variable(self, value: int, best: CostedPlan) -> ThreeConsumers | None:
        """Returns the ends of a value that gets a fork variable: much is at stake for its copy stored for later."""
        ends, prices, domain = self._ends(value), self._model.prices.path_copy_unless, self._model.domain(value)
        later = next((end for end in ends[1:] if end in prices), None)
        if later is None or domain.partial.any():
            return None
        price, meanwhile = prices[later]
        before = next(end for end in ends[1:] if end not in (later, meanwhile))
        forks = ThreeConsumers(self._port_layouts((ends[0], before, meanwhile, later)), price)
        stake = float(self._model.scale.pack(np.asarray(price * domain.reshard.bytes)))
        is_worth = stake >= self._limits.encoding_hub_stake * best.cost
        return forks if is_worth and fork_entries(domain, forks) <= self._limits.encoding_tree_entries_most else None

    def _add_relaxation(self, network: Network, value: int, best: CostedPlan, underpaid: Sequence[Assignment]) -> None:
        model, ends, hubs = self._model, self._ends(value), self._hubs
        if self._prefers_first_fork(value, best, underpaid):
            shares = first_fork_shares(model, ends, best.rows)
            hubs.add_hub(network, value, dict(zip(ends[1:], shares, strict=True)))
            return
        if self._prefers_max_reader(value, best, underpaid):
            limits = self._limits
            ceiling, most = limits.encoding_max_reader_cost * best.cost, limits.encoding_tree_entries_most
            if add_max_reader_bound(network, hubs.tables, value, self._port_layouts(ends), ceiling, most):
                return
        for pair, weight in weighted_pairs(model, value, ends, best.rows, underpaid).items():
            hubs.add_hub(network, value, dict.fromkeys(pair, 1.0), weight)

    def _prefers_first_fork(self, value: int, best: CostedPlan, underpaid: Sequence[Assignment]) -> bool:
        """Whether a value has too many consumers for pairs, or matters little and has not been underpaid."""
        consumers = len(self._ends(value)) - 1
        return consumers > self._limits.encoding_pair_consumers or (not underpaid and self.is_minor(value, best.cost))

    def _prefers_max_reader(self, value: int, best: CostedPlan, underpaid: Sequence[Assignment]) -> bool:
        """Whether the most expensive consumer costs more than pairs do, over the assignments that matter."""
        if not underpaid:
            return False
        model, ends, plans = self._model, self._ends(value), (best.rows, *underpaid)
        pairs = weighted_pairs(model, value, ends, best.rows, underpaid)
        return sum(max_reader_cost(model, value, ends, rows) for rows in plans) > sum(
            pairs_cost(model, value, ends[0], pairs, rows) for rows in plans
        )
