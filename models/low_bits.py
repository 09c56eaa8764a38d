"""Communication in fewer bits: values are rounded in blocks before they are sent, and rounding errors are fed back.

A block of ``block`` elements along the last dim is sent as small numbers and one float32 scale, so a float32 in int8
takes 1 + 4 / block bytes instead of 4. Sums are taken in float32: shards are exchanged as small numbers, and each
device adds up its own (Dettmers, "8-Bit Approximations for Parallelism", 2016). Bits are lost when a number is sent,
never when it is added.

    sent          one value on its way from layout to layout, as in the quantized gathers of weights of ZeRO++
                  (Wang et al. 2023, section 4.1); gradients pass as they are
    compressed    an optimizer that takes the gradients of each replica and averages them in few bits; its state is
                  split as in ZeRO-1, and what it changes is sent back in few bits (as the weight differences of
                  SDP4Bit, Jia et al. 2024). What rounding loses is added to what is sent next, both ways (Tang et al.,
                  "1-bit Adam", 2021)

    gradients [replicas ...] + lost -> small numbers -> all-to-all -> mean, float32 -> optimizer
    -> update + lost -> small numbers -> all-gather
"""

from collections.abc import Callable
from functools import partial
from math import prod
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshdsl as md
from meshdsl.errors import ArgumentError, nearest

FORMATS = {"bfloat16": 0.0, "float8_e4m3fn": 448.0, "int8": 127.0}  # with the largest number of a block; 0: no scale
_TINY = 2.0**-126  # the smallest normal float32


class Lost(NamedTuple):
    """What rounding lost of what was sent for one parameter, to be added to what is sent next.

    Both are ``()`` for a parameter that is sent in full.

    Attributes:
      gradient: of the gradient of each replica, ``[replicas ...]``.
      update: of the update.
    """

    gradient: Any
    update: Any


IN_FULL = Lost((), ())


class CompressedState(NamedTuple):
    """State of ``compressed``.

    Attributes:
      lost: ``Lost`` per parameter.
      inner: state of the optimizer.
    """

    lost: Any
    inner: Any


def sent(x: jax.Array, layout: str, to: str = "int8", block: int = 128, held: str = "") -> jax.Array:
    """Returns ``x`` rounded, in a layout to which small numbers travel; its gradient is that of ``x``, not rounded.

    Args:
      x: floats ``[... n]``.
      layout: as ``md.constrain`` takes it, such as ``"data=B"`` for a gathered weight.
      to: a name in ``FORMATS``.
      block: elements along the last dim that share a scale; a shorter last dim is one block. Devices that split the
        last dim should divide the blocks: others have to be sent what they lack of one.
      held: the layout in which it is rounded, such as ``"data=S(0)"``, that of the weight. By default the planner may
        also send ``x`` in full and round it then, where it finds that quicker: small arrays, mostly.

    Raises:
      ArgumentError: ``x`` has no dims, no floats or no elements; ``to`` or ``block`` are not as above.

    Example:
      >>> weights = jnp.linspace(-1, 1, 512).reshape(2, 256)
      >>> bool(jnp.abs(sent(weights, "data=B") - weights).max() < 0.5 / 127)
      True
    """
    x = jnp.asarray(x)
    _check(x, to, block)
    return _sent((held, layout), to, block, x)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _sent(ways: tuple[str, str], to: str, block: int, x: jax.Array) -> jax.Array:
    numbers = _rounded(x, to, block)
    for layout in ways:
        numbers = _laid(numbers, layout)
    return _exact(numbers, x)


_sent.defvjp(lambda ways, to, block, x: (_sent(ways, to, block, x), None), lambda *args: (args[-1],))


def rounding_error(x: jax.Array, to: str = "int8", block: int = 128) -> jax.Array:
    """Returns the root mean square of what rounding loses, relative to that of ``x``: a scalar.

    Of normally distributed numbers it is some 0.17% in bfloat16, 2.6% in float8_e4m3fn, and 0.64% in int8 with blocks
    of 128. ``coarsest`` chooses a format by it.

    Args:
      x: floats ``[... n]``, such as a gradient of the model at hand.
      to: as ``sent`` takes it.
      block: as ``sent`` takes it.

    Raises:
      ArgumentError: as ``sent``.

    Example:
      >>> float(rounding_error(jnp.ones((2, 256)), "bfloat16"))
      0.0
    """
    x = jnp.asarray(x)
    _check(x, to, block)
    wide = x.astype(jnp.float32)
    unit = jnp.exp2(-jnp.floor(jnp.log2(jnp.maximum(jnp.abs(wide).max(), _TINY))))  # so that no square is too large
    lost = unit * (wide - _exact(_rounded(wide, to, block), wide))
    return jnp.sqrt(jnp.sum(lost**2) / jnp.maximum(jnp.sum((unit * wide) ** 2), _TINY))


