"""T5: an encoder and a decoder with relative positions, RMS norm and no biases.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020), sections
2.1 and 3.7; without dropout.

    source tokens [batch source] -> encoder -> memory [batch source embed]
    target tokens [batch seq], memory -> decoder -> logits [batch seq vocab]

Attention scores are not scaled; instead they get a learned bias by relative position, one number per head and bucket of
distances, shared by all layers.

Dims: ``seq`` for query positions, ``key`` for attended positions; ``hidden`` of the perceptron.
"""

from dataclasses import dataclass
from math import log
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import meshdsl as md
from meshdsl.models.layers import Matrix, RMSNorm
from meshdsl.models.training import adamw, flax_program, standard_strategies, token_batch

BUCKETS, FARTHEST, VOCABULARY = 32, 128, 32128

RULES = standard_strategies("heads:model hidden:model")


@dataclass(frozen=True)
class Config:
    """Sizes of one model; encoder and decoder have ``layers`` layers each.

    Args:
      remat: what the backward pass recomputes, see ``md.remat``.
      keep: names of values that are stored, see ``models.layers``.
    """

    layers: int
    embed: int
    hidden: int
    heads: int
    head: int = 64
    vocab: int = VOCABULARY
    remat: str = "none"
    keep: str = ""

    @property
    def dims(self) -> md.Dims:
        """Sizes by dim."""
        return md.dims(
            f"layers={self.layers} embed={self.embed} hidden={self.hidden} heads={self.heads} head={self.head} "
            f"buckets={BUCKETS} vocab={self.vocab}"
        )


CONFIGS = {
    "t5-small": Config(6, 512, 2048, 8),
    "t5-base": Config(12, 768, 3072, 12),
    "t5-large": Config(24, 1024, 4096, 16),
    "t5-3b": Config(24, 1024, 16384, 32, head=128),
    "t5-11b": Config(24, 1024, 65536, 128, head=128),
}


class Attention(nnx.Module):
    """Pre-norm residual attention of ``[batch seq embed]`` to ``[batch key embed]``."""

    def __init__(self, sizes: md.Dims, rngs: nnx.Rngs) -> None:
        small = (sizes["embed"] * sizes["head"]) ** -0.5  # replaces the scaling of scores
        self.norm = RMSNorm(sizes)
        self.query = Matrix(sizes, "embed", "heads head", rngs, small)
        self.key, self.value = (Matrix(sizes, "embed", "heads head", rngs) for _ in range(2))
        self.out = Matrix(sizes, "heads head", "embed", rngs)

    def __call__(self, x: md.Tensor, bias: Any, seen: Any = None) -> md.Tensor:
        """Returns ``x`` plus its attention to ``seen`` (default: to itself); ``bias`` is added to the scores."""
        query = self.norm(x)
        other = md.rename(query, seq="key") if seen is None else seen
        query, key = md.keep(self.query(query), "query_proj"), md.keep(self.key(other), "key_proj")
        weights = md.softmax(md.dot(query, key, over="head") + bias, over="key")
        context = md.keep(md.dot(weights, md.keep(self.value(other), "value_proj"), over="key"), "context")
        return x + md.keep(self.out(context), "out_proj")


class Perceptron(nnx.Module):
    """A pre-norm residual ReLU perceptron."""

    def __init__(self, sizes: md.Dims, rngs: nnx.Rngs) -> None:
        self.norm = RMSNorm(sizes)
        self.up, self.down = Matrix(sizes, "embed", "hidden", rngs), Matrix(sizes, "hidden", "embed", rngs)

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Returns ``x`` after the block."""
        hidden = md.relu(md.keep(self.up(self.norm(x)), "mlpwi"))
        return x + md.keep(self.down(hidden), "mlpwo")


class EncoderBlock(nnx.Module):
    """Self-attention and a perceptron."""

    def __init__(self, sizes: md.Dims, rngs: nnx.Rngs) -> None:
        self.itself, self.mlp = Attention(sizes, rngs), Perceptron(sizes, rngs)

    def __call__(self, x: md.Tensor, bias: md.Tensor) -> md.Tensor:
        """Returns ``x`` after the block."""
        return self.mlp(self.itself(x, bias))


class DecoderBlock(nnx.Module):
    """Self-attention, cross-attention to the encoder's output, and a perceptron."""

    def __init__(self, sizes: md.Dims, rngs: nnx.Rngs) -> None:
        self.itself, self.other = Attention(sizes, rngs), Attention(sizes, rngs)
        self.mlp = Perceptron(sizes, rngs)

    def __call__(self, x: md.Tensor, bias: md.Tensor, seen: md.Tensor) -> md.Tensor:
        """Returns ``x`` after the block."""
        return self.mlp(self.other(self.itself(x, bias), 0.0, seen))


