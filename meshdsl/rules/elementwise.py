"""Rules of elementwise operations, as one table of properties.

Every elementwise operation runs on blocks unchanged; operands of rank 0, and dims of length 1 that are longer in the
result, are broadcast. Which partial values may pass follows from the algebra of the operation, so the tables below
group names by property:

* linear     -> partial sums pass through it;
* increasing -> partial maxima and minima pass; decreasing -> they swap;
* lattice    -> a max of maxima is a max (``or`` is the max of bools, ``and`` the min).

A property has to hold for the parts, not only for their total. The parts of a ``P(max)`` may be any lower values, down
to ``-inf``: ``log`` of such a part is NaN, so minima pass through ``log`` (all other parts are above, in its domain)
but maxima do not. Integers wrap, so adding is monotone on floats only. A sum never passes a cast that rounds, unless
the user constrains the result of the cast to be partial.
"""

from collections.abc import Iterator

import jax.numpy as jnp
from jax import dtypes

from meshdsl.ir.graph import Literal, Op, Value
from meshdsl.layouts.placement import B, P, Placement
from meshdsl.layouts.sharding_rule import Dims, Rule, Signature
from meshdsl.rules.registry import rule

MAX, MIN = P("max"), P("min")
Groups = tuple[tuple[int, ...], ...]
# No property: only blocks pass.
UNRELATED = (
    "abs acos acosh asin atan2 atanh bessel_i0e bessel_i1e clz cos cosh digamma eq eq_to erf_inv "
    "igamma igamma_grad_a igammac is_finite lgamma mulhi ne one_minus_square polygamma population_count pow "
    "regularized_incomplete_beta rem sin square tan xor zeta"
).split()
# The identity on values: any reduction commutes.
IDENTITIES = "copy name optimization_barrier stop_gradient xla_metadata_value".split()
# Linear in each group of operands jointly, the other operands being whole.
LINEAR: dict[str, Groups] = {
    **dict.fromkeys("conj imag neg real".split(), ((0,),)),
    **dict.fromkeys("add add_any complex sub".split(), ((0, 1),)),
    "mul": ((0,), (1,)),
    "shift_left": ((0,),),
}
# Increasing on all numbers, -inf and inf included.
INCREASING = dict.fromkeys(
    "asinh atan cbrt ceil erf exp exp2 expm1 floor logistic reduce_precision round sign sinh tanh".split(), (0,)
) | {"max": (0, 1), "min": (0, 1), "clamp": (0, 1, 2), "nextafter": (0, 1)}
# Decreasing likewise.
DECREASING = {"erfc": (0,), "not": (0,)}
# Comparisons are monotone in both operands: x < y tends to be true as y grows, and false as x does.
BELOW, ABOVE = "le le_to lt lt_to".split(), "ge gt".split()
# Monotone on floats: integers wrap.
INCREASING_FLOATS = {"add": (0, 1), "add_any": (0, 1), "sub": (0,), "polynomial": (1,)}
DECREASING_FLOATS = {"neg": (0,), "sub": (1,)}
# Increasing on signed and on unsigned whole numbers.
INCREASING_SIGNED, INCREASING_UNSIGNED = "shift_right_arithmetic", "shift_right_logical"
# Monotone on a domain that is unbounded above: there minima pass, but not maxima.
RISING, FALLING = "acosh log log1p log2 sqrt".split(), ["rsqrt"]
# Joint maxima and minima, by distributivity.
LATTICE: dict[str, tuple[Signature, ...]] = {
    "max": (Signature((MAX, MAX), (MAX,)),),
    "min": (Signature((MIN, MIN), (MIN,)),),
    "clamp": (Signature((MAX, MAX, B), (MAX,)), Signature((B, MIN, MIN), (MIN,)), Signature((MIN, B, MIN), (MIN,))),
}
TABLES = (UNRELATED, IDENTITIES, LINEAR, INCREASING, DECREASING, BELOW, ABOVE, RISING, FALLING)
BY_DTYPE = (INCREASING_SIGNED, INCREASING_UNSIGNED, "and", "or", "convert_element_type", "div", "integer_pow")
BY_LITERAL = ("polynomial", "select_n")


@rule(*(name for table in TABLES for name in table), *BY_DTYPE, *BY_LITERAL)
def elementwise(op: Op) -> Rule:
    """Blocks of every dim, and the properties of the operation."""
    name, shape = op.name, op.outputs[0].shape
    return Rule(
        inputs=tuple(_blocks(x.shape, shape) for x in op.inputs),
        outputs=(_blocks(shape, shape),),
        linear=LINEAR.get(name, ()) + _linear_here(op),
        commuting=_commuting(op),
        increasing=INCREASING.get(name, ()) + _monotone_here(op, rising=True),
        decreasing=DECREASING.get(name, ()) + _monotone_here(op, rising=False),
        extra=(*LATTICE.get(name, ()), *_on_domain(name), *_on_bools(op)),
        rounding=_rounding_here(op),
    )


def _blocks(shape: tuple[int, ...], result: tuple[int, ...]) -> Dims:
    """The factors of an operand's dims; a dim that is broadcast to the result's length is whole."""
    return tuple((f"d{i}",) if n == result[i] else () for i, n in enumerate(shape))


