"""High words of products, against XLA's; XLA's own does not compile under shard_map."""

import numpy as np
import pytest
from jax import lax

import meshdsl as md


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32"])
def test_high_words(dtype):
    limits = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(limits.min, limits.max, (2, 256), dtype, endpoint=True)
    x[0, :6] = x[1, 3:9] = [limits.min, limits.max, 0, 1, limits.min, limits.max]
    step = md.parallelize(lambda a, b: lax.mulhi(a, b), "x=8", {"a": "x=S(0)"})
    assert step.check(x[0], x[1]).ok
    assert step.plan(x[0], x[1]).bytes == 0
