"""Training steps to take in microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

LAYERS, WIDTH, WORDS, SEQ = 4, 16, 32, 8


def language(batch=16, width=WIDTH, layers=LAYERS, dtype=np.float32):
    """Parameters with tied embeddings and a batch of tokens."""
    rng = np.random.default_rng(0)
    made = {
        "embed": rng.normal(size=(WORDS, width)),
        "layers": {
            "up": rng.normal(size=(layers, width, 2 * width)) / 4,
            "down": rng.normal(size=(layers, 2 * width, width)) / 6,
        },
        "scale": np.ones(width),
    }
    tokens = {name: rng.integers(0, WORDS, (batch, SEQ), dtype=np.int32) for name in ("inputs", "targets")}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), made), jax.tree.map(jnp.asarray, tokens)


def language_loss(params, batch, key, balance=0.0):
    """Cross entropy of a decoder of layers in a scan, with dropout; a balance loss is a product of means."""
    x = params["embed"][batch["inputs"]]
    mask = jnp.tril(jnp.ones((SEQ, SEQ), bool))

    def layer(carry, given):
        x, load = carry
        weights, key = given
        scores = jnp.where(mask, jnp.einsum("bse,bte->bst", x, x), -1e30)
        x = x + jnp.einsum("bst,bte->bse", jax.nn.softmax(scores / 4), x)
        hidden = jax.nn.gelu(x @ weights["up"])
        kept = jax.random.bernoulli(key, 0.9, hidden.shape)
        chosen = jax.nn.softmax(hidden[..., :4])
        load = load + jnp.sum(chosen.mean((0, 1)) * jnp.square(chosen).mean((0, 1)))
        x = x + jnp.where(kept, hidden / 0.9, 0) @ weights["down"]
        return (x * params["scale"], load if balance else carry[1]), None

    start = x, jnp.zeros((), x.dtype)
    (x, load), _ = jax.lax.scan(
        layer, start, (params["layers"], jax.random.split(key, params["layers"]["up"].shape[0]))
    )
    logits = x @ params["embed"].T
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)
    return -chosen.mean() + balance * load


OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def language_step(params, state, key, batch):
    """A training step with clipping and AdamW; the key is handed on."""
    key, mine = jax.random.split(key)
    loss, gradient = jax.value_and_grad(language_loss)(params, batch, mine)
    updates, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, key, loss


def normalised(params, batch):
    """Gradients of a net with batch statistics, and those statistics."""

    def loss(params):
        hidden = batch["x"] @ params["w"]
        mean, var = hidden.mean(0), hidden.var(0)
        made = jax.nn.relu((hidden - mean) * jax.lax.rsqrt(var + 1e-5)) @ params["v"]
        return jnp.mean((made - batch["y"]) ** 2), (mean, var)

    return jax.grad(loss, has_aux=True)(params)
