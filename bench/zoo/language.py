"""Language models of transformers, flax and haiku."""

import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx
from mamba2_jax.modeling import Mamba2Config, Mamba2ForCausalLM
from nano_moe.config import NanoMoEConfig
from nano_moe.model import NanoMoE
from transformers import BartConfig, FlaxBartForConditionalGeneration, FlaxGPT2LMHeadModel, GPT2Config

from bench.zoo.case import Case, cross_entropy, floats, ids

WORDS = 512


def gpt2() -> Case:
    """GPT-2 (transformers): a decoder with dropout."""
    config = GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    model = FlaxGPT2LMHeadModel(config, seed=1)

    def loss(params, batch):
        output = model(batch["text"][:, :-1], params=params, dropout_rng=jax.random.key(2), train=True)
        return cross_entropy(output.logits, batch["text"][:, 1:])

    return Case(loss, model.params, {"text": ids(0, WORDS, 16, 33)})


def bart() -> Case:
    """BART (transformers): an encoder and a decoder with cross-attention; padding is masked on both sides."""
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(vocab_size=WORDS, d_model=64, max_position_embeddings=64, **sizes, **heads)
    model = FlaxBartForConditionalGeneration(config, seed=1)

    def loss(params, batch):
        inputs = {"attention_mask": batch["kept"], "decoder_input_ids": batch["target"][:, :-1]}
        logits = model(batch["source"], **inputs, params=params, dropout_rng=jax.random.key(3), train=True).logits
        labels = batch["target"][:, 1:]
        valid = labels != config.pad_token_id
        losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return jnp.where(valid, losses, 0).sum() / valid.sum()

    source = ids(0, WORDS, 16, 24)
    target = jnp.where(jnp.arange(17) < 14, ids(1, WORDS, 16, 17), config.pad_token_id)
    return Case(loss, model.params, {"source": source, "kept": (source % 9 > 0).astype(jnp.int32), "target": target})


def mamba2() -> Case:
    """Mamba 2 (mamba2_jax): a state-space model with chunks, cumulative sums and depthwise convolutions."""
    sizes = {"hidden_size": 64, "state_size": 16, "head_dim": 16, "chunk_size": 16, "num_hidden_layers": 2}
    model = Mamba2ForCausalLM(Mamba2Config(vocab_size=WORDS, **sizes), rngs=nnx.Rngs(1))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, batch):
        model = nnx.merge(graph, nnx.State(params), rest)
        return model(batch["text"], labels=batch["text"])["loss"]

    return Case(loss, nnx.to_pure_dict(params), {"text": ids(0, WORDS, 16, 48)})


def mixture() -> Case:
    """A mixture of experts (nano_moe) with top-2 routing and a load-balancing loss."""
    sizes = {"n_layers": 1, "n_heads": 4, "d_model": 64, "d_ff": 128, "n_experts": 8, "top_k": 2, "block_size": 32}
    model = NanoMoE(NanoMoEConfig(vocab_size=WORDS, **sizes))
    text = ids(0, WORDS, 16, 33)

    def loss(params, batch):
        keys = {"dropout": jax.random.key(4)}
        logits, balance = model.apply(params, batch["text"][:, :-1], deterministic=False, rngs=keys)
        return cross_entropy(logits, batch["text"][:, 1:]) + 0.02 * balance

    return Case(loss, jax.jit(model.init)(jax.random.key(1), text[:, :-1]), {"text": text})


def recurrent() -> Case:
    """An LSTM and a GRU (haiku) over time, the first dim; a classifier on the last output."""

    def net(series):
        core = hk.DeepRNN([hk.LSTM(64), jax.nn.tanh, hk.GRU(64)])
        outputs, _ = hk.dynamic_unroll(core, series, core.initial_state(series.shape[1]))
        return hk.Linear(8)(outputs[-1])

    model = hk.without_apply_rng(hk.transform(net))
    series = floats(0, 24, 16, 32)

    def loss(params, batch):
        return cross_entropy(model.apply(params, batch["series"]), batch["kind"][0])

    return Case(loss, model.init(jax.random.key(1), series), {"series": series, "kind": ids(1, 8, 1, 16)}, dim=1)
