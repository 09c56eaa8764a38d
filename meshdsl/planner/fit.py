"""The memory limit: put a price on bytes where memory is short, and raise it until the plan fits.

Only a few program points ever bind. The fullest point of the current plan is added to the priced
points, every value alive there pays per byte, and the step is solved again (Lagrangian
relaxation with lazily generated rows). When the unpriced optimum fits, it is the optimum.
"""

from collections.abc import Hashable, Iterable, Iterator

from meshdsl.errors import PinError
from meshdsl.ir import Graph
from meshdsl.layouts.mesh import Mesh
from meshdsl.planner.extract import Choice, Evaluator, layouts_of, trees_of
from meshdsl.planner.lives import Placed
from meshdsl.planner.memory import Liveness, Peak
from meshdsl.planner.model import Model, Prices
from meshdsl.planner.problem import make_problem
from meshdsl.planner.search import evaluated, plans
from meshdsl.planner.short import larger, too_small
from meshdsl.planner.solution import Pins

_ROUNDS, _TRIALS = 14, 2
_RAISE = 3.0


class Fitter:
    """Searches for the cheapest plan within a limit of bytes per device.

    Args:
      model: of the program under ``pins``.
      like: searched under other pins, where to begin: with its prices.
    """

    def __init__(self, model: Model, pins: Pins, like: "Fitter | None" = None) -> None:
        self.model, self.pins = model, pins
        self.evaluator = Evaluator(model)
        self.around = dict(_around(model.problem.program.graph, ()))
        self.points: dict[int, Peak] = dict(like.points) if like else {}
        self.price: float = like.price if like else 0.0  # the last one
        self._peaks: dict[Hashable, Peak] = {}

    def peak(self, choice: Choice) -> Peak:
        """The fullest point of a plan."""
        key = choice.rows.tobytes(), tuple(choice.edges.items())
        if key not in self._peaks:
            self._peaks[key] = self._peak(choice)
        return self._peaks[key]

    def _peak(self, choice: Choice) -> Peak:
        own, uses = layouts_of(self.model, choice.rows)
        trees = trees_of(self.model, choice)
        placed = Placed(self.model.problem.program.graph, self.model.mesh, own, uses, trees)
        return Liveness(placed, self.pins.donated).peak()

    def fit(self, choice: Choice, limit: float) -> tuple[Choice, Peak]:
        """``choice`` if it fits; else the cheapest plan found that does; MemoryLimitError if none does."""
        peak = least = self.peak(choice)
        price = self.price or self.model.scale.seconds(choice.cost) / max(peak.bytes, 1) / 8
        for _ in range(_ROUNDS):
            if peak.bytes <= limit:
                return choice, peak
            self.price = price
            choice, peak = self._next(choice, peak, price, limit)
            least = min(least, peak, key=lambda p: p.bytes)
            price *= _RAISE
        if peak.bytes <= limit:
            return choice, peak
        raise too_small(self.model.problem, self.pins, least, limit, self._larger(price, limit))

    def _larger(self, price: float, limit: float) -> Iterator[tuple[Mesh, int]]:
        """Larger meshes, as long as the pins hold there, and the least bytes found on each; until that fits."""
        program = self.model.problem.program
        for mesh in larger(self.model.mesh):
            try:
                other = Fitter(Model(make_problem(program, mesh, self.pins)), self.pins)
            except PinError:
                return
            other.points.update(self.points)
            found = other._leanest(price, limit)
            yield mesh, found
            if found <= limit:
                return

    def _leanest(self, price: float, limit: float) -> int:
        """Bytes of the smallest of the first plans at this price."""
        choice = evaluated(self.model, self.evaluator, self.model.whole)
        peak = self.peak(choice)
        found = [peak.bytes]
        for _ in range(_TRIALS):
            choice, peak = self._next(choice, peak, price, limit)
            found.append(peak.bytes)
        return min(found)

    def _next(self, choice: Choice, peak: Peak, price: float, limit: float) -> tuple[Choice, Peak]:
        """The next plan, its peak's point priced as well."""
        self.points[peak.op.id if peak.op else -1] = peak
        choice = self._priced(choice, self.points.values(), price, limit)
        return choice, self.peak(choice)

    def _priced(self, last: Choice, points: Iterable[Peak], price: float, limit: float) -> Choice:
        """The cheapest plan that fits, or the smallest; the plan found last is where to begin."""
        self.model.prices = self._prices(points, price)
        found = plans(self.model, self.evaluator, last)
        self.model.prices = Prices()
        return self.evaluator.exact(min(found, key=lambda choice: (max(self.peak(choice).bytes, limit), choice.cost)))

    def _prices(self, points: Iterable[Peak], price: float) -> Prices:
        own: dict[int, float] = {}
        read: dict[tuple[int, int], float] = {}
        for peak in points:
            alive = {copy.value.id for copy in peak.copies}
            own.update(dict.fromkeys(alive, price))
            inside = set(self.around.get(peak.op.id, ())) if peak.op else set()
            for value, readers in self.model.problem.used.items():
                for n, q in readers:
                    reader = self.model.nodes[n].ports[q].reader
                    if value in alive or (reader is not None and reader[0] in inside):
                        read[n, q] = price
        return Prices(own, read)


def _around(graph: Graph, outside: tuple[int, ...]) -> "Iterable[tuple[int, tuple[int, ...]]]":
    """Per op id, the ops it stands in, itself included."""
    for op in graph.ops:
        chain = (*outside, op.id)
        yield op.id, chain
        for body in op.bodies:
            yield from _around(body, chain)
