"""What the collectives inside local programs cost, in every joint state of an operation."""

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import combinations
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Split
from meshdsl.layouts.price import price
from meshdsl.layouts.rule import Signature
from meshdsl.planner.exact import Costs

Shapes = tuple[tuple[tuple[int, ...], int], ...]  # shape and itemsize per port


def exchange_seconds(rows: tuple[Signature, ...], shapes: Shapes, mesh: Mesh) -> "Costs | float":
    """Seconds of the exchanges, one array dim per mesh axis, over rows.

    Infinite where rows with different exchanges meet, and where blocks are too small for them.
    """
    found = dict.fromkeys(row.collectives for row in rows if row.collectives)
    if not found:
        return 0.0
    quiet = np.array([not row.collectives for row in rows])
    total = np.where(_everywhere([quiet] * len(mesh.sizes)), 0.0, np.inf)
    for exchanges in found:
        active = np.array([row.collectives == exchanges for row in rows])
        for axes in _groups(mesh):
            here = _everywhere([active if name in axes else quiet for name in mesh.names])
            costs = [_seconds(e, rows, shapes[e.port], axes, mesh) for e in exchanges]
            total = np.where(here, reduce(np.add, costs), total)
    return np.asarray(total)


def _groups(mesh: Mesh) -> Iterator[tuple[str, ...]]:
    wide = [name for name, size in mesh if size > 1]
    for count in range(1, len(wide) + 1):
        yield from combinations(wide, count)


def _everywhere(masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Joint states in which the row on every axis is in its mask."""
    return np.asarray(reduce(np.logical_and.outer, masks))


def _seconds(
    e: Exchange, rows: tuple[Signature, ...], array: tuple[tuple[int, ...], int], axes: tuple[str, ...], mesh: Mesh
) -> "Costs | float":
    """Of one exchange over ``axes``, in every joint state, as if exactly they split its dim."""
    (shape, itemsize), sizes = array, [mesh.axis(name) for name in axes]
    extent = shape[e.dim] // prod(sizes) if e.dim is not None else 1
    parts = e.parts(extent, sizes) if extent else None
    if parts is None:
        return np.inf
    split = np.array([isinstance(row.outputs[e.port], Split) for row in rows])
    blocks = reduce(np.multiply.outer, [np.where(split, 1.0 / size, 1.0) for size in mesh.sizes])
    total = np.zeros_like(blocks)
    for part in parts:
        given = prod(shape) * itemsize * blocks * ((part.stop - part.start) / extent if part.stop else 1.0)
        lines = price(part.kind, tuple(axes[i] for i in part.axes), mesh).lines
        total += reduce(np.minimum, [fixed + per_byte * given for fixed, per_byte in lines])
    return np.asarray(total)
