"""Rules of operations on windows: convolution and pooling.

The reason why a spatial dim can rarely be split is the halo: windows overlap. Three cases have
none, and then the dim is a product of factors, position ``p`` major and place ``w`` in the window minor:

    result p, window w:   operand (p w)   stride = window: pooling, patches, 1x1 convolution
    result w, window p:   operand (p w)   window dilated by the result: the weight gradient of patches
    result (p w)          operand p       operand dilated by the window: the data gradient of patches

The features of a convolution are factors as well. ``g`` are groups of features, ``h`` groups of
the batch; a group is a block of the result's features, so groups can be split, and a device
runs its own number of groups:

    images (h b) (g i), kernels (h g o) i -> b (h g o)      sum over i

The weight gradient of a depthwise convolution has the batch as ``i`` and the channels as ``h``:
split over the batch it is a partial sum, split over the channels it stays split.
"""

from typing import Any

from meshdsl.ir import Op
from meshdsl.layouts.placement import P
from meshdsl.layouts.rule import Dims, Row, Rule
from meshdsl.rules.contraction import bilinear
from meshdsl.rules.registry import rule

Factors = tuple[str, ...]


@rule("conv_general_dilated")
def conv(op: Op) -> Rule:
    """Bilinear; batch, features, groups, and spatial dims without halo."""
    spec = op.params["dimension_numbers"]
    images, kernels = (x.shape for x in op.inputs)
    g, h = op.params["feature_group_count"], op.params["batch_group_count"]
    sizes = {"g": g, "h": h, "b": images[spec.lhs_spec[0]] // h, "i": kernels[spec.rhs_spec[1]]}
    sizes["o"] = kernels[spec.rhs_spec[0]] // (g * h)
    spatial = [_spatial(op, k) for k in range(len(images) - 2)]
    for _, more in spatial:
        sizes |= more
    left, right, result = zip(*(dims for dims, _ in spatial), strict=True) if spatial else ((), (), ())
    return Rule(
        (_placed(spec.lhs_spec, ("h", "b"), ("g", "i"), left), _placed(spec.rhs_spec, ("h", "g", "o"), ("i",), right)),
        (_placed(spec.out_spec, ("b",), ("h", "g", "o"), result),),
        reduced={"i": "sum", **{f"p{k}": "sum" for k in range(len(spatial)) if (f"p{k}",) in right}},
        linear=bilinear(op),
        sizes=sizes,
    )


def _placed(spec: tuple[int, ...], first: Factors, second: Factors, spatial: tuple[Factors, ...]) -> Dims:
    """Factors in the order of the array's dims; ``spec`` lists the dims as first, second, spatial."""
    by_dim = dict(zip(spec, (first, second, *spatial), strict=True))
    return tuple(by_dim[d] for d in range(len(spec)))


def _spatial(op: Op, k: int) -> tuple[tuple[Factors, Factors, Factors], dict[str, int]]:
    """Factors of the k-th spatial dim of images, kernels and result."""
    spec = op.params["dimension_numbers"]
    n, window = op.inputs[0].shape[spec.lhs_spec[2 + k]], op.inputs[1].shape[spec.rhs_spec[2 + k]]
    made = op.outputs[0].shape[spec.out_spec[2 + k]]
    place, at = f"w{k}", f"p{k}"
    case = (op.params["window_strides"][k], op.params["padding"][k], op.params["lhs_dilation"][k])
    dilation = op.params["rhs_dilation"][k] if window > 1 else 1
    if n == made * window and case == (window, (0, 0), 1) and dilation == 1:
        return ((at, place), (place,), (at,)), {at: made, place: window}
    if n == made * window and case == (1, (0, 0), 1) and dilation == made:
        return ((at, place), (at,), (place,)), {at: window, place: made}
    if made == n * window and case == (1, (window - 1, window - 1), window) and dilation == 1:
        return ((at,), (place,), (at, place)), {at: n, place: window}
    return ((), (), ()), {}


@rule("reduce_window_sum")
def reduce_window_sum(op: Op) -> Rule:
    """Linear."""
    return _pooled(op, linear=((0,),))


@rule("reduce_window_max", "reduce_window_min")
def reduce_window_extreme(op: Op) -> Rule:
    """A maximum of maxima."""
    own = P(op.name.removeprefix("reduce_window_"))
    return _pooled(op, extra=(Row((own,), (own,)),))


@rule("reduce_window")
def reduce_window(op: Op) -> Rule:
    """Any reduction: operands first, then a start for each."""
    return _pooled(op)


@rule("select_and_gather_add")
def select_and_gather_add(op: Op) -> Rule:
    """The element of the first operand at the place where the second has its maximum: data movement in the first."""
    return _pooled(op, commuting=((0,),))


@rule("select_and_scatter_add")
def select_and_scatter_add(op: Op) -> Rule:
    """The gradient of max pooling: from windows (first operand) back to the places of their maxima."""
    windows, operand, sizes = _windows(op, op.inputs[1].shape)
    return Rule((windows, operand), (operand,), linear=((0,),), sizes=sizes)


def _pooled(op: Op, **properties: Any) -> Rule:
    windows, operand, sizes = _windows(op, op.inputs[0].shape)
    inputs = tuple(operand if x.shape else () for x in op.inputs)
    return Rule(inputs, (windows,) * len(op.outputs), sizes=sizes, **properties)


def _windows(op: Op, shape: tuple[int, ...]) -> tuple[Dims, Dims, dict[str, int]]:
    """Factors of the windows, of what they cover, and the sizes of those."""
    covered = [_whole_windows(op, d, n) for d, n in enumerate(shape)]
    places: Dims = tuple((f"p{d}",) if window else () for d, window in enumerate(covered))
    operand: Dims = tuple((f"p{d}", f"w{d}") if window else () for d, window in enumerate(covered))
    sizes = {f"p{d}": shape[d] // window for d, window in enumerate(covered) if window}
    return places, operand, sizes | {f"w{d}": window for d, window in enumerate(covered)}


def _whole_windows(op: Op, d: int, n: int) -> int:
    """Length of the windows if they lie side by side and fill the dim, else 0."""
    params = op.params
    window, ones = params["window_dimensions"][d], (1,) * len(params["window_dimensions"])
    apart = params["window_strides"][d] == window and tuple(params["padding"][d]) == (0, 0)
    dilated = params.get("base_dilation", ones)[d] != 1 or (window > 1 and params.get("window_dilation", ones)[d] != 1)
    return window if apart and not dilated and n % window == 0 else 0
