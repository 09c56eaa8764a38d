"""Rules of random numbers: their values never depend on the layout.

Operations on keys are elementwise over an array of keys. The bits that one key gives are a
function of the key and of each element's position, so a device can make its own block of them
(as JAX does with ``jax_threefry_partitionable``, which is its default): ``random_bits`` counts
from where the block starts. For other kinds of keys every device makes all bits.
"""

import jax

from meshdsl.ir import Op
from meshdsl.layouts.rule import Dims, Rule
from meshdsl.rules.registry import rule
from meshdsl.rules.structural import kept, named


@rule("random_bits")
def random_bits(op: Op) -> Rule:
    """One block of bits per key; threefry can count its way into the block."""
    keys = len(op.inputs[0].shape)
    made = counted(op)
    labels = (f"d{i}" if i < keys or made else None for i in range(len(op.outputs[0].shape)))
    return Rule((kept(keys),), (named(*labels),))


def counted(op: Op) -> bool:
    """Whether each bit is a function of key and position alone."""
    is_threefry = op.inputs[0].dtype.name == "key<fry>"
    single = op.inputs[0].shape == () and op.params["bit_width"] <= 32
    return bool(is_threefry and single and jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]


@rule("random_seed", "random_wrap", "random_unwrap", "random_split", "random_clone")
def leading(op: Op) -> Rule:
    """Arrays of keys: dims beyond those of the keys belong to one key each."""
    shared = min(len(op.inputs[0].shape), len(op.outputs[0].shape))
    return Rule((_first(op.inputs[0].shape, shared),), (_first(op.outputs[0].shape, shared),))


@rule("random_fold_in")
def random_fold_in(op: Op) -> Rule:
    """A number for each key; dims of length 1 are stretched."""
    shape = op.outputs[0].shape
    inputs = tuple(
        named(*(f"d{i}" if n == m else None for i, (n, m) in enumerate(zip(x.shape, shape, strict=False))))
        for x in op.inputs
    )
    return Rule(inputs, (kept(len(shape)),))


@rule("threefry2x32")
def threefry(op: Op) -> Rule:
    """Two words of key and two of counter, elementwise."""
    dims = kept(len(op.outputs[0].shape))
    return Rule((dims,) * 4, (dims,) * 2)


def _first(shape: tuple[int, ...], shared: int) -> Dims:
    return named(*(f"d{i}" if i < shared else None for i in range(len(shape))))
