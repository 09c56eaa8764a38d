"""Rules of operations on windows: convolution and pooling.

Windows overlap, so a block of a split dim needs the edges of its neighbours (``halo.Sliding``). In a convolution the
places of the kernel and those of the result are symmetric, and either may be split:

    result split    step = stride            reach = (kernel - 1) * kernel dilation
    kernel split    step = kernel dilation   reach = (result - 1) * stride     sum over the kernel

The second is the weight gradient, whose "kernel" is the cotangent of the result. The data gradient is of the first
kind; its operand is dilated by the stride.

Convolution is bilinear, and its features are factors: ``g`` are groups of features, ``h`` groups of the batch. A group
is a block of the result's features, so groups can be split, and a device runs its own groups:

    images (h b) (g i), kernels (h g o) i -> b (h g o)      sum over i

The weight gradient of a depthwise convolution has the batch as ``i`` and the channels as ``h``:
split over the batch it is a partial sum, split over the channels it stays split.

A device that has one group is left with a convolution without groups, of which any factor can be split. So ``vmap``
over devices, which makes them groups of the weight gradient, keeps their rows divisible.
"""

from collections.abc import Iterator
from typing import Any

from meshdsl.ir.graph import Op
from meshdsl.layouts.placement import B, P, S
from meshdsl.layouts.sharding_rule import Dims, Rule, Signature
from meshdsl.rules.halo import Sliding, Spreading
from meshdsl.rules.matmul import bilinear
from meshdsl.rules.registry import rule

Factors = tuple[str, ...]


@rule("conv_general_dilated")
def conv(op: Op) -> Rule:
    """Bilinear; batch, features, groups, and spatial dims with their halo."""
    spec = op.params["dimension_numbers"]
    images, kernels = (x.shape for x in op.inputs)
    g, h = op.params["feature_group_count"], op.params["batch_group_count"]
    sizes = {"g": g, "h": h, "b": images[spec.lhs_spec[0]] // h, "i": kernels[spec.rhs_spec[1]]}
    sizes["o"] = kernels[spec.rhs_spec[0]] // (g * h)
    return Rule(
        (_placed(spec.lhs_spec, ("h", "b"), ("g", "i")), _placed(spec.rhs_spec, ("h", "g", "o"), ("i",))),
        (_placed(spec.out_spec, ("b",), ("h", "g", "o")),),
        reduced={"i": "sum"},
        linear=bilinear(op),
        sizes=sizes,
        extra=tuple(_spatial(op)),
        nested=True,
    )


def _placed(spec: tuple[int, ...], first: Factors, second: Factors) -> Dims:
    """Factors in the order of the array's dims; ``spec`` lists the dims as first, second, spatial."""
    by_dim = dict(zip(spec, (first, second), strict=False))
    return tuple(by_dim.get(d, ()) for d in range(len(spec)))


def _spatial(op: Op) -> Iterator[Signature]:
    spec = op.params["dimension_numbers"]
    for k, dims in enumerate(zip(spec.lhs_spec[2:], spec.rhs_spec[2:], spec.out_spec[2:], strict=True)):
        image, kernel, result = map(S, dims)
        by_result, by_kernel = conv_windows(op, k)
        if by_result.splits and (by_result.drift == 0 or not by_kernel.splits):
            yield Signature((image, B), (result,), collectives=by_result.exchanges(0, dims[0]))
        elif by_kernel.splits:
            yield Signature((image, kernel), (P,), collectives=by_kernel.exchanges(0, dims[0]))


def conv_windows(op: Op, k: int) -> tuple[Sliding, Sliding]:
    """The k-th spatial dim as windows of the result, and as windows of the kernel."""
    spec, params = op.params["dimension_numbers"], op.params
    n, kernel = op.inputs[0].shape[spec.lhs_spec[2 + k]], op.inputs[1].shape[spec.rhs_spec[2 + k]]
    result = op.outputs[0].shape[spec.out_spec[2 + k]]
    stride, spread = params["window_strides"][k], params["rhs_dilation"][k]
    low, dilation = int(params["padding"][k][0]), params["lhs_dilation"][k]
    return (
        Sliding(n, result, stride, (kernel - 1) * spread, low, dilation),
        Sliding(n, kernel, spread, (result - 1) * stride, low, dilation),
    )


@rule("reduce_window_sum")
def reduce_window_sum(op: Op) -> Rule:
    """Linear."""
    return _pooled(op, linear=((0,),))


@rule("reduce_window_max", "reduce_window_min")
def reduce_window_extreme(op: Op) -> Rule:
    """A maximum of maxima."""
    own = P(op.name.removeprefix("reduce_window_"))
    return _pooled(op, Signature((own,), (own,)))


@rule("reduce_window")
def reduce_window(op: Op) -> Rule:
    """Any reduction: operands first, then an initial value for each."""
    return _pooled(op)


def _pooled(op: Op, *rows: Signature, **properties: Any) -> Rule:
    halos = [(d, pool_windows(op, d)) for d in range(len(op.inputs[0].shape))]
    split = (_pooled_dim(op, d, sliding) for d, sliding in halos if sliding.splits and sliding.low <= sliding.reach)
    whole: Dims = ((),) * len(halos)
    inputs = tuple(whole if x.shape else () for x in op.inputs)
    return Rule(inputs, (whole,) * len(op.outputs), extra=(*split, *rows), **properties)


def _pooled_dim(op: Op, d: int, sliding: Sliding) -> Signature:
    arrays = [i for i, x in enumerate(op.inputs) if x.shape]
    inside = tuple(e for i in arrays for e in sliding.exchanges(i, d))
    return Signature(
        tuple(S(d) if i in arrays else B for i in range(len(op.inputs))), (S(d),) * len(op.outputs), 0, inside
    )


def pool_windows(op: Op, d: int) -> Sliding:
    """The windows over dim d of a pooling."""
    params = op.params
    spread, dilation = (params[name][d] for name in ("window_dilation", "base_dilation"))
    reach = (params["window_dimensions"][d] - 1) * spread
    n, count = op.inputs[0].shape[d], op.outputs[0].shape[d]
    return Sliding(n, count, params["window_strides"][d], reach, int(params["padding"][d][0]), dilation)


@rule("select_and_gather_add")
def select_and_gather_add(op: Op) -> Rule:
    """Selects elements of the first operand where the second has its maximum: data movement in the first."""
    return _pooled(op, commuting=((0,),))


@rule("select_and_scatter_add")
def select_and_scatter_add(op: Op) -> Rule:
    """The gradient of max pooling, linear in the first operand: windows write to the places of their maxima."""
    whole: Dims = ((),) * len(op.inputs[1].shape)
    spread = [(d, scatter_windows(op, d)) for d in range(len(whole))]
    extra = (Signature((S(d), S(d)), (S(d),), collectives=s.exchanges(d)) for d, s in spread if s.splits)
    return Rule((whole, whole), (whole,), linear=((0,),), extra=tuple(extra))


def scatter_windows(op: Op, d: int) -> Spreading:
    """The windows over dim d of the gradient of a pooling."""
    params, n, count = op.params, op.inputs[1].shape[d], op.inputs[0].shape[d]
    return Spreading(
        n, count, params["window_strides"][d], params["window_dimensions"][d], int(params["padding"][d][0])
    )
