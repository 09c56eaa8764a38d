"""Collectives of a compiled program, read from its HLO text, with loops counted.

The bytes that one device sends follow from the type of the result, with the formulas of ``layouts.collective_cost``:

    all-gather          R (k-1)/k         R = bytes of the result, k = devices of a group
    all-reduce          2 R (k-1)/k
    reduce-scatter      R (k-1)
    all-to-all          R (k-1)/k
    collective-permute  R

This holds for any program, including those of the XLA partitioner: groups that are not a product of mesh axes are
reported with ``axes=None`` and their size.

Differences between backends are normalised: asynchronous ``-start``/``-done`` pairs and a TPU's chains of fusions count
once; several tensors combined into one instruction count with all their bytes; and numbers that a backend sends in
another width than planned (``SENT_AS``) count in the planned width, which is in the scope of the instruction, or of the
line that takes its tensor out of a combined one.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import numpy as np

from meshdsl.ir.graph import sent_itemsize
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.hlo.parse import Instruction, InstructionSite, Module, arrays, executed, members, parse_module

# ---- Device groups and mesh axes -------------------------------------------------------------------------------------
# Compiled programs name devices by number, in three notations for groups and one for pairs:
#
#     replica_groups={{0,1},{2,3}}             the groups themselves; {} is all devices
#     replica_groups=[2,4]<=[4,2]T(1,0)        count and size, cut from a transposed range
#     replica_groups=mesh['x'=4,'y'=2] {'x'}   axes of a mesh of the compiler's own naming
#     source_target_pairs={{0,1},{1,0}}        for permutes
#
# Device d of a mesh has the coordinates of d in row-major order. Groups are the axes along which
# their members' coordinates vary, if they are full products of axes.


Groups = tuple[tuple[int, ...], ...]
_EXPLICIT = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})?\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))?\s*\{([^}]*)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+))?")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{} ]*\})?\}")
_PART = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")


def replica_groups(attributes: str, devices: int) -> Groups:
    """Returns the groups in an instruction's attributes, of ``devices`` devices in all."""
    if match := _MESH.search(attributes):
        return _mesh_groups(match.group(1), match.group(2) or "", match.group(3))
    if match := _IOTA.search(attributes):
        return _rows(_transposed(match.group(2), match.group(3)).reshape(_numbers(match.group(1))))
    match = _EXPLICIT.search(attributes)
    return _braces(match.group(1)) if match and match.group(1) else (tuple(range(devices)),)


def source_target_pairs(attributes: str) -> Groups:
    """Returns the (source, target) pairs of a permute."""
    match = _PAIRS.search(attributes)
    return _braces(match.group(1)) if match and match.group(1) else ()


def axes_of_groups(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes that the groups run over, in mesh order; None if they are not a product of axes."""
    varying = {axes_of_pairs(_with_first(group), sizes) for group in groups}
    whole = sum(map(len, groups)) == prod(sizes.values())
    if len(varying) != 1 or not whole:
        return None
    (axes,) = varying
    return axes if all(len(set(g)) == prod(sizes[a] for a in axes) for g in groups) else None


def axes_of_pairs(pairs: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of any pair differ, in mesh order."""
    if not pairs:
        return ()
    ends = np.array(np.unravel_index(np.array(pairs), tuple(sizes.values())))
    differs = (ends[..., 0] != ends[..., 1]).any(axis=1)
    return tuple(axis for axis, moved in zip(sizes, differs, strict=True) if moved)


def _with_first(group: tuple[int, ...]) -> Groups:
    return tuple((group[0], device) for device in group)


def _mesh_groups(mesh: str, order: str, axes: str) -> Groups:
    """Groups along axes, or parts of axes ``'x':(major)size``, of a mesh ``'x'=4,'y'=2`` of devices in ``order``."""
    named = re.findall(r"'?([\w.\-]+)'?=(\d+)", mesh)
    splits: dict[str, tuple[int, int]] = {}
    for name, major, size in _PART.findall(axes):
        splits[name] = (int(major or 1), int(size or dict(named)[name]))
    shape: list[int] = []
    inside: list[int] = []
    for name, full in named:
        major, size = splits.get(name, (int(full), 1))
        inside.append(len(shape) + 1)
        shape += [major, size, int(full) // major // size]
    outside = [i for i in range(len(shape)) if i not in inside]
    grid = _device_order(order, prod(shape)).reshape(shape).transpose(outside + inside)
    return _rows(grid.reshape(-1, prod(shape[i] for i in inside)))


def _device_order(text: str, devices: int) -> np.ndarray:
    """All devices: in the order listed, ``0,2,1,3``, or as a transposed range, ``[2,2]T(1,0)``."""
    if match := _ORDER.match(text):
        return _transposed(match.group(1), match.group(2))
    return np.array(_numbers(text)) if text else np.arange(devices)


def _transposed(shape: str, order: str | None) -> np.ndarray:
    dims = _numbers(shape)
    devices = np.arange(prod(dims)).reshape(dims)
    return devices.transpose(_numbers(order)) if order else devices


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _braces(text: str) -> Groups:
    return tuple(_numbers(group) for group in re.findall(r"\{([\d, ]+)\}", text.replace(" ", "")))


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in _lists(array))


def _lists(array: np.ndarray) -> Iterable[list[int]]:
    rows: list[list[int]] = array.reshape(array.shape[0], -1).tolist()
    return rows


# ---- Collectives -----------------------------------------------------------------------------------------------------


Readers = Mapping[str, Sequence[Instruction]]
KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
_INDEX = re.compile(r"\bindex=(\d+)")
_OPERAND = re.compile(r"%([\w.\-]+)\)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
# Per backend and dtype, the other types in which its compiler sends numbers of that dtype. A CPU has no arithmetic of
# short floats and none on less than a byte, and widens such numbers around collectives; a TPU narrows operands of its
# matrix unit; a GPU has no maxima of 16-bit integers, as which maxima of short floats are sent. Any other type counts
# with its own bytes.
_SHORT_FLOATS = "e3m4 e4m3 e4m3b11fnuz e4m3fn e4m3fnuz e5m2 e5m2fnuz".split()
SENT_AS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cpu": {
        "bfloat16": ("f32",),
        **{f"float8_{kind}": ("f16",) for kind in _SHORT_FLOATS},
        "float8_e8m0fnu": ("f32",),
        "float4_e2m1fn": ("f16",),
        **dict.fromkeys(("int2", "int4"), ("s8",)),
        **{"uint2": ("s8",), "uint4": ("u8",)},
    },
    "gpu": dict.fromkeys(("bfloat16", "float16"), ("s32",)),
    "tpu": {"float32": ("bf16",), "float16": ("bf16", "f32"), "bfloat16": ("f32",)},
}
_DIGITS = re.compile(r"\d+")
_PERMUTED = re.compile(r"collective-permute\(([\w,]*)\)")
_PLANNED = re.compile(rf"(?:{'|'.join(KINDS)})\(([\w,]*)\)")
_PLANNED_KIND = re.compile(rf"({'|'.join(KINDS)})\([\w,]*\)")
_SCOPE = re.compile(rf"(?:{'|'.join(KINDS)})\([\w,]*\) (\w+)")


