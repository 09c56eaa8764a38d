"""A step, or a function that makes its arguments, as a pure function of flat arrays."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from meshdsl.errors import ArgumentError, is_a, required_parameters
from meshdsl.ir.graph import HeldState
from meshdsl.trace.arguments import Call, check_arrays
from meshdsl.trace.leaves import Found, components, path_leaves
from meshdsl.trace.lost_changes import Change, Surroundings, changed_arguments, slots
from meshdsl.trace.objects import flatten_objects, holds_objects, run_on_objects
from meshdsl.trace.static_leaves import hide, reveal


class PureStep:
    """The step of a call as a function from its leaves to flat outputs: results, then new state of objects.

    The attributes below speak of the last run.

    Args:
      step: the user's function.
      call: a call of it; only its objects are of interest.

    Attributes:
      outputs: the outputs' paths and names of dims.
      out_tree: from outputs to the result: a tree, or a ``Writeback``.
      held: the state of objects among inputs and outputs.
      changes: changes in place that may be lost.
    """

    def __init__(self, step: Callable[..., Any], call: Call) -> None:
        self.step, self.call = step, call
        self.outputs: list[Found] = []
        self.out_tree: Any = None
        self.held = HeldState()
        self.changes: list[Change] = []

    def __call__(self, *leaves: Any) -> list[Any]:
        """Runs the step and returns the outputs."""
        call, objects = self.call, self.call.objects
        if objects.roots:
            effects = run_on_objects(self._run(leaves), call.tree, objects, call.paths, leaves)
            self.outputs, self.out_tree = effects.outputs, effects.writeback
            held = frozenset(i for inputs in objects.inputs for i in inputs)
            self.held = HeldState(held, effects.written, effects.results)
        else:
            result = self._run(leaves)(call.tree.unflatten(leaves))
            self.outputs, self.out_tree = path_leaves(result), jax.tree.structure(result)
        arrays = [(each.path, each.array) for each in self.outputs]
        self.outputs = [each._replace(array=None) for each in self.outputs]  # which may be tracers
        check_arrays(f"{call.name} returns what is not an array:", arrays, "return arrays, in any pytree")
        return [array for _, array in arrays]

    def with_changes(self) -> ClosedJaxpr | None:
        """Returns the step with the new values of ``changes`` as its last results; None if that cannot be traced."""
        count = len(self.changes)

        def run(*leaves: Any) -> Any:
            return self(*leaves), [change.value for change in self.changes]

        try:
            traced = jax.make_jaxpr(run)(*self.call.leaves)
        except Exception:  # a value of a function inside the step, for example of one that jax.grad transformed
            return None
        return traced if len(self.changes) == count else None

    def _run(self, leaves: Any) -> Callable[[Any], Any]:
        """Returns the step as a function of its dynamic arguments, which watches for changes that would be lost."""
        call = self.call

        def run(hidden: Any) -> Any:
            dynamic = reveal(hidden)
            before = slots(dynamic)
            around = Surroundings.of({"step": self.step, **{str(key): x for key, x in call.static.items()}})
            args, kwargs = call.with_static(dynamic)
            try:
                result = self.step(*args, **kwargs)
            finally:
                self.changes = around.changes()
            self.changes += changed_arguments(before, slots(dynamic), leaves, result, call.path)
            return hide(result)

        return run


class Maker:
    """A function that makes arguments, as one that returns their arrays.

    Values in them that are not arrays, such as the optimizer of an ``nnx.Optimizer``, are those of the first run: new
    ones would not be equal to them, and a step would be planned anew.

    Args:
      make: takes nothing.

    Raises:
      ArgumentError: it is no function, or needs arguments.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        if not callable(make):
            raise ArgumentError(f"init: {is_a(make)}, not a function that makes arguments; write lambda: ...")
        if isinstance(make, FunctionType) and (needed := required_parameters(make)):
            name = make.__name__
            raise ArgumentError(
                f"init: {name} needs {', '.join(needed)}, and is called without arguments; write lambda: {name}(...)"
            )
        self.make = make
        self._tree: Any = None

    def __call__(self) -> list[Any]:
        """Returns the arrays of what the function makes."""
        made = hide(self.make())
        arrays, tree = named_arrays(made)
        if self._tree is None:
            self._tree = tree
        return list(arrays.values())

    def unflatten(self, leaves: Any) -> Any:
        """Returns what the function made, with other arrays."""
        return reveal(self._tree.unflatten(leaves))


def named_arrays(tree: Any) -> tuple[dict[str, Any], Any]:
    """Returns the arrays of a state by name, and its tree, whose ``unflatten`` takes them in this order."""
    if holds_objects(tree):
        found, whole, _ = flatten_objects(tree, lambda keys: tuple(components(keys)))
        return {each.path.replace("/", "."): each.array for each in found}, whole
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(keys, simple=True, separator="."): leaf for keys, leaf in leaves}, structure
