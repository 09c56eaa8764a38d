"""``md.rule``: how a user's function shards, stated beside it.

    @md.rule("b s h _, b t h _, b t h e -> b s h e")
    def attention(q, k, v): ...

Inside ``parallelize`` a call is then one operation of the plan: the placements that it allows follow from the text, and
a device runs the function itself on its blocks. Everywhere else it is the plain function. The rule is checked when a
step is first planned; rows that do not hold are removed, with a note in the plan. ``attention.check(q, k, v)`` checks
it on given operands and raises if any row does not hold.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.custom_rules.notation import Groups, RuleSpec, check_fit, parse
from meshdsl.custom_rules.primitive import Cotangent, RuledCall, custom_rule_p, results_of
from meshdsl.custom_rules.validate import NotChecked, RuleCheck, legal_rows
from meshdsl.errors import RuleError, is_a
from meshdsl.ir.graph import Op
from meshdsl.layouts.sharding_rule import Rule, Signature
from meshdsl.rules.registry import RULES
from meshdsl.rules.registry import rule as register
from meshdsl.util.paths import join_path

Params = ParamSpec("Params")  # the function's parameters
Result = TypeVar("Result")

_NO_REDUCTIONS: Mapping[str, str] = {}
_NO_SIZES: Mapping[str, int] = {}


def rule(
    text: str,
    *,
    reduced: Mapping[str, str] = _NO_REDUCTIONS,
    linear: Groups = (),
    commuting: Groups = (),
    increasing: Sequence[int] = (),
    decreasing: Sequence[int] = (),
    sizes: Mapping[str, int] = _NO_SIZES,
    share: float = 1.0,
    temporaries: bool = True,
    like: Callable[..., Any] | None = None,
    primitive: str = "",
) -> "RuleText":
    """Return a decorator that gives a function a sharding rule, or register a rule for a JAX primitive.

    Args:
      text: dims of operands and results by name, ``"b m k, b k n -> b m n"``: dims of one name are split together,
        ``_`` cannot be split, ``(a b)`` is a dim of two factors, major first. Operands are the arrays among the
        arguments, in order.
      reduced: dims that the function reduces over, with the reduction: ``{"k": "sum"}``, ``"max"`` or ``"min"``. Split,
        they make the result partial.
      linear: groups of operands, counted from 0, in which the function is jointly linear; partial sums pass through.
      commuting: groups of operands that the function only moves, so that every reduction commutes with it.
      increasing: operands of an elementwise function in which it is monotonically increasing (``P(max)`` passes).
      decreasing: operands in which it is monotonically decreasing.
      sizes: lengths of names in ``(a b)`` that do not follow from other dims.
      share: fraction of the function's multiplications that are executed, between 0 and 1, for its predicted time; a
        kernel skips those that a mask hides.
      temporaries: whether the function's temporary values count as memory. With ``False``, a plain function stands for
        a kernel that keeps them in registers: the plan is that of the kernel, and what runs needs more. Those inside
        Pallas kernels and foreign calls never count.
      like: a function with the same arguments and result, whose multiplications are counted in place of the function's,
        also those of its gradient. The planner sees none inside Pallas kernels and foreign calls.
      primitive: the name of a primitive without a rule, in place of a function.

    Returns:
      A decorator; the decorated function has the parameters and the result of the plain one, and ``.check(*args)``.

    Raises:
      RuleError: the text is not a rule, or the primitive has one already.

    Example:
      >>> @md.rule("b s h _, b t h _, b t h e -> b s h e")  # _ is never split
      ... def attention(q, k, v): ...

    The notation is that of einsum and of Shardy's sharding rules (``docs/propagation.md`` there).
    """
    for name, x in (("text", text), ("primitive", primitive)):
        if not isinstance(x, str):
            raise RuleError(f"{name}: {is_a(x)}, not text")
    groups = {"linear": linear, "commuting": commuting, "increasing": increasing, "decreasing": decreasing}
    stated = RuleText(parse(text, reduced, sizes, share, temporaries, **groups), like)  # type: ignore[arg-type]
    if like is not None and not callable(like):
        raise RuleError(f"like: {is_a(like)}, not a function")
    if primitive and like is not None:
        raise RuleError("like: is for functions, not for primitives")
    if primitive and not temporaries:
        raise RuleError("temporaries: is for functions, not for primitives")
    if primitive:
        stated.register(primitive)
    return stated


@dataclass(frozen=True)
class RuleText:
    """A parsed rule; decorates functions."""

    stated: RuleSpec
    like: Callable[..., Any] | None = None

    def __call__(self, function: Callable[Params, Result]) -> "FunctionWithRule[Params, Result]":
        """Return the function with this rule."""
        if not callable(function):
            raise RuleError(f"{is_a(function)}, not a function; md.rule(text, primitive=name) is for a primitive")
        return FunctionWithRule(function, self.stated, self.like)

    def register(self, primitive: str) -> None:
        """Register this as the rule of a primitive."""
        if primitive in RULES:
            raise RuleError(f"{primitive} has a rule already")

        @register(primitive)
        def made(op: Op) -> Rule:
            operands = {f"operand {i}": tuple(x.shape) for i, x in enumerate(op.inputs)}
            results = {f"result {i}": tuple(x.shape) for i, x in enumerate(op.outputs)}
            check_fit(f"{op.name} at {op.source}", self.stated, operands, results)
            return self.stated.rule([*operands.values(), *results.values()])


class FunctionWithRule(Generic[Params, Result]):
    """A function with a sharding rule; call it as the function, whose name and documentation it has."""

    def __init__(
        self, function: Callable[Params, Result], stated: RuleSpec, like: Callable[..., Any] | None = None
    ) -> None:
        update_wrapper(self, function)
        self.function, self.stated, self.like = function, stated, like
        self.name = str(getattr(function, "__name__", type(function).__name__))

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """Return what the function returns; inside ``parallelize`` the call is one operation."""
        ruled, arrays, tree = self._ruled(args, kwargs)
        result: Result = jax.tree.unflatten(tree, custom_rule_p.bind(*arrays, ruled=ruled))
        return result

    def check(self, *args: Any, **kwargs: Any) -> tuple[Signature, ...]:
        """Check every row of the rule, and of the rule of the gradient, on 2 and 3 simulated devices.

        The check is randomised, not a proof: operands are cut as the row says, at random where they are partial, and
        the joined results are compared with the function on whole operands.

        Args:
          *args: operands with values; a row is checked if 2 or 3 divides the dims that it splits. Keywords as well.

        Returns:
          The rows that were checked and hold, as signatures ``"S(0) -> S(0)"``.

        Raises:
          RuleError: lists the rows that do not hold, with the error of the result.

        Example:
          >>> attention.check(q, k, v)
        """
        ruled, arrays, _ = self._ruled(args, kwargs)
        rows = _check(ruled, arrays)
        which = tuple(i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact))
        results = results_of(ruled, arrays)
        made = [i for i, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
        if which and made:
            shapes = [tuple(x.shape) for x in (*arrays, *results)]
            stated = ruled.stated.cotangent(which, made, shapes)
            back = RuledCall(f"{self.name}'s cotangent", Cotangent(ruled, which), stated)
            rng = np.random.default_rng(0)
            cotangents = [rng.normal(size=results[i].shape).astype(results[i].dtype) for i in made]
            with suppress(NotChecked):  # the function has no gradient
                _check(back, [*arrays, *cotangents])
        return rows

    prove = check  # an alias

    def _ruled(self, args: Any, kwargs: Any) -> tuple[RuledCall, list[Any], Any]:
        """Return a call as one operation: its function of flat arrays, the arrays, and the tree of its results."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        constants = tuple((i, x) for i, x in enumerate(leaves) if not _is_array(x))
        named = [(name, x) for name, x in zip(self._names(args, kwargs), leaves, strict=True) if not _is_array(x)]
        _check_hashes([(self.name, self.function), ("like", self.like), *named])
        flat = FlatFunction(self.function, tree, constants)
        counted = None if self.like is None else FlatFunction(self.like, tree, constants)
        ruled = RuledCall(self.name, flat, self.stated, counted=counted)
        arrays = {name: x for name, x in zip(self._names(args, kwargs), leaves, strict=True) if _is_array(x)}
        operands = {name: tuple(x.shape) for name, x in arrays.items()}
        check_fit(self.name, self.stated, operands)
        types = jax.eval_shape(flat.whole, *arrays.values())
        if counted is not None:
            _check_like(self.name, counted, types, list(arrays.values()))
        found, out_tree = jax.tree_util.tree_flatten_with_path(types)
        results = {join_path(["result", *map(_key, keys)]): tuple(y.shape) for keys, y in found}
        check_fit(self.name, self.stated, operands, results)
        return ruled, list(arrays.values()), out_tree

    def _names(self, args: Any, kwargs: Any) -> list[str]:
        """Return the name of each leaf of the arguments: the parameter and the keys below it."""
        parameters = list(inspect.signature(self.function).parameters)
        found, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
        heads = [
            [parameters[min(keys[1].idx, len(parameters) - 1)]] if keys[0].idx == 0 else [_key(keys[1])]
            for keys, _ in found
        ]
        return [join_path([*head, *map(_key, keys[2:])]) for head, (keys, _) in zip(heads, found, strict=True)]