@dataclass(frozen=True)
class SentTensor:
    """One of the tensors that a collective sends.

    Args:
      dtype, dims: of one device's result, as compiled.
      bytes: bytes that one device sends per iteration.
      about: attributes of the instruction, or of the line that takes this tensor out of a combined one.
    """

    dtype: str
    dims: tuple[int, ...]
    bytes: Fraction
    about: str


@dataclass(frozen=True)
class CompiledCollective:
    """A collective in a compiled program.

    Args:
      kind: as in a plan. axes: mesh axes in mesh order; None if the groups are no axes.
      group: devices in a group.
      bytes: bytes that one device sends per iteration.
      trips: executions per run of the program; loops with an unknown trip count count once.
      known: every enclosing loop has a known trip count.
      recast: this backend sends numbers in another width than planned; ``bytes`` counts the planned one.
      scope: the name stack it was traced under.
      name: of the instruction.
      tensors: what it sends; several if the compiler has combined collectives.
    """

    kind: str
    axes: tuple[str, ...] | None
    group: int
    bytes: Fraction
    trips: int
    known: bool
    recast: bool
    scope: str
    name: str = ""
    tensors: tuple[SentTensor, ...] = ()


def compiled_collectives(text: str, mesh: Mesh) -> tuple[CompiledCollective, ...]:
    """Returns every collective between several devices in the compiled HLO ``text``."""
    return collectives_of_module(parse_module(text), mesh)


def collectives_of_module(module: Module, mesh: Mesh) -> tuple[CompiledCollective, ...]:
    """Returns every collective between several devices in a parsed program."""
    readers = {name: readers_of(lines) for name, lines in module.computations.items()}
    sites = executed(module, lambda line: bool(collective_kind(line.opcode)))
    found = (collective_at(site, module.computations[site.inside], readers[site.inside], mesh) for site in sites)
    return tuple(c for c in found if c.group > 1)


def collective_kind(opcode: str) -> str:
    """Returns the kind of a collective or of its asynchronous start; empty for any other opcode."""
    base = opcode.removesuffix("-start")
    return base if base in KINDS else ""


