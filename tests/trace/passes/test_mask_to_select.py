"""Products with masks are choices, as the compiler reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.trace import trace
from meshdsl.trace.passes.canonicalize import mask_to_select
from tests.trace.passes.test_cleanup_passes import X, cleaned, names


@pytest.mark.parametrize("turned", [False, True])
def test_a_product_with_a_mask_is_a_choice(turned):
    def step(x):
        mask = (x > 0).astype(x.dtype)
        return mask * x if turned else x * mask, mask.sum()

    graph = cleaned(step, X, by=mask_to_select)
    assert "mul" not in names(graph) and names(graph).count("select_n") == 1
    assert names(graph).count("convert_element_type") == 1  # the sum reads the mask


def test_products_of_whole_numbers_and_of_other_casts_stay():
    def step(x):
        whole = x.astype(jnp.int32)
        return whole * (x > 0).astype(jnp.int32), x * whole.astype(x.dtype)

    assert names(cleaned(step, X, by=mask_to_select)).count("mul") == 2


def test_a_masked_sum_is_reduced_after_the_mask():
    def step(x, y, mask):
        return jnp.sum((x @ y) * (mask > 0).astype(x.dtype))

    x = jnp.arange(16.0).reshape(4, 4)
    sharded = md.parallelize(step, md.Mesh(x=2), {"x": "x=S(1)", "y": "x=S(0)", "mask": "x=B"})
    (sent,) = sharded.plan(x, x, x).collectives
    assert sent.kind == "all-reduce" and sent.bytes == 4 and sharded.check(x, x, x).ok


def test_infinities_that_a_mask_leaves_out_are_zero():
    """Also where mask and product are compiled apart, which XLA's own reading would leave to layouts (seed 140131)."""

    def step(x, mask):
        def square(x, _):
            return x * x, None

        grown, _ = jax.lax.scan(square, x, length=9)
        return (mask > 0).astype(x.dtype) * grown

    x, mask = jnp.linspace(0.5, 3, 8), jnp.arange(8) % 2 - 0.5
    expected = jax.jit(step)(x, mask)
    assert np.isfinite(expected[::2]).all() and np.isinf(expected[1::2]).any()
    sharded = md.parallelize(step, md.Mesh(x=2), {"x": "x=S(0)", "mask": "x=B"}, outputs={"*": "x=B"})
    assert sharded.check(x, mask).ok
    np.testing.assert_array_equal(sharded(x, mask), expected)
    assert "mul" not in {op.name for op in trace(step, (x, mask)).graph.ops}
