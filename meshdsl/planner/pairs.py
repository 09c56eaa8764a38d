"""Which readers of a value the bound looks at, so that it is tight around a plan (see ``joint``)."""

from collections.abc import Sequence
from itertools import combinations

from meshdsl.planner.model import Assignment, Model
from meshdsl.planner.tree import tree

End = tuple[int, int]  # node and port


def tight_pairs(model: Model, value: int, ends: Sequence[End], rows: Assignment) -> list[tuple[End, End]]:
    """Pairs of readers whose tree costs as much as everyone's in the plan ``rows``; all if none does.

    Args:
      ends: where the value is made, then its readers.
    """
    closure, readers = model.closures[value], ends[1:]
    own, *read = (int(model.layout_ids(n, p, rows[n])) for n, p in ends)
    whole = tree(closure.costs, closure.inner, own, read)[0]
    pairs = list(combinations(range(len(readers)), 2))
    costs = (tree(closure.costs, closure.inner, own, [read[i], read[j]])[0] for i, j in pairs)
    tight = [pair for pair, cost in zip(pairs, costs, strict=True) if cost >= whole]
    return [(readers[i], readers[j]) for i, j in tight or pairs]


def parts(model: Model, ends: Sequence[End], rows: Assignment) -> tuple[float, ...]:
    """The part of each reader's own moves that counts: more for those that move in the plan ``rows``."""
    own, *read = (int(model.layout_ids(n, p, rows[n])) for n, p in ends)
    moving = [layout != own for layout in read]
    if 0 < sum(moving) < len(read):
        return tuple(1 / sum(moving) if moves else 0.0 for moves in moving)
    return (1 / (len(read) - 1),) * len(read)