def coarsest(tree: Any, error: float, block: int = 128) -> str:
    """Returns the format of fewest bytes whose ``rounding_error`` is at most ``error`` for every array of a tree.

    Of formats of as many bytes per element, it is the one that loses least.

    Args:
      tree: arrays of values, such as gradients of the model at hand; integers and scalars are left out.
      error: the budget, a share of the root mean square.
      block: as ``sent`` takes it.

    Raises:
      ArgumentError: no format meets the budget, which lists what each loses; there are no arrays of floats, or shapes
        instead of values; ``block`` is not as above.

    Example:
      >>> coarsest({"w": jax.random.normal(jax.random.key(0), (64, 256))}, error=0.01)
      'int8'
    """
    leaves = jax.tree.leaves(tree)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise ArgumentError("coarsest: what rounding loses depends on values; give arrays, not jax.ShapeDtypeStruct")
    floats = [x for x in map(jnp.asarray, leaves) if x.ndim and x.size and jnp.issubdtype(x.dtype, jnp.floating)]
    if not floats:
        raise ArgumentError("coarsest: the tree has no array of floats; give gradients of the model at hand")
    worst = {to: float(np.max([rounding_error(x, to, block) for x in floats])) for to in FORMATS}  # or NaN
    fitting = [to for to, lost in worst.items() if lost <= error]
    if not fitting:
        losses = ", ".join(f"{to} loses {lost:.2g}" for to, lost in worst.items())
        raise ArgumentError(f"error={error}: no format rounds so little: {losses}; send in full, or allow more")
    return min(fitting, key=lambda to: (jnp.dtype(to).itemsize, worst[to]))


def replica_gradients(loss: Callable[..., Any], replicas: int) -> Callable[..., Any]:
    """Returns ``(params, batch) -> (loss, gradients)``: the mean loss, and the gradients of each replica's rows.

    Args:
      loss: ``(params, batch) -> scalar``, a mean over the batch.
      replicas: into how many parts the first dim of every array of the batch is divided. Give the number of devices
        along the axis that splits it. Gradients are ``[replicas ...]``.

    Raises:
      ArgumentError: an array of the batch does not divide so.

    Example:
      >>> of = replica_gradients(lambda w, x: jnp.mean(x * w), replicas=2)
      >>> of(jnp.ones(()), jnp.arange(4.0))[1].tolist()
      [0.5, 2.5]
    """
    _check_count("replicas", replicas)

    def divided(keys: Any, x: Any) -> Any:
        x = jnp.asarray(x)
        if not x.ndim or x.shape[0] % replicas:
            name = jax.tree_util.keystr(keys, simple=True, separator="/") or "batch"
            raise ArgumentError(
                f"replicas={replicas}: the first dim of {name} {list(x.shape)} does not divide into so many parts; "
                "give the devices along the axis that splits the batch, and rows that are a multiple of them"
            )
        return x.reshape(replicas, x.shape[0] // replicas, *x.shape[1:])

    def of(params: Any, batch: Any) -> Any:
        parts = jax.tree_util.tree_map_with_path(divided, batch)
        losses, gradients = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, parts)
        return losses.mean(), gradients

    return of


