"""Mixtures of experts: Llama's blocks, in which every token is routed to a few of many perceptrons.

Lepikhin et al., "GShard" (2021) and Fedus et al., "Switch Transformers" (2022): routing, token dropping and load
balancing. Jiang et al., "Mixtral of Experts" (2024), table 1; Dai et al., "DeepSeekMoE" (2024), section 5.1.

    x [batch group place embed] -> probabilities [batch group place gates], of which the ``choices`` largest are chosen
    dispatched [batch group experts slots embed]    each expert has a fixed number of slots per group; tokens beyond
                                                    that capacity are dropped
    outputs of the experts, combined with the router's probabilities as weights

A group is a contiguous part of one sequence. Dispatch and combine are matmuls with the tensor of slots
[batch group place experts slots], so the model does not mention devices: with the batch split over the axis that also
splits the experts, the planner inserts the all-to-alls of GShard.

Dims: ``gates`` are the experts in the router's output, so that a rule for ``experts`` splits the perceptrons only.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

import meshdsl as md
from meshdsl.models import llama
from meshdsl.models.layers import Matrix, RMSNorm
from meshdsl.models.training import Strategies, adamw, flax_program, standard_strategies, token_batch

BALANCE = 0.01  # weight of the balance loss (Switch, section 2.2)

RULES: Strategies = standard_strategies("heads:model hidden:model") | {
    "expert": "batch:data experts:data",
    "expert+tensor": "batch:data experts:data heads:model hidden:model",
    "expert-model": "batch:(data,model) experts:model",
    "fsdp+expert": md.Rules("batch:data heads:model experts:model", params="embed:data", optimizer="embed:data"),
}


@dataclass(frozen=True)
class Config(llama.Config):
    """Sizes of one model; ``hidden`` is the hidden size of one expert.

    Args:
      experts: number of experts.
      choices: experts per token.
      group: tokens per group.
      capacity: capacity factor, slots of all experts per token and choice; 0 never drops a token.
      shared: hidden size of a shared expert that takes every token; 0 for none.
      weighed: whether the probabilities of the chosen experts are renormalised to sum to 1.
    """

    experts: int = 8
    choices: int = 2
    group: int = 512
    capacity: float = 1.25
    shared: int = 0
    weighed: bool = True

    @property
    def slots(self) -> int:
        """Slots per expert and group."""
        return -(-int(self.capacity * self.choices * self.group) // self.experts) if self.capacity else self.group

    @property
    def dims(self) -> md.Dims:
        """Sizes by dim."""
        return super().dims + f"experts={self.experts} gates={self.experts}"


CONFIGS = {
    # Switch-Base has T5's encoder and decoder with experts in every other layer; this is a decoder with experts in all.
    "switch-base": Config(
        12, 768, 2048, 12, 12, 64, 512, 32128, experts=128, choices=1, capacity=1.25, weighed=False, remat="all"
    ),
    # Mixtral drops no token, which takes slots for all tokens in every expert here: four times the matmuls needed. Its
    # context is 32,768 tokens, whose scores fit no device: the default is 4,096.
    "mixtral-8x7b": Config(
        32, 4096, 14336, 32, 8, seq=4096, vocab=32000, theta=1e6, group=256, capacity=0, remat="all"
    ),
    # DeepSeekMoE has a dense perceptron in its first layer; here all layers are equal.
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
    """Llama's gated perceptron for every expert."""

    def __init__(self, sizes: md.Dims, rngs: nnx.Rngs) -> None:
        keys = (rngs.params() for _ in range(3))
        up, down = sizes("experts embed hidden"), sizes("experts hidden embed")
        self.gate, self.up = (nnx.Param(md.fan_in(next(keys), up, over="embed")) for _ in range(2))
        self.down = nnx.Param(md.fan_in(next(keys), down, over="hidden"))

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Applies the experts to ``x``, which has ``experts`` and ``embed`` among its dims."""
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
        """Returns the combined output of the chosen experts, and the balance loss."""
        groups = md.split(x, seq=f"group place={self.config.group}")
        probabilities = md.softmax(self.router(groups), over="gates")
        chosen, weights = choose_experts(probabilities, self.config)
        slots = assign_slots(chosen, weights, self.config.slots)
        dispatched = md.dot((slots > 0).astype(x.dtype), groups, over="place")
        out = md.merge(md.dot(slots, self.experts(dispatched), over="experts slots"), seq="group place")
        return out + self.shared(x) if self.config.shared else out, balance_loss(chosen, probabilities)


class Block(nnx.Module):
    """A pre-norm block of attention and mixture; the balance losses of all blocks are summed."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        sizes = config.dims
        self.norm1, self.norm2 = RMSNorm(sizes), RMSNorm(sizes)
        self.attention, self.mixture = llama.Attention(sizes, config.theta, rngs), Mixture(config, rngs)

    def __call__(self, state: tuple[md.Tensor, md.Tensor]) -> tuple[md.Tensor, md.Tensor]:
        """Returns ``x`` after the block, and the sum of balance losses so far."""
        x, total = state
        x = x + self.attention(self.norm1(x))
        out, balance = self.mixture(self.norm2(x))
        return x + out, total + balance


