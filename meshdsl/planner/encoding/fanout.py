"""How values of many readers are drawn in networks that bound, and how much they pay too little there."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from meshdsl.planner.costs.steiner import tree
from meshdsl.planner.encoding.hubs import HubEncoder, HubTables
from meshdsl.planner.encoding.steiner_variables import (
    ThreeConsumers,
    add_fork_variables,
    add_subset_variables,
    asked_for_by,
    entries,
)
from meshdsl.planner.mrf.network import Network
from meshdsl.planner.objective import CostedPlan
from meshdsl.planner.problem.model import Assignment, Model
from meshdsl.planner.problem.ports import End
from meshdsl.util.arrays import Costs, Ids

# ---- Dearest ---------------------------------------------------------------------------------------------------------
# A bound on what the moves of a value of many readers cost: as much as those to the dearest of its readers.
#
# Where the layouts that readers may ask for are too many for exact trees (``sets``), a mean over pairs of readers
# counts a move that one of them needs in part only. This one counts it whole, whoever that is, but no second one. As a
# variable whose states are an own layout and the most that moves from there to a reader cost it is a pair of tables
# with each end. What costs nearly the same is one state, at the least of that; and so is all that no better plan can
# spend.


_NEARLY = 1.01  # times a cost is nearly the same


def add_max_reader_bound(
    network: Network, stars: HubTables, value: int, ends: Sequence[tuple[int, Ids]], spent: float, most: int
) -> int:
    """Entries of the tables of a value's dearest moves, which are added to a network; 0 if they are more than ``most``.

    Args:
      ends: where the value is made, then its readers.
      spent: cost from which on moves are not told apart.
    """

    def make(own: Ids, *reads: Ids) -> tuple[Costs, ...]:
        return _tables(stars, value, own, reads, spent, most)

    how = ("dearest", stars.model.closure(value).number, stars.model.trips(value), spent, most)
    costs, *tables = network.memo.get(how, tuple(read for _, read in ends), make)
    if tables:
        hub = network.new_variable(costs, None, ends[0][0])
        for (node, _), table in zip(ends, tables, strict=True):
            network.add(hub, node, table)
    return sum(table.size for table in tables)


def _tables(stars: HubTables, value: int, own: Ids, reads: Sequence[Ids], spent: float, most: int) -> tuple[Costs, ...]:
    """What states cost, and with the states of each end, if these are few enough."""
    made, costs = np.unique(own), [stars.moves(value, np.unique(own), read) for read in reads]
    at, least, up_to = _in_steps(np.hstack(costs), spent)
    if at.size * (own.size + sum(read.size for read in reads)) > most:
        return (least,)
    source = made[at][:, None] == own[None]
    readers = [cost[at] <= up_to[:, None] for cost in costs]
    return least, *(np.where(holds, 0.0, np.inf) for holds in (source, *readers))


def _in_steps(costs: Costs, spent: float) -> tuple[Ids, Costs, Costs]:
    """Rows of costs, and of what is nearly the same in one of them, the least and the most."""
    capped = np.minimum(costs, spent)
    steps = np.floor(np.log(np.maximum(capped, 1.0)) / np.log(_NEARLY)).astype(np.intp)
    count = int(steps.max(initial=0)) + 1
    kinds, place = np.unique((np.arange(len(costs))[:, None] * count + steps).ravel(), return_inverse=True)
    least, up_to = np.full(kinds.size, np.inf), np.zeros(kinds.size)
    np.minimum.at(least, place, capped.ravel())
    np.maximum.at(up_to, place, costs.ravel())
    return kinds // count, least, up_to


# ---- Pairs -----------------------------------------------------------------------------------------------------------
# Which readers of a value the bound looks at, so that it is tight around a plan (see ``joint``).
#
# The mean over all pairs of m readers knows two m-ths of a move that one reader alone needs. Which reader that is,
# plans say in which the mean was too low: pairs with that reader then count, and others do not.


def weighted_pairs(
    model: Model, value: int, ends: Sequence[End], rows: Assignment, missed: Sequence[Assignment]
) -> dict[tuple[End, End], float]:
    """Pairs of readers whose tree costs as much as everyone's in the plan ``rows``, or all, with parts of one.

    Args:
      ends: where the value is made, then its readers.
      missed: plans in which the pairs cost too little; each gives as much to those that cost most in it.
    """
    pairs = _tight(model, value, ends, rows)
    weights = dict.fromkeys(pairs, 0.0)
    for plan in missed or [rows]:
        costs = [tree_cost(model, value, [ends[0], *pair], plan) for pair in pairs]
        most = [pair for pair, cost in zip(pairs, costs, strict=True) if cost >= max(costs)]
        for pair in most:
            weights[pair] += 1 / len(most) / max(1, len(missed))
    return {pair: weight for pair, weight in weights.items() if weight}


def _tight(model: Model, value: int, ends: Sequence[End], rows: Assignment) -> list[tuple[End, End]]:
    pairs, whole = list(combinations(ends[1:], 2)), tree_cost(model, value, ends, rows)
    return [pair for pair in pairs if tree_cost(model, value, [ends[0], *pair], rows) >= whole] or pairs


def tree_cost(model: Model, value: int, ends: Sequence[End], rows: Assignment) -> float:
    """What the moves of a value to some of its readers cost in a plan, once."""
    own, *read = (int(model.layout_ids(n, p, rows[n])) for n, p in ends)
    return tree(model.closure(value).costs, model.closure(value).inner, own, read)[0]


def pairs_cost(model: Model, value: int, source: End, pairs: dict[tuple[End, End], float], rows: Assignment) -> float:
    """What the moves of a value cost at least in a plan, once, as a mean over pairs of readers."""
    return sum(weight * tree_cost(model, value, [source, *pair], rows) for pair, weight in pairs.items())


def dearest_cost(model: Model, value: int, ends: Sequence[End], rows: Assignment) -> float:
    """What the moves of a value cost at least in a plan, once, if those to one reader count."""
    own, *read = (int(model.layout_ids(n, p, rows[n])) for n, p in ends)
    return float(model.closure(value).costs[own, read].max())


def hub_cost(model: Model, value: int, ends: Sequence[End], rows: Assignment, shares: Sequence[float]) -> float:
    """What the moves of a value cost at least in a plan, once, if they fork at one hub and shares of the rest count."""
    own, *read = (int(model.layout_ids(n, p, rows[n])) for n, p in ends)
    closure = model.closure(value)
    onward = sum(closure.costs[:, layout] * share for layout, share in zip(read, shares, strict=True) if share)
    return float((closure.inner[own] + onward).min())


def parts(model: Model, ends: Sequence[End], rows: Assignment) -> tuple[float, ...]:
    """The part of each reader's own moves that counts: more for those that move in the plan ``rows``."""
    own, *read = (int(model.layout_ids(n, p, rows[n])) for n, p in ends)
    moving = [layout != own for layout in read]
    if 0 < sum(moving) < len(read):
        return tuple(1 / sum(moving) if moves else 0.0 for moves in moving)
    return (1 / (len(read) - 1),) * len(read)


