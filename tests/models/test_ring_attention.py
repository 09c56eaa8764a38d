"""Ring attention: the numbers of plain attention, in zig-zag order, and blocks that only ever hop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshdsl as md
from meshdsl.layouts import Link
from meshdsl.models import gpt, llama
from meshdsl.models.attention import attention
from meshdsl.models.ring_attention import ring_attention, zigzag, zigzag_batch
from meshdsl.models.training import model_function, next_token_loss
from meshdsl.primitives.alternatives import taking
from tests.models.values import filled, quick

RNG = np.random.default_rng(5)
BLOCKS = 4


def plain(query, key, value, causal):
    scores = jnp.einsum("bshqd,bthd->bhqst", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(query.shape[1], dtype=bool), scores, -1e9) if causal else scores
    return jnp.einsum("bhqst,bthd->bshqd", jax.nn.softmax(scores), value)


@pytest.mark.parametrize(
    "causal, dtype, error, fused, given",
    [
        (True, "float32", 2e-6, True, "zigzag"),
        (True, "float32", 4e-6, False, "usual"),
        (True, "float32", 4e-6, False, "permuted"),
        (False, "float32", 2e-6, False, "zigzag"),
        (False, "bfloat16", 2e-2, True, "zigzag"),
    ],
)
def test_values_and_gradients_are_those_of_plain_attention(causal, dtype, error, fused, given):
    arrays = [jnp.asarray(RNG.normal(size=size), dtype) for size in [(2, 16, 2, 3, 4), (2, 16, 2, 4), (2, 16, 2, 4)]]
    order = zigzag(16, BLOCKS) if causal and given == "zigzag" else np.arange(16)

    def ring(*arrays):
        made = ring_attention(*(x[:, order] for x in arrays), BLOCKS, causal, fused=fused, order=given)
        return jnp.sum(jnp.sin(made.astype(jnp.float32))), made

    def whole(*arrays):
        made = plain(*(x.astype(jnp.float32) for x in arrays), causal)[:, order]
        return jnp.sum(jnp.sin(made)), made

    found, expected = (quick(jax.grad(f, (0, 1, 2), has_aux=True))(*arrays) for f in (ring, whole))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=error, atol=error)


@pytest.mark.parametrize(
    "model, config",
    [
        (gpt.GPT, lambda **ring: gpt.Config(1, 16, 2, seq=16, vocab=32, **ring)),
        (llama.Llama, lambda **ring: llama.Config(1, 16, 32, 4, 2, 4, seq=16, vocab=32, **ring)),
    ],
    ids=["gpt", "llama"],
)
def test_a_model_on_a_batch_in_zigzag_order_has_the_same_loss(model, config):
    usual = {name: md.named(RNG.integers(0, 32, (4, 16), np.int32), "batch seq") for name in ("inputs", "targets")}
    plainly, ring = (
        lambda rngs, how=how: model(config(**how), rngs) for how in ({}, {"attend": "ring", "blocks": BLOCKS})
    )
    params = filled(nnx.state(nnx.eval_shape(lambda: plainly(nnx.Rngs(0)))))

    def losses(params):
        batches = (plainly, usual), (ring, zigzag_batch(usual, BLOCKS))
        return [next_token_loss(model_function(make)(params), batch) for make, batch in batches]

    expected, found = quick(losses)(params)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_sequence_that_does_not_divide_is_refused():
    with pytest.raises(md.ArgumentError, match=r"seq=100 does not divide into 16 chunks; the nearest is 96 or 112"):
        zigzag(100, 8)


def test_a_layout_makes_blocks_hop_and_never_gather():
    def step(w, x):
        q, k, v = jnp.einsum("bse,cehd->cbshd", x, w)
        return jnp.sum(ring_attention(q[:, :, :, None], k, v, BLOCKS, layout="seq=S(seq)") ** 2)

    shapes = jax.ShapeDtypeStruct((3, 8, 2, 4), jnp.float32), jax.ShapeDtypeStruct((2, 16, 8), jnp.float32)
    pins = {"x": "seq=S(1)", "w": "seq=B"}
    plan = md.parallelize(jax.value_and_grad(step), "seq=4", pins, effort="fast").plan(*shapes)
    assert sorted(c.kind for c in plan.collectives) == ["all-reduce", *["collective-permute"] * 3]


def test_wide_floats_are_never_narrowed():
    with jax.enable_x64(True):
        shapes = (jax.ShapeDtypeStruct(size, "float64") for size in [(1, 8, 1, 1, 4), (1, 8, 1, 4), (1, 8, 1, 4)])
        traced = jax.make_jaxpr(jax.grad(lambda *a: jnp.sum(ring_attention(*a, 2)), (0, 1, 2)))(*shapes)
    assert "f64" in str(traced) and "f32" not in str(traced)


@pytest.mark.parametrize(
    "query, key, value, text",
    [
        ((1, 8, 2, 4), (1, 8, 2, 4), (1, 8, 2, 4), r"query: shape \(1, 8, 2, 4\).*give query\[:, :, :, None\]"),
        ((1, 8, 1, 1, 4), (1, 16, 1, 4), (1, 8, 1, 6), r"key \(1, 16, 1, 4\), value \(1, 8, 1, 6\): must be .*'fused'"),
    ],
    ids=["ungrouped", "cross-attention"],
)
def test_other_shapes_than_those_of_self_attention_are_refused(query, key, value, text):
    with pytest.raises(md.ArgumentError, match=text):
        ring_attention(*map(jnp.ones, (query, key, value)), 2)


def long_loss(w, x):
    q, k, v = (md.named(x, "batch seq heads head") for x in jnp.einsum("bse,cehd->cbshd", x, w))
    return jnp.mean(attention(q, k, v, variant="auto", blocks=BLOCKS).array ** 2)


def long_step(w, x):
    return w - 0.1 * jax.grad(long_loss)(w, x)


@pytest.mark.parametrize(("seq", "taken"), [(64, "plain"), (16384, "permuted_ring")])
def test_the_planner_takes_a_ring_for_long_sequences(seq, taken):
    shapes = jax.ShapeDtypeStruct((3, 256, 2, 64), jnp.float32), jax.ShapeDtypeStruct((1, seq, 256), jnp.float32)
    sharded = md.parallelize(long_step, md.Mesh(seq=4, topology="dgx-h100"), {"x": "seq=S(1)", "w": "seq=B"})
    assert sharded.plan(*shapes).alternatives == (("attention.causal.blocks", taken),)


@pytest.mark.parametrize("order", ["usual", "permuted"])
def test_a_batch_in_the_usual_order_runs_in_a_ring(order):
    """Permuted, what the keys are computed from may be gathered, which is smaller here; blocks hop all the same."""

    def step(w, x):
        def loss(w):
            q, k, v = jnp.einsum("bse,cehd->cbshd", x, w)
            made = ring_attention(q[:, :, :, None], k, v, BLOCKS, layout="seq=S(seq)", order=order)
            return jnp.mean(made**2)

        return w - 0.1 * jax.grad(loss)(w)

    w, x = (RNG.normal(0, 0.3, shape).astype(np.float32) for shape in [(3, 16, 2, 8), (2, 64, 16)])
    slow = dataclasses.replace(md.topology("dgx-h100"), name="slow", links=(Link(1e-9, 1e6),))
    sharded = md.parallelize(step, md.Mesh(seq=4, topology=slow), {"x": "seq=S(1)", "w": "seq=B"})
    hops = [c for c in sharded.plan(w, x).collectives if c.kind == "collective-permute" and c.trips == BLOCKS - 1]
    assert len(hops) == 3
    assert sharded.verify(w, x).equal and sharded.check(w, x).ok


def test_models_take_a_batch_in_the_usual_order_if_the_planner_may_choose():
    """Every variant has the numbers of plain attention: positions, mask and permutation agree."""
    config = llama.Config(2, 16, 32, 4, 2, 4, seq=16, vocab=32, attend="auto", blocks=BLOCKS)
    plain = dataclasses.replace(config, attend="products", blocks=1)
    batch = {name: md.named(RNG.integers(0, 32, (4, 16), np.int32), "batch seq") for name in ("inputs", "targets")}
    both = [lambda rngs, c=c: llama.Llama(c, rngs) for c in (plain, config)]
    params = filled(nnx.state(nnx.eval_shape(lambda: both[0](nnx.Rngs(0)))))
    expected = next_token_loss(model_function(both[0])(params), batch)
    for variant in ("plain", "recomputed", "blockwise", "ring", "permuted_ring"):
        with taking([("attention.causal.blocks", variant)]):
            found = jax.jit(lambda params: next_token_loss(model_function(both[1])(params), batch))(params)
        np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_an_unknown_order_is_refused():
    x = jnp.ones((1, 16, 2, 4))
    with pytest.raises(md.ArgumentError, match=r"order: no order 'zigzig'; did you mean 'zigzag'\?; it is one of"):
        ring_attention(x[:, :, :, None], x, x, 4, order="zigzig")
