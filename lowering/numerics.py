"""Numerical comparison: the sharded step computes the same as the unsharded step, leaf by leaf.

The error of a leaf is its largest absolute difference, relative to the leaf's largest value, or to a floor if the leaf
is negligible in the tree: a bias gradient of 1e-9 in a tree of ones has no significant digits, and neither has one in a
tree of zeros, which is treated as a tree of ones. With t the tolerance:

    error(leaf) = max |got - expected| / max(largest(leaf), floor * largest(tree))  <=  t

Reductions in another order change floating-point digits and nothing else. So integers, bools and keys are compared
exactly, and where the reference is not finite the result must not be finite either: an infinity keeps its sign, or
becomes NaN, as overflowing sums may in another order.

Some leaves are rounding noise: Adam divides a gradient that is zero but for rounding by its own magnitude. So before a
leaf is reported as wrong, the unsharded step runs a few more times with its arguments *perturbed* by the rounding error
of the coarsest floats it computes in (a loss in float32 may come from products in bfloat16); the resulting change of
the leaf, times ``MARGIN``, is allowed as well. And the unsharded step runs once in wider floats, if it sums in short
ones: the sharded step may be as far from that as the unsharded step is, so twice that distance is allowed. A tolerance
that the user specifies is used as it is.

Where collectives round what they send (``low_bits=``), errors are root mean squares, of the difference and of the leaf,
and the tolerance is the budget that the user states.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.errors import ArgumentError, CheckError, faults, is_a, shortened
from meshdsl.ir.graph import Literal, Op, TracedProgram, Value, walk
from meshdsl.lowering.interpreter import Arrays, literal, run_graph
from meshdsl.lowering.reference import WholeTarget, is_divided, whole_step
from meshdsl.util.text import percent_text

# ---- Comparison ------------------------------------------------------------------------------------------------------


FLOOR = 1e-3  # of the largest value in the tree: smaller leaves are compared with this
BUDGET_FLOOR = 1e-6  # the same of budgets: a gradient is smaller than its weight, and its error counts
MARGIN = 4.0  # multiple of the change under perturbation that is allowed
NUDGES = 3  # runs with perturbed arguments
TOLERANCES = {8: 1e-1, 16: 2e-2, 32: 2e-4, 64: 1e-9}  # by bits of a float


@dataclass(frozen=True)
class LeafError:
    """The error of one leaf and its tolerance.

    Args:
      noise: its relative change under perturbed arguments.
      own: the relative error of the unsharded step with respect to wider floats.
      lost: the number of its values that are not finite, in the unsharded step too.
      is_budget: whether the error is a root mean square, and the tolerance the budget of ``low_bits``.
    """

    path: str
    error: float
    tolerance: float
    fault: str = ""
    noise: float = 0.0
    own: float = 0.0
    lost: int = 0
    is_budget: bool = False

    @property
    def ok(self) -> bool:
        """Within tolerance and without a fault."""
        return not self.fault and self.error <= self.tolerance

    @property
    def unknown(self) -> bool:
        """Whether rounding errors are so large that the comparison is inconclusive."""
        return self.ok and max(self.noise, self.own) > 0 and self.tolerance >= 1

    def __str__(self) -> str:
        noise = f" (perturbing the arguments changes it by {self.noise:.0e})" if self.noise else ""
        own = f" (the unsharded step differs by {self.own:.0e} from itself in wider floats)" if self.own else ""
        lost = f" ({_values(self.lost)} not finite, in the unsharded step too)" if self.lost else ""
        name = self.path or "the result"
        said = self.fault or f"relative error {self.error:.2e}, allowed {self.tolerance:.0e}"
        if self.is_budget and not self.fault:
            said = f"root mean square error {self.error:.2%}, budget {self.tolerance:.2%}"
        return f"{name}: {said}{noise}{own}{lost}"


@dataclass(frozen=True)
class CheckReport:
    """The errors of all leaves, largest first, and how much of the step the compared plan divides.

    Args:
      divided: per mesh axis of several devices, the part of the compute that it divides.
      undivided: paths of the leaves that nothing divided or communicated leads to; they agree under any plan.

    Example:
      >>> report = md.parallelize(lambda x: jnp.sum(x * x), "data=8", md.data_parallel()).check(jnp.ones((64, 8)))
      >>> report.ok, report.worst < 1e-6
      (True, True)
    """

    leaves: tuple[LeafError, ...]
    divided: Mapping[str, float] = field(default_factory=dict)
    undivided: tuple[str, ...] = ()

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
        said += [f"{unknown} inconclusive: rounding changes them as much"] if unknown else []
        said += [f"{lost} not finite everywhere"] if lost else []
        lines = [f"{'; '.join(said)}; largest errors:", *(f"  {leaf}" for leaf in self.leaves[:5])]
        return "\n".join([*lines, *self._divisions()])

    def _divisions(self) -> Iterator[str]:
        """Yields the share of compute that was divided, and the leaves that do not depend on anything divided."""
        if self.divided:
            shares = (f"{percent_text(share)} over {axis}" for axis, share in self.divided.items())
            yield f"compute divided: {', '.join(shares)}"
        if self.undivided and len(self.undivided) == len(self.leaves):
            yield (
                "no output depends on anything divided or communicated: nothing was tested; "
                "larger arguments, or check(..., divide='most'), test more"
            )
        elif self.undivided:
            paths = ", ".join(shortened([path or "the result" for path in self.undivided]))
            yield (
                f"{len(self.undivided)} of {len(self.leaves)} outputs would agree under any plan, "
                f"since nothing divided or communicated leads to {'them' if len(self.undivided) > 1 else 'it'}: {paths}"
            )


def check_numbers(
    expected: Sequence[Any],
    got: Sequence[Any],
    paths: Sequence[str],
    tolerance: float | None = None,
    nudged: Callable[[], Iterable[Sequence[Any]]] = tuple,
    widened: Callable[[], Sequence[Any] | None] = lambda: None,
    budget: float | None = None,
) -> CheckReport:
    """Compares flat outputs.

    Args:
      tolerance: replaces the default of every float dtype.
      nudged: computes the expected outputs for perturbed arguments, a few times; called only if a leaf is off.
      widened: computes them in wider floats, or returns None if the step has no shorter ones; likewise.
      budget: of collectives that round, in place of the defaults.

    Raises:
      CheckError: some leaves differ; the message lists them, largest error first.
    """
    budget = budget if tolerance is None else None
    report = _compare_all(expected, got, paths, tolerance, budget)
    if not report.ok and tolerance is None:
        noise = [_compare_all(expected, outputs, paths, None, budget) for outputs in nudged()]
        wide = widened()
        own = [_compare_all(expected, _like(expected, wide), paths, None, budget)] if wide is not None else []
        report = CheckReport(tuple(_with_noise(leaf, noise, own) for leaf in report.leaves))
    if not report.ok:
        wrong = [str(leaf) for leaf in report.leaves if not leaf.ok]
        title = f"{len(wrong)} of {len(report.leaves)} outputs differ from the unsharded step"
        more = [f"... and {len(wrong) - 20} more"] if len(wrong) > 20 else []
        more += (
            ["collectives round what they send, and errors of several add up: state a smaller low_bits=, or none"]
            if budget
            else []
        )
        raise CheckError(faults(title, wrong[:20], "\n".join(more)))
    return report


def rounding(program: TracedProgram) -> float:
    """Returns the relative rounding error of the coarsest floats that a program computes in."""
    dtypes = {value.dtype for _, op in walk(program.graph) for value in op.outputs}
    return max((float(jnp.finfo(d).eps) for d in dtypes if jnp.issubdtype(d, jnp.floating)), default=0.0)


def check_tolerance(tolerance: object) -> None:
    """Raises ArgumentError unless ``tolerance`` is a relative error, or None for the defaults."""
    number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool) and tolerance >= 0
    if tolerance is not None and not number:
        raise ArgumentError(f"tolerance: {is_a(tolerance)}, not a relative error from 0 on")


def perturb(leaf: Any, seed: int, least: float = 0.0) -> Any:
    """Returns a float array with every element changed by up to two rounding errors, of at least ``least``."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return leaf
    steps = np.random.default_rng(seed).integers(-2, 3, leaf.shape)
    return leaf * np.asarray(1 + steps * max(float(jnp.finfo(dtype).eps), least), dtype)


