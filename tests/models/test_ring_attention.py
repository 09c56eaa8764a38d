"""Ring attention: the numbers of plain attention, in zig-zag order, and blocks that only ever hop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.models import gpt, llama
from meshdsl.models.ring_attention import ring_attention, zigzag
from tests.models.values import quick, start

RNG = np.random.default_rng(5)
BLOCKS = 4


def plain(query, key, value, causal):
    scores = jnp.einsum("bshqd,bthd->bhqst", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(query.shape[1], dtype=bool), scores, -1e9) if causal else scores
    return jnp.einsum("bhqst,bthd->bshqd", jax.nn.softmax(scores), value)


@pytest.mark.parametrize(
    "causal, dtype, error, fused",
    [(True, "float32", 2e-6, True), (False, "float32", 2e-6, False), (True, "bfloat16", 2e-2, False)],
)
def test_values_and_gradients_are_those_of_plain_attention(causal, dtype, error, fused):
    arrays = [jnp.asarray(RNG.normal(size=size), dtype) for size in [(2, 16, 2, 3, 4), (2, 16, 2, 4), (2, 16, 2, 4)]]
    order = zigzag(16, BLOCKS) if causal else np.arange(16)

    def ring(*arrays):
        made = ring_attention(*(x[:, order] for x in arrays), BLOCKS, causal, fused=fused)
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
        (gpt, lambda **ring: gpt.Config(1, 16, 2, seq=16, vocab=32, **ring)),
        (llama, lambda **ring: llama.Config(1, 16, 32, 4, 2, 4, seq=16, vocab=32, **ring)),
    ],
    ids=["gpt", "llama"],
)
def test_a_model_on_a_batch_in_zigzag_order_has_the_same_loss(model, config):
    order, words = zigzag(16, BLOCKS), RNG.integers(0, 32, (2, 4, 16), np.int32)
    plainly, ring = (
        model.program(config(**how), model.RULES["ring"], 4) for how in ({}, {"attend": "ring", "blocks": BLOCKS})
    )
    usual, permuted = (
        dict(zip(("inputs", "targets"), (md.named(w[:, at], "batch seq") for w in words), strict=True))
        for at in (np.arange(16), order)
    )
    state = start(plainly)
    expected, found = quick(lambda *state: (plainly.step(*state, usual)[2], ring.step(*state, permuted)[2]))(*state)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_sequence_that_does_not_divide_is_refused():
    with pytest.raises(md.ArgumentError, match=r"seq=100 does not divide into 16 chunks; the nearest is 96 or 112"):
        zigzag(100, 8)
