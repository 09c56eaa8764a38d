"""Check: the sharded step computes what the unsharded step computes, leaf by leaf.

The error of a leaf is its largest absolute difference, measured against the leaf's largest
value, or against a floor when the leaf is almost nothing beside the rest of the tree: a bias
gradient of 1e-9 in a tree of ones carries no digits to compare, and no more does one in a tree of
zeros, which is taken for one of ones. With t the tolerance:

    error(leaf) = max |got - expected| / max(largest(leaf), floor * largest(tree))  <=  t

Reductions in another order change floating-point digits, and nothing else. So integers, bools
and keys are compared exactly, and where the reference is not finite the result must not be
finite either: an infinity stays the same one, or becomes NaN, as sums that overflow may in another
order.

Some leaves are made of digits that no order of summation agrees on: Adam divides a gradient
that is zero but for rounding by its own size. So before a leaf is called wrong, the unsharded
step runs a few times more with its arguments *nudged* by the rounding of the coarsest floats it
computes in (a loss in float32 may come from products in bfloat16); what that does to the leaf,
times ``MARGIN``, is allowed as well. And the unsharded step runs once in wider floats, if it sums
in short ones: the sharded step may be as far from that as the unsharded step is, so twice that
distance may lie between the two. A tolerance that was asked for is kept as it is.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.errors import ArgumentError, CheckError, faults, is_a
from meshdsl.ir.graph import Literal, Op, TracedProgram, Value, walk
from meshdsl.lowering.interpreter import Arrays, Target, literal, run_graph
from meshdsl.lowering.local.registry import bind

# ---- Check -----------------------------------------------------------------------------------------------------------


FLOOR = 1e-3
MARGIN, NUDGES = 4.0, 3
TOLERANCES = {8: 1e-1, 16: 2e-2, 32: 2e-4, 64: 1e-9}  # by bits of a float


@dataclass(frozen=True)
class LeafError:
    """How far one leaf is off, and by how much it may be.

    Args:
      noise: what rounding its arguments does to it.
      own: how far the unsharded step is off the same step in wider floats.
      lost: how many of its values are not finite, in the unsharded step either.
    """

    path: str
    error: float
    tolerance: float
    fault: str = ""
    noise: float = 0.0
    own: float = 0.0
    lost: int = 0

    @property
    def ok(self) -> bool:
        """Within tolerance and without a fault."""
        return not self.fault and self.error <= self.tolerance

    @property
    def unknown(self) -> bool:
        """Whether rounding moves it so far that its error says nothing."""
        return self.ok and max(self.noise, self.own) > 0 and self.tolerance >= 1

    def __str__(self) -> str:
        noise = f" (nudging the arguments moves it by {self.noise:.0e})" if self.noise else ""
        own = f" (the unsharded step is {self.own:.0e} off itself in wider floats)" if self.own else ""
        lost = f" ({_values(self.lost)} not finite, in the unsharded step too)" if self.lost else ""
        name = self.path or "the result"
        said = self.fault or f"relative error {self.error:.2e}, allowed {self.tolerance:.0e}"
        return f"{name}: {said}{noise}{own}{lost}"


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
        count, exact = len(self.leaves), sum(leaf.error == 0 and leaf.ok for leaf in self.leaves)
        unknown, lost = sum(leaf.unknown for leaf in self.leaves), sum(leaf.lost > 0 for leaf in self.leaves)
        said = [f"{count - unknown} of {count} outputs agree, {exact} of them exactly"]
        said += [f"of {unknown} nothing can be said: rounding moves them as far"] if unknown else []
        said += [f"{lost} not finite everywhere"] if lost else []
        return "\n".join([f"{'; '.join(said)}; the worst:", *(f"  {leaf}" for leaf in self.leaves[:5])])


def check_numbers(
    expected: Sequence[Any],
    got: Sequence[Any],
    paths: Sequence[str],
    tolerance: float | None = None,
    nudged: Callable[[], Iterable[Sequence[Any]]] = tuple,
    widened: Callable[[], Sequence[Any] | None] = lambda: None,
) -> CheckReport:
    """Compare flat outputs; ``tolerance`` replaces the default of every float dtype.

    Args:
      nudged: makes the expected outputs for nudged arguments, a few times; asked only where a leaf is off.
      widened: makes them in wider floats, if the step has shorter ones; likewise.

    Raises CheckError naming the leaves that are off, worst first.
    """
    report = _compare_all(expected, got, paths, tolerance)
    if not report.ok and tolerance is None:
        noise = [_compare_all(expected, outputs, paths, None) for outputs in nudged()]
        wide = widened()
        own = [_compare_all(expected, _like(expected, wide), paths, None)] if wide is not None else []
        report = CheckReport(tuple(_with_noise(leaf, noise, own) for leaf in report.leaves))
    if not report.ok:
        wrong = [str(leaf) for leaf in report.leaves if not leaf.ok]
        title = f"{len(wrong)} of {len(report.leaves)} outputs differ from the unsharded step"
        raise CheckError(faults(title, wrong[:20], f"... and {len(wrong) - 20} more" if len(wrong) > 20 else ""))
    return report


def rounding(program: TracedProgram) -> float:
    """The relative rounding error of the coarsest floats that a program computes in."""
    dtypes = {value.dtype for _, op in walk(program.graph) for value in op.outputs}
    return max((float(jnp.finfo(d).eps) for d in dtypes if jnp.issubdtype(d, jnp.floating)), default=0.0)


def check_tolerance(tolerance: object) -> None:
    """ArgumentError unless it is a relative error, or None for the defaults."""
    number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool) and tolerance >= 0
    if tolerance is not None and not number:
        raise ArgumentError(f"tolerance: {is_a(tolerance)}, not a relative error from 0 on")


def perturb(leaf: Any, seed: int, least: float = 0.0) -> Any:
    """A float array, every element up or down by a rounding error or two, of ``least`` or more; all else as it is."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return leaf
    steps = np.random.default_rng(seed).integers(-2, 3, leaf.shape)
    return leaf * np.asarray(1 + steps * max(float(jnp.finfo(dtype).eps), least), dtype)


