"""Rules of random numbers: their values never depend on the layout.

Operations on keys are elementwise over an array of keys. The bits that one key gives are a
function of the key and of each element's position, so a device can make its own block of them
(as JAX does with ``jax_threefry_partitionable``, which is its default): ``random_bits`` counts
from where the block starts. For other kinds of keys every device makes all bits.

Keys of JAX's hardware generator (``rbg``) are not independent: what one key of an array gives
depends on the other keys beside it, so such arrays stay whole.
"""

import jax
import jax.numpy as jnp

from meshdsl.ir.graph import Literal, Op, Value
from meshdsl.layouts.placement import B, P
from meshdsl.layouts.sharding_rule import Dims, Rule, Signature
from meshdsl.rules.registry import rule
from meshdsl.rules.shape import kept, named

# ---- Random ----------------------------------------------------------------------------------------------------------


# Keys of which each is used alone, by the name of their dtype; what other kinds do in arrays is unknown.
ALONE = ("key<fry>", "key<fry4>", "key<phx2>", "key<phx4>")


@rule("random_bits")
def random_bits(op: Op) -> Rule:
    """One block of bits per key; threefry can count its way into the block."""
    keys = len(op.inputs[0].shape)
    alone, made = _alone(op.inputs[0]), counted(op)
    labels = (f"d{i}" if (alone and i < keys) or made else None for i in range(len(op.outputs[0].shape)))
    return Rule((kept(keys),), (named(*labels),))


def counted(op: Op) -> bool:
    """Whether each bit is a function of key and position alone."""
    is_threefry = op.inputs[0].dtype.name == "key<fry>"
    single = op.inputs[0].shape == () and op.params["bit_width"] <= 32
    return bool(is_threefry and single and jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]


@rule("random_wrap", "random_unwrap", "random_clone")
def leading(op: Op) -> Rule:
    """Arrays of keys: dims beyond those of the keys belong to one key each."""
    shared = min(len(op.inputs[0].shape), len(op.outputs[0].shape))
    return Rule((_first(op.inputs[0].shape, shared),), (_first(op.outputs[0].shape, shared),))


@rule("random_seed", "random_split")
def made(op: Op) -> Rule:
    """New keys, each from a number or a key."""
    shared = len(op.inputs[0].shape) if _alone(op.outputs[0]) else 0
    return Rule((_first(op.inputs[0].shape, shared),), (_first(op.outputs[0].shape, shared),))


@rule("random_fold_in")
def random_fold_in(op: Op) -> Rule:
    """A number for each key; dims of length 1 are stretched."""
    shape, alone = op.outputs[0].shape, _alone(op.inputs[0])
    inputs = tuple(
        named(*(f"d{i}" if alone and n == m else None for i, (n, m) in enumerate(zip(x.shape, shape, strict=False))))
        for x in op.inputs
    )
    return Rule(inputs, (kept(len(shape)) if alone else named(*(None for _ in shape)),))


@rule("threefry2x32")
def threefry(op: Op) -> Rule:
    """Two words of key and two of counter, elementwise."""
    dims = kept(len(op.outputs[0].shape))
    return Rule((dims,) * 4, (dims,) * 2)


@rule("iota_2x32_shape")
def counters(op: Op) -> Rule:
    """High and low words of every element's position: each device counts from where its block starts."""
    return Rule((), (kept(len(op.outputs[0].shape)),) * 2)


@rule("random_gamma")
def random_gamma(op: Op) -> Rule:
    """A key makes its own draws, as many as there are, so they stay together."""
    keys = len(op.inputs[0].shape)
    drawn = _first(op.outputs[0].shape, keys if _alone(op.inputs[0]) else 0)
    return Rule((drawn[:keys], drawn), (drawn,))


def _alone(keys: Value | Literal) -> bool:
    return keys.dtype.name in ALONE


def _first(shape: tuple[int, ...], shared: int) -> Dims:
    return named(*(f"d{i}" if i < shared else None for i in range(len(shape))))


# ---- Effects ---------------------------------------------------------------------------------------------------------
# The rule of a call that is made for what it does, and returns something: it is made once.
#
# The first device makes it, the others have zeros: so its results are partial sums on every axis,
# and partial maxima where they are bools. Who reads them decides how they are put together.


@rule("io_callback")
def once(op: Op) -> Rule:
    """Whole operands, partial results, and nothing else."""
    whole, none = (B,) * len(op.inputs), tuple(named(*(None for _ in v.shape)) for v in op.outputs)
    held = tuple(P("max") if v.dtype == jnp.bool_ else P for v in op.outputs)
    copies = {(whole, (B,) * len(op.outputs))} if op.outputs else set()
    operands = tuple(named(*(None for _ in x.shape)) for x in op.inputs)
    return Rule(operands, none, extra=(Signature(whole, held),), without=frozenset(copies))
