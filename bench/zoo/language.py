"""Language models: transformers, flax and haiku."""

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
    """A decoder with dropout."""
    config = GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    model = FlaxGPT2LMHeadModel(config, seed=1)

    def loss(params, batch):
        made = model(batch["text"][:, :-1], params=params, dropout_rng=jax.random.key(2), train=True)
        return cross_entropy(made.logits, batch["text"][:, 1:])

    return Case(loss, model.params, {"text": ids(0, WORDS, 16, 33)})


def bart() -> Case:
    """An encoder and a decoder that looks at it; padding is masked on both sides."""
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(vocab_size=WORDS, d_model=64, max_position_embeddings=64, **sizes, **heads)
    model = FlaxBartForConditionalGeneration(config, seed=1)

    def loss(params, batch):
        given = {"attention_mask": batch["kept"], "decoder_input_ids": batch["target"][:, :-1]}
        made = model(batch["source"], **given, params=params, dropout_rng=jax.random.key(3), train=True).logits
        labels = batch["target"][:, 1:]
        counted = labels != config.pad_token_id
        lost = jax.nn.logsumexp(made, -1) - jnp.take_along_axis(made, labels[..., None], -1)[..., 0]
        return jnp.where(counted, lost, 0).sum() / counted.sum()

    source = ids(0, WORDS, 16, 24)
    target = jnp.where(jnp.arange(17) < 14, ids(1, WORDS, 16, 17), config.pad_token_id)
    return Case(loss, model.params, {"source": source, "kept": (source % 9 > 0).astype(jnp.int32), "target": target})


def mamba2() -> Case:
    """A state-space model: chunks, running sums, convolutions of one channel each."""
    sizes = {"hidden_size": 64, "state_size": 16, "head_dim": 16, "chunk_size": 16, "num_hidden_layers": 2}
    model = Mamba2ForCausalLM(Mamba2Config(vocab_size=WORDS, **sizes), rngs=nnx.Rngs(1))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, batch):
        whole = nnx.merge(graph, nnx.State(params), rest)
        return whole(batch["text"], labels=batch["text"])["loss"]

    return Case(loss, nnx.to_pure_dict(params), {"text": ids(0, WORDS, 16, 48)})


def mixture() -> Case:
    """Experts, of which a router picks two for every token, and a loss that balances them."""
    sizes = {"n_layers": 1, "n_heads": 4, "d_model": 64, "d_ff": 128, "n_experts": 8, "top_k": 2, "block_size": 32}
    model = NanoMoE(NanoMoEConfig(vocab_size=WORDS, **sizes))
    text = ids(0, WORDS, 16, 33)

    def loss(params, batch):
        keys = {"dropout": jax.random.key(4)}
        made, balance = model.apply(params, batch["text"][:, :-1], deterministic=False, rngs=keys)
        return cross_entropy(made, batch["text"][:, 1:]) + 0.02 * balance

    return Case(loss, jax.jit(model.init)(jax.random.key(1), text[:, :-1]), {"text": text})


def recurrent() -> Case:
    """Two recurrent layers over time, which is the first dim; the last state is classified."""

    def net(series):
        core = hk.DeepRNN([hk.LSTM(64), jax.nn.tanh, hk.GRU(64)])
        made, _ = hk.dynamic_unroll(core, series, core.initial_state(series.shape[1]))
        return hk.Linear(8)(made[-1])

    model = hk.without_apply_rng(hk.transform(net))
    series = floats(0, 24, 16, 32)

    def loss(params, batch):
        return cross_entropy(model.apply(params, batch["series"]), batch["kind"][0])

    return Case(loss, model.init(jax.random.key(1), series), {"series": series, "kind": ids(1, 8, 1, 16)}, dim=1)
