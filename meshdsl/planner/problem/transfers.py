"""Transfers to and from the host's memory as parts of nodes: what lies there is never communicated.

A transfer at the boundary of a step belongs to the node of its input or output. A residual that waits in the host's
memory is one node, with its transfers, and with the ports of loops through which it passes:

    body of the forward loop     h = to_host x       return h
    around both                                      stack of h   ->   read slice by slice
    body of the backward loop                        d = to_device slice

All of these have one layout, but that stacks have one more dim in front; ``x`` can be resharded before it is sent, and
``d`` after it is back.
"""

from collections.abc import Iterator, Sequence
from functools import cache

from meshdsl.ir.graph import Graph, Value
from meshdsl.ir.host import TO_DEVICE, TRANSFERS, hosted_residuals
from meshdsl.layouts.placement import B, Placement, Split
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.planner.costs.fixed_point import weight_of
from meshdsl.planner.costs.op_cost import OpWork
from meshdsl.planner.problem.variables import Node, Port, Rows, link_node

# ---- Inputs and outputs ----------------------------------------------------------------------------------------------


TransferPorts = dict[int, tuple[Port, Port]]


def boundary_transfers(graph: Graph) -> tuple[TransferPorts, TransferPorts]:
    """Returns the ports of the transfers to the device by their operand, and of those to the host by their result."""
    loads, stores = TransferPorts(), TransferPorts()
    for op in graph.ops:
        if op.name in TRANSFERS and isinstance(x := op.inputs[0], Value):
            ports = Port(x, False, (op.id, 0)), Port(op.outputs[0], True)
            if op.name == TO_DEVICE:
                loads[x.id] = ports
            else:
                stores[op.outputs[0].id] = ports
    return loads, stores


def transfer_work(ports: Sequence[Port], loads: TransferPorts, stores: TransferPorts) -> OpWork:
    """Returns the work of the transfers among the ports of a node."""
    loaded = {made.value.id for _, made in loads.values()}
    at = [(p, port.value.id) for p, port in enumerate(ports) if port.defines]
    into, out = (tuple(p for p, v in at if v in some) for some in (loaded, stores))
    return OpWork(0.0, (), loads=into, stores=out)


# ---- Residuals -------------------------------------------------------------------------------------------------------


def residual_nodes(graph: Graph) -> Iterator[Node]:
    """Yields a node for each value that a step sends to the host's memory to read it later."""
    for residual in hosted_residuals(graph):
        ends = residual.ends
        loads, stores = (tuple(p for p, end in enumerate(ends) if end.made_by == name) for name in TRANSFERS)
        ports = tuple(Port(end.value, end.use is None, end.use) for end in ends)
        rows = _stacked_rows(tuple(end.stacked for end in ends), len(ends[0].value.shape))
        work = OpWork(0.0, (), loads=loads, stores=stores)
        name = f"transfers of a residual made at {residual.sent_by.source}"
        yield link_node(ports, rows, name, weight_of(residual.trips), work)


@cache
def _stacked_rows(stacked: tuple[int, ...], rank: int) -> Rows:
    """Returns the rows of ports with one layout, that of a value of ``rank`` dims; each has so many more in front."""
    placed: list[tuple[Placement, ...]] = [tuple(Split(d + more) for more in stacked) for d in range(rank)]
    return tuple(Signature((), each) for each in ((B,) * len(stacked), *placed))
