"""Matrix products and convolutions of a compiled program: their FLOPs, loops counted, and their seconds.

A compiler's own count (``cost_analysis``) counts one iteration of a loop, and adds elementwise operations; this one is
defined as a plan's, and as an accelerator's peak rate. Multiply-adds count twice:

    dot           2 * elements of the result * contracted elements
    convolution   2 * examples * output features * input features per group
                    * (output place, kernel place) pairs that hit an element, per spatial dim

The second also holds for a TPU's form of a product with batch dims: a convolution whose kernel is as long as the batch,
where padding and dilation leave one place per example. A GPU's cuDNN calls name the forward convolution that they
belong to, whichever of its three tensors they compute, and its cuBLAS calls the dims that they contract.

Seconds are those of a plan (``meshdsl.planner.costs.op_cost``): the FLOPs at the topology's rate, slower for short
sides, or the traffic of operands and result if that takes longer.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from meshdsl.layouts.topology import Topology, rate_of
from meshdsl.lowering.hlo.parse import ArrayType, Instruction, Module, arrays, executed
from meshdsl.util.arrays import conv_pairs

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_NUMBERS = re.compile(r"(\w+)=(\S+)")
_DOT_DIMS = {
    role: re.compile(rf'lhs_{name}_dims=\{{([\d,]*)\}}|"lhs_{name}_dimensions":\[([\d,"]*)\]')
    for role, name in (("summed", "contracting"), ("batch", "batch"))
}
_GROUPS = re.compile(r"(feature|batch)_group_count=(\d+)")
_CUDNN = re.compile(r'custom_call_target="__cudnn\$conv(Forward|BackwardInput|BackwardFilter)')
_DTYPES = {"f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "s8": "int8", "u8": "uint8"}  # as numpy names them
_DOTS = ("dot", "scaled-dot")
_CUBLAS = 'custom_call_target="__cublas$'
Shape = tuple[int, ...]
Three = tuple[Shape, Shape, Shape]
# Input, kernel and result of the convolution, from the operands and the result of a call.
_FORWARD: dict[str, Callable[[Shape, Shape, Shape], Three]] = {
    "Forward": lambda left, right, made: (left, right, made),
    "BackwardInput": lambda left, right, made: (made, right, left),
    "BackwardFilter": lambda left, right, made: (left, made, right),
}


@dataclass(frozen=True)
class Product:
    """A matrix product or convolution.

    Args:
      flops: of one execution.
      sides: rows, columns and contracted elements, batch dims aside.
      bytes: of the operands and the result.
      rate: FLOP rate, a field of ``Topology``.
      grouped: whether it is a convolution in groups.
    """

    flops: int
    sides: tuple[int, int, int]
    bytes: float
    rate: str
    grouped: bool = False

    def seconds(self, topology: Topology) -> float:
        """Returns the seconds of one execution on one device."""
        compute = self.flops / topology.flops(self.rate, self.grouped)
        compute *= prod(1 + topology.half_side / max(side, 1) for side in self.sides)
        return max(compute, self.bytes / topology.memory_bandwidth) + topology.overhead


def product_flops(module: Module) -> int:
    """Returns the FLOPs of products and convolutions in one run on one device."""
    sites = executed(module, is_product)
    return sum(site.trips * product_at(site.instruction, module.computations[site.inside]).flops for site in sites)


def is_product(line: Instruction) -> bool:
    """Returns whether an instruction is a product or convolution, or a library's call that computes one."""
    return line.opcode in (*_DOTS, "convolution") or bool(_CUDNN.search(line.rest)) or _CUBLAS in line.rest


def product_at(line: Instruction, lines: Iterable[Instruction]) -> Product:
    """Returns the product that an instruction computes, among the lines of its computation."""
    types = {x.name: arrays(x.type)[:1] for x in lines}
    left, right, made = (_first(types.get(name, [])) for name in (*line.operands[:2], line.name))
    if line.opcode in _DOTS or _CUBLAS in line.rest:
        flops, sides, grouped = _dot(line, left.dims, right.dims, made.dims)
    else:
        call = _CUDNN.search(line.rest)
        three = _FORWARD[call.group(1) if call else "Forward"](left.dims, right.dims, made.dims)
        flops, sides, grouped = _convolution(line, *three)
    itemsize = max((float(x.bytes) / prod(x.dims) for x in (left, right) if prod(x.dims)), default=4.0)
    scales = types.get(line.operands[-1], []) if line.opcode == "scaled-dot" else []
    rate = rate_of([_DTYPES.get(x.dtype, x.dtype) for x in (left, right, *scales)], itemsize)
    return Product(flops, sides, float(left.bytes + right.bytes + made.bytes), rate, grouped)


def _first(found: Sequence[ArrayType]) -> ArrayType:
    return found[0] if found else ArrayType("f32", ())


_Work = tuple[int, tuple[int, int, int], bool]  # FLOPs, sides, whether in groups


def _dot(line: Instruction, left: Shape, right: Shape, made: Shape) -> _Work:
    summed, both = (prod(left[i] for i in _dims(line, role)) for role in ("summed", "batch"))
    rows, columns = (prod(shape) // max(1, summed * both) for shape in (left, right))
    return 2 * prod(made) * summed, (rows, columns, summed), False


def _dims(line: Instruction, role: str) -> Shape:
    match = _DOT_DIMS[role].search(line.attributes)
    return _integers((match.group(1) or match.group(2) or "").replace('"', "")) if match else ()


def _convolution(line: Instruction, left: Shape, right: Shape, out: Shape) -> _Work:
    match = _LABELS.search(line.attributes)
    if match is None:
        return 0, (1, 1, 1), False
    ins, kernel, outs = match.groups()
    groups = {kind: int(n) for kind, n in _GROUPS.findall(line.attributes)}
    window = _window(line.attributes, len(out) - 2)
    examples, features = left[ins.index("b")], right[kernel.index("o")]
    rows, columns, summed, places = out[outs.index("b")], features, right[kernel.index("i")], 1
    for d in filter(str.isdigit, ins):
        inside, taps, made = left[ins.index(d)], right[kernel.index(d)], out[outs.index(d)]
        pairs = conv_pairs(inside, taps, made, *window[int(d)])
        places *= pairs
        if pairs == made == taps > 1:  # one place of the kernel per place: a batch dim, or a dim of the columns
            columns *= made if inside == 1 else 1
        else:
            rows, summed = rows * made, summed * max(1, pairs // max(1, made))
    flops = int(2 * Fraction(examples, groups.get("batch", 1)) * features * right[kernel.index("i")] * places)
    return flops, (rows, columns, summed), max(groups.values(), default=1) > 1


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
