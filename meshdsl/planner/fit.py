"""The memory limit: put a price on bytes where memory is short, and raise it until the plan fits.

Only a few program points ever bind. The fullest point of the current plan is added to the priced
points, every value alive there pays per byte, and the step is solved again (Lagrangian
relaxation with lazily generated rows). When the unpriced optimum fits, it is the optimum.
"""

from collections.abc import Iterable

from meshdsl.errors import MemoryLimitError, faults
from meshdsl.ir import Graph, walk
from meshdsl.planner.extract import Choice, Evaluator, layouts_of, trees_of
from meshdsl.planner.memory import Liveness, Peak
from meshdsl.planner.model import Model, Prices
from meshdsl.planner.search import plans
from meshdsl.units import bytes_text

_ROUNDS = 14
_RAISE = 3.0


class Fitter:
    """Searches for the cheapest plan within a limit of bytes per device."""

    def __init__(self, model: Model, donated: frozenset[int]) -> None:
        self.model, self.donated = model, donated
        self.evaluator = Evaluator(model)
        self.around = dict(_around(model.problem.program.graph, ()))

    def peak(self, choice: Choice) -> Peak:
        """The fullest point of a plan."""
        own, uses = layouts_of(self.model, choice.rows)
        problem = self.model.problem
        return Liveness(problem.program, problem.mesh, own, uses, trees_of(self.model, choice), self.donated).peak()

    def fit(self, choice: Choice, limit: float) -> tuple[Choice, Peak]:
        """``choice`` if it fits; else the cheapest plan found that does; MemoryLimitError if none does."""
        peak = least = self.peak(choice)
        if peak.bytes <= limit:
            return choice, peak
        points: dict[int, Peak] = {}
        price = self.model.scale.seconds(choice.cost) / peak.bytes / 8
        for _ in range(_ROUNDS):
            points[peak.op.id if peak.op else -1] = peak
            choice = self._priced(choice, points.values(), price, limit)
            peak = self.peak(choice)
            if peak.bytes <= limit:
                return choice, peak
            least = min(least, peak, key=lambda p: p.bytes)
            price *= _RAISE
        raise self._too_small(least, limit)

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

    def _too_small(self, least: Peak, limit: float) -> MemoryLimitError:
        program = self.model.problem.program
        names = {v.id: f"{op.name} at {op.source}" for _, op in walk(program.graph) for v in op.outputs}
        names |= {v.id: leaf.path for v, leaf in zip(program.graph.inputs, program.inputs, strict=True)}
        rows = [f"{bytes_text(size)}: {names.get(v, 'a slice in a loop')}" for v, size in least.held()[:8]]
        at = f" at {least.op.name} ({least.op.source})" if least.op else ""
        limits = f"memory={bytes_text(limit)} per device; the least found is {bytes_text(least.bytes)}{at}"
        title = f"no plan fits {limits}, held by:"
        return MemoryLimitError(
            faults(title, rows, "use more devices, a smaller batch, jax.checkpoint, or raise memory=")
        )


def _around(graph: Graph, outside: tuple[int, ...]) -> "Iterable[tuple[int, tuple[int, ...]]]":
    """Per op id, the ops it stands in, itself included."""
    for op in graph.ops:
        chain = (*outside, op.id)
        yield op.id, chain
        for body in op.bodies:
            yield from _around(body, chain)
