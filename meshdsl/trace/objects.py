"""Objects of flax.nnx among the arguments: state that a step changes in place.

    model, opt --flatten_objects--> arrays --step, on new objects that hold them--> arrays --Writeback--> model, opt

``nnx.jit`` defines what has to happen: a step sees objects that share variables as the caller's do, and after it the
caller's objects hold the new state. So every variable is one input, however many paths lead to it; what the step
leaves in it is one output if it changed; and a call writes that output into the variable it came from. Planning runs
the step on copies: the caller's objects stay as they are, random counters included.

Two forms of change. Values in variables are written straight into them. Anything else, such as a new variable, another
static attribute, or an object among the results, is left to the bookkeeping of ``nnx.update_context``, as in
``nnx.jit``.

``nnx.State`` is no such object: it is a tree of values that a step in functional style takes and returns.

flax is not imported: a program without ``flax.nnx`` among the loaded modules has no such objects.
"""

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshdsl.trace.leaves import Found, components, path_leaves
from meshdsl.util.paths import join_path

Label = Callable[[Sequence[Any]], tuple[str, ...]]  # the path of a node, from its keys in a tree
_TAG = "meshdsl"  # of the contexts of nnx in which references are kept


def is_object(x: Any) -> bool:
    """Whether ``x`` is a module, optimizer, metric, random stream or variable of nnx."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, (nnx.Pytree, nnx.Variable))


def is_module(x: Any) -> bool:
    """Whether ``x`` is an object of nnx that may refer to others: any but a variable."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree)


def holds_objects(tree: Any) -> bool:
    """Whether a tree of arguments holds objects of nnx."""
    return "flax.nnx" in sys.modules and any(map(is_object, jax.tree.leaves(tree, is_leaf=is_unit)))


def has_cycles(tree: Any) -> bool:
    """Whether objects of nnx in a tree refer to each other in a circle, so that jax cannot flatten them."""
    if "flax.nnx" not in sys.modules:
        return False
    roots = tuple(filter(is_object, jax.tree.leaves(tree, is_leaf=is_unit)))
    shared = _nnx().find_duplicates(roots) if roots else ()
    return any(inner[: len(outer)] == outer for paths in shared for outer, inner in permutations(paths, 2))


