"""What lives in the host's memory, and how it comes to the device and back.

``keep_on_host`` rewrites a step: an input is brought to the device right before the first operation that reads it, and
a result is sent back right after it is made. Nothing in between computes on the host.

    in  m, g                                in  m (host), g
    ...                                     ...
    n = add m g                             m' = to_device m
    w = mul n 2           m, n hosted       n = add m' g
    return w n                              h = to_host n
                                            w = mul n 2
                                            return w h

What follows the last operation of the backward pass is put in order first: the results with the most operations behind
them come one after the other, each with what it needs just before it. A step that updates all first moments, then all
second ones, then all parameters, would else hold all of them on the device at once.

Values that the backward pass reads of the forward one can wait there, too (``meshdsl.recomputation.hosting``): they are
sent where they are made, and brought back in front of their readers. A loop's stack of them is in the host's memory as
well, and so are its slices in the loop that reads them.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from meshdsl.ir.check import check_graph
from meshdsl.ir.graph import Atom, Graph, Op, TracedProgram, Value
from meshdsl.ir.loops import PortRole, loop_ports
from meshdsl.ir.rewrite import (
    copied,
    fresh_ids,
    look_up,
    new_value,
    renumber,
    returning,
    substitute,
    value_ids,
    values,
    with_ops,
)
from meshdsl.util.lazy import memoize_by_object

TO_DEVICE, TO_HOST = "to_device", "to_host"
TRANSFERS = (TO_DEVICE, TO_HOST)
_LAST_PHASE = "optimizer"


@memoize_by_object
def hosted_values(graph: Graph) -> frozenset[int]:
    """Returns the ids of the values that are in the host's memory, those in the bodies of loops among them."""
    ends = (end for residual in hosted_residuals(graph) for end in residual.ends)
    between = (end.value.id for end in ends if end.use is None and end.made_by != TO_DEVICE)
    sent = (op.outputs[0].id for op in graph.ops if op.name == TO_HOST)
    return frozenset((*(graph.inputs[i].id for i in graph.hosted), *sent, *between))


def hosted_outputs(graph: Graph) -> frozenset[int]:
    """Returns the positions of the results that are in the host's memory."""
    hosted = hosted_values(graph)
    return frozenset(j for j, x in enumerate(graph.returned) if isinstance(x, Value) and x.id in hosted)


def keep_on_host(
    program: TracedProgram, inputs: Collection[int], outputs: Collection[int], follows: Sequence[int | None]
) -> TracedProgram:
    """Returns the program with some inputs and results in the host's memory.

    Args:
      inputs, outputs: their positions. Arrays without elements, and literals, stay on the device; what is in the host's
        memory already stays there.
      follows: per result, the input that it replaces; one that returns this input as it is leaves it where it is.
    """
    graph = copied(program.graph)
    already = hosted_outputs(graph)
    given = {i for i in inputs if i not in graph.hosted and 0 not in graph.inputs[i].shape}
    taken = {j for j in outputs if j not in already and isinstance(x := graph.returned[j], Value) and 0 not in x.shape}
    if not given and not taken:
        return program
    stay = {j for j in taken if follows[j] in given and graph.returned[j] is graph.inputs[follows[j] or 0]}
    graph = _with_transfers(in_optimizer_order(graph), given, taken - stay, stay)
    graph = replace(graph, hosted=graph.hosted.union(given))
    renumber(graph)
    check_graph(graph)
    return replace(program, graph=graph)


def _with_transfers(graph: Graph, given: Collection[int], taken: Collection[int], stay: Collection[int]) -> Graph:
    """Returns the graph with transfers; the results that stay are inputs that are returned as they are."""
    ids, last = fresh_ids(graph), graph.ops[-1]
    waiting = {graph.inputs[i].id for i in given}
    on_device, on_host, ops = dict[int, Value](), dict[int, Value](), list[Op]()

    def load(op: Op, read: Iterable[Atom]) -> None:
        for x in values(read):
            if x.id in waiting:
                waiting.remove(x.id)
                made = on_device[x.id] = new_value(x, ids)
                ops.append(transfer(TO_DEVICE, op, x, made))

    def store(op: Op, made: Iterable[Value]) -> None:
        for j, x in ((j, x) for x in made for j in sorted(taken) if graph.returned[j] is x):
            on_host[j] = new_value(x, ids)
            ops.append(transfer(TO_HOST, op, on_device.get(x.id, x), on_host[j]))

    store(graph.ops[0], (v for i, v in enumerate(graph.inputs) if i not in given))
    for op in graph.ops[:-1]:
        load(op, op.inputs)
        ops.append(substitute(op, dict[int, Atom](on_device)))
        store(op, op.outputs)
    load(last, (x for j, x in enumerate(last.inputs) if j not in stay))
    store(last, (graph.inputs[i] for i in sorted(given)))
    returned = ((j, look_up(x, dict[int, Atom](on_device))) for j, x in enumerate(graph.returned))
    results = (graph.returned[j] if j in stay else on_host.get(j, x) for j, x in returned)
    return returning(with_ops(graph, (*ops, last)), results)


