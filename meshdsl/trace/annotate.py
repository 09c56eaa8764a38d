"""Annotations of a graph: how often each body runs, the phase of each operation, numbers of values and operations.

The number of iterations of a body is its own times those of every loop around it. A scan states its length. A ``while``
does if it counts: a carry that starts from a literal, grows by a literal and is compared ``lt`` with a literal;
otherwise it is taken to run as often as ``expect_iterations`` says, or ``GUESS`` times, and every graph inside is
marked as estimated.

The phase is forward, backward or optimizer. Backward is what autodiff transposed: its name stack contains
``transpose(``. From there:

* Operations that depend on a backward result are optimizer, and so are those that only optimizer operations use (the
  decay of a moment, the step count), unless autodiff went through them.
* A loop that contains backward operations is backward, and the phases in its body are found as if it ran once: updated
  parameters that it carries do not make the next iteration's forward pass an optimizer's. Adding a gradient to its
  accumulator is backward, and so are operations that only lead there.
* In any other loop, every operation has the loop's phase.
* Operations that depend on no input (masks, tables) have the phase of their first consumer.

A "return" has the latest phase among the values that it returns.
"""

from collections.abc import Iterator, Sequence, Set
from typing import Any

import numpy as np

from meshdsl.ir.check import check_graph
from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value, walk
from meshdsl.ir.index import consumers, producers
from meshdsl.ir.loops import LoopPort, PortRole, body_operands, carried_inputs, loop_ports
from meshdsl.ir.rewrite import renumber, value_ids, values

FORWARD, BACKWARD, OPTIMIZER = PHASES = ("forward", "backward", "optimizer")
GUESS = 10  # iterations of a loop whose number is unknown


def annotate(graph: Graph) -> Graph:
    """Writes iterations, phases and numbers into the graph, checks it and returns it."""
    count_trips(graph)
    mark_phases(graph)
    renumber(graph)
    check_graph(graph)
    return graph


# ---- Phases ----------------------------------------------------------------------------------------------------------


Readers = dict[int, list[Op]]


def mark_phases(graph: Graph) -> None:
    """Writes the phase into every operation of a step."""
    _mark(graph, set(), in_loop=False)


def _mark(graph: Graph, updated: Set[int], in_loop: bool = True) -> None:
    """Marks a graph whose inputs ``updated`` depend on backward results."""
    after = _after(graph, updated)
    readers = consumers(graph)
    for op in graph.ops:
        op.phase = _first_guess(op, after)
    if in_loop:
        _mark_accumulators(graph, readers)
    _mark_by_readers(graph, readers)
    _mark_constants(graph, readers)
    _mark_return(graph)
    for op in graph.ops:
        if op.bodies:
            _mark_bodies(op, after)


def _mark_bodies(op: Op, after: Set[int]) -> None:
    for body, operands in zip(op.bodies, body_operands(op), strict=True):
        if _is_mixed(op):
            _mark(body, _taken(body, operands, after))
        else:
            for _, inner in walk(body):
                inner.phase = op.phase


def _first_guess(op: Op, after: Set[int]) -> str:
    if _is_transposed(op) or _is_mixed(op):
        return BACKWARD
    return OPTIMIZER if _reads(op, after) else FORWARD


def _mark_accumulators(graph: Graph, readers: Readers) -> None:
    """Marks ``carry + gradient`` in a loop body as backward if the carry has no other use, with what leads there."""
    made = producers(graph)
    carries = {v.id for v in graph.inputs if len(readers.get(v.id, ())) == 1}
    for x in values(graph.returned):
        op = made.get(x.id)
        adds = op is not None and op.phase == OPTIMIZER and op.name in ("add", "add_any")
        if op and adds and _reads(op, carries):
            op.phase = BACKWARD
    for op in reversed(graph.ops):
        if op.phase == OPTIMIZER and _phases_of_readers(op, readers) == {BACKWARD}:
            op.phase = BACKWARD


def _mark_by_readers(graph: Graph, readers: Readers) -> None:
    for op in reversed(graph.ops):
        if op.phase == FORWARD and "jvp(" not in op.scope and _phases_of_readers(op, readers) == {OPTIMIZER}:
            op.phase = OPTIMIZER


def _mark_constants(graph: Graph, readers: Readers) -> None:
    constant: set[int] = set()
    for op in graph.ops:
        if constant.issuperset(value_ids(op.inputs)):
            constant.update(value_ids(op.outputs))
    for op in reversed(graph.ops):
        if op.outputs and op.outputs[0].id in constant:
            first = next(_real_readers(op, readers), op)
            op.phase = first.phase


def _mark_return(graph: Graph) -> None:
    phase = {v.id: op.phase for op in graph.ops for v in op.outputs}
    returned = [phase.get(v.id, FORWARD) for v in values(graph.returned)]
    graph.ops[-1].phase = max(returned, key=PHASES.index, default=FORWARD)


def _reads(op: Op, among: Set[int]) -> bool:
    return not among.isdisjoint(value_ids(op.inputs))


def _real_readers(op: Op, readers: Readers) -> Iterator[Op]:
    return (reader for v in op.outputs for reader in readers.get(v.id, ()) if reader.name != "return")


def _phases_of_readers(op: Op, readers: Readers) -> set[str]:
    return {reader.phase for reader in _real_readers(op, readers)}


