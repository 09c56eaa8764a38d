"""Rules that users state, proved as those of primitives are."""

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from tests.rules.data import floats
from tests.rules.prover import prove, sample


@md.rule("b _, _ n -> b n", linear=((1,),))
def mixed(x, w):
    return jax.nn.softmax(x) @ w


@md.rule("b k, k n -> b n", reduced={"k": "sum"}, linear=((0,), (1,)))
def product(x, w):
    return x @ w


@md.rule("a b -> a", reduced={"b": "max"})
def largest(x):
    return jnp.max(x, axis=1)


X, W = floats(12, 24), floats(24, 12)
UNSTATED = {"P(max) -> P(max)": "increasing is for elementwise functions"}
CASES = [
    sample("ruled", mixed, X, W),
    sample("ruled", product, X, W),
    sample("ruled", largest, floats(12, 24), excused=UNSTATED),
    sample("ruled", jax.vmap(mixed, in_axes=(0, None)), floats(12, 12, 24), W),
    sample("ruled", jax.vjp(mixed, X, W)[1], X @ W),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case):
    assert prove(case) == []
