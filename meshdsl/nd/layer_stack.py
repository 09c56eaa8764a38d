"""``stack``: a block repeated over a dim of layers, as one ``lax.scan``; for flax NNX modules.

    self.blocks = md.stack(lambda rngs: Block(sizes, rngs), "layers=12", rngs, remat="dots")
    x = self.blocks(x)                                   # 12 blocks, each applied to the result of the one before

The parameters of all layers are stored in one tensor each, with the dim of layers in front: a rule ``layers:pipe`` or a
glob addresses them like any other dim, and the traced program is as long as one block. This is ``nn.scan`` of flax
Linen and the stacked layers of praxis and T5X. It is the only module of the package that needs flax.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from meshdsl.nd.control_flow import check_policy, remat, scan
from meshdsl.nd.diagnostics import fail
from meshdsl.nd.named_array import METADATA, NamedArray, given, names_of
from meshdsl.nd.named_dims import DimsLike, read_dims

T = TypeVar("T")


def stack(
    make: Callable[[nnx.Rngs], nnx.Module],
    over: DimsLike,
    rngs: nnx.Rngs,
    remat: str = "none",
    keep: DimsLike = (),
    unroll: int = 1,
) -> "Stack":
    """Return a module that applies blocks of equal structure one after the other, as one ``lax.scan``.

    Args:
      make: makes one block from random streams; blocks differ in their parameters only.
      over: the dim of layers with its size, ``"layers=12"``.
      rngs: random streams; every block has its own ``params`` key.
      remat: policy of rematerialisation, see ``md.remat``.
      keep: names of values that are stored as well.
      unroll: blocks per iteration of the loop.

    Returns:
      A flax module; each of its parameters has the dim of layers in front.

    Raises:
      DimError: ``over`` is not one dim with a size, or a block has that dim.
      ArgumentError: the policy is unknown.

    Example:
      >>> self.blocks = md.stack(lambda rngs: Block(sizes, rngs), "layers=12", rngs, remat="dots")
      >>> x = self.blocks(x)
    """
    dims = read_dims(over)
    if len(dims) != 1:
        raise fail(f"stack takes one dim, not {len(dims)}: [{dims}]")
    check_policy(remat)
    if not isinstance(rngs, nnx.Rngs):
        raise fail(f"{given(rngs)}, not random streams; make them with nnx.Rngs(0)")
    return Stack(make, dims, rngs, remat, keep, unroll)


class Stack(nnx.Module):
    """A block whose variables have a leading dim of layers, as :func:`stack` returns it."""

    def __init__(
        self,
        make: Callable[[nnx.Rngs], nnx.Module],
        dims: DimsLike,
        rngs: nnx.Rngs,
        remat: str,
        keep: DimsLike,
        unroll: int,
    ) -> None:
        ((self.over, count),) = zip(read_dims(dims).names, read_dims(dims).sizes, strict=True)
        self.remat, self.keep, self.unroll = remat, tuple(read_dims(keep)), unroll
        keys = jax.random.split(rngs.params(), count)
        block = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        if not isinstance(block, nnx.Module):
            raise fail(f"{given(block)}, not a flax module; make must return the block that stack repeats")
        graph = nnx.graphdef(block)
        states = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(key))))(keys)
        self.block = nnx.merge(graph, _with_layer_dim(states, self.over))

    def __call__(self, x: T, *args: Any, **kwargs: Any) -> T:
        """Return ``x`` after all blocks; each is called as ``block(x, *args, **kwargs)`` and returns the next ``x``."""
        graph, *states = nnx.split(self.block, nnx.Param, ...)

        def layer(x: Any, state: Any) -> tuple[Any, Any]:
            block = nnx.merge(graph, *state)
            made = block(x, *args, **kwargs)
            _, _, *rest = nnx.split(block, nnx.Param, ...)
            return made, rest

        body = remat(layer, self.remat, self.keep)
        x, after = scan(body, x, states, over=self.over, unroll=self.unroll)
        if jax.tree.leaves(after):
            nnx.update(self.block, *map(_as_before, states[1:], after))
        return x


def _as_before(before: Any, after: Any) -> Any:
    """Return the state after a scan with names only where it had them: a scan names stacked scalars."""

    def one(old: Any, new: Any) -> Any:
        return new.held if isinstance(new, NamedArray) and not isinstance(old, NamedArray) else new

    return jax.tree.map(one, before, after, is_leaf=lambda x: isinstance(x, NamedArray))


def _with_layer_dim(states: Any, over: str) -> Any:
    """Return stacked variables with a name for the dim in front, in named tensors and in flax's metadata."""

    def one(variable: Any) -> Any:
        value, names = variable.get_value(), names_of(variable)
        if names and over in names:
            raise fail(f"stack adds dim {over!r}, but a variable has it: [{' '.join(names)}]; stack over another name")
        if isinstance(value, NamedArray):
            return variable.replace(NamedArray(value.held, (over, *value.dims)))
        if names is None:
            return variable
        key = next(key for key in METADATA if variable.get_metadata().get(key) is not None)
        return variable.replace(value, **{key: (over, *variable.get_metadata()[key])})

    return jax.tree.map(one, states, is_leaf=lambda x: isinstance(x, nnx.Variable))