def _compare_all(
    expected: Sequence[Any], got: Sequence[Any], paths: Sequence[str], allowed: float | None
) -> CheckReport:
    """Every leaf's error, worst first."""
    pairs = [(path, _plain(a), _plain(b)) for path, a, b in zip(paths, expected, got, strict=True)]
    largest = max((_largest(a) for _, a, _ in pairs), default=0.0) or 1.0
    leaves = [_compare(path, a, b, FLOOR * largest, allowed) for path, a, b in pairs]
    return CheckReport(tuple(sorted(leaves, key=lambda leaf: (leaf.ok, -leaf.error))))


def _with_noise(leaf: LeafError, nudged: Iterable[CheckReport], wide: Iterable[CheckReport]) -> LeafError:
    """A leaf that is off, with what rounding does to it as part of its tolerance."""
    if leaf.ok or leaf.fault:
        return leaf
    noise, own = _worst(leaf.path, nudged), _worst(leaf.path, wide)
    return replace(leaf, noise=noise, own=own, tolerance=max(leaf.tolerance, MARGIN * noise, 2 * own))


def _worst(path: str, reports: Iterable[CheckReport]) -> float:
    return max((x.error for r in reports for x in r.leaves if x.path == path and not x.fault), default=0.0)


def _like(expected: Sequence[Any], wide: Sequence[Any]) -> list[Any]:
    """The outputs of the wide step, in the dtypes of the other."""
    return [
        jnp.asarray(b, a.dtype) if jnp.issubdtype(a.dtype, jnp.inexact) else b
        for a, b in zip(expected, wide, strict=True)
    ]


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
    if np.isfinite(b[~finite]).any():
        count = int(np.isfinite(b[~finite]).sum())
        return LeafError(path, np.inf, allowed, f"{_values(count)} finite, but not finite in the unsharded step")
    if other := int((np.isinf(a) & np.isinf(b) & (a != b)).sum()):
        return LeafError(path, np.inf, allowed, f"{_values(other)} infinite in another way than in the unsharded step")
    if not np.isfinite(b[finite]).all():
        count = int((~np.isfinite(b[finite])).sum())
        return LeafError(path, np.inf, allowed, f"{_values(count)} not finite, but finite in the unsharded step")
    scale = max(_largest(a), floor)
    off = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    return LeafError(path, off / scale if off else 0.0, allowed, lost=int((~finite).sum()))


def _values(count: int) -> str:
    return f"{count} value{' is' if count == 1 else 's are'}"


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


# ---- Wide ------------------------------------------------------------------------------------------------------------
# The unsharded step with its short floats held wide: how far the step itself is off.
#
# Where a step sums in bfloat16, it is off by what every partial sum was rounded. Another order of
# summation is off by as much, elsewhere; neither is nearer to what was meant. Nudging the arguments
# does not show that, for both then round alike. So the graph is walked once more, with every float
# shorter than 32 bits held in 32:
#
#     value                 bfloat16   ->  float32, in every operation that says nothing of bits
#     operation of bits     bitcasts, functions of one's own, kernels: narrowed before, widened after


_WIDE = np.dtype(np.float32)
_BITS = "bitcast_convert_type reduce_precision random_bits nextafter".split()
_SIMPLE = (bool, int, float, complex, str, tuple, type(None), np.dtype, np.generic)


class _WideTarget(Target):
    """Whole arrays, those of short floats in float32."""

    def __init__(self) -> None:
        self.arrays: dict[int, jax.Array] = {}

    def inner(self) -> "_WideTarget":
        """An empty environment."""
        return _WideTarget()

    def define(self, value: Value, array: jax.Array) -> None:
        """Keep the array, widened."""
        self.arrays[value.id] = _widened(array)

    def literal(self, x: Literal) -> jax.Array:
        """The literal, widened."""
        return _widened(literal(x))

    def read(self, op: Op, index: int, value: Value) -> jax.Array:
        """The array as it is kept."""
        return self.arrays[value.id]

    def run(self, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
        """The operation in wide floats, or in its own if it looks at their bits or runs a function of its own."""
        if op.name not in _BITS and all(isinstance(x, _SIMPLE) for x in op.params.values()):
            return bind(op, *arrays, **{name: _WIDE for name, x in op.params.items() if _is_short(x)})
        return bind(op, *(jnp.asarray(x, read.dtype) for x, read in zip(arrays, op.inputs, strict=True)))


def widened_step(program: TracedProgram) -> Callable[..., list[jax.Array]] | None:
    """The unsharded step on flat arrays with short floats held wide; None if there are none."""
    if not any(_is_short(value.dtype) for _, op in walk(program.graph) for value in op.outputs):
        return None
    return lambda *leaves: list(run_graph(program.graph, leaves, _WideTarget()))


def _is_short(dtype: Any) -> bool:
    known = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating)
    return known and dtype.itemsize < _WIDE.itemsize


def _widened(x: jax.Array) -> jax.Array:
    return jnp.asarray(x, _WIDE) if _is_short(x.dtype) else x
