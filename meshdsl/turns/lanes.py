"""What all stages of a pipeline do at once.

What stages have is stacked, stage by stage, and the stack is split over the pipeline's axis. So a stage's layers are
run for all stages at once (``vmap``), and handing on is a roll by one place, which is a permute between neighbours.
With several chunks, stage r has chunks r, p + r, 2 p + r, ... of the layers, one of which it runs in a tick.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B, Placement, S
from meshdsl.lowering.position import taking_turns
from meshdsl.lowering.walk import Arrays
from meshdsl.pipeline.costs import HANDING, STASH
from meshdsl.pipeline.uniform import Uniform
from meshdsl.stated import state
from meshdsl.trace.rolls import roll_p
from meshdsl.turns.accumulate import Sum
from meshdsl.turns.dealing import Dealing
from meshdsl.turns.places import held
from meshdsl.turns.runner import AXIS, Runner, scanned, within
from meshdsl.turns.stages import Layers, Stages
from meshdsl.turns.ticks import Unit

Known = dict[tuple[int, Placement], jax.Array]


class Lanes:
    """The stages of a pipeline side by side.

    Stacks have a dim of stages in front, those that layers have or make one of chunks in front of that.
    """

    def __init__(self, stages: Stages, uniform: Uniform, whole: Runner) -> None:
        self.stages, self.uniform, self.whole = stages, uniform, whole
        self.placing, self.p, self.v = stages.placing, uniform.ranks, uniform.chunks
        self.ranks = lax.iota(jnp.int32, self.p)
        self.dealing = Dealing(stages.layers, tuple(zip(*[iter(range(self.v * self.p))] * self.p, strict=True)))
        self.used = None if self.dealing.even else self.split(jnp.asarray(self.dealing.used), 1)
        given = {x.id: x for layers in stages.scans for x, _ in layers.stacks if self.placing.of(x) is B}
        self.stacks = {i: self.dealt(whole.get(x, B)) for i, x in given.items()}

    def split(self, x: jax.Array, dim: int = 0) -> jax.Array:
        """A stack of what the stages have, each device holding its own."""
        made: jax.Array = state(x, Layout(**{self.stages.axis: S(dim)}))
        return made

    def dealt(self, x: jax.Array) -> jax.Array:
        """A stack of layers by chunk and stage."""
        return self.split(self.dealing.dealt(x), 1)

    def nothing(self, layers: Layers) -> Arrays:
        """What stages hand on before anything is."""
        sizes = {AXIS: self.placing.turns}
        brought = ((x, Layout(**{AXIS: at}).local_shape(x.shape, sizes)) for x, at in self.stages.brought(layers))
        return tuple(self.split(unused((self.p, *shape), x.dtype)) for x, shape in brought)

    def stash(self) -> Arrays:
        """Room for what stages are given."""
        slots, kept = self.uniform.slots, self.nothing(self.stages.forward)
        with within(STASH):
            return tuple(self.split(unused((slots, *x.shape), x.dtype), 1) for x in kept)

    def kept(self, stash: Arrays, given: Arrays, tick: jax.Array) -> Arrays:
        """The stash, if there is one, with what the stages are given in a tick."""
        slot, pairs = lax.rem(tick, jnp.int32(self.uniform.slots)), zip(stash, given, strict=False)
        return tuple(self.split(lax.dynamic_update_index_in_dim(kept, x, slot, 0), 1) for kept, x in pairs)

    def found(self, stash: Arrays, tick: jax.Array) -> Arrays:
        """What each stage was given in a tick of its own."""
        slot = lax.rem(tick, jnp.int32(self.uniform.slots))
        return tuple(self.split(jax.vmap(_pick, (1, 0))(kept, slot)) for kept in stash)

    def handed(self, before: Arrays, start: Arrays | None, first: int, mine: jax.Array) -> Arrays:
        """What every stage takes from its neighbour; the ``first`` one takes ``start`` where it is ``mine``."""
        shift = 1 if first == 0 else self.p - 1
        with within(HANDING):
            moved = tuple(self.split(roll_p.bind(self.split(x), axis=0, shift=shift)) for x in before)
        if start is None:
            return moved
        begins, pairs = (self.ranks == first) & mine, zip(moved, start, strict=True)
        return tuple(self.split(jnp.where(_column(begins, x.ndim), y[None], x)) for x, y in pairs)

    def of(self, x: jax.Array, stage: int) -> jax.Array:
        """What one stage has, as a sum in which the others are nothing."""
        mine = _column(self.ranks == stage, x.ndim)
        return jnp.any(x & mine, 0) if x.dtype == jnp.bool_ else jnp.where(mine, x, 0).sum(0, dtype=x.dtype)

    def run(self, unit: Unit, given: Arrays) -> tuple[Arrays, Arrays]:
        """All stages forward: what they hand on, and the stacks that their layers make."""
        own = self._own(self.stages.forward, unit)
        made, rows = jax.vmap(self._forward)(unit.microbatch, self._used(unit), given, own)
        return tuple(map(self.split, made)), rows

    def run_back(self, unit: Unit, back: Arrays, given: Arrays, rows: Arrays) -> tuple[Arrays, Arrays]:
        """All stages backward: likewise; ``given`` and ``rows`` are what they were given forward, and made."""
        own = self._own(self.stages.backward, unit)
        made, rows = jax.vmap(self._backward)(unit.microbatch, self._used(unit), back, given, rows, own)
        return tuple(map(self.split, made)), rows

    def _forward(self, turn: jax.Array, used: jax.Array | None, given: Arrays, stacks: Arrays) -> tuple[Arrays, Arrays]:
        layers = self.stages.forward
        return self._stage(layers, turn, used, given, stacks, self._consts(layers, given))

    def _backward(
        self, turn: jax.Array, used: jax.Array | None, back: Arrays, given: Arrays, rows: Arrays, stacks: Arrays
    ) -> tuple[Arrays, Arrays]:
        first, layers = self.stages.forward, self.stages.backward
        made, own = dict(zip((v.id for v in first.made), rows, strict=True)), iter(stacks)
        found = tuple(made[x.id] if x.id in made else next(own) for x, _ in layers.stacks)
        return self._stage(layers, turn, used, back, found, self._consts(first, given) | self._consts(layers, back))

    def _stage(
        self, layers: Layers, turn: jax.Array, used: jax.Array | None, given: Arrays, stacks: Arrays, known: Known
    ) -> tuple[Arrays, Arrays]:
        runner, carries = Runner(self.placing, self.whole.arrays | known), len(layers.last)
        with taking_turns(AXIS, turn):
            closed = tuple(runner.natural(x) for x, _ in layers.consts)
            found = scanned(runner, layers.op, closed, given[:carries], stacks, self.dealing.most, used)
        return (*found[:carries], *given[carries:]), found[carries:]

    def _consts(self, layers: Layers, given: Arrays) -> Known:
        """The consts among what a microbatch brings along."""
        consts = self.stages.consts(layers)
        return {(x.id, held(self.placing.of(x))): y for x, y in zip(consts, given[len(layers.last) :], strict=True)}

    def _own(self, layers: Layers, unit: Unit) -> Arrays:
        """What each stage has of the stacks that are the same for all microbatches, for its chunk."""
        return tuple(self._chunk(self.stacks[x.id], unit) for x, _ in layers.stacks if x.id in self.stacks)

    def _used(self, unit: Unit) -> jax.Array | None:
        """Which places for layers each stage uses, if not all do all."""
        return None if self.used is None else self._chunk(self.used, unit)

    def _chunk(self, x: jax.Array, unit: Unit) -> jax.Array:
        return x[0] if self.v == 1 else self.split(jax.vmap(_pick, (1, 0))(x, unit.chunk))

    def added(self, s: Sum, so_far: jax.Array, rows: jax.Array, unit: Unit) -> jax.Array:
        """A sum by chunk and stage, with what the layers of each stage made."""
        chunks = lax.broadcasted_iota(jnp.int32, (self.v, self.p), 0)
        mine = unit.valid if self.v == 1 else (chunks == unit.chunk) & unit.valid
        mine = jnp.broadcast_to(mine, chunks.shape)
        return self.split(s.add(so_far, s.masked(rows[None], mine.reshape(*mine.shape, *[1] * (rows.ndim - 1)))), 1)


def unused(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """What is there before anything is; no result depends on it."""
    return jnp.zeros(shape, dtype)


def _pick(x: jax.Array, at: jax.Array) -> jax.Array:
    found: jax.Array = lax.dynamic_index_in_dim(x, at, 0, keepdims=False)
    return found


def _column(x: jax.Array, rank: int) -> jax.Array:
    return x.reshape(-1, *[1] * (rank - 1))