def is_unit(x: Any) -> bool:
    """Whether the flattening of a tree around objects stops here: an object, or a state, whose variables are values."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, (nnx.Pytree, nnx.Variable, nnx.State))


# ---- Trees -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outline:
    """A tree with holes for objects.

    Args:
      outer: the tree, in which each object, and each subtree beside them, is one leaf.
      parts: the tree of each such subtree; None for an object.
    """

    outer: Any
    parts: tuple[Any, ...]

    def fill(self, leaves: Iterable[Any], objects: Iterable[Any]) -> Any:
        """Returns the tree with these arrays and objects."""
        arrays, holes = iter(leaves), iter(objects)
        units = (next(holes) if part is None else _take(part, arrays) for part in self.parts)
        return self.outer.unflatten(units)


@dataclass(frozen=True)
class ObjectTree:
    """A tree with objects, as a value: equal for trees of equal structure that share variables alike.

    Args:
      graph: the ``nnx.GraphDef`` of the tuple of all objects.
      values: for each object, the trees of the values that it is the first to hold.
    """

    outline: Outline
    graph: Any
    values: tuple[tuple[Any, ...], ...]

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Returns the tree with these leaves, in new objects."""
        plain, values = self.separate(leaves)
        return self.outline.fill(plain, _nnx().unflatten(self.graph, values))

    def separate(self, leaves: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the arrays outside of objects, and the values inside."""
        arrays, objects = iter(leaves), iter(self.values)
        plain: list[Any] = []
        values: list[Any] = []
        for part in self.outline.parts:
            if part is None:
                values += [_take(tree, arrays) for tree in next(objects)]
            else:
                plain += islice(arrays, part.num_leaves)
        return plain, values


def _take(tree: Any, leaves: Iterator[Any]) -> Any:
    return tree.unflatten(islice(leaves, tree.num_leaves))


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


@dataclass(frozen=True)
class Objects:
    """The objects of one call.

    Args:
      roots: the objects in the tree of arguments.
      labels: the path of each.
      holders: the variables in them, each once, and arrays that no variable holds.
      inputs: the flat inputs that each holder's value is.
    """

    roots: tuple[Any, ...] = ()
    labels: tuple[tuple[str, ...], ...] = ()
    holders: tuple[Any, ...] = ()
    inputs: tuple[tuple[int, ...], ...] = ()

    def replace(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        """Writes other arrays of equal values into the variables.

        Args:
          before: the flat inputs.
          after: the same arrays, or equal ones.
        """
        for holder, inputs in zip(self.holders, self.inputs, strict=True):
            if any(after[i] is not before[i] for i in inputs) and isinstance(holder, _nnx().Variable):
                tree = jax.tree.structure(holder.get_raw_value())
                holder.set_raw_value(jax.tree.unflatten(tree, [after[i] for i in inputs]))

    def aliases(self) -> dict[int, tuple[str, ...]]:
        """Returns the other paths of inputs that several paths lead to."""
        if not self.roots:
            return {}
        nnx = _nnx()
        shared = nnx.find_duplicates(self.roots)
        paths = [path for path, _ in _flat(nnx.flatten(self.roots, graph=True)[1])]
        found: dict[int, tuple[str, ...]] = {}
        for path, inputs in zip(paths, self.inputs, strict=True):
            others = [
                join_path((*self.labels[other[0]], *other[1:], *path[len(first) :]))
                for first, *rest in shared
                if path[: len(first)] == first
                for other in rest
            ]
            found |= {i: tuple(others) for i in inputs if others}
        return found


NO_OBJECTS = Objects()


class Flattened(NamedTuple):
    """Arrays of a tree with objects."""

    found: list[Found]
    tree: ObjectTree
    objects: Objects


def flatten_objects(tree: Any, label: Label) -> Flattened:
    """Returns the arrays of a tree with objects: a variable is there once, at its first path."""
    keyed, outer = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_unit)
    roots = tuple(node for _, node in keyed if is_object(node))
    graph, state = _nnx().flatten(roots, graph=True)
    below: dict[int, list[tuple[Any, Any]]] = {i: [] for i in range(len(roots))}
    for path, holder in _flat(state):
        below[path[0]].append((path[1:], holder))
    found: list[Found] = []
    parts: list[Any] = []
    labels: list[tuple[str, ...]] = []
    holders: list[Any] = []
    inputs: list[tuple[int, ...]] = []
    for keys, node in keyed:
        if not is_object(node):
            parts.append(jax.tree.structure(node))
            found += path_leaves(node, label(keys))
            continue
        for path, holder in below[len(labels)]:
            arrays = path_leaves(holder, (*label(keys), *map(str, path)))
            inputs.append(tuple(range(len(found), len(found) + len(arrays))))
            found += arrays
            holders.append(holder)
        parts.append(None)
        labels.append(label(keys))
    values = tuple(tuple(jax.tree.structure(value_of(holder)) for _, holder in below[i]) for i in below)
    made = ObjectTree(Outline(outer, tuple(parts)), graph, values)
    return Flattened(found, made, Objects(roots, tuple(labels), tuple(holders), tuple(inputs)))


def value_of(holder: Any) -> Any:
    """Returns the value in a variable; an array that no variable holds is its own value."""
    return holder.get_raw_value() if isinstance(holder, _nnx().Variable) else holder


def _flat(state: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    return zip(state.paths, state.leaves, strict=True)


# ---- Effects of a step -----------------------------------------------------------------------------------------------

Source = int  # of an array after the step: the index of an output, or ``~i`` for input ``i``, which has not changed
Value = tuple[int, Any, tuple[Source, ...]]  # the number of a holder, -1 for a new one; tree and arrays of its value


@dataclass(frozen=True, eq=False)
class Writeback:
    """The end of a call: its outputs become the result and the new state of the caller's objects.

    Args:
      result: the result's tree.
      plain: the outputs that are its arrays outside of objects.
      graph: None if only values of variables change; else the ``nnx.GraphDef`` of the pair of the objects in the result
        and those in the arguments, as the step left them.
      values: those that change, or with ``graph`` all, in its order.
    """

    result: Outline
    plain: tuple[int, ...]
    graph: Any
    values: tuple[Value, ...]

    def commit(self, objects: Objects, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """Writes the new state into the caller's objects, and returns the result."""
        plain = [outputs[i] for i in self.plain]
        values = [
            (holder, tree.unflatten([outputs[s] if s >= 0 else inputs[~s] for s in sources]))
            for holder, tree, sources in self.values
        ]
        if self.graph is None:
            for holder, value in values:
                objects.holders[holder].set_raw_value(value)
            return self.result.fill(plain, ())
        nnx = _nnx()
        with nnx.update_context(_TAG):
            with nnx.split_context(_TAG) as split:
                split.flatten(objects.roots)
            with nnx.merge_context(_TAG, inner=False) as merge:
                made, _ = merge.unflatten(self.graph, [value for _, value in values])
        return self.result.fill(plain, made)


class Effects(NamedTuple):
    """Outputs of a step that was run on objects.

    Args:
      outputs: the arrays of the result, then the new state.
      writeback: what a call does with them.
      written: for outputs that are new state, the input that each replaces.
      results: the number of outputs that are the result.
    """

    outputs: list[Found]
    writeback: Writeback
    written: dict[int, int]
    results: int


def run_on_objects(
    step: Callable[[Any], Any], tree: ObjectTree, objects: Objects, paths: Sequence[str], leaves: Sequence[Any]
) -> Effects:
    """Runs a step on new objects that hold ``leaves``, and returns its outputs.

    Args:
      step: takes the tree of dynamic arguments.
      tree: this tree, without its leaves.
      objects: the caller's objects.
      paths: the path of each leaf.
    """
    nnx = _nnx()
    plain, values = tree.separate(leaves)
    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as split:
            split.flatten(objects.roots)
        with nnx.merge_context(_TAG, inner=True) as merge:
            inner = merge.unflatten(tree.graph, values)
        held = nnx.flatten(inner, graph=True)[1].leaves
        before = _structure(inner)
        result = step(tree.outline.fill(plain, inner))
        keyed, outer = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_unit)
        returned = tuple(node for _, node in keyed if is_object(node))
        with nnx.split_context(_TAG) as split:
            graph, state = split.flatten((returned, inner))
        only_values = not returned and _is_same(before, _structure(inner))

    # the result, in order: arrays, and of objects the values in them
    after = _After(objects, paths, leaves, {id(x): k for k, x in enumerate(held) if isinstance(x, nnx.Variable)})
    below: dict[tuple[int, int], list[tuple[Any, Any]]] = {}
    for (side, root, *rest), holder in _flat(state):
        below.setdefault((side, root), []).append((rest, holder))
    parts: list[Any] = []
    places: list[int] = []
    count = 0
    for keys, node in keyed:
        label = tuple(components(keys))
        if is_object(node):
            parts.append(None)
            for path, holder in below.get((0, count), ()):
                after.add(holder, (*label, *map(str, path)), result=True)
            count += 1
        else:
            parts.append(jax.tree.structure(node))
            places += after.append(path_leaves(node, label))

    # the state of the arguments' objects
    results = len(after.outputs)
    for root, label in enumerate(objects.labels):
        for path, holder in below.get((1, root), ()):
            after.add(holder, (*label, *map(str, path)))
    only_values = only_values and not after.moved
    kept = tuple(after.changed if only_values else after.values)
    made = Writeback(Outline(outer, tuple(parts)), tuple(places), None if only_values else graph, kept)
    return Effects(after.outputs, made, after.written, results)


