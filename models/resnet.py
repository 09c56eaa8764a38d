"""ResNet-50 to ResNet-152 and Wide ResNets: convolutions with batch norm in bottleneck blocks.

He et al., "Deep Residual Learning for Image Recognition" (2016), table 1; Zagoruyko and Komodakis, "Wide Residual
Networks" (2016), whose wide-resnet50-2 has twice the channels in the 3x3 convolutions of ResNet-50. The stride of a
stage is in its 3x3 convolution, where most implementations have it.

    images [batch height width channels] -> stem -> four stages of blocks, each but the first halving height and width
    x -> mean over height and width -> logits [batch classes]

Batch norm uses the statistics of the global batch, however it is sharded; the running mean and variance for inference
are state of the step. All blocks of a stage but the first form one stack.

Dims: a kernel is ``[y x channels filters]``; ``filters`` of its output are renamed to ``channels``.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import optax
from flax import nnx

import meshdsl as md
from meshdsl.models.training import Strategies, image_batch

RULES: Strategies = {
    "data": "batch:data",
    "spatial": "batch:data height:model",
    "tensor": "batch:data filters:model",
    "fsdp": md.Rules("batch:data", params="filters:data", optimizer="filters:data"),
    "zero": md.Rules("batch:data", optimizer="filters:data"),
}
MOMENTUM = 0.9  # of the running statistics, per step
EXPANSION = 4  # output channels of a block per channel of its bottleneck


@dataclass(frozen=True)
class Config:
    """Sizes of one model; images are square.

    Args:
      blocks: blocks per stage.
      wide: multiplier of the channels of the 3x3 convolutions.
      base: channels of the stem and of the first stage's bottlenecks; every stage doubles them.
      image: pixels on a side.
      small: for small images, the stem is a 3x3 convolution without stride or pooling.
      remat: what the backward pass recomputes in the stacks, see ``md.remat``.
      keep: names of values that are stored: ``conv``, the results of convolutions.
    """

    blocks: tuple[int, ...]
    wide: int = 1
    base: int = 64
    image: int = 224
    channels: int = 3
    classes: int = 1000
    small: bool = False
    remat: str = "none"
    keep: str = ""


CONFIGS = {
    "resnet50": Config((3, 4, 6, 3)),
    "resnet101": Config((3, 4, 23, 3)),
    "resnet152": Config((3, 8, 36, 3)),
    "wide-resnet50-2": Config((3, 4, 6, 3), wide=2),
    "wide-resnet101-2": Config((3, 4, 23, 3), wide=2),
}


class BatchNorm(nnx.Module):
    """Batch norm with scale and bias, per channel."""

    def __init__(self, channels: int) -> None:
        dims = f"channels={channels}"
        self.scale, self.bias = nnx.Param(md.ones(dims)), nnx.Param(md.zeros(dims))
        self.mean, self.var = nnx.BatchStat(md.zeros(dims)), nnx.BatchStat(md.ones(dims))

    def __call__(self, x: md.Tensor, train: bool) -> md.Tensor:
        """Normalises ``x [batch height width channels]`` by batch statistics in training, else by running ones."""
        mean, var = self.measure(x) if train else (self.mean.get_value(), self.var.get_value())
        return (x - mean) * (md.rsqrt(var + 1e-5) * self.scale) + self.bias

    def measure(self, x: md.Tensor) -> tuple[md.Tensor, md.Tensor]:
        """Returns mean and variance over all dims but channels, and updates the running statistics."""
        mean = md.mean(x, over="batch height width")
        var = md.mean(md.square(x - mean), over="batch height width")
        for running, now in ((self.mean, mean), (self.var, var)):
            running.set_value(MOMENTUM * running.get_value() + (1 - MOMENTUM) * now)
        return mean, var


class Convolution(nnx.Module):
    """A convolution followed by batch norm."""

    def __init__(self, window: int, inputs: int, outputs: int, rngs: nnx.Rngs, stride: int = 1) -> None:
        self.stride = stride
        dims = f"y={window} x={window} channels={inputs} filters={outputs}"
        self.kernel = nnx.Param(md.normal(rngs.params(), dims, std=(2 / (window * window * outputs)) ** 0.5))
        self.norm = BatchNorm(outputs)

    def __call__(self, x: md.Tensor, train: bool) -> md.Tensor:
        """Returns the convolution of ``x``, downsampled by the stride."""
        kernel = md.rename(self.kernel, y="height", x="width")
        made = md.conv(x, kernel, over="height width", sum="channels", stride=self.stride)
        return self.norm(md.keep(md.rename(made, filters="channels"), "conv"), train)


class Block(nnx.Module):
    """A residual bottleneck block: 1x1 reduction, 3x3 convolution, 1x1 expansion."""

    def __init__(self, inputs: int, middle: int, outputs: int, rngs: nnx.Rngs, stride: int = 1) -> None:
        self.less = Convolution(1, inputs, middle, rngs)
        self.over = Convolution(3, middle, middle, rngs, stride)
        self.more = Convolution(1, middle, outputs, rngs)
        same_shape = inputs == outputs and stride == 1
        self.across = None if same_shape else Convolution(1, inputs, outputs, rngs, stride)

    def __call__(self, x: md.Tensor, train: bool) -> md.Tensor:
        """Returns ``x`` after the block."""
        hidden = md.relu(self.over(md.relu(self.less(x, train)), train))
        residual = x if self.across is None else self.across(x, train)
        return md.relu(self.more(hidden, train) + residual)


class Stage(nnx.Module):
    """Blocks of one size; the first has the stride."""

    def __init__(self, config: Config, index: int, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        middle, layers = outputs // EXPANSION * config.wide, f"layers={config.blocks[index] - 1}"
        self.first = Block(inputs, middle, outputs, rngs, 1 if index == 0 else 2)
        make = lambda rngs: Block(outputs, middle, outputs, rngs)  # noqa: E731
        more = config.blocks[index] > 1
        self.rest = md.stack(make, layers, rngs, config.remat, config.keep) if more else None

    def __call__(self, x: md.Tensor, train: bool) -> md.Tensor:
        """Returns ``x`` after all blocks."""
        x = self.first(x, train)
        return x if self.rest is None else self.rest(x, train)


class ResNet(nnx.Module):
    """The model."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.small = config.small
        base = config.base
        self.stem = Convolution(3 if config.small else 7, config.channels, base, rngs, 1 if config.small else 2)
        came = [base, *(base * 2**i * EXPANSION for i in range(len(config.blocks)))]
        self.stages = nnx.List(Stage(config, i, *ends, rngs) for i, ends in enumerate(pairwise(came)))
        head = f"channels={came[-1]} classes={config.classes}"
        self.head = nnx.Param(md.fan_in(rngs.params(), head, over="channels"))
        self.bias = nnx.Param(md.zeros(f"classes={config.classes}"))

    def __call__(self, images: md.Tensor, train: bool) -> md.Tensor:
        """Returns logits ``[batch classes]`` of images ``[batch height width channels]``."""
        x = md.relu(self.stem(images, train))
        if not self.small:
            x = md.max_pool(x, over="height width", window=3, stride=2, padding="SAME")
        for stage in self.stages:
            x = stage(x, train)
        return md.dot(md.mean(x, over="height width"), self.head, over="channels") + self.bias


