"""Mixtures of experts: Llama's blocks, in which every token is sent to a few of many perceptrons.

Lepikhin et al., "GShard" (2021) and Fedus et al., "Switch Transformers" (2022): how tokens are sent, dropped and
balanced. Jiang et al., "Mixtral of Experts" (2024), table 1; Dai et al., "DeepSeekMoE" (2024), section 5.1.

    x [batch group place embed] -> chances [batch group place gates], the ``choices`` largest of which are taken
    sent [batch group experts slots embed]    each expert has so many slots per group; who finds none goes without
    made by the experts, each in its slots, and brought back, weighted by the chances

A group is a stretch of one sequence. Sending and bringing back are products with ``seats``
[batch group place experts slots], so nothing here speaks of devices: with the batch split over the axis that also
splits the experts, the planner exchanges ``sent`` all to all, as GShard does by hand.

Dims: ``gates`` are the experts as the router sees them, so that a rule for ``experts`` splits the perceptrons alone.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

import meshdsl as md
from meshdsl.models import llama
from meshdsl.models.layers import Matrix, RMSNorm
from meshdsl.models.training import Strategies, adamw, flax_program, token_batch, usual

BALANCE = 0.01  # weight of the balance loss (Switch, section 2.2)

RULES: Strategies = usual("heads:model hidden:model") | {
    "expert": "batch:data experts:data",
    "expert+tensor": "batch:data experts:data heads:model hidden:model",
    "expert-model": "batch:(data,model) experts:model",
    "fsdp+expert": md.Rules("batch:data heads:model experts:model", params="embed:data", optimizer="embed:data"),
}


@dataclass(frozen=True)
class Config(llama.Config):
    """Sizes of one model; ``hidden`` is that of one expert.

    Args:
      experts: how many there are.
      choices: how many a token is sent to.
      group: places in a group.
      capacity: slots of all experts together per token and choice; 0 is room for all whatever they choose.
      shared: the hidden size of a perceptron that takes every token, 0 for none.
      weighed: whether the chances of those that are chosen are made to sum to 1.
    """

    experts: int = 8
    choices: int = 2
    group: int = 512
    capacity: float = 1.25
    shared: int = 0
    weighed: bool = True

    @property
    def slots(self) -> int:
        """Slots of one expert per group."""
        return -(-int(self.capacity * self.choices * self.group) // self.experts) if self.capacity else self.group

    @property
    def dims(self) -> md.Dims:
        """The sizes by dim."""
        return super().dims + f"experts={self.experts} gates={self.experts}"


CONFIGS = {
    # Switch-Base has T5's encoder and decoder, with experts in every other layer; this is a decoder with them in each.
    "switch-base": Config(
        12, 768, 2048, 12, 12, 64, 512, 32128, experts=128, choices=1, capacity=1.25, weighed=False, remat="all"
    ),
    # Mixtral drops no token. Here that means slots for all in each expert: four times the products it needs. It can
    # look back 32,768 tokens, whose scores fit no device: a step has sequences of 4,096 if not told otherwise.
    "mixtral-8x7b": Config(
        32, 4096, 14336, 32, 8, seq=4096, vocab=32000, theta=1e6, group=256, capacity=0, remat="all"
    ),
    # DeepSeekMoE has a dense perceptron in its first layer; here all layers are alike.
    "deepseek-moe-16b": Config(
        *(28, 2048, 1408, 16, 16, 128, 4096, 102400, 1e4),
        experts=64,
        choices=6,
        shared=2 * 1408,
        weighed=False,
        remat="all",
    ),
}


class Experts(nnx.Module):
    """Llama's gated perceptron, once for each expert."""

    def __init__(self, sizes: md.Dims, rngs: nnx.Rngs) -> None:
        keys = (rngs.params() for _ in range(3))
        up, down = sizes("experts embed hidden"), sizes("experts hidden embed")
        self.gate, self.up = (nnx.Param(md.fan_in(next(keys), up, over="embed")) for _ in range(2))
        self.down = nnx.Param(md.fan_in(next(keys), down, over="hidden"))

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """``x`` with ``experts`` and ``embed`` among its dims."""
        hidden = md.silu(md.dot(x, self.gate, over="embed")) * md.dot(x, self.up, over="embed")
        return md.dot(hidden, self.down, over="hidden")