class Model(llama.Llama):
    """Llama with mixture-of-experts blocks."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs, Block)

    def __call__(self, tokens: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        """Returns logits ``[batch seq vocab]`` of tokens ``[batch seq]``, and the balance loss."""
        x, balance = self.blocks((md.take(self.embed, tokens, over="vocab"), jnp.zeros(())))
        return self.head(self.norm(x)), balance


def choose_experts(chances: md.Tensor, config: Config) -> tuple[md.Tensor, md.Tensor]:
    """Chooses the experts of each token, most probable first.

    Args:
      chances: the router's probabilities, ``[batch group place gates]``.
      config: for ``choices`` and ``weighed``.

    Returns:
      One-hot experts, ``[batch group place choices experts]``, and weights, ``[batch group place choices]``.
    """
    best, where = (md.rename(x, gates="choices") for x in md.top_k(chances, config.choices, over="gates"))
    weights = best / md.sum(best, over="choices") if config.weighed else best
    return md.one_hot(where, f"experts={config.experts}"), weights


def assign_slots(chosen: md.Tensor, weights: md.Tensor, slots: int) -> md.Tensor:
    """Assigns slots in token order, all first choices before all second choices; the rest is dropped.

    Args:
      chosen: one-hot experts from ``choose_experts``.
      weights: their weights.
      slots: slots per expert.

    Returns:
      The weight at the assigned slot, 0 elsewhere, ``[batch group place experts slots]``.
    """
    line = md.merge(chosen, line="choices place")
    before = md.split(md.cumsum(line, over="line") - line, line=f"choices={chosen.shape['choices']} place")
    slot = md.sum(before * chosen, over="experts").astype(jnp.int32)
    return md.dot(chosen * weights, md.one_hot(slot, f"slots={slots}"), over="choices")


def balance_loss(chosen: md.Tensor, chances: md.Tensor) -> md.Tensor:
    """Returns experts * sum(token share * mean probability), 1 when balanced (Switch, equation 4)."""
    share = md.mean(chosen, over="batch group place choices")
    chance = md.rename(md.mean(chances, over="batch group place"), gates="experts")
    return share.shape["experts"] * md.sum(share * chance)


def loss(model: Model, batch: dict[str, md.Tensor]) -> md.Tensor:
    """Returns the mean cross-entropy of the next tokens plus the weighted balance loss."""
    logits, balance = model(batch["inputs"])
    return md.mean(md.cross_entropy(logits, batch["targets"], over="vocab")) + BALANCE * balance


def program(config: Config | str, rules: md.Rules | str, batch: int = 64, seq: int | None = None) -> md.Program:
    """Returns a training step with AdamW, as shapes: ``step(params, opt_state, batch)``; arguments as for ``llama``."""
    sizes = CONFIGS[config] if isinstance(config, str) else config
    shapes = token_batch(batch, seq or sizes.seq)
    return flax_program(lambda rngs: Model(sizes, rngs), loss, shapes, rules, adamw(sizes.rate))
