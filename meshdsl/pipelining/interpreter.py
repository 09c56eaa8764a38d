"""Evaluates a graph for one microbatch while jax traces.

``Runner`` is an interpreter whose environment maps (value, placement on the microbatch axis) to an array. An iteration
holds the block of a split value, its contribution to a sum, or the whole value, as ``time_axis`` placed it; every other
form in which an operation uses a value is derived on demand:

    whole -> block       recompute the value as a block if its producer can (a mask, zeros, random bits), else slice it
    whole -> summand     the value itself in iteration 0, the identity of the reduction in all others
    summand -> whole     the estimate of PER_MICROBATCH: this iteration's contribution times the number of microbatches

Operations are traced under a name scope with their id (``traced_from``), so that ``restore_sources`` can give the
operations of the new graph the source lines and scopes of those they come from.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value, walk
from meshdsl.ir.loops import split_operands
from meshdsl.ir.manual import BOUNDARY
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B, Partial, Placement, Split
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.lowering.interpreter import Arrays, literal
from meshdsl.lowering.local.collectives import identity
from meshdsl.lowering.local.registry import Local, position, run_local
from meshdsl.pipelining.time_axis import PER_MICROBATCH, TimePlacement, local_placement, time_rows
from meshdsl.primitives.constrain import constrain_p
from meshdsl.rules.elementwise import is_zero
from meshdsl.rules.registry import all_broadcast
from meshdsl.rules.shard_map import KINDS
from meshdsl.schedules.simulate import part_of, part_scope
from meshdsl.trace.read_jaxpr import CallSite, reader

AXIS = "microbatch"  # the name of the axis over time, for local programs
Environment = dict[tuple[int, Placement], jax.Array]

# ---- Interpreter -----------------------------------------------------------------------------------------------------


@dataclass
class Runner:
    """The environment of one iteration, for the values of one graph.

    Args:
      placement: the time placement of every value; values it does not mention are whole.
      arrays: per value id and placement, the array of this iteration.
      producers: per value id of this graph, the operation that computes it.
    """

    placement: TimePlacement
    arrays: Environment = field(default_factory=dict)
    producers: dict[int, Op] = field(default_factory=dict)

    def add_producers(self, graph: Graph) -> None:
        """Let values of ``graph`` be computed on demand."""
        self.producers.update((v.id, op) for op in graph.ops for v in op.outputs)

    def define(self, values: Iterable[Value], arrays: Iterable[jax.Array], placements: Sequence[Placement]) -> None:
        """Bind values, held under these placements, to arrays."""
        self.arrays.update(((v.id, p), x) for v, x, p in zip(values, arrays, placements, strict=True))

    def run(self, ops: Iterable[Op]) -> None:
        """Run operations in order, each by the row that the analysis chose."""
        for op in ops:
            self._run(op, self.placement.rows.get(op.id) or all_broadcast(op))

    def _run(self, op: Op, row: Signature) -> None:
        with traced_from(op):
            if op.name == "stage":
                self.define(op.outputs, map(self.local, op.inputs), self._placements(op.outputs))
            elif op.bodies:
                placements = self._placements(op.outputs)
                self.define(op.outputs, _LOOPS[op.name](self, op, placements), placements)
            else:
                arrays = tuple(self.get(x, p) for x, p in zip(op.inputs, row.inputs, strict=True))
                self.define(op.outputs, self._results(op, arrays, row), row.outputs)

    def _results(self, op: Op, arrays: Arrays, row: Signature) -> Arrays:
        if op.name == "constant":
            return (op.params["value"],)
        if op.name == "constrain":
            return (constrain_p.bind(arrays[0], **op.params),)
        if op.name in _OF_DEVICES:
            made = (self._local_shape(v, p) for v, p in zip(op.outputs, row.outputs, strict=True))
            return tuple(_of_devices_p.bind(*arrays, op=op, made=tuple(made)))
        ports = (tuple(Layout(**{AXIS: p}) for p in side) for side in (row.inputs, row.outputs))
        return run_local(op, arrays, Local({AXIS: self.placement.microbatches}, next(ports), next(ports)))

    def _local_shape(self, v: Value, placed: Placement) -> jax.ShapeDtypeStruct:
        dims = (n // self.placement.microbatches if placed == Split(d) else n for d, n in enumerate(v.shape))
        return jax.ShapeDtypeStruct(tuple(dims), v.dtype)

    def get(self, x: Atom, required: Placement) -> jax.Array:
        """Returns a value held under ``required``, deriving it if it is not there yet."""
        if isinstance(x, Literal):
            return literal(x)
        if (x.id, required) not in self.arrays:
            self._derive(x, required)
        return self.arrays[x.id, required]

    def local(self, x: Atom) -> jax.Array:
        """Returns a value as the analysis placed it."""
        return self.get(x, local_placement(self.placement.of(x)))

    def _placements(self, values: Iterable[Atom]) -> list[Placement]:
        return [local_placement(self.placement.of(v)) for v in values]

    def _derive(self, x: Value, required: Placement) -> None:
        current = local_placement(self.placement.of(x))
        if required is current:
            self.run([self.producers[x.id]])
        elif isinstance(required, Split):
            self._derive_block(x, required)
        else:
            self.arrays[x.id, required] = self._converted(x, current, required)

    def _derive_block(self, x: Value, required: Split) -> None:
        """Compute a block of a whole value: by its producer if that can compute blocks, else by a slice."""
        row = self._block_row(x, required)
        if row is not None:
            self._run(self.producers[x.id], row)
        else:
            size = x.shape[int(required.dim)] // self.placement.microbatches
            whole = self.get(x, B)
            self.arrays[x.id, required] = lax.dynamic_slice_in_dim(
                whole, position(AXIS) * size, size, int(required.dim)
            )

    def _block_row(self, x: Value, required: Split) -> Signature | None:
        op = self.producers.get(x.id)
        if op is None or op.bodies or any(isinstance(self.placement.of(y), Split) for y in op.inputs):
            return None
        at = op.outputs.index(x)
        rows = (row for row in time_rows(op, self.placement.microbatches) if row.outputs[at] is required)
        return next((row for row in rows if not any(isinstance(p, Partial) for p in row.inputs)), None)

    def _converted(self, x: Value, current: Placement, required: Placement) -> jax.Array:
        """Returns a summand as a whole value, or a whole value as a summand; see the module docstring."""
        microbatches = self.placement.microbatches
        if isinstance(current, Partial):
            summand = self.get(x, current)
            return summand * microbatches if current is Partial("sum") else summand
        if self.placement.of(x) is PER_MICROBATCH:
            return self.get(x, B) / microbatches
        assert isinstance(required, Partial)
        neutral = jnp.asarray(identity(required.reduction, x.dtype), x.dtype)
        whole = self.get(x, B)
        producer = self.producers.get(x.id)
        zeros = producer is not None and producer.name == "broadcast_in_dim" and is_zero(producer.inputs[0])
        if zeros and required.reduction == "sum":
            return whole
        return jnp.where(position(AXIS) == 0, whole, neutral)

    def run_body(self, graph: Graph, arrays: Arrays, placements: Sequence[Placement]) -> Arrays:
        """Returns what a loop's body returns in this iteration, held under ``placements``."""
        inner = Runner(self.placement)
        inner.add_producers(graph)
        inner.define(graph.inputs, arrays, self._placements(graph.inputs))
        inner.run(graph.ops[:-1])
        return tuple(inner.get(x, p) for x, p in zip(graph.returned, placements, strict=True))

    def operands(self, atoms: Sequence[Atom], inputs: Sequence[Value], stacked: bool = False) -> Arrays:
        """Returns operands of a loop, held as the body's ``inputs`` are; ``stacked`` ones have a leading dim more."""
        placements = (_shifted(p, 1) if stacked else p for p in self._placements(inputs))
        return tuple(self.get(x, p) for x, p in zip(atoms, placements, strict=True))


