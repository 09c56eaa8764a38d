"""How the dims of stacks lie in memory: in one order in all loops, so that no stack is copied between two of them.

XLA assigns a layout to every array, loop by loop, with the bodies of loops before what surrounds them. A gather makes
the gathered dim the slowest one, a product wants the dims that it contracts side by side, and a stack takes the order
of its slices. Where the loop that writes a stack and the one that reads it differ, XLA copies the whole stack in
between, and both copies are live at the peak of the step:

    x = scan(forward)     residuals of all layers, as f32[24,8,16,2048,1536]
    y = transpose(x)      the same again, as f32[24,2048,8,1536,16]
    z = scan(backward)    reads slices of y

So slices of the stacks that two loops of one graph write or read lie in the order of their dims. A slice that is made
or needed in another order is turned in its iteration, as part of the kernels there. What is gathered for two loops is
turned once, in front of both, behind a barrier: otherwise XLA reads some of it from what the collective received, which
then stays live as well. This is done for GPUs, whose compiler was seen to do both (``docs/evidence/remat.md``).
"""

from collections import defaultdict
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from meshdsl.ir.graph import Graph, Value, walk
from meshdsl.ir.host import hosted_values
from meshdsl.ir.index import Use
from meshdsl.ir.loops import loop_ports


class SharedStacks(NamedTuple):
    """The stacks that two loops of one graph write or read, and the slices that go through their bodies.

    Args:
      stacks: value ids.
      read: ids of the inputs of bodies that are slices of these.
      written: uses by which bodies return slices of these.
    """

    stacks: frozenset[int] = frozenset()
    read: frozenset[int] = frozenset()
    written: frozenset[Use] = frozenset()


def shared_stacks(graph: Graph) -> SharedStacks:
    """Returns the stacks on the device that two loops share, in a graph and the bodies in it."""
    read, written = defaultdict[int, list[int]](list), defaultdict[int, list[Use]](list)
    for _, op in walk(graph):
        for port in (port for port in loop_ports(op) if port.stacked):
            stack = op.outputs[port.result] if port.inputs == () else op.inputs[port.operand]
            if isinstance(stack, Value):
                read[stack.id] += [op.bodies[body].inputs[i].id for body, i in port.inputs]
                written[stack.id] += [(op.bodies[body].ops[-1].id, j) for body, j in port.outputs]
    shared = frozenset(stack for stack in read if len(read[stack]) + len(written[stack]) > 1) - hosted_values(graph)
    return SharedStacks(
        shared,
        frozenset(value for stack in shared for value in read[stack]),
        frozenset(use for stack in shared for use in written[stack]),
    )


def in_order(array: jax.Array) -> jax.Array:
    """Returns the array, in memory in the order of its dims."""
    if array.ndim < 2 or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    ordered: jax.Array = with_layout_constraint(array, Layout(tuple(range(array.ndim))))
    return ordered
