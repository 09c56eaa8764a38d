"""ViT in the DSL: one step is that of a plain JAX model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshdsl as md
from meshdsl.models import vit
from tests.models.test_gpt import block_by_hand, norm, plain
from tests.models.values import quick, same_step, start

CONFIG = vit.Config(layers=2, embed=16, heads=4, patch=4, image=8, classes=10)
IMAGES = np.random.default_rng(1).normal(size=(8, 8, 8, 3)).astype(np.float32)
LABELS = np.arange(8, dtype=np.int32) % 10
BATCH = {"images": md.named(IMAGES, "batch height width channels"), "labels": md.named(LABELS, "batch")}


def loss_by_hand(p, images, labels):
    kernel, bias = p["patches"]["kernel"], p["patches"]["bias"]
    made = jax.lax.conv_general_dilated(images, kernel, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    token = jnp.broadcast_to(p["token"], (8, 1, 16))
    x = jnp.concatenate([token, made.reshape(8, 4, 16) + bias], axis=1) + p["position"]
    for i in range(2):
        x = block_by_hand(x, jax.tree.map(lambda w: w[i], p["blocks"]["block"]), causal=False)
    logits = norm(x[:, 0], p["norm"]) @ p["head"]["kernel"] + p["head"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def test_a_step_is_that_of_the_plain_model():
    program = vit.program(CONFIG, vit.RULES["tensor"], batch=8)
    params, state = start(program)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))
    made = quick(program.step)(params, state, BATCH)
    same_step(made, plain(params), loss_by_hand, (IMAGES, LABELS), optimizer, plain)
