"""``md.rule``: what a function of the user's does to layouts, stated from outside.

    @md.rule("b s h _, b t h _, b t h e -> b s h e")
    def attention(q, k, v): ...

Inside ``parallelize`` a call is then one operation of the plan: its rows follow from the text, and
what a device runs is the function itself on its blocks. Everywhere else it is the plain function.
The rule is tried when a step is first planned; rows that do not hold are left out, and the plan
says so. ``attention.check(q, k, v)`` tries it on any operands and raises if any row does not hold.
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

_NOTHING: Mapping[str, str] = {}
_NO_SIZES: Mapping[str, int] = {}


def rule(
    text: str,
    *,
    reduced: Mapping[str, str] = _NOTHING,
    linear: Groups = (),
    commuting: Groups = (),
    increasing: Sequence[int] = (),
    decreasing: Sequence[int] = (),
    sizes: Mapping[str, int] = _NO_SIZES,
    share: float = 1.0,
    primitive: str = "",
) -> "RuleText":
    """A rule for the function that it decorates, or for a JAX primitive.

    Args:
      text: dims of operands and results by name, ``"b m k, b k n -> b m n"``; ``_`` cannot be split, ``(a b)``
        holds two factors, major first. Operands are the arrays among the arguments, in order.
      reduced: dims that vanish, and how: ``{"k": "sum"}``; also ``"max"``, ``"min"``.
      linear: groups of operands, counted from 0, in which the function is jointly linear.
      commuting: groups of operands that it only moves, so that any reduction commutes with it.
      increasing: operands of an elementwise function in which it is monotone increasing.
      decreasing: likewise decreasing.
      sizes: lengths of names in ``(a b)`` that do not follow from other dims.
      share: of the products in the function that are done where it runs; a kernel leaves out those that a mask hides.
      primitive: instead of a function, a primitive of this name that has no rule yet.

    Raises:
      RuleError: a text that is no rule, a primitive that has one.
    """
    for name, x in (("text", text), ("primitive", primitive)):
        if not isinstance(x, str):
            raise RuleError(f"{name}: {is_a(x)}, not text")
    groups = {"linear": linear, "commuting": commuting, "increasing": increasing, "decreasing": decreasing}
    stated = RuleText(parse(text, reduced, sizes, share, **groups))  # type: ignore[arg-type]
    if primitive:
        stated.register(primitive)
    return stated


@dataclass(frozen=True)
class RuleText:
    """A rule that has been stated; it decorates functions."""

    stated: RuleSpec

    def __call__(self, function: Callable[Params, Result]) -> "FunctionWithRule[Params, Result]":
        """The function, ruled."""
        if not callable(function):
            raise RuleError(f"{is_a(function)}, not a function; md.rule(text, primitive=name) rules a primitive")
        return FunctionWithRule(function, self.stated)

    def register(self, primitive: str) -> None:
        """Make it the rule of a primitive."""
        if primitive in RULES:
            raise RuleError(f"{primitive} has a rule already")

        @register(primitive)
        def made(op: Op) -> Rule:
            operands = {f"operand {i}": tuple(x.shape) for i, x in enumerate(op.inputs)}
            results = {f"result {i}": tuple(x.shape) for i, x in enumerate(op.outputs)}
            check_fit(f"{op.name} at {op.source}", self.stated, operands, results)
            return self.stated.rule([*operands.values(), *results.values()])


class FunctionWithRule(Generic[Params, Result]):
    """A function with a rule; call it as the function."""

    def __init__(self, function: Callable[Params, Result], stated: RuleSpec) -> None:
        update_wrapper(self, function)
        self.function, self.stated = function, stated
        self.name = str(getattr(function, "__name__", type(function).__name__))

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """Return what the function returns; inside ``parallelize`` the call is one operation."""
        ruled, arrays, tree = self._ruled(args, kwargs)
        result: Result = jax.tree.unflatten(tree, custom_rule_p.bind(*arrays, ruled=ruled))
        return result

    def check(self, *args: Any, **kwargs: Any) -> tuple[Signature, ...]:
        """Try every row of the rule on 2 and 3 simulated devices, and those of the function's gradient.

        Args:
          args: operands with values; as far as 2 or 3 divides a dim, its row is tried.

        Returns:
          The rows that hold; RuleError lists those that do not.
        """
        ruled, arrays, _ = self._ruled(args, kwargs)
        held = _proved(ruled, arrays)
        which = tuple(i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact))
        results = results_of(ruled, arrays)
        made = [i for i, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
        if which and made:
            shapes = [tuple(x.shape) for x in (*arrays, *results)]
            stated = ruled.stated.cotangent(which, made, shapes)
            back = RuledCall(f"{self.name}'s cotangent", Cotangent(ruled, which), stated)
            rng = np.random.default_rng(0)
            cotangents = [rng.normal(size=results[i].shape).astype(results[i].dtype) for i in made]
            with suppress(NotChecked):  # it has no gradient
                _proved(back, [*arrays, *cotangents])
        return held

    prove = check  # an alias

    def _ruled(self, args: Any, kwargs: Any) -> tuple[RuledCall, list[Any], Any]:
        """One call as an operation: its function of flat arrays, the arrays, the tree of its results."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        held = tuple((i, x) for i, x in enumerate(leaves) if not _is_array(x))
        flat = Flat(self.function, tree, held)
        ruled = RuledCall(self.name, flat, self.stated)
        arrays = {name: x for name, x in zip(self._names(args, kwargs), leaves, strict=True) if _is_array(x)}
        operands = {name: tuple(x.shape) for name, x in arrays.items()}
        check_fit(self.name, self.stated, operands)
        found, out_tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(flat.whole, *arrays.values()))
        results = {join_path(["result", *map(_key, keys)]): tuple(y.shape) for keys, y in found}
        check_fit(self.name, self.stated, operands, results)
        return ruled, list(arrays.values()), out_tree

    def _names(self, args: Any, kwargs: Any) -> list[str]:
        """What each leaf of the arguments is called."""
        parameters = list(inspect.signature(self.function).parameters)
        found, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
        heads = [
            [parameters[min(keys[1].idx, len(parameters) - 1)]] if keys[0].idx == 0 else [_key(keys[1])]
            for keys, _ in found
        ]
        return [join_path([*head, *map(_key, keys[2:])]) for head, (keys, _) in zip(heads, found, strict=True)]


