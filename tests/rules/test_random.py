"""Random numbers, proved: the same bits in every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

from meshdsl.lowering.local.random import _positions
from tests.prover import prove, sample
from tests.rules.data import bits, ints

CASES = []


def case(*args, **options):
    CASES.append(sample(*args, **options))


KEYS = jax.random.split(jax.random.key(1), 6)
for width in (8, 16, 32):
    case("random_bits", lambda k, width=width: jax.random.bits(k, (6, 12), f"uint{width}"), jax.random.key(3))
case("random_bits", jax.vmap(lambda k: jax.random.bits(k, (6,))), KEYS)
case("random_seed", jax.vmap(jax.random.key), ints(6, low=0))
case("random_split", jax.vmap(jax.random.split), KEYS)
case("random_fold_in", jax.vmap(jax.random.fold_in), KEYS, ints(6, low=0))
case("random_clone", jax.vmap(jax.random.clone), KEYS)
case("random_unwrap", jax.random.key_data, KEYS)
case("random_wrap", jax.random.wrap_key_data, np.asarray(jax.random.key_data(KEYS)))
case("threefry2x32", lambda *words: threefry2x32_p.bind(*words), *(bits(6, dtype="uint32") for _ in range(4)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case):
    assert prove(case) == []


def test_positions_beyond_32_bits():
    whole, start = (3, 70_000, 1 << 20), (2, 65_537, (1 << 20) - 2)
    high, low = _positions([jnp.int32(s) for s in start], (1, 1, 2), whole)
    expected = (start[0] * whole[1] + start[1]) * whole[2] + start[2]
    assert [(int(h) << 32) + int(l) for h, l in zip(high.ravel(), low.ravel(), strict=True)] == [expected, expected + 1]
