"""Samples: an operation with concrete operands, for the prover to try.

Draws are the sample's own operands and shuffles of them, so index operands keep their range.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core

from meshdsl.custom_rules import simulate as simulated
from meshdsl.ir.graph import Literal, Op, Value
from tests.trials import Draws, data

DRAWS, SCALAR_DRAWS = 6, 48  # scalars need more: a draw of them is one case, not hundreds


@dataclass(frozen=True)
class Sample:
    """A function that traces to one operation ``name`` (others may stand before it), and arguments for it.

    Args:
      fixed: operands that are not shuffled between draws.
      excused: rows (as printed) that are right here but deliberately not listed, and why.
      exact: results are compared to the last bit.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    fixed: tuple[int, ...] = ()
    excused: Mapping[str, str] = field(default_factory=dict)
    exact: bool = False

    def __str__(self) -> str:
        return f"{self.name}-{'-'.join('x'.join(map(str, np.shape(a))) or 'scalar' for a in self.args)}"


SAMPLES: dict[str, list[Sample]] = {}


def sample(
    name: str,
    function: Callable[..., Any],
    *args: Any,
    fixed: tuple[int, ...] = (),
    excused: Mapping[str, str] | None = None,
    exact: bool = False,
) -> Sample:
    """Register a sample of the operation ``name``."""
    made = Sample(name, function, args, fixed, excused or {}, exact)
    SAMPLES.setdefault(name, []).append(made)
    return made


def drawn(case: Sample, rng: simulated.Random) -> tuple[Op, Draws]:
    """The sample's operation, and several draws of its operands."""
    closed = jax.make_jaxpr(case.function)(*case.args)
    found = _find(closed.jaxpr, closed.consts, jax.tree.leaves(case.args), case.name)
    assert found is not None, f"{case} traces to no {case.name}: {closed}"
    op, operands = found
    given = {i: _raw(operands[i], x.dtype) for i, x in enumerate(op.inputs) if not isinstance(x, Literal)}
    count = SCALAR_DRAWS if any(v.ndim == 0 and v.dtype.kind in "fb" for v in given.values()) else DRAWS
    return op, {i: np.stack([_draw(v, n, rng, i in case.fixed) for n in range(count)]) for i, v in given.items()}


def _find(jaxpr: Any, consts: Any, args: Any, name: str) -> tuple[Op, list[Any]] | None:
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for equation in jaxpr.eqns:
        values = [x.val if isinstance(x, core.Literal) else env[x] for x in equation.invars]
        inner = equation.params.get("jaxpr")
        if equation.primitive.name == name:
            return _op(equation), values
        if isinstance(inner, core.ClosedJaxpr) and (found := _find(inner.jaxpr, inner.consts, values, name)):
            return found
        result = equation.primitive.bind(*values, **equation.primitive.get_bind_params(equation.params))
        env.update(zip(equation.outvars, result if equation.primitive.multiple_results else [result], strict=True))
    return None


def _op(equation: Any) -> Op:
    def port(i: int, x: Any) -> Value | Literal:
        is_literal = isinstance(x, core.Literal)
        return Literal(x.val, x.aval.shape, x.aval.dtype) if is_literal else Value(i, x.aval.shape, x.aval.dtype)

    inputs = tuple(port(i, x) for i, x in enumerate(equation.invars))
    outputs = tuple(Value(100 + i, x.aval.shape, x.aval.dtype) for i, x in enumerate(equation.outvars))
    return Op(0, equation.primitive.name, equation.primitive, dict(equation.params), inputs, outputs)


def _raw(value: Any, dtype: Any) -> simulated.Array:
    return np.asarray(data(value)) if hasattr(value, "devices") else np.asarray(value, dtype)


def _draw(value: simulated.Array, number: int, rng: simulated.Random, fixed: bool) -> simulated.Array:
    if fixed or number == 0:
        return value
    if value.shape == () and value.dtype.kind == "b":
        return np.asarray(value ^ (number % 2 == 1))
    if value.shape == () and value.dtype.kind == "f":
        return np.asarray(value * rng.choice([-1, 1]) * rng.integers(1, 9), value.dtype)
    return rng.permutation(value.reshape(-1)).reshape(value.shape)
