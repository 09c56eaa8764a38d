"""A second target for comparison: the planned program, sharded by the XLA partitioner (GSPMD, Xu et al. 2021).

The graph runs on global arrays, and every value that is ``S`` or ``B`` in the plan carries that layout as a sharding
constraint. The compiler chooses and inserts the collectives. Partial values stay unconstrained, because a partial value
has no sharding.
"""

from collections.abc import Callable, Sequence

import jax
from jax import lax

from meshdsl.ir.graph import Op, TracedProgram, Value
from meshdsl.ir.solution import Solution
from meshdsl.lowering.interpreter import Arrays, Target, run_graph
from meshdsl.lowering.local.registry import bind
from meshdsl.lowering.shardings import named_sharding


class GlobalTarget(Target):
    """Global arrays by value, constrained to the layout in which the plan makes them."""

    def __init__(self, solution: Solution, mesh: jax.sharding.Mesh) -> None:
        self.solution, self.mesh = solution, mesh
        self.arrays: dict[int, jax.Array] = {}

    def inner(self) -> "GlobalTarget":
        """An empty environment on the same mesh."""
        return GlobalTarget(self.solution, self.mesh)

    def define(self, value: Value, array: jax.Array) -> None:
        """Keep the array, constrained if its layout is a sharding."""
        layout = self.solution.layouts[value.id]
        if not layout.partial() and value.shape:
            array = lax.with_sharding_constraint(array, named_sharding(layout, len(value.shape), self.mesh))
        self.arrays[value.id] = array

    def read(self, op: Op, index: int, value: Value) -> jax.Array:
        """The array itself, whatever layout ``op`` reads."""
        return self.arrays[value.id]

    def run(self, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
        """The primitive at global shapes."""
        return bind(op, *arrays)


def constrained_function(program: TracedProgram, solution: Solution, mesh: jax.sharding.Mesh) -> Callable[..., Arrays]:
    """The step on flat global arrays, to be jitted with the plan's input and output shardings."""
    return lambda *arrays: run_graph(program.graph, arrays, GlobalTarget(solution, mesh))
