"""Mamba: a language model of selective state spaces, without attention.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), section 3.4 and table 12.

    x [batch seq embed] -> two branches [batch seq inner]
    one: a short convolution along seq, then the recurrence; the other gates its output

The recurrence runs along ``seq`` with a state of 16 numbers per channel. ``write``, ``read`` and the step size ``step``
depend on the input (B, C and delta in the paper):

    state = exp(step * decay) * state + step * x * write        [batch inner state]
    out = sum(state * read, over="state")                       [batch inner]

Channels are independent, so ``inner:model`` splits the loop without communication inside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log

import jax.numpy as jnp
from flax import nnx

import meshdsl as md
from meshdsl.models.layers import Linear, Matrix, RMSNorm
from meshdsl.models.training import adamw, flax_program, next_token_loss, standard_strategies, token_batch

SHORTEST, LONGEST = 1e-3, 1e-1  # range of initial step sizes

RULES = standard_strategies("inner:model")


@dataclass(frozen=True)
class Config:
    """Sizes of one model.

    Args:
      state: size of the state per channel.
      width: width of the convolution.
      remat: what the backward pass recomputes, see ``md.remat``.
      keep: names of values that are stored: results of the projections, of the gate (``mlpwi_0``), of the input
        (``mlpwi_1``) and of the output (``mlpwo``), and of the recurrence (``context``).
    """

    layers: int
    embed: int
    state: int = 16
    width: int = 4
    seq: int = 2048
    vocab: int = 50280
    remat: str = "none"
    keep: str = ""

    @property
    def dims(self) -> md.Dims:
        """Sizes by dim."""
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
    """A causal depthwise convolution along ``seq``, with bias."""

    def __init__(self, sizes: md.Dims, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(md.fan_in(rngs.params(), sizes("width inner"), over="width"))
        self.bias = nnx.Param(md.zeros(sizes("inner")))

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Convolves ``x [batch seq inner]``, zero-padded on the left."""
        width, seq = self.kernel.get_value().shape["width"], x.shape["seq"]
        wide = md.padded(x, seq=(width - 1, 0))
        terms = (md.index(wide, seq=slice(i, i + seq)) * md.index(self.kernel, width=i) for i in range(width))
        return sum(terms, start=self.bias)


class StepSizes(Linear):
    """The positive step size of each channel."""

    def __init__(self, sizes: md.Dims, rngs: nnx.Rngs) -> None:
        super().__init__(sizes, "rank", "inner", sizes["rank"] ** -0.5, rngs)
        first = md.exp(md.uniform(rngs.params(), sizes("inner"), log(SHORTEST), log(LONGEST)))
        self.bias = nnx.Param(md.log(md.expm1(first)))  # inverse softplus

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Maps ``[batch seq rank]`` to ``[batch seq inner]``."""
        return md.softplus(super().__call__(x))


class Recurrence(nnx.Module):
    """The selective recurrence, ``[batch seq inner]`` to the same."""

    def __init__(self, sizes: md.Dims, rngs: nnx.Rngs) -> None:
        self.write, self.read = (Matrix(sizes, "inner", "state", rngs) for _ in range(2))
        self.short, self.step = Matrix(sizes, "inner", "rank", rngs), StepSizes(sizes, rngs)
        decay = md.log(md.arange(sizes("state"), jnp.float32) + 1)
        self.decay = nnx.Param(md.broadcast(decay, sizes("inner state")))
        self.skip = nnx.Param(md.ones(sizes("inner")))

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Returns the recurrence's output at every position."""
        step, decay = self.step(self.short(x)), -md.exp(self.decay)

        def one(state: md.Tensor, at: Sequence[md.Tensor]) -> tuple[md.Tensor, md.Tensor]:
            step, written, write, read = at
            state = md.exp(step * decay) * state + written * write
            return state, md.dot(state, read, over="state")

        start = md.zeros(x.shape("batch inner") + decay.shape("state"))
        _, made = md.scan(one, start, (step, step * x, self.write(x), self.read(x)), over="seq")
        return md.order(made, x.dims) + x * self.skip


class Block(nnx.Module):
    """A pre-norm residual block of convolution, recurrence and gate."""

    def __init__(self, sizes: md.Dims, rngs: nnx.Rngs) -> None:
        self.norm = RMSNorm(sizes)
        self.up, self.gate = (Matrix(sizes, "embed", "inner", rngs) for _ in range(2))
        self.convolution, self.recurrence = Convolution(sizes, rngs), Recurrence(sizes, rngs)
        self.down = Matrix(sizes, "inner", "embed", rngs)

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Returns ``x`` after the block."""
        normal = self.norm(x)
        up = md.keep(self.up(normal), "mlpwi_1")
        made = md.keep(self.recurrence(md.silu(self.convolution(up))), "context")
        return x + md.keep(self.down(made * md.silu(md.keep(self.gate(normal), "mlpwi_0"))), "mlpwo")


class Mamba(nnx.Module):
    """The model."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        sizes = config.dims
        self.embed = nnx.Param(md.normal(rngs.params(), sizes("vocab embed"), std=0.02))
        self.blocks = md.stack(
            lambda rngs: Block(sizes, rngs), sizes("layers"), rngs, remat=config.remat, keep=config.keep
        )
        self.norm = RMSNorm(sizes)

    def __call__(self, tokens: md.Tensor) -> md.Tensor:
        """Returns logits ``[batch seq vocab]`` of tokens ``[batch seq]``."""
        x = self.blocks(md.take(self.embed, tokens, over="vocab"))
        return md.dot(self.norm(x), self.embed, over="embed")


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
    return flax_program(lambda rngs: Mamba(sizes, rngs), next_token_loss, shapes, rules, adamw(6e-4))
