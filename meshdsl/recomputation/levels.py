"""Where a program has a forward and a backward pass, which loops over layers belong together, what can run twice.

A *level* is a graph with forward and backward operations: that of the step, and the body of a loop over microbatches.
On a level, a loop over layers is a scan of the forward pass whose stacks a scan of the backward pass reads slice by
slice.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshdsl.ir.graph import Graph, Op, TracedProgram, Value, walk
from meshdsl.ir.host import TRANSFERS
from meshdsl.ir.loops import PortRole, loop_ports
from meshdsl.ir.manual import BOUNDARY
from meshdsl.ir.rewrite import value_ids, values
from meshdsl.trace.annotate import BACKWARD, FORWARD
from meshdsl.trace.read_jaxpr import REMATTED


class StackedResidual(NamedTuple):
    """A value of a forward scan's body that a backward scan reads.

    Args:
      value: in the body of the forward scan.
      slice: the input of the backward scan's body that it is read as.
    """

    value: Value
    slice: Value


class LayerLoops(NamedTuple):
    """A forward scan and a backward scan that reads its stacks.

    Args:
      residuals: what the backward scan reads, without what the user's ``jax.checkpoint`` keeps.
    """

    forward: Op
    backward: Op
    residuals: tuple[StackedResidual, ...]


def levels(graph: Graph) -> Iterator[Graph]:
    """Yields the graphs with forward and backward operations, the outermost first."""
    yield graph
    for op in graph.ops:
        for body in op.bodies if is_mixed(op) else ():
            yield from levels(body)


def is_mixed(op: Op) -> bool:
    """Returns whether the bodies of an operation have forward and backward operations."""
    phases = {inner.phase for body in op.bodies for inner in body.ops}
    return phases >= {FORWARD, BACKWARD}


def reads_residual(op: Op) -> bool:
    """Returns whether copies may replace what the operation reads of the forward pass.

    What the user's ``jax.checkpoint`` keeps is read by its barriers and by what it recomputes, and stays as written.
    """
    is_own = op.name == "optimization_barrier" or REMATTED in op.scope
    return op.phase == BACKWARD and op.name != "return" and not is_own


def layer_loops(graph: Graph) -> Iterator[LayerLoops]:
    """Yields the loops over layers of a level, in the order of the backward scans."""
    stacks: dict[int, tuple[Op, Value]] = {}
    for op in graph.ops:
        if op.name != "scan":
            continue
        if op.phase == FORWARD:
            body = op.bodies[0]
            for port in loop_ports(op):
                if port.role is PortRole.STACK and isinstance(x := body.returned[port.outputs[0][1]], Value):
                    stacks[op.outputs[port.result].id] = op, x
        elif op.phase == BACKWARD:
            yield from _loops_of(op, stacks)


def _loops_of(backward: Op, stacks: dict[int, tuple[Op, Value]]) -> Iterator[LayerLoops]:
    body, found = backward.bodies[0], dict[int, tuple[Op, list[StackedResidual]]]()
    own = {x.id for op in body.ops if op.name != "return" and not reads_residual(op) for x in values(op.inputs)}
    for port in loop_ports(backward):
        operand = backward.inputs[port.operand] if port.role is PortRole.SLICE else None
        if operand is not None and operand.id in stacks:
            forward, x = stacks[operand.id]
            inside = body.inputs[port.inputs[0][1]]
            if forward.params["length"] == backward.params["length"]:
                _, residuals = found.setdefault(forward.id, (forward, []))
                if inside.id not in own:
                    residuals.append(StackedResidual(x, inside))
    for forward, residuals in found.values():
        yield LayerLoops(forward, backward, tuple(residuals))


def recomputable(program: TracedProgram) -> frozenset[int]:
    """Returns the ids of the forward operations that can run twice, in loops over layers and outside of them."""
    found = set[int]()
    for level in levels(program.graph):
        loops = {pair.forward.id: pair.forward for pair in layer_loops(level)}
        found.update(op.id for op in level.ops if op.id not in loops and _can_run_twice(op, alone=True))
        for forward in loops.values():
            found.update(op.id for op in forward.bodies[0].ops if _can_run_twice(op, alone=False))
    return frozenset(found)


def kept_effects(program: TracedProgram) -> list[Op]:
    """Returns the forward operations with effects whose results other operations read: these run once."""
    found: list[Op] = []
    for level in levels(program.graph):
        bodies = {pair.forward.id: pair.forward.bodies[0] for pair in layer_loops(level)}
        for graph in (level, *bodies.values()):
            read = {id for op in graph.ops for id in value_ids(op.inputs)}
            for op in graph.ops:
                is_read = any(v.id in read for v in op.outputs)
                if op.phase == FORWARD and _has_effects(op) and is_read and op.id not in bodies:
                    found.append(op)
    return found


def _has_effects(op: Op) -> bool:
    return op.effects or any(inner.effects for body in op.bodies for _, inner in walk(body))


def _can_run_twice(op: Op, alone: bool) -> bool:
    """Whether an operation gives the same when it runs twice.

    Args:
      alone: its copy is in the same graph; without operands, compilers would merge both.
    """
    if op.phase != FORWARD or op.name in ("return", "constant", *TRANSFERS, *BOUNDARY) or is_mixed(op):
        return False
    is_manual = any(each.manual for each in (op, *(inner for body in op.bodies for _, inner in walk(body))))
    return not is_manual and not _has_effects(op) and (not alone or any(values(op.inputs)))
