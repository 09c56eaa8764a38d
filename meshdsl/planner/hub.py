"""Sharing: a tensor moved for one reader is free for the next.

A value with several readers is kept in its own layout and, if that pays, in one more, its
*hub*: a gathered copy, say, that several readers share. The moves to the hub are paid once; a
reader then takes the cheaper of the two layouts as its start. ``Hub`` is the variable "own
layout and hub" with the states that can be optimal; states that another state beats whatever
the readers do are left out.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.closure import TIES, Costs, Ids


@dataclass(frozen=True)
class Hub:
    """States of the variable of one value.

    Args:
      own: per state, the number (in ``owns``) of the value's own layout.
      hub: per state, the layout of the hub; -1 for none.
      paid: per state, the cost of the moves from the own layout to the hub.
      reads: per reader, the cost from a state to each of the reader's layouts.
    """

    own: Ids
    hub: Ids
    paid: Costs
    reads: tuple[Costs, ...]


def make_hub(
    costs: Costs, owns: Ids, readers: tuple[Ids, ...], parts: tuple[float, ...] | None = None, worth: float = 0.0
) -> Hub:
    """The hub variable of a value.

    Args:
      costs: reshard costs between layouts.
      owns: layouts the value may be defined in.
      readers: per reader, the layouts it may ask for.
      parts: part of each reader's own moves that counts (all for the objective, less for bounds).
      worth: ties (see ``Scale``) that moves to a hub must have; a slice, say, is not worth sharing.
    """
    parts = parts or (1.0,) * len(readers)
    wanted = np.unique(np.concatenate([owns, *readers]))
    to = costs[np.ix_(owns, wanted)]
    worthy = np.isfinite(to) & (np.mod(np.where(np.isfinite(to), to, 0.0), TIES) >= worth) & (owns[:, None] != wanted)
    found = [_states(costs, i, own, wanted[worthy[i]], readers, parts) for i, own in enumerate(owns)]
    return Hub(
        np.concatenate([p.own for p in found]),
        np.concatenate([p.hub for p in found]),
        np.concatenate([p.paid for p in found]),
        tuple(np.concatenate([p.reads[j] for p in found]) for j in range(len(readers))),
    )


def _states(costs: Costs, i: int, own: int, wanted: Ids, readers: tuple[Ids, ...], parts: tuple[float, ...]) -> Hub:
    hubs = np.concatenate([[own], wanted]).astype(np.intp)
    paid = costs[own, hubs]
    reads = [
        _weighted(np.minimum(costs[own][None, r], costs[np.ix_(hubs, r)]), w)
        for r, w in zip(readers, parts, strict=True)
    ]
    keep = _undominated(paid, np.concatenate(reads, axis=1), [len(r) for r in readers])
    marks = np.where(hubs[keep] == own, -1, hubs[keep])
    return Hub(np.full(len(keep), i), marks, paid[keep], tuple(read[keep] for read in reads))


def _weighted(costs: Costs, part: float) -> Costs:
    return np.where(np.isfinite(costs), costs * part, np.inf)


def _undominated(paid: Costs, reads: Costs, widths: list[int]) -> NDArray[np.intp]:
    """States that no other state beats for every choice of the readers, earlier states winning ties."""
    worst = np.zeros((len(paid), len(paid)))
    finite = np.where(np.isfinite(reads), reads, 1e300)
    for part in np.split(finite, np.cumsum(widths)[:-1], axis=1):
        worst += np.max(part[:, None] - part[None], axis=2)
    beats = paid[:, None] + worst - paid[None] <= 0
    np.fill_diagonal(beats, False)
    keep: list[int] = []
    for state in range(len(paid)):
        beaten_by = np.flatnonzero(beats[:, state])
        if not any(other in keep or (other > state and not beats[state, other]) for other in beaten_by):
            keep.append(state)
    return np.array(keep, dtype=np.intp)
