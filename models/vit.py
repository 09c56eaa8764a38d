"""ViT: a transformer encoder on image patches with a class token.

Dosovitskiy et al., "An Image Is Worth 16x16 Words" (2021), table 1; without dropout, and with one linear layer as
the head, as in the paper's fine-tuning.

    images [batch height width channels] -> patches -> x [batch seq embed], the class token first
    block by block: x + attention(norm(x)), x + mlp(norm(x))
    x of the class token -> logits [batch classes]

Dims: ``y`` and ``x`` inside a patch; those of the blocks are in ``layers.py``.
"""

from dataclasses import dataclass
from typing import Any

import optax
from flax import nnx

import meshdsl as md
from meshdsl.models.layers import Block, Linear, Norm
from meshdsl.models.training import flax_program, image_batch, label_loss, standard_strategies

RULES = standard_strategies("heads:model hidden:model")


@dataclass(frozen=True)
class Config:
    """Sizes of one model; ``image`` and ``patch`` are the side lengths of the square images and patches, in pixels.

    Args:
      remat: what the backward pass recomputes, see ``md.remat``.
      keep: names of values that are stored, see ``models.layers``.
    """

    layers: int
    embed: int
    heads: int
    patch: int = 16
    image: int = 224
    channels: int = 3
    classes: int = 1000
    remat: str = "none"
    keep: str = ""

    @property
    def dims(self) -> md.Dims:
        """Sizes by dim."""
        return md.dims(
            f"layers={self.layers} embed={self.embed} heads={self.heads} head={self.embed // self.heads} "
            f"hidden={4 * self.embed} y={self.patch} x={self.patch} channels={self.channels} "
            f"seq={(self.image // self.patch) ** 2 + 1} classes={self.classes}"
        )


CONFIGS = {
    "vit-b": Config(12, 768, 12),
    "vit-l": Config(24, 1024, 16),
    "vit-h": Config(32, 1280, 16, patch=14),
}


class ViT(nnx.Module):
    """The model, with the sizes of ``Config.dims``."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        sizes = config.dims
        self.sizes = sizes
        self.patches = Linear(sizes, "y x channels", "embed", 0.02, rngs)
        self.token = nnx.Param(md.zeros(sizes("embed")))
        self.position = nnx.Param(md.normal(rngs.params(), sizes("seq embed"), std=0.02))
        self.blocks = md.stack(
            lambda rngs: Block(sizes, rngs, causal=False), sizes("layers"), rngs, config.remat, config.keep
        )
        self.norm, self.head = Norm(sizes), Linear(sizes, "embed", "classes", 0.02, rngs)

    def __call__(self, images: md.Tensor) -> md.Tensor:
        """Returns logits ``[batch classes]`` of images ``[batch height width channels]``."""
        y, x = self.sizes("y"), self.sizes("x")
        cut = md.split(images, height=md.dims("rows") + y, width=md.dims("columns") + x)
        patches = md.merge(self.patches(cut), seq="rows columns")
        token = md.broadcast(self.token, images.shape("batch") + "seq=1" + self.sizes("embed"))
        seen = self.blocks(md.concat([token, patches], over="seq") + self.position)
        return self.head(self.norm(md.index(seen, seq=0)))


def program(config: Config | str, rules: md.Rules | str, batch: int = 256, optimizer: Any = None) -> md.Program:
    """Returns a training step, as shapes: ``step(params, opt_state, batch)``.

    Args:
      config: a name in ``CONFIGS``, or a ``Config``.
      rules: layout rules, such as one of ``RULES``.
      batch: images per step.
      optimizer: an optax optimizer; default: AdamW as in the paper's table 3.
    """
    sizes = CONFIGS[config] if isinstance(config, str) else config
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))
    shapes = image_batch(batch, sizes.image, sizes.channels)
    return flax_program(lambda rngs: ViT(sizes, rngs), label_loss, shapes, rules, optimizer)
