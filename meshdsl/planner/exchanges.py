"""What the collectives inside local programs cost, in every joint state of an operation."""

from collections.abc import Sequence
from functools import reduce
from itertools import product
from math import prod

import numpy as np

from meshdsl.layouts.exchange import Turn, in_turn
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Split
from meshdsl.layouts.price import price
from meshdsl.layouts.rule import Signature
from meshdsl.planner.exact import Costs

Shapes = tuple[tuple[tuple[int, ...], int], ...]  # shape and itemsize per port
Rows = tuple[Signature, ...]


def exchange_seconds(rows: Rows, shapes: Shapes, mesh: Mesh) -> "Costs | float":
    """Seconds of the exchanges, one array dim per mesh axis, over rows.

    Infinite where rows meet whose exchanges cannot, and where blocks are too small for them.
    """
    listed = dict.fromkeys(row.collectives for row in rows)
    if not any(listed):
        return 0.0
    places = {same: [i for i, row in enumerate(rows) if row.collectives == same] for same in listed}
    total = np.full((len(rows),) * len(mesh.sizes), np.inf)
    for chosen in product(*(listed if size > 1 else [()] for size in mesh.sizes)):
        turns = in_turn(chosen)
        if turns is not None:
            here = [places[same] for same in chosen]
            met = [tuple(rows[i] for i in at) for at in here]
            costs = (_seconds(turn, met, shapes[turn.exchange.port], mesh) for turn in turns)
            total[np.ix_(*here)] = sum(costs, start=np.zeros(()))
    return total


def _seconds(turn: Turn, rows: Sequence[Rows], array: tuple[tuple[int, ...], int], mesh: Mesh) -> "Costs | float":
    """Of one exchange, where each axis takes one of its ``rows``, as if exactly its own axes split its dim."""
    (shape, itemsize), e = array, turn.exchange
    extents = list(shape)
    for each in (*turn.earlier, turn):
        if each.exchange.dim is not None:
            extents[each.exchange.dim] //= prod(mesh.sizes[axis] for axis in each.axes)
    extent = extents[e.dim] if e.dim is not None else 1
    parts = e.parts(extent, [mesh.sizes[axis] for axis in turn.axes]) if all(extents) else None
    if parts is None:
        return np.inf
    split = ([isinstance(row.outputs[e.port], Split) for row in some] for some in rows)
    shares = (np.where(blocks, 1.0 / size, 1.0) for blocks, size in zip(split, mesh.sizes, strict=True))
    held = reduce(np.multiply.outer, shares) * prod(shape) * itemsize * prod(turn.widened(extents)) / prod(extents)
    total = np.zeros_like(held)
    for part in parts:
        given = held * ((part.stop - part.start) / extent if part.stop else 1.0)
        lines = price(part.kind, tuple(mesh.names[turn.axes[i]] for i in part.axes), mesh).lines
        total += reduce(np.minimum, [fixed + per_byte * given for fixed, per_byte in lines])
    return np.asarray(total)
