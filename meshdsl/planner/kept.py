"""What is kept of a value for a reader that comes later: some copy on the way there, at least the smallest one."""

from collections.abc import Iterator, Mapping
from math import prod

import numpy as np

from meshdsl.layouts.layout import Layout
from meshdsl.planner.model import Assignment, Model
from meshdsl.planner.pairs import End
from meshdsl.planner.tree import Edges, moves_of


class Kept:
    """Answers for plans of one model; equal values that are moved alike are looked at once."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._known: dict[tuple[int, Edges, Layout, frozenset[Layout]], float] = {}

    def paid(self, rows: Assignment, edges: Mapping[int, Edges]) -> float:
        """What a plan pays at the model's present prices for what is kept."""
        packed = self.model.scale.pack
        found = [price * self.bytes(end, rows, edges) for end, price in self.model.prices.kept.items()]
        return float(packed(np.array(found)).sum()) if found else 0.0

    def bytes(self, end: End, rows: Assignment, edges: Mapping[int, Edges]) -> float:
        """Of the smallest copy on the way to a reader, from where it has gone to the others that read the value.

        Args:
          rows: of a plan. edges: by value, its moves.
        """
        model = self.model
        value = model.nodes[end[0]].ports[end[1]].value
        moved = edges.get(value.id, ())
        _, *others = (model.layout(*other, rows[other[0]]) for other in model.ends[value.id] if other != end)
        key = id(model.distances[value.id]), moved, model.layout(*end, rows[end[0]]), frozenset(others)
        if key not in self._known:
            space = model.distances[value.id].space
            way = {move.after: move.before for move in moves_of(space, value.shape, value.itemsize, moved)}
            gone = {layout for other in key[-1] for layout in _back(other, way)}
            sizes = model.mesh.sizes_by_name
            least = min(prod(layout.local_shape(value.shape, sizes)) for layout in _until(gone, _back(key[2], way)))
            self._known[key] = float(least * value.itemsize)
        return self._known[key]


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
