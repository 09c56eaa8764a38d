"""Keep values that loops over layers stack for the backward pass in the host's memory, until it reads them.

    forward loop         backward loop                 forward loop          backward loop
    y = tanh x           b = mul a y                   y = tanh x            y' = to_device z
    return y             (y is a slice of the stack)   h = to_host y         b = mul a y'
                                                       return h              (z is a slice of the stack)

A value is sent right after it is made, and brought back at the beginning of the body that reads it, so that compilers
can do both beside what is computed there. Outside of loops nothing is moved: compilers for GPU and TPU order unrolled
layers so that the memory is not saved.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from meshdsl.ir.graph import Graph, Op, Value
from meshdsl.ir.host import TO_DEVICE, TO_HOST, transfer
from meshdsl.ir.loops import PortRole, loop_ports
from meshdsl.ir.rewrite import Table, in_bodies, new_value, returning, substitute, value_ids, with_ops
from meshdsl.recomputation.levels import is_mixed, layer_loops, levels
from meshdsl.recomputation.min_cut import stack_ids, stacked_anyway
from meshdsl.trace.annotate import FORWARD


def hostable(graph: Graph) -> frozenset[int]:
    """Returns the ids of forward values that can wait in the host's memory if the backward pass reads them.

    Those are arrays of plain numbers in loops over layers, whose stacks nothing but backward loops reads.
    """
    found = set[int]()
    for level in levels(graph):
        loops = list(layer_loops(level))
        stacks = {id for pair in loops for id in stack_ids(pair)}
        for forward in {pair.forward.id: pair.forward for pair in loops}.values():
            body, others = forward.bodies[0], stacked_anyway(forward, loops, level, stacks)
            carries = (i for port in loop_ports(forward) if port.role is PortRole.CARRY for _, i in port.inputs)
            inside = (*(body.inputs[i] for i in carries), *(v for op in body.ops for v in op.outputs))
            found.update(v.id for v in inside if v.id not in others and _is_array(v))
    return frozenset(found)


def _is_array(x: Value) -> bool:
    return bool(x.shape) and 0 not in x.shape and isinstance(x.dtype, np.dtype)


def hosting(graph: Graph, chosen: Collection[int], ids: Iterator[int]) -> Graph:
    """Returns the graph with residuals in the host's memory.

    A value of a loop stays on the device if anything but loops reads its stack, or they read it other than by slices.

    Args:
      chosen: ids of values among ``hostable``.
      ids: of new values.
    """
    inside = partial(hosting, chosen=chosen, ids=ids)
    ops = [in_bodies(inside, op) if is_mixed(op) else op for op in graph.ops]
    stacks = {id: x for op in ops if op.phase == FORWARD for id, x in _stacks(op) if x.id in chosen}
    sliced = {id: x for id, x in stacks.items() if _is_only_sliced(id, ops)}
    stay = {x.id for id, x in stacks.items() if id not in sliced}
    sent = {id: x for id, x in sliced.items() if x.id not in stay}
    return with_ops(graph, (_sending(op, sent, ids) if op.phase == FORWARD else _reading(op, sent, ids) for op in ops))


def _stacks(op: Op) -> Iterator[tuple[int, Value]]:
    """Yields the stacks of a scan by id, each with the value of its body."""
    for port in loop_ports(op) if op.name == "scan" else ():
        x = op.bodies[0].returned[port.outputs[0][1]] if port.role is PortRole.STACK else None
        if isinstance(x, Value):
            yield op.outputs[port.result].id, x


def _is_only_sliced(stack: int, ops: Collection[Op]) -> bool:
    """Whether nothing but scans behind the forward pass reads a stack, all of them slice by slice."""
    for op in ops:
        if stack in value_ids(op.inputs):
            operands = [port.operand for port in loop_ports(op) if port.role is not PortRole.SLICE]
            others = value_ids(op.inputs[i] for i in operands if i >= 0) if op.name == "scan" else [stack]
            if op.phase == FORWARD or stack in others:
                return False
    return True


def _sending(op: Op, sent: Mapping[int, Value], ids: Iterator[int]) -> Op:
    """Returns a forward operation that sends the slices of such stacks to the host's memory."""
    if sent.keys().isdisjoint(v.id for v in op.outputs):
        return op
    body, here = op.bodies[0], [sent[v.id] for v in op.outputs if v.id in sent]
    on_host = {x.id: new_value(x, ids) for x in here}
    ops = [transfer(TO_HOST, op, x, on_host[x.id]) for x in body.inputs if x.id in on_host]
    for each in body.ops[:-1]:
        ops += [each, *(transfer(TO_HOST, each, x, on_host[x.id]) for x in each.outputs if x.id in on_host)]
    results = list(body.returned)
    for port in loop_ports(op):
        if port.result >= 0 and op.outputs[port.result].id in sent:
            j = port.outputs[0][1]
            results[j] = on_host[sent[op.outputs[port.result].id].id]
    return replace(op, bodies=(returning(with_ops(body, (*ops, body.ops[-1])), results),))


def _reading(op: Op, sent: Mapping[int, Value], ids: Iterator[int]) -> Op:
    """Returns an operation behind the forward pass that brings slices of such stacks to the device."""
    if sent.keys().isdisjoint(value_ids(op.inputs)):
        return op
    body, table, ops = op.bodies[0], Table(), list[Op]()
    for port in loop_ports(op):
        if port.role is PortRole.SLICE and not sent.keys().isdisjoint(value_ids([op.inputs[port.operand]])):
            inside = body.inputs[port.inputs[0][1]]
            made = table[inside.id] = new_value(inside, ids)
            ops.append(transfer(TO_DEVICE, op, inside, made))
    return replace(op, bodies=(with_ops(body, (*ops, *(substitute(each, table) for each in body.ops))),))
