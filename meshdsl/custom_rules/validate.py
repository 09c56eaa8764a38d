"""A randomised check of a user's rule: its function on simulated devices against its function on whole arrays.

Every row of the rule is checked on a few devices: operands are cut as the row says, at random where they are partial,
the function runs on each device's blocks, and the results are joined as the row says (the brute-force validation of
PyTorch DTensor's ``strategy_validation``). The function runs as it is, so it has to run where the plan is made. A row
that fails is wrong; a row that passes is right for these operands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.custom_rules import simulate as simulated
from meshdsl.custom_rules.primitive import RuledCall
from meshdsl.errors import RuleError, faults
from meshdsl.ir.graph import Literal, Op, TracedProgram, walk
from meshdsl.ir.rewrite import with_each_op
from meshdsl.layouts.placement import B, Placement, Split
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.rules.registry import carries

SMALL = 2**18  # elements of operands and results; up to this, operands keep their shapes
SHORT = 12  # elements; length of divisible dims of larger operands, which 2, 3 and 4 devices divide
LARGE = 2**22  # elements; above this, also with short dims, a rule is not checked
TOLERANCES = {1: 1e-1, 2: 3e-2, 4: 1e-4, 8: 1e-9}  # by bytes of a float, relative to the largest value
Array = simulated.Array


class NotChecked(Exception):
    """The reason why a rule could not be checked."""


@dataclass(frozen=True)
class RuleCheck:
    """A function, whole operands with values, and the rows and numbers of devices to check."""

    ruled: RuledCall
    operands: tuple[Array, ...]
    rows: tuple[Signature, ...]
    devices: tuple[int, ...]

    def check(self) -> tuple[Signature, ...]:
        """Return the rows that were checked and hold.

        Raises:
          RuleError: lists the rows that do not hold.
          NotChecked: the function does not run here.
        """
        found = self.results()
        faults_found = [f"{row} on {k} devices: {why}" for row, k, why in found if why]
        if faults_found:
            title = f"the rule of {self.ruled.name} does not hold, {self.ruled.stated}:"
            raise RuleError(faults(title, faults_found, "a dim that cannot be split is written _"))
        return tuple(dict.fromkeys(row for row, _, _ in found))

    def results(self) -> list[tuple[Signature, int, str]]:
        """Return every row that was checked, with the number of devices, and its fault; empty if it holds."""
        shapes = self._result_shapes()
        tried = [(row, k) for row in self.rows for k in self.devices if _divides(row, k, self.operands, shapes)]
        blocks = [self._blocks(row, k) for row, k in tried]
        expected, *found = run_together(self.ruled.function, [[self.operands], *blocks])
        if isinstance(expected, str):
            raise NotChecked(f"it does not run here ({expected})")
        pairs = zip(tried, found, strict=True)
        return [(row, k, _fault(row, got, expected[0])) for (row, k), got in pairs]

    def _result_shapes(self) -> list[tuple[int, ...]]:
        try:
            return [tuple(y.shape) for y in jax.eval_shape(self.ruled.function, *self.operands)]
        except Exception as error:  # of any kind: it is the user's function
            raise NotChecked(f"it does not run here ({_first_line(error)})") from error

    def _blocks(self, row: Signature, devices: int) -> list[tuple[Array, ...]]:
        """Return each device's blocks of the operands."""
        rng = np.random.default_rng(0)
        pairs = zip(self.operands, row.inputs, strict=True)
        stacks = [simulated.cut(x[None], (placed,), (devices,), rng) for x, placed in pairs]
        return [tuple(np.asarray(stack[rank, 0]) for stack in stacks) for rank in range(devices)]


@dataclass(frozen=True)
class CheckOutcome:
    """Outcome of a check: rows that do not hold, with the reason, or why the rule could not be checked."""

    false: tuple[tuple[Signature, str], ...] = ()
    unchecked: str = ""

    def note(self, name: str) -> str:
        """Return a note for the plan; empty if the rule was checked and holds."""
        if self.unchecked:
            return f"the rule of {name} was not checked: {self.unchecked}; try {name}.check(...) with smaller operands"
        rows = "; ".join(f"{row} ({why})" for row, why in self.false)
        return (
            f"the rule of {name} does not hold in full; removed: {rows}; write _ for a dim that cannot be split"
            if rows
            else ""
        )