# ---- Many ------------------------------------------------------------------------------------------------------------


_MANY = 6  # readers beyond which pairs are too many
_LARGER, _MORE = 1 << 18, 1 << 23  # entries of the exact trees of a value that is worth more
_SPENT = 2e-2  # part of a plan's cost from which on moves of a value are not told apart, if its dearest ones count
_STAKE = 1e-3  # part of a plan's cost above which a value is worth more than one hub
Missed = Mapping[int, Sequence[Assignment]]


class FanoutEncoder(HubEncoder):
    """Draws such values; ``best`` is a plan around which that is tight, ``missed`` are others in which it was not."""

    def _forks(self, network: Network | None, value: int, best: CostedPlan) -> bool:
        """Whether a value has exact trees of three readers, for much is paid for what is kept of it; they are added."""
        ends, again, closure = self._ends(value), self.model.prices.again, self.model.closure(value)
        later = next((end for end in ends[1:] if end in again), None)
        if later is None or closure.partial.any():
            return False
        price, meanwhile = again[later]
        before = next(end for end in ends[1:] if end not in (later, meanwhile))
        made, first, second, third = [(n, self.read((n, port))) for n, port in (ends[0], before, meanwhile, later)]
        readers = ThreeConsumers(made, first, second, third, price)
        paid = float(self.model.scale.pack(np.asarray(price * closure.distances.bytes)))
        worth = paid >= _STAKE * best.cost and entries(self._stars, value, readers) <= _MORE
        if worth and network:
            add_fork_variables(network, self._stars, value, readers)
        return worth

    def _relaxed(self, network: Network, value: int, best: CostedPlan, missed: Sequence[Assignment]) -> None:
        ends = self._ends(value)
        if self._on_a_hub(value, best, missed):
            shares = parts(self.model, ends, best.rows)
            self._star(network, value, dict(zip(ends[1:], shares, strict=True)))
        elif not self._is_dear(value, best, missed) or not self._dearest(network, value, best):
            for pair, weight in weighted_pairs(self.model, value, ends, best.rows, missed).items():
                self._star(network, value, dict.fromkeys(pair, 1.0), weight)

    def _dearest(self, network: Network, value: int, best: CostedPlan) -> int:
        ends = [(n, self.read((n, port))) for n, port in self._ends(value)]
        return add_max_reader_bound(network, self._stars, value, ends, _SPENT * best.cost, _MORE)

    def _is_dear(self, value: int, best: CostedPlan, missed: Sequence[Assignment]) -> bool:
        """Whether the dearest reader costs more than pairs do, in plans that say what counts."""
        model, ends, plans = self.model, self._ends(value), (best.rows, *missed)
        if not missed:
            return False
        pairs = weighted_pairs(model, value, ends, best.rows, missed)
        return sum(dearest_cost(model, value, ends, rows) for rows in plans) > sum(
            pairs_cost(model, value, ends[0], pairs, rows) for rows in plans
        )

    def _on_a_hub(self, value: int, best: CostedPlan, missed: Sequence[Assignment]) -> bool:
        """Whether a value has one hub, its readers being too many for pairs, or little at stake."""
        return len(self._ends(value)) - 1 > _MANY or (not missed and self._is_little(value, best.cost))

    def _is_little(self, value: int, cost: float) -> bool:
        """Whether a value is worth no more than one hub in a plan that costs so much."""
        return self._stake(value) < _STAKE * cost

    def _missing(self, value: int, rows: Assignment, best: CostedPlan, missed: Sequence[Assignment]) -> float:
        model, ends = self.model, self._ends(value)
        whole = tree_cost(model, value, ends, rows)
        if not whole:
            return 0.0
        if self._on_a_hub(value, best, missed):
            least = hub_cost(model, value, ends, rows, parts(model, ends, best.rows))
        elif self._is_dear(value, best, missed):
            least = dearest_cost(model, value, ends, rows)
        else:
            pairs = weighted_pairs(model, value, ends, best.rows, missed)
            least = pairs_cost(model, value, ends[0], pairs, rows)
        return max(0.0, whole - least) * model.trips(value)

    def _most(self, value: int, trees: int, missed: Missed) -> int:
        """Entries that the exact trees of a value may have: more where pairs of readers will not do, or have not."""
        if value not in missed:
            return trees
        return _MORE if len(self._ends(value)) - 1 > _MANY or len(missed[value]) > 1 else max(trees, _LARGER)

    def _has_sets(self, value: int, most: int) -> bool:
        """Whether the exact trees of a value are in the network."""
        return asked_for_by(self._derived, [self.read(end) for end in self._ends(value)], most) is not None

    def _sets(self, network: Network, value: int, most: int) -> int:
        ends = [(n, self.read((n, port))) for n, port in self._ends(value)]
        return add_subset_variables(network, self.model.closure(value), self.model.trips(value), ends, most)
