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

With ``ranks``, no token is dropped: the whole batch is one group, and ``models.dropless`` sends its tokens to their
experts' owners and back. Experts are balanced by the loss, or by a bias that only chooses them (Wang et al.,
"Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024; DeepSeek-V3, section 2.1.2).

Dims: ``gates`` are the experts in the router's output, so that a rule for ``experts`` splits the perceptrons only.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import meshdsl as md
from meshdsl.errors import ArgumentError
from meshdsl.models import llama
from meshdsl.models.dropless import ExpertWeights, dropless
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
      group: tokens per group, if some are dropped.
      capacity: capacity factor, slots of all experts per token and choice. With ``ranks``, that of a turn.
      shared: hidden size of a shared expert that takes every token; 0 for none.
      weighed: whether the probabilities of the chosen experts are renormalised to sum to 1.
      ranks: owners of equal parts of the experts, between which tokens are exchanged without drops, see
        ``models.dropless``: the devices that split ``experts``. 0 for slots, beyond which tokens are dropped.
      replicas: groups of ``ranks`` that have all experts each.
      nodes: groups of these ranks with slower links between them, see ``models.dropless``.
      layout: of tokens between ranks, see ``models.dropless``; empty for that of the fastest plan.
      bias: by how much a step changes the bias of an expert that more or fewer tokens than the mean chose; 0 for the
        balance loss.
    """

    experts: int = 8
    choices: int = 2
    group: int = 512
    capacity: float = 1.25
    shared: int = 0
    weighed: bool = True
    ranks: int = 0
    replicas: int = 1
    nodes: int = 1
    layout: str = ""
    bias: float = 0.0

    @property
    def slots(self) -> int:
        """Slots per expert and group."""
        if not self.capacity > 0:
            raise ArgumentError(f"capacity={self.capacity}: experts need slots; give ranks=1, which drops no token")
        return -(-int(self.capacity * self.choices * self.group) // self.experts)

    @property
    def dims(self) -> md.Dims:
        """Sizes by dim."""
        return super().dims + f"experts={self.experts} gates={self.experts}"


CONFIGS = {
    # Switch-Base has T5's encoder and decoder with experts in every other layer; this is a decoder with experts in all.
    "switch-base": Config(
        12, 768, 2048, 12, 12, 64, 512, 32128, experts=128, choices=1, capacity=1.25, weighed=False, remat="all"
    ),
    # Mixtral's context is 32,768 tokens, whose scores fit no device: the default is 4,096.
    "mixtral-8x7b": Config(
        32, 4096, 14336, 32, 8, seq=4096, vocab=32000, theta=1e6, capacity=1.05, ranks=8, remat="all"
    ),
    # DeepSeekMoE has a dense perceptron in its first layer; here all layers are equal.
    "deepseek-moe-16b": Config(
        *(28, 2048, 1408, 16, 16, 128, 4096, 102400, 1e4),
        experts=64,
        choices=6,
        capacity=1.05,
        ranks=8,
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
        gate = md.silu(md.keep(md.dot(x, self.gate, over="embed"), "mlpwi_0"))
        hidden = gate * md.keep(md.dot(x, self.up, over="embed"), "mlpwi_1")
        return md.keep(md.dot(hidden, self.down, over="hidden"), "mlpwo")

    @property
    def weights(self) -> ExpertWeights:
        """The same, for ``dropless``."""
        return ExpertWeights(*(w.get_value().array for w in (self.up, self.down, self.gate)))


class Mixture(nnx.Module):
    """Router and experts: ``[batch seq embed]`` to the same, and what balancing adds to the loss."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        sizes = config.dims
        self.config = config
        self.router, self.experts = Matrix(sizes, "embed", "gates", rngs), Experts(sizes, rngs)
        if config.bias:
            self.bias = nnx.Param(md.zeros(sizes("gates")))
        if config.shared:
            self.shared = llama.Perceptron(md.dims(f"embed={config.embed} hidden={config.shared}"), rngs)

    def __call__(self, x: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        """Returns the combined output of the chosen experts, and what balancing adds to the loss."""
        out, balance = self._dropless(x) if self.config.ranks else self._with_slots(x)
        return out + self.shared(x) if self.config.shared else out, balance

    def _with_slots(self, x: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        groups = md.split(x, seq=f"group place={self.config.group}")
        chances = md.softmax(self.router(groups), over="gates")
        where, weights, balance = self._choose(chances)
        slots = assign_slots(md.one_hot(where, f"experts={self.config.experts}"), weights, self.config.slots)
        dispatched = md.dot((slots > 0).astype(x.dtype), groups, over="place")
        return md.merge(md.dot(slots, self.experts(dispatched), over="experts slots"), seq="group place"), balance

    def _dropless(self, x: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        where, weights, balance = self._choose(md.softmax(self.router(x), over="gates"))
        dims = _all_but(x, "embed")
        tokens, where, weights = (
            md.order(each, f"{dims} {last}").array
            for each, last in ((x, "embed"), (where, "choices"), (weights, "choices"))
        )
        config = self.config
        form = config.ranks, config.replicas, config.capacity, config.layout
        out = dropless(tokens, where, weights, self.experts.weights, *form, nodes=config.nodes)
        return md.named(out, f"{dims} embed"), balance

    def _choose(self, chances: md.Tensor) -> tuple[md.Tensor, md.Tensor, md.Tensor]:
        """Returns the experts of each token, their weights, and what balancing adds to the loss."""
        bias = self.bias if self.config.bias else None
        where, weights = choose_experts(chances, self.config, bias)
        chosen = md.one_hot(where, f"experts={self.config.experts}")
        return where, weights, BALANCE * balance_loss(chosen, chances) if bias is None else bias_loss(chosen, bias)


class Block(nnx.Module):
    """A pre-norm block of attention and mixture; what balancing adds to the loss is summed over blocks."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        sizes = config.dims
        self.norm1, self.norm2 = RMSNorm(sizes), RMSNorm(sizes)
        self.attention, self.mixture = llama.Attention(sizes, config.theta, rngs), Mixture(config, rngs)

    def __call__(self, state: tuple[md.Tensor, md.Tensor]) -> tuple[md.Tensor, md.Tensor]:
        """Returns ``x`` after the block, and the sum of what balancing adds to the loss."""
        x, total = state
        x = x + self.attention(self.norm1(x))
        out, balance = self.mixture(self.norm2(x))
        return x + out, total + balance


class Model(llama.Llama):
    """Llama with mixture-of-experts blocks."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs, Block)

    def __call__(self, tokens: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        """Returns logits ``[batch seq vocab]`` of tokens ``[batch seq]``, and what balancing adds to the loss."""
        x, balance = self.blocks((md.take(self.embed, tokens, over="vocab"), jnp.zeros(())))
        return self.head(self.norm(x)), balance


def choose_experts(chances: md.Tensor, config: Config, bias: md.Tensor | None = None) -> tuple[md.Tensor, md.Tensor]:
    """Chooses the experts of each token, most probable first.

    Args:
      chances: the router's probabilities, ``[... gates]``.
      config: for ``choices`` and ``weighed``.
      bias: added to the probabilities for the choice, but not for the weights, ``[gates]``.

    Returns:
      Experts and weights, ``[... choices]``.
    """
    best, where = (
        md.rename(x, gates="choices")
        for x in md.top_k(chances if bias is None else chances + bias, config.choices, over="gates")
    )
    if bias is not None:
        best = md.dot(md.one_hot(where, f"gates={config.experts}"), chances, over="gates")
    return where, best / md.sum(best, over="choices") if config.weighed else best


def assign_slots(chosen: md.Tensor, weights: md.Tensor, slots: int) -> md.Tensor:
    """Assigns slots in token order, all first choices before all second choices; the rest is dropped.

    Args:
      chosen: one-hot experts of ``choose_experts``, ``[batch group place choices experts]``.
      weights: their weights, ``[batch group place choices]``.
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
    chance = md.rename(md.mean(chances, over=_all_but(chances, "gates")), gates="experts")
    return chosen.shape["experts"] * md.sum(md.mean(chosen, over=_all_but(chosen, "experts")) * chance)


def bias_loss(chosen: md.Tensor, bias: md.Tensor) -> md.Tensor:
    """Returns 0, whose gradient by ``bias`` is 1 for experts of more tokens than the mean, -1 for those of fewer.

    With gradient descent of rate u, experts get the updates of DeepSeek-V3: u less, or u more.
    """
    share = md.rename(md.mean(chosen, over=_all_but(chosen, "experts")), experts="gates")
    above = md.sum(bias * md.sign(md.stop_gradient(share) - 1 / bias.shape["gates"]))
    return above - md.stop_gradient(above)


def _all_but(x: md.Tensor, dim: str) -> str:
    return " ".join(name for name in x.dims if name != dim)


def loss(model: Model, batch: dict[str, md.Tensor]) -> md.Tensor:
    """Returns the mean cross-entropy of the next tokens plus what balancing adds."""
    logits, balance = model(batch["inputs"])
    return md.mean(md.cross_entropy(logits, batch["targets"], over="vocab")) + balance


def program(config: Config | str, rules: md.Rules | str, batch: int = 64, seq: int | None = None) -> md.Program:
    """Returns a training step with AdamW, as shapes: ``step(params, opt_state, batch)``; arguments as for ``llama``."""
    sizes = CONFIGS[config] if isinstance(config, str) else config
    shapes = token_batch(batch, seq or sizes.seq)
    optimizer = adamw(sizes.rate)
    if sizes.bias:
        optimizer = optax.partition({"weights": optimizer, "bias": optax.sgd(sizes.bias)}, _label_bias)
    return flax_program(lambda rngs: Model(sizes, rngs), loss, shapes, rules, optimizer)


def _label_bias(params: Any) -> Any:
    """Returns which optimizer updates each parameter."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "bias" if any(getattr(key, "key", None) == "bias" for key in path) else "weights", params
    )
