"""A scan over layers, run over some of them, or for some of what each does."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir import Op, Value
from meshdsl.layouts.placement import Placement
from meshdsl.lowering.walk import Arrays
from meshdsl.trace.graphs import Atom, values
from meshdsl.turns.layers import Layers
from meshdsl.turns.places import held
from meshdsl.turns.runner import Runner, scan_options

Stacks = dict[Value, jax.Array]
Wanted = Sequence[tuple[Atom, Placement]]


def run_layers(
    runner: Runner,
    layers: Layers,
    ops: Sequence[Op],
    start: Arrays,
    stacks: Stacks,
    wanted: Wanted,
    length: int,
    used: jax.Array | None,
) -> tuple[Arrays, Arrays]:
    """What is carried in the end, and stacks of what is wanted.

    Args:
      runner: knows the consts.
      ops: what is done of each layer.
      start: of the carries; none if nothing is carried.
      stacks: by what a layer has of them.
      used: per layer, whether there is one; where there is none, carries stay as they are. Default is all.
    """
    places = runner.placing
    read = {v.id for v in values((*(x for op in ops for x in op.inputs), *(x for x, _ in wanted)))}
    known = {(v.id, held(places.of(v))): runner.natural(x) for x, v in layers.consts if v.id in read}
    carried = [v for _, v in layers.carries][: len(start)]
    given = (*carried, *stacks)
    ends = [(x, held(places.of(v))) for x, v in zip(layers.body.returned, carried, strict=False)]

    def step(carry: Arrays, each: tuple[Arrays, jax.Array | None]) -> tuple[Arrays, Arrays]:
        slices, counts = each
        inner = Runner(places, dict(known))
        inner.add(layers.body)
        inner.define(given, (*carry, *slices), [held(places.of(v)) for v in given])
        inner.run(ops)
        found = tuple(inner.get(x, p) for x, p in (*ends, *wanted))
        return _counted(counts, found, carry), found[len(ends) :]

    slices = tuple(stacks.values()), used
    found: tuple[Arrays, Arrays] = lax.scan(step, start, slices, length=length, **scan_options(layers.op))
    return found


def _counted(counts: jax.Array | None, found: Arrays, before: Arrays) -> Arrays:
    """Carries after a layer, which are those before it if there is none."""
    pairs = zip(found, before, strict=False)
    return tuple(x if counts is None else jnp.where(counts, x, y) for x, y in pairs)


def kept_stacks(layers: Layers, known: Mapping[int, jax.Array]) -> Stacks:
    """Stacks by what a layer has of them, from those by what they are outside."""
    return {v: known[x.id] for x, v in layers.stacks if x.id in known}
