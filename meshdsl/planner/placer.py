"""The states of a model's nodes as layouts on the timeline of its program.

The memory of many plans of one program is asked for. Which port makes which value, and which is which reading, is
worked out once for all of them; what moves lead through, once for equal values that are moved alike.
"""

from meshdsl.layouts.layout import Layout
from meshdsl.planner.exact import Ids
from meshdsl.planner.extract import Choice, moves_along
from meshdsl.planner.model import Model
from meshdsl.planner.numbering import array
from meshdsl.planner.placed import Moved, Placed
from meshdsl.planner.timeline import timeline_of
from meshdsl.planner.tree import Edges


class Placer:
    """Places plans of a model.

    Args:
      like: one of the same program, under other pins.
    """

    def __init__(self, model: Model, like: "Placer | None" = None) -> None:
        self.model, self.timeline = model, timeline_of(model.problem.program.graph, model.mesh.topology.backend)
        numbers, wiring = self.timeline.numbers, model.wiring
        self._own: Ids = like._own if like else array(wiring.made[v.id] for v in numbers.values)
        self._read: Ids = like._read if like else array(map(wiring.reading.__getitem__, numbers.readings))
        self._layouts = dict(model.ports.every)
        self._known: dict[tuple[int, Edges], list[tuple[int, int]]] = {}

    def placed(self, choice: Choice) -> Placed:
        """The program under the layouts of a plan."""
        ports = self.model.ports
        layouts, moved = ports.named(ports.layouts(choice.rows)), self._moved(choice)
        return Placed(
            self.timeline, self.model.mesh, tuple(self._layouts), layouts[self._own], layouts[self._read], moved
        )

    def _moved(self, choice: Choice) -> Moved:
        """The moves of a plan."""
        ends = [self._ends(value, edges) for value, edges in choice.edges.items()]
        values = self.timeline.numbers.of(choice.edges).repeat(array(map(len, ends)))
        before, after = (array(end[i] for some in ends for end in some) for i in range(2))
        return Moved(values, before, after)

    def _ends(self, value: int, edges: Edges) -> list[tuple[int, int]]:
        """The layouts between which a value is moved, by number."""
        key = id(self.model.distances[value]), edges
        if key not in self._known:
            moves = moves_along(self.model, value, edges)
            self._known[key] = [(self._number(move.before), self._number(move.after)) for move in moves]
        return self._known[key]

    def _number(self, layout: Layout) -> int:
        return self._layouts.setdefault(layout, len(self._layouts))
