"""Ragged exchanges for a topology: one collective that sends the routed rows alone, or rounds of equal slots.

A traced step says rounds, which run everywhere. What a plan counts, and what runs on the devices that it is made for,
follows from whether their compiler has the collective (``Topology.ragged``).
"""

from dataclasses import replace

from meshdsl.ir.graph import Op, TracedProgram
from meshdsl.ir.rewrite import with_each_op
from meshdsl.layouts.topology import Topology


def fit_exchanges(program: TracedProgram, topology: Topology) -> TracedProgram:
    """Returns the program with exchanges as the topology's compiler has them."""

    def fitted(op: Op) -> Op:
        is_fitted = op.name != "ragged_exchange" or op.params["ragged"] == topology.ragged
        return op if is_fitted else replace(op, params={**op.params, "ragged": topology.ragged})

    graph = with_each_op(program.graph, fitted)
    return program if graph is program.graph else replace(program, graph=graph)