class RelativeBias(nnx.Module):
    """The bias of attention scores by relative position, ``[heads seq key]``."""

    def __init__(self, sizes: md.Dims, both_ways: bool, rngs: nnx.Rngs) -> None:
        self.both_ways = both_ways
        self.table = nnx.Param(md.normal(rngs.params(), sizes("heads buckets"), sizes["embed"] ** -0.5))

    def __call__(self, dims: md.Dims) -> md.Tensor:
        """Returns the bias for the size of ``seq``; without ``both_ways``, later positions are masked."""
        seq, key = md.arange(dims), md.rename(md.arange(dims), seq="key")
        bias = md.take(self.table, distance_bucket(key - seq, self.both_ways), over="buckets")
        return bias if self.both_ways else md.where(key <= seq, bias, -1e9)


class T5(nnx.Module):
    """The model, with the sizes of ``Config.dims``."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        sizes = config.dims
        self.embed = nnx.Param(md.normal(rngs.params(), sizes("vocab embed")))
        self.around, self.before = RelativeBias(sizes, True, rngs), RelativeBias(sizes, False, rngs)
        layers, remat, keep = sizes("layers"), config.remat, config.keep
        self.encoder = md.stack(lambda rngs: EncoderBlock(sizes, rngs), layers, rngs, remat, keep)
        self.decoder = md.stack(lambda rngs: DecoderBlock(sizes, rngs), layers, rngs, remat, keep)
        self.norm1, self.norm2 = RMSNorm(sizes), RMSNorm(sizes)

    def __call__(self, batch: dict[str, md.Tensor]) -> md.Tensor:
        """Returns logits ``[batch seq vocab]`` for ``inputs [batch seq]``, given ``source [batch source]``."""
        source, inputs = md.rename(batch["source"], source="seq"), batch["inputs"]
        x = md.take(self.embed, source, over="vocab")
        seen = md.rename(self.norm1(self.encoder(x, self.around(source.shape("seq")))), seq="key")
        x = md.take(self.embed, inputs, over="vocab")
        x = self.norm2(self.decoder(x, self.before(inputs.shape("seq")), seen))
        return md.dot(x * x.shape["embed"] ** -0.5, self.embed, over="embed")


def distance_bucket(distance: md.Tensor, both_ways: bool) -> md.Tensor:
    """Returns the bucket of a distance: half of the buckets hold one distance each, the others grow up to ``FARTHEST``.

    Args:
      distance: attended minus query position.
      both_ways: whether half of all buckets are for later positions, which otherwise share the bucket of distance 0.
    """
    count = BUCKETS // 2 if both_ways else BUCKETS
    far = abs(distance) if both_ways else md.maximum(-distance, 0)
    near, ratio = count // 2, md.maximum(far, 1).astype(jnp.float32) / (count // 2)
    wide = near + (md.log(ratio) * ((count - near) / log(FARTHEST / near))).astype(jnp.int32)
    bucket = md.where(far < near, far, md.minimum(wide, count - 1))
    return bucket + (distance > 0) * count if both_ways else bucket


def loss(model: T5, batch: dict[str, md.Tensor]) -> md.Tensor:
    """Returns the mean cross-entropy of the target tokens."""
    return md.mean(md.cross_entropy(model(batch), batch["targets"], over="vocab"))


def program(
    config: Config | str, rules: md.Rules | str, batch: int = 128, source: int = 512, seq: int = 114
) -> md.Program:
    """Returns a training step with AdamW in place of Adafactor, as shapes: ``step(params, opt_state, batch)``.

    Args:
      config: a name in ``CONFIGS``, or a ``Config``.
      rules: layout rules, such as one of ``RULES``.
      batch: pairs of sequences per step.
      source: source tokens per pair.
      seq: target tokens per pair; span corruption of 512 source tokens yields 114.
    """
    sizes = CONFIGS[config] if isinstance(config, str) else config
    words = md.named(jax.ShapeDtypeStruct((batch, source), jnp.int32), "batch source")
    shapes = token_batch(batch, seq) | {"source": words}
    return flax_program(lambda rngs: T5(sizes, rngs), loss, shapes, rules, adamw(1e-3))