def collective_at(
    site: InstructionSite, lines: Sequence[Instruction], readers: Readers, mesh: Mesh
) -> CompiledCollective:
    """Returns the collective of an instruction, among the lines and readers of its computation."""
    line, sizes = site.instruction, mesh.sizes_by_name
    kind = collective_kind(line.opcode)
    if kind == "collective-permute":
        moved = axes_of_pairs(source_target_pairs(line.rest), sizes)
        axes: tuple[str, ...] | None = _planned_axes(_scope(line), moved, mesh)
        group = mesh.size if axes else 1
    else:
        groups = replica_groups(line.rest, mesh.size)
        axes, group = axes_of_groups(groups, sizes), len(groups[0])
        if axes is None:
            axes = _axes_around(_scope(line), groups, mesh)
    scope = _scope(line)
    parts = arrays(_least_of_ragged(line, lines) if kind == "ragged-all-to-all" else _result(line))
    taken = _lines_of_parts(line, readers) if len(parts) > 1 else {}
    scopes = {i: found for i, text in taken.items() if _SCOPE.search(found := scope_in(text))}
    widths = [_width(scopes.get(i, scope), part.dtype) for i, part in enumerate(parts)]
    # a TPU's fusion of an all-reduce with the slice that follows sends half as much
    halved = kind == "all-reduce" and "all-reduce-scatter" in site.inside
    each = [_SENT[kind](p.bytes * w, group) / (2 if halved else 1) for p, w in zip(parts, widths, strict=True)]
    if halved:
        kind = "reduce-scatter"
    if kind == "ragged-all-to-all":  # plans call it by what it is on the wire
        kind = "all-to-all"
    recast = any(w != 1 for w in widths)
    tensors = tuple(
        SentTensor(part.dtype, part.dims, sent, taken.get(i, line.rest))
        for i, (part, sent) in enumerate(zip(parts, each, strict=True))
    )
    whole = sum(each, Fraction(0))
    return CompiledCollective(kind, axes, group, whole, site.trips, site.known, recast, scope, line.name, tensors)


_SENT: dict[str, Callable[[Fraction, int], Fraction]] = {
    "all-gather": lambda result, k: result * (k - 1) / k,
    "all-reduce": lambda result, k: 2 * result * (k - 1) / k,
    "reduce-scatter": lambda result, k: result * (k - 1),
    "all-to-all": lambda result, k: result * (k - 1) / k,
    "ragged-all-to-all": lambda result, k: result * (k - 1) / k,
    "collective-permute": lambda result, k: result,
    "collective-broadcast": lambda result, k: result,
}


def _result(line: Instruction) -> str:
    """The type of the result; an asynchronous start returns operand and result, except all-reduce-start."""
    if line.opcode.endswith("-start") and line.opcode != "all-reduce-start":
        return members(line.type)[1]
    return line.type


def _least_of_ragged(line: Instruction, lines: Sequence[Instruction]) -> str:
    """The smaller type of operand and result: balanced routing fills it, and data alone says what is sent."""
    operand = next((other.type for other in lines if other.name == line.operands[0]), line.type)
    return min(operand, _result(line), key=lambda type: sum(part.bytes for part in arrays(type)))


def _scope(line: Instruction) -> str:
    return scope_in(line.rest)


def scope_in(attributes: str) -> str:
    """Returns the name stack in the attributes of an instruction; empty if they state none."""
    match = _OP_NAME.search(attributes)
    return match.group(1) if match else ""


def planned_kind(scope: str) -> str:
    """Returns the kind of the planned collective that a scope names; empty if it names none."""
    named = _PLANNED_KIND.findall(scope)
    return named[-1] if named else ""


def readers_of(lines: Sequence[Instruction]) -> Readers:
    """Returns the ``-done`` and ``get-tuple-element`` lines by the name of their operand."""
    found: dict[str, list[Instruction]] = {}
    for line in lines:
        if line.opcode == "get-tuple-element" or line.opcode.endswith("-done"):
            found.setdefault(_operand(line), []).append(line)
    return found


def _lines_of_parts(line: Instruction, readers: Readers) -> dict[int, str]:
    """Per tensor of a combined instruction, the attributes of the line that takes it out."""
    taken = list(readers.get(line.name, ()))
    taken += [other for done in taken if done.opcode.endswith("-done") for other in readers.get(done.name, ())]
    return {int(index.group(1)): other.rest for other in taken if (index := _INDEX.search(other.rest))}


def _operand(line: Instruction) -> str:
    """The name of the first operand; some compilers write its type before it."""
    match = _OPERAND.search(line.rest)
    return match.group(1) if match else ""


def _planned_axes(scope: str, moved: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """The axes in the scope of a permutation if the moved ones are among them, since some may be fixed points."""
    named = _PERMUTED.findall(scope)
    stated = tuple(name for name in mesh.names if name in named[-1].split(",")) if named else ()
    return stated if moved and set(moved) < set(stated) else moved


def _axes_around(scope: str, groups: Groups, mesh: Mesh) -> tuple[str, ...] | None:
    """The axes in the scope of a planned collective if its groups, smaller than they are, lie within them."""
    named = _PLANNED.findall(scope)
    stated = tuple(name for name in mesh.names if name in named[-1].split(",")) if named else ()
    varying = {axis for group in groups for axis in axes_of_pairs(_with_first(group), mesh.sizes_by_name)}
    return stated if stated and varying <= set(stated) else None


def _width(scope: str, sent: str) -> Fraction:
    """Planned over compiled bits where a backend sends numbers in another width than planned, else 1."""
    planned = _SCOPE.findall(scope)
    if not planned or all(sent not in known.get(planned[-1], ()) for known in SENT_AS.values()):
        return Fraction(1)
    return Fraction(_bits(planned[-1]), _bits(sent))


def _bits(dtype: str) -> int:
    """Bits in which a plan sends a dtype, by its name in jax or in the compiler's text."""
    return int(8 * sent_itemsize(int(_DIGITS.findall(dtype)[0]) / 8))
