"""What all ranks of a pipeline have, side by side: stacks with a dim of ranks, which lie split over the axis."""

import jax
from jax import lax

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import S
from meshdsl.lowering.walk import Arrays
from meshdsl.pipeline.costs import HANDING
from meshdsl.stated import state
from meshdsl.trace.rolls import roll_p
from meshdsl.turns.runner import within


class Ranks:
    """The ``p`` ranks of an axis. Stacks have a dim of ranks in front, rooms one of slots after it."""

    def __init__(self, axis: str, p: int) -> None:
        self.axis, self.p = axis, p

    def split(self, x: jax.Array, dim: int = 0) -> jax.Array:
        """A stack of what the ranks have, each device holding its own."""
        made: jax.Array = state(x, Layout(**{self.axis: S(dim)}))
        return made

    def put(self, room: Arrays, found: Arrays, slot: jax.Array) -> Arrays:
        """The room with what each rank has in its slot; nowhere if that is past the last."""
        return tuple(self.split(jax.vmap(_put)(kept, x, slot)) for kept, x in zip(room, found, strict=True))

    def get(self, room: Arrays, slot: jax.Array) -> Arrays:
        """What each rank has in its slot."""
        return tuple(self.split(jax.vmap(pick)(kept, slot)) for kept in room)

    def handed(self, made: Arrays, shift: int) -> Arrays:
        """What ranks hand to those some places further on."""
        if shift % self.p == 0:
            return made
        with within(HANDING):
            return tuple(self.split(roll_p.bind(self.split(x), axis=0, shift=shift % self.p)) for x in made)


def pick(x: jax.Array, at: jax.Array) -> jax.Array:
    """One of the first dim."""
    found: jax.Array = lax.dynamic_index_in_dim(x, at, 0, keepdims=False)
    return found


def _put(kept: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
    return kept.at[at].set(x, mode="drop", wrap_negative_indices=False)
