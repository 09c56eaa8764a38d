"""Padding and cutting become one operation where that is the same, and only there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshdsl.ir.graph import walk
from meshdsl.trace import trace
from tests.trace.interpreter import run

X = jnp.sin(jnp.arange(96.0)).reshape(2, 12, 4)
W = jnp.cos(jnp.arange(12.0)).reshape(3, 1, 4)
NUMBERS = ("NWC", "WIO", "NWC")


def padded_shift(x):
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def joined_shift(x):
    return jnp.concatenate([x[:, 2:], jnp.ones_like(x[:, :2])], 1)


def causal(x):
    padded = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
    return lax.conv_general_dilated(padded, W, (1,), "VALID", dimension_numbers=NUMBERS, feature_group_count=4)


def average(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 3, 1), (1, 2, 1), "SAME")


def spread(x):
    return lax.reduce_window(
        lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 1), (0, 0, 0))), 0.0, lax.add, (1, 2, 1), (1, 1, 1), "SAME"
    )


# step -> operations of its program, and operations of its gradient that pad or cut
FOLDED = {
    "padded": (padded_shift, ["pad", "return"], ["pad", "pad"]),
    "joined": (joined_shift, ["pad", "return"], ["pad", "pad"]),
    "causal": (causal, ["constant", "conv_general_dilated", "return"], ["pad"]),
    "average": (average, ["reduce_window_sum", "return"], []),
    "spread": (spread, ["reduce_window_sum", "return"], ["slice"]),
}
CUTTING = {"slice", "split", "pad", "concatenate"}


def names(graph):
    return [op.name for _, op in walk(graph)]


@pytest.mark.parametrize("name", FOLDED)
def test_folded(name):
    step, expected, _ = FOLDED[name]
    program = trace(step, (X,))
    assert names(program.graph) == expected
    np.testing.assert_allclose(run(program, X), step(X), rtol=1e-6)


@pytest.mark.parametrize("name", FOLDED)
def test_gradients(name):
    step, _, expected = FOLDED[name]
    whole = jax.grad(lambda x: jnp.sum(jnp.sin(step(x))))
    program = trace(whole, (X,))
    assert [n for n in names(program.graph) if n in CUTTING] == expected
    np.testing.assert_allclose(run(program, X), whole(X), rtol=1e-5, atol=1e-6)


OTHERS = {
    "two fillings": lambda x: jnp.pad(
        jnp.pad(x, ((0, 0), (1, 0), (0, 0))), ((0, 0), (0, 1), (0, 0)), constant_values=1.0
    ),
    "ones around windows": lambda x: lax.reduce_window(
        jnp.pad(x, ((0, 0), (1, 1), (0, 0)), constant_values=1.0), 0.0, lax.add, (1, 3, 1), (1, 1, 1), "VALID"
    ),
    "cut, then windows": lambda x: average(x[:, 2:-2]),
    "features": lambda x: lax.conv_general_dilated(
        jnp.pad(x, ((0, 0), (0, 0), (0, 4))), jnp.ones((3, 8, 2)), (1,), "SAME", dimension_numbers=NUMBERS
    ),
    "strided": lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, ::2],
    "filled by data": lambda x: lax.pad(x, x[0, 0, 0], ((0, 0, 0), (1, 0, 0), (0, 0, 0)))[:, :-1],
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name):
    program = trace(OTHERS[name], (X,))
    assert [n for n in names(program.graph) if n in CUTTING]
    np.testing.assert_allclose(run(program, X), OTHERS[name](X), rtol=1e-6)
