"""Which arrays a plan keeps in the host's memory: bytes there, bytes saved at the peak, seconds of transfers."""

from collections.abc import Iterator

from meshdsl.ir.graph import Graph, Op, TracedProgram, Value
from meshdsl.ir.host import TO_DEVICE, TO_HOST, TRANSFERS, hosted_outputs, hosted_residuals
from meshdsl.ir.solution import Pins, Solution
from meshdsl.plan.op_times import OpTimes
from meshdsl.plan.reasons import Reasons
from meshdsl.plan.types import HostedArray, HostMemory


def host_memory(
    program: TracedProgram, solution: Solution, pins: Pins, reasons: Reasons, times: OpTimes
) -> HostMemory | None:
    """Returns what a solution keeps in the host's memory; None if that is nothing."""
    arrays = tuple(_arrays(program, solution, pins, times))
    residuals = tuple(_residuals(program, solution, reasons, times))
    size = sum(array.bytes for array in (*arrays, *residuals))
    return HostMemory(arrays, size, residuals=residuals) if arrays or residuals else None


def _arrays(program: TracedProgram, solution: Solution, pins: Pins, times: OpTimes) -> Iterator[HostedArray]:
    graph, held = program.graph, dict(solution.held)
    transfers = [op for op in graph.ops if op.name in TRANSFERS]
    loads = {x.id: op for op in transfers if op.name == TO_DEVICE and isinstance(x := op.inputs[0], Value)}
    stores = {op.outputs[0].id: op for op in transfers if op.name == TO_HOST}

    def array(path: str, value: Value, copies: int, ops: list[Op]) -> HostedArray:
        size = solution.local_bytes(value)
        here = [op.outputs[0] if op.name == TO_DEVICE else op.inputs[0] for op in ops]
        on_device = any(held.get(x.id, 0) for x in here)
        return HostedArray(path, size * copies, 0 if on_device else size, sum(map(times.seconds, ops)))

    for i, j, copies in _boundary(graph, pins):
        result = graph.returned[j] if j is not None else None
        if i is not None:
            value = graph.inputs[i]
            ops = [op for op in (loads.get(value.id), result and stores.get(result.id)) if op]
            yield array(program.inputs[i].path, value, copies, ops)
        elif isinstance(result, Value) and j is not None:
            yield array(f"output {program.outputs[j].path}".rstrip(), result, copies, [stores[result.id]])


def _boundary(graph: Graph, pins: Pins) -> Iterator[tuple[int | None, int | None, int]]:
    """Yields inputs in the host's memory with the results that replace them, then other results, and how many copies.

    An input that is not donated stays beside the result that replaces it.
    """
    sent = hosted_outputs(graph)
    replaced = {i: j for j, i in enumerate(pins.follows) if j in sent and i in graph.hosted}
    for i in sorted(graph.hosted):
        j = replaced.get(i)
        yield i, j, 1 + (j is not None and i not in pins.donated)
    yield from ((None, j, 1) for j in sorted(sent - set(replaced.values())))


def boundary_bytes(graph: Graph, solution: Solution, pins: Pins) -> int:
    """Returns the bytes of the host's memory, per device, of inputs and results."""
    found = 0
    for i, j, copies in _boundary(graph, pins):
        x = graph.inputs[i] if i is not None else graph.returned[j or 0]
        found += copies * solution.local_bytes(x) if isinstance(x, Value) else 0
    return found


def _residuals(program: TracedProgram, solution: Solution, reasons: Reasons, times: OpTimes) -> Iterator[HostedArray]:
    """Yields the values that wait between forward and backward pass, those of loops as stacks."""
    held = dict(solution.held)
    for residual in hosted_residuals(program.graph):
        sent, here = residual.ends[0].value, {op.outputs[0].id for op in residual.loads}
        size = max(solution.local_bytes(end.value) for end in residual.ends)
        on_device = sum(held.get(id, 0) for id in here | {sent.id})
        seconds = residual.trips * sum(map(times.seconds, (residual.sent_by, *residual.loads)))
        name = reasons.name_and_line(sent.id)
        name = name if "(" in name else f"{name} ({reasons.line(residual.sent_by)})"  # what a loop carries has no line
        yield HostedArray(name, size, max(0, size - on_device), seconds)
