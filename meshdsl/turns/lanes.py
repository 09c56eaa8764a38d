"""What all stages of a pipeline do at once.

What stages have is stacked, stage by stage, and the stack is split over the pipeline's axis. So a stage's layers are
run for all stages at once (``vmap``), and handing on is a roll, which is a permute between devices. With several
chunks of layers per rank, each rank has those that the table says, one of which it runs in a tick.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B, Placement
from meshdsl.lowering.walk import Arrays
from meshdsl.trace.graphs import Atom
from meshdsl.turns.accumulate import Sum
from meshdsl.turns.dealing import Dealing
from meshdsl.turns.layers import Layers
from meshdsl.turns.places import held
from meshdsl.turns.ranks import Ranks, pick
from meshdsl.turns.rota import Rota, Units
from meshdsl.turns.runner import AXIS, Runner
from meshdsl.turns.stages import Stages
from meshdsl.turns.work import Turn, Work


class Lanes(Ranks):
    """The stages of a pipeline side by side.

    Stacks have a dim of ranks in front, rooms one of slots after it; those that layers have or make have one of chunks
    in front of that of ranks.
    """

    def __init__(self, stages: Stages, rota: Rota, whole: Runner) -> None:
        super().__init__(stages.axis, rota.ranks)
        self.stages, self.rota, self.whole = stages, rota, whole
        self.placing, self.v = stages.placing, rota.table.chunks
        self.dealing = Dealing(stages.layers, tuple(zip(*rota.table.placement, strict=True)))
        self.used = None if self.dealing.even else self.split(jnp.asarray(self.dealing.used), 1)
        self.work = Work(stages, whole, self.dealing.most)
        given = {x.id: x for layers in stages.scans for x, _ in layers.stacks if self.placing.of(x) is B}
        self.stacks = {i: self.dealt(whole.get(x, B)) for i, x in given.items()}

    def dealt(self, x: jax.Array) -> jax.Array:
        """A stack of layers by chunk and rank."""
        return self.split(self.dealing.dealt(x), 1)

    def nothing(self, layers: Layers) -> Arrays:
        """What stages hand on before anything is."""
        return tuple(self._unused(x, self.p, at=at) for x, at in self.stages.brought(layers))

    def room(self, layers: Layers, slots: int) -> Arrays:
        """Room for what stages are handed."""
        return tuple(self._unused(x, self.p, slots, at=at) for x, at in self.stages.brought(layers))

    def room_for_results(self) -> Arrays:
        """Room for what backwards read of their forwards, if those are not run again."""
        slots = self.rota.rooms.results.count
        if not slots:
            return ()
        each = (self._unused(v, self.p, slots, self.dealing.most) for v in self.work.results.values())
        return (*each, *self.room(self.stages.forward, slots))

    def room_for_cuts(self) -> Arrays:
        """Room for what the second half of a backward reads of the first."""
        slots = self.rota.rooms.cuts.count
        if not slots:
            return ()
        each, once = self.work.cut
        stacks = (self._unused(v, self.p, slots, self.dealing.most) for v in each)
        return (*stacks, *(self._unused(x, self.p, slots) for x in once))

    def _unused(self, x: Atom, *front: int, at: Placement | None = None) -> jax.Array:
        place = held(self.placing.of(x)) if at is None else at
        shape = Layout(**{AXIS: place}).local_shape(x.shape, {AXIS: self.placing.turns})
        return self.split(unused((*front, *shape), x.dtype))

    def begun(self, given: Arrays, start: Arrays, begins: jax.Array) -> Arrays:
        """What the ranks are given, those that begin a microbatch what it starts from."""
        pairs = zip(given, start, strict=True)
        return tuple(self.split(jnp.where(_column(begins, x.ndim), y[None], x)) for x, y in pairs)

    def of(self, x: jax.Array, rank: int) -> jax.Array:
        """What one rank has, as a sum in which the others are nothing."""
        mine = _column(lax.iota(jnp.int32, self.p) == rank, x.ndim)
        return jnp.any(x & mine, 0) if x.dtype == jnp.bool_ else jnp.where(mine, x, 0).sum(0, dtype=x.dtype)

    def run(self, units: Units, given: Arrays) -> tuple[Arrays, Arrays]:
        """All stages forward: what they hand on, and the stacks that their layers make."""
        own = self._own(self.stages.forward, units)
        made, rows = jax.vmap(self.work.forward)(self._turn(units), given, own)
        return tuple(map(self.split, made)), rows

    def run_back(self, units: Units, back: Arrays, given: Arrays, rows: Arrays) -> tuple[Arrays, Arrays]:
        """All stages backward: likewise; ``given`` and ``rows`` are what they were given forward, and made."""
        own = self._own(self.stages.backward, units)
        made, rows = jax.vmap(self.work.backward)(self._turn(units), back, given, rows, own)
        return tuple(map(self.split, made)), rows

    def kept(self, made: Arrays, rows: Arrays) -> Arrays:
        """What is kept of what stages made forward."""
        return self.work.kept(made, rows)

    def found(self, units: Units, kept: Arrays) -> tuple[Arrays, Arrays]:
        """What stages handed on, and the stacks that their layers made, from what was kept."""
        return jax.vmap(self.work.found)(self._turn(units), kept, self._own(self.stages.forward, units))

    def run_first(self, units: Units, back: Arrays, given: Arrays, rows: Arrays) -> tuple[Arrays, Arrays]:
        """All stages through the first half of their backward: what they hand on, and what the second half reads."""
        own = self._own(self.stages.backward, units)
        made, cut = jax.vmap(self.work.first)(self._turn(units), back, given, rows, own)
        return tuple(map(self.split, made)), cut

    def run_second(self, units: Units, cut: Arrays) -> Arrays:
        """All stages through the second half: the stacks that their layers make."""
        return jax.vmap(self.work.second)(self._turn(units), cut, self._own(self.stages.backward, units))

    def _turn(self, units: Units) -> Turn:
        return Turn(units.microbatch, None if self.used is None else self._chunk(self.used, units))

    def _own(self, layers: Layers, units: Units) -> Arrays:
        """What each stage has of stacks that are the same for all microbatches, for its chunk."""
        return tuple(self._chunk(self.stacks[x.id], units) for x, _ in layers.stacks if x.id in self.stacks)

    def _chunk(self, x: jax.Array, units: Units) -> jax.Array:
        return x[0] if self.v == 1 else self.split(jax.vmap(pick, (1, 0))(x, units.chunk))

    def added(self, s: Sum, so_far: jax.Array, rows: jax.Array, units: Units) -> jax.Array:
        """A sum by chunk and rank, with what the layers of each stage made."""
        chunks = lax.broadcasted_iota(jnp.int32, (self.v, self.p), 0)
        mine = units.valid if self.v == 1 else (chunks == units.chunk) & units.valid
        mine = jnp.broadcast_to(mine, chunks.shape)
        return self.split(s.add(so_far, s.masked(rows[None], mine.reshape(*mine.shape, *[1] * (rows.ndim - 1)))), 1)


def unused(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """What is there before anything is; no result depends on it."""
    return jnp.zeros(shape, dtype)


def _column(x: jax.Array, rank: int) -> jax.Array:
    return x.reshape(-1, *[1] * (rank - 1))
