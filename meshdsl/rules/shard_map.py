"""The user's ``jax.shard_map``: its boundary, and the collectives of its body.

Inside a shard_map its mesh axes are *manual*: a value is one device's block, and the user's program says what devices
exchange. So on a manual axis an operation has exactly one row, whatever its rule: everything ``B``, blocks as they are.
Only three kinds of operations have another one, which ``manual_row`` gives:

    enter_shard_map   S(d) -> B   where the argument's spec names the axis in dim d: in_specs are layouts that must hold
    leave_shard_map   B -> S(d)   likewise by out_specs; P in place of S(d) where the spec says unreduced
    a collective      B -> B      with the exchange that it is, on the axes that it runs over

The other mesh axes are planned as everywhere. For them a collective is an operation on the dims that it leaves alone:
a sum over manual axes is elementwise and linear, an all-gather along dim 0 is so in all other dims.
"""

from collections.abc import Iterable, Mapping
from math import prod

import numpy as np

from meshdsl.ir.graph import Literal, Op
from meshdsl.ir.manual import BOUNDARY
from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.placement import B, P, Partial, Placement, S
from meshdsl.layouts.sharding_rule import Rule, Signature
from meshdsl.rules.registry import all_broadcast, rule

# ---- Collectives -----------------------------------------------------------------------------------------------------


KINDS = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "pbroadcast": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


@rule("psum", "ppermute", "pbroadcast")
def linear_collective(op: Op) -> Rule:
    """Every element by itself; sums pass, and so do maxima where elements are only moved."""
    dims = _dims(len(op.inputs[0].shape))
    others = ((),) * (len(op.inputs) - 1)  # the position of a broadcast's source
    return Rule((dims, *others), (dims,), linear=((0,),), commuting=() if op.name == "psum" else ((0,),))


@rule("pmax", "pmin")
def extreme(op: Op) -> Rule:
    """Every element by itself; a maximum of maxima is one."""
    dims, part = _dims(len(op.inputs[0].shape)), Partial("max" if op.name == "pmax" else "min")
    return Rule((dims,), (dims,), extra=(Signature((part,), (part,)),))


@rule("all_gather", "reduce_scatter")
def along_one_dim(op: Op) -> Rule:
    """The dim of the blocks stays whole; without tiles it is a dim of the result, or of the operand, alone."""
    dim, tiled, gathers = op.params["dim"], op.params["tiled"], op.name == "all_gather"
    long = _dims(len((op.outputs if gathers else op.inputs)[0].shape), {dim})
    short = long if tiled else long[:dim] + long[dim + 1 :]
    commuting = ((0,),) if gathers else ()
    return Rule(((short if gathers else long),), ((long if gathers else short),), linear=((0,),), commuting=commuting)


@rule("all_to_all")
def all_to_all(op: Op) -> Rule:
    """The dims that are split and joined stay whole."""
    dims = _dims(len(op.inputs[0].shape), {op.params["split"], op.params["join"]})
    return Rule((dims,), (dims,), commuting=((0,),))


@rule("axis_index", "ragged_all_to_all")
def whole(op: Op) -> Rule:
    """Operands as they are."""
    return Rule(tuple(((),) * len(x.shape) for x in op.inputs), tuple(((),) * len(x.shape) for x in op.outputs))


def _dims(rank: int, without: Iterable[int] = ()) -> tuple[tuple[str, ...], ...]:
    return tuple(() if d in without else (f"d{d}",) for d in range(rank))


def moved_axes(axes: tuple[str, ...], sizes: Mapping[str, int], pairs: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """Returns the axes on which sender and receiver of any pair differ; devices are numbered along ``axes``."""
    if not axes or any(axis not in sizes for axis in axes):
        return axes
    shape = [sizes[axis] for axis in axes]
    ends = np.array(np.unravel_index(np.array([*pairs], dtype=np.intp).reshape(-1, 2) % prod(shape), shape))
    differs = (ends[..., 0] != ends[..., 1]).any(axis=1)
    return tuple(axis for axis, moved in zip(axes, differs, strict=True) if moved)


# ---- Boundary --------------------------------------------------------------------------------------------------------


@rule(*BOUNDARY)
def boundary(op: Op) -> Rule:
    """On the other axes a block is as the array: its blocks are cut further, and partial sums pass."""
    dims = _dims(len(op.inputs[0].shape))
    return Rule((dims,), (dims,), commuting=((0,),))


def split_dim(op: Op, axis: str) -> int | None:
    """Returns the dim that the spec at the boundary of a shard_map splits over an axis; None if it names none."""
    return next((d for d, axes in enumerate(op.params["spec"]) if axis in axes), None)


# ---- Rows on manual axes ---------------------------------------------------------------------------------------------


def manual_axes(op: Op) -> tuple[str, ...]:
    """Returns the axes on which an operation has one row: those of the shard_maps around it, and of its boundary.

    Axes that split a dim of the boundary come first, in the order of the spec: major first.
    """
    if op.name not in BOUNDARY:
        return op.manual
    named = [axis for axes in op.params["spec"] for axis in axes]
    return tuple(dict.fromkeys((*named, *dict(op.params["sizes"]), *op.manual)))


def manual_row(op: Op, axis: str) -> Signature:
    """Returns the only row of an operation on one of its manual axes."""
    if op.name in BOUNDARY:
        dim = split_dim(op, axis)
        cut: Placement = P if axis in op.params["unreduced"] else B if dim is None else S(dim)
        return Signature((cut,), (B,)) if op.name == "enter_shard_map" else Signature((B,), (cut,))
    row = all_broadcast(op)
    if op.name not in KINDS or axis not in op.params["moved"] or isinstance(op.inputs[0], Literal):
        return row
    groups: tuple[tuple[int, ...], ...] = op.params["groups"] or ()
    group = len(groups[0]) if len(groups) > 1 else 0
    port = 0
    if op.name == "ragged_all_to_all":  # balanced routing fills the smaller of what is written to and what is sent
        port = min((0, 1), key=lambda i: prod(op.inputs[i].shape))
    return Signature(row.inputs, row.outputs, collectives=(Exchange(KINDS[op.name], port, group=group),))