class Mixture(nnx.Module):
    """Router and experts: ``[batch seq embed]`` to the same, and the balance loss."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        sizes = config.dims
        self.config = config
        self.router, self.experts = Matrix(sizes, "embed", "gates", rngs), Experts(sizes, rngs)
        if config.shared:
            self.shared = llama.Perceptron(md.dims(f"embed={config.embed} hidden={config.shared}"), rngs)

    def __call__(self, x: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        """What the chosen experts make of ``x``."""
        groups = md.split(x, seq=f"group place={self.config.group}")
        chances = md.softmax(self.router(groups), over="gates")
        chosen, weights = choices(chances, self.config)
        seats = seated(chosen, weights, self.config.slots)
        sent = md.dot((seats > 0).astype(x.dtype), groups, over="place")
        made = md.merge(md.dot(seats, self.experts(sent), over="experts slots"), seq="group place")
        return made + self.shared(x) if self.config.shared else made, balance(chosen, chances)


class Block(nnx.Module):
    """Attention and mixture, each behind a norm and added; the balance losses of all blocks are summed."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        sizes = config.dims
        self.norm1, self.norm2 = RMSNorm(sizes), RMSNorm(sizes)
        self.attention, self.mixture = llama.Attention(sizes, config.theta, rngs), Mixture(config, rngs)

    def __call__(self, state: tuple[md.Tensor, md.Tensor]) -> tuple[md.Tensor, md.Tensor]:
        """The next ``x`` and the balance losses so far."""
        x, lost = state
        x = x + self.attention(self.norm1(x))
        made, more = self.mixture(self.norm2(x))
        return x + made, lost + more


class Model(llama.Llama):
    """Llama with these blocks."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs, Block)

    def __call__(self, tokens: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        """Logits ``[batch seq vocab]`` of tokens ``[batch seq]``, and the balance loss."""
        x, lost = self.blocks((md.take(self.embed, tokens, over="vocab"), jnp.zeros(())))
        return self.head(self.norm(x)), lost


def choices(chances: md.Tensor, config: Config) -> tuple[md.Tensor, md.Tensor]:
    """The experts that each place is sent to, best first.

    Args:
      chances: of the experts by place, ``[batch group place gates]``.
      config: of ``choices`` and ``weighed``.

    Returns 1 at the expert, ``[batch group place choices experts]``, and its weight, ``[batch group place choices]``.
    """
    best, where = (md.rename(x, gates="choices") for x in md.top_k(chances, config.choices, over="gates"))
    weights = best / md.sum(best, over="choices") if config.weighed else best
    return md.one_hot(where, f"experts={config.experts}"), weights


def seated(chosen: md.Tensor, weights: md.Tensor, slots: int) -> md.Tensor:
    """The slot that each place gets at its experts, first come first served; all first choices before all second.

    Args:
      chosen, weights: as ``choices`` returns them.
      slots: of each expert; who comes later is dropped.

    Returns the weight at the slot, else 0, ``[batch group place experts slots]``.
    """
    line = md.merge(chosen, line="choices place")
    before = md.split(md.cumsum(line, over="line") - line, line=f"choices={chosen.shape['choices']} place")
    slot = md.sum(before * chosen, over="experts").astype(jnp.int32)
    return md.dot(chosen * weights, md.one_hot(slot, f"slots={slots}"), over="choices")


def balance(chosen: md.Tensor, chances: md.Tensor) -> md.Tensor:
    """The number of experts times the sum of their shares of tokens by their mean chances; 1 at best (Switch, 4)."""
    share = md.mean(chosen, over="batch group place choices")
    chance = md.rename(md.mean(chances, over="batch group place"), gates="experts")
    return share.shape["experts"] * md.sum(share * chance)


def loss(model: Model, batch: dict[str, md.Tensor]) -> md.Tensor:
    """The mean cross-entropy of the next words, and the balance loss."""
    logits, lost = model(batch["inputs"])
    return md.mean(md.cross_entropy(logits, batch["targets"], over="vocab")) + BALANCE * lost


def program(config: Config | str, rules: md.Rules | str, batch: int = 64, seq: int | None = None) -> md.Program:
    """A training step with AdamW, by shapes only: ``step(params, opt_state, batch)``; arguments as for ``llama``."""
    sizes = CONFIGS[config] if isinstance(config, str) else config
    shapes = token_batch(batch, seq or sizes.seq)
    return flax_program(lambda rngs: Model(sizes, rngs), loss, shapes, rules, adamw(sizes.rate))
