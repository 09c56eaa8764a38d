"""Constraints written into the jaxpr of a step, on the values of a line."""

from inspect import getsourcelines

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshdsl.lowering.constrained import constrained

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def layer(x, w):
    return jax.lax.cond(x.sum() > 0, jnp.tanh, jnp.sin, x @ w)


def step(layers, x):
    remat = jax.checkpoint(layer)
    return (jax.lax.scan(lambda x, w: (jax.jit(remat)(x, w), None), x, layers)[0] ** 2).sum()


def test_values_of_a_line_are_constrained_wherever_it_runs():
    traced = jax.jit(jax.value_and_grad(step)).trace(jnp.ones((3, 16, 16)) / 8, jnp.ones((8, 16)))
    line = getsourcelines(layer)[1] + 1
    sharding = NamedSharding(MESH, PartitionSpec("data"))

    def place(source, aval):
        return sharding if source.line == line and aval.shape == (8, 16) else None

    changed = constrained(traced.jaxpr, place)
    text = str(changed)
    assert text.count("sharding_constraint") >= 6 and "sharding_constraint" not in str(
        traced.jaxpr
    )  # forward, backward, branches
    args = jnp.ones((3, 16, 16)) / 8, jnp.ones((8, 16))
    with jax.set_mesh(MESH):
        got = jax.jit(jaxpr_as_fun(changed))(*args)
    for x, wanted in zip(got, jaxpr_as_fun(traced.jaxpr)(*args), strict=True):
        np.testing.assert_allclose(x, wanted, rtol=1e-5)
