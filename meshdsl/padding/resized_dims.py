"""Dim groups of operations whose dims differ in length: windows and reshapes.

    convolution  [n], [3] -> [n - 2]     n; 3; n - 2   each may be longer, since the padding of the windows makes up for
                                                       it: what comes after the end is cut off, or is more windows; the
                                                       kernel is long in the gradient by weights, [n], [n - 2] -> [3]
    pooling      [n] -> [n - 2]          n and n - 2,  likewise, but its padding cannot be negative
                                         n; n - 2
    its gradient [n - 2], [n] -> [n]     n - 2,        further windows write zeros, wherever their maxima are; elements
                                         n, or both    behind the end are never those
    reshape      [n, m, d] -> [n m, d]   n and n m     the padding of n stays at the end of n m

Operations have these groups for padding alone, which is at the end; those of ``dim_groups`` hold wherever it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.ir.graph import Graph, Literal, Op, Value, walk
from meshdsl.rules.dim_groups import FILLS, DimGroup, dim_groups, padded_params

WINDOWS = {"reduce_window_" + kind: FILLS["reduce_" + kind] for kind in ("sum", "max", "min")}


def padding_groups(op: Op, sizes: Mapping[int, int]) -> list[DimGroup]:
    """Returns the groups of an operation that can be padded, given the padded lengths."""
    found = [group for group in dim_groups(op) if group.size in sizes]
    if op.effects or op.manual:
        return found
    taken = {port for group in found for port in group.ports}
    return [*found, *(group for group in _resized(op, sizes) if not taken & {*group.ports})]


def _resized(op: Op, sizes: Mapping[int, int]) -> Iterator[DimGroup]:
    if op.name == "conv_general_dilated":
        spec, zero = op.params["dimension_numbers"], np.zeros((), op.inputs[0].dtype)
        images = ((0, d, op.inputs[0].shape[d], zero) for d in spec.lhs_spec[2:])
        kernels = ((1, d, op.inputs[1].shape[d], zero) for d in spec.rhs_spec[2:])
        results = ((2, d, op.outputs[0].shape[d], None) for d in spec.out_spec[2:])
        yield from (DimGroup(n, ((i, d),), fill) for i, d, n, fill in (*images, *kernels, *results) if n in sizes)
    elif op.name in WINDOWS:
        yield from _pooled(op, sizes)
    elif op.name == "select_and_scatter_add":
        yield from _spread(op, sizes)
    elif op.name == "reshape" and op.params["dimensions"] is None:
        for d, e in merged_dims(op):
            n, m = op.inputs[0].shape[d], op.outputs[0].shape[e]
            if n in sizes and m in sizes and sizes[n] * m == sizes[m] * n:
                yield DimGroup(min(n, m), ((0, d), (1, e)))


def _pooled(op: Op, sizes: Mapping[int, int]) -> Iterator[DimGroup]:
    """Yields groups of pooled dims: of operand and result together, or of one of them alone.

    The padding of windows cannot be negative, and where it is not zero, the operand's padding has to be as neutral.
    """
    fill = WINDOWS[op.name](op.inputs[0].dtype)
    for d, (n, count) in enumerate(zip(op.inputs[0].shape, op.outputs[0].shape, strict=True)):
        longer, more = sizes.get(n, n) - n, sizes.get(count, count) - count
        _, high = op.params["padding"][d]
        enough = high - longer * op.params["base_dilation"][d] + more * op.params["window_strides"][d] >= 0
        if longer and more and enough and (fill is not None or high == 0):
            yield DimGroup(n, ((0, d), (1, d)), fill if high else None)
        elif longer and not more and enough and fill is not None:
            yield DimGroup(n, ((0, d),), fill)
        elif more:
            yield DimGroup(count, ((1, d),))


def _spread(op: Op, sizes: Mapping[int, int]) -> Iterator[DimGroup]:
    """Yields groups of dims of the gradient of pooling: of the windows, of the elements under them, or of both.

    Further windows write zeros, so each of them needs a place to write to. Windows that were written and see elements
    behind the end must not select these.
    """
    zero, dtype = np.zeros((), op.inputs[0].dtype), op.inputs[1].dtype
    never = WINDOWS["reduce_window_max" if op.params["select_prim"].name == "ge" else "reduce_window_min"](dtype)
    for d, (step, (low, high)) in enumerate(zip(op.params["window_strides"], op.params["padding"], strict=True)):
        count, n = op.inputs[0].shape[d], op.inputs[1].shape[d]
        more, longer = sizes.get(count, count) - count, sizes.get(n, n) - n
        start = (count + more - 1) * step - low  # of the last window
        enough = high - longer + more * step >= 0 and (high == 0 or never is not None)
        if longer and more and enough and start < n + longer:
            yield DimGroup(n, ((0, d), (1, d), (2, d)), zero, others=((1, never),) if high else ())
        elif longer and not more and enough:
            yield DimGroup(n, ((1, d), (2, d)), never)
        elif more and start < n:
            yield DimGroup(count, ((0, d),), zero)


# ---- Reshapes --------------------------------------------------------------------------------------------------------


def merged_dims(op: Op) -> list[tuple[int, int]]:
    """Returns the dims of operand and result that a reshape merges or splits, each the major one of its group."""
    before, after = op.inputs[0].shape, op.outputs[0].shape
    found: list[tuple[int, int]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        a, b, n, m = i, j, before[i], after[j]
        while n != m:  # until dims i to a and j to b hold the same elements
            if (a + 1 == len(before)) if n < m else (b + 1 == len(after)):
                return found
            a, b = (a + 1, b) if n < m else (a, b + 1)
            n, m = (n * before[a], m) if n < m else (n, m * after[b])
        if (a == i) != (b == j) and before[i] != after[j] and min(before[i], after[j]) > 1:
            found.append((i, j))
        i, j = a + 1, b + 1
    return found


def with_merged(graph: Graph, sizes: Mapping[int, int]) -> dict[int, int]:
    """Returns the padded lengths, with those of the dims that reshapes merge padded dims into, or split off them."""
    found = dict(sizes)
    reshapes = [op for _, op in walk(graph) if op.name == "reshape" and op.params["dimensions"] is None]
    pairs = [(op.inputs[0].shape[i], op.outputs[0].shape[j]) for op in reshapes for i, j in merged_dims(op)]
    known = list(sizes)
    while known:
        n = known.pop()
        for m in {m for pair in pairs if n in pair for m in pair} - found.keys():
            if m % n == 0:
                found[m] = found[n] * (m // n)
            elif n % m == 0 and found[n] % (n // m) == 0:
                found[m] = found[n] // (n // m)
            known += [m] if m in found else []
    return found


# ---- Parameters ------------------------------------------------------------------------------------------------------


def resized_params(op: Op, operands: Sequence[Value | Literal], results: Sequence[Value]) -> dict[str, Any]:
    """Returns the parameters of an operation on these operands and results, some of whose dims are padded."""
    params = padded_params(op, operands, results)
    pairs = (*zip(op.inputs, operands, strict=True), *zip(op.outputs, results, strict=True))
    grown = [[m - n for n, m in zip(old.shape, new.shape, strict=True)] for old, new in pairs]
    if op.name == "conv_general_dilated":
        spec = op.params["dimension_numbers"]
        images, kernels, more = ([grown[i][d] for d in dims[2:]] for i, dims in enumerate(spec))
        spread, wider = op.params["lhs_dilation"], op.params["rhs_dilation"]
    elif op.name in WINDOWS:
        images, more, kernels = *grown, [0] * len(grown[0])
        spread, wider = op.params["base_dilation"], op.params["window_dilation"]
    elif op.name == "select_and_scatter_add":
        more, images, _ = grown
        kernels, spread, wider = [0] * len(more), [1] * len(more), [1] * len(more)
    else:
        return params
    strides = op.params["window_strides"]
    ends = zip(op.params["padding"], images, spread, kernels, wider, more, strides, strict=True)
    padding = tuple((low, high - n * a + k * b + m * c) for (low, high), n, a, k, b, m, c in ends)
    return {**params, "padding": padding}
