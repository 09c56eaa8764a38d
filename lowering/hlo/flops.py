"""FLOPs of a compiled program: its matrix products and convolutions, loops counted.

A compiler's own count (``cost_analysis``) counts one iteration of a loop, and adds elementwise operations; this one is
defined as a plan's, and as an accelerator's peak rate. Multiply-adds count twice:

    dot           2 * elements of the result * contracted elements
    convolution   2 * examples * output features * input features per group
                    * (output place, kernel place) pairs that hit an element, per spatial dim

The second also holds for a TPU's form of a product with batch dims: a convolution whose kernel is as long as the batch,
where padding and dilation leave one place per example. A GPU's cuDNN calls name the forward convolution that they
belong to, whichever of its three tensors they compute.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from math import prod

from meshdsl.lowering.hlo.parse import Instruction, Module, arrays, executed
from meshdsl.util.arrays import conv_pairs

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_NUMBERS = re.compile(r"(\w+)=(\S+)")
_SUMMED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_GROUPS = re.compile(r"(feature|batch)_group_count=(\d+)")
_CUDNN = re.compile(r'custom_call_target="__cudnn\$conv(Forward|BackwardInput|BackwardFilter)')
Shape = tuple[int, ...]
Three = tuple[Shape, Shape, Shape]
# Input, kernel and result of the convolution, from the operands and the result of a call.
_FORWARD: dict[str, Callable[[Shape, Shape, Shape], Three]] = {
    "Forward": lambda left, right, made: (left, right, made),
    "BackwardInput": lambda left, right, made: (made, right, left),
    "BackwardFilter": lambda left, right, made: (left, made, right),
}


def product_flops(module: Module) -> int:
    """Returns the FLOPs of products and convolutions in one run on one device."""
    shapes = {name: {x.name: _shape(x) for x in lines} for name, lines in module.computations.items()}
    sites = executed(module, lambda line: line.opcode in ("dot", "convolution") or bool(_CUDNN.search(line.rest)))
    return sum(site.trips * _flops(site.instruction, shapes[site.inside]) for site in sites)


def _shape(line: Instruction) -> Shape:
    found = arrays(line.type)
    return found[0].dims if found else ()


def _flops(line: Instruction, shapes: dict[str, Shape]) -> int:
    left, right = (shapes[name] for name in line.operands[:2])
    if line.opcode == "dot":
        match = _SUMMED.search(line.attributes)
        return 2 * prod(_shape(line)) * prod(left[i] for i in _integers(match.group(1) if match else ""))
    call = _CUDNN.search(line.rest)
    return _convolution(line, *_FORWARD[call.group(1) if call else "Forward"](left, right, _shape(line)))


def _convolution(line: Instruction, left: Shape, right: Shape, out: Shape) -> int:
    match = _LABELS.search(line.attributes)
    if match is None:
        return 0
    ins, kernel, outs = match.groups()
    groups = {kind: int(n) for kind, n in _GROUPS.findall(line.attributes)}
    window = _window(line.attributes, len(out) - 2)
    places = prod(
        conv_pairs(left[ins.index(d)], right[kernel.index(d)], out[outs.index(d)], *window[int(d)])
        for d in ins
        if d.isdigit()
    )
    examples = Fraction(left[ins.index("b")], groups.get("batch", 1))
    return int(2 * examples * right[kernel.index("o")] * right[kernel.index("i")] * places)


def _window(attributes: str, dims: int) -> list[tuple[int, int, int, int]]:
    """Per spatial dim: stride, padding before, dilation of the input and of the kernel."""
    match = _WINDOW.search(attributes)
    given = dict(_NUMBERS.findall(match.group(1))) if match else {}
    plain = {"stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
    columns = [_column(given.get(name), dims, default) for name, default in plain.items()]
    return list(zip(*columns, strict=True))


def _column(text: str | None, dims: int, default: int) -> list[int]:
    return [int(part.split("_")[0]) for part in text.split("x")] if text else [default] * dims


def _integers(text: str) -> Shape:
    return tuple(int(n) for n in text.split(",") if n)