def _shifted(placement: Placement, dims: int) -> Placement:
    return Split(int(placement.dim) + dims) if isinstance(placement, Split) else placement


def slice_placement(placement: Placement) -> Placement:
    """Returns the placement of the slices of a stack along its first dim."""
    return _shifted(placement, -1)


# ---- Loops and conditionals ------------------------------------------------------------------------------------------


def scan_options(op: Op) -> dict[str, Any]:
    """Returns the keyword arguments of ``lax.scan`` that say in which order it iterates."""
    return {name: op.params[name] for name in ("reverse", "unroll") if name in op.params}


def _scan(runner: Runner, op: Op, placements: Sequence[Placement]) -> Arrays:
    (body,) = op.bodies
    outside, inside = split_operands(op, op.inputs), split_operands(op, body.inputs)
    consts = runner.operands(outside.consts, inside.consts)
    start = runner.operands(outside.carry, inside.carry)
    stacks = runner.operands(outside.slices, inside.slices, stacked=True)
    carried = (local_placement(runner.placement.of(v)) for v in inside.carry)
    returned = [*carried, *map(slice_placement, placements[len(start) :])]

    def step(carry: Arrays, slices: Arrays) -> tuple[Arrays, Arrays]:
        results = runner.run_body(body, (*consts, *carry, *slices), returned)
        return results[: len(carry)], results[len(carry) :]

    carry, made = lax.scan(step, start, stacks, length=op.params["length"], **scan_options(op))
    return (*carry, *made)