def program(config: Config | str, rules: md.Rules | str, batch: int = 256, optimizer: Any = None) -> md.Program:
    """Returns a training step, as shapes: ``step(params, statistics, opt_state, batch)``.

    Args:
      config: a name in ``CONFIGS``, or a ``Config``.
      rules: layout rules, such as one of ``RULES``.
      batch: images per step.
      optimizer: an optax optimizer; default: the paper's gradient descent with momentum and weight decay.
    """
    sizes = CONFIGS[config] if isinstance(config, str) else config
    graph = nnx.graphdef(nnx.eval_shape(lambda: ResNet(sizes, nnx.Rngs(0))))
    optimizer = optimizer or optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9))

    def loss(params: Any, statistics: Any, batch: Any) -> Any:
        model = nnx.merge(graph, params, statistics, copy=True)  # the call updates its running statistics
        logits = model(batch["images"], train=True)
        value = md.mean(md.cross_entropy(logits, batch["labels"], over="classes"))
        return value, nnx.state(model, nnx.BatchStat)

    def step(params: Any, statistics: Any, opt_state: Any, batch: Any) -> Any:
        (value, statistics), gradient = jax.value_and_grad(loss, has_aux=True)(params, statistics, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), statistics, opt_state, value

    def init() -> Any:
        model = ResNet(sizes, nnx.Rngs(0))
        params, statistics = (nnx.state(model, kind) for kind in (nnx.Param, nnx.BatchStat))
        return params, statistics, optimizer.init(params)

    args = (*jax.eval_shape(init), image_batch(batch, sizes.image, sizes.channels))
    return md.Program(step, args, rules=rules, init=init)
