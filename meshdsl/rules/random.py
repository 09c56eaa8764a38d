"""Rules of random numbers, whose values never depend on the layout, and of calls with effects.

Operations on keys are elementwise over an array of keys. The bits of a key are a function of the key and of each
element's position, so a device can compute its own block (as JAX does with ``jax_threefry_partitionable``, the
default): ``random_bits`` counts from the start of the block (Threefry: Salmon et al. 2011). For other kinds of keys
every device computes all bits.

Keys of JAX's hardware generator (``rbg``) are not independent: the bits of one key in an array depend on the other
keys, so such arrays stay whole.
"""

import jax
import jax.numpy as jnp

from meshdsl.ir.graph import Literal, Op, Value
from meshdsl.layouts.placement import B, P
from meshdsl.layouts.sharding_rule import Dims, Rule, Signature
from meshdsl.rules.registry import rule
from meshdsl.rules.shape import kept, named

# ---- Random ----------------------------------------------------------------------------------------------------------


# Dtypes of keys that are independent of each other in an array; for other kinds that is unknown.
ALONE = ("key<fry>", "key<fry4>", "key<phx2>", "key<phx4>")


@rule("random_bits")
def random_bits(op: Op) -> Rule:
    """Blocks over independent keys; over the bits of one key only where they are counted."""
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
    """Arrays of keys: trailing dims belong to one key each."""
    shared = min(len(op.inputs[0].shape), len(op.outputs[0].shape))
    return Rule((_first(op.inputs[0].shape, shared),), (_first(op.outputs[0].shape, shared),))


@rule("random_seed", "random_split")
def made(op: Op) -> Rule:
    """New keys, each from one number or key."""
    shared = len(op.inputs[0].shape) if _alone(op.outputs[0]) else 0
    return Rule((_first(op.inputs[0].shape, shared),), (_first(op.outputs[0].shape, shared),))


@rule("random_fold_in")
def random_fold_in(op: Op) -> Rule:
    """One number for each key; dims of length 1 are broadcast."""
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
    """High and low words of every element's position: each device counts from the start of its block."""
    return Rule((), (kept(len(op.outputs[0].shape)),) * 2)


@rule("random_gamma")
def random_gamma(op: Op) -> Rule:
    """The samples of one key depend on each other, so they stay together."""
    keys = len(op.inputs[0].shape)
    drawn = _first(op.outputs[0].shape, keys if _alone(op.inputs[0]) else 0)
    return Rule((drawn[:keys], drawn), (drawn,))


def _alone(keys: Value | Literal) -> bool:
    return keys.dtype.name in ALONE


def _first(shape: tuple[int, ...], shared: int) -> Dims:
    return named(*(f"d{i}" if i < shared else None for i in range(len(shape))))


# ---- Effects ---------------------------------------------------------------------------------------------------------
# A call with effects runs once: the first device makes it and the others have zeros. So its results are partial sums on
# every axis, and partial maxima where they are bools.


@rule("io_callback")
def once(op: Op) -> Rule:
    """Whole operands and partial results; no other row is legal."""
    whole, none = (B,) * len(op.inputs), tuple(named(*(None for _ in v.shape)) for v in op.outputs)
    held = tuple(P("max") if v.dtype == jnp.bool_ else P for v in op.outputs)
    copies = {(whole, (B,) * len(op.outputs))} if op.outputs else set()
    operands = tuple(named(*(None for _ in x.shape)) for x in op.inputs)
    return Rule(operands, none, extra=(Signature(whole, held),), without=frozenset(copies))
