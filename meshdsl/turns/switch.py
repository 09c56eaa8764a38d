"""One operation for all ranks: each does the work of its own stage, by a switch on the device.

Weights that one stage alone reads are packed by stage, so that a device holds its own; others are whole everywhere.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from meshdsl.custom.primitive import Ruled, Spent, ruled_p
from meshdsl.custom.stated_rule import StatedRule
from meshdsl.layouts.placement import B
from meshdsl.layouts.rule import Dims
from meshdsl.lowering.walk import Arrays
from meshdsl.turns.branches import Branch, Branches, Given, Known, Made, Side
from meshdsl.turns.packing import Packing, Rows, in_rows, out_of_rows, row_length
from meshdsl.turns.ranks import Ranks, pick
from meshdsl.turns.rota import Units
from meshdsl.turns.runner import Runner

_RANKS, _EXAMPLES = ("ranks",), ("examples",)
Sided = Sequence[Sequence[Branch]]


class Weights:
    """What stages read that does not depend on the batch.

    Args:
      order: by chunk and rank, the stage.
      sides: per side and stage, its work.
    """

    def __init__(self, ranks: Ranks, order: NDArray[np.int32], sides: Sided, whole: Runner) -> None:
        self.ranks, self.order, self.arrays = ranks, order, {i: x for (i, _), x in whole.arrays.items()}
        self.own = self._alone([set().union(*(way.reads for way in each)) for each in zip(*sides, strict=True)])
        read = [set[int]().union(*(branch.reads for branch in side)) for side in sides]
        self.common = [sorted(ids.difference(*self.own)) for ids in read]
        self.packing = Packing([[self._row(self.arrays[i]) for i in each] for each in self.own])
        self.packed = self._pack()

    def _alone(self, reads: Sequence[set[int]]) -> list[list[int]]:
        """Per stage, what it alone reads and is more than a number."""
        packed = {i for i, x in self.arrays.items() if x.size > 1 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)}
        return [sorted(i for i in each & packed if sum(i in other for other in reads) == 1) for each in reads]

    def _row(self, x: jax.Array) -> Rows:
        return Rows(row_length(x.shape, self.ranks.p), x.dtype)

    def _pack(self) -> Arrays:
        """By chunk and rank, what each stage alone reads."""
        rows = [[in_rows(self.arrays[i], self.ranks.p) for i in each] for each in self.own]
        buffers = [self.packing.pack(stage, each, self.ranks.p) for stage, each in enumerate(rows)]
        stacks = [jnp.stack([each[s] for s in self.order.ravel()]) for each in zip(*buffers, strict=True)]
        return tuple(self.ranks.split(x.reshape(*self.order.shape, *x.shape[1:]), 1) for x in stacks)

    def shared(self, way: int) -> Arrays:
        """What several stages read, or is small: on the way forward (0), or back (1)."""
        return tuple(self.arrays[i] for i in self.common[way])

    def of(self, stage: int, way: int, packed: Arrays, shared: Arrays) -> Known:
        """What a stage reads, from what its rank has packed."""
        chunk = int(np.argwhere(self.order == stage)[0, 0])
        mine = zip(self.own[stage], self.packing.unpack(stage, [x[chunk] for x in packed]), strict=True)
        found: Known = {(i, B): out_of_rows(x, self.arrays[i].shape) for i, x in mine}
        return found | {(i, B): x for i, x in zip(self.common[way], shared, strict=True)}


class Switch:
    """The work of all ranks on one way.

    Args:
      order: by chunk and rank, the stage.
      examples: whether a microbatch may be split over other axes.
    """

    def __init__(
        self,
        branches: Branches,
        side: Side,
        weights: Weights,
        order: NDArray[np.int32],
        blocks: Arrays,
        examples: bool,
    ) -> None:
        self.branches, self.side, self.weights, self.order, self.blocks = branches, side, weights, order, blocks
        self.shared = weights.shared(int(side.back))
        self.rule = self._rule(_EXAMPLES if examples else ())
        self.ruled = Ruled("stages back" if side.back else "stages", self._local, self.rule)

    def _rule(self, examples: tuple[str, ...]) -> StatedRule:
        """Ranks side by side; of what has no examples, each device has a share if they are split."""
        handed: Dims = (_RANKS, examples, ())
        inputs: list[Dims] = [(_RANKS,), (_RANKS,), (examples,)]
        inputs += [((), examples, *[()] * (x.ndim - 2)) for x in self.blocks]
        inputs += [((),) * x.ndim for x in self.shared]
        inputs += [((), _RANKS, (), ()) for _ in self.weights.packed] + [handed] * self._given
        side = self.side
        outputs: list[Dims] = [handed] * len(side.handing.columns) + [(_RANKS, (), ())] * len(side.adding.columns)
        outputs += [handed] * len(side.stacking.columns)
        return StatedRule(tuple(inputs), tuple(outputs), reduced=tuple((name, "sum") for name in examples))

    @property
    def _given(self) -> int:
        """How many buffers come through cuts."""
        came, back = self.branches.forward.handing, self.branches.backward.handing
        return len(came.columns) + (len(back.columns) if self.side.back else 0)

    def __call__(self, units: Units, came: Arrays, back: Arrays, spent: Spent) -> Made:
        """What all ranks make, those that have no microbatch nothing; it takes what all ranks together do."""
        order = jnp.asarray(self.order)
        stage = order[0] if len(order) == 1 else jax.vmap(pick, (1, 0))(order, units.chunk)
        stage = jnp.where(units.valid, stage, self.order.size)
        at = lax.iota(jnp.int32, self.branches.size)
        arrays = (stage, units.microbatch, at, *self.blocks, *self.shared, *self.weights.packed, *came, *back)
        found = iter(ruled_p.bind(*arrays, ruled=replace(self.ruled, spent=spent)))
        side = self.side
        return Made(*(tuple(next(found) for _ in p.columns) for p in (side.handing, side.adding, side.stacking)))

    def _local(self, stage: jax.Array, microbatch: jax.Array, at: jax.Array, *rest: jax.Array) -> list[jax.Array]:
        """The work of the ranks that a device holds."""
        made = [self._rank(i, stage, microbatch, at, rest) for i in range(stage.shape[0])]
        return [jnp.stack(each) for each in zip(*made, strict=True)]

    def _rank(
        self, i: int, stage: jax.Array, microbatch: jax.Array, at: jax.Array, rest: Sequence[jax.Array]
    ) -> list[jax.Array]:
        all_there = stage.shape[0] == self.order.shape[1]
        mine = (self.order[:, i] if all_there else self.order.ravel()).tolist()
        which = jnp.argmax(jnp.append(stage[i] == jnp.asarray(mine), True))
        branches = [partial(self._branch, s) for s in mine]
        blocks, shared, packed, handed = self._dealt(rest)
        packed, handed = [x[:, i] for x in packed], [x[i] for x in handed]
        found: list[jax.Array] = lax.switch(
            which, [*branches, self._idle], microbatch[i], at, blocks, shared, packed, handed
        )
        return found

    def _dealt(self, rest: Sequence[jax.Array]) -> list[list[jax.Array]]:
        found, counts = list(rest), (len(self.blocks), len(self.shared), len(self.weights.packed))
        parts = []
        for n in counts:
            parts.append(found[:n])
            found = found[n:]
        return [*parts, found]

    def _branch(self, stage: int, microbatch: jax.Array, at: jax.Array, *rest: Any) -> list[jax.Array]:
        blocks, shared, packed, handed = map(tuple, rest)
        n = len(self.branches.forward.handing.columns)
        whole = self.weights.of(stage, int(self.side.back), packed, shared)
        given = Given(microbatch, at, blocks, whole, handed[:n], handed[n:])
        return jax.tree.leaves(self.branches.run(self.side, stage, given))

    def _idle(self, microbatch: jax.Array, at: jax.Array, *rest: Any) -> list[jax.Array]:
        return jax.tree.leaves(self.side.idle(at.shape[0]))