def _while(runner: Runner, op: Op, placements: Sequence[Placement]) -> Arrays:
    (condition, body), outside = op.bodies, split_operands(op, op.inputs)
    carries = body.inputs[len(outside.consts) :]
    condition_consts = runner.operands(outside.condition, condition.inputs[: len(outside.condition)])
    body_consts = runner.operands(outside.consts, body.inputs[: len(outside.consts)])
    carry = runner.operands(outside.carry, carries)
    carried = [local_placement(runner.placement.of(v)) for v in carries]
    results: Arrays = lax.while_loop(
        lambda carry: runner.run_body(condition, (*condition_consts, *carry), [B])[0],
        lambda carry: runner.run_body(body, (*body_consts, *carry), carried),
        carry,
    )
    return results


def _cond(runner: Runner, op: Op, placements: Sequence[Placement]) -> Arrays:
    outside = split_operands(op, op.inputs)
    operands = tuple(runner.local(x) for x in outside.consts)

    def branch(body: Graph) -> Callable[..., Arrays]:
        return lambda *arrays: runner.run_body(body, arrays, placements)

    results: Arrays = lax.switch(runner.get(outside.predicate[0], B), [branch(body) for body in op.bodies], *operands)
    return results


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}


# ---- The user's shard_maps -------------------------------------------------------------------------------------------
# Outside of a shard_map jax cannot trace its boundary and collectives, so a primitive of ours stands for them until the
# new jaxpr is read. Stages of a pipeline are vmapped, which gives every block one dim more, of ranks, in front.


_OF_DEVICES = (*BOUNDARY, *KINDS, "axis_index")
_of_devices_p = Primitive("of_devices")
_of_devices_p.multiple_results = True
_of_devices_p.def_abstract_eval(
    lambda *operands, op, made: [jax.core.ShapedArray(like.shape, like.dtype) for like in made]
)


def _batch_of_devices(
    operands: Arrays, dims: Sequence[Any], *, op: Op, made: Sequence[jax.ShapeDtypeStruct]
) -> tuple[Arrays, Sequence[int]]:
    (x,), (dim,) = operands, dims  # those of several operands are refused in stages
    params = op.params | {name: op.params[name] + 1 for name in ("dim", "split", "join") if name in op.params}
    if "spec" in params:
        params["spec"] = ((), *params["spec"])
    wider = [jax.ShapeDtypeStruct((x.shape[dim], *like.shape), like.dtype) for like in made]
    results = _of_devices_p.bind(jnp.moveaxis(x, dim, 0), op=replace(op, params=params), made=tuple(wider))
    return tuple(results), [0] * len(results)


batching.primitive_batchers[_of_devices_p] = _batch_of_devices


@reader("of_devices")
def _of_devices(site: CallSite) -> Sequence[Atom]:
    op = site.eqn.params["op"]
    return site.emit(op.name, site.inputs, site.eqn.outvars, primitive=op.primitive, params=op.params)


# ---- Provenance ------------------------------------------------------------------------------------------------------

_MARK = "meshdsl-operation-"
_MARKED = re.compile(rf"{_MARK}(\d+)")


def traced_from(op: Op) -> AbstractContextManager[Any]:
    """Operations traced in this context come from ``op``."""
    return jax.named_scope(f"{_MARK}{op.id}")


def traced_in(part: str) -> AbstractContextManager[Any]:
    """Operations traced in this context belong to a part of a pipeline's tick; it stays in their scope."""
    return jax.named_scope(part_scope(part))


def restore_sources(graph: Graph, before: Graph) -> Graph:
    """Returns the graph with source lines, scopes and manual axes of the operations of ``before``.

    Tick parts lead the scope.
    """
    known = {op.id: op for _, op in walk(before)}
    for _, op in walk(graph):
        marks = _MARKED.findall(op.scope)
        origin = known[int(marks[-1])] if marks else None
        scope, part = origin.scope if origin else "", part_of(op.scope)
        op.source = origin.source if origin else op.source
        op.manual = origin.manual if origin else ()
        op.scope = f"{part_scope(part)}/{scope}" if part else scope
    return graph


# ---- Reference -------------------------------------------------------------------------------------------------------


def whole_function(graph: Graph) -> Callable[..., Arrays]:
    """Returns a function that evaluates the graph on whole arrays, without a mesh."""

    def run(*arrays: jax.Array) -> Arrays:
        runner = Runner(TimePlacement(1))
        runner.define(graph.inputs, arrays, [B] * len(arrays))
        runner.run(graph.ops[:-1])
        return tuple(runner.get(x, B) for x in graph.returned)

    return run
