"""Clean-up: operations that return their operand as it is are taken out.

Layouts are the planner's business, so placing an array on devices, or constraining its
sharding the jax way, is an identity here too.

The compiler takes identities out as well. Left in the plan they would hide that two moves are of
one value, and the compiled program would communicate less than planned. So would reshapes one after the
other that end in the shape they began with.
"""

from collections.abc import Sequence
from math import prod

from meshdsl.ir import Graph, Literal, Op, Value
from meshdsl.trace.graphs import Atom, Table, in_bodies, substitute, with_ops

PLACING = frozenset({"sharding_constraint", "layout_constraint", "mesh_cast", "reshard", "device_put"})
_ALWAYS = PLACING | {"copy", "copy_p", "stop_gradient", "name", "pvary", "pcast"}
_CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
_NEUTRAL = {"mul": 1, "div": 1, "sub": 0}  # second operands; 0.0 added to -0.0 changes its sign
# Identities whenever shape and dtype stay the same.
_BY_SHAPE = frozenset({"convert_element_type", "broadcast_in_dim", "squeeze", "slice", "dynamic_slice"})
_RESHAPES = frozenset({"broadcast_in_dim", "squeeze", "reshape"})


def drop_identities(graph: Graph) -> Graph:
    """The graph without identities: their users read the operand instead."""
    table: Table = {}
    reshaped: dict[int, Value] = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(drop_identities, substitute(op, table))
        known = op.inputs if _is_identity(op) else _overwritten(op) or _before_reshapes(op, reshaped)
        if known:
            table.update({out.id: x for out, x in zip(op.outputs, known, strict=False)})
        else:
            ops.append(op)
    return with_ops(graph, ops)


def drop_stages(graph: Graph, cuts: bool = False) -> Graph:
    """The graph without ``md.stage``, which is the identity; with ``cuts``, without those in loops alone."""
    table: Table = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(drop_stages, substitute(op, table))
        if op.name == "stage" and not cuts:
            table.update({out.id: x for out, x in zip(op.outputs, op.inputs, strict=True)})
        else:
            ops.append(op)
    return with_ops(graph, ops)


def _before_reshapes(op: Op, reshaped: dict[int, Value]) -> Sequence[Atom]:
    """The value that reshapes began with if this one leads back to it; else it is noted among those ``reshaped``."""
    if op.name not in _RESHAPES or (op.params.get("dimensions") is not None and op.name == "reshape"):
        return ()
    x, made = op.inputs[0], op.outputs[0]
    if not isinstance(x, Value) or prod(x.shape) != prod(made.shape):
        return ()
    reshaped[made.id] = first = reshaped.get(x.id, x)
    return (first,) if first.shape == made.shape else ()


def _overwritten(op: Op) -> Sequence[Atom]:
    """What replaces all of an array: an update of its size, which starts where it does."""
    whole = op.name == "dynamic_update_slice" and op.inputs[1].shape == op.inputs[0].shape
    return op.inputs[1:2] if whole else ()


def _is_identity(op: Op) -> bool:
    same = all(x.shape == y.shape and x.dtype == y.dtype for x, y in zip(op.inputs, op.outputs, strict=False))
    if not op.inputs or not op.outputs or not same or op.effects:
        return False
    if op.name in _ALWAYS:
        return len(op.inputs) == len(op.outputs)
    return op.name in _BY_SHAPE or _keeps_dims(op)


def _keeps_dims(op: Op) -> bool:
    """A transpose, reshape or reduction that does nothing, a concatenation of one with nothing."""
    shape, params = op.outputs[0].shape, op.params
    if op.name == "reshape":  # it may read its operand's dims in another order
        return params["dimensions"] is None
    if op.name == "transpose":
        longer = [d for d in params["permutation"] if shape[d] != 1]
        return longer == sorted(longer)
    if op.name == "rev":
        return all(shape[d] == 1 for d in params["dimensions"])
    if op.name in _CUMULATIVE:
        return bool(shape[params["axis"]] == 1)
    if op.name == "pad":
        return not any(map(any, params["padding_config"]))
    if op.name == "concatenate":
        return isinstance(op.inputs[0], Value) and all(0 in x.shape for x in op.inputs[1:])
    return _is_neutral(op) or (op.name.startswith("reduce_") and params.get("axes") == ())


def _is_neutral(op: Op) -> bool:
    """Times one, divided by one, minus zero."""
    if op.name not in _NEUTRAL or not isinstance(op.inputs[1], Literal):
        return False
    return bool(op.inputs[1].value == _NEUTRAL[op.name])
