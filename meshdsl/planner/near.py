"""What is near a plan: states and layouts that differ from it on some mesh axes, which move in groups."""

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
