"""The frontier of a step: how long it takes at which memory limit, from the least possible to no limit.

    print(sharded.frontier(params, opt_state, batch))

Every point is a plan within a limit, with its own lower bound: of the layouts, given what the plan computes again. So
the curve answers what one plan cannot: how much
memory is worth having, and what the next GiB would buy (its shadow price).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import inf
from typing import Any

from meshdsl.errors import MemoryLimitError
from meshdsl.plan.plan import Plan
from meshdsl.util.html import tables_html
from meshdsl.util.text import bytes_text, change_text, percent_text, seconds_text, table

_GIB = 2**30
_LEAST_TRIALS = 3  # plans that look for the least memory


@dataclass(frozen=True)
class FrontierPoint:
    """The best plan found within a memory limit.

    Args:
      limit: bytes per device that it takes; infinite for no limit.
      plan: within it.
      seconds: predicted per step; simulated ones where plans are chosen by them (``overlap="full"``).
      lower_bound: seconds that no plan within the limit is below that computes the same again; 0 if none was proved, as
        of simulated seconds, or where a search within less memory found the plan.
      price: seconds per step that a GiB more would save, up to the next point; 0 at the last one.
    """

    limit: float
    plan: Plan
    seconds: float
    lower_bound: float
    price: float = 0.0

    @property
    def gap(self) -> float | None:
        """How much faster a plan within the limit could be, relative to this one; None without a bound."""
        if not self.lower_bound:
            return None if self.seconds else 0.0
        return max(0.0, 1 - self.lower_bound / self.seconds)


@dataclass(frozen=True)
class Frontier:
    """Step time against memory limit; ``print`` shows the table, notebooks the picture as well.

    Args:
      name: of the step.
      points: by rising limit; the last one has none.
      least: peak in bytes of the smallest plan found; 0 if that was not looked for.

    Example:
      >>> curve = md.parallelize(step, "data=8", md.fsdp(min_size=0)).frontier(params, batch, points=4)
      >>> [each.seconds for each in curve.points] == sorted((each.seconds for each in curve.points), reverse=True)
      True
    """

    name: str
    points: tuple[FrontierPoint, ...]
    least: int = 0

    @property
    def facts(self) -> dict[str, Any]:
        """The frontier as plain values, for JSON."""
        rows = [
            {"limit": None if each.limit == inf else each.limit}
            | {"memory": each.plan.memory, "seconds": each.seconds, "gap": each.gap, "seconds_per_gib": each.price}
            for each in self.points
        ]
        return {"least": self.least, "points": rows}

    def __str__(self) -> str:
        if not self.least:
            return "\n".join([self._title, *table(self._rows)])
        return "\n".join([f"{self._title}; the smallest plan found has {bytes_text(self.least)}", *table(self._rows)])

    def _repr_html_(self) -> str:
        return tables_html(self._title, [self._rows]) + self.svg()

    @property
    def _title(self) -> str:
        return f"step time of {self.name} by memory limit per device"

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        fastest, rows = self.points[-1].seconds, list[tuple[str, ...]]()
        for each, after in zip(self.points, (*self.points[1:], None), strict=True):
            more = each.seconds / fastest - 1 if fastest else 0.0
            buys = "" if after is None else _bought(each, after)
            limit = "none" if each.limit == inf else bytes_text(each.limit)
            gap = "" if each.gap is None else percent_text(each.gap)
            figures = bytes_text(each.plan.memory), seconds_text(each.seconds), gap
            rows.append((limit, *figures, change_text(more) if more > 1e-9 else "", buys))
        return [("limit", "peak", "step", "gap", "against no limit", "more memory buys"), *rows]

    def page(self) -> str:
        """Return table and picture as an HTML page of its own."""
        head = f'<!doctype html><meta charset="utf-8"><title>{escape(self._title)}</title>'
        return f'{head}<body style="font-family:sans-serif">{self._repr_html_()}</body>'

    def svg(self) -> str:
        """Return the curve as a picture: each plan from its peak to that of the next one, bounds below as a line."""
        return _picture(self)


def _bought(point: FrontierPoint, after: FrontierPoint) -> str:
    """What memory up to the next point would save, and per GiB where that is of its order."""
    saved, more = point.seconds - after.seconds, after.plan.memory - point.limit
    per_gib = f": {seconds_text(point.price)} per GiB" if more >= _GIB / 8 else ""
    return f"{seconds_text(saved)} for {bytes_text(more)}{per_gib}"


def frontier(
    name: str,
    plan_within: Callable[[float], Plan],
    points: int = 8,
    limits: Sequence[float] = (),
    simulated: bool = False,
) -> Frontier:
    """Return the frontier of a step.

    Args:
      name: of the step.
      plan_within: plans it within so many bytes per device.
      points: how many limits, spaced evenly from the least possible to what the fastest plan takes.
      limits: in bytes, in their place.
      simulated: whether plans are chosen by ``plan.simulated_seconds``.

    Raises:
      MemoryLimitError: no plan fits any of the limits.
    """
    plans, given = {inf: plan_within(inf)}, list(limits)
    refused: MemoryLimitError | None = None

    def add(limit: float) -> None:
        nonlocal refused
        if limit in plans:
            return
        try:
            plans[limit] = plan_within(limit)
        except MemoryLimitError as error:
            refused = error

    most, limit = plans[inf].memory, 1.0  # which hardly any plan fits: the error says the least that was found
    for _ in range(_LEAST_TRIALS if not given else 0):
        add(limit)
        if limit in plans and plans[limit].memory < limit - 1:
            limit = plans[limit].memory - 1  # a search within less may find a smaller one
        elif limit not in plans and refused and limit < refused.least < most:
            limit = refused.least
        else:
            break
    least = min(min(plan.memory for plan in plans.values()), (refused.least if refused else 0) or most)
    if not given and least < most:
        for i in range(points - 1):
            add(least + (most - least) * i / (points - 1))
    for limit in sorted(set(given)):
        add(limit)
    if given and refused is not None and len(plans) == 1:
        raise refused
    least = min(plan.memory for plan in plans.values())
    return Frontier(name, tuple(_points(plans, simulated)), 0 if given else least)


def _points(plans: dict[float, Plan], simulated: bool) -> Iterator[FrontierPoint]:
    """The fastest of all plans within each limit, which a search within another one may have found; each plan once."""

    def seconds(plan: Plan) -> float:
        return plan.simulated_seconds if simulated else plan.seconds

    def bound_of(best: Plan, limit: float) -> float:
        """The highest bound on plans within a limit of the same rewritten program; 0 if there is none."""
        alike = (plan for more, plan in plans.items() if more >= limit and _rewritten(plan) == _rewritten(best))
        return max((plan.solution.lower_bound for plan in alike), default=0.0)

    found = list[tuple[float, Plan, float]]()
    for limit in sorted(plans):
        best = min((plan for plan in plans.values() if plan.memory <= limit), key=seconds, default=None)
        if best is not None and (not found or seconds(best) < seconds(found[-1][1])):
            found.append((min(limit, best.memory), best, bound_of(best, limit)))
    found[-1] = (inf, found[-1][1], bound_of(found[-1][1], inf))
    for (limit, plan, bound), after in zip(found, [*found[1:], None], strict=True):
        price = 0.0
        if after is not None:
            price = (seconds(plan) - seconds(after[1])) * _GIB / (after[1].memory - limit)
        yield FrontierPoint(limit, plan, seconds(plan), 0.0 if simulated else bound, price)


def _rewritten(plan: Plan) -> tuple[object, ...]:
    """The functions that a plan takes, what it computes again, and what it keeps in the host's memory."""
    again, host = plan.recomputation, plan.host
    remat = again and (again.rewrite, again.divided, again.stages)
    return plan.alternatives, remat, tuple(array.path for array in host.arrays) if host else ()


