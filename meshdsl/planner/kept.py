"""What is kept of a value for a reader that comes later: some copy on the way there, at least the smallest one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import numpy as np

from meshdsl.ir import Value
from meshdsl.layouts.layout import Layout
from meshdsl.planner.exact import Ids
from meshdsl.planner.identity import identity
from meshdsl.planner.model import Assignment, Model
from meshdsl.planner.tree import Edges, moves_of
from meshdsl.planner.wiring import End


class Kept:
    """Answers for plans of one model; equal values that are moved alike are looked at once."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._ports: dict[tuple[End, End | None], tuple[Value, int, int | None, list[int]]] = {}
        self._known: dict[tuple[int, Edges, int, int | None, frozenset[int]], int] = {}  # elements

    def paid(self, rows: Assignment, edges: Mapping[int, Edges]) -> float:
        """What a plan pays at the model's present prices for what is kept."""
        if not (prices := self.model.prices.kept):
            return 0.0
        held = np.array(self.bytes(prices.keys(), self.model.ports.layouts(rows), edges))
        return float(self.model.scale.pack(held * np.array(list(prices.values()))).sum())

    def bytes(self, ends: Iterable[End], layouts: Ids, edges: Mapping[int, Edges]) -> list[float]:
        """Of the smallest copy on the way to each reader, from where it has gone to the others that read the value.

        Args:
          layouts: of the ports in a plan. edges: by value, its moves.
        """
        numbers = layouts.tolist()
        return [self._least(end, None, numbers, edges) for end in ends]

    def besides(self, ends: Iterable[tuple[End, End]], layouts: Ids, edges: Mapping[int, Edges]) -> list[float]:
        """The same, but nothing where that copy may be the one that another reader takes meanwhile.

        Args:
          ends: of later readers, each with that of the other one.
        """
        numbers = layouts.tolist()
        return [self._least(end, meanwhile, numbers, edges) for end, meanwhile in ends]

    def _least(self, end: End, meanwhile: End | None, layouts: Sequence[int], edges: Mapping[int, Edges]) -> float:
        model, known = self.model, self._ports.get((end, meanwhile))
        value, port, its, others = known or self._of(end, meanwhile)
        distances, moved = model.distances[value.id], edges.get(value.id, ())
        taken = None if its is None else layouts[its]
        key = identity(distances), moved, layouts[port], taken, frozenset([layouts[other] for other in others])
        if key not in self._known:
            space, sizes = distances.space, model.mesh.sizes_by_name
            way = {move.after: move.before for move in moves_of(space, value.shape, value.itemsize, moved)}
            gone = {layout for other in key[-1] for layout in _back(space.layouts[other], way)}
            there = list(_until(gone, _back(space.layouts[key[2]], way)))
            free = taken is not None and space.layouts[taken] in there
            self._known[key] = 0 if free else min(prod(layout.local_shape(value.shape, sizes)) for layout in there)
        return float(self._known[key] * value.itemsize)

    def _of(self, end: End, meanwhile: End | None) -> tuple[Value, int, int | None, list[int]]:
        """What is read, the ports of its reader, of the one that reads meanwhile, and of others; known from now on."""
        wiring = self.model.wiring
        value, its = wiring.value(end), meanwhile and wiring.port(meanwhile)
        port, *others = map(wiring.port, (end, *wiring.ends(value)[1:]))
        found = self.model.problem.numbers.value(value), port, its, [at for at in others if at not in (port, its)]
        self._ports[end, meanwhile] = found
        return found


def _back(layout: Layout, way: Mapping[Layout, Layout]) -> Iterator[Layout]:
    """A layout, and those that it is made from, one from the other."""
    yield layout
    while layout in way:
        layout = way[layout]
        yield layout


def _until(those: set[Layout], layouts: Iterator[Layout]) -> Iterator[Layout]:
    """Layouts up to the first that is among those, with it."""
    for layout in layouts:
        yield layout
        if layout in those:
            return