def compressed(
    optimizer: optax.GradientTransformation, replicas: int, axis: str, to: str = "int8", block: int = 128
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that takes the gradients of each replica, and sends them, and its updates, in few bits.

    Parameters with no dim, or number of blocks, that ``replicas`` divide are averaged in full: biases, mostly. For
    others, every device sends its gradient to the owners of parts of it, which update these and send the update back.

    The state has two float32 arrays more per parameter: one that is whole on each device, of its own gradient, and one
    that is split over ``axis``. A gradient that is not finite is sent as such, and nothing of it is kept.

    Args:
      optimizer: takes the mean of the gradients.
      replicas: gradients are ``[replicas ...]``, as from ``replica_gradients``.
      axis: the mesh axis that splits replicas; it must be of that size.
      to: as ``sent`` takes it.
      block: as ``sent`` takes it.

    Raises:
      ArgumentError: ``replicas``, ``axis``, ``to`` or ``block`` are not as above; gradients are not ``[replicas ...]``
        or no floats.
      PinError: the mesh has no such axis, or its size does not divide ``replicas`` (when a step is planned).

    Example:
      >>> optimizer = compressed(optax.adam(1e-3), replicas=8, axis="data")
    """
    optimizer = optax.with_extra_args_support(optimizer)
    _check_count("replicas", replicas)
    _check_format(to, block)
    if not isinstance(axis, str) or not axis:
        raise ArgumentError(f"axis={axis!r}: must be the name of the mesh axis that splits replicas, such as 'data'")

    def init(params: Any) -> CompressedState:
        def nothing(x: Any) -> Lost:
            if _owned_dim(x.shape, replicas, block) is None:
                return IN_FULL
            return Lost(jnp.zeros((replicas, *x.shape), jnp.float32), jnp.zeros(x.shape, jnp.float32))

        return CompressedState(jax.tree.map(nothing, params), optimizer.init(params))

    def update(updates: Any, state: CompressedState, params: Any = None, **extra: Any) -> Any:
        tree = jax.tree.structure(updates)
        lost = jax.tree.leaves(state.lost, is_leaf=lambda x: isinstance(x, Lost))
        means, gradients = _pairs(averaged, jax.tree.leaves(updates), lost)
        changed, inner = optimizer.update(jax.tree.unflatten(tree, means), state.inner, params, **extra)
        wholes, left = _pairs(gathered, jax.tree.leaves(changed), lost)
        after = jax.tree.unflatten(tree, list(map(Lost, gradients, left)))
        return jax.tree.unflatten(tree, wholes), CompressedState(after, inner)

    def averaged(x: Any, lost: Lost) -> Any:
        """Returns the mean of a gradient over replicas, split among its owners, and what rounding lost of it."""
        if not x.ndim or x.shape[0] != replicas or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ArgumentError(
                f"compressed: a gradient {x.dtype}{list(x.shape)} is not float[{replicas} ...]; make gradients with "
                f"replica_gradients(loss, {replicas})"
            )
        if isinstance(lost.update, tuple):  # in full
            return md.constrain(x, f"{axis}=S(0)").mean(0), ()
        mine = md.constrain(x.astype(jnp.float32) + lost.gradient, f"{axis}=S(0)")
        numbers = _laid(_rounded(mine, to, block), f"{axis}=S(0)")
        shares = _laid(numbers, f"{axis}=S({1 + owned(x[0])})")
        return _exact(shares, mine).mean(0).astype(x.dtype), _finite(mine - _exact(numbers, mine))

    def gathered(x: Any, lost: Lost) -> Any:
        """Returns an update on every device, and what rounding lost of it."""
        if isinstance(lost.update, tuple):  # in full
            return x, ()
        split = f"{axis}=S({owned(x)})"
        mine = md.constrain(x.astype(jnp.float32) + lost.update, split)
        numbers = _laid(_rounded(mine, to, block), split)
        return _exact(_laid(numbers, f"{axis}=B"), x), _finite(mine - _exact(numbers, mine))

    def owned(x: Any) -> int:
        dim = _owned_dim(x.shape, replicas, block)
        assert dim is not None
        return dim

    return optax.GradientTransformationExtraArgs(init, update)


def _pairs(function: Callable[..., Any], *lists: list[Any]) -> tuple[list[Any], list[Any]]:
    made = [function(*each) for each in zip(*lists, strict=True)]
    return [first for first, _ in made], [second for _, second in made]


def _owned_dim(shape: tuple[int, ...], replicas: int, block: int) -> int | None:
    """Returns the dim of a gradient that is split over its owners, None if there is none.

    It is the first that they divide, of the last the blocks.
    """
    rows = [*shape[:-1], -(-shape[-1] // block)] if prod(shape) and shape else []
    return next((d for d, n in enumerate(rows) if n % replicas == 0), None)


def _finite(x: jax.Array) -> jax.Array:
    """Returns the finite numbers, zeros elsewhere."""
    return jnp.where(jnp.isfinite(x), x, 0.0)


# ---- Numbers in blocks: [... blocks block] with scales [... blocks 1], or without scales -----------------------------


def _rounded(x: jax.Array, to: str, block: int) -> tuple[jax.Array, ...]:
    """Returns small numbers in blocks along the last dim, and the scales that take them back."""
    largest, dtype = FORMATS[to], jnp.dtype(to)
    if not largest:
        return (x.astype(dtype),)
    blocks = -(-x.shape[-1] // block)
    wide = x.astype(jnp.float32)
    if missing := blocks * block - x.shape[-1] if blocks > 1 else 0:
        wide = jnp.pad(wide, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    wide = wide.reshape(*x.shape[:-1], blocks, -1)
    sizes = jnp.where(jnp.isnan(wide), jnp.inf, jnp.abs(wide))  # maxima of large arrays lose NaN on CPU (jax 0.10)
    most = sizes.max(-1, keepdims=True)
    scale = jnp.maximum(most / largest, _TINY)
    small = wide / scale
    return (jnp.round(small) if jnp.issubdtype(dtype, jnp.integer) else small).astype(dtype), scale


def _exact(numbers: tuple[jax.Array, ...], like: jax.Array) -> jax.Array:
    """Returns the numbers in the shape and dtype of what was rounded."""
    small, *scales = numbers
    if not scales:
        return small.astype(like.dtype)
    wide = small.astype(jnp.float32) * scales[0]
    return wide.reshape(*like.shape[:-1], prod(wide.shape[-2:]))[..., : like.shape[-1]].astype(like.dtype)


def _laid(numbers: tuple[jax.Array, ...], layout: str) -> tuple[jax.Array, ...]:
    return tuple(md.constrain(x, layout) for x in numbers)


def _check(x: Any, to: str, block: int) -> None:
    _check_format(to, block)
    if not x.ndim or not x.size or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ArgumentError(f"low_bits: {x.dtype}{list(x.shape)} has no block of floats to round; send it as it is")


def _check_format(to: str, block: int) -> None:
    if not isinstance(to, str) or to not in FORMATS:
        raise ArgumentError(f"to={to!r}: no such format{nearest(to, FORMATS)}")
    _check_count("block", block)


def _check_count(name: str, count: int) -> None:
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
        raise ArgumentError(f"{name}={count!r}: must be an int of at least 1, such as {name}=8")
