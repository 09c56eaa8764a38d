"""``dot``: the product of tensors, summed over the dims that are named.

    md.dot(x, w, over="embed")                    x[batch seq embed] w[embed hidden] -> [batch seq hidden]
    md.dot(q, k, over="head")                     q[batch query heads head] k[batch key heads head]
                                                      -> [batch heads query key]

Dims that several operands share and that are not summed are multiplied along. Of two operands
it is one ``lax.dot_general``, and the result has the order in which that leaves it, so nothing is
transposed: shared dims first, then those of the first operand, then those of the second.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.dsl.array import NamedArray, Tensor, computed, sizes_of
from meshdsl.dsl.blame import absent, described, fail, labels
from meshdsl.dsl.dims import DimsLike, read_names
from meshdsl.dsl.operands import named_operand
from meshdsl.dsl.order import Names, common_order, promoted


def dot(*operands: Any, over: DimsLike, precision: Any = None, dtype: Any = None) -> Tensor:
    """The product of the operands, summed over dims.

    Args:
      operands: two or more named tensors.
      over: the dims to sum over, each in at least two operands; ``""`` for an outer product.
      precision: as in ``jax.numpy.einsum``.
      dtype: in which sums are made and returned, as ``preferred_element_type``.

    Raises DimError for a dim that fewer than two operands have, or that has two sizes.
    """
    read_in = [named_operand(x) for x in operands]
    summed = read_names(over)
    _check(read_in, summed)
    if len(read_in) == 2:
        return _two(read_in[0], read_in[1], summed, precision, dtype)
    return _several(read_in, summed, precision, dtype)


def _two(x: NamedArray, y: NamedArray, summed: Names, precision: Any, dtype: Any) -> Tensor:
    shared = tuple(name for name in x.dims if name in y.dims and name not in summed)
    contracted = [tuple(z.dims.index(name) for name in summed) for z in (x, y)]
    batch = [tuple(z.dims.index(name) for name in shared) for z in (x, y)]
    left, right = promoted(x.array, y.array)
    numbers = ((contracted[0], contracted[1]), (batch[0], batch[1]))
    made = lax.dot_general(left, right, numbers, precision=precision, preferred_element_type=dtype or left.dtype)
    free = (name for z in (x, y) for name in z.dims if name not in summed and name not in shared)
    return computed(made, (*shared, *free))


def _several(operands: Sequence[NamedArray], summed: Names, precision: Any, dtype: Any) -> Tensor:
    """An einsum in the cheapest order of pairs; the result has the merged order of its operands."""
    number = {name: i for i, name in enumerate(common_order(x.dims for x in operands))}
    kept = tuple(name for name in number if name not in summed)
    spelled = [part for x in operands for part in (x.array, [number[name] for name in x.dims])]
    out = [number[name] for name in kept]
    made = jnp.einsum(*spelled, out, precision=precision, preferred_element_type=dtype)
    return computed(made, kept)


def _check(operands: Sequence[NamedArray], summed: Names) -> None:
    if len(operands) < 2:
        raise fail("dot takes two operands or more; md.sum(x, over=...) sums one")
    sizes_of(operands)
    rows = [row for name in summed for row in _faults(name, operands)]
    if rows:
        raise fail(rows)


def _faults(name: str, operands: Sequence[NamedArray]) -> list[str]:
    having = [i for i, x in enumerate(operands) if name in x.dims]
    called = labels(len(operands))
    if not having or len(operands) == 2:
        return [absent(name, called[i], x) for i, x in enumerate(operands) if i not in having]
    if len(having) == 1:
        (i,) = having
        return [f"dim {name!r} is only in {called[i]}{described(operands[i])}; md.sum sums one operand"]
    return []
