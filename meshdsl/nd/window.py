"""Convolution and pooling: windows that slide along named dims.

    md.conv(images, kernel, over="height width", sum="channels")
        images[batch height width channels] kernel[height width channels filters] -> [batch height width filters]

The window slides along the dims ``over``, the dim ``sum`` is contracted, and the kernel's other dim takes its place.
Any order of dims is accepted; nothing is transposed.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.nd.diagnostics import absent, described, fail
from meshdsl.nd.named_array import (
    NamedArray,
    Names,
    Tensor,
    axes,
    computed,
    is_pair,
    is_whole,
    named_operand,
    one_name,
    promoted,
)
from meshdsl.nd.named_dims import DimsLike, read_names

Steps: TypeAlias = int | Sequence[int]
Padding: TypeAlias = str | Sequence[tuple[int, int]]
_PADDINGS = ("SAME", "SAME_LOWER", "VALID")


def conv(
    x: Any,
    kernel: Any,
    over: DimsLike,
    sum: DimsLike,
    stride: Steps = 1,
    padding: Padding = "SAME",
    dilation: Steps = 1,
    groups: int = 1,
    precision: Any = None,
) -> Tensor:
    """Return a convolution along dims, as ``lax.conv_general_dilated``.

    Args:
      x: has one dim besides ``over`` and ``sum``: the batch.
      kernel: has one dim besides them: the output channels. Its sizes along ``over`` are those of the window.
      over: the dims along which the kernel slides.
      sum: the contracted dim, the input channels; with ``groups``, its size in the kernel is that of one group.
      stride: step of the window, one for all dims or one per dim of ``over``.
      padding: "SAME", "SAME_LOWER", "VALID", or (before, after) per dim of ``over``.
      dilation: distance of the kernel's elements, one for all dims or one per dim.
      groups: number of groups that input and output channels are divided into.
      precision: as in ``jax.numpy.einsum``.

    Returns:
      A tensor with the dims of ``x``, where the output channels replace ``sum``.

    Raises:
      DimError: a dim is missing, superfluous or of a size that does not fit.

    Example:
      >>> md.conv(images, kernel, over="height width", sum="channels")
    """
    x, kernel, space, summed = named_operand(x), named_operand(kernel), read_names(over), one_name(sum, "sum")
    batch, made = _rest("x", x, (*space, summed)), _rest("kernel", kernel, (*space, summed))
    if made == batch:
        sides = f"x{described(x)} and kernel{described(kernel)}"
        raise fail(f"dim {made!r} is in both {sides}, but neither in over nor in sum; rename one with md.rename")
    out = tuple(made if name == summed else name for name in x.dims)
    if not (is_whole(groups) and groups >= 1 and kernel.shape[made] % groups == 0):
        raise fail(f"groups={groups!r} does not divide {made}={kernel.shape[made]} of kernel{described(kernel)}")
    if x.shape[summed] != kernel.shape[summed] * groups:
        sizes = f"size {x.shape[summed]} in x{described(x)} and {kernel.shape[summed]} in kernel{described(kernel)}"
        raise fail(
            f"dim {summed!r} has {sizes}; with groups={groups}, its size in x must be {groups} times that in the kernel"
        )
    numbers = lax.ConvDimensionNumbers(
        tuple(map(x.dims.index, (batch, summed, *space))),
        tuple(map(kernel.dims.index, (made, summed, *space))),
        tuple(map(out.index, (batch, made, *space))),
    )
    left, right = promoted(x.array, kernel.array)
    array = lax.conv_general_dilated(
        left,
        right,
        _each("stride", stride, space),
        _around(padding, space),
        rhs_dilation=_each("dilation", dilation, space),
        dimension_numbers=numbers,
        feature_group_count=groups,
        precision=precision,
    )
    return computed(array, out)


def max_pool(x: Any, over: DimsLike, window: Steps, stride: Steps | None = None, padding: Padding = "VALID") -> Tensor:
    """Return the largest element of each window along these dims.

    Args:
      x: a named tensor.
      over: the dims along which the window slides.
      window: its size, one for all dims or one per dim of ``over``.
      stride: its step, one for all or one per dim; the window's size by default.
      padding: "SAME", "SAME_LOWER", "VALID", or (before, after) per dim of ``over``.

    Returns:
      A tensor with the dims and the dtype of ``x``.

    Raises:
      DimError: ``x`` lacks a dim, or a number does not fit ``over``.

    Example:
      >>> md.max_pool(images, over="height width", window=2)
    """
    x = named_operand(x)
    least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    return _pool(x, lax.max, np.array(least, x.dtype), over, window, stride, padding)


def sum_pool(x: Any, over: DimsLike, window: Steps, stride: Steps | None = None, padding: Padding = "VALID") -> Tensor:
    """Return the sum of each window along these dims; arguments and result as in :func:`max_pool`.

    Example:
      >>> md.sum_pool(md.ones("height=4"), over="height", window=2)
      NamedArray([height=2], Array([2., 2.], dtype=float32))
    """
    x = named_operand(x)
    return _pool(x, lax.add, 0, over, window, stride, padding)


def _pool(
    x: NamedArray,
    fn: Callable[..., Any],
    start: Any,
    over: DimsLike,
    window: Steps,
    stride: Steps | None,
    padding: Padding,
) -> Tensor:
    axes(x, over)
    space = read_names(over)
    sizes = dict(zip(space, _each("window", window, space), strict=True))
    steps = dict(zip(space, _each("stride", window if stride is None else stride, space), strict=True))
    padding = _around(padding, space)
    if not isinstance(padding, str):
        around = dict(zip(space, padding, strict=True))
        padding = [around.get(name, (0, 0)) for name in x.dims]
    shape, strides = ([known.get(name, 1) for name in x.dims] for known in (sizes, steps))
    return computed(lax.reduce_window(x.array, start, fn, shape, strides, padding), x.dims)


def _rest(label: str, x: NamedArray, known: Names) -> str:
    """Return the one dim besides the known ones."""
    missing = [absent(name, label, x) for name in known if name not in x.dims]
    rest = [name for name in x.dims if name not in known]
    if missing or len(rest) != 1:
        raise fail(
            missing or [f"{label}{described(x)} has {len(rest)} dims besides {' '.join(known)}; expected exactly one"]
        )
    return rest[0]


def _each(argument: str, steps: Steps, space: Names) -> tuple[int, ...]:
    """Return one number per dim, for arguments such as ``window`` and ``stride``."""
    given = (steps,) * len(space) if isinstance(steps, int) else steps
    if isinstance(given, tuple | list) and len(given) == len(space) and all(is_whole(n) and n >= 1 for n in given):
        return tuple(given)
    raise fail(
        f"{argument}={steps!r} is invalid for over={' '.join(space)!r}; expected an integer >= 1, or one per dim"
    )


def _around(padding: Padding, space: Names) -> Padding:
    """Return the padding if it is a known word or a pair per dim; DimError otherwise."""
    if isinstance(padding, str) and padding.upper() in _PADDINGS:
        return padding
    if isinstance(padding, tuple | list) and len(padding) == len(space) and all(map(is_pair, padding)):
        return padding
    words = ", ".join(map(repr, _PADDINGS))
    raise fail(
        f"padding={padding!r} is invalid for over={' '.join(space)!r}; expected {words}, or (before, after) per dim"
    )
