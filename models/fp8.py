"""Matrix products in float8: both operands are scaled to the range of the format and rounded, sums are in float32.

    plain           operands as they are
    float8          a tensor is divided by its scale, its largest magnitude over the largest number of the format
                    (current scaling): weights and activations become float8_e4m3fn, and gradients, whose magnitudes
                    differ more, float8_e5m2 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022)
    float8_static   all scales are 1, and magnitudes beyond the format become its largest number, as in models whose
                    values have unit scale (Blake et al., "Unit Scaling", 2023); it costs what delayed scaling does,
                    which takes scales from earlier steps (Transformer Engine)

Forward and backward pass have three products, and all of them multiply two float8 tensors:

    y = x w    e4m3 x e4m3          dx = dy w'    e5m2 x e4m3          dw = x' dy    e4m3 x e5m2

A scale is a maximum over the whole tensor, and division and rounding are elementwise. So each device can round its part
of a split weight once the maximum is known, a scalar, and the planner gathers one byte per element, without being told
to, as FSDP with float8 all-gathers does (torchao). What is kept for the backward pass is the rounded ``x``; ``w`` is
there anyway, and is rounded again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.errors import ArgumentError, nearest

VARIANTS = ("plain", "float8", "float8_static")
_WEIGHTS, _GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2
Numbers = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


def multiplier(variant: str) -> Callable[..., jax.Array]:
    """Returns the function in place of ``jax.lax.dot_general`` by which a variant multiplies.

    Args:
      variant: one of ``VARIANTS``.

    Raises:
      ArgumentError: ``variant`` is none of them.

    Example:
      >>> x, w = md.ones("batch=4 embed=16"), md.ones("embed=16 hidden=32")
      >>> md.dot(x, w, over="embed", dot_general=multiplier("float8")).dims
      ('batch', 'hidden')
    """
    if variant not in VARIANTS:
        names = ", ".join(map(repr, VARIANTS))
        raise ArgumentError(f"no variant {variant!r} of products{nearest(variant, VARIANTS)}; it is one of {names}")
    return lax.dot_general if variant == "plain" else partial(dot_general, static=variant == "float8_static")


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    static: bool = False,
) -> jax.Array:
    """Returns ``jax.lax.dot_general`` of operands rounded to float8, whose gradients are products in float8 too.

    It can be given to layers that take such a function, ``flax.nnx.Linear`` among them. It has first derivatives only:
    tangents of second ones would be rounded to float8 without scales.

    Args:
      lhs: floats, the activations; what is kept of them for the backward pass is rounded.
      rhs: floats, the weights.
      dimension_numbers: as of ``jax.lax.dot_general``.
      precision: of no effect.
      preferred_element_type: dtype of the result; by default that of the operands.
      out_sharding: None; the planner lays out the result.
      static: whether all scales are 1.

    Raises:
      ArgumentError: an operand has no floats, ``out_sharding`` is given, or a second derivative is asked for.

    Example:
      >>> float(dot_general(jnp.ones(16), jnp.full(16, 0.5), (((0,), (0,)), ((), ()))))
      8.0
    """
    if not all(jnp.issubdtype(v.dtype, jnp.floating) for v in (lhs, rhs)):
        raise ArgumentError(
            f"{lhs.dtype} x {rhs.dtype}: products in float8 are of floats; jax.lax.dot_general multiplies other numbers"
        )
    if out_sharding is not None:
        raise ArgumentError(
            f"out_sharding={out_sharding}: products in float8 take none; md.constrain states the layout of the result"
        )
    made = preferred_element_type or jnp.result_type(lhs, rhs)
    contract, batch = dimension_numbers
    numbers = tuple(tuple(map(int, dims)) for dims in contract), tuple(tuple(map(int, dims)) for dims in batch)
    return _product((numbers, jnp.dtype(lhs.dtype).name, static), lhs, rhs).astype(made)


Static = tuple[Numbers, str, bool]  # dims, dtype of the activations, whether scales are 1


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(static: Static, x: jax.Array, w: jax.Array) -> jax.Array:
    return _forward(static, x, w)[0]


def _forward(static: Static, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    numbers, _, ones = static
    scales = _scale(x, _WEIGHTS, ones), _scale(w, _WEIGHTS, ones)
    rounded = _rounded(x, scales[0], _WEIGHTS)
    made = _dot(rounded, _rounded(w, scales[1], _WEIGHTS), numbers, *scales)
    return made, (rounded, w, scales)


def _backward(static: Static, kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    (contract, batch), dtype, ones = static
    x, w, (of_x, of_w) = kept
    of_gradient = _scale(gradient, _GRADIENTS, ones)
    g = _rounded(gradient, of_gradient, _GRADIENTS)
    free = [
        tuple(d for d in range(v.ndim) if d not in (*summed, *both))
        for v, summed, both in zip((x, w), contract, batch, strict=True)
    ]
    shared = tuple(range(len(batch[0])))
    ends = len(shared), len(shared) + len(free[0]), g.ndim
    rows, columns = tuple(range(ends[0], ends[1])), tuple(range(ends[1], ends[2]))

    dx = _dot(g, _rounded(w, of_w, _WEIGHTS), ((columns, free[1]), (shared, batch[1])), of_gradient, of_w)
    dw = _dot(x, g, ((free[0], rows), (batch[0], shared)), of_x, of_gradient)
    # The dims of dx are those shared, free, and contracted in the order of w; those of dw shared, contracted in the
    # order of x, and free.
    summed = [[dims[i] for i in _inverse(others)] for dims, others in (contract, contract[::-1])]
    dx = jnp.transpose(dx, _inverse((*batch[0], *free[0], *summed[0])))
    dw = jnp.transpose(dw, _inverse((*batch[1], *summed[1], *free[1])))
    return dx.astype(dtype), dw.astype(w.dtype)


_product.defvjp(_forward, _backward)


def _dot(x: jax.Array, y: jax.Array, numbers: Numbers, *scales: jax.Array | None) -> jax.Array:
    made = lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32)
    return made if scales[0] is None or scales[1] is None else made * (scales[0] * scales[1])


def _inverse(dims: Sequence[int]) -> list[int]:
    """Returns the places of dims in ascending order: for a permutation, the inverse one."""
    return sorted(range(len(dims)), key=lambda i: dims[i])


def _scale(x: jax.Array, to: Any, ones: bool) -> jax.Array | None:
    """Returns the scale of a tensor.

    It is 1 of zeros, of numbers so small that it is no normal number, which devices take for 0, and where a number is
    not finite, which the result then shows.
    """
    if ones:
        return None
    most = jnp.abs(x).max(initial=0).astype(jnp.float32)
    scale = most / float(jnp.finfo(to).max)
    return jnp.where((scale >= float(jnp.finfo(jnp.float32).tiny)) & jnp.isfinite(most), scale, 1.0)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _rounded(x: jax.Array, scale: jax.Array | None, to: Any) -> jax.Array:
    """Returns the numbers of ``x`` in a scale; None is 1, and clips. No number is larger than its scale allows."""
    if scale is None:
        most = float(jnp.finfo(to).max)
        return jnp.clip(x.astype(jnp.float32), -most, most).astype(to)
    return (x.astype(jnp.float32) / scale).astype(to)


@_rounded.defjvp
def _refused(*_: Any) -> tuple[jax.Array, jax.Array]:
    raise ArgumentError(
        "products in float8 have no second derivatives: their tangents would be rounded without a scale; "
        "differentiate plain products twice"
    )
