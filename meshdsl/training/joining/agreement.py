"""What all processes of a run have in common, compared before anything is compiled or saved.

Processes with different programs would exchange arrays that do not belong together: the run would hang, or go on with
wrong numbers. Every process computes a digest of each fact, and only if these differ is the fact itself exchanged.
"""

from collections.abc import Mapping
from hashlib import sha256
from itertools import zip_longest

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshdsl.errors import ArgumentError
from meshdsl.ir.graph import array_type
from meshdsl.plan.types import PlanData


def plan_facts(plan: PlanData) -> dict[str, str]:
    """What a step takes, and how it is planned."""
    sent = (f"{c.kind} over {' '.join(c.axes)} of {c.bytes} bytes, {c.trips} times" for c in plan.collectives)
    return {
        "arguments": "; ".join(f"{x.path} {array_type(x.dtype, x.shape, ())}" for x in plan.inputs),
        "topology": plan.topology.name,
        "layouts": "; ".join(f"{x.path} {x.layout}" for x in plan.inputs),
        "collectives": "; ".join(sent),
        "predicted seconds": f"{plan.seconds:.9g}",
    }


def check_common(facts: Mapping[str, str]) -> None:
    """Raises ArgumentError, in all processes, unless these facts are the same in all; all have to call this.

    Args:
      facts: by name. The message has the first two that differ, and of a fact that lists several things, with
        semicolons, the first of these.
    """
    if jax.process_count() == 1:
        return
    own = [np.frombuffer(sha256(text.encode()).digest(), np.uint8) for text in facts.values()]
    digests = multihost_utils.process_allgather(np.stack(own))
    differs = (digests != digests[0]).any(axis=2)
    if not differs.any():
        return
    rows = []
    for fact in np.flatnonzero(differs.any(axis=0)).tolist()[:2]:
        name, text = list(facts.items())[fact]
        others = np.flatnonzero(differs[:, fact]).tolist()
        texts = _gather(text)
        first, other = _first_difference(texts[0], texts[others[0]])
        who = f"process{'es' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        rows.append(f"{name}: {other} in {who}, {first} in process 0")
    remedy = "give all the same program, data and versions"
    raise ArgumentError(f"the processes do not train the same: {'; '.join(rows)}; {remedy}")


def _gather(text: str) -> list[str]:
    """The texts of all processes."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(data)))
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def _first_difference(first: str, other: str) -> tuple[str, str]:
    """The first element of two lists that differs."""
    pairs = zip_longest(first.split("; "), other.split("; "), fillvalue="nothing more")
    return next(pair for pair in pairs if pair[0] != pair[1])
