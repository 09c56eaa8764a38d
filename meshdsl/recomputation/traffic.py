"""What keeping a residual costs besides its bytes: memory traffic, and forward operations that nothing else reads.

A residual that is kept is written in the forward pass and read in the backward pass. Recomputed, neither may happen:

    forward                 backward                  y kept                      y computed again
    y = tanh x              a = mul g d               writes y, d; reads d        reads x
    d = 1 - y * y           (g is a gradient)

Here ``d`` is *idle*: the forward pass computes it for the backward pass alone, so a copy there takes its place and the
original is dropped. (An operation that is not fused with others never counts as idle: whether it is dropped depends on
what is chosen for all that reads it.) Its copy is *fused*: one elementwise operation reads it, and it never reaches
memory. And it is not *written* unless it is kept. So to recompute can be faster than to keep, whatever the memory.

What a loop over layers keeps is stacked. A compiler fills the stack with zeros, copies into it what is in memory by
itself, and copies out of it what a product reads (``meshdsl.planner.costs.traffic``).
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from meshdsl.ir.graph import Graph, Op, Value
from meshdsl.ir.loops import PortRole, loop_ports
from meshdsl.ir.rewrite import values
from meshdsl.recomputation.levels import layer_loops, levels, reads_residual
from meshdsl.recomputation.min_cut import kept_anyway, stack_ids, stacked_anyway
from meshdsl.trace.annotate import FORWARD


class ResidualUse(NamedTuple):
    """How the two passes use a forward value.

    Args:
      idle: the forward pass computes it for the backward pass alone.
      written: it is written to memory in the forward pass even if it is not kept.
      fused: its copy in the backward pass is not written to memory.
      copied: how often its bytes are moved to stack it and to take it from the stack, if it is kept in a loop.
    """

    idle: bool
    written: bool
    fused: bool
    copied: int = 0


def residual_uses(graph: Graph, ends_fusion: Callable[[str], bool]) -> dict[int, ResidualUse]:
    """Returns the uses of forward values, in loops over layers and outside of them, by value id.

    Args:
      ends_fusion: whether operations of a name are not fused with their consumers.
    """
    found = dict[int, ResidualUse]()
    for level in levels(graph):
        loops = list(layer_loops(level))
        stacks = {id for pair in loops for id in stack_ids(pair)}
        readers = defaultdict[int, list[Op]](list)
        for op in filter(reads_residual, level.ops):
            for x in values(op.inputs):
                if x.id not in stacks:
                    readers[x.id].append(op)
        for pair in loops:
            slices = {residual.slice.id: residual.value.id for residual in pair.residuals}
            for op in pair.backward.bodies[0].ops:
                for x in values(op.inputs):
                    if x.id in slices:
                        readers[slices[x.id]].append(op)
        found |= _uses([op for op in level.ops if op.phase == FORWARD], kept_anyway(level), readers, ends_fusion)
        for forward in {pair.forward.id: pair.forward for pair in loops}.values():
            body = forward.bodies[0]
            ends = [i for port in loop_ports(forward) if port.role is PortRole.CARRY for _, i in port.outputs]
            carried = {end.id for i in ends if isinstance(end := body.returned[i], Value)}
            roots = carried | stacked_anyway(forward, loops, level, stacks)
            found |= _uses(body.ops[:-1], roots, readers, ends_fusion, stacks=True)
    return found


def _uses(
    ops: Sequence[Op],
    roots: Collection[int],
    backward: Mapping[int, Sequence[Op]],
    ends_fusion: Callable[[str], bool],
    stacks: bool = False,
) -> dict[int, ResidualUse]:
    """Returns the uses of the results of forward operations of one graph.

    Args:
      roots: ids of values that are needed outside of the two passes, or in the next iteration.
      backward: by value id, the operations of the backward pass that read it.
      stacks: it is the body of a loop, and what is kept is stacked.
    """
    found = dict[int, ResidualUse]()
    forward, copied = defaultdict[int, list[Op]](list), defaultdict[int, list[Op]](list)  # readers that stay, and idle

    def reads_memory(op: Op) -> bool:
        return ends_fusion(op.name) and not op.name.startswith("reduce_")

    for op in reversed(ops):
        is_end = ends_fusion(op.name)
        is_idle = not is_end and not any(v.id in roots or v.id in forward for v in op.outputs)
        for v in op.outputs:
            mine, behind = forward.get(v.id, []), [*backward.get(v.id, []), *copied.get(v.id, [])]
            behind = behind or mine
            is_written = not is_idle and (is_end or v.id in roots or len(mine) != 1 or any(map(reads_memory, mine)))
            is_fused = not is_end and len(behind) == 1 and not any(map(reads_memory, behind))
            moves = 1 + 2 * is_written + 2 * any(map(reads_memory, backward.get(v.id, ()))) if stacks else 0
            found[v.id] = ResidualUse(is_idle, is_written, is_fused, moves)
        for x in values(op.inputs):
            (copied if is_idle else forward)[x.id].append(op)
    return found
