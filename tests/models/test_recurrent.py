"""Mamba in the DSL: one step is that of a plain JAX model, position by position."""

import jax
import jax.numpy as jnp
import optax

import meshdsl as md
from meshdsl import models
from meshdsl.models import recurrent
from tests.models.test_gpt import plain
from tests.models.test_llama import BATCH, norm
from tests.models.values import quick, same_step, start

CONFIG = recurrent.Config(layers=2, embed=16, state=4, vocab=64, remat="all")


def convolution(x, p):
    x = jnp.pad(x, ((0, 0), (CONFIG.width - 1, 0), (0, 0)))
    seq = x.shape[1] - CONFIG.width + 1
    return sum(x[:, i : i + seq] * p["kernel"][i] for i in range(CONFIG.width)) + p["bias"]


def recurrence(x, p):
    step = jax.nn.softplus(x @ p["short"]["kernel"] @ p["step"]["kernel"] + p["step"]["bias"])
    write, read = x @ p["write"]["kernel"], x @ p["read"]["kernel"]
    state, made = jnp.zeros((x.shape[0], x.shape[2], CONFIG.state)), []
    for t in range(x.shape[1]):
        kept = jnp.exp(-step[:, t, :, None] * jnp.exp(p["decay"])) * state
        state = kept + (step[:, t] * x[:, t])[:, :, None] * write[:, t, None]
        made.append(jnp.einsum("bin,bn->bi", state, read[:, t]))
    return jnp.stack(made, axis=1) + x * p["skip"]


def loss_by_hand(p, inputs, targets):
    x = p["embed"][inputs]
    for i in range(CONFIG.layers):
        layer = jax.tree.map(lambda w: w[i], p["blocks"]["block"])
        y = norm(x, layer["norm"])
        made = recurrence(
            jax.nn.silu(convolution(y @ layer["up"]["kernel"], layer["convolution"])), layer["recurrence"]
        )
        x = x + (made * jax.nn.silu(y @ layer["gate"]["kernel"])) @ layer["down"]["kernel"]
    logits = norm(x, p["norm"]) @ p["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def test_a_step_is_that_of_the_plain_model():
    program = recurrent.program(CONFIG, recurrent.RULES["tensor"], batch=8, seq=8)
    params, state = start(program)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(6e-4, b2=0.95, weight_decay=0.1))
    arrays = (BATCH["inputs"].array, BATCH["targets"].array)
    made = quick(program.step)(params, state, BATCH)
    same_step(made, plain(params), loss_by_hand, arrays, optimizer, plain)


def test_channels_that_are_split_exchange_nothing_along_the_sequence():
    program = models.build("mamba-130m", "tensor", batch=8)
    mesh = md.Mesh(data=8, model=8, topology=md.topology("dgx-h100"))
    plan = md.parallelize(program.step, mesh, rules=program.rules).plan(*program.args)
    assert {c.trips for c in plan.collectives} == {1, recurrent.CONFIGS["mamba-130m"].layers}
