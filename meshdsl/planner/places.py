"""In which memory a value can be made: what is true of a program under all of its layouts.

    runs     an operation fused into its readers runs with the last of them, and what it reads must be there until then
    views    a reshape is its operand under another shape, and takes no memory
    reuses   an elementwise result may be written over an operand that nobody reads afterwards, through fused ones
             too; an update over what it updates; the result of a loop over what the loop starts from
    slices   what a loop reads of a stack in each trip is a copy where it is not fused

These are the rules of XLA's buffer assignment (``CanShareOperandBufferWithUser``, ``HloAliasAnalysis``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from meshdsl.ir import Graph, Op, Value, walk
from meshdsl.planner.costs import VIEWS, is_heavy, materialised
from meshdsl.planner.narrow import Reads, picks, reads
from meshdsl.rules.elementwise import elementwise
from meshdsl.rules.registry import RULES
from meshdsl.trace.graphs import carried_of, carried_operands

_SAME = VIEWS | {"constrain", "optimization_barrier"}
_UPDATES = ("dynamic_update_slice", "scatter")
Reading = tuple[tuple[int, int], int]  # op id and operand, value id


@dataclass(frozen=True)
class Reuse:
    """A result, by value id, and the operands that it may be written over."""

    value: int
    over: tuple[Reading, ...]


@dataclass(frozen=True)
class Within:
    """The facts of one graph.

    Args:
      runs: per position, the position at which the operation runs.
      views: positions of operations whose result is their operand.
      reuses: per position, results that may be written over operands.
    """

    runs: tuple[int, ...]
    views: tuple[int, ...]
    reuses: dict[int, tuple[Reuse, ...]]


@dataclass(frozen=True)
class Body:
    """How the values of a body lie in the memory of the operation around it.

    Args:
      carried: (input, position among what is returned) that are one place.
      given: positions of what is returned straight into the results of the operation.
      sliced: inputs that are slices of a stack, and are copies.
    """

    carried: tuple[tuple[int, int], ...] = ()
    given: tuple[int, ...] = ()
    sliced: frozenset[int] = frozenset()


class Places:
    """The facts of a program.

    Args:
      backend: XLA's, which compiles for the devices (see ``Topology``).
      kept: ids of the values that are written to memory.
      reads: how float32 is read, if that decides how it is kept.
      within: per graph, by its identity. bodies: per op id, how each of its bodies lies.
    """

    def __init__(self, graph: Graph, backend: str) -> None:
        tpu = backend == "tpu"
        self.kept = materialised(graph, again=tpu) - (picks(graph) if tpu else set())
        self.reads = reads(graph) if tpu else Reads()
        self.within = {id(graph): self._within(graph)}
        self.bodies: dict[int, tuple[Body, ...]] = {}
        for _, op in walk(graph):
            if op.bodies:
                self.within.update((id(body), self._within(body)) for body in op.bodies)
                self.bodies[op.id] = tuple(_body(op, body) for body in op.bodies)

    def _within(self, graph: Graph) -> Within:
        views = tuple(at for at, op in enumerate(graph.ops) if _is_view(op))
        return Within(self._runs(graph), views, self._reuses(graph))

    def _runs(self, graph: Graph) -> tuple[int, ...]:
        runs, kept = list(range(len(graph.ops))), self.kept
        read: dict[int, int] = {}  # by value id, where it is last read
        for at in reversed(range(len(runs))):
            op, last = graph.ops[at], at
            made = [v.id for v in op.outputs]
            if made and kept.isdisjoint(made):
                last = runs[at] = max([read.get(v, at) for v in made])
            for v in op.inputs:
                if isinstance(v, Value) and read.get(v.id, -1) < last:
                    read[v.id] = last
        return tuple(runs)

    def _reuses(self, graph: Graph) -> dict[int, tuple[Reuse, ...]]:
        found: dict[int, tuple[Reuse, ...]] = {}
        fused: dict[int, list[Reading]] = {}
        names = {op.name for op in graph.ops}
        updates = {name for name in names if name.startswith(_UPDATES)}
        by_element = {name for name in names if RULES.get(name) is elementwise}
        for at, op in enumerate(graph.ops):
            if op.bodies or op.name in updates:
                made = tuple(reuse for reuse in _written_over(op) if reuse.over)
                found.update({at: made} if made else {})
            elif op.name in by_element and (over := _through(op, fused)):
                if op.outputs[0].id in self.kept:
                    found[at] = (Reuse(op.outputs[0].id, tuple(over)),)
                else:
                    fused[op.outputs[0].id] = over
        return found


_KNOWN: WeakKeyDictionary[Graph, dict[str, Places]] = WeakKeyDictionary()


def places_of(graph: Graph, backend: str) -> Places:
    """The facts of a program, worked out once for a backend."""
    known = _KNOWN.setdefault(graph, {})
    if backend not in known:
        known[backend] = Places(graph, backend)
    return known[backend]


def _is_view(op: Op) -> bool:
    """Whether the result is the operand, at most under another shape."""
    if op.name == "transpose":  # of dims of length 1
        order = [d for d in op.params["permutation"] if op.inputs[0].shape[d] > 1]
        return order == sorted(order)
    return op.name in _SAME


def _through(op: Op, fused: dict[int, list[Reading]]) -> list[Reading]:
    """Operands of an elementwise operation that are as large as its result, and those of fused ones that made them."""
    shape, found = op.outputs[0].shape, list[Reading]()
    for i, x in enumerate(op.inputs):
        if isinstance(x, Value) and x.shape == shape:
            found.append(((op.id, i), x.id))
            if x.id in fused:
                found += fused[x.id]
    return found


def _written_over(op: Op) -> Iterator[Reuse]:
    """What the results of an update or a loop may be written over."""
    if op.name.startswith(_UPDATES):
        x = op.inputs[0]
        yield Reuse(op.outputs[0].id, (((op.id, 0), x.id),) if isinstance(x, Value) else ())
    elif op.name in ("scan", "while"):
        carried = carried_operands(op)
        for i, operand in enumerate(carried):
            yield Reuse(op.outputs[i].id, _only_carried(op, carried, operand))


def _only_carried(op: Op, carried: range, operand: int) -> tuple[Reading, ...]:
    """What a carry starts from, unless the loop reads it in every trip too."""
    x = op.inputs[operand]
    others = op.inputs[: carried.start] + op.inputs[carried.stop :]
    return (((op.id, operand), x.id),) if isinstance(x, Value) and not any(x is y for y in others) else ()


def _body(op: Op, body: Graph) -> Body:
    if op.name == "cond":
        return Body(given=tuple(range(len(body.returned))))
    if body is not op.bodies[-1]:  # the condition of a loop
        return Body()
    carried = carried_of(op)[-1]
    return Body(tuple((at, i) for i, at in enumerate(carried)), sliced=_sliced(body, carried.stop))


def _sliced(body: Graph, first: int) -> frozenset[int]:
    """Inputs from ``first`` on that something reads that is not fused."""
    heavy = [op for op in body.ops if op.bodies or (is_heavy(op) and not op.name.startswith("reduce_"))]
    read = {x.id for op in heavy for x in op.inputs if isinstance(x, Value)}
    return frozenset(i for i, v in enumerate(body.inputs) if i >= first and v.id in read)
