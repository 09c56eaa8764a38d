"""Lookups at known positions that permute become rolls and deals, with their gradients; all others stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from meshdsl.ir.graph import walk
from meshdsl.trace import trace
from tests.trace.interpreter import run

X = jnp.sin(jnp.arange(96.0)).reshape(8, 12)
TURNED = np.roll(np.arange(8), 3)
PAIRS = np.arange(8) ^ 1
DRAWN = np.random.default_rng(0).permutation(12)


def looped(x):
    return lax.scan(lambda c, _: (c[PAIRS] * 2, None), x, None, length=3)[0]


def branched(x):
    return lax.cond(x[0, 0] > 0, lambda x: x[TURNED], lambda x: -x, x)


# step -> operations in it that permute, and in its gradient
FOUND = {
    "turned": (lambda x: x[TURNED], ["roll"]),
    "turned columns": (lambda x: x[:, (np.arange(12) + 5) % 12], ["roll"]),
    "pairs": (lambda x: x[PAIRS], ["deal"]),
    "drawn columns": (lambda x: x[:, DRAWN], ["deal"]),
    "jnp.take": (lambda x: jnp.take(x, jnp.asarray(PAIRS), axis=0), ["deal"]),
    "negative": (lambda x: x[TURNED - 8], ["roll"]),
    "moved dim": (lambda x: jax.vmap(lambda row: row[DRAWN], in_axes=0, out_axes=1)(x), ["deal"]),
    "looped": (looped, ["deal"]),
    "branched": (branched, ["roll"], []),  # the branch hands the positions to its gradient through a result
}
LEFT = {
    "repeated": lambda x: x[np.array([0, 0, 1, 2, 3, 4, 5, 6])],
    "part": lambda x: x[np.array([3, 1])],
    "unknown": lambda x: x[jnp.argsort(x[:, 0])],
    "added to": lambda x: x.at[PAIRS].add(x),
    "drawn from a key": lambda x: x[jax.random.bits(jax.random.key(0), (8,)) % 8],
    "out of range": lambda x: x.at[np.arange(1, 9)].get(mode="fill"),
    "windows": lambda x: x[PAIRS, 2:5] * x[TURNED[:, None], np.arange(3)],
}


def permuting(program):
    return [op.name for _, op in walk(program.graph) if op.name in ("roll", "deal")]


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("gradient", [False, True])
def test_found(name, gradient):
    step, expected, *other = FOUND[name]
    whole = jax.grad(lambda x: jnp.sum(step(x) * X.reshape(step(x).shape))) if gradient else step
    program = trace(whole, (X,))
    assert permuting(program) == (other[0] if other and gradient else expected)
    np.testing.assert_allclose(run(program, X), whole(X), rtol=1e-6)


@pytest.mark.parametrize("name", LEFT)
def test_left(name):
    program = trace(LEFT[name], (X,))
    assert not permuting(program)
    np.testing.assert_allclose(run(program, X), LEFT[name](X), rtol=1e-6)


@pytest.mark.parametrize(("name", "rows"), [("turned", 2), ("pairs", 0), ("looped", 0)])
def test_rows_that_move_cost_rows(name, rows):
    """Of 2 rows per device, a turn by 3 moves both; neighbours in pairs are on one device."""
    step, x = FOUND[name][0], jnp.zeros((8, 1 << 14))
    sharded = md.parallelize(step, "data=4", {"x": "data=S(0)"}, outputs={"": "data=S(0)"})
    assert sharded.plan(x).bytes == rows * x[0].nbytes


@pytest.mark.parametrize("varies", [False, True])
def test_long_chains_of_positions_are_read_once(varies):
    """Each of 120 steps reads the step before twice."""

    def step(x):
        at = jnp.argsort(x[:, 0]) if varies else jnp.arange(8)
        for _ in range(120):
            at = (at * 3 + at) % 8
        return x[at]

    np.testing.assert_allclose(run(trace(step, (X,)), X), step(X))
