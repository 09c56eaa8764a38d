"""Which readers of a value the bound looks at, so that it is tight around a plan (see ``joint``).

The mean over all pairs of m readers knows two m-ths of a move that one reader alone needs. Which reader that is,
plans say in which the mean was too low: pairs with that reader then count, and others do not.
"""

from collections.abc import Sequence
from itertools import combinations

from meshdsl.planner.model import Assignment, Model
from meshdsl.planner.tree import tree
from meshdsl.planner.wiring import End


def weighted_pairs(
    model: Model, value: int, ends: Sequence[End], rows: Assignment, missed: Sequence[Assignment]
) -> dict[tuple[End, End], float]:
    """Pairs of readers whose tree costs as much as everyone's in the plan ``rows``, or all, with parts of one.

    Args:
      ends: where the value is made, then its readers.
      missed: plans in which the pairs cost too little; each gives as much to those that cost most in it.
    """
    pairs = _tight(model, value, ends, rows)
    weights = dict.fromkeys(pairs, 0.0)
    for plan in missed or [rows]:
        costs = [tree_cost(model, value, [ends[0], *pair], plan) for pair in pairs]
        most = [pair for pair, cost in zip(pairs, costs, strict=True) if cost >= max(costs)]
        for pair in most:
            weights[pair] += 1 / len(most) / max(1, len(missed))
    return {pair: weight for pair, weight in weights.items() if weight}


def _tight(model: Model, value: int, ends: Sequence[End], rows: Assignment) -> list[tuple[End, End]]:
    pairs, whole = list(combinations(ends[1:], 2)), tree_cost(model, value, ends, rows)
    return [pair for pair in pairs if tree_cost(model, value, [ends[0], *pair], rows) >= whole] or pairs


def tree_cost(model: Model, value: int, ends: Sequence[End], rows: Assignment) -> float:
    """What the moves of a value to some of its readers cost in a plan, once."""
    own, *read = (int(model.layout_ids(n, p, rows[n])) for n, p in ends)
    return tree(model.closure(value).costs, model.closure(value).inner, own, read)[0]


def pairs_cost(model: Model, value: int, source: End, pairs: dict[tuple[End, End], float], rows: Assignment) -> float:
    """What the moves of a value cost at least in a plan, once, as a mean over pairs of readers."""
    return sum(weight * tree_cost(model, value, [source, *pair], rows) for pair, weight in pairs.items())


def dearest_cost(model: Model, value: int, ends: Sequence[End], rows: Assignment) -> float:
    """What the moves of a value cost at least in a plan, once, if those to one reader count."""
    own, *read = (int(model.layout_ids(n, p, rows[n])) for n, p in ends)
    return float(model.closure(value).costs[own, read].max())


def hub_cost(model: Model, value: int, ends: Sequence[End], rows: Assignment, shares: Sequence[float]) -> float:
    """What the moves of a value cost at least in a plan, once, if they fork at one hub and shares of the rest count."""
    own, *read = (int(model.layout_ids(n, p, rows[n])) for n, p in ends)
    closure = model.closure(value)
    onward = sum(closure.costs[:, layout] * share for layout, share in zip(read, shares, strict=True) if share)
    return float((closure.inner[own] + onward).min())


def parts(model: Model, ends: Sequence[End], rows: Assignment) -> tuple[float, ...]:
    """The part of each reader's own moves that counts: more for those that move in the plan ``rows``."""
    own, *read = (int(model.layout_ids(n, p, rows[n])) for n, p in ends)
    moving = [layout != own for layout in read]
    if 0 < sum(moving) < len(read):
        return tuple(1 / sum(moving) if moves else 0.0 for moves in moving)
    return (1 / (len(read) - 1),) * len(read)
