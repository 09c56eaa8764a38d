"""Mamba: a language model of selective recurrences, without attention.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), section 3.4 and table 12.

    x [batch seq embed] -> two branches [batch seq inner]
    one: a short convolution along seq, then the recurrence; the other gates what comes out

The recurrence goes along ``seq`` with a state of 16 numbers per channel. What it writes, what it reads, and how long
its steps are, ``step``, depend on the input:

    state = exp(step * decay) * state + step * x * write        [batch inner state]
    out = sum(state * read, over="state")                       [batch inner]

Channels do not meet in it, so ``inner:model`` splits it without any exchange inside the loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log

import jax.numpy as jnp
from flax import nnx

import meshdsl as md
from meshdsl.models.layers import Linear, Matrix, RMSNorm
from meshdsl.models.training import adamw, flax_program, next_token_loss, token_batch, usual

SHORTEST, LONGEST = 1e-3, 1e-1  # steps at the start of training

RULES = usual("inner:model")


@dataclass(frozen=True)
class Config:
    """Sizes of one model.

    Args:
      state: numbers per channel.
      width: of the convolution.
    """

    layers: int
    embed: int
    state: int = 16
    width: int = 4
    seq: int = 2048
    vocab: int = 50280
    remat: str = "none"

    @property
    def dims(self) -> md.Dims:
        """The sizes by dim."""
        return md.dims(
            f"layers={self.layers} embed={self.embed} inner={2 * self.embed} state={self.state} width={self.width} "
            f"rank={ceil(self.embed / 16)} vocab={self.vocab}"
        )


CONFIGS = {
    "mamba-130m": Config(24, 768, remat="all"),
    "mamba-370m": Config(48, 1024, remat="all"),
    "mamba-790m": Config(48, 1536, remat="all"),
    "mamba-1.4b": Config(48, 2048, remat="all"),
    "mamba-2.8b": Config(64, 2560, remat="all"),
}


class Convolution(nnx.Module):
    """Each channel's weighted sum of the last elements along ``seq``, and a bias."""

    def __init__(self, sizes: md.Dims, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(md.fan_in(rngs.params(), sizes("width inner"), over="width"))
        self.bias = nnx.Param(md.zeros(sizes("inner")))

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """``x`` [batch seq inner], with zeros before its first element."""
        width, seq = self.kernel.get_value().shape["width"], x.shape["seq"]
        wide = md.padded(x, seq=(width - 1, 0))
        terms = (md.index(wide, seq=slice(i, i + seq)) * md.index(self.kernel, width=i) for i in range(width))
        return sum(terms, start=self.bias)


class Steps(Linear):
    """How long a step each channel takes, above 0."""

    def __init__(self, sizes: md.Dims, rngs: nnx.Rngs) -> None:
        super().__init__(sizes, "rank", "inner", sizes["rank"] ** -0.5, rngs)
        first = md.exp(md.uniform(rngs.params(), sizes("inner"), log(SHORTEST), log(LONGEST)))
        self.bias = nnx.Param(md.log(md.expm1(first)))  # what softplus makes ``first`` of

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """``[batch seq rank]`` to ``[batch seq inner]``."""
        return md.softplus(super().__call__(x))


class Recurrence(nnx.Module):
    """The selective recurrence, ``[batch seq inner]`` to the same."""

    def __init__(self, sizes: md.Dims, rngs: nnx.Rngs) -> None:
        self.write, self.read = (Matrix(sizes, "inner", "state", rngs) for _ in range(2))
        self.short, self.step = Matrix(sizes, "inner", "rank", rngs), Steps(sizes, rngs)
        decay = md.log(md.arange(sizes("state"), jnp.float32) + 1)
        self.decay = nnx.Param(md.broadcast(decay, sizes("inner state")))
        self.skip = nnx.Param(md.ones(sizes("inner")))

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """What is read, position by position."""
        step, decay = self.step(self.short(x)), -md.exp(self.decay)

        def one(state: md.Tensor, at: Sequence[md.Tensor]) -> tuple[md.Tensor, md.Tensor]:
            step, written, write, read = at
            state = md.exp(step * decay) * state + written * write
            return state, md.dot(state, read, over="state")

        start = md.zeros(x.shape("batch inner") + decay.shape("state"))
        _, made = md.scan(one, start, (step, step * x, self.write(x), self.read(x)), over="seq")
        return md.order(made, x.dims) + x * self.skip


class Block(nnx.Module):
    """Convolution, recurrence and gate, behind a norm and added."""

    def __init__(self, sizes: md.Dims, rngs: nnx.Rngs) -> None:
        self.norm = RMSNorm(sizes)
        self.up, self.gate = (Matrix(sizes, "embed", "inner", rngs) for _ in range(2))
        self.convolution, self.recurrence = Convolution(sizes, rngs), Recurrence(sizes, rngs)
        self.down = Matrix(sizes, "inner", "embed", rngs)

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """The next ``x``."""
        normal = self.norm(x)
        made = self.recurrence(md.silu(self.convolution(self.up(normal))))
        return x + self.down(made * md.silu(self.gate(normal)))


class Mamba(nnx.Module):
    """The model."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        sizes = config.dims
        self.embed = nnx.Param(md.normal(rngs.params(), sizes("vocab embed"), std=0.02))
        self.blocks = md.stack(lambda rngs: Block(sizes, rngs), sizes("layers"), rngs, remat=config.remat)
        self.norm = RMSNorm(sizes)

    def __call__(self, tokens: md.Tensor) -> md.Tensor:
        """Logits ``[batch seq vocab]`` of tokens ``[batch seq]``."""
        x = self.blocks(md.take(self.embed, tokens, over="vocab"))
        return md.dot(self.norm(x), self.embed, over="embed")


def program(config: Config | str, rules: md.Rules | str, batch: int = 64, seq: int | None = None) -> md.Program:
    """A training step with AdamW, by shapes only: ``step(params, opt_state, batch)``.

    Args:
      config: the name of one of ``CONFIGS``, or sizes of your own.
      rules: which mesh axes split which dims, such as one of ``RULES``.
      batch: sequences per step.
      seq: tokens per sequence; default is the config's.
    """
    sizes = CONFIGS[config] if isinstance(config, str) else config
    shapes = token_batch(batch, seq or sizes.seq)
    return flax_program(lambda rngs: Mamba(sizes, rngs), next_token_loss, shapes, rules, adamw(6e-4))
