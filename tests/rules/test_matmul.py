"""Matrix products, proved."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.rules.data import bits, bools, complexes, floats, ints
from tests.rules.prover import prove, sample

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
case(bools(12, 24, share=0.2), bools(24, 12, share=0.2), ((1,), (0,)))
wide = [bits(12, 24, dtype="int8"), bits(24, 12, dtype="int8")]
case(*wide, ((1,), (0,)), preferred_element_type="float32")

EIGHT, SCALE = jnp.float8_e4m3fn, jnp.float8_e8m0fnu


def scales(*shape):
    return np.asarray(2.0 ** ints(*shape, low=-1, high=2), SCALE)


def scaled(left, right, numbers):
    def dot(x, y, a, b):
        return lax.scaled_dot(x, y, lhs_scale=a, rhs_scale=b, dimension_numbers=numbers, preferred_element_type="f4")

    return sample("scaled_dot", dot, *(floats(*shape, dtype=EIGHT) for shape, _ in (left, right)), left[1], right[1])


ROWS = (((1,), (0,)), ((), ()))
CASES += [
    scaled(((6, 12), scales(6, 6)), ((12, 6), scales(6, 6)), ROWS),
    scaled(((6, 24), scales(6, 12)), ((24, 6), scales(6, 6)), ROWS),
    scaled(((6, 12), scales(6, 1)), ((12, 6), scales(1, 6)), ROWS),
    scaled(((6, 2, 4), scales(6, 2, 2)), ((6, 4, 2), scales(6, 2, 2)), (((2,), (1,)), ((0,), (0,)))),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case):
    assert prove(case) == []
