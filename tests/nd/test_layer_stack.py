"""Blocks repeated over a dim of layers: one scan, the numbers of a loop; remat by name; initialisation in place."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshdsl as md
from meshdsl.errors import ArgumentError, DimError

SIZES = md.dims("embed=4 hidden=8")
X = md.named(jnp.linspace(-1, 1, 24).reshape(6, 4), "batch embed")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Param(md.fan_in(rngs.params(), SIZES("embed hidden"), over="embed"))
        self.down = nnx.Param(md.fan_in(rngs.params(), SIZES("hidden embed"), over="hidden"))

    def __call__(self, x, scale=1.0):
        hidden = md.tanh(md.keep(md.dot(x, self.up, over="embed"), "hidden"))
        return x + scale * md.dot(hidden, self.down, over="hidden")


@cache
def stacked(**more):
    return md.stack(Block, "layers=3", nnx.Rngs(0), **more)


def by_hand(up, down, x):
    for i in range(3):
        x = x + np.tanh(x @ up[i]) @ down[i]
    return x


def test_the_numbers_are_those_of_a_loop():
    blocks = stacked()
    run = jax.jit(lambda x, scale: blocks(x, scale=scale))
    up, down = blocks.block.up.get_value(), blocks.block.down.get_value()
    assert (up.dims, up.array.shape) == (("layers", "embed", "hidden"), (3, 4, 8))
    assert not np.array_equal(up.array[0], up.array[1])
    np.testing.assert_allclose(run(X, 1.0).array, by_hand(up.array, down.array, X.array), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(run(X, 0.0).array, X.array)


def gradient(**more):
    graph, params = nnx.split(stacked(**more))
    return jax.grad(lambda p: md.sum(md.square(nnx.merge(graph, p)(X)))), params


@pytest.mark.parametrize(
    ("remat", "keep", "again"), [("all", "", 1), ("dots", "", 0), ("weights", "", 0), ("all", "hidden", 0)]
)
def test_gradients_are_the_same_under_every_policy(remat, keep, again):
    (plain, params), (chosen, _) = gradient(), gradient(remat=remat, keep=keep)
    texts = [str(jax.make_jaxpr(f)(params)) for f in (plain, chosen)]
    assert [text.count("scan[") for text in texts] == [2, 2]
    assert texts[1].count("dot_general[") - texts[0].count("dot_general[") == again
    for got, expected in zip(*(jax.tree.leaves(jax.jit(f)(params)) for f in (plain, chosen))):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


class Counting(nnx.Module):
    """Keeps a running value, and has a flax layer with names in its metadata."""

    def __init__(self, rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "hidden"))
        self.seen = nnx.BatchStat(jnp.zeros(()))
        self.linear = nnx.Linear(4, 4, kernel_init=kernel, rngs=rngs)

    def __call__(self, x):
        self.seen[...] = self.seen[...] + 1
        return md.named(self.linear(x.array), x.dims)


def test_state_of_the_blocks_is_kept_and_flax_layers_have_names():
    with nnx.use_eager_sharding(False):
        blocks = md.stack(Counting, "layers=2", nnx.Rngs(0))
        blocks(X)
        blocks(X)
    np.testing.assert_array_equal(blocks.block.seen[...], [2.0, 2.0])
    assert blocks.block.linear.kernel.get_metadata()["out_sharding"] == ("layers", "embed", "hidden")


def test_what_is_no_stack():
    with pytest.raises(DimError, match=r"stack takes one dim, not 2: \[layers=3 more=2\]"):
        md.stack(Block, "layers=3 more=2", nnx.Rngs(0))
    with pytest.raises(ArgumentError, match="no remat policy 'dot'; did you mean 'dots'"):
        md.remat(lambda x: x, "dot")


def test_rules_of_a_stack_and_initialisation_in_place():
    graph = nnx.graphdef(stacked())

    def init():
        return nnx.state(md.stack(Block, "layers=3", nnx.Rngs(0)))

    def step(params, batch):
        gradient = jax.grad(lambda p: md.mean(md.square(nnx.merge(graph, p)(batch))))(params)
        return jax.tree.map(lambda p, g: p - g, params, gradient)

    batch = md.named(jnp.ones((8, 4)), "batch embed")
    sharded = md.parallelize(step, "data=4,model=2", rules="batch:data hidden:model")
    params = sharded.init(init, batch)
    assert str(sharded.plan(params, batch).layout("params/block/up").on("model")) == "S(2)"
    planned = sharded.plan(params, batch).layout("params/block/up").local_shape((3, 4, 8), {"data": 4, "model": 2})
    assert params["block"]["up"].get_value().array.sharding.shard_shape((3, 4, 8)) == planned
    for got, expected in zip(jax.tree.leaves(params), jax.tree.leaves(jax.jit(init)())):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert sharded.check(params, batch)
