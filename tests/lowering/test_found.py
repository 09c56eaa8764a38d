"""What random programs have found, each as small as it gets."""

import jax.numpy as jnp
from jax import lax

import meshdsl as md


def test_a_dynamic_slice_that_is_split_starts_in_bounds():
    """XLA (jax 0.10) reads a slice of a dynamic slice from where the latter would start without bounds."""

    def step(x, i):
        return lax.dynamic_slice_in_dim(x, i, 8)

    sharded = md.parallelize(step, md.Mesh(x=4), {"x": "x=B"}, outputs={"**": "x=S(0)"})
    assert sharded.check(jnp.arange(16.0), jnp.int32(12)).ok


def test_axes_may_swap_past_one_that_stays():
    """The pairs of the compiled permutation differ in two axes only; the plan names all three that split the dim."""
    mesh = md.Mesh(x=2, y=2, z=2)
    sharded = md.parallelize(
        lambda a: a * 2, mesh, {"a": "x=S(0) y=S(0) z=S(0)"}, outputs={"**": "y=S(0) x=S(0) z=S(0)"}
    )
    (line,) = sharded.verify(jnp.arange(16.0)).lines
    assert (line.kind, line.axes) == ("collective-permute", "x,y,z")