@dataclass(frozen=True)
class FlatFunction:
    """A function of flat arrays; other arguments are constants, by position among the leaves of the arguments."""

    function: Callable[..., Any]
    tree: Any
    constants: tuple[tuple[int, Any], ...]

    def whole(self, *arrays: Any) -> Any:
        """Return the function's own result."""
        constants, given = dict(self.constants), iter(arrays)
        leaves = [constants[i] if i in constants else next(given) for i in range(self.tree.num_leaves)]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return self.function(*args, **kwargs)

    def __call__(self, *arrays: Any) -> list[Any]:
        """Return the results as a flat list of arrays."""
        return [jnp.asarray(x) for x in jax.tree.leaves(self.whole(*arrays))]


def _check(ruled: RuledCall, arrays: Sequence[Any]) -> tuple[Signature, ...]:
    results = results_of(ruled, arrays)
    ports = [*arrays, *results]
    rows = legal_rows(ruled, [tuple(x.shape) for x in ports], [x.dtype for x in ports])
    return RuleCheck(ruled, tuple(map(np.asarray, arrays)), rows, (2, 3)).check()


def _check_like(name: str, like: FlatFunction, types: Any, arrays: Sequence[Any]) -> None:
    """Raise RuleError unless a function takes the arguments of another, and returns arrays of its types."""
    try:
        others = jax.eval_shape(like.whole, *arrays)
    except TypeError as error:
        raise RuleError(f"like: refuses the arguments of {name}: {error}; give a function of the same ones") from error
    ours, theirs = (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree) for tree in (types, others))
    if ours != theirs:
        raise RuleError(f"like: returns {theirs}, where {name} returns {ours}")


def _check_hashes(parts: Sequence[tuple[str, Any]]) -> None:
    """Raise RuleError that names the parts of a call without a hash, which parameters of jax's primitives need."""
    without = list[str]()
    for name, x in parts:
        try:
            hash(x)
        except TypeError:
            without.append(f"{name}: {is_a(x)}")
    if without:
        raise RuleError(f"{', '.join(without)} without a hash; give a function, a number, a text or a frozen dataclass")


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _key(key: Any) -> str:
    return str(next((getattr(key, a) for a in ("key", "idx", "name") if hasattr(key, a)), key))


@register("ruled")
def _rule_of(op: Op) -> Rule:
    ruled: RuledCall = op.params["ruled"]
    return replace(ruled.stated.rule([tuple(x.shape) for x in (*op.inputs, *op.outputs)]), without=ruled.false)
