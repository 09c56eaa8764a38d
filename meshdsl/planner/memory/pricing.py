"""The points of a program at which plans were too large, and what bytes cost there.

A point is where an operation runs. What is alive there pays for its own layout and for the copies that are read. Of
what is read once more, at most one other reader having gone before, some copy is kept, the smallest on the way: that
can be priced instead (``MemoryLowerBound.kept``), which does not charge a copy that two readers share twice.
"""

from collections.abc import Iterable
from itertools import chain

import numpy as np

from meshdsl.ir.graph import Op
from meshdsl.planner.liveness.peak import Peak
from meshdsl.planner.memory.lower_bound import MemoryLowerBound
from meshdsl.planner.problem.model import Model, Prices
from meshdsl.planner.problem.ports import End

_NOWHERE = -1  # where inputs come in


class PricedPoints:
    """Points, in the order in which they came in.

    Args:
      donated: positions of the inputs that are given up.
      like: of the same program: its points are here from the beginning.
    """

    def __init__(self, model: Model, donated: frozenset[int], like: "PricedPoints | None" = None) -> None:
        self.model, self._donated = model, donated
        self._peaks: dict[int, Peak] = dict(like._peaks) if like else {}
        again = like._known if like and like.model.tables is model.tables and like._donated == donated else {}
        self._known: dict[int, MemoryLowerBound] = {op: floor.under(model) for op, floor in again.items()}

    def __contains__(self, peak: Peak) -> bool:
        return _at(peak) in self._peaks

    def add(self, peak: Peak) -> None:
        """Add a point, or what is alive there in another plan."""
        self._peaks[_at(peak)] = peak

    @property
    def values(self) -> set[int]:
        """Ids of the values that are alive at some point."""
        return {copy.value.id for peak in self._peaks.values() for copy in peak.copies}

    @property
    def floors(self) -> list[MemoryLowerBound]:
        """What memory holds at least at each point that is an operation, in their order."""
        return [self.floor(op) for op in sorted(self._peaks) if op != _NOWHERE]

    def prices(self, price: float, keeps: bool) -> Prices:
        """What bytes cost.

        Args:
          price: per byte. keeps: whether one copy pays of what is kept for later, or all that are made.
        """
        own: dict[int, float] = {}
        read: dict[End, float] = {}
        kept: dict[End, float] = {}
        for op, peak in self._peaks.items():
            there = self.floor(op).kept_at(price) if keeps and op != _NOWHERE else {}
            kept.update(there)
            alive = {copy.value.id for copy in peak.copies} - set(map(self.model.wiring.value_at, there))
            own.update(dict.fromkeys(alive, price))
            inside = (self._read_by(around) for around in self._around(op))
            read.update(dict.fromkeys(chain.from_iterable((self._readers(alive), *inside)), price))
        return Prices(own, read, path_copy=kept)

    def floor(self, op: int) -> MemoryLowerBound:
        """What memory holds at least while an operation runs."""
        if op not in self._known:
            self._known[op] = MemoryLowerBound(self.model, self._donated, self._around(op))
        return self._known[op]

    def _around(self, op: int) -> tuple[Op, ...]:
        """The operations that one stands in, given by its id, the outermost first, and itself."""
        return self.model.problem.index.enclosing_ops(op) if op != _NOWHERE else ()

    def _read_by(self, op: Op) -> list[End]:
        """The ports that read for an operation."""
        numbers, wiring = self.model.problem.index, self.model.wiring
        at = numbers.position[op.id]
        ports = wiring.port_of_use[numbers.first_use[at] : numbers.first_use[at + 1]]
        return wiring.ends_at(ports[ports >= 0])

    def _readers(self, values: Iterable[int]) -> list[End]:
        """The ports that read some values, given by their ids."""
        wiring, there = self.model.wiring, np.zeros(self.model.wiring.node_of.size, dtype=np.bool_)
        there[wiring.producer[self.model.problem.index.numbers_of(values)]] = True
        return wiring.ends_at(wiring.uses[there[wiring.use_producers]])


def _at(peak: Peak) -> int:
    """The operation at which memory is fullest, by its id."""
    return peak.op.id if peak.op else _NOWHERE
