"""Lowering: the planned step as one ``shard_map`` with explicit collectives.

Every device interprets the graph on its blocks. A value is stored once per layout in which it is used: an operand that
is needed in another layout than its producer's is resharded on first use, along the plan's resharding tree, and stored
for later uses; with the first step of a bucket, all of its steps are sent. So the compiled program contains exactly the
planned collectives, each under a name like ``all-gather(model) float32``. The products of a ring run together, where
the first of them stands (``rings``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from math import inf, prod
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshdsl.ir.graph import Leaf, Literal, Op, TracedProgram, Value, walk
from meshdsl.ir.host import TO_DEVICE, TRANSFERS
from meshdsl.ir.rings import ProductRing, chosen_rings
from meshdsl.ir.solution import Bucket, Solution
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B
from meshdsl.layouts.reshard import ReshardStep
from meshdsl.lowering.interpreter import Arrays, operand, run_graph
from meshdsl.lowering.keep_collectives import (
    RepeatedCollectives,
    gathered_inside,
    read_by,
    repeated_collectives,
    tie_to_iteration,
    varying,
)
from meshdsl.lowering.local.collectives import apply_bucket, apply_move, move_scope, opaque_copy
from meshdsl.lowering.local.registry import Local, run_local
from meshdsl.lowering.pipelined_scan import BlockTarget, pipelined_scan
from meshdsl.lowering.rings import gather_ring, scatter_ring
from meshdsl.lowering.shardings import input_layouts, output_layouts, partition_spec
from meshdsl.lowering.stack_order import SharedStacks, in_order, shared_stacks
from meshdsl.trace.annotate import FORWARD
from meshdsl.trace.read_jaxpr import REMATTED, starts_recomputation

T = TypeVar("T")
Shape = tuple[int, ...]
_DROP_BARRIERS = ("cpu",)  # platforms whose compilers drop barriers before they merge what is computed twice
_COPY_STACKS = ("gpu", "cuda", "rocm")  # platforms whose compiler copies stacks that two loops hold in different orders
_FIRST_NUMBER = 1 << 16  # of opaque copies of loops and recomputation; smaller ones are those of repeated collectives


class _Result(NamedTuple):
    """A block of a result, by value and layout, with its bytes and the phase of its operation."""

    key: tuple[int, Layout]
    bytes: int
    phase: str


class LocalTarget(BlockTarget):
    """The blocks of one device by (value, layout).

    Args:
      repeats: collectives that compilers could merge.
      numbers: of opaque copies in front of loops, behind them and of recomputation, each taken once.
      rings: per op id of a product that runs in parts, and of what stands between it and its collective, the ring.
      platform: of the devices, as jax names it.
      last_reads: per value that an operation reads, the id of the last one.
      stacks: those whose dims are kept in order.

    Attributes:
      drops_barriers: whether the compiler drops optimization barriers before it merges equal computations.
      results: blocks of results of floating-point numbers, in their order.
    """

    def __init__(
        self,
        solution: Solution,
        repeats: RepeatedCollectives,
        numbers: Iterator[int],
        rings: Mapping[int, ProductRing],
        platform: str,
        last_reads: Mapping[int, int],
        stacks: SharedStacks,
    ) -> None:
        self.solution, self.repeats, self.numbers, self.rings = solution, repeats, numbers, rings
        self.platform, self.last_reads, self.stacks = platform, last_reads, stacks
        self.drops_barriers = platform in _DROP_BARRIERS
        self.results: list[_Result] = []
        self.sizes = solution.mesh.sizes_by_name
        self.nowhere = Layout(**dict.fromkeys(solution.mesh.names, B))
        self.blocks: dict[tuple[int, Layout], jax.Array] = {}
        self.constants: set[int] = set()
        self.values: dict[int, Value] = {}
        self.buckets = {step: bucket for bucket in solution.buckets for step in bucket.steps}

    def inner(self) -> "LocalTarget":
        """An empty environment under the same solution."""
        return LocalTarget(
            self.solution, self.repeats, self.numbers, self.rings, self.platform, self.last_reads, self.stacks
        )

    def enter(self, op: Op, arrays: Arrays) -> Arrays:
        """The body's inputs; those with collectives planned inside the loop are tied to the iteration."""
        body, change = op.bodies[-1], varying(op)
        return tie_to_iteration(arrays, gathered_inside(body, change, self.solution), read_by(body, change))

    def scan(self, op: Op, arrays: Arrays) -> Arrays:
        """Iteration after iteration, or with collectives one iteration ahead and behind where that is planned."""
        choice = self.solution.prefetch.get(op.id)
        return pipelined_scan(self, op, arrays, choice) if choice else super().scan(op, arrays)

    def define(self, value: Value, array: jax.Array) -> None:
        """Stores the block in the layout of the value's producer."""
        is_slice = value.id in self.stacks.read
        self.store(value, self.solution.layouts[value.id], in_order(array) if is_slice else array)

    def store(self, value: Value, layout: Layout, block: jax.Array) -> None:
        """Stores a block in any layout."""
        self.blocks[value.id, layout] = block
        self.values[value.id] = value

    def opaque(self, arrays: Arrays) -> Arrays:
        """Copies of a number of their own."""
        number, (axis, size) = next(self.numbers), next(iter(self.solution.mesh))
        return tuple(opaque_copy(x, number, axis, size) for x in self.fixed(arrays))

    def fixed(self, arrays: Arrays) -> Arrays:
        """The arrays, each behind a barrier of its own."""
        return tuple(lax.optimization_barrier(x) for x in arrays)

    def fixed_together(self, arrays: Arrays) -> Arrays:
        """The arrays behind one barrier."""
        return tuple(lax.optimization_barrier(tuple(arrays)))

    def read(self, op: Op, index: int, value: Value) -> jax.Array:
        """Returns the block in the layout that ``op`` uses."""
        block = self.block(value, self.solution.uses[op.id, index])
        return in_order(block) if (op.id, index) in self.stacks.written else block

    def perform(self, op: Op) -> None:
        """Runs an operation; the products of a ring run with the first one, transfers change the memory of a block."""
        ring = self.rings.get(op.id)
        if op.name in TRANSFERS:
            to_device, array = op.name == TO_DEVICE, operand(self, op, 0)
            if to_device and self.results and not self.drops_barriers:  # compilers load as early as they can
                (array,) = self._held_back(op, (array,))
            self.define(
                op.outputs[0], jax.device_put(array, jax.memory.Space.Device if to_device else jax.memory.Space.Host)
            )
        elif ring is None:
            super().perform(op)
        elif ring.products[0].op is op:
            self._run_ring(ring)

    def _run_ring(self, ring: ProductRing) -> None:
        """Runs the products of a ring, and stores their results, or the block that their reduction leaves."""
        value, layout, ops = ring.value, ring.step.after, [each.op for each in ring.products]
        if not ring.gathers:
            left, right = (operand(self, ops[0], i) for i in range(2))
            if again := self.repeats.moves.get((value.id, layout)):
                left = opaque_copy(left, again, ring.axis, ring.devices)
            self.store(value, layout, scatter_ring(ring, (left, right), layout.local_shape(value.shape, self.sizes)))
            return
        source = self._source(value, ring.step)
        operands = [
            tuple(source if i == each.port else operand(self, each.op, i) for i in range(len(each.op.inputs)))
            for each in ring.products
        ]
        results = [self.solution.layouts[x.id].local_shape(x.shape, self.sizes) for op in ops for x in op.outputs]
        made, whole = gather_ring(ring, source, operands, results)
        for op, array in zip(ops, made, strict=True):
            self.define(op.outputs[0], array)
        if whole is not None:
            self.store(value, layout, whole)
            for op in ring.between:
                self.define(op.outputs[0], whole)

    def run(self, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
        """Runs the local program of ``op``."""
        inputs = tuple(self.solution.uses.get((op.id, i), self.nowhere) for i in range(len(op.inputs)))
        outputs = tuple(self.solution.layouts[value.id] for value in op.outputs)
        if all(isinstance(x, Literal) or x.id in self.constants for x in op.inputs):
            self.constants.update(value.id for value in op.outputs)
        if starts_recomputation(op):
            return self._held_back(op, arrays)
        made = run_local(op, self._apart(op, arrays), Local(self.sizes, inputs, outputs, self.platform))
        if REMATTED not in op.scope and any(isinstance(x, Value) for x in op.inputs):
            here = zip(op.outputs, outputs, made, strict=True)
            self.results += [_Result((value.id, at), x.nbytes, op.phase) for value, at, x in here if _is_number(x)]
        return made

    def _held_back(self, op: Op, arrays: Arrays) -> Arrays:
        """Returns operands tied to a late result, so that the operation runs no earlier.

        The result is written to memory for it. So it is the latest that is no larger than the operands, which is not
        what an elementwise operation makes of it on the way to the next product.
        """
        tie = self._late_result(op, sum(x.nbytes for x in arrays))
        if self.drops_barriers:
            number, (axis, size) = next(self.numbers), next(iter(self.solution.mesh))
            after = self.blocks[tie] if tie else None
            return tuple(opaque_copy(x, number, axis, size, after) for x in arrays)
        if not tie:
            return self.fixed(arrays)
        *held, self.blocks[tie] = self.fixed_together((*arrays, self.blocks[tie]))
        return tuple(held)

    def _late_result(self, op: Op, most: int) -> tuple[int, Layout] | None:
        """Returns the latest result of at most so many bytes, or else the smallest; None if there is none.

        Something must read it after the operation: compilers drop the tie to any other. For what is computed again,
        results of the forward pass do not count.
        """
        smallest, least = None, inf
        for key, size, phase in reversed(self.results):
            if (phase != FORWARD or op.name in TRANSFERS) and self.last_reads.get(key[0], -1) > op.id:
                if size <= most:
                    return key
                if size < least:
                    smallest, least = key, size
        return smallest

    def _apart(self, op: Op, arrays: Arrays) -> Arrays:
        """The operands, with opaque copies of those that were exchanged before; constants behind a barrier."""
        if self.solution.exchanging(op.id):
            arrays = tuple(
                lax.optimization_barrier(x) if self._is_constant(v) else x
                for v, x in zip(op.inputs, arrays, strict=True)
            )
        again = [self.repeats.reads.get((op.id, i), 0) for i in range(len(arrays))]
        if not any(again):
            return arrays
        axis = self.solution.exchanging(op.id)[0]
        pairs = zip(arrays, again, strict=True)
        return tuple(opaque_copy(x, n, axis, self.sizes[axis]) if n else x for x, n in pairs)

    def _is_constant(self, x: Value | Literal) -> bool:
        """Whether the compiler could work out a value, and what is planned to be sent of it."""
        return isinstance(x, Value) and x.id in self.constants

    def block(self, value: Value, layout: Layout) -> jax.Array:
        """Returns the block in a layout; it is resharded if it is not stored yet."""
        key = value.id, layout
        if key not in self.blocks:
            if bucket := self.buckets.get(key):
                self._send(bucket)
            else:
                self.blocks[key] = self._moved(value, layout)
        return self.blocks[key]

    def _send(self, bucket: Bucket) -> None:
        """Runs all reshard steps of a bucket as one collective, and stores their results."""
        moves = [self._move(value, layout) for value, layout in bucket.steps]
        values = [self.values[value] for value, _ in bucket.steps]
        sources = [self._source(value, move) for value, move in zip(values, moves, strict=True)]
        with jax.named_scope(move_scope(moves[0], values[0].dtype)):
            self.blocks |= zip(bucket.steps, apply_bucket(sources, moves, self.sizes), strict=True)

    def _move(self, value: int, layout: Layout) -> ReshardStep:
        return next(move for move in self.solution.trees[value] if move.after == layout)

    def _moved(self, value: Value, layout: Layout) -> jax.Array:
        if _empty(value):  # XLA has no collectives of nothing
            return jnp.zeros(layout.local_shape(value.shape, self.sizes), value.dtype)
        move = self._move(value.id, layout)
        source = self._source(value, move)
        with jax.named_scope(move_scope(move, value.dtype)):
            moved = apply_move(source, move, self.sizes)
        return lax.optimization_barrier(in_order(moved)) if value.id in self.stacks.stacks and move.bytes else moved

    def _source(self, value: Value, move: ReshardStep) -> jax.Array:
        """The block that a reshard step starts from; the compiler can neither work it out nor identify it."""
        source = self.block(value, move.before)
        if self._is_constant(value) and move.bytes:
            source = lax.optimization_barrier(source)
        if (value.id, move.after) in self.repeats.moves:
            axis = move.axes[0]
            source = opaque_copy(source, self.repeats.moves[value.id, move.after], axis, self.sizes[axis])
        return source


def lower_program(program: TracedProgram, solution: Solution, platform: str) -> Callable[..., Arrays]:
    """Returns the step on one device's blocks, flat; it runs where the mesh axes are bound.

    Args:
      platform: of the devices, as jax names it.
    """
    again = repeated_collectives(program.graph, solution)
    rings = {op.id: ring for ring in chosen_rings(program.graph, solution) for op in ring.ops}
    last_reads = {x.id: op.id for _, op in walk(program.graph) for x in op.inputs if isinstance(x, Value)}
    stacks = shared_stacks(program.graph) if platform in _COPY_STACKS else SharedStacks()

    def run(*blocks: jax.Array) -> Arrays:
        target = LocalTarget(solution, again, count(_FIRST_NUMBER), rings, platform, last_reads, stacks)
        return run_graph(program.graph, blocks, target)

    return run


def sharded_function(program: TracedProgram, solution: Solution, mesh: jax.sharding.Mesh) -> Callable[..., Arrays]:
    """Returns the step on flat global arrays, as a ``shard_map`` over ``mesh``.

    Arrays without elements do not cross its boundary, since the compiler fails on them; they are created inside.
    """
    before, after = program.graph.inputs, program.graph.returned
    ins, outs = input_layouts(program, solution), output_layouts(program, solution)
    local, sizes = lower_program(program, solution, mesh.devices.flat[0].platform), solution.mesh.sizes_by_name
    blocks = [layout.local_shape(value.shape, sizes) for layout, value in zip(ins, before, strict=True)]
    mapped: Callable[..., Iterable[jax.Array]] = jax.shard_map(
        lambda *full: tuple(_full(local(*_filled(full, before, blocks)), after)),
        mesh=mesh,
        in_specs=_specs(ins, before),
        out_specs=_specs(outs, after),
        check_vma=False,
    )
    whole = [value.shape for value in after]
    return lambda *arrays: _typed(_filled(mapped(*_full(arrays, before)), after, whole), program.outputs)


def _is_number(x: jax.Array) -> bool:
    is_array = hasattr(x, "nbytes")  # references are none
    return is_array and x.size > 0 and jnp.issubdtype(x.dtype, jnp.floating)


def _specs(layouts: Iterable[Layout], values: Sequence[Value | Literal]) -> tuple[PartitionSpec, ...]:
    specs = [partition_spec(layout, len(value.shape)) for layout, value in zip(layouts, values, strict=True)]
    return tuple(_full(specs, values))


def _full(items: Iterable[T], values: Iterable[Value | Literal]) -> Iterator[T]:
    """The items whose values have elements."""
    return (item for item, value in zip(items, values, strict=True) if not _empty(value))


def _filled(arrays: Iterable[jax.Array], values: Iterable[Value | Literal], shapes: Iterable[Shape]) -> Arrays:
    """The arrays, with those without elements among them."""
    given, places = iter(arrays), zip(values, shapes, strict=True)
    return tuple(jnp.zeros(shape, v.dtype) if _empty(v) else next(given) for v, shape in places)


def _empty(value: Value | Literal) -> bool:
    return not prod(value.shape) and (value.dtype == jnp.bool_ or jnp.issubdtype(value.dtype, jnp.number))


def _typed(arrays: Arrays, leaves: Sequence[Leaf]) -> Arrays:
    """The results, weakly typed where the step's are."""
    return tuple(_weak(x) if leaf.weak else x for x, leaf in zip(arrays, leaves, strict=True))


def _weak(x: jax.Array) -> jax.Array:
    made: jax.Array = lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)
    return made
