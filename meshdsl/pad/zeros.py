"""Where padding is certainly still zero.

Padding starts as zeros, and much of what happens to it keeps them: moving, casting, adding,
scaling by a finite number. Anything not listed here may leave anything in the padding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshdsl.ir import Literal, Op
from meshdsl.pad.strand import Port, Strand
from meshdsl.rules.elementwise import is_zero

IsZero = Callable[[Port], bool]

_MOVES = (
    "transpose reshape squeeze rev slice split unstack copy name optimization_barrier constrain convert_element_type "
    "reduce_precision stop_gradient"
).split()
_FIXES_ZERO = "neg abs sign square sqrt real imag conj integer_pow reduce_sum reduce_max reduce_min".split()
_JOINT = "add add_any sub max min concatenate stack or".split()


def zero_dims(op: Op, strands: Sequence[Strand], is_zero_at: IsZero) -> list[Port]:
    """The results' dims whose padding is zero, given those of the operands'; ports as strands count them."""
    first = len(op.inputs)
    kept = (s for s in strands if _keeps_zero(op, s, is_zero_at))
    return [port for strand in kept for port in strand.ports if port[0] >= first]


def _keeps_zero(op: Op, strand: Strand, is_zero_at: IsZero) -> bool:
    if op.name == "broadcast_in_dim":
        return is_zero(op.inputs[0]) or _all_zero(op, strand, (0,), is_zero_at)
    if op.name in _MOVES or op.name in _FIXES_ZERO:
        return op.params.get("y", 1) > 0 and _all_zero(op, strand, (0,), is_zero_at)
    if op.name in _JOINT:
        return _all_zero(op, strand, range(len(op.inputs)), is_zero_at)
    if op.name == "select_n":
        return _all_zero(op, strand, range(1, len(op.inputs)), is_zero_at)
    if op.name in ("mul", "div"):
        return _scales_zero(op, strand, is_zero_at)
    return False


def _all_zero(op: Op, strand: Strand, operands: Sequence[int], is_zero_at: IsZero) -> bool:
    """Whether each of these operands is zero in the padding of the strand."""
    at = dict(strand.ports)
    return all(is_zero(op.inputs[i]) or (i in at and is_zero_at((i, at[i]))) for i in operands)


def _scales_zero(op: Op, strand: Strand, is_zero_at: IsZero) -> bool:
    """Zero times zero, or times or over a finite literal that is not zero."""
    if op.name == "mul" and _all_zero(op, strand, (0, 1), is_zero_at):
        return True
    scales = [i for i, x in enumerate(op.inputs) if isinstance(x, Literal) and _is_scale(x.value)]
    if scales != [1] and (op.name == "div" or scales != [0]):
        return False
    return _all_zero(op, strand, (1 - scales[0],), is_zero_at)


def _is_scale(value: Any) -> bool:
    return bool(np.isfinite(value)) and bool(value)
