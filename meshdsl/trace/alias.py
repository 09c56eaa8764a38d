"""Clean-up: operations that return their operand as it is are taken out.

Layouts are the planner's business, so placing an array on devices, or constraining its
sharding the jax way, is an identity here too.
"""

from meshdsl.ir import Graph, Op, Value
from meshdsl.trace.graphs import Table, in_bodies, substitute, with_ops

PLACING = frozenset({"sharding_constraint", "layout_constraint", "mesh_cast", "reshard", "device_put"})
_ALWAYS = PLACING | {"copy", "copy_p", "stop_gradient", "name", "pvary", "pcast"}
# Identities whenever shape and dtype stay the same.
_BY_SHAPE = frozenset({"convert_element_type", "broadcast_in_dim", "squeeze", "slice", "dynamic_slice"})


def drop_identities(graph: Graph) -> Graph:
    """The graph without identities: their users read the operand instead."""
    table: Table = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(drop_identities, substitute(op, table))
        if _is_identity(op):
            table.update({out.id: x for out, x in zip(op.outputs, op.inputs, strict=False)})
        else:
            ops.append(op)
    return with_ops(graph, ops)


def _is_identity(op: Op) -> bool:
    same = all(x.shape == y.shape and x.dtype == y.dtype for x, y in zip(op.inputs, op.outputs, strict=False))
    if not op.inputs or not same or op.effects:
        return False
    if op.name in _ALWAYS:
        return len(op.inputs) == len(op.outputs)
    return op.name in _BY_SHAPE or _keeps_dims(op)


def _keeps_dims(op: Op) -> bool:
    """A transpose, reshape or reduction that does nothing, a concatenation of one."""
    if op.name == "reshape":  # it may read its operand's dims in another order
        return op.params["dimensions"] is None
    if op.name == "transpose":
        return tuple(op.params["permutation"]) == tuple(range(len(op.outputs[0].shape)))
    if op.name == "concatenate":
        return len(op.inputs) == 1 and isinstance(op.inputs[0], Value)
    return op.name.startswith("reduce_") and op.params.get("axes") == ()