def check_rules(program: TracedProgram) -> TracedProgram:
    """Return the program without rows of user-defined rules that do not hold; this stage executes user code.

    Each rule is checked once per process and kind of operands. Notes name the rows that were removed and the rules that
    could not be checked.
    """
    ruled = {op.id: op for _, op in walk(program.graph) if op.name == "ruled"}
    outcomes = {i: _outcome(op) for i, op in ruled.items()}
    notes = [note for i, op in ruled.items() if (note := outcomes[i].note(op.params["ruled"].name))]
    if not notes:
        return program

    def without_false_rows(op: Op) -> Op:
        if op.id not in outcomes:
            return op
        false = frozenset((row.inputs, row.outputs) for row, _ in outcomes[op.id].false)
        return replace(op, params={**op.params, "ruled": replace(op.params["ruled"], false=false)})

    graph = with_each_op(program.graph, without_false_rows)
    return replace(program, graph=graph, notes=[*program.notes, *dict.fromkeys(notes)])


_OUTCOMES: dict[Any, CheckOutcome] = {}  # by rule and types of operands and results, for this process


def _outcome(op: Op) -> CheckOutcome:
    """Return the outcome of the check of an operation's rule, from an earlier check of its kind if there was one."""
    types = tuple((x.shape, str(x.dtype), isinstance(x, Literal)) for x in (*op.inputs, *op.outputs))
    key = replace(op.params["ruled"], false=frozenset()), types
    if key not in _OUTCOMES:
        try:
            _OUTCOMES[key] = CheckOutcome(tuple((row, why) for row, _, why in _case(op).results() if why))
        except NotChecked as why:
            _OUTCOMES[key] = CheckOutcome(unchecked=str(why))
    return _OUTCOMES[key]


def _case(op: Op) -> RuleCheck:
    """Return a check of an operation's rule, on random operands of its shapes or of smaller ones."""
    ruled: RuledCall = op.params["ruled"]
    shapes = [tuple(x.shape) for x in (*op.inputs, *op.outputs)]
    if sum(map(prod, shapes)) > SMALL:
        ruled, shapes = _shortened(ruled, shapes)
    count = sum(map(prod, shapes))
    if count > LARGE:
        raise NotChecked(f"{count:.1e} elements are too many")
    rng = np.random.default_rng(0)
    pairs = zip(op.inputs, shapes, strict=False)
    operands = tuple(np.asarray(x.value) if isinstance(x, Literal) else random_array(s, x.dtype, rng) for x, s in pairs)
    fixed = [i for i, x in enumerate(op.inputs) if isinstance(x, Literal)]
    rows = legal_rows(ruled, shapes, [x.dtype for x in (*op.inputs, *op.outputs)])
    return RuleCheck(ruled, operands, tuple(row for row in rows if all(row.inputs[i] is B for i in fixed)), (2,))


def legal_rows(ruled: RuledCall, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any]) -> tuple[Signature, ...]:
    """Return the rows of the stated rule that the dtypes allow, except the one that replicates everything."""
    rows = ruled.stated.rule(shapes).rows()[1:]
    return tuple(r for r in rows if all(carries(p, t) for p, t in zip((*r.inputs, *r.outputs), dtypes, strict=True)))


