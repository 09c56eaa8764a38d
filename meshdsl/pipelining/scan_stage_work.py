"""What one stage does of one microbatch: its layers forward, backward, or one half of backward."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax

from meshdsl.ir.graph import Atom, Graph, Op, Value
from meshdsl.ir.rewrite import values
from meshdsl.layouts.placement import B, Placement
from meshdsl.lowering.interpreter import Arrays
from meshdsl.lowering.local.registry import run_exchanges
from meshdsl.pipelining.interpreter import AXIS, Runner, sliced
from meshdsl.pipelining.layer_scan import LayerScan, Stacks, Wanted, kept_stacks, run_layers
from meshdsl.pipelining.scan_stages import Stages
from meshdsl.pipelining.time_axis import SAME, TimePlacement, held

# ---- Halves ----------------------------------------------------------------------------------------------------------
# A layer's backward in two halves: what the gradient of its input needs, and the rest, its weights' gradients.
#
# The halves are operations of the one backward that was traced, so nothing is done twice. What the second reads of the
# first is its cut:
#
#     made     what the layers made forward, which their stage has in stacks
#     inside   what the first half makes, layer by layer
#     once     what a microbatch brings along for all layers
#
# What depends on the weights alone is made again where it is read.


@dataclass(frozen=True)
class SplitBackward:
    """The operations of a layer's backward, by half."""

    layers: LayerScan
    placing: TimePlacement

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


# ---- Work ------------------------------------------------------------------------------------------------------------


Known = dict[tuple[int, Placement], jax.Array]


class StageTurn(NamedTuple):
    """Whose work it is.

    Args:
      microbatch: its number.
      used: per place for a layer, whether there is one, if not all stages have as many.
    """

    microbatch: jax.Array
    used: jax.Array | None


