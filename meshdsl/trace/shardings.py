"""Shardings that operations state for their results, beside what they compute (``out_sharding=``)."""

from collections.abc import Mapping
from typing import Any

from jax.sharding import NamedSharding

from meshdsl.ir.graph import Op
from meshdsl.shardings import stated_layout

_TYPES = ("sharding", "out_sharding")  # parameters that state the type of a result


def type_of_result(params: Mapping[str, Any]) -> Any:
    """Returns the sharding that an operation states for its result, beside what it computes; None if there is none."""
    return params.get("out_sharding", params.get("sharding"))


def is_stated(op: Op) -> bool:
    """Whether an operation states the sharding of its result, beside what it computes, over several devices."""
    sharding = type_of_result(op.params)
    return isinstance(sharding, NamedSharding) and sharding.mesh.size > 1


def without_empty_types(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of an equation without types that say nothing, as jax adds under an ambient mesh."""
    return {name: None if name in _TYPES and _says_nothing(x) else x for name, x in params.items()}


def _says_nothing(sharding: Any) -> bool:
    found = stated_layout(sharding, len(getattr(sharding, "spec", ())), is_type=True)
    return found is not None and not found[0].placements
