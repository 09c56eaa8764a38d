"""Ragged exchanges for a topology: one collective that sends the routed rows alone, or rounds of equal slots.

A traced step says rounds, which run everywhere. What a plan counts, and what runs on the devices that it is made for,
follows from whether their compiler has the collective (``Topology.ragged``), and whether it sends less: compilers for
TPUs pad rows, which makes one number per row as long as 256 in bfloat16.
"""

from dataclasses import replace
from math import ceil

from meshdsl.ir.graph import Op, TracedProgram
from meshdsl.ir.rewrite import with_each_op
from meshdsl.layouts.topology import Topology

_UNITS = {"tpu": 512}  # bytes to whose multiples a backend's collective pads rows; libtpu 0.0.42 for v5e and v6e


def fit_exchanges(program: TracedProgram, topology: Topology) -> TracedProgram:
    """Returns the program with exchanges as the topology's compiler has them."""

    def fitted(op: Op) -> Op:
        if op.name != "ragged_exchange":
            return op
        ragged = topology.ragged and _ragged_sends_less(op, _UNITS.get(topology.backend, 1))
        return op if op.params["ragged"] == ragged else replace(op, params={**op.params, "ragged": ragged})

    graph = with_each_op(program.graph, fitted)
    return program if graph is program.graph else replace(program, graph=graph)


def _ragged_sends_less(op: Op, unit: int) -> bool:
    """Whether padded rows, as many as the smaller side has, are at most the slots, as many as the larger has."""
    given, made = op.inputs[0].shape[-2], op.outputs[0]
    taken, row = made.shape[-2], made.shape[-1] * made.itemsize
    return ceil(row / unit) * unit * min(given, taken) <= row * max(given, taken)
