"""Layers shared by several models.

Dims: ``heads`` and ``head`` of attention, ``hidden`` of the perceptron, ``key`` for the attended positions of ``seq``.

Results of products have the names of MaxText's layers, which ``keep=`` of a configuration refers to: ``query_proj``,
``key_proj``, ``value_proj``, ``context`` (the output of attention), ``out_proj``, ``mlpwi`` (or ``mlpwi_0`` and
``mlpwi_1`` of a gated perceptron) and ``mlpwo``.
"""

from flax import nnx

import meshdsl as md
from meshdsl.models.attention import attention
from meshdsl.models.fp8 import multiplier
from meshdsl.models.ring_attention import place


class Norm(nnx.Module):
    """Layer norm with scale and bias."""

    def __init__(self, sizes: md.Dims) -> None:
        self.scale, self.bias = nnx.Param(md.ones(sizes("embed"))), nnx.Param(md.zeros(sizes("embed")))

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Normalises ``x`` over ``embed``; other dims are arbitrary."""
        return md.layer_norm(x, over="embed", eps=1e-5) * self.scale + self.bias


class Linear(nnx.Module):
    """A matmul with bias; the kernel is initialised normally with ``std``.

    ``products`` is one of ``models.fp8.VARIANTS``.
    """

    def __init__(
        self, sizes: md.Dims, over: str, out: str, std: float, rngs: nnx.Rngs, products: str = "plain"
    ) -> None:
        self.over, self.products = over, products
        self.kernel = nnx.Param(md.normal(rngs.params(), sizes(over) + sizes(out), std=std))
        self.bias = nnx.Param(md.zeros(sizes(out)))

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Returns ``x`` with the dims ``out`` in place of ``over``."""
        return md.dot(x, self.kernel, over=self.over, dot_general=multiplier(self.products)) + self.bias


class RMSNorm(nnx.Module):
    """RMS norm with scale (Zhang and Sennrich 2019)."""

    def __init__(self, sizes: md.Dims) -> None:
        self.scale = nnx.Param(md.ones(sizes("embed")))

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Normalises ``x`` over ``embed``; other dims are arbitrary."""
        return md.rms_norm(x, over="embed") * self.scale


class Matrix(nnx.Module):
    """A matmul without bias; the kernel is initialised normally with variance 1 / fan-in, or with ``std``.

    ``products`` is one of ``models.fp8.VARIANTS``.
    """

    def __init__(
        self,
        sizes: md.Dims,
        over: str,
        out: str,
        rngs: nnx.Rngs,
        std: float | None = None,
        products: str = "plain",
    ) -> None:
        self.over, self.products, dims = over, products, sizes(over) + sizes(out)
        key, std = rngs.params(), sizes(over).size ** -0.5 if std is None else std
        self.kernel = nnx.Param(md.normal(key, dims, std))

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Returns ``x`` with the dims ``out`` in place of ``over``."""
        return md.dot(x, self.kernel, over=self.over, dot_general=multiplier(self.products))


def positions(x: md.Tensor, blocks: int = 1) -> md.Tensor:
    """Returns the positions ``[seq]`` of ``x``, in zig-zag order for a ring of several blocks."""
    places = md.arange(x.shape("seq"))
    return place(places, x.shape["seq"], blocks) if blocks > 1 else places


def rotary(x: md.Tensor, theta: float, blocks: int = 1) -> md.Tensor:
    """Applies rotary position embeddings (Su et al. 2021) to ``x`` with dims ``seq`` and ``head``.

    Elements i and n + i of ``head``, which has size 2n, are rotated by ``theta ** (-i / n)`` per position.
    ``blocks`` as in ``positions``.
    """
    half = x.shape["head"] // 2
    steps = theta ** (md.arange(f"head={half}") * (-1 / half))
    angle = positions(x, blocks) * steps
    first, second = md.index(x, head=slice(0, half)), md.index(x, head=slice(half, None))
    cos, sin = md.cos(angle).astype(x.dtype), md.sin(angle).astype(x.dtype)
    return md.concat([first * cos - second * sin, second * cos + first * sin], over="head")


class Block(nnx.Module):
    """A pre-norm transformer block, ``[batch seq embed]`` to the same.

    Args:
      sizes: sizes of ``layers``, ``embed``, ``heads``, ``head`` and ``hidden``.
      rngs: random streams.
      causal: whether a position attends only to itself and earlier ones.
      attend: attention variant, one of ``models.attention.VARIANTS``.
      blocks: of a ring.
      products: of activations and weights, one of ``models.fp8.VARIANTS``.
    """

    def __init__(
        self,
        sizes: md.Dims,
        rngs: nnx.Rngs,
        causal: bool = True,
        attend: str = "products",
        blocks: int = 1,
        products: str = "plain",
    ) -> None:
        self.causal, self.attend, self.blocks = causal, attend, blocks
        last = 0.02 / (2 * sizes["layers"]) ** 0.5  # for projections into the residual stream, two per block
        self.norm1, self.norm2 = Norm(sizes), Norm(sizes)
        self.query, self.key, self.value = (
            Linear(sizes, "embed", "heads head", 0.02, rngs, products) for _ in range(3)
        )
        self.out = Linear(sizes, "heads head", "embed", last, rngs, products)
        self.up = Linear(sizes, "embed", "hidden", 0.02, rngs, products)
        self.down = Linear(sizes, "hidden", "embed", last, rngs, products)

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Returns ``x`` after the block."""
        x = x + self.attention(self.norm1(x))
        up = md.keep(self.up(self.norm2(x)), "mlpwi")
        return x + md.keep(self.down(md.gelu(up)), "mlpwo")

    def attention(self, x: md.Tensor) -> md.Tensor:
        """Returns the output of the attention sub-layer."""
        layers = {"query_proj": self.query, "key_proj": self.key, "value_proj": self.value}
        query, key, value = (md.keep(layer(x), name) for name, layer in layers.items())
        context = attention(query, key, value, self.causal, self.attend, self.blocks)
        return md.keep(self.out(md.keep(context, "context")), "out_proj")
