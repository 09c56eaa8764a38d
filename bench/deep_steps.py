"""Deep unrolled training steps that are more than one stack of equal layers, in plain JAX and as shapes.

Gradient accumulation over microbatches, an encoder and a decoder, low-rank adapters on frozen weights, and a recurrent
network over many time steps. The batch is pinned to ``data``; everything else is left to the planner.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from bench.unrolled import Params, cross_entropy, dot_product_attention, shape, split_heads, training_program
from meshdsl.api import Program

BATCH = {"batch/inputs": "data=S(0)", "batch/labels": "data=S(0)"}


def gradient_accumulation(layers: int = 12, microbatches: int = 8, width: int = 2048, batch: int = 512) -> Program:
    """Returns a transformer that uses its weights, and accumulates their gradients, in every unrolled microbatch."""
    block = {**_attention(width), **_mlp(width), "norm1": shape(width), "norm2": shape(width)}
    params = {"embed": shape(50304, width), "norm": shape(width), "layers": [block] * layers}
    adam = optax.adamw(1e-4)

    def loss(params: Params, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["embed"][tokens]
        for p in params["layers"]:
            x = _add_mlp(p, _attention_output(p, x, _rms_norm(x, p["norm1"])) + x)
        return cross_entropy(_rms_norm(x, params["norm"]) @ params["embed"].T, labels)

    def step(params: Params, state: Any, batch: Any) -> tuple[Params, Any, jax.Array]:
        parts = [jax.value_and_grad(loss)(params, batch["inputs"][i], batch["labels"][i]) for i in range(microbatches)]
        value, gradients = parts[0]
        for other_value, other_gradients in parts[1:]:
            value, gradients = value + other_value, jax.tree.map(jnp.add, gradients, other_gradients)
        updates, state = adam.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    tokens = jax.ShapeDtypeStruct((microbatches, batch // microbatches, 1024), jnp.int32)
    layouts = {"batch/inputs": "data=S(1)", "batch/labels": "data=S(1)"}
    return Program(step, (params, jax.eval_shape(adam.init, params), _batch(tokens, tokens)), layouts)


def encoder_decoder(layers: int = 24, width: int = 2048, batch: int = 512, length: int = 512) -> Program:
    """Returns an encoder and a decoder whose layers all attend to the encoder's output; Adafactor."""
    encoder = {**_attention(width), **_mlp(width), "norm1": shape(width), "norm2": shape(width)}
    decoder = {**encoder, "across": _attention(width), "norm3": shape(width)}
    params = {"embed": shape(32128, width), "norm": shape(width)}
    params |= {"encoder": [encoder] * layers, "decoder": [decoder] * layers}

    def loss(params: Params, batch: Any) -> jax.Array:
        x, y = params["embed"][batch["inputs"]], params["embed"][batch["labels"]]
        for p in params["encoder"]:
            x = _add_mlp(p, _attention_output(p, x, _rms_norm(x, p["norm1"]), causal=False) + x)
        for p in params["decoder"]:
            y = y + _attention_output(p, y, _rms_norm(y, p["norm1"]))
            y = _add_mlp(p, y + _attention_output(p["across"], _rms_norm(y, p["norm3"]), x, causal=False))
        return cross_entropy(_rms_norm(y, params["norm"]) @ params["embed"].T, batch["labels"])

    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return training_program(loss, optax.adafactor(1e-3), params, _batch(tokens, tokens), BATCH)


def low_rank_adapters(layers: int = 80, width: int = 8192, rank: int = 16, batch: int = 128) -> Program:
    """Returns low-rank adapters (LoRA, Hu et al. 2021) on frozen bfloat16 weights; layers are recomputed."""
    block = {**_attention(width), **_mlp(width, 28672), "norm1": shape(width), "norm2": shape(width)}
    ends = {"embed": shape(128256, width), "norm": shape(width), "head": shape(width, 128256)}
    frozen = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), {**ends, "layers": [block] * layers})
    one = {f"{name}_{side}": shape(*at) for name in "qv" for side, at in (("a", (width, rank)), ("b", (rank, width)))}

    def layer(p: Params, adapter: Params, x: jax.Array) -> jax.Array:
        delta = {name: (adapter[f"{name}_a"] @ adapter[f"{name}_b"]).astype(x.dtype) for name in "qv"}
        p = {**p, **{name: p[name] + w for name, w in delta.items()}}
        return _add_mlp(p, _attention_output(p, x, _rms_norm(x, p["norm1"])) + x)

    def loss(adapters: Params, batch: Any) -> jax.Array:
        frozen = batch["frozen"]
        x = frozen["embed"][batch["inputs"]]
        for p, adapter in zip(frozen["layers"], adapters, strict=True):
            x = jax.checkpoint(layer)(p, adapter, x)
        return cross_entropy(_rms_norm(x, frozen["norm"]) @ frozen["head"], batch["labels"])

    tokens = jax.ShapeDtypeStruct((batch, 4096), jnp.int32)
    return training_program(loss, optax.adam(1e-4), [one] * layers, {**_batch(tokens, tokens), "frozen": frozen}, BATCH)


def unrolled_lstm(steps: int = 200, width: int = 4096, batch: int = 2048) -> Program:
    """Returns an LSTM (Hochreiter and Schmidhuber 1997) over unrolled time steps, which all use the same weights."""
    params = {"w": shape(width, 4 * width), "u": shape(width, 4 * width), "b": shape(4 * width)}
    params["out"] = shape(width, 1024)

    def loss(params: Params, batch: Any) -> jax.Array:
        h = c = jnp.zeros((batch["inputs"].shape[0], width))
        for t in range(steps):
            gates = batch["inputs"][:, t] @ params["w"] + h @ params["u"] + params["b"]
            input_gate, forget_gate, cell, output_gate = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(forget_gate) * c + jax.nn.sigmoid(input_gate) * jnp.tanh(cell)
            h = jax.nn.sigmoid(output_gate) * jnp.tanh(c)
        return cross_entropy(h @ params["out"], batch["labels"])

    inputs, labels = shape(batch, steps, width), jax.ShapeDtypeStruct((batch,), jnp.int32)
    return training_program(loss, optax.adam(1e-3), params, _batch(inputs, labels), BATCH)


def _batch(inputs: jax.ShapeDtypeStruct, labels: jax.ShapeDtypeStruct) -> dict[str, jax.ShapeDtypeStruct]:
    return {"inputs": inputs, "labels": labels}


def _attention(width: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: shape(width, width) for name in ("q", "k", "v", "out")}


def _mlp(width: int, hidden: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    return {"up": shape(width, hidden or 4 * width), "down": shape(hidden or 4 * width, width)}


def _attention_output(p: Params, x: jax.Array, memory: jax.Array, causal: bool = True) -> jax.Array:
    """Returns multi-head attention of ``x`` to ``memory``, both ``[batch length width]``, with heads of 128."""
    q, k, v = (split_heads(y, y.shape[-1] // 128) for y in (x @ p["q"], memory @ p["k"], memory @ p["v"]))
    return dot_product_attention(q, k, v, causal).reshape(x.shape) @ p["out"]


def _add_mlp(p: Params, x: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(_rms_norm(x, p["norm2"]) @ p["up"]) @ p["down"]


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale
