"""Branches by platform: which ones of ``jax.lax.platform_dependent`` the devices of a platform run.

A plan is one for all platforms and counts every branch, as it does for any conditional. A program is compiled for one
platform, of which it has the branch alone.
"""

from collections.abc import Sequence

from meshdsl.ir.graph import Graph, Value, walk
from meshdsl.ir.loops import body_operands

PLATFORMS = ("cpu", "cuda", "oneapi", "rocm", "tpu")  # of devices, as jax names them in branches
_ALIASES = {"gpu": ("cuda", "rocm")}


def branch_of(platform: str, branches: Sequence[Sequence[str] | None]) -> int | None:
    """Returns the number of the first branch for a platform, or for any; None if there is none."""
    names = _ALIASES.get(platform, (platform,))
    found = (i for i, known in enumerate(branches) if known is None or any(name in known for name in names))
    return next(found, None)


def idle_operations(graph: Graph, platform: str) -> frozenset[int]:
    """Returns the ids of operations in branches that devices of a platform do not run."""
    taken: dict[int, int | None] = {}
    idle: set[int] = set()
    for _, op in walk(graph):
        if op.name == "platform_index":
            taken[op.outputs[0].id] = branch_of(platform, op.params["platforms"])
        for body, operands in zip(op.bodies, body_operands(op), strict=True):
            pairs = zip(body.inputs, operands, strict=True)
            taken.update((v.id, taken[x.id]) for v, x in pairs if isinstance(x, Value) and x.id in taken)
        chosen = op.inputs[0] if op.name == "cond" else None
        if isinstance(chosen, Value) and chosen.id in taken:
            others = (body for i, body in enumerate(op.bodies) if i != taken[chosen.id])
            idle.update(inner.id for body in others for _, inner in walk(body))
    return frozenset(idle)
