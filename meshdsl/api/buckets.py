"""Choose the plan for a step in which small collectives are sent as one (``meshdsl.planner.buckets``).

The planner's objective has every collective pay its latency. A plan that waits little for latencies, and repeats little
work to avoid them, is taken as it is, with the bound of plans that send every collective by itself. Else collectives
may be cheap that were dear, and the plan is searched again at prices at which a collective that may be sent in a bucket
pays a part of its latency, as one of very many or of few. The plans of these searches may have collectives of several
kinds, of which each bucket can take one. So for small steps there are searches in which only all-reduces over the same
axes share latencies: those over one axis, and those of a plan. Of all plans found, with buckets, the fastest is taken.
The first search is then only a warm start: it is not proved, except for small steps and with effort ``"prove"``.

Without any latencies, prices give a bound: no bucket costs less than its bytes, so a plan with buckets takes at least
as long as the cheapest one without those latencies, and one latency. A search in which the latencies count that no
bucket can share (``meshdsl.planner.unshared``) mostly gives a better one, and often a faster plan, as its prices are
nearest to what runs. Plans without buckets take no less, but for the one latency, which a plan that sends nothing does
not pay. Where that latency counts, they are bounded as always, and the lower of both bounds holds for every plan.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from meshdsl.errors import MemoryLimitError
from meshdsl.ir.solution import Solution
from meshdsl.planner.buckets import least_latency
from meshdsl.planner.problem.model import Assignment
from meshdsl.planner.solve import SearchResult

T = TypeVar("T")


@dataclass(frozen=True)
class BucketedPlan:
    """A plan with its buckets.

    Args:
      solution: the plan, with a lower bound of 0.
      origin: the search, with the plan in which the buckets are.
      apart: the search, with the best plan that sends every collective by itself.
      certify: computes seconds that no plan undercuts; nothing can be searched afterwards.
      notes: for the reader of the plan.
    """

    solution: Solution
    origin: SearchResult
    apart: SearchResult
    certify: Callable[[], float]
    notes: tuple[str, ...] = ()


def plan_with_buckets(found: SearchResult) -> BucketedPlan:
    """Returns the fastest plan found whose small collectives are sent in buckets, ``found`` itself if it has none."""
    if found.model.deadline.expired() or not found.may_use_buckets:
        return BucketedPlan(found.unproved_solution, found, found, found.certify)
    if found.loosest and not found.is_small:  # another plan under finer pins, whose bound is known
        best = found.bucketed_solution()
        return BucketedPlan(best, found, found, partial(min, found.loosest.seconds, best.seconds))
    limits = found.model.limits
    is_bound_worth = found.is_small or not limits.worth_gap
    parts = [part for part in limits.buckets_latencies if part or is_bound_worth]
    searches = {part: _fitting(partial(found.with_shared_latency, part)) for part in parts}
    plans = [found, *_others([found], (each.fit.plan.rows for each in searches.values() if each))]
    bucketed = [(plan.bucketed_solution(), plan) for plan in plans]
    sums = (
        _fitting(partial(found.with_shared_latency, limits.buckets_sums, axes)) for axes in _summed(found, bucketed)
    )
    plans += _others(plans, [each.fit.plan.rows for each in sums if each])
    bucketed += [(plan.bucketed_solution(), plan) for plan in plans[len(bucketed) :]]
    free, seconds = searches.get(0.0), min(solution.seconds for solution, _ in bucketed)
    unshared = _fitting(partial(found.at_unshared_latencies, seconds, free))
    more = _others(plans, unshared.tried if unshared else ())
    bucketed += [(plan.bucketed_solution(), plan) for plan in more]
    best, origin = min(bucketed, key=lambda each: each[0].seconds)
    apart = min((*plans, *more), key=lambda each: each.seconds)
    certify = partial(_bound, found, free, unshared and unshared.search, best.seconds)
    return BucketedPlan(best, origin, apart, certify)


def _summed(found: SearchResult, plans: Sequence[tuple[Solution, SearchResult]]) -> list[tuple[str, ...]]:
    """Returns the axes over which all-reduces are worth a search: each by itself, and those of plans."""
    if not found.is_small:
        return []
    steps = (step for solution, _ in plans for steps in solution.trees.values() for step in steps)
    alone = [(name,) for name, size in found.model.mesh if size > 1]
    return list(dict.fromkeys([*alone, *(step.axes for step in steps if step.kind == "all-reduce")]))


def _others(known: Sequence[SearchResult], rows: Iterable[Assignment]) -> list[SearchResult]:
    """Returns other plans of a search that fit the memory, at true prices; several searches often find one plan."""
    distinct = {each.tobytes(): each for each in rows}
    for plan in known:
        distinct.pop(plan.fit.plan.rows.tobytes(), None)
    return [plan for plan in map(known[0].at_rows, distinct.values()) if plan.peak.bytes <= plan.limit]


def _fitting(search: Callable[[], T | None]) -> T | None:
    """Returns what a search finds; None if no plan fits the memory."""
    try:
        return search()
    except MemoryLimitError:
        return None


def _bound(found: SearchResult, free: SearchResult | None, unshared: SearchResult | None, seconds: float) -> float:
    """Returns seconds that no plan undercuts, with buckets or without, if there is one that takes ``seconds``.

    Args:
      free: the search where latencies are free, if it was made.
      unshared: the search where those count that no bucket shares, if it was made.
    """
    least = found.loosest.seconds if found.loosest else 0.0
    with_any = least
    if unshared is None or (free and found.is_small):
        without_latencies = free.certify() if free else found.quick_bound_without_latencies()
        least = max(least, without_latencies)
        with_any = max(with_any, without_latencies + least_latency(found.model.mesh))
    if unshared is not None:
        least = max(least, unshared.certify())
    with_any = min(max(least, with_any), seconds)
    worth = found.model.limits.buckets_latency_worth * (seconds - least)
    if not found.loosest and with_any - least < worth:
        return least
    return min(with_any, found.certify(enough=with_any))
