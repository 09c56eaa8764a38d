"""Check: the sharded step computes what the unsharded step computes, leaf by leaf.

The error of a leaf is its largest absolute difference, measured against the leaf's largest
value, or against a floor when the leaf is almost nothing beside the rest of the tree: a bias
gradient of 1e-9 in a tree of ones carries no digits to compare. With t the tolerance:

    error(leaf) = max |got - expected| / max(largest(leaf), floor * largest(tree))  <=  t

Reductions in another order change floating-point digits, and nothing else. So integers, bools
and keys are compared exactly, and where the reference is not finite the result has to be the
same infinity, or a NaN for a NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.errors import CheckError, faults

FLOOR = 1e-3
TOLERANCES = {8: 1e-1, 16: 2e-2, 32: 2e-4, 64: 1e-9}  # by bits of a float


@dataclass(frozen=True)
class LeafError:
    """How far one leaf is off, and by how much it may be."""

    path: str
    error: float
    tolerance: float
    fault: str = ""

    @property
    def ok(self) -> bool:
        """Within tolerance and without a fault."""
        return not self.fault and self.error <= self.tolerance

    def __str__(self) -> str:
        return f"{self.path}: {self.fault or f'relative error {self.error:.2e}, allowed {self.tolerance:.0e}'}"


@dataclass(frozen=True)
class CheckReport:
    """Every leaf's error, worst first."""

    leaves: tuple[LeafError, ...]

    @property
    def ok(self) -> bool:
        """Whether every leaf agrees."""
        return all(leaf.ok for leaf in self.leaves)

    @property
    def worst(self) -> float:
        """The largest relative error of all leaves."""
        return max((leaf.error for leaf in self.leaves), default=0.0)

    def __str__(self) -> str:
        exact = sum(leaf.error == 0 and leaf.ok for leaf in self.leaves)
        head = f"{len(self.leaves)} outputs agree, {exact} of them exactly; the worst:"
        return "\n".join([head, *(f"  {leaf}" for leaf in self.leaves[:5])])


def check_numbers(
    expected: Sequence[Any], got: Sequence[Any], paths: Sequence[str], tolerance: float | None = None
) -> CheckReport:
    """Compare flat outputs; ``tolerance`` replaces the default of every float dtype.

    Raises CheckError naming the leaves that are off, worst first.
    """
    pairs = [(path, _plain(a), _plain(b)) for path, a, b in zip(paths, expected, got, strict=True)]
    largest = max((_largest(a) for _, a, _ in pairs), default=0.0)
    leaves = [_compare(path, a, b, FLOOR * largest, tolerance) for path, a, b in pairs]
    report = CheckReport(tuple(sorted(leaves, key=lambda leaf: (leaf.ok, -leaf.error))))
    if not report.ok:
        wrong = [str(leaf) for leaf in report.leaves if not leaf.ok]
        title = f"{len(wrong)} of {len(leaves)} outputs differ from the unsharded step"
        raise CheckError(faults(title, wrong[:20], f"... and {len(wrong) - 20} more" if len(wrong) > 20 else ""))
    return report


def _plain(x: Any) -> np.ndarray:
    """The leaf as numpy; keys as their integers."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _compare(path: str, a: np.ndarray, b: np.ndarray, floor: float, tolerance: float | None) -> LeafError:
    if a.shape != b.shape or a.dtype != b.dtype:
        return LeafError(path, np.inf, 0.0, f"{b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}")
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return _exact(path, a, b)
    allowed = _tolerance(a.dtype) if tolerance is None else tolerance
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return LeafError(path, np.inf, allowed, "infinities or NaNs differ from the unsharded step's")
    if not np.isfinite(b[finite]).all():
        count = int((~np.isfinite(b[finite])).sum())
        return LeafError(path, np.inf, allowed, f"{count} values are not finite, and are in the unsharded step")
    scale = max(_largest(a), floor)
    off = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    return LeafError(path, off / scale if off else 0.0, allowed)


def _exact(path: str, a: np.ndarray, b: np.ndarray) -> LeafError:
    wrong = int((a != b).sum())
    return LeafError(path, float(wrong > 0), 0.0, f"{wrong} of {a.size} {a.dtype} values differ" if wrong else "")


def _largest(a: np.ndarray) -> float:
    """The largest finite magnitude of a float leaf; 0 for others."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return 0.0
    sizes = np.abs(a.astype(np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64))
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))


def _tolerance(dtype: np.dtype) -> float:
    parts = 2 if jnp.issubdtype(dtype, jnp.complexfloating) else 1
    return TOLERANCES[8 * dtype.itemsize // parts]
