"""How values of many readers are drawn in networks that bound, and how much they pay too little there."""

from collections.abc import Mapping, Sequence

import numpy as np

from meshdsl.planner.dearest import add_dearest
from meshdsl.planner.drawn import Drawn
from meshdsl.planner.extract import Choice
from meshdsl.planner.forks import Readers, add_forks, entries
from meshdsl.planner.model import Assignment
from meshdsl.planner.network import Network
from meshdsl.planner.pairs import dearest_cost, hub_cost, pairs_cost, parts, tree_cost, weighted_pairs
from meshdsl.planner.sets import add_sets, asked_for_by

_MANY = 6  # readers beyond which pairs are too many
_LARGER, _MORE = 1 << 18, 1 << 23  # entries of the exact trees of a value that is worth more
_SPENT = 2e-2  # part of a plan's cost from which on moves of a value are not told apart, if its dearest ones count
_STAKE = 1e-3  # part of a plan's cost above which a value is worth more than one hub

Missed = Mapping[int, Sequence[Assignment]]


class Many(Drawn):
    """Draws such values; ``best`` is a plan around which that is tight, ``missed`` are others in which it was not."""

    def _forks(self, network: Network | None, value: int, best: Choice) -> bool:
        """Whether a value has exact trees of three readers, for much is paid for what is kept of it; they are added."""
        ends, again, closure = self._ends(value), self.model.prices.again, self.model.closure(value)
        later = next((end for end in ends[1:] if end in again), None)
        if later is None or closure.partial.any():
            return False
        price, meanwhile = again[later]
        before = next(end for end in ends[1:] if end not in (later, meanwhile))
        made, first, second, third = [(n, self.read((n, port))) for n, port in (ends[0], before, meanwhile, later)]
        readers = Readers(made, first, second, third, price)
        paid = float(self.model.scale.pack(np.asarray(price * closure.distances.bytes)))
        worth = paid >= _STAKE * best.cost and entries(self._stars, value, readers) <= _MORE
        if worth and network:
            add_forks(network, self._stars, value, readers)
        return worth

    def _relaxed(self, network: Network, value: int, best: Choice, missed: Sequence[Assignment]) -> None:
        ends = self._ends(value)
        if self._on_a_hub(value, best, missed):
            shares = parts(self.model, ends, best.rows)
            self._star(network, value, dict(zip(ends[1:], shares, strict=True)))
        elif not self._is_dear(value, best, missed) or not self._dearest(network, value, best):
            for pair, weight in weighted_pairs(self.model, value, ends, best.rows, missed).items():
                self._star(network, value, dict.fromkeys(pair, 1.0), weight)

    def _dearest(self, network: Network, value: int, best: Choice) -> int:
        ends = [(n, self.read((n, port))) for n, port in self._ends(value)]
        return add_dearest(network, self._stars, value, ends, _SPENT * best.cost, _MORE)

    def _is_dear(self, value: int, best: Choice, missed: Sequence[Assignment]) -> bool:
        """Whether the dearest reader costs more than pairs do, in plans that say what counts."""
        model, ends, plans = self.model, self._ends(value), (best.rows, *missed)
        if not missed:
            return False
        pairs = weighted_pairs(model, value, ends, best.rows, missed)
        return sum(dearest_cost(model, value, ends, rows) for rows in plans) > sum(
            pairs_cost(model, value, ends[0], pairs, rows) for rows in plans
        )

    def _on_a_hub(self, value: int, best: Choice, missed: Sequence[Assignment]) -> bool:
        """Whether a value has one hub, its readers being too many for pairs, or little at stake."""
        return len(self._ends(value)) - 1 > _MANY or (not missed and self._is_little(value, best.cost))

    def _is_little(self, value: int, cost: float) -> bool:
        """Whether a value is worth no more than one hub in a plan that costs so much."""
        return self._stake(value) < _STAKE * cost

    def _missing(self, value: int, rows: Assignment, best: Choice, missed: Sequence[Assignment]) -> float:
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
        return add_sets(network, self.model.closure(value), self.model.trips(value), ends, most)