def random_array(shape: tuple[int, ...], dtype: Any, rng: simulated.Random) -> Array:
    """Return normally distributed values; zeros and ones for integers, which may be indices."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.asarray(rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(rng.normal(size=shape)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_:
        return np.asarray(rng.integers(0, 2, shape)).astype(dtype)
    raise NotChecked(f"operands of {dtype} cannot be sampled")


def _shortened(ruled: RuledCall, shapes: list[tuple[int, ...]]) -> tuple[RuledCall, list[tuple[int, ...]]]:
    stated = ruled.stated
    short = {f: min(n, SHORT) for f, n in stated.lengths(shapes).items()}
    ports = zip((*stated.inputs, *stated.outputs), shapes, strict=True)
    found = [tuple(_short(dim, n, short) for dim, n in zip(dims, shape, strict=True)) for dims, shape in ports]
    sizes = tuple((f, short[f]) for f, _ in stated.sizes)
    return replace(ruled, stated=replace(stated, sizes=sizes)), found


def _short(dim: tuple[str, ...], n: int, short: dict[str, int]) -> int:
    return prod(short[f] for f in dim) if dim else n


def run_together(
    function: Callable[..., Any], groups: Sequence[Sequence[tuple[Array, ...]]]
) -> list[list[list[Array]] | str]:
    """Return the results per group of operands of equal shapes, or the error of the function on them.

    All groups are one compiled program, because compilation dominates the time; it is compiled ahead of time, so that
    the program runs while another function is traced.
    """
    stacks = [[np.stack(arrays) for arrays in zip(*group, strict=True)] for group in groups]
    why = [_trace_error(function, group[0]) for group in groups]
    given = {str(i): stack for i, stack in enumerate(stacks) if not why[i]}
    try:
        run = jax.jit(lambda given: {i: _on_each(function, stack) for i, stack in given.items()})
        found = run.lower(given).compile(compiler_options=_options())(given)
    except Exception as error:  # of any kind: it is the user's function
        if len(groups) == 1:
            return [_first_line(error)]
        return [result for group in groups for result in run_together(function, [group])]
    return [why[i] or _each([np.asarray(y) for y in found[str(i)]]) for i in range(len(groups))]


def _on_each(function: Callable[..., Any], stacks: Sequence[Any]) -> Any:
    return jax.lax.map(lambda arrays: list(function(*arrays)), list(stacks))


def _each(stacks: Sequence[Array]) -> list[list[Array]]:
    return [list(arrays) for arrays in zip(*stacks, strict=True)]


def _trace_error(function: Callable[..., Any], arrays: Sequence[Array]) -> str:
    try:
        jax.eval_shape(function, *arrays)
    except Exception as error:  # of any kind: it is the user's function
        return _first_line(error)
    return ""


def _options() -> dict[str, bool | str] | None:
    """Return compiler options that favour compile time, where they are known."""
    return {"xla_llvm_disable_expensive_passes": True} if jax.default_backend() == "cpu" else None


def _divides(row: Signature, devices: int, operands: Sequence[Array], results: Sequence[tuple[int, ...]]) -> bool:
    shapes = zip((*row.inputs, *row.outputs), (*(x.shape for x in operands), *results), strict=True)
    lengths = [row.size, *(shape[int(p.dim)] for p, shape in shapes if isinstance(p, Split))]
    return not any(n % devices for n in lengths)


def _fault(row: Signature, made: list[list[Array]] | str, expected: Sequence[Array]) -> str:
    """Return the fault of a row, given the results of every device; empty if it holds."""
    if isinstance(made, str):
        return f"it does not run on these blocks ({made})"
    found = zip(zip(*made, strict=True), row.outputs, expected, strict=True)
    return next(filter(None, (_difference(blocks, placed, want) for blocks, placed, want in found)), "")


def _difference(blocks: Sequence[Array], placed: Placement, want: Array) -> str:
    got = simulated.join(np.stack(blocks)[:, None], (placed,)) if len({x.shape for x in blocks}) == 1 else None
    if got is None:
        return "the devices' results do not agree"
    if got[0].shape != want.shape:
        return f"the result has shape {got[0].shape} instead of {want.shape}"
    off = relative_error(got[0], want)
    tolerance = TOLERANCES.get(want.dtype.itemsize // (2 if np.iscomplexobj(want) else 1), 0.0)
    allowed = tolerance if jnp.issubdtype(want.dtype, jnp.inexact) else 0.0
    return f"the result is off by {off:.2g} of its largest value" if off > allowed else ""


def relative_error(got: Array, want: Array) -> float:
    """Return the largest difference where ``want`` is finite, relative to its largest value."""
    wide = np.complex128 if np.iscomplexobj(want) else np.float64
    a, b = got.astype(wide), want.astype(wide)
    finite = np.isfinite(b)
    scale = float(np.abs(b[finite]).max(initial=0.0)) or 1.0
    off = np.abs(a[finite] - b[finite])
    return float(np.nan_to_num(off, nan=np.inf).max(initial=0.0)) / scale


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:120]
