"""Convolutions and pooling: windows that slide along named dims.

    md.conv(images, kernel, over="height width", sum="channels")
        images[batch height width channels] kernel[height width channels filters] -> [batch height width filters]

The dims ``over`` slide, ``sum`` is multiplied and summed away, the kernel's other dim is new and stands
where ``sum`` stood; any order of dims will do, nothing is transposed.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.dsl.array import NamedArray, Tensor, computed
from meshdsl.dsl.blame import absent, described, fail
from meshdsl.dsl.dims import DimsLike, read_names
from meshdsl.dsl.operands import axes, named_operand
from meshdsl.dsl.order import Names, promoted

Steps: TypeAlias = int | Sequence[int]
Padding: TypeAlias = str | Sequence[tuple[int, int]]


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
    """A convolution along dims, as ``lax.conv_general_dilated``.

    Args:
      x: one dim besides ``over`` and ``sum``: the batch.
      kernel: one dim besides them: what is made.
      over: the dims along which the kernel slides; their sizes in the kernel are the window's.
      sum: the dim that is summed; with ``groups`` its size in the kernel is that of one group.
      stride: steps of the window, one for all or one per dim of ``over``.
      padding: "SAME", "VALID", or (before, after) per dim of ``over``.
      dilation: distance of the kernel's elements, one for all or one per dim.
      groups: in how many groups ``sum`` and what is made are cut, group by group.
      precision: as in ``jax.numpy.einsum``.
    """
    x, kernel, space, (summed,) = named_operand(x), named_operand(kernel), read_names(over), read_names(sum)
    batch, made = _rest("x", x, (*space, summed)), _rest("kernel", kernel, (*space, summed))
    out = tuple(made if name == summed else name for name in x.dims)
    if x.shape[summed] != kernel.shape[summed] * groups:
        sizes = f"{x.shape[summed]} in x{described(x)}, {kernel.shape[summed]} in kernel{described(kernel)}"
        raise fail(f"dim {summed!r} has {sizes}; with groups={groups} the first is {groups} times the second")
    numbers = lax.ConvDimensionNumbers(
        tuple(map(x.dims.index, (batch, summed, *space))),
        tuple(map(kernel.dims.index, (made, summed, *space))),
        tuple(map(out.index, (batch, made, *space))),
    )
    left, right = promoted(x.array, kernel.array)
    array = lax.conv_general_dilated(
        left,
        right,
        _each(stride, len(space)),
        padding,
        rhs_dilation=_each(dilation, len(space)),
        dimension_numbers=numbers,
        feature_group_count=groups,
        precision=precision,
    )
    return computed(array, out)


def max_pool(x: Any, over: DimsLike, window: Steps, stride: Steps | None = None, padding: Padding = "VALID") -> Tensor:
    """The largest element of each window along these dims; ``stride`` is the window's size if not given."""
    x = named_operand(x)
    least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    return _pool(x, lax.max, np.array(least, x.dtype), over, window, stride, padding)


def sum_pool(x: Any, over: DimsLike, window: Steps, stride: Steps | None = None, padding: Padding = "VALID") -> Tensor:
    """The sum of each window along these dims."""
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
    sizes = dict(zip(space, _each(window, len(space)), strict=True))
    steps = dict(zip(space, _each(window if stride is None else stride, len(space)), strict=True))
    if not isinstance(padding, str):
        around = dict(zip(space, padding, strict=True))
        padding = [around.get(name, (0, 0)) for name in x.dims]
    shape, strides = ([known.get(name, 1) for name in x.dims] for known in (sizes, steps))
    return computed(lax.reduce_window(x.array, start, fn, shape, strides, padding), x.dims)


def _rest(label: str, x: NamedArray, known: Names) -> str:
    """The one dim besides the known ones."""
    missing = [absent(name, label, x) for name in known if name not in x.dims]
    rest = [name for name in x.dims if name not in known]
    if missing or len(rest) != 1:
        raise fail(missing or [f"{label}{described(x)} has {len(rest)} dims besides {' '.join(known)}; conv takes one"])
    return rest[0]


def _each(steps: Steps, count: int) -> tuple[int, ...]:
    given = (steps,) * count if isinstance(steps, int) else tuple(steps)
    if len(given) != count:
        raise fail(f"{len(given)} numbers {given} for {count} dims")
    return given
