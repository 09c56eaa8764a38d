"""The price of every reshard of a tensor, worked out from the layouts that are asked for.

All moves of a layout space are arrays (``arcs``); a tensor's bytes scale the prices. From a layout
to all others is a few passes over the arrays (Bellman 1958).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import REDUCTIONS, Placement
from meshdsl.layouts.space import space
from meshdsl.planner.arcs import arrays, code
from meshdsl.planner.exact import Costs, Ids, Scale

_Moves = tuple[Ids, Ids, Costs]  # from, to and price


@dataclass(frozen=True)
class Hidden:
    """What of a collective can run beside independent computing.

    Args:
      window: seconds of such computing.
      price: of a second that is hidden, as a part of one that is not.
    """

    window: float
    price: float

    def seconds(self, seconds: Costs) -> Costs:
        """What sticks out of moves that take so long, and the price of the rest."""
        inside = np.minimum(seconds, self.window)
        return np.asarray(seconds - inside + self.price * inside)


class Distances:
    """Reshard costs between the layouts of tensors of one shape; layouts go by their number in ``space``.

    Args:
      sent: whether there are collectives among the moves, or only what every device does for itself.
      apart: axes that split the tensor in every layout.
      hidden: what of collectives costs less; None if they cost what they take.
    """

    def __init__(
        self,
        mesh: Mesh,
        shape: tuple[int, ...],
        itemsize: int,
        kinds: tuple[str, ...],
        scale: Scale,
        sent: bool = True,
        apart: tuple[str, ...] = (),
        hidden: Hidden | None = None,
    ) -> None:
        self.scale, self.bytes, self._sent, self._hidden = scale, prod(shape) * itemsize, sent, hidden
        self.space, self.rank = space(mesh, len(shape), kinds), len(shape)
        self._arrays = arrays(self.space)
        self.codes = self._arrays.codes
        divides = (np.array(shape, dtype=np.intp) % self._arrays.shards == 0).all(axis=1)
        split = self.codes[:, [mesh.names.index(name) for name in apart]] < self.rank
        self.fitting = np.flatnonzero(divides & split.all(axis=1))
        self._ids: dict[tuple[str, ...], Ids] = {}
        self._usable: dict[bool, _Moves] = {}

    def rows(self, sources: Ids, through: Ids, targets: Ids) -> tuple[Costs, Costs]:
        """Costs [sources, targets]: of paths that make nothing partial, and of all paths.

        A value becomes partial only at the end of a path; moves do not go on from there.

        Args:
          through: the layouts that paths may lead through, sources and targets among them.
        """
        place = np.full(len(self.codes), -1)
        place[through] = np.arange(through.size)
        costs = np.full((through.size, sources.size), np.inf)
        costs[place[sources], np.arange(sources.size)] = 0.0
        inner = _Graph.of(*self.usable(False), place).relaxed(costs)
        whole = _Graph.of(*self.usable(True), place).relaxed(inner)
        return inner[place[targets]].T, whole[place[targets]].T

    def usable(self, partial: bool) -> _Moves:
        """Single moves between layouts that fit: those that make the tensor partial, or the others."""
        if partial not in self._usable:
            self._usable[partial] = self._moves(partial)
        return self._usable[partial]

    def _moves(self, partial: bool) -> _Moves:
        arcs = self._arrays.arcs
        fit = np.zeros(len(self.codes), dtype=np.bool_)
        fit[self.fitting] = True
        usable = (arcs.partial == partial) & fit[arcs.source] & fit[arcs.target] & (self._sent | ~arcs.sends)
        seconds = (arcs.fixed + arcs.per_byte * self.bytes).min(axis=1)
        if self._hidden:
            seconds = np.where(arcs.sends, self._hidden.seconds(seconds), seconds)
        price = self.scale.pack(seconds, arcs.tie)
        return arcs.source[usable], arcs.target[usable], price[usable]

    @cached_property
    def in_mesh_order(self) -> NDArray[np.bool_]:
        """Which layouts have the axes of every dim in the order of the mesh."""
        return self._arrays.ordered(self.space.mesh.names)

    @cached_property
    def least_bytes(self) -> float:
        """Bytes that one device holds in the smallest layout."""
        return float(self.bytes * self.shares.min())

    @cached_property
    def shares(self) -> Costs:
        """Part of the tensor's bytes that one device holds, by layout."""
        return np.asarray(1 / self._arrays.shards.prod(axis=1))

    def ids(self, order: tuple[str, ...]) -> Ids:
        """Layout numbers by placement codes, axes of one dim in ``order``; one past the last where there is none."""
        if order not in self._ids:
            ids = np.full((self.rank + 1 + len(REDUCTIONS),) * len(order), len(self.codes))
            here = self.fitting[self._arrays.ordered(order)[self.fitting]]
            ids[tuple(self.codes[here].T)] = here
            self._ids[order] = ids
        return self._ids[order]


@dataclass(frozen=True, eq=False)
class _Graph:
    """Moves between layouts as arrays sorted by where they lead, one at most between two layouts."""

    source: Ids
    target: Ids
    price: Costs

    @classmethod
    def of(cls, source: Ids, target: Ids, price: Costs, place: Ids) -> "_Graph":
        """The moves between layouts that have a place, by which they go here; of parallel ones, the cheapest."""
        source, target = place[source], place[target]
        here = (source >= 0) & (target >= 0)
        source, target, price = source[here], target[here], price[here]
        order = np.lexsort((price, source, target))
        source, target, price = source[order], target[order], price[order]
        first = np.append(True, (np.diff(source) != 0) | (np.diff(target) != 0))[: source.size]
        return cls(source[first], target[first], price[first])

    def relaxed(self, costs: Costs) -> Costs:
        """Costs [layouts, rows] after any number of moves."""
        from meshdsl.planner.relaxed import relax  # with its compiler, too much to import for those who plan nothing

        best = costs.copy()
        relax(self.source, self.target, self.price, best)
        return best


def codes_of(placements: Iterable[Placement], rank: int) -> Ids:
    """Codes of several placements of one tensor."""
    return np.array([code(placed, rank) for placed in placements], dtype=np.intp)
