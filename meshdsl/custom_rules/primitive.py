"""The JAX primitive behind ``md.rule``: a user's function as one operation, under every transformation.

    jvp        the operation, and its tangent: an operation that is linear in the tangents
    transpose  of a tangent: the cotangents, one operation
    vmap       an operation with one more dim

All of them bind the same primitive with another ``RuledCall``: a function of flat arrays, and the rule that follows
from the user's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from meshdsl.custom_rules.notation import RuleSpec
from meshdsl.errors import RuleError
from meshdsl.layouts.sharding_rule import Placements

Arrays = Sequence[Any]
DIVIDING = ("shard_map", "custom_partitioning")
custom_rule_p = Primitive("ruled")
custom_rule_p.multiple_results = True


@dataclass(frozen=True)
class FixedCost:
    """Cost of a function on one device, on whole operands.

    Args:
      seconds: predicted time.
      flops: FLOPs of matrix products and convolutions.
      room: bytes of temporaries while it runs; they divide as its first result does.
    """

    seconds: float
    flops: float
    room: int


@dataclass(frozen=True)
class RuledCall:
    """A function of flat arrays with its rule; calls of equal value are one kind of operation to the planner.

    Args:
      false: rows of the rule that were checked and do not hold.
      spent: the cost, where it does not follow from the function's operations.
      counted: a function of equal result whose FLOPs are those of this one, where they do not.
    """

    name: str
    function: Callable[..., Arrays]
    stated: RuleSpec
    false: frozenset[Placements] = frozenset()
    spent: FixedCost | None = None
    counted: Callable[..., Arrays] | None = None

    @property
    def multiplying(self) -> Callable[..., Arrays]:
        """The function whose FLOPs are counted."""
        if isinstance(self.function, Tangent | Cotangent | Mapped):
            return replace(self.function, of=replace(self.function.of, function=self.function.of.multiplying))
        return self.counted or self.function

    def __repr__(self) -> str:
        return f"{self.name}[{self.stated}]"


@dataclass(frozen=True)
class Tangent:
    """The JVP of a function with a rule along operands ``which``, for its inexact results."""

    of: RuledCall
    which: tuple[int, ...]

    def __call__(self, *arrays: Any) -> Arrays:
        """Return tangents of the results, for operands and their tangents."""
        count = len(arrays) - len(self.which)
        along = dict(zip(self.which, arrays[count:], strict=True))
        run, primals = _along(self.of, self.which, arrays[:count])
        tangents: Arrays = jax.jvp(run, primals, tuple(along[i] for i in self.which))[1]
        return tangents


@dataclass(frozen=True)
class Cotangent:
    """The VJP: operands, cotangents of the inexact results -> cotangents of operands ``which``."""

    of: RuledCall
    which: tuple[int, ...]

    def __call__(self, *arrays: Any) -> Arrays:
        """Return cotangents of the operands, for operands and cotangents of the results."""
        count = len(self.of.stated.inputs)
        run, primals = _along(self.of, self.which, arrays[:count])
        cotangents: Arrays = jax.vjp(run, *primals)[1](list(arrays[count:]))
        return cotangents


@dataclass(frozen=True)
class Mapped:
    """A function with a rule, mapped over one more dim of some operands."""

    of: RuledCall
    axes: tuple[int | None, ...]

    def __call__(self, *arrays: Any) -> Arrays:
        """Return the results, with the new dim in front."""
        return list(jax.vmap(lambda *xs: list(self.of.function(*xs)), in_axes=self.axes)(*arrays))


def results_of(ruled: RuledCall, arrays: Sequence[Any]) -> list[Any]:
    """Return the types of the results for operands of these types."""
    closed = jax.make_jaxpr(ruled.function)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
    if closed.effects:
        raise RuleError(f"{ruled.name} has effects (a print, a callback), so it cannot have a rule")
    divides = next((name for name in _names(closed.jaxpr) if name in DIVIDING), "")
    if divides:
        raise RuleError(
            f"{ruled.name} calls {divides}, which partitions arrays itself; a function with a rule is given blocks:"
            " call the function that runs on a block"
        )
    return list(closed.out_avals)


def _names(jaxpr: Jaxpr) -> Iterator[str]:
    """Yield the names of a jaxpr's primitives, at any depth."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
            if isinstance(x, ClosedJaxpr | Jaxpr):
                yield from _names(x.jaxpr if isinstance(x, ClosedJaxpr) else x)