def _linear_here(op: Op) -> Groups:
    """Groups in which the operation is linear for its dtypes."""
    if op.name == "div" and jnp.issubdtype(op.outputs[0].dtype, jnp.inexact):
        return ((0,),)
    if op.name == "polynomial":
        return (tuple(range(1, len(op.inputs))),)  # in its coefficients
    if op.name == "select_n":
        return (tuple(i for i, x in enumerate(op.inputs) if i and not is_zero(x)),)
    if op.name == "convert_element_type" and keeps_sums(op.inputs[0].dtype, op.outputs[0].dtype):
        return ((0,),)
    return ()


def _rounding_here(op: Op) -> Groups:
    """Groups in which it is linear but for rounding: a cast of floats to shorter ones."""
    if op.name != "convert_element_type" or _linear_here(op):
        return ()
    return ((0,),) if all(jnp.issubdtype(x.dtype, jnp.inexact) for x in (*op.inputs, *op.outputs)) else ()


def is_zero(x: Value | Literal) -> bool:
    """Whether an operand is the literal 0, which is a valid part of any sum."""
    return isinstance(x, Literal) and not jnp.issubdtype(x.dtype, dtypes.extended) and not x.value


def _commuting(op: Op) -> Groups:
    if op.name == "select_n":
        return (tuple(range(1, len(op.inputs))),)
    return ((0,),) if op.name in IDENTITIES else ()


def _monotone_here(op: Op, rising: bool) -> tuple[int, ...]:
    """Operands in which the operation is monotone for these dtypes, literals and parameters."""
    if op.name in BELOW or op.name in ABOVE:
        return (1,) if rising == (op.name in BELOW) else (0,)
    if op.name == "select_n":
        return tuple(range(1, len(op.inputs))) if rising and _has_literal(op) else ()
    if op.name == "convert_element_type":
        return (0,) if rising and keeps_order(op.inputs[0].dtype, op.outputs[0].dtype) else ()
    if op.name in (INCREASING_SIGNED, INCREASING_UNSIGNED):
        signed = jnp.issubdtype(op.outputs[0].dtype, jnp.signedinteger)
        return (0,) if rising and signed == (op.name == INCREASING_SIGNED) else ()
    if not jnp.issubdtype(op.outputs[0].dtype, jnp.floating):
        return ()
    if op.name == "integer_pow":
        return (0,) if rising and op.params["y"] > 0 and op.params["y"] % 2 else ()
    if op.name in ("mul", "div"):
        return _scaled(op, rising)
    return (INCREASING_FLOATS if rising else DECREASING_FLOATS).get(op.name, ())


def _has_literal(op: Op) -> bool:
    """Whether an operand is a literal: literals are whole, so the cases of such a select cannot be partial together."""
    return any(isinstance(x, Literal) for x in op.inputs)


def _scaled(op: Op, rising: bool) -> tuple[int, ...]:
    """Operands scaled by a literal: increasing if it is positive, decreasing if it is negative."""
    factors = {i: x.value for i, x in enumerate(op.inputs) if isinstance(x, Literal)}
    scaled = [i for i in range(2) if i not in factors and (op.name == "mul" or i == 0)]
    return tuple(i for i in scaled for scale in factors.values() if (scale > 0 if rising else scale < 0))


def _on_domain(name: str) -> Iterator[Signature]:
    if name in RISING or name in FALLING:
        yield Signature((MIN,), (MIN if name in RISING else MAX,))


def _on_bools(op: Op) -> Iterator[Signature]:
    """Rows of ``or`` and ``and``, which are the max and min of bools."""
    if op.name in ("or", "and") and op.outputs[0].dtype == jnp.bool_:
        own = MAX if op.name == "or" else MIN
        yield Signature((own, own), (own,))
        yield from (Signature(_only(i, kind, 2), (kind,)) for i in range(2) for kind in (MAX, MIN))


def _only(i: int, placed: Placement, count: int) -> tuple[Placement, ...]:
    return tuple(placed if j == i else B for j in range(count))


def keeps_sums(before: jnp.dtype, after: jnp.dtype) -> bool:
    """Whether a cast commutes with sums: of floats without rounding, of integers modulo the smaller power of two."""
    if jnp.issubdtype(before, jnp.integer) and jnp.issubdtype(after, jnp.integer):
        return after.itemsize <= before.itemsize
    if not jnp.issubdtype(before, jnp.inexact) or not jnp.issubdtype(after, jnp.inexact):
        return False
    held, wanted = jnp.finfo(before), jnp.finfo(after)
    return bool(held.nmant <= wanted.nmant and held.maxexp <= wanted.maxexp and held.minexp >= wanted.minexp)


def keeps_order(before: jnp.dtype, after: jnp.dtype) -> bool:
    """Whether a cast is increasing: rounding is; wrapping is not, nor is a cast of infinity to a dtype without one."""
    if before == jnp.bool_:
        return True
    if jnp.issubdtype(after, jnp.floating):
        return after.itemsize > 1  # most floats of 8 bits have no infinity
    if not jnp.issubdtype(before, jnp.integer) or not jnp.issubdtype(after, jnp.integer):
        return False
    held, wanted = jnp.iinfo(before), jnp.iinfo(after)  # type: ignore[no-untyped-call]
    return bool(wanted.min <= held.min and held.max <= wanted.max)