# ---- Picture ---------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _BELOW = 640, 300, 80, 40  # pixels


def _picture(curve: Frontier) -> str:
    first, fastest, slowest = curve.points[0], curve.points[-1], max(each.seconds for each in curve.points)
    right = max(fastest.plan.memory, *(each.limit for each in curve.points if each.limit < inf), 1)
    left = min(first.limit, first.plan.memory, right)
    low = min(each.lower_bound or each.seconds for each in curve.points)
    wide, high = (right - left) * 1.05 or 1.0, (slowest - low) * 1.1 or slowest or 1.0

    def at(size: float, seconds: float) -> tuple[float, float]:
        x = _LEFT + (min(size, left + wide) - left) / wide * (_WIDTH - _LEFT - 10)
        return round(x, 1), round(10 + (slowest - seconds) / high * (_HEIGHT - _BELOW - 10), 1)

    starts = [*(each.limit for each in curve.points[:-1]), fastest.plan.memory]
    ends = [*starts[1:], inf]
    steps = [
        point
        for each, a, b in zip(curve.points, starts, ends, strict=True)
        for point in (at(a, each.seconds), at(b, each.seconds))
    ]
    bounds = [at(a, each.lower_bound) for each, a in zip(curve.points, starts, strict=True) if each.lower_bound]
    dots = [
        f'<circle cx="{x}" cy="{y}" r="3"><title>{escape(_label(each))}</title></circle>'
        for each, a in zip(curve.points, starts, strict=True)
        for x, y in [at(a, each.seconds)]
    ]
    texts = [
        _text(_LEFT - 6, at(left, s)[1] + 4, seconds_text(s), "end") for s in dict.fromkeys((slowest, fastest.seconds))
    ]
    texts += [_text(at(size, 0)[0], _HEIGHT - 20, bytes_text(size), "middle") for size in dict.fromkeys((left, right))]
    texts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 4, "memory limit per device", "middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'style="max-width:100%" fill="currentColor" role="img"><title>{escape(curve._title)}</title>'
        f'<polyline points="{_joined(steps)}" fill="none" stroke="currentColor" stroke-width="2"/>'
        f'<polyline points="{_joined(bounds)}" fill="none" stroke="currentColor" stroke-dasharray="4 4" opacity="0.5"/>'
        f"{''.join((*dots, *texts))}</svg>"
    )


def _label(point: FrontierPoint) -> str:
    gap = "" if point.gap is None else f", gap {percent_text(point.gap)}"
    return f"{bytes_text(point.plan.memory)}: {seconds_text(point.seconds)}{gap}"


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="12">{escape(text)}</text>'
