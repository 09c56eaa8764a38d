"""Layers dealt out to stages: which device has which, and back.

Stacks of layers lie in the order of the model. A pipeline has them by chunk, rank and place within the stage, and where
stages have unequal numbers of layers, the places of the shorter ones are filled up: with a layer of theirs, so that
what is computed there is a number, which is then masked.
"""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from numpy.typing import NDArray


@dataclass(frozen=True)
class Dealing:
    """Layers by stage.

    Args:
      layers: per stage, how many.
      order: by chunk and rank, the stage.
    """

    layers: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]

    @property
    def even(self) -> bool:
        """Whether all stages have as many."""
        return len(set(self.layers)) == 1

    @property
    def most(self) -> int:
        """Layers of the largest stage: places that every stage has."""
        return max(self.layers)

    @cached_property
    def places(self) -> NDArray[np.int32]:
        """By chunk, rank and place, the layer."""
        begin = np.cumsum([0, *self.layers[:-1]])
        at = np.minimum(np.arange(self.most), np.array(self.layers)[:, None] - 1) + begin[:, None]
        return np.asarray(at[np.array(self.order)], np.int32)

    @cached_property
    def used(self) -> NDArray[np.bool_]:
        """By chunk, rank and place, whether there is a layer."""
        return np.asarray((np.arange(self.most) < np.array(self.layers)[:, None])[np.array(self.order)])

    def dealt(self, x: jax.Array) -> jax.Array:
        """A stack of layers by chunk, rank and place."""
        ranked = self.places.swapaxes(0, 1)
        return jnp.swapaxes(_dealt(x, ranked).reshape(*ranked.shape, *x.shape[1:]), 0, 1)

    def gathered(self, x: jax.Array) -> jax.Array:
        """The stack of layers again, in the order of the model."""
        ranked, used = self.places.swapaxes(0, 1), self.used.swapaxes(0, 1)
        order = np.flatnonzero(used)[np.argsort(ranked[used])]
        return _dealt(jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[3:]), order)


def _dealt(x: jax.Array, which: NDArray[np.integer]) -> jax.Array:
    """Layers of a stack, by their numbers."""
    places = tuple(which.ravel().tolist())
    if places == tuple(range(x.shape[0])):
        return x
    dealt: jax.Array = deal_p.bind(x, which=places)
    return dealt


def _picked(x: jax.Array, *, which: tuple[int, ...]) -> jax.Array:
    return x.at[jnp.asarray(which)].get(mode="promise_in_bounds")


def _shaped(x: ShapedArray, *, which: tuple[int, ...]) -> ShapedArray:
    shaped: ShapedArray = x.update(shape=(len(which), *x.shape[1:]))
    return shaped


deal_p = Primitive("deal")  # element i of dim 0 is which[i] of the operand
deal_p.def_impl(_picked)
deal_p.def_abstract_eval(_shaped)
mlir.register_lowering(deal_p, mlir.lower_fun(_picked, multiple_results=False))
