"""What is near a plan: states and layouts that differ from it on some mesh axes, which move in groups."""

from collections.abc import Iterator
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.distances import Distances
from meshdsl.planner.exact import Ids

Axes = tuple[int, ...]  # mesh axes by number
Groups = tuple[Axes, ...]  # axes of one group take the same row


def near(states: Ids, groups: Groups, around: Ids) -> NDArray[np.bool_]:
    """Which states have one row per group and all else as in the state ``around``; that state itself is one."""
    free = [axis for axes in groups for axis in axes]
    held = [axis for axis in range(len(around)) if axis not in free]
    near = (states[:, held] == around[held]).all(axis=1)
    for axes in groups:
        near &= (states[:, axes] == states[:, axes[:1]]).all(axis=1)
    found: NDArray[np.bool_] = near | (states == around).all(axis=1)
    return found


def between(distances: Distances, active: Ids, groups: Groups) -> Ids:
    """The layouts ``active``, and those in mesh order with a placement or B per group and nothing new elsewhere."""
    codes, free = distances.codes, [axis for axes in groups for axis in axes]
    inside = distances.in_mesh_order.copy()
    for axes in groups:
        placed = codes[:, axes]
        common = np.where(placed == distances.rank, -1, placed).max(axis=1, keepdims=True)
        inside &= ((placed == distances.rank) | (placed == common)).all(axis=1)
    for axis in set(range(codes.shape[1])) - set(free):
        inside &= np.isin(codes[:, axis], [*codes[active, axis], distances.rank])
    inside[active] = True
    return distances.fitting[inside[distances.fitting]]


def apart(axes: Axes) -> Groups:
    """Each mesh axis by itself."""
    return tuple((axis,) for axis in axes)


def in_pairs(axes: Axes) -> Iterator[Groups]:
    """Two of the mesh axes, each by itself; the others stay."""
    return map(apart, combinations(axes, 2))


def in_two(axes: Axes) -> Iterator[Groups]:
    """All mesh axes, in two groups of neighbours."""
    return ((axes[:i], axes[i:]) for i in range(1, len(axes)))


def as_two(axes: Axes) -> Iterator[Groups]:
    """Mesh axes as if there were two: two of them, then all in two groups."""
    return chain(in_pairs(axes), in_two(axes))


def as_fewer(axes: Axes) -> Iterator[Groups]:
    """All mesh axes as if there were fewer: in one group, then in two groups of neighbours."""
    if len(axes) > 1:
        yield (axes,)
    if len(axes) > 2:
        yield from in_two(axes)


def as_taken(axes: Axes, rows: Ids) -> Groups:
    """The two groups whose axes take the same row in most operations of a plan, ``rows[node, axis]``."""

    def alike(groups: Groups) -> int:
        return int(np.logical_and.reduce([(rows[:, some] == rows[:, some[:1]]).all(axis=1) for some in groups]).sum())

    return max(in_two(axes), key=alike)