@dataclass(frozen=True)
class StageWork:
    """A stage's work.

    Args:
      whole: what does not depend on the batch.
      length: places for layers in a stage.
    """

    stages: Stages
    whole: Runner
    length: int

    @cached_property
    def halves(self) -> SplitBackward:
        """The operations of a layer's backward, by half."""
        return SplitBackward(self.stages.backward, self.stages.placing)

    def shared(self, layers: LayerScan) -> list[Value]:
        """What layers have of stacks that are the same for all microbatches."""
        made = {v.id for v in self.stages.forward.made}
        return [v for x, v in layers.stacks if layers is self.stages.forward or x.id not in made]

    def forward(self, turn: StageTurn, given: Arrays, own: Arrays) -> tuple[Arrays, Arrays]:
        """What the stage hands on, and the stacks that its layers make.

        Args:
          turn: whose it is.
          given: what the stage before handed on.
          own: of ``shared``.
        """
        layers = self.stages.forward
        return self._all(layers, turn, given, self._consts(layers, given), self._own(layers, own))

    @cached_property
    def results(self) -> dict[Value, Value]:
        """Stacks that layers make forward and read backward, by what a layer has of them.

        What depends on weights alone is made again.
        """
        made = {v.id for v in self.stages.forward.made} - {v.id for _, v in self._of_weights}
        return {x: v for x, v in self.stages.backward.stacks if x.id in made}

    @cached_property
    def _of_weights(self) -> list[tuple[Atom, Value]]:
        layers, places = self.stages.forward, self.stages.placing
        return [(x, v) for x, v in layers.rows if places.of(v) in (B, SAME) and not self._reads_carries(x)]

    def _reads_carries(self, x: Atom) -> bool:
        layers = self.stages.forward
        read = {v.id for op in needed(layers.body, [x]) for v in values(op.inputs)} | {v.id for v in values([x])}
        return any(v.id in read for _, v in layers.carries)

    def kept(self, made: Arrays, rows: Arrays) -> Arrays:
        """What a backward reads of its forward: of each layer, and what the stage handed on."""
        stacks = dict(zip(self.stages.forward.made, rows, strict=True))
        return (*(stacks[x] for x in self.results), *made)

    def found(self, turn: StageTurn, kept: Arrays, own: Arrays) -> tuple[Arrays, Any]:
        """What a stage made forward, and the stacks of its layers, None where nobody reads them, from what was kept."""
        layers, count = self.stages.forward, len(self.results)
        wanted = [(x, sliced(self._place(v))) for x, v in self._of_weights]
        ops = needed(layers.body, [x for x, _ in wanted])
        _, again = self._run(layers, turn, {}, ops, (), self._own(layers, own), wanted)
        stacks = dict(zip(self.results, kept, strict=False))
        stacks.update(zip((v for _, v in self._of_weights), again, strict=True))
        return kept[count:], tuple(stacks.get(v) for v in layers.made)

    def backward(
        self, turn: StageTurn, back: Arrays, given: Arrays, rows: Arrays, own: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Likewise backward; ``given`` and ``rows`` are what the stage was given forward, and made."""
        layers = self.stages.backward
        return self._all(layers, turn, back, self._known(back, given), self._made(rows) | self._own(layers, own))

    def first(self, turn: StageTurn, back: Arrays, given: Arrays, rows: Arrays, own: Arrays) -> tuple[Arrays, Arrays]:
        """The first half of it: what the stage hands on, and what the second half reads (``cut``)."""
        layers, made, known = self.stages.backward, self._made(rows), self._known(back, given)
        wanted, carries = [(v, self._place(v)) for v in self.halves.inside], len(layers.last)
        stacks = made | self._own(layers, own)
        ends, inside = self._run(layers, turn, known, self.halves.first, back[:carries], stacks, wanted)
        return (*ends, *back[carries:]), (*inside, *self._kept(made, known))

    def _kept(self, made: Stacks, known: Known) -> Iterator[jax.Array]:
        yield from (made[v] for v in self._from_forward)
        yield from (known[x.id, self._place(x)] for x in self._brought)

    def second(self, turn: StageTurn, cut: Arrays, own: Arrays) -> Arrays:
        """The second half: the stacks that the layers make."""
        layers, each, _ = self.stages.backward, *self.cut
        known = {(x.id, self._place(x)): y for x, y in zip(self._brought, cut[len(each) :], strict=True)}
        stacks = dict(zip(each, cut, strict=False)) | self._own(layers, own)
        return self._run(layers, turn, known, self.halves.second, (), stacks, self._rows(layers))[1]

    @property
    def cut(self) -> tuple[list[Value], list[Value]]:
        """What the second half reads of the first: of each layer, and of all."""
        return [*self.halves.inside, *self._from_forward], self._brought

    @cached_property
    def _from_forward(self) -> list[Value]:
        """What the second half of a layer's backward reads of what the layer made forward."""
        made = {v.id for v in self.stages.forward.made}
        return [v for x, v in self.stages.backward.stacks if x.id in made and v.id in self.halves.read]

    @cached_property
    def _brought(self) -> list[Value]:
        """What it reads of what a microbatch brings along."""
        consts = {x.id for layers in self.stages.scans for x in self.stages.consts(layers)}
        read = [x for x, v in self.stages.backward.consts if v.id in self.halves.read and isinstance(x, Value)]
        return [x for x in dict.fromkeys(read) if x.id in consts]

    def _all(
        self, layers: LayerScan, turn: StageTurn, given: Arrays, known: Known, stacks: Stacks
    ) -> tuple[Arrays, Arrays]:
        """All of each layer; what is brought along goes on."""
        carries, ops = len(layers.last), layers.body.ops[:-1]
        made, rows = self._run(layers, turn, known, ops, given[:carries], stacks, self._rows(layers))
        return (*made, *given[carries:]), rows

    def _run(
        self,
        layers: LayerScan,
        turn: StageTurn,
        known: Known,
        ops: Sequence[Op],
        start: Arrays,
        stacks: Stacks,
        wanted: Wanted,
    ) -> tuple[Arrays, Arrays]:
        runner = Runner(self.stages.placing, self.whole.arrays | known)
        with run_exchanges(AXIS, turn.microbatch):
            return run_layers(runner, layers, ops, start, stacks, wanted, self.length, turn.used)

    def _rows(self, layers: LayerScan) -> Wanted:
        return [(x, sliced(self._place(v))) for x, v in layers.rows]

    def _place(self, x: Value) -> Placement:
        return held(self.stages.placing.of(x))

    def _known(self, back: Arrays, given: Arrays) -> Known:
        return self._consts(self.stages.forward, given) | self._consts(self.stages.backward, back)

    def _consts(self, layers: LayerScan, given: Arrays) -> Known:
        """The consts among what a microbatch brings along."""
        consts = self.stages.consts(layers)
        return {(x.id, self._place(x)): y for x, y in zip(consts, given[len(layers.last) :], strict=True)}

    def _made(self, rows: Arrays) -> Stacks:
        """What layers made forward, as their backward has it."""
        return kept_stacks(self.stages.backward, dict(zip((v.id for v in self.stages.forward.made), rows, strict=True)))

    def _own(self, layers: LayerScan, own: Arrays) -> Stacks:
        return dict(zip(self.shared(layers), own, strict=True))
