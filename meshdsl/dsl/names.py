"""Names of dims in a tree of arguments, whoever wrote them.

A named tensor says its own. A flax model says them in metadata, and needs no rewriting:

* ``nnx.Param(value, out_sharding=("embed", "hidden"))``, or ``nnx.with_partitioning`` around an
  initialiser, in the variables of ``nnx.state(model)`` and of the optimizer state made from them;
* ``nn.with_partitioning`` and ``nn.with_logical_partitioning``: linen's boxes, and optax states of them.

flax is not imported: what has these attributes is read.
"""

from typing import Any

from meshdsl.dsl.array import NamedArray
from meshdsl.dsl.order import Names

METADATA = ("out_sharding", "sharding_names", "sharding")  # flax's names for it, newest first


def has_names(node: Any) -> bool:
    """Whether a node of a tree says the names of the array below it."""
    return names_of(node) is not None


def names_of(node: Any) -> Names | None:
    """The names of the dims of the array below this node, "" for a dim without one; None if it says none."""
    if isinstance(node, NamedArray):
        return node.dims
    if hasattr(node, "get_metadata") and hasattr(node, "get_value"):
        return _of_variable(node)
    if hasattr(node, "names") and hasattr(node, "unbox"):
        return _texts(node.names)
    return None


def _of_variable(variable: Any) -> Names | None:
    value = variable.get_value()
    if isinstance(value, NamedArray):
        return value.dims
    metadata = variable.get_metadata()
    stated = next((metadata[key] for key in METADATA if metadata.get(key) is not None), None)
    return _texts(stated) if isinstance(stated, tuple) else None


def _texts(stated: Any) -> Names:
    return tuple(name if isinstance(name, str) else "" for name in stated)
