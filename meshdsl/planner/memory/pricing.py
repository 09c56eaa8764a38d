"""Program points at which plans exceed the memory limit, and what bytes cost there.

A point is an op; the program inputs are one more. A value that is live there pays for its own layout and for the
copies that its consumers use. A copy that waits for a later consumer is different: if at most one consumer came
before, memory certainly holds *some* copy on the resharding path to the later one, at least the smallest. Charging
that one instead (``path_copies``) does not count a copy twice that two consumers share.
"""

from collections.abc import Iterable
from copy import copy
from itertools import chain

import numpy as np

from meshdsl.ir.graph import Op
from meshdsl.planner.liveness.peak import Peak
from meshdsl.planner.memory.lower_bound import MemoryLowerBound
from meshdsl.planner.problem.model import Model, Prices
from meshdsl.planner.problem.ports import End

_INPUTS = -1  # id of the point at which the inputs enter


class PricedPoints:
    """A set of program points, in the order in which they were added, with the values that are live there.

    Args:
      donated: positions of the inputs whose memory is given up.
      previous: points of another model of the program, which these start from.
    """

    def __init__(self, model: Model, donated: frozenset[int], previous: "PricedPoints | None" = None) -> None:
        self.model, self._donated = model, donated
        self._peaks: dict[int, Peak] = dict(previous._peaks) if previous else {}
        is_same = previous and previous.model.tables is model.tables and previous._donated == donated
        known: dict[int, MemoryLowerBound] = previous._bounds if previous and is_same else {}
        self._bounds: dict[int, MemoryLowerBound] = {op: bound.with_model(model) for op, bound in known.items()}

    def __contains__(self, peak: Peak) -> bool:
        return _point(peak) in self._peaks

    def including(self, peak: Peak) -> "PricedPoints":
        """Returns the set with another point, or with a point's live values in another plan."""
        other = copy(self)
        other._peaks = {**self._peaks, _point(peak): peak}
        return other

    @property
    def values(self) -> set[int]:
        """Ids of the values that are live at some point."""
        return {copy.value.id for peak in self._peaks.values() for copy in peak.copies}

    @property
    def lower_bounds(self) -> list[MemoryLowerBound]:
        """The bytes that memory certainly holds at each point that is an op, in program order."""
        return [self.lower_bound(op) for op in sorted(self._peaks) if op != _INPUTS]

    def lower_bound(self, op: int) -> MemoryLowerBound:
        """Returns the bytes that memory certainly holds while an op, given by its id, runs."""
        if op not in self._bounds:
            self._bounds[op] = MemoryLowerBound(self.model, self._donated, self._enclosing(op))
        return self._bounds[op]

    def prices(self, price: float, path_copies: bool) -> Prices:
        """Returns the prices of all ports.

        Args:
          price: in seconds per byte.
          path_copies: whether a value that waits for a later consumer pays for one copy on the path there, the
            smallest; else for every copy that is made.
        """
        own: dict[int, float] = {}
        used: dict[End, float] = {}
        waiting: dict[End, float] = {}
        for op, peak in self._peaks.items():
            here = self.lower_bound(op).path_copy_prices(price) if path_copies and op != _INPUTS else {}
            waiting.update(here)
            live = {copy.value.id for copy in peak.copies} - set(map(self.model.wiring.value_at, here))
            own.update(dict.fromkeys(live, price))
            operands = (self._operands(enclosing) for enclosing in self._enclosing(op))
            used.update(dict.fromkeys(chain.from_iterable((self._consumers(live), *operands)), price))
        return Prices(own, used, path_copy=waiting)

    def _enclosing(self, op: int) -> tuple[Op, ...]:
        """Returns an op, given by its id, after the ops in whose bodies it is, the outermost first."""
        return self.model.problem.index.enclosing_ops(op) if op != _INPUTS else ()

    def _operands(self, op: Op) -> list[End]:
        """Returns the ports that consume for an op."""
        index, wiring = self.model.problem.index, self.model.wiring
        at = index.position[op.id]
        ports = wiring.port_of_use[index.first_use[at] : index.first_use[at + 1]]
        return wiring.ends_at(ports[ports >= 0])

    def _consumers(self, values: Iterable[int]) -> list[End]:
        """Returns the ports that consume some values, given by their ids."""
        wiring, is_producer = self.model.wiring, np.zeros(self.model.wiring.node_of.size, dtype=np.bool_)
        is_producer[wiring.producer[self.model.problem.index.numbers_of(values)]] = True
        return wiring.ends_at(wiring.uses[is_producer[wiring.use_producers]])


def _point(peak: Peak) -> int:
    return peak.op.id if peak.op else _INPUTS
