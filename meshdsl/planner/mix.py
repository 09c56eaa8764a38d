"""Where two plans differ: parts that one can take over from the other, each by itself."""

from collections import defaultdict

import numpy as np

from meshdsl.planner.extract import Choice
from meshdsl.planner.model import Model


def apart(model: Model, one: Choice, other: Choice) -> list[list[int]]:
    """Groups of nodes that two plans treat differently, joined by the values between them, in program order."""
    differ = np.flatnonzero((one.rows != other.rows).any(axis=1)).tolist()
    group = {n: n for n in differ}

    def first(n: int) -> int:
        while group[n] != n:
            group[n] = n = group[group[n]]
        return n

    for value, (made, _) in model.problem.defined.items():
        ends = [n for n in (made, *(reader for reader, _ in model.problem.used.get(value, ()))) if n in group]
        for n in ends[1:]:
            a, b = sorted((first(ends[0]), first(n)))
            group[b] = a
    found = defaultdict[int, list[int]](list)
    for n in differ:
        found[first(n)].append(n)
    return list(found.values())
