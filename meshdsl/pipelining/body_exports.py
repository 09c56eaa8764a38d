"""Blocks that the body of a user's ``jax.shard_map`` makes per microbatch and goes on with after the loop.

ZeRO by hand has one body for gradients and update. A block is the device's own, and the totals of a loop are arrays; so
the block leaves the body, laid side by side with those of the other devices, and enters it again after the loop:

    g = psum_scatter(g)            per microbatch      g = psum_scatter(g)
    w = w - 0.1 * g / norm    ->                       whole = leave_shard_map g         a total like any other
                               after the loop          g = enter_shard_map whole
                                                       w = w - 0.1 * g / norm
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import prod
from typing import Any

from jax import lax

from meshdsl.ir.graph import Atom, Graph, Op, Value, walk
from meshdsl.ir.manual import BOUNDARY, manual_values
from meshdsl.ir.rewrite import Table, fresh_ids, substitute, with_ops
from meshdsl.layouts.placement import Split
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.pipelining.accumulate import SplitStep
from meshdsl.pipelining.time_axis import AFTER_LOOP, TimePlacement, local_placement
from meshdsl.trace.read_jaxpr import written


def with_body_exports(step: SplitStep, own: Mapping[int, Sequence[str]]) -> tuple[Graph, TimePlacement]:
    """Returns the graph in which blocks leave the loop as whole arrays, and its placement in time.

    Args:
      own: by id, the blocks that operations after the loop read, with the axes on whose devices they differ.
    """
    places = step.placement.places | {v.id: AFTER_LOOP for op in step.after for v in op.outputs}
    placement = replace(step.placement, places=places, rows=dict(step.placement.rows))
    crossings, late = _Crossings(step.graph, placement), {op.id for op in (*step.after, step.graph.ops[-1])}
    table, ops = Table(), list[Op]()
    for op in step.graph.ops:
        ops.append(substitute(op, table) if op.id in late else op)
        for v in op.outputs:
            if v.id in own:
                made, table[v.id] = crossings.written(op, v, own[v.id])
                ops += made
    return with_ops(step.graph, ops), placement


class _Crossings:
    """Writes the operations by which blocks leave a body and enter it again, and places them in time."""

    def __init__(self, graph: Graph, placement: TimePlacement) -> None:
        self.placement, self.manual = placement, manual_values(graph)
        self.values, self.ops = fresh_ids(graph), count(1 + max(op.id for _, op in walk(graph)))
        known = [op.params for _, op in walk(graph) if op.name in BOUNDARY]
        self.about, self.sizes = known[0], {name: n for params in known for name, n in params["sizes"]}

    def written(self, op: Op, v: Value, own: Sequence[str]) -> tuple[list[Op], Atom]:
        """Returns the operations, and the block after the loop; on the way it has one dim more, of the devices."""
        manual = self.manual[v.id]
        axes = tuple(name for name in self.sizes if name in own)
        devices = prod(self.sizes[name] for name in axes)
        sizes = tuple((name, size) for name, size in self.sizes.items() if name in manual)
        spec = (axes, *[()] * len(v.shape))
        about = {**self.about, "spec": spec, "unreduced": (), "sizes": sizes}
        place: dict[str, Any] = {"source": op.source, "scope": op.scope, "phase": op.phase}

        def crossing(name: str, x: Atom, blocks: int) -> Op:
            result = Value(next(self.values), (blocks, *v.shape), v.dtype)
            return Op(next(self.ops), name, None, about, (x,), (result,), **place)

        inside, block = written(lambda x: lax.expand_dims(x, (0,)), [v], self.values, op)
        leave = crossing("leave_shard_map", block, devices)
        enter = crossing("enter_shard_map", leave.outputs[0], 1)
        after, result = written(lambda x: lax.squeeze(x, (0,)), enter.outputs, self.values, op)
        inside, after = ([replace(op, id=next(self.ops), manual=manual) for op in ops] for ops in (inside, after))
        self._place(v, [*inside, leave])
        self.placement.places.update((v.id, AFTER_LOOP) for op in (enter, *after) for v in op.outputs)
        return [*inside, leave, enter, *after], result

    def _place(self, v: Value, ops: Sequence[Op]) -> None:
        """Places a block in time as ``v``, which has one dim less."""
        place = self.placement.of(v)
        wider = Split(int(place.dim) + 1) if isinstance(place, Split) else place
        for op in ops:
            read, made = self.placement.of(op.inputs[0]), op.outputs[0]
            self.placement.places[made.id] = wider
            self.placement.rows[op.id] = Signature((local_placement(read),), (local_placement(wider),))
