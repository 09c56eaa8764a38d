"""Which ticks of a pipeline do what, as loops; and which unit of work a stage has in a tick (see ``Uniform``)."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.pipeline.uniform import Uniform


@dataclass(frozen=True)
class Ticks:
    """Some ticks, from ``start`` on, in which the same is done.

    Args:
      head: the last stage is through with a microbatch, so the epilogue runs.
    """

    start: int
    count: int
    forward: bool
    head: bool
    backward: bool


@dataclass(frozen=True)
class Loop:
    """Ticks that come several times; ``every`` is from one time to the next."""

    times: int
    every: int
    parts: tuple[Ticks, ...]


def loops(uniform: Uniform) -> list[Loop]:
    """The ticks of a step, as few loops as possible.

    With several chunks the last stage begins p microbatches in a row, every p times the chunks ticks.
    """
    if uniform.chunks == 1:
        done = uniform.ahead + uniform.microbatches
        ends = sorted({0, uniform.span, uniform.ahead, done, uniform.ticks})
        return [Loop(1, 0, (_ticks(uniform, a, b, a < done),)) for a, b in pairwise(ends)]
    ahead, p, last = uniform.ahead, uniform.ranks, uniform.span
    every = p * uniform.chunks
    pair = _ticks(uniform, ahead, ahead + p, True), _ticks(uniform, ahead + p, ahead + every, False)
    found = [
        Loop(1, 0, (_ticks(uniform, 0, ahead, False),)),
        Loop(uniform.microbatches // p - 1, every, pair),
        Loop(1, 0, (_ticks(uniform, last - p, last, True),)),
        Loop(1, 0, (_ticks(uniform, last, uniform.ticks, False),)),
    ]
    return [loop for loop in found if loop.times and any(part.count for part in loop.parts)]


def _ticks(uniform: Uniform, start: int, stop: int, head: bool) -> Ticks:
    through = start >= uniform.ahead
    return Ticks(start, stop - start, start < uniform.span, head and through, through and not uniform.forward_only)


class Unit(NamedTuple):
    """What a stage works on: a chunk of its layers, a microbatch; ``valid`` if there is anything."""

    chunk: jax.Array
    microbatch: jax.Array
    valid: jax.Array
    tick: jax.Array


def unit(uniform: Uniform, number: jax.Array, rank: jax.Array | int, back: bool) -> Unit:
    """The forward or backward unit of this number of a rank; ``tick`` is that of its forward."""
    p, v, count = uniform.ranks, uniform.chunks, uniform.microbatches * uniform.chunks
    at, valid = jnp.clip(number, 0, count - 1), (number >= 0) & (number < count)
    if v == 1:
        return Unit(jnp.zeros_like(at), at, valid, at + rank)
    group, place = lax.div(at, jnp.int32(p * v)), lax.rem(at, jnp.int32(p))
    chunk = lax.rem(lax.div(at, jnp.int32(p)), jnp.int32(v))
    chunk = v - 1 - chunk if back else chunk
    return Unit(chunk, group * p + place, valid, group * (p * v) + chunk * p + place + rank)
