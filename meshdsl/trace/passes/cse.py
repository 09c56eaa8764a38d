"""Common subexpression elimination: equal expressions are computed once.

Two operations are equal if their primitives, parameters and operands are, in either order where that does not matter:
the gradient of ``x * x`` is ``g * x + x * g``. Closed-over arrays are equal if their elements are: every layer may make
the same mask by numpy. A barrier keeps expressions apart, so it equals no other; nor does an operation with effects.

Slices are compared by the elements of the unsliced array that they take, as compilers do; an ``associative_scan`` takes
the same ones twice. Products are compared by the dims of their operands before these were transposed. A ``select_n``
between equal cases is that case. A sort, a loop and a conditional take every operand once; two loops are equal if their
bodies consist of equal operations in the same order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np

from meshdsl.ir.graph import Atom, Graph, Op, Value
from meshdsl.ir.loops import body_operands, carried_inputs
from meshdsl.ir.rewrite import Table, filtered, look_up, substitute, with_ops
from meshdsl.util.arrays import is_hashable

_SIMPLE = frozenset({int, bool, str, type(None)})
_COMMUTATIVE = frozenset("add add_any mul max min and or xor".split())
_Cut = tuple[Any, tuple[int, ...], tuple[int, ...]]  # a slice: the unsliced array, starts, strides
_Turn = tuple[Any, tuple[int, ...]]  # a transposed array: the array before, and the dim there of each dim


def cse(graph: Graph) -> Graph:
    """Returns the graph, and each body by itself, without the second of two equal operations."""
    return _merged(graph, {})


def _merged(graph: Graph, table: Table) -> Graph:
    """The merged graph, with values replaced by the equal ones in ``table``."""
    seen: dict[Any, Op] = {}
    cuts: dict[int, _Cut] = {}
    turns: dict[int, _Turn] = {}
    stated: Table = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = substitute(op, table)
        op = _in_bodies(op) if op.bodies else op
        op, twice = _each_once(op) if op.name == "sort" else (op, {})
        if op.name == "transpose":
            root, dims = _turned(op.inputs[0], turns)
            turns[op.outputs[0].id] = root, tuple(dims[d] for d in op.params["permutation"])
        key = _sliced(op, cuts) if op.name == "slice" else _product(op, turns) if op.name == "dot_general" else None
        first = seen.setdefault(key or expression(op), op)
        known = op.inputs[1:2] if _has_one_case(op, stated) else first.outputs
        if op.name == "constrain":
            stated[op.outputs[0].id] = look_up(op.inputs[0], stated)
        if known is op.outputs:
            ops.append(op)
        else:
            table.update({v.id: w for v, w in zip(op.outputs, known, strict=True)})
        for value, x in twice.items():
            table[value] = look_up(x, table)
    return with_ops(graph, ops)


def _in_bodies(op: Op) -> Op:
    """The op with each body merged; of inputs with the same operand, the body reads the first."""
    bodies = zip(op.bodies, body_operands(op), carried_inputs(op), strict=False)
    merged = tuple(_merged(body, _given_twice(body.inputs, operands, carried)) for body, operands, carried in bodies)
    return replace(op, bodies=merged)


def _given_twice(inputs: Sequence[Value], operands: Sequence[Atom], carried: range) -> Table:
    """Maps inputs to earlier ones with the same operand; a whole stack and its slices differ."""
    first: dict[Any, Value] = {}
    pairs = zip(inputs, operands, strict=True)
    given = ((v, (identity(x), i < carried.start)) for i, (v, x) in enumerate(pairs) if i not in carried)
    return {v.id: w for v, x in given if (w := first.setdefault(x, v)) is not v}


def _each_once(op: Op) -> tuple[Op, Table]:
    """The sort without repeated operands, and what replaces the results of those."""
    places: dict[Any, int] = {}
    at = [places.setdefault(identity(x), i) for i, x in enumerate(op.inputs)]
    if len(places) == len(at):
        return op, {}
    stay = [i == first for i, first in enumerate(at)]
    twice: Table = {op.outputs[i].id: op.outputs[first] for i, first in enumerate(at) if i != first}
    params = {**op.params, "num_keys": sum(stay[: op.params["num_keys"]])}
    return replace(op, inputs=filtered(op.inputs, stay), outputs=filtered(op.outputs, stay), params=params), twice


def _has_one_case(op: Op, stated: Table) -> bool:
    """Whether all cases are one value, up to ``constrain``."""
    return op.name == "select_n" and len({identity(look_up(x, stated)) for x in op.inputs[1:]}) == 1


def _sliced(op: Op, cuts: dict[int, _Cut]) -> Any:
    """A key of the elements of the unsliced array that a slice takes; recorded in ``cuts`` for slices of its result."""
    root, first, apart = cuts.get(getattr(op.inputs[0], "id", -1), (identity(op.inputs[0]), (), ()))
    starts, strides = op.params["start_indices"], op.params["strides"] or (1,) * len(op.inputs[0].shape)
    first, apart = first or (0,) * len(starts), apart or (1,) * len(starts)
    starts = tuple(a + k * i for a, k, i in zip(first, apart, starts, strict=True))
    strides = tuple(k * step for k, step in zip(apart, strides, strict=True))
    cuts[op.outputs[0].id] = root, starts, strides
    shape = op.outputs[0].shape
    return "slice", root, starts, tuple(k for k, n in zip(strides, shape, strict=True) if n > 1), shape, op.manual


def _turned(x: Atom, turns: Mapping[int, _Turn]) -> _Turn:
    """The array of which ``x`` is a transpose, itself if it is none, and the dim there of each dim of ``x``."""
    return turns.get(x.id, (identity(x), tuple(range(len(x.shape)))))


def _product(op: Op, turns: Mapping[int, _Turn]) -> Any:
    """A key of the dims of the untransposed operands that a product sums over, runs along, and returns, in order."""
    (contracted, batch), others = op.params["dimension_numbers"], {**op.params, "dimension_numbers": None}
    roots, sides = [], []
    for x, summed, along in zip(op.inputs, contracted, batch, strict=True):
        root, dims = _turned(x, turns)
        free = [d for i, d in enumerate(dims) if i not in summed and i not in along]
        roots.append(root)
        sides.append(([dims[i] for i in summed], tuple(dims[i] for i in along), tuple(free)))
    (left, *left_kept), (right, *right_kept) = sides
    pairs = sorted(zip(left, right, strict=True))
    return "dot_general", *roots, tuple(pairs), *left_kept, *right_kept, _frozen(others), op.manual


def expression(op: Op, always: bool = False) -> Any:
    """Returns a hashable key that is equal for operations that compute the same.

    Args:
      always: also if both have to stay: barriers and operations with effects.
    """
    apart = op.name in ("return", "optimization_barrier")
    return id(op) if (apart or op.effects) and not always else _key(op, {})


def _key(op: Op, numbers: Mapping[int, int]) -> Any:
    """The key of an operation, whose operands inside a body go by their numbers there."""
    operands = [numbers.get(x.id, x.id) if isinstance(x, Value) else identity(x) for x in op.inputs]
    if op.name in _COMMUTATIVE:
        operands.sort(key=repr)
    bodies = tuple(map(_body_key, op.bodies))
    return op.primitive or op.name, _frozen(op.params), tuple(operands), op.manual, bodies


def _body_key(body: Graph) -> Any:
    """A key that is equal for bodies of equal operations in the same order: compilers merge such loops."""
    made = [v for op in body.ops for v in op.outputs]
    numbers = {v.id: i for i, v in enumerate((*body.inputs, *made))}
    types = tuple((v.shape, v.dtype) for v in body.inputs)
    return types, tuple(_key(op, numbers) for op in body.ops)


def identity(x: Atom) -> Any:
    """Returns a hashable key that is equal for one value, and for numbers of the same bits and dtype."""
    return x.id if isinstance(x, Value) else (x.dtype, _scalar(x.value))


def _scalar(value: Any) -> Any:
    """The bits of a scalar: 0.0 and -0.0 differ, a NaN equals itself."""
    return np.asarray(value).tobytes() if isinstance(value, np.generic) else id(value)


def _frozen(x: Any) -> Any:
    """A parameter as a hashable value; one that cannot be compared equals only itself."""
    if type(x) in _SIMPLE:
        return type(x), x
    if isinstance(x, dict):
        return tuple((name, _frozen(x[name])) for name in sorted(x))
    if isinstance(x, tuple | list):
        return type(x), tuple(map(_frozen, x))
    if isinstance(x, float):
        return float, repr(x)
    if isinstance(x, np.ndarray):
        return x.dtype, x.shape, sha256(x.tobytes()).digest()
    return (type(x), x) if is_hashable(x) else id(x)
