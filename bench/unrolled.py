"""Training steps of GPT-3 175B and Llama 3 405B with every layer written out, in plain JAX and as shapes.

Their sizes are those of the papers (Brown et al. 2020, Dubey et al. 2024). Layers are recomputed in the backward pass,
products are in bfloat16, AdamW is optax's. The batch is split over data, everything else is left to the planner.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from meshdsl.api import Program

Params = dict[str, Any]
ADAM = optax.adamw(1e-4)


def gpt3(layers: int = 96, batch: int = 1536) -> Program:
    """GPT-3 175B: learned positions, biases, LayerNorm, GELU, embeddings tied to the logits."""
    width, words, length = 12288, 50304, 2048
    norm = {"scale": _shape(width), "bias": _shape(width)}
    attention = {name: _shape(width, width) for name in ("q", "k", "v", "out")}
    mlp = {"up": _shape(width, 4 * width), "up_bias": _shape(4 * width), "down": _shape(4 * width, width)}
    block = {"norm1": norm, **attention, "norm2": norm, **mlp, "down_bias": _shape(width)}
    ends = {"embed": _shape(words, width), "position": _shape(length, width), "norm": norm}

    def logits(p: Params, tokens: jax.Array) -> jax.Array:
        x = p["embed"][tokens] + p["position"]
        for layer in p["layers"]:
            x = jax.checkpoint(_gpt_block)(layer, x)
        return _layer_norm(x, p["norm"]) @ p["embed"].T

    return _program(logits, {**ends, "layers": [block] * layers}, batch, length)


def llama3(layers: int = 126, batch: int = 256) -> Program:
    """Llama 3 405B: rotary positions, 8 heads of keys and values for 128 of queries, RMSNorm, gated MLP."""
    width, hidden, words, length, head = 16384, 53248, 128256, 8192, 128
    matrices = {"q": (width, width), "k": (width, 8 * head), "v": (width, 8 * head), "out": (width, width)}
    matrices |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    block = {"norm1": _shape(width), "norm2": _shape(width), **{name: _shape(*at) for name, at in matrices.items()}}
    ends = {"embed": _shape(words, width), "norm": _shape(width), "head": _shape(width, words)}

    def logits(p: Params, tokens: jax.Array) -> jax.Array:
        x = p["embed"][tokens]
        for layer in p["layers"]:
            x = jax.checkpoint(_llama_block)(layer, x)
        return _rms_norm(x, p["norm"]) @ p["head"]

    return _program(logits, {**ends, "layers": [block] * layers}, batch, length)


def _program(logits: Callable[[Params, jax.Array], jax.Array], params: Params, batch: int, length: int) -> Program:
    def step(params: Params, state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
        def loss(params: Params) -> jax.Array:
            made = logits(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), tokens).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(made, jnp.roll(tokens, -1, 1)).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = ADAM.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return Program(step, (params, jax.eval_shape(ADAM.init, params), tokens), {"tokens": "data=S(0)"})


def _gpt_block(p: Params, x: jax.Array) -> jax.Array:
    h = _layer_norm(x, p["norm1"])
    q, k, v = (_heads(h @ p[name], 96) for name in ("q", "k", "v"))
    x = x + _attended(q, k, v).reshape(h.shape) @ p["out"]
    h = _layer_norm(x, p["norm2"])
    return x + jax.nn.gelu(h @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]


def _llama_block(p: Params, x: jax.Array) -> jax.Array:
    h = _rms_norm(x, p["norm1"])
    q, k, v = (_heads(h @ p[name], n) for name, n in (("q", 128), ("k", 8), ("v", 8)))
    q, k, v = _rotated(q), jnp.repeat(_rotated(k), 16, 2), jnp.repeat(v, 16, 2)
    x = x + _attended(q, k, v).reshape(h.shape) @ p["out"]
    h = _rms_norm(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def _attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9).astype(jnp.float32))
    return jnp.einsum("bhst,bthd->bshd", weights.astype(v.dtype), v)


def _heads(x: jax.Array, count: int) -> jax.Array:
    return x.reshape(*x.shape[:2], count, -1)


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions (Su et al. 2021)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] / 500_000 ** (jnp.arange(half) / half)
    cos, sin = (f(angle)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _layer_norm(x: jax.Array, p: Params) -> jax.Array:
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * p["scale"] + p["bias"]


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def _shape(*lengths: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(lengths, jnp.float32)