def _along(
    ruled: RuledCall, which: Sequence[int], primals: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the inexact results as a function of operands ``which``, and the values of these."""

    def run(*varied: Any) -> list[Any]:
        known = {**dict(enumerate(primals)), **dict(zip(which, varied, strict=True))}
        return [y for y in ruled.function(*(known[i] for i in range(len(primals)))) if _inexact(y)]

    return run, tuple(primals[i] for i in which)


def _inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _derived(ruled: RuledCall, which: Sequence[int], primals: Sequence[Any]) -> tuple[Any, Any, list[int]]:
    """Return what rules of derivatives need: positions of operands, all shapes, positions of inexact results."""
    results = results_of(ruled, primals)
    made = [i for i, x in enumerate(results) if _inexact(x)]
    return tuple(which), [tuple(x.shape) for x in (*primals, *results)], made


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, ruled: RuledCall) -> tuple[Arrays, Arrays]:
    results = custom_rule_p.bind(*primals, ruled=ruled)
    varied = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero) and _inexact(primals[i])]
    which, shapes, made = _derived(ruled, varied, primals)
    zeros = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in results]
    if not which or not made:
        return results, zeros
    stated = ruled.stated.tangent(which, made, shapes)
    along = RuledCall(f"{ruled.name}'s tangent", Tangent(ruled, which), stated)
    given = _read([*primals, *(tangents[i] for i in which)], along)
    moved = dict(zip(made, custom_rule_p.bind(*given, ruled=along), strict=True))
    return results, [moved.get(i, zero) for i, zero in enumerate(zeros)]


def _read(operands: Sequence[Any], ruled: RuledCall) -> list[Any]:
    """Return the operands, with zeros for those that the function does not read: a derivative where it is linear."""
    traced = jax.make_jaxpr(ruled.function)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands))
    reads = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))[1]
    return [
        x if read or not _inexact(x) else jnp.zeros(x.shape, x.dtype) for x, read in zip(operands, reads, strict=True)
    ]


def _transpose(cotangents: Sequence[Any], *operands: Any, ruled: RuledCall) -> list[Any]:
    """Undefined operands are tangents, or operands in which the function itself is linear."""
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    base, primals, wanted = ruled, [_defined(x) for x in operands], linear
    if isinstance(ruled.function, Tangent):
        base = ruled.function.of
        primals, wanted = primals[: -len(ruled.function.which)], list(ruled.function.which)
    which, shapes, made = _derived(base, wanted, primals)
    back = RuledCall(f"{base.name}'s cotangent", Cotangent(base, which), base.stated.cotangent(which, made, shapes))
    found = custom_rule_p.bind(*primals, *map(ad.instantiate_zeros, cotangents), ruled=back)
    grads = dict(zip(linear, found, strict=True))
    return [grads.get(i) for i in range(len(operands))]


def _defined(x: Any) -> Any:
    """Return zeros for an undefined operand: a linear function has the same derivative everywhere."""
    return jnp.zeros(x.aval.shape, x.aval.dtype) if ad.is_undefined_primal(x) else x


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, ruled: RuledCall) -> tuple[Arrays, list[int]]:
    axes = tuple(None if d is None else int(d) for d in dims)
    results = custom_rule_p.bind(*operands, ruled=RuledCall(ruled.name, Mapped(ruled, axes), ruled.stated.mapped(axes)))
    return results, [0] * len(results)


custom_rule_p.def_impl(lambda *arrays, ruled: list(ruled.function(*arrays)))
custom_rule_p.def_abstract_eval(lambda *arrays, ruled: results_of(ruled, arrays))
mlir.register_lowering(
    custom_rule_p, mlir.lower_fun(lambda *arrays, ruled: ruled.function(*arrays), multiple_results=True)
)
ad.primitive_jvps[custom_rule_p] = _jvp
ad.primitive_transposes[custom_rule_p] = _transpose
batching.primitive_batchers[custom_rule_p] = _batch