@dataclass(frozen=True)
class Flat:
    """A function of flat arrays; what is no array is held, by its position among the leaves of the arguments."""

    function: Callable[..., Any]
    tree: Any
    held: tuple[tuple[int, Any], ...]

    def whole(self, *arrays: Any) -> Any:
        """The function's own result."""
        fixed, given = dict(self.held), iter(arrays)
        leaves = [fixed[i] if i in fixed else next(given) for i in range(self.tree.num_leaves)]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return self.function(*args, **kwargs)

    def __call__(self, *arrays: Any) -> list[Any]:
        """Its results, flat."""
        return [jnp.asarray(x) for x in jax.tree.leaves(self.whole(*arrays))]


def _proved(ruled: RuledCall, arrays: Sequence[Any]) -> tuple[Signature, ...]:
    results = results_of(ruled, arrays)
    ports = [*arrays, *results]
    rows = legal_rows(ruled, [tuple(x.shape) for x in ports], [x.dtype for x in ports])
    return RuleCheck(ruled, tuple(map(np.asarray, arrays)), rows, (2, 3)).check()


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _key(key: Any) -> str:
    return str(next((getattr(key, a) for a in ("key", "idx", "name") if hasattr(key, a)), key))


@register("ruled")
def _rule_of(op: Op) -> Rule:
    ruled: RuledCall = op.params["ruled"]
    return replace(ruled.stated.rule([tuple(x.shape) for x in (*op.inputs, *op.outputs)]), without=ruled.false)