def _compare_all(
    expected: Sequence[Any], got: Sequence[Any], paths: Sequence[str], allowed: float | None, budget: float | None
) -> CheckReport:
    """Every leaf's error, worst first."""
    pairs = [(path, _plain(a), _plain(b)) for path, a, b in zip(paths, expected, got, strict=True)]
    largest = max((_largest(a) for _, a, _ in pairs), default=0.0) or 1.0
    floor = (BUDGET_FLOOR if budget else FLOOR) * largest
    leaves = [_compare(path, a, b, floor, allowed, budget) for path, a, b in pairs]
    return CheckReport(tuple(sorted(leaves, key=lambda leaf: (leaf.ok, -leaf.error))))


def _with_noise(leaf: LeafError, nudged: Iterable[CheckReport], wide: Iterable[CheckReport]) -> LeafError:
    """A leaf that is off, with its tolerance raised by rounding noise."""
    if leaf.ok or leaf.fault:
        return leaf
    noise, own = _worst(leaf.path, nudged), _worst(leaf.path, wide)
    return replace(leaf, noise=noise, own=own, tolerance=max(leaf.tolerance, MARGIN * noise, 2 * own))


def _worst(path: str, reports: Iterable[CheckReport]) -> float:
    return max((x.error for r in reports for x in r.leaves if x.path == path and not x.fault), default=0.0)


