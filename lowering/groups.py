"""Who talks to whom: the device groups of a compiled collective, and the mesh axes they are.

Compiled programs name devices by number, in three notations for groups and one for pairs:

    replica_groups={{0,1},{2,3}}             the groups themselves; {} is everybody
    replica_groups=[2,4]<=[4,2]T(1,0)        count and size, cut from a transposed range
    replica_groups=mesh['x'=4,'y'=2] {'x'}   axes of a mesh of the compiler's own naming
    source_target_pairs={{0,1},{1,0}}        for permutes

Device d of a mesh has the coordinates of d in row-major order. Groups are the axes along which
their members' coordinates vary, if they are full products of axes; otherwise they are no axes.
"""

import re
from collections.abc import Iterable, Mapping
from math import prod

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_EXPLICIT = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})?\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))?\s*\{([^}]*)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+))?")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{} ]*\})?\}")
_PART = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")


def replica_groups(attributes: str, devices: int) -> Groups:
    """The groups that an instruction's attributes name, out of ``devices`` in all."""
    if match := _MESH.search(attributes):
        return _mesh_groups(match.group(1), match.group(2) or "", match.group(3))
    if match := _IOTA.search(attributes):
        return _rows(_transposed(match.group(2), match.group(3)).reshape(_numbers(match.group(1))))
    match = _EXPLICIT.search(attributes)
    return _braces(match.group(1)) if match and match.group(1) else (tuple(range(devices)),)


def source_target_pairs(attributes: str) -> Groups:
    """The (source, target) pairs of a permute."""
    match = _PAIRS.search(attributes)
    return _braces(match.group(1)) if match and match.group(1) else ()


def axes_of_groups(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes that the groups run over, in mesh order; None if they are no product of axes."""
    varying = {axes_of_pairs(_with_first(group), sizes) for group in groups}
    whole = sum(map(len, groups)) == prod(sizes.values())
    if len(varying) != 1 or not whole:
        return None
    (axes,) = varying
    return axes if all(len(set(g)) == prod(sizes[a] for a in axes) for g in groups) else None


def axes_of_pairs(pairs: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which any pair's two devices differ, in mesh order."""
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
