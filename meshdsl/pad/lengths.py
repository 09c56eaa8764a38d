"""Lengths of dims that could be padded, so that they divide over a mesh."""

from collections.abc import Iterator
from itertools import combinations
from math import ceil, prod

from meshdsl.ir import Graph, Program
from meshdsl.layouts.mesh import Mesh
from meshdsl.pad.cut import padded_strands
from meshdsl.pin_faults import LONG
from meshdsl.planner.numbering import named, numbering_of


def padded_sizes(program: Program, mesh: Mesh) -> dict[int, int]:
    """The candidates, longest first: lengths that could be padded, and to what."""
    lengths = {n for shape in numbering_of(program.graph).shapes for n in shape}
    uneven = {n: m for n in lengths if (m := padded_length(n, mesh)) > n}
    found = {strand.size for strands in padded_strands(program.graph, uneven).values() for strand in strands}
    return {n: uneven[n] for n in sorted(found, reverse=True)}


def padded_length(n: int, mesh: Mesh) -> int:
    """``n``, rounded up to a multiple of as many devices as may split it."""
    products = {prod(axes) for count in range(len(mesh.sizes) + 1) for axes in combinations(mesh.sizes, count)}
    blocks = max((k for k in products if n >= LONG * k), default=1)
    return ceil(n / blocks) * blocks


def stated_sizes(graph: Graph, mesh: Mesh) -> Iterator[int]:
    """Lengths that the user said are split although they do not divide."""
    for op in named(graph, "constrain"):
        for d, n in enumerate(op.outputs[0].shape):
            axes = [axis for axis in op.params["layout"].splitting(d) if axis in mesh.names]
            if n % prod(mesh.axis(axis) for axis in axes):
                yield n
