"""Pictures split by height and by width at once: halos along both, corners in two steps, as planned and no more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.topology import Link, Topology

SLOW = Topology("slow links", 1e6, 1e6, 4e9, 4e9, 0.0, (Link(latency=0.0, bandwidth=1e7),))
WIDTHS = {"y=2,x=4": 5, "x=2,y=3": 7}  # of a first kernel that leaves 48 of a side that can be split


def conv(x, kernel, stride=1, spread=1, padding="SAME"):
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, padding, None, (spread,) * 2, names)


def pool(x, start, kind, stride):
    return jax.lax.reduce_window(x, start, kind, (1, 3, 3, 1), (1, stride, stride, 1), "SAME")


def network(params, images):
    """Convolutions with and without stride, dilation and padding; one value read with different ends."""
    x = jnp.tanh(conv(images, params["first"], padding="VALID"))
    x = jnp.tanh(conv(x, params["strided"], stride=2))
    largest = pool(x, -jnp.inf, jax.lax.max, 1)
    x = jnp.tanh(conv(x, params["plain"])) + largest
    x = jnp.tanh(conv(x, params["wide"], spread=2))
    x = pool(x, -jnp.inf, jax.lax.max, 2)
    return pool(x, 0.0, jax.lax.add, 1)


def step(params, images):
    def loss(params, images):
        return jnp.mean(jnp.sin(network(params, images)))

    value, (grads, to_images) = jax.value_and_grad(loss, (0, 1))(params, images)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value, to_images


def kernel(size, channels):
    return np.random.default_rng(size).normal(size=(size, size, channels, 2)).astype("f") / 3


@pytest.mark.parametrize("mesh", WIDTHS)
def test_a_network_stays_split_by_height_and_width(mesh):
    width = WIDTHS[mesh]
    params = {"first": kernel(width, 3), **dict.fromkeys(("strided", "plain", "wide"), kernel(3, 2))}
    images = np.random.default_rng(9).normal(size=(1, 47 + width, 47 + width, 3)).astype("f")
    sharded = md.parallelize(step, md.Mesh.parse(mesh, SLOW), {"images": "y=S(1) x=S(2)"})
    sent = sharded.plan(params, images).collectives
    assert {c.axes for c in sent if c.kind == "collective-permute"} == {("y",), ("x",)}
    assert {c.kind for c in sent if c.shape[1:2] > (12,)} == {"collective-permute"}  # pictures, but for the last
    sharded.verify(params, images)
    sharded.check(params, images)
