"""GPT-2 and GPT-3: decoders with learned positions, pre-norm blocks and tied embeddings.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2; Brown et al., "Language
Models are Few-Shot Learners" (2020), table 2.1. (GPT-3's sparse attention layers are dense here.)

    tokens [batch seq] -> x [batch seq embed]
    block by block: x + attention(norm(x)), x + mlp(norm(x))
    x -> logits [batch seq vocab]
"""

from dataclasses import dataclass

from flax import nnx

import meshdsl as md
from meshdsl.models.attention import zigzag_blocks
from meshdsl.models.layers import Block, Norm, positions
from meshdsl.models.training import Strategies, adamw, flax_program, next_token_loss, standard_strategies, token_batch

VOCABULARY = 50257

RULES: Strategies = standard_strategies("heads:model hidden:model") | {
    "sequence": "batch:data seq:model",
    "ring": md.Rules("batch:data", activations="batch:data seq:model"),
}


@dataclass(frozen=True)
class Config:
    """Sizes of one model; ``head`` is ``embed // heads`` unless the paper gives another size.

    Args:
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
    heads: int
    head: int = 0
    seq: int = 1024
    vocab: int = VOCABULARY
    remat: str = "none"
    dtype: str = "float32"
    attend: str = "products"
    blocks: int = 1
    keep: str = ""
    products: str = "plain"

    @property
    def dims(self) -> md.Dims:
        """Sizes by dim."""
        head = self.head or self.embed // self.heads
        return md.dims(
            f"layers={self.layers} embed={self.embed} heads={self.heads} head={head} hidden={4 * self.embed} "
            f"seq={self.seq} vocab={self.vocab}"
        )


CONFIGS = {
    "gpt2-124m": Config(12, 768, 12),
    "gpt2-355m": Config(24, 1024, 16),
    "gpt2-774m": Config(36, 1280, 20),
    "gpt2-1.5b": Config(48, 1600, 25),
    "gpt3-125m": Config(12, 768, 12, seq=2048),
    "gpt3-350m": Config(24, 1024, 16, seq=2048),
    "gpt3-760m": Config(24, 1536, 16, seq=2048),
    "gpt3-1.3b": Config(24, 2048, 24, head=128, seq=2048),
    "gpt3-2.7b": Config(32, 2560, 32, seq=2048),
    "gpt3-6.7b": Config(32, 4096, 32, seq=2048),
    "gpt3-13b": Config(40, 5140, 40, head=128, seq=2048),
    "gpt3-175b": Config(96, 12288, 96, seq=2048, remat="all"),
}


class GPT(nnx.Module):
    """The model, with the sizes of ``Config.dims``."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        sizes = config.dims
        self.embed = nnx.Param(md.normal(rngs.params(), sizes("vocab embed"), std=0.02))
        self.position = nnx.Param(md.normal(rngs.params(), sizes("seq embed"), std=0.01))
        self.blocks = md.stack(
            lambda rngs: Block(sizes, rngs, attend=config.attend, blocks=config.blocks, products=config.products),
            sizes("layers"),
            rngs,
            remat=config.remat,
            keep=config.keep,
        )
        self.ring_blocks = zigzag_blocks(config.attend, config.blocks)
        self.norm = Norm(sizes)

    def __call__(self, tokens: md.Tensor) -> md.Tensor:
        """Returns logits ``[batch seq vocab]`` of tokens ``[batch seq]``."""
        position = md.index(self.position, seq=slice(0, tokens.shape["seq"]))
        if self.ring_blocks > 1:
            position = md.take(md.rename(position, seq="place"), positions(tokens, self.ring_blocks), over="place")
        x = self.blocks(md.take(self.embed, tokens, over="vocab") + position)
        return md.dot(self.norm(x), self.embed, over="embed")


def program(config: Config | str, rules: md.Rules | str, batch: int = 64, seq: int | None = None) -> md.Program:
    """Returns a training step with AdamW, as shapes: ``step(params, opt_state, batch)``.

    Args:
      config: a name in ``CONFIGS``, or a ``Config``.
      rules: layout rules, such as one of ``RULES``.
      batch: sequences per step.
      seq: tokens per sequence; default: the config's maximum.
    """
    sizes = CONFIGS[config] if isinstance(config, str) else config
    shapes = token_batch(batch, seq or sizes.seq)
    return flax_program(lambda rngs: GPT(sizes, rngs), next_token_loss, shapes, rules, adamw(6e-4), sizes.dtype)