class _After:
    """The values that a step leaves, one holder after the other.

    Args:
      numbers: the holders of the arguments, by identity of the variable.
    """

    def __init__(
        self, objects: Objects, paths: Sequence[str], leaves: Sequence[Any], numbers: Mapping[int, int]
    ) -> None:
        self.objects, self.paths, self.leaves, self.numbers = objects, paths, leaves, numbers
        self.by_path = {paths[i]: i for inputs in objects.inputs for i in inputs}
        self.outputs: list[Found] = []
        self.written: dict[int, int] = {}
        self.values: list[Value] = []
        self.changed: list[Value] = []
        self.moved = False  # an array changed that no variable holds

    def append(self, found: Sequence[Found]) -> range:
        """Appends outputs, and returns their indices."""
        self.outputs += found
        return range(len(self.outputs) - len(found), len(self.outputs))

    def add(self, holder: Any, label: tuple[str, ...], result: bool = False) -> None:
        """Appends the value of a holder; unless it is part of a result, only what changed becomes an output."""
        found = path_leaves(holder, label)
        variable = isinstance(holder, _nnx().Variable)
        number = self.numbers.get(id(holder), -1)
        known = self.objects.inputs[number] if number >= 0 else ()
        if not variable and not result:
            known = (self.by_path.get(found[0].path, -1),)
        sources = []
        for each, i in zip(found, known if len(known) == len(found) else [-1] * len(found), strict=True):
            if i >= 0 and not result and each.array is self.leaves[i]:
                sources.append(~i)
                continue
            sources += self.append([each._replace(path=self.paths[i]) if i >= 0 and not result else each])
            if i >= 0 and jnp.shape(each.array) == jnp.shape(self.leaves[i]):
                self.written[sources[-1]] = i
        value = (number, jax.tree.structure(value_of(holder)), tuple(sources))
        self.values.append(value)
        if any(source >= 0 for source in sources) or len(known) != len(found):
            self.changed.append(value)
            self.moved |= number < 0


