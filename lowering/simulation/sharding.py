"""Shardings in the notations of HLO: which block of an array each device has.

{replicated}                                                 the whole array
{devices=[4,1,2]<=[8] last_tile_dim_replicate}               blocks per dim, of a range of devices cut into a grid;
{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dims={replicated}}     the last dims of the grid are no dims of the array
{mesh['x'=4,'y'=2], [{'x'}, {}], manual={'y'}}               axes of a mesh per dim
#sdy.sharding_per_value<[<@mesh, [{"x"}, {}]>, ...]>         the same, of a mesh that the module's first line defines
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

from meshdsl.lowering.hlo.parse import members
from meshdsl.lowering.simulation.numbers import Array
from meshdsl.lowering.simulation.operation import Unreadable

_GRID = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))(.*)")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^{}]*?)\))?,\s*(.*)", re.S)
_AXIS = re.compile(r"'?([\w.\-]+)'?=(\d+)")
_SDY_MESH = re.compile(r"([\w.\-]+) = #sdy\.mesh<\[([^\]]*)\](?:, device_ids=(\[[\d, ]*\]))?>")
_SDY_VALUE = re.compile(r"<@([\w.\-]+), (\[[^\]]*\][^<>]*)>")
_PART = re.compile(r"'([\w.\-]+)'(?::\((\d+)\)(\d+))?|(?<![\w'])([\w.\-]+)(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True, eq=False)
class Blocks:
    """Which block of an array each device has.

    Args:
      counts: blocks per dim. places: per device and dim, the number of the block.
    """

    counts: tuple[int, ...]
    places: Array

    def divided(self, factors: tuple[int, ...]) -> "Blocks":
        """Returns the coarser blocks of which a dim has only so many."""
        inner = [count // factor for count, factor in zip(self.counts, factors, strict=True)]
        return Blocks(factors, self.places // np.array(inner, np.int64).reshape(1, -1))

    def cut(self, x: Array) -> list[Array]:
        """Returns each device's block of an array; the last ones of a dim are shorter if it does not divide."""
        sizes = [-(-n // count) for n, count in zip(x.shape[1:], self.counts, strict=True)]
        rows = [tuple(slice(p * n, (p + 1) * n) for p, n in zip(place, sizes, strict=True)) for place in self._rows]
        return [x[(min(i, len(x) - 1), *row)] for i, row in enumerate(rows)]

    def joined(self, blocks: Array, shape: tuple[int, ...]) -> Array:
        """Returns the array of ``shape`` that blocks of devices make up.

        Where devices of one place have other blocks, each sees its own, and elsewhere that of the first device.
        """
        made = np.zeros((1, *shape), blocks.dtype)
        rows = [tuple(slice(p * n, (p + 1) * n) for p, n in zip(place, blocks.shape[1:], strict=True))
                for place in self._rows]  # fmt: skip
        pairs = list(zip(rows, blocks, strict=True))
        for row, block in reversed(pairs):
            made[0, ...][row] = block
        if all(np.array_equal(made[0, ...][row], block, equal_nan=True) for row, block in pairs):
            return made
        made = np.repeat(made, len(blocks), 0)
        for i, (row, block) in enumerate(pairs):
            made[i, ...][row] = block
        return made

    @property
    def _rows(self) -> list[tuple[int, ...]]:
        return [tuple(row) for row in self.places.tolist()]


@cache
def blocks_of(text: str, dims: int, devices: int) -> Blocks:
    """Returns the blocks of an array of so many dims, of a sharding in HLO's text, without its braces or with them.

    Raises:
      Unreadable: the notation is unknown, or no blocks are stated (``manual``).
    """
    inside = text.strip().removeprefix("{").removesuffix("}").strip()
    inside = re.sub(r",?\s*metadata=\{.*\}", "", inside)
    if re.fullmatch(r"(mesh\[.*\], *)?(replicated|maximal.*)?", inside):
        return Blocks((1,) * dims, np.zeros((devices, dims), np.int64))
    if "unreduced" in inside:
        raise Unreadable(f"sharding {text}")
    if match := _GRID.match(inside):
        return _of_grid(match, dims, devices)
    if match := _MESH.match(inside):
        return _of_mesh(match, dims, devices)
    raise Unreadable(f"sharding {text}")


def named_meshes(head: str) -> dict[str, str]:
    """Returns the meshes that the first line of a module defines, in HLO's text, by name."""
    return {
        name: f"mesh[{sizes}]" + (f", device_ids=({ids.replace(' ', '')[1:-1]})" if ids else "")
        for name, sizes, ids in _SDY_MESH.findall(head.replace("\\", "").replace('"', "'"))
    }


def shardings_per_value(text: str, meshes: Mapping[str, str]) -> list[str]:
    """Returns the shardings of several values in HLO's text.

    Args:
      meshes: by the names that the text has.

    Raises:
      Unreadable: a mesh is unknown.
    """
    found = _SDY_VALUE.findall(text.replace("\\", "").replace('"', "'"))
    if unknown := {name for name, _ in found} - meshes.keys():
        raise Unreadable(f"a mesh {', '.join(sorted(unknown))}")
    return [f"{{{meshes[name]}, {rest}}}" for name, rest in found]


def _of_grid(match: re.Match[str], dims: int, devices: int) -> Blocks:
    shape, order, transposed, listed, _ = match.groups()
    grid = _numbers(shape)
    ids = np.array(_numbers(listed)) if listed else np.arange(devices).reshape(_numbers(order))
    ids = ids.transpose(_numbers(transposed)) if transposed else ids
    places = np.zeros((devices, len(grid)), np.int64)
    places[ids.reshape(-1)] = np.stack(np.unravel_index(np.arange(prod(grid)), grid), 1)
    return Blocks(grid[:dims], places[:, :dims])


def _of_mesh(match: re.Match[str], dims: int, devices: int) -> Blocks:
    mesh, order, rest = match.groups()
    sizes = {name: int(size) for name, size in _AXIS.findall(mesh)}
    ids = np.arange(devices)
    if order:
        shape = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", order)
        ids = np.array(_numbers(order)) if shape is None else ids.reshape(_numbers(shape[1]))
        ids = ids.transpose(_numbers(shape[2])).reshape(-1) if shape is not None and shape[2] else ids.reshape(-1)
    grid = np.stack(np.unravel_index(np.arange(devices), tuple(sizes.values())), 1)
    coordinates = np.zeros_like(grid)
    coordinates[ids] = grid
    per_dim = members(rest[rest.index("[") : _closed(rest)]) if "[" in rest else []
    counts, columns = list[int](), list[Array]()
    for text in [part for part in per_dim if part.strip()] or ["{}"] * dims:
        count, column = 1, np.zeros(devices, np.int64)
        for found in _PART.finditer(text):
            name = found[1] or found[4]
            whole = sizes[name]
            major, size = int(found[2] or found[5] or 1), int(found[3] or found[6] or whole)
            at = coordinates[:, list(sizes).index(name)] // (whole // (major * size)) % size
            count, column = count * size, column * size + at
        counts.append(count)
        columns.append(column)
    return Blocks(tuple(counts), np.stack(columns, 1) if columns else np.zeros((devices, 0), np.int64))


def _closed(text: str) -> int:
    """The place behind the bracket that closes the first one."""
    depth = 0
    for at, char in enumerate(text):
        depth += {"[": 1, "]": -1}.get(char, 0)
        if char == "]" and depth == 0:
            return at + 1
    return len(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)
