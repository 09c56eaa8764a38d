"""The main target: the planned step as one ``shard_map`` with explicit collectives.

Every device runs the same walk over the graph on the blocks it holds. A value is kept once
per layout in which somebody reads it: an operand that is read in another layout than the one
it was made in is moved on first use, along the moves of the plan, and the result is kept for
the next reader. So the compiled program contains exactly the planned collectives, each under
a name like ``all-gather(model) float32``.
"""

from collections.abc import Callable, Iterable, Sequence

import jax
from jax.sharding import PartitionSpec

from meshdsl.ir import Graph, Literal, Op, Program, Value
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B
from meshdsl.lowering.boundary import input_layouts, output_layouts, partition_spec
from meshdsl.lowering.invariant import gathered_inside, tie, varying
from meshdsl.lowering.local.registry import Local, run_local
from meshdsl.lowering.moves import apply_move, move_scope
from meshdsl.lowering.walk import Arrays, Target, run_graph
from meshdsl.planner.solution import Solution


class LocalTarget(Target):
    """Blocks of one device by (value, layout)."""

    def __init__(self, solution: Solution) -> None:
        self.solution = solution
        self.sizes = solution.mesh.sizes_by_name
        self.nowhere = Layout(**dict.fromkeys(solution.mesh.names, B))
        self.blocks: dict[tuple[int, Layout], jax.Array] = {}

    def inner(self) -> "LocalTarget":
        """An empty environment under the same solution."""
        return LocalTarget(self.solution)

    def enter(self, body: Graph, consts: int, carries: int, arrays: Arrays) -> Arrays:
        """The body's inputs, with those tied to the trip whose collectives are planned inside the loop."""
        change = varying(body, consts, carries)
        return tie(arrays, gathered_inside(body, change, self.solution), change)

    def define(self, value: Value, array: jax.Array) -> None:
        """Keep the block in the layout in which the value is made."""
        self.blocks[value.id, self.solution.layouts[value.id]] = array

    def read(self, op: Op, index: int, value: Value) -> jax.Array:
        """The block in the layout in which ``op`` reads it."""
        return self._block(value, self.solution.uses[op.id, index])

    def run(self, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
        """The local program of ``op``."""
        inputs = tuple(self.solution.uses.get((op.id, i), self.nowhere) for i in range(len(op.inputs)))
        outputs = tuple(self.solution.layouts[value.id] for value in op.outputs)
        return run_local(op, arrays, Local(self.sizes, inputs, outputs))

    def _block(self, value: Value, layout: Layout) -> jax.Array:
        key = value.id, layout
        if key not in self.blocks:
            self.blocks[key] = self._moved(value, layout)
        return self.blocks[key]

    def _moved(self, value: Value, layout: Layout) -> jax.Array:
        move = next(move for move in self.solution.trees[value.id] if move.after == layout)
        source = self._block(value, move.before)
        with jax.named_scope(move_scope(move, value.dtype)):
            return apply_move(source, move, self.sizes)


def lower_program(program: Program, solution: Solution) -> Callable[..., Arrays]:
    """The step on one device's blocks, flat; it runs where the mesh axes are bound."""
    return lambda *blocks: run_graph(program.graph, blocks, LocalTarget(solution))


def sharded_function(program: Program, solution: Solution, mesh: jax.sharding.Mesh) -> Callable[..., Arrays]:
    """The step on flat global arrays, as a ``shard_map`` over ``mesh``."""
    ins = _specs(input_layouts(program, solution), program.graph.inputs)
    outs = _specs(output_layouts(program, solution), program.graph.returned)
    local = lower_program(program, solution)
    mapped: Callable[..., Arrays] = jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    return mapped


def _specs(layouts: Iterable[Layout], values: Iterable[Value | Literal]) -> tuple[PartitionSpec, ...]:
    return tuple(partition_spec(layout, len(value.shape)) for layout, value in zip(layouts, values, strict=True))
