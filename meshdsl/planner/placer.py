"""The states of a model's nodes as layouts on the timeline of its program.

The memory of many plans of one program is asked for. Which port makes which value, and which is which reading, is
worked out once for all of them; what moves lead through, once for equal values that are moved alike.
"""

from itertools import chain

import numpy as np

from meshdsl.layouts.layout import Layout
from meshdsl.planner.arrays import array, numbered
from meshdsl.planner.extract import Choice, moves_along
from meshdsl.planner.identity import identity
from meshdsl.planner.model import Model
from meshdsl.planner.placed import Moved, Placed
from meshdsl.planner.timeline import timeline_of
from meshdsl.planner.tree import Edges


class Placer:
    """Places plans of a model.

    ``values``: per value of the program, by its number, the port that makes it.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.timeline = model, timeline_of(model.problem.program.graph, model.mesh.topology.backend)
        wiring = model.wiring
        self.values, self._read = wiring.made, wiring.reading
        self._layouts = dict(model.ports.every)
        self._known: dict[tuple[int, Edges], list[tuple[int, int]]] = {}

    def placed(self, choice: Choice) -> Placed:
        """The program under the layouts of a plan."""
        ports = self.model.ports
        layouts, moved = ports.named(ports.layouts(choice.rows)), self._moved(choice)
        return Placed(
            self.timeline, self.model.mesh, tuple(self._layouts), layouts[self.values], layouts[self._read], moved
        )

    def _moved(self, choice: Choice) -> Moved:
        """The moves of a plan."""
        values, spaces = self.timeline.numbers.of(choice.edges), self.model.spaces[self.values]
        ways = numbered(map(identity, choice.edges.values()))  # those that lead alike are mostly one object
        alike = np.unique(spaces[values] * (ways.max(initial=0) + 1) + ways, return_index=True, return_inverse=True)
        moved = list(choice.edges.items())
        ends = [array(chain(*self._ends(*moved[i]))).reshape(-1, 2) for i in alike[1].tolist()]
        counts = array(map(len, ends))[alike[2]]
        begins = np.cumsum([0, *map(len, ends)])[alike[2]]
        at = np.arange(counts.sum()) + (begins - np.cumsum(counts) + counts).repeat(counts)
        before, after = np.concatenate([np.empty((0, 2), dtype=np.intp), *ends])[at].T
        return Moved(values.repeat(counts), before, after)

    def _ends(self, value: int, edges: Edges) -> list[tuple[int, int]]:
        """The layouts between which a value is moved, by number."""
        key = identity(self.model.distances[value]), edges
        if key not in self._known:
            moves = moves_along(self.model, value, edges)
            self._known[key] = [(self._number(move.before), self._number(move.after)) for move in moves]
        return self._known[key]

    def _number(self, layout: Layout) -> int:
        return self._layouts.setdefault(layout, len(self._layouts))
