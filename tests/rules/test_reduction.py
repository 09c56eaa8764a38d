"""Every reduction, proved."""

import jax.numpy as jnp
import pytest
from jax import lax

from tests.rules.data import bits, bools, complexes, floats, ints
from tests.rules.prover import prove, sample

CASES = []


def case(*args, **options):
    CASES.append(sample(*args, **options))


def product(one, other):
    """Of complex numbers in two parts."""
    (a, b), (c, d) = one, other
    return a * c - b * d, a * d + b * c


for name in "sum max min prod".split():
    reduce = getattr(lax, f"reduce_{name}")
    case(f"reduce_{name}", lambda x, reduce=reduce: reduce(x, (1,)), floats(12, 12, 24))
    case(f"reduce_{name}", lambda x, reduce=reduce: reduce(x, (0,)), ints(12, 24))
case("reduce_sum", lambda x: lax.reduce_sum(x, (0, 2)), floats(12, 24, 12))
case("reduce_sum", lambda x: lax.reduce_sum(x, (0, 1)), floats(12, 24))
case("reduce_sum", lambda x: lax.reduce_sum(x, (0,)), complexes(12, 24))
case("reduce_sum", lambda x: lax.reduce_sum(x, (0,)), floats(12, 24, dtype=jnp.bfloat16))
MIXED = {  # operands on which the reduction is not always the same
    "or": (bools(12, 24, share=0.05), bits(12, 24) & bits(12, 24) & bits(12, 24) & bits(12, 24)),
    "and": (bools(12, 24, share=0.95), bits(12, 24) | bits(12, 24) | bits(12, 24) | bits(12, 24)),
    "xor": (bools(12, 24), bits(12, 24)),
}
for name, operands in MIXED.items():
    for operand in operands:
        case(f"reduce_{name}", lambda x, reduce=getattr(lax, f"reduce_{name}"): reduce(x, (0,)), operand)
case("reduce", lambda x: lax.reduce(x, 3.0, lax.add, (1,)), floats(12, 24, 12))
case("reduce", lambda x, y: lax.reduce((x, y), (1.0, 0.0), product, (1,)), floats(6, 6), floats(6, 6))
for name in "argmax argmin".split():
    case(name, lambda x, find=getattr(lax, name): find(x, 1, jnp.int32), floats(12, 24))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case):
    assert prove(case) == []
