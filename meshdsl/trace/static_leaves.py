"""Static leaves: values in a module of equinox that are not arrays.

An ``equinox.Module`` is a pytree that may hold anything: weights, and beside them functions, text, flags, numbers.
``equinox.filter_jit`` traces the arrays of a module and takes everything else as it is, and so does a planned step:

    Net(weight=f32[8,8], activation=tanh)  --hide-->    Net(weight=f32[8,8], activation=Static(tanh))
                                           <--reveal--

``Static`` is a node without children, so its value is part of the tree's structure, as ``None`` is: the leaves of a
hidden tree are arrays, calls with equal structures share one plan, and a result follows the argument of its structure.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax

from meshdsl.trace.objects import is_object
from meshdsl.util.arrays import is_hashable


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Static:
    """A value that is part of a tree's structure; equal by value if it is hashable, else only to itself."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or (is_hashable(self.value) and bool(self.value == other.value))

    def __hash__(self) -> int:
        return hash(self.value) if is_hashable(self.value) else id(self.value)


def hide(tree: Any) -> Any:
    """Returns the tree with everything that is no array in modules of equinox as ``Static`` nodes."""
    equinox = sys.modules.get("equinox")
    if equinox is None:  # nobody can have made a module
        return tree

    def is_module(x: Any) -> bool:
        return isinstance(x, equinox.Module)

    nodes, structure = jax.tree.flatten(tree, is_leaf=lambda x: is_module(x) or is_object(x))
    if not any(map(is_module, nodes)):
        return tree
    hidden = (jax.tree.map(_hidden_leaf, node) if is_module(node) else node for node in nodes)
    return jax.tree.unflatten(structure, hidden)


def reveal(tree: Any) -> Any:
    """Returns the tree with the values of its ``Static`` nodes, as it was before ``hide``."""
    return jax.tree.map(
        lambda x: x.value if _is_static(x) else x, tree, is_leaf=lambda x: _is_static(x) or is_object(x)
    )


def has_static(structure: jax.tree_util.PyTreeDef) -> bool:
    """Whether a tree of this structure holds static values."""
    node = structure.node_data()
    return (node is not None and node[0] is Static) or any(map(has_static, structure.children()))


def static_indices(structure: jax.tree_util.PyTreeDef, leaves: Sequence[Any]) -> tuple[int, ...]:
    """Returns which leaves of a tree ``hide`` makes part of its structure."""
    if "equinox" not in sys.modules:
        return ()
    arrays = tuple(map(_is_array, leaves))
    return () if all(arrays) else _static_places(structure, arrays)


@lru_cache(maxsize=256)
def _static_places(structure: jax.tree_util.PyTreeDef, arrays: tuple[bool, ...]) -> tuple[int, ...]:
    probes = [jax.ShapeDtypeStruct((), bool) if array else object() for array in arrays]
    left = {id(x) for x in jax.tree.leaves(hide(jax.tree.unflatten(structure, probes)))}
    return tuple(i for i, x in enumerate(probes) if id(x) not in left)


def _is_static(x: Any) -> bool:
    return isinstance(x, Static)


def _hidden_leaf(x: Any) -> Any:
    return x if _is_array(x) else Static(x)


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape")
