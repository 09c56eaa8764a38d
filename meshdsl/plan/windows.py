"""How long independent computing there is between a value and whoever needs it first: its *window*.

A collective on the value can run beside that much computing. Operations are taken in program order, one after the
other, each as long as the plan computes in it:

    a = x @ u          1 ms
    b = y @ v          5 ms     the window of ``a`` is 5 ms
    c = a + b

What a loop reads slice by slice is needed, in the mean, when half of it is over, and what it stacks is ready then; a
slice itself can be sent while the trip before runs. That is how systems hide communication: layers' parameters are
gathered one layer ahead, gradients are reduced while the backward pass goes on.
"""

from collections.abc import Mapping

from meshdsl.ir import LOOPS, Graph, Op, Program, Value
from meshdsl.plan.work import Work


def windows(program: Program, work: Work) -> Mapping[int, float]:
    """Seconds per value id and trip; values that nobody reads are absent.

    Args:
      work: what computing takes in a plan.
    """
    made = _Windows(work)
    made.add(program.graph, {})
    return made.found


class _Windows:
    def __init__(self, work: Work) -> None:
        self.work, self.found = work, dict[int, float]()
        self._lengths: dict[int, float] = {}

    def add(self, graph: Graph, ready: dict[int, float], late: Mapping[int, float] | None = None) -> None:
        """Note the windows of a graph's values, times counted from its begin.

        Args:
          ready: inputs that are not there just when it begins.
          late: results, by place, that are needed so long after its end.
        """
        now, start = 0.0, dict.fromkeys((v.id for v in graph.inputs), 0.0) | ready
        for op in graph.ops:
            length = self.length(op, graph.trips)
            for i, read in enumerate(op.inputs):
                if isinstance(read, Value):
                    self._read(read, now + self._wait(op, i, length, late or {}) - start[read.id])
            for i, value in enumerate(op.outputs):
                start[value.id] = now + (length / 2 if _stacks(op, i) else length)
            self._bodies(op)
            now += length

    def length(self, op: Op, trips: int) -> float:
        """Seconds of computing in one operation, on one trip of the graph it stands in."""
        if op.name not in LOOPS:
            return self.work.alone(op)
        if op.id not in self._lengths:
            self._lengths[op.id] = sum(self._trip(body) * body.trips / trips for body in op.bodies)
        return self._lengths[op.id]

    def _trip(self, body: Graph) -> float:
        return sum(self.length(op, body.trips) for op in body.ops)

    def _read(self, value: Value, window: float) -> None:
        self.found[value.id] = min(self.found.get(value.id, window), window)

    def _wait(self, op: Op, i: int, length: float, late: Mapping[int, float]) -> float:
        """How long after an operation begins its operand is needed."""
        if op.name == "return":
            return late.get(i, 0.0)
        return length / 2 if _slices(op, i) else 0.0

    def _bodies(self, op: Op) -> None:
        for body in op.bodies:
            trip, held = self._trip(body), _held(op, body)
            ahead = {v.id: -trip for i, v in enumerate(body.inputs) if i in held}
            stacks = {i: trip for i in range(len(body.returned)) if _stacks(op, i)}
            self.add(body, ahead, stacks)


def _slices(op: Op, i: int) -> bool:
    """Whether a loop reads an operand slice by slice."""
    return op.name == "scan" and i >= op.params["num_consts"] + op.params["num_carry"]


def _stacks(op: Op, i: int) -> bool:
    """Whether a loop makes a result slice by slice."""
    return op.name == "scan" and i >= op.params["num_carry"]


def _held(op: Op, body: Graph) -> set[int]:
    """Inputs of a loop's body that are there one trip ahead: all but carries."""
    if op.name == "scan":
        first = op.params["num_consts"]
        return set(range(len(body.inputs))) - set(range(first, first + op.params["num_carry"]))
    if op.name == "while":
        return set(range(op.params["cond_nconsts" if body is op.bodies[0] else "body_nconsts"]))
    return set()