def _like(expected: Sequence[Any], wide: Sequence[Any]) -> list[Any]:
    """The outputs of the wide step in the dtypes of the others."""
    return [
        jnp.asarray(b, a.dtype) if jnp.issubdtype(a.dtype, jnp.inexact) else b
        for a, b in zip(expected, wide, strict=True)
    ]


def _plain(x: Any) -> np.ndarray:
    """The leaf as numpy; keys as their integers."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _compare(
    path: str, a: np.ndarray, b: np.ndarray, floor: float, tolerance: float | None, budget: float | None
) -> LeafError:
    if a.shape != b.shape or a.dtype != b.dtype:
        return LeafError(path, np.inf, 0.0, f"{b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}")
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return _exact(path, a, b)
    allowed = budget or (_tolerance(a.dtype) if tolerance is None else tolerance)
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(a)
    if np.isfinite(b[~finite]).any():
        count = int(np.isfinite(b[~finite]).sum())
        return LeafError(path, np.inf, allowed, f"{_values(count)} finite, but not finite in the unsharded step")
    if other := int((np.isinf(a) & np.isinf(b) & (a != b)).sum()):
        return LeafError(path, np.inf, allowed, f"{_values(other)} infinite with the opposite sign")
    if not np.isfinite(b[finite]).all():
        count = int((~np.isfinite(b[finite])).sum())
        return LeafError(path, np.inf, allowed, f"{_values(count)} not finite, but finite in the unsharded step")
    if budget:
        off, size = _root_mean_square(a[finite] - b[finite]), _root_mean_square(a[finite])
        share = off / max(size, floor) if off else 0.0
        return LeafError(path, share, allowed, lost=int((~finite).sum()), is_budget=True)
    scale = max(_largest(a), floor)
    off = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    return LeafError(path, off / scale if off else 0.0, allowed, lost=int((~finite).sum()))


def _root_mean_square(a: np.ndarray) -> float:
    """Of values that may be too large for their squares; 0 if there are none."""
    largest = _largest(a)
    return largest * float(np.sqrt(np.mean(np.abs(a / largest) ** 2))) if largest else 0.0


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


# ---- Wide floats -----------------------------------------------------------------------------------------------------
# The unsharded step with short floats stored in float32 measures the step's own rounding error.
#
# A step that sums in bfloat16 rounds every partial sum. Another order of summation rounds as much, elsewhere; neither
# is closer to the exact result. Perturbed arguments do not show that, since both orders stay the same. So the graph
# runs once more, with every float shorter than 32 bits stored in 32:
#
#     values                   bfloat16  ->  float32, in every operation that does not depend on their bits
#     operations on bits       bitcasts, user functions, kernels: operands narrowed before, results widened after


_WIDE = np.dtype(np.float32)
_BITS = "bitcast_convert_type reduce_precision random_bits nextafter".split()
_SIMPLE = (bool, int, float, complex, str, tuple, type(None), np.dtype, np.generic)


class _WideTarget(WholeTarget):
    """Whole arrays, with short floats stored in float32."""

    def define(self, value: Value, array: jax.Array) -> None:
        """Stores the array, widened."""
        super().define(value, _widened(array))

    def literal(self, x: Literal) -> jax.Array:
        """Returns the literal, widened."""
        return _widened(literal(x))

    def run(self, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
        """Runs the operation in wide floats, or in its own if it depends on their bits or runs another function."""
        if op.name not in _BITS and all(isinstance(x, _SIMPLE) for x in op.params.values()):
            wide = {name: _WIDE for name, x in op.params.items() if _is_short(x)}
            return self.run_changed(op, arrays, **wide)
        narrow = tuple(jnp.asarray(x, read.dtype) for x, read in zip(arrays, op.inputs, strict=True))
        return self.run_changed(op, narrow)


def widened_step(
    program: TracedProgram, mesh: jax.sharding.Mesh | None = None
) -> Callable[..., list[jax.Array]] | None:
    """Returns the unsharded step on flat arrays with short floats stored wide; None if there are none.

    Args:
      mesh: devices, which a step needs that the user divides.
    """
    if not any(_is_short(value.dtype) for _, op in walk(program.graph) for value in op.outputs):
        return None
    if mesh is not None and is_divided(program.graph):
        return whole_step(program.graph, mesh, _WideTarget)
    return lambda *leaves: list(run_graph(program.graph, leaves, _WideTarget({})))


def _is_short(dtype: Any) -> bool:
    known = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating)
    return known and dtype.itemsize < _WIDE.itemsize


def _widened(x: jax.Array) -> jax.Array:
    return jnp.asarray(x, _WIDE) if _is_short(x.dtype) else x
