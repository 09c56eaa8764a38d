"""Simulated devices in numpy: cut a value into the blocks of every rank, and join blocks to a value.

A *stack* is an array with one leading dim per mesh axis, then a dim of samples (independent random cases), then the
tensor's own dims. PRNG keys are stacked as their key data. ``cut`` and ``join`` are the two directions of the meaning
of a placement, so a function on blocks is right if ``join(function(cut(x)))`` equals ``function(x)``.
"""

from collections.abc import Callable, Iterable

import jax
import numpy as np

from meshdsl.layouts.placement import B, Partial, Placement, Split

Array = np.ndarray
Random = np.random.Generator


def cut(value: Array, placed: tuple[Placement, ...], ranks: tuple[int, ...], rng: Random) -> Array:
    """Return the stack of ``value`` ([samples, ...]), where axis i of ``ranks[i]`` devices has ``placed[i]``."""
    if not placed:
        return value
    if placed[0] is B:
        return np.stack([cut(value, placed[1:], ranks[1:], rng)] * ranks[0])
    return np.stack([cut(part, placed[1:], ranks[1:], rng) for part in parts(value, placed[0], ranks[0], rng)])


def parts(value: Array, placed: Placement, ranks: int, rng: Random) -> Iterable[Array]:
    """Return the blocks or partial values on one mesh axis."""
    if isinstance(placed, Split):
        return np.split(value, ranks, axis=int(placed.dim) + 1)
    assert isinstance(placed, Partial)
    return _addends(value, ranks, rng) if placed.reduction == "sum" else _bounds(value, placed.reduction, ranks, rng)


def join(stack: Array, placed: tuple[Placement, ...]) -> Array | None:
    """Return the value that a stack represents; None if replicas differ."""
    if not placed:
        return stack
    inner = [join(part, placed[1:]) for part in stack]
    whole = [part for part in inner if part is not None]
    return JOIN[type(placed[0])](whole, placed[0]) if len(whole) == len(inner) else None


def agree(found: Array, expected: Array, exact: bool = False) -> bool:
    """Return whether two arrays are equal, up to rounding if not ``exact``, wherever ``expected`` is finite."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not _inexact(expected):
        return bool(np.array_equal(found, expected))
    finite = np.isfinite(expected)
    tolerance = 0 if exact else 3e-2 if expected.dtype.itemsize == 2 else 1e-4
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    a, b = found[finite].astype(wide), expected[finite].astype(wide)
    return bool(np.all(np.abs(a - b) <= tolerance * (1 + np.abs(b))))


def _concatenated(whole: list[Array], placed: Placement) -> Array | None:
    axis = int(placed.dim) + 1  # type: ignore[attr-defined]
    return np.concatenate(whole, axis=axis) if whole[0].ndim > axis else None


def _same(whole: list[Array], placed: Placement) -> Array | None:
    return whole[0] if all(agree(part, whole[0]) for part in whole) else None


def _reduced(whole: list[Array], placed: Placement) -> Array | None:
    functions = {"sum": np.add, "max": np.maximum, "min": np.minimum}
    with np.errstate(all="ignore"):
        found: Array = functions[placed.reduction].reduce(whole, dtype=whole[0].dtype)  # type: ignore[attr-defined]
    return found


JOIN: dict[type, Callable[[list[Array], Placement], Array | None]] = {
    Split: _concatenated,
    type(B): _same,
    Partial: _reduced,
}


def _addends(value: Array, ranks: int, rng: Random) -> list[Array]:
    """Return random addends of ``value``, zeros among them; an infinite value is a sum that overflows."""
    size = (ranks - 1, *value.shape)
    noise = rng.integers(-8, 9, size) * rng.integers(0, 2, size)
    noise = (noise / 4 if _inexact(value) else noise).astype(value.dtype)
    with np.errstate(all="ignore"):
        last = value - noise.sum(0, dtype=value.dtype)
    found = [*noise, last]
    if not _inexact(value) or np.iscomplexobj(value):
        return found
    huge = np.copysign(jax.numpy.finfo(value.dtype).max, value).astype(value.dtype)
    return [np.where(np.isinf(value), huge, part) for part in found]


def _bounds(value: Array, reduction: str, ranks: int, rng: Random) -> list[Array]:
    """Return parts whose maximum (minimum) is ``value``, the reduction's identity among them."""
    owner = rng.integers(0, ranks, value.shape)
    return [np.where(owner == rank, value, _beyond(value, reduction == "max", rng)) for rank in range(ranks)]


def _beyond(value: Array, below: bool, rng: Random) -> Array:
    """Return random values that do not exceed ``value`` (or are not below it)."""
    if value.dtype == bool:
        other = rng.integers(0, 2, value.shape).astype(bool)
        return np.asarray(value & other if below else value | other)
    step = rng.integers(0, 9, value.shape) * (-1 if below else 1)
    identity = rng.integers(0, 4, value.shape) == 0
    if _inexact(value):
        extreme = np.asarray(-np.inf if below else np.inf, value.dtype)
        base = np.where(np.isfinite(value) | (value == extreme), value, np.zeros_like(value))
        return np.where(identity, extreme, base + (step / 4).astype(value.dtype)).astype(value.dtype)
    limits = jax.numpy.iinfo(value.dtype)
    moved = np.clip(value.astype(np.int64) + step, limits.min, limits.max)
    return np.where(identity, limits.min if below else limits.max, moved).astype(value.dtype)


def _inexact(value: Array) -> bool:
    return bool(jax.numpy.issubdtype(value.dtype, jax.numpy.inexact))
