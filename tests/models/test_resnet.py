"""ResNet in the DSL: one step is that of a plain JAX model, running statistics included."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshdsl as md
from meshdsl.models import resnet
from tests.models.test_gpt import plain
from tests.models.values import filled, quick, same_step

CONFIG = resnet.Config((2, 1), wide=2, base=4, image=16, classes=4)
IMAGES = np.random.default_rng(1).normal(size=(8, 16, 16, 3)).astype(np.float32)
LABELS = np.arange(8, dtype=np.int32) % 4
BATCH = {"images": md.named(IMAGES, "batch height width channels"), "labels": md.named(LABELS, "batch")}


def convolved(x, p, stride):
    """The convolution with its batch norm, and the statistics that it found."""
    kernel = p["kernel"]
    x = jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / jnp.sqrt(var + 1e-5) * p["norm"]["scale"] + p["norm"]["bias"], {"mean": mean, "var": var}


def block(x, p, stride=1):
    y, less = convolved(x, p["less"], 1)
    y, over = convolved(jax.nn.relu(y), p["over"], stride)
    y, more = convolved(jax.nn.relu(y), p["more"], 1)
    found = {"less": less, "over": over, "more": more}
    if "across" in p:
        x, found["across"] = convolved(x, p["across"], stride)
    return jax.nn.relu(x + y), {name: {"norm": now} for name, now in found.items()}


def by_hand(p, images, labels):
    x, stem = convolved(images, p["stem"], 2)
    x = jax.lax.reduce_window(jax.nn.relu(x), -np.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    first, second = p["stages"].values()
    x, one = block(x, first["first"])
    x, two = block(x, jax.tree.map(lambda w: w[0], first["rest"]["block"]))
    x, three = block(x, second["first"], stride=2)
    logits = x.mean((1, 2)) @ p["head"] + p["bias"]
    stages = [{"first": one, "rest": {"block": jax.tree.map(lambda s: s[None], two)}}, {"first": three}]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, {"stem": {"norm": stem}, "stages": dict(zip(p["stages"], stages))}


def test_a_step_is_that_of_the_plain_model():
    program = resnet.program(CONFIG, resnet.RULES["data"], batch=8)
    params, statistics = map(filled, program.args[:2])
    momentum = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), program.args[2])
    made = quick(program.step)(params, statistics, momentum, BATCH)
    optimizer = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9))
    arrays, before = (IMAGES, LABELS), plain(params)
    same_step((made[0], *made[2:]), before, lambda *args: by_hand(*args)[0], arrays, optimizer, plain)
    found = quick(partial(by_hand, before))(*arrays)[1]
    want = jax.tree.map(lambda old, now: 0.9 * old + 0.1 * now, plain(statistics), found)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), plain(made[1]), want)