def _is_transposed(op: Op) -> bool:
    return "transpose(" in op.scope


def _is_mixed(op: Op) -> bool:
    """Whether it is a loop around backward operations that is not itself transposed."""
    if not op.bodies or _is_transposed(op):
        return False
    return any(_is_transposed(inner) for body in op.bodies for _, inner in walk(body))


def _after(graph: Graph, updated: Set[int]) -> set[int]:
    """Ids of the values that depend on ``updated`` or on a backward operation."""
    found = set(updated)
    for op in graph.ops:
        if _is_transposed(op) or (not _is_mixed(op) and _reads(op, found)):
            found.update(value_ids(op.outputs))
        elif op.bodies:
            found |= _results_after(op, found)
    return found


def _results_after(op: Op, found: Set[int]) -> set[int]:
    """Ids of the results of a mixed loop that depend on backward operations, in this iteration or through a carry."""
    results: set[int] = set()
    for body, operands, carried in zip(op.bodies, body_operands(op), carried_inputs(op), strict=True):
        if len(body.returned) == len(op.outputs):
            results |= _returned_after(op, body, carried, _taken(body, operands, found))
    return results


def _returned_after(op: Op, body: Graph, carried: range, updated: set[int]) -> set[int]:
    carries = body.inputs[carried.start : carried.stop]
    while True:
        after = _after(body, updated)
        hit = [isinstance(x, Value) and x.id in after for x in body.returned]
        carried_on = {v.id for v, h in zip(carries, hit, strict=False) if h}
        if carried_on <= updated:
            return {v.id for v, h in zip(op.outputs, hit, strict=True) if h}
        updated = updated | carried_on


def _taken(body: Graph, operands: tuple[Atom, ...], found: Set[int]) -> set[int]:
    """Ids of the inputs of a body whose operands are among ``found``."""
    pairs = zip(body.inputs, operands, strict=True)
    return {v.id for v, x in pairs if isinstance(x, Value) and x.id in found}


# ---- Iterations ------------------------------------------------------------------------------------------------------


def count_trips(graph: Graph, trips: int = 1, estimated: bool = False) -> None:
    """Writes the iterations into a graph that runs ``trips`` times per step, and into its bodies."""
    graph.trips, graph.estimated = trips, estimated
    for op in graph.ops:
        if op.bodies:
            times, guessed = _times(op)
            for body, n in zip(op.bodies, times, strict=True):
                count_trips(body, trips * n, estimated or guessed)


def _times(op: Op) -> tuple[Sequence[int], bool]:
    """How often each body runs per run of the operation, and whether that is a guess."""
    if op.name == "scan":
        return (op.params["length"],), False
    if op.name == "cond":
        return (1,) * len(op.bodies), False
    trips, stated = counted(op), op.params.get("iterations")
    if trips is None and stated is not None:
        return (stated + 1, stated), True
    return (GUESS + 1, GUESS) if trips is None else (trips + 1, trips), trips is None


def counted(op: Op) -> int | None:
    """Returns the iterations of ``while i < stop: i += stride`` if start, stop and stride are literals, else None."""
    condition, _ = op.bodies
    test = _made_by(condition, condition.returned[0])
    if test is None or test.name != "lt":
        return None
    index = _carry_of(op, test.inputs[0])
    if index is None or not np.issubdtype(test.inputs[0].dtype, np.integer):
        return None
    start, stride, stop = _number(op.inputs[index.operand]), _stride(op, index), _fixed(op, test.inputs[1])
    if start is None or stop is None or stride is None or stride <= 0:
        return None
    return max(0, -((start - stop) // stride))


def _stride(op: Op, carry: LoopPort) -> int | None:
    """The literal that an iteration adds to a carry, if it does nothing else to it."""
    before, after = _around_iteration(op, carry)
    step = _made_by(op.bodies[1], after)
    if step is None or step.name != "add":
        return None
    other = [x for x in step.inputs if x is not before]
    return _number(other[0]) if len(other) == 1 else None


def _fixed(op: Op, x: Atom) -> int | None:
    """The number that the condition reads as ``x``: a literal, or a carry that no iteration changes."""
    carry = _carry_of(op, x)
    if carry is None:
        return _number(x)
    before, after = _around_iteration(op, carry)
    return _number(op.inputs[carry.operand]) if before is after else None


def _carry_of(op: Op, x: Atom) -> LoopPort | None:
    """The carry of a ``while`` that its condition reads as ``x``."""
    condition = op.bodies[0]
    carries = (port for port in loop_ports(op) if port.role is PortRole.CARRY)
    return next((port for port in carries if condition.inputs[port.inputs[0][1]] is x), None)


def _around_iteration(op: Op, carry: LoopPort) -> tuple[Atom, Atom]:
    """A carry of a ``while`` as its body takes it and as it returns it."""
    body = op.bodies[1]
    return body.inputs[carry.inputs[1][1]], body.returned[carry.outputs[0][1]]


def _made_by(graph: Graph, x: Atom) -> Op | None:
    return next((op for op in graph.ops if any(v is x for v in op.outputs)), None)


def _number(x: Any) -> int | None:
    return int(x.value) if isinstance(x, Literal) and np.issubdtype(x.dtype, np.integer) else None
