"""Llama 3: decoders with RMS norm, rotary positions, grouped-query attention, a gated perceptron and an untied head.

Grattafiori et al., "The Llama 3 Herd of Models" (2024), table 3; with 128,256 words and rotary base 500,000.

    tokens [batch seq] -> x [batch seq embed]
    block by block: x + attention(norm(x)), x + mlp(norm(x))
    x -> logits [batch seq vocab]

Dims: ``heads`` of keys and values, ``queries`` per key-value head, ``head`` for the elements of one head; ``hidden`` of
the perceptron; ``key`` for the attended positions of ``seq``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flax import nnx

import meshdsl as md
from meshdsl.models.attention import attention, zigzag_blocks
from meshdsl.models.layers import Matrix, RMSNorm, rotary
from meshdsl.models.training import Strategies, adamw, flax_program, next_token_loss, standard_strategies, token_batch

RULES: Strategies = standard_strategies("heads:model hidden:model") | {
    "fsdp+tensor": md.Rules(
        "batch:data heads:model hidden:model vocab:model", params="embed:data", optimizer="embed:data"
    ),
    "sequence": "batch:data seq:model",
    "ring": md.Rules("batch:data", activations="batch:data seq:model"),
}


@dataclass(frozen=True)
class Config:
    """Sizes of one model.

    Args:
      heads: query heads.
      groups: key-value heads; each is shared by ``heads // groups`` query heads.
      theta: base of the rotary wavelengths.
      rate: learning rate.
      gated: whether the perceptron is gated (SwiGLU); else it uses squared ReLU (So et al. 2021).
      remat: what the backward pass recomputes, see ``md.remat``.
      keep: names of values that are stored, see ``models.layers``.
      dtype: compute dtype; parameters are float32.
      attend: attention variant, one of ``models.attention.VARIANTS``.
      blocks: of a ring; with ``"ring"`` and ``"fused_ring"``, batches must be permuted by
        ``zigzag_batch(batch, blocks)``.
      products: of the blocks' activations and weights, one of ``models.fp8.VARIANTS``; those of attention, of the
        embedding and of the logits are plain.
    """

    layers: int
    embed: int
    hidden: int
    heads: int
    groups: int
    head: int = 128
    seq: int = 8192
    vocab: int = 128256
    theta: float = 5e5
    rate: float = 3e-4
    remat: str = "none"
    dtype: str = "float32"
    attend: str = "products"
    gated: bool = True
    blocks: int = 1
    keep: str = ""
    products: str = "plain"

    @property
    def dims(self) -> md.Dims:
        """Sizes by dim."""
        return md.dims(
            f"layers={self.layers} embed={self.embed} hidden={self.hidden} heads={self.groups} "
            f"queries={self.heads // self.groups} head={self.head} seq={self.seq} vocab={self.vocab}"
        )


CONFIGS = {
    "llama3-8b": Config(32, 4096, 14336, 32, 8, remat="all"),
    "llama3-70b": Config(80, 8192, 28672, 64, 8, rate=1.5e-4, remat="all"),
    "llama3-405b": Config(126, 16384, 53248, 128, 8, rate=8e-5, remat="all"),
}


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, ``[batch seq embed]`` to the same."""

    def __init__(
        self,
        sizes: md.Dims,
        theta: float,
        rngs: nnx.Rngs,
        attend: str = "products",
        blocks: int = 1,
        products: str = "plain",
    ) -> None:
        self.theta, self.attend, self.blocks = theta, attend, blocks
        self.query = Matrix(sizes, "embed", "heads queries head", rngs, products=products)
        self.key, self.value = (Matrix(sizes, "embed", "heads head", rngs, products=products) for _ in range(2))
        self.out = Matrix(sizes, "heads queries head", "embed", rngs, products=products)

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Returns the attention output."""
        query, key = md.keep(self.query(x), "query_proj"), md.keep(self.key(x), "key_proj")
        blocks = zigzag_blocks(self.attend, self.blocks)
        query, key = (rotary(x, self.theta, blocks) for x in (query, key))
        value = md.keep(self.value(x), "value_proj")
        context = attention(query, key, value, variant=self.attend, blocks=self.blocks)
        return md.keep(self.out(md.keep(context, "context")), "out_proj")


class Perceptron(nnx.Module):
    """A SwiGLU perceptron (Shazeer 2020), or one with squared ReLU."""

    def __init__(self, sizes: md.Dims, rngs: nnx.Rngs, gated: bool = True, products: str = "plain") -> None:
        self.gate = Matrix(sizes, "embed", "hidden", rngs, products=products) if gated else None
        self.up = Matrix(sizes, "embed", "hidden", rngs, products=products)
        self.down = Matrix(sizes, "hidden", "embed", rngs, products=products)

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Applies the perceptron over ``embed``; other dims are arbitrary."""
        if self.gate is None:
            return md.keep(self.down(md.square(md.relu(md.keep(self.up(x), "mlpwi")))), "mlpwo")
        up = md.keep(self.up(x), "mlpwi_1")
        return md.keep(self.down(md.silu(md.keep(self.gate(x), "mlpwi_0")) * up), "mlpwo")


class Block(nnx.Module):
    """A pre-norm block of attention and perceptron."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        sizes = config.dims
        self.norm1, self.norm2 = RMSNorm(sizes), RMSNorm(sizes)
        self.attention = Attention(sizes, config.theta, rngs, config.attend, config.blocks, config.products)
        self.mlp = Perceptron(sizes, rngs, config.gated, config.products)

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Returns ``x`` after the block."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nnx.Module):
    """The model."""

    def __init__(self, config: Config, rngs: nnx.Rngs, block: Callable[[Any, nnx.Rngs], nnx.Module] = Block) -> None:
        sizes = config.dims
        self.embed = nnx.Param(md.normal(rngs.params(), sizes("vocab embed"), std=0.02))
        self.blocks = md.stack(lambda rngs: block(config, rngs), sizes("layers"), rngs, config.remat, config.keep)
        self.norm, self.head = RMSNorm(sizes), Matrix(sizes, "embed", "vocab", rngs)

    def __call__(self, tokens: md.Tensor) -> md.Tensor:
        """Returns logits ``[batch seq vocab]`` of tokens ``[batch seq]``."""
        return self.head(self.norm(self.blocks(md.take(self.embed, tokens, over="vocab"))))


def program(config: Config | str, rules: md.Rules | str, batch: int = 64, seq: int | None = None) -> md.Program:
    """Returns a training step with AdamW, as shapes: ``step(params, opt_state, batch)``.

    Args:
      config: a name in ``CONFIGS``, or a ``Config``.
      rules: layout rules, such as one of ``RULES``.
      batch: sequences per step.
      seq: tokens per sequence; default: the config's.
    """
    sizes = CONFIGS[config] if isinstance(config, str) else config
    shapes = token_batch(batch, seq or sizes.seq)
    return flax_program(lambda rngs: Llama(sizes, rngs), next_token_loss, shapes, rules, adamw(sizes.rate), sizes.dtype)