def transfer(name: str, beside: Op, x: Value, made: Value) -> Op:
    """Returns an operation that brings a value to the device, or sends it to the host, for another operation."""
    return Op(0, name, None, {}, (x,), (made,), beside.source, beside.phase, beside.scope)


# ---- Residuals -------------------------------------------------------------------------------------------------------


class HostedEnd(NamedTuple):
    """A value of a residual, where it is defined or used.

    Args:
      value: before it is sent, in the host's memory, or back on the device.
      use: the operation that uses it here, by its id, and the position of the operand; None where it is defined.
      stacked: how many of its dims are those of stacks, in front.
      made_by: the name of the transfer that makes it, if one does.
    """

    value: Value
    use: tuple[int, int] | None
    stacked: int
    made_by: str = ""


class HostedResidual(NamedTuple):
    """A value that a step sends to the host's memory to read it later.

    Args:
      sent_by: the transfer that sends it.
      trips: how often per step that is.
      loads: the transfers that bring it back; each runs as often.
      ends: all of its values, from the one that is sent to those that are brought back.
    """

    sent_by: Op
    trips: int
    loads: list[Op]
    ends: list[HostedEnd]


def hosted_residuals(graph: Graph) -> list[HostedResidual]:
    """Returns the values that a step sends to the host's memory to read them later."""
    found, known = list[HostedResidual](), dict[int, tuple[HostedResidual, int]]()
    _find_residuals(graph, frozenset(value_ids(graph.returned)), found, known)
    return found


def _find_residuals(
    graph: Graph,
    returned: Collection[int],
    found: list[HostedResidual],
    known: dict[int, tuple[HostedResidual, int]],
) -> None:
    """Adds what a graph and its bodies send.

    Args:
      returned: ids of the step's results.
      known: by the id of a value in the host's memory, its residual and how many of its dims are those of stacks.
    """

    def use(op: Op, i: int, x: Value) -> tuple[HostedResidual, int]:
        residual, stacked = known[x.id]
        residual.ends.append(HostedEnd(x, (op.id, i), stacked))
        return residual, stacked

    def define(x: Value, residual: HostedResidual, stacked: int, made_by: str = "") -> None:
        residual.ends.append(HostedEnd(x, None, stacked, made_by))
        if made_by != TO_DEVICE:
            known[x.id] = residual, stacked

    for op in graph.ops:
        x = op.inputs[0] if op.inputs else None
        if op.name == TO_HOST and op.outputs[0].id not in returned and isinstance(x, Value):
            found.append(HostedResidual(op, graph.trips, [], [HostedEnd(x, (op.id, 0), 0)]))
            define(op.outputs[0], found[-1], 0, TO_HOST)
        elif op.name == TO_DEVICE and isinstance(x, Value) and x.id in known:
            residual, stacked = use(op, 0, x)
            residual.loads.append(op)
            define(op.outputs[0], residual, stacked, TO_DEVICE)
        ports = list(loop_ports(op)) if op.name == "scan" else []
        for port in ports:
            x = op.inputs[port.operand] if port.role is PortRole.SLICE else None
            if isinstance(x, Value) and x.id in known:
                residual, stacked = use(op, port.operand, x)
                define(op.bodies[0].inputs[port.inputs[0][1]], residual, stacked - 1)
        for body in op.bodies:
            _find_residuals(body, returned, found, known)
        for port in ports:
            if port.role is PortRole.STACK:
                j = port.outputs[0][1]
                x = op.bodies[0].returned[j]
                if isinstance(x, Value) and x.id in known:
                    residual, stacked = use(op.bodies[0].ops[-1], j, x)
                    define(op.outputs[port.result], residual, stacked + 1)


# ---- The order of the optimizer --------------------------------------------------------------------------------------


def in_optimizer_order(graph: Graph) -> Graph:
    """Returns the graph with the operations behind the backward pass in the order of the results that need them."""
    *ops, last = graph.ops
    begins = next((i + 1 for i in reversed(range(len(ops))) if ops[i].phase != _LAST_PHASE), 0)
    tail = ops[begins:]
    if any(op.effects for op in tail):
        return graph
    made = {v.id: op for op in tail for v in op.outputs}
    behind = {x.id: _count_behind(x, made) for x in values(last.inputs)}
    ordered = dict[int, Op]()
    for x in sorted(values(last.inputs), key=lambda x: -behind[x.id]):
        _place(x, made, ordered)
    rest = [op for op in tail if op.id not in ordered]
    return with_ops(graph, (*ops[:begins], *ordered.values(), *rest, last))


def _count_behind(x: Value, made: dict[int, Op]) -> int:
    """Returns how many of these operations a value needs."""
    found, pending = set[int](), [x]
    while pending:
        op = made.get(pending.pop().id)
        if op is not None and op.id not in found:
            found.add(op.id)
            pending += values(op.inputs)
    return len(found)


def _place(x: Value, made: dict[int, Op], ordered: dict[int, Op]) -> None:
    """Appends the operations that a value needs, operands first, that are not there yet."""
    pending = [(made.get(x.id), False)]
    while pending:
        op, is_ready = pending.pop()
        if op is None or op.id in ordered:
            continue
        if is_ready:
            ordered[op.id] = op
        else:
            pending += [(op, True), *((made.get(v.id), False) for v in reversed(list(values(op.inputs))))]
