"""A layer's backward in two halves: what the gradient of its input needs, and the rest, its weights' gradients.

The halves are operations of the one backward that was traced, so nothing is done twice. What the second reads of the
first is its cut:

    made     what the layers made forward, which their stage has in stacks
    inside   what the first half makes, layer by layer
    once     what a microbatch brings along for all layers

What depends on the weights alone is made again where it is read.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from meshdsl.ir import Graph, Op, Value
from meshdsl.layouts.placement import B
from meshdsl.trace.graphs import Atom, values
from meshdsl.turns.layers import Layers
from meshdsl.turns.places import Placing


@dataclass(frozen=True)
class Halves:
    """The operations of a layer's backward, by half."""

    layers: Layers
    placing: Placing

    @cached_property
    def first(self) -> list[Op]:
        """For the gradient of the layer's input, and whatever else is carried from layer to layer."""
        return needed(self.layers.body, self.layers.body.returned[: len(self.layers.last)])

    @cached_property
    def second(self) -> list[Op]:
        """For what the layers stack."""
        done = [op for op in self.first if any(self.placing.of(v) is not B for v in op.outputs)]
        return needed(self.layers.body, self._rows, done)

    @cached_property
    def inside(self) -> list[Value]:
        """What the second half reads that the first makes, or that is carried."""
        carried = {v.id for _, v in self.layers.carries}
        made = {v.id for op in self.first for v in op.outputs} | carried
        return [v for v in self._read if v.id in made]

    @cached_property
    def read(self) -> set[int]:
        """Ids of what the second half reads of what is given to a layer."""
        return {v.id for v in self._read} & {v.id for v in self.layers.body.inputs}

    @property
    def _rows(self) -> list[Value]:
        return list(values(self.layers.body.returned[len(self.layers.last) :]))

    @cached_property
    def _read(self) -> list[Value]:
        """What the second half reads and does not make."""
        made = {v.id for op in self.second for v in op.outputs}
        read = (*(v for op in self.second for v in values(op.inputs)), *self._rows)
        return list({v.id: v for v in read if v.id not in made}.values())


def needed(body: Graph, wanted: Iterable[Atom], done: Iterable[Op] = ()) -> list[Op]:
    """Operations of a body that some values need, but for those that are done."""
    known, ids = {op.id for op in done}, {v.id for v in values(wanted)}
    found: list[Op] = []
    for op in reversed(body.ops[:-1]):
        if op.id not in known and any(v.id in ids for v in op.outputs):
            ids |= {v.id for v in values(op.inputs)}
            found.append(op)
    return found[::-1]
