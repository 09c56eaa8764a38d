"""Training steps of GPT-3 175B and Llama 3 405B with unrolled layers, in plain JAX and as shapes.

Sizes follow the papers (Brown et al. 2020, Dubey et al. 2024). Layers are recomputed in the backward pass, matmuls are
in bfloat16, and the optimizer is optax's AdamW. The batch is pinned to ``data``; the planner chooses everything else.
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
    """Returns GPT-3 175B: learned positions, biases, LayerNorm, GELU, embeddings tied to the logits."""
    width, words, length = 12288, 50304, 2048
    norm = {"scale": shape(width), "bias": shape(width)}
    attention = {name: shape(width, width) for name in ("q", "k", "v", "out")}
    mlp = {"up": shape(width, 4 * width), "up_bias": shape(4 * width), "down": shape(4 * width, width)}
    block = {"norm1": norm, **attention, "norm2": norm, **mlp, "down_bias": shape(width)}
    ends = {"embed": shape(words, width), "position": shape(length, width), "norm": norm}

    def logits(p: Params, tokens: jax.Array) -> jax.Array:
        x = p["embed"][tokens] + p["position"]
        for layer in p["layers"]:
            x = jax.checkpoint(_gpt_block)(layer, x)
        return _layer_norm(x, p["norm"]) @ p["embed"].T

    return _program(logits, {**ends, "layers": [block] * layers}, batch, length)


def llama3(layers: int = 126, batch: int = 256) -> Program:
    """Returns Llama 3 405B: rotary positions, 8 key-value heads for 128 query heads, RMSNorm, gated MLP."""
    width, hidden, words, length, head = 16384, 53248, 128256, 8192, 128
    matrices = {"q": (width, width), "k": (width, 8 * head), "v": (width, 8 * head), "out": (width, width)}
    matrices |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    block = {"norm1": shape(width), "norm2": shape(width), **{name: shape(*at) for name, at in matrices.items()}}
    ends = {"embed": shape(words, width), "norm": shape(width), "head": shape(width, words)}

    def logits(p: Params, tokens: jax.Array) -> jax.Array:
        x = p["embed"][tokens]
        for layer in p["layers"]:
            x = jax.checkpoint(_llama_block)(layer, x)
        return _rms_norm(x, p["norm"]) @ p["head"]

    return _program(logits, {**ends, "layers": [block] * layers}, batch, length)


def _program(logits: Callable[[Params, jax.Array], jax.Array], params: Params, batch: int, length: int) -> Program:
    def loss(params: Params, batch: jax.Array) -> jax.Array:
        scores = logits(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), batch)
        return cross_entropy(scores, jnp.roll(batch, -1, 1))

    return training_program(
        loss, ADAM, params, jax.ShapeDtypeStruct((batch, length), jnp.int32), {"batch": "data=S(0)"}
    )


def training_program(
    loss: Callable[[Params, Any], jax.Array],
    optimizer: optax.GradientTransformation,
    params: Params,
    batch: Any,
    layouts: dict[str, str],
) -> Program:
    """Returns the program of ``step(params, state, batch) -> (params, state, loss)``, as shapes."""

    def step(params: Params, state: Any, batch: Any) -> tuple[Params, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return Program(step, (params, jax.eval_shape(optimizer.init, params), batch), layouts)


def _gpt_block(p: Params, x: jax.Array) -> jax.Array:
    h = _layer_norm(x, p["norm1"])
    q, k, v = (split_heads(h @ p[name], 96) for name in ("q", "k", "v"))
    x = x + dot_product_attention(q, k, v).reshape(h.shape) @ p["out"]
    h = _layer_norm(x, p["norm2"])
    return x + jax.nn.gelu(h @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]


def _llama_block(p: Params, x: jax.Array) -> jax.Array:
    h = _rms_norm(x, p["norm1"])
    q, k, v = (split_heads(h @ p[name], n) for name, n in (("q", 128), ("k", 8), ("v", 8)))
    q, k, v = _rotary(q), jnp.repeat(_rotary(k), 16, 2), jnp.repeat(v, 16, 2)
    x = x + dot_product_attention(q, k, v).reshape(h.shape) @ p["out"]
    h = _rms_norm(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def dot_product_attention(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = True) -> jax.Array:
    """Returns softmax attention with float32 weights; all arrays are ``[batch length heads head]``."""
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    weights = jax.nn.softmax(scores.astype(jnp.float32))
    return jnp.einsum("bhst,bthd->bshd", weights.astype(v.dtype), v)


def split_heads(x: jax.Array, count: int) -> jax.Array:
    """Reshapes ``[batch length width]`` to ``[batch length count head]``."""
    return x.reshape(*x.shape[:2], count, -1)


def _rotary(x: jax.Array) -> jax.Array:
    """Applies rotary position embeddings (Su et al. 2021)."""
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


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean over all tokens, in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def shape(*lengths: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of a float32 array."""
    return jax.ShapeDtypeStruct(lengths, jnp.float32)
