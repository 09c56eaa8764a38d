"""What cannot run inside a planned step, refused before anything is planned.

Most calls that nobody has a rule for are *opaque*: every device runs them on whole arrays, and
the plan says so. A few would not compile so, or would do on every device what is to be done once.
"""

from collections.abc import Callable
from typing import Any

from meshdsl.errors import TraceError, faults
from meshdsl.ir import Graph, Op, walk

PLANNED = "planned by meshdsl"  # the name scope of a planned step in another function


def check_opaque(name: str, graph: Graph) -> None:
    """TraceError names every operation of step ``name`` that cannot run inside it, with its line and a way out."""
    found = [(op, _REFUSED[op.name](op)) for _, op in walk(graph) if op.name in _REFUSED]
    rows = [f"{op.name} at {op.source}: {why}" for op, why in found if why]
    if rows:
        raise TraceError(faults(f"{name} cannot be planned:", dict.fromkeys(rows)))


def _shard_map(op: Op) -> str:
    mesh = ", ".join(f"{name}={size}" for name, size in op.params["mesh"].shape.items())
    if PLANNED in op.scope:
        return f"is planned already, on mesh {mesh}; call the step that it was made of, and parallelize the whole"
    return (
        f"runs on a mesh of its own ({mesh}), and meshes do not nest; call the function that it maps on whole arrays"
        " and state layouts with md.constrain, or state by md.rule how that function splits"
    )


def _debug(op: Op) -> str:
    ordered = op.params.get("ordered") or "Ordered" in str(op.params.get("effect"))
    return "is ordered, which jax does on one device only; leave ordered=True out" if ordered else ""


_REFUSED: dict[str, Callable[[Any], str]] = {
    "shard_map": _shard_map,
    "debug_callback": _debug,
    "debug_print": _debug,
}
