"""Matrix products, proved."""

import jax.numpy as jnp
import pytest
from jax import lax

from tests.prover import prove, sample
from tests.rules.data import complexes, floats, ints

CASES = []
WRAPS = {"B, P -> P": "the sum of the parts may have wrapped", "P, B -> P": "likewise"}


def case(left, right, contracted, batch=((), ()), excused=None, **options):
    dot = sample(
        "dot_general", lambda x, y: lax.dot_general(x, y, (contracted, batch), **options), left, right, excused=excused
    )
    CASES.append(dot)


case(floats(12, 24), floats(24, 36), ((1,), (0,)))
case(floats(24), floats(24), ((0,), (0,)))
case(floats(12, 24), floats(12), ((), ()), ((0,), (0,)))
case(floats(12, 24, 12), floats(12, 24), ((0, 1), (0, 1)))
case(floats(12, 12, 24), floats(24, 12), ((2,), (0,)), ((0,), (1,)))
case(floats(24, 12), floats(12), ((), ()))
case(complexes(12, 24), complexes(24, 12), ((1,), (0,)))
case(floats(12, 24, dtype=jnp.bfloat16), floats(24, 12, dtype=jnp.bfloat16), ((1,), (0,)), preferred_element_type="f4")
case(ints(12, 24), ints(24, 12), ((1,), (0,)))
narrow = [ints(12, 24, dtype="int8"), ints(24, 12, dtype="int8")]
case(*narrow, ((1,), (0,)), excused=WRAPS, preferred_element_type="int32")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case):
    assert prove(case) == []