def _structure(objects: Any) -> tuple[Any, list[Any]]:
    """Returns the structure of objects, with static attributes, and every node in them."""
    nnx = _nnx()
    nodes = [node for _, node in nnx.iter_graph(objects, graph=True) if is_object(node)]
    return nnx.flatten(objects, graph=True)[0], nodes


def _is_same(before: tuple[Any, list[Any]], after: tuple[Any, list[Any]]) -> bool:
    (graph, nodes), (other, others) = before, after
    return bool(graph == other) and len(nodes) == len(others) and all(map(operator.is_, nodes, others))


# ---- Calls of a known kind -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Binding:
    """Where the arrays and variables of a call are in its tree, flattened around variables.

    A call of a known kind finds them so in a fraction of the time that ``flatten_objects`` takes.

    Args:
      leaves: for each input, the item that is or holds it.
      holders: the item of each holder.
      variables: the items that are variables of objects.
      sharing: for each of these, the first that is the same variable.
    """

    leaves: tuple[int, ...]
    holders: tuple[int, ...]
    variables: tuple[int, ...]
    sharing: tuple[int, ...]

    def find(self, tree: Any, writeback: Writeback) -> tuple[list[Any], Objects] | None:
        """Returns the inputs of a call, and of its objects what ``writeback`` needs; None if it shares otherwise."""
        variable = _nnx().Variable
        items = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, variable))
        if self.sharing != _sharing(items, self.variables):
            return None
        values = [x.get_raw_value() if isinstance(x, variable) else x for x in items]
        units = filter(is_object, jax.tree.leaves(tree, is_leaf=is_unit)) if writeback.graph is not None else ()
        return [values[i] for i in self.leaves], Objects(tuple(units), holders=tuple(items[i] for i in self.holders))


def bind(tree: Any, found: ObjectTree, objects: Objects) -> Binding | None:
    """Returns the binding for trees like this one; None if some objects are no trees, or variables hold trees."""
    nnx = _nnx()
    if has_cycles(objects.roots):
        return None
    leaves: list[int] = []
    holders: list[int] = []
    variables: list[int] = []
    pending = iter(objects.holders)
    counts = map(len, found.values)
    at, where = 0, dict[int, int]()
    for unit in jax.tree.leaves(tree, is_leaf=is_unit):
        items = jax.tree.leaves(unit, is_leaf=lambda x: isinstance(x, nnx.Variable))
        if not all(jax.tree_util.all_leaves([value_of(x)]) for x in items):
            return None
        numbers = range(at, at + len(items))
        if is_object(unit):
            for i, x in zip(numbers, items, strict=True):
                if isinstance(x, nnx.Variable):
                    where.setdefault(id(x), i)
                    variables.append(i)
                elif id(x) in where or is_object(x):
                    return None  # the same array twice, or an object that jax does not look into
                else:
                    where[id(x)] = i
            own = [where.get(id(holder), -1) for holder in islice(pending, next(counts))]
            if -1 in own:
                return None
            holders += own
            leaves += own
        else:
            leaves += numbers
        at += len(items)
    items = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return Binding(tuple(leaves), tuple(holders), tuple(variables), _sharing(items, tuple(variables)))


def _sharing(items: Sequence[Any], variables: Sequence[int]) -> tuple[int, ...]:
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(items[i]), i) for i in variables])
