"""The order of dims where several tensors meet, and arrays brought into it."""

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

Names = tuple[str, ...]


def common_order(orders: Iterable[Names]) -> Names:
    """All names, in an order that keeps that of every operand if there is one."""
    return reduce(_merge, orders, ())


def _merge(a: Names, b: Names) -> Names:
    if [name for name in a if name in b] != [name for name in b if name in a]:
        lead, other = (a, b) if len(a) >= len(b) else (b, a)
        return lead + tuple(name for name in other if name not in lead)
    merged: list[str] = []
    rest = list(b)
    for name in a:
        if name in b:
            at = rest.index(name)
            merged += rest[:at]
            del rest[: at + 1]
        merged.append(name)
    return (*merged, *rest)


def permuted(array: Any, dims: Names, wanted: Names) -> Any:
    """The array with its dims in the order of ``wanted``; itself if they are."""
    if dims == wanted:
        return array
    return jnp.transpose(array, [dims.index(name) for name in wanted])


def aligned(array: Any, dims: Names, wanted: Names) -> Any:
    """The array so that ``jax.numpy`` broadcasts it against arrays with the dims ``wanted``."""
    present = [name for name in wanted if name in dims]
    array = permuted(array, dims, tuple(present))
    missing = [i for i, name in enumerate(wanted) if name not in dims]
    if jax.config.jax_numpy_rank_promotion == "allow":  # type: ignore[attr-defined]
        lead = leading(missing)
        missing = [i - lead for i in missing[lead:]]
    return jnp.expand_dims(array, missing) if missing else array


def leading(positions: Sequence[int]) -> int:
    """How many of the positions are 0, 1, 2, ..."""
    return next((n for n, i in enumerate(positions) if n != i), len(positions))


def promoted(*arrays: Any) -> list[Any]:
    """The arrays in their common dtype, as ``jax.numpy`` has them meet."""
    common = jnp.result_type(*arrays)
    return [x if x.dtype == common else x.astype(common) for x in arrays]
