"""The search: sweeps for a first plan, then bound and plan improve each other.

Axis sweeps stop where no change of a whole axis helps. The certificate's messages speak of all
axes jointly, so the plan they point to often lies elsewhere; sweeping from there gives the next
plan, and a better plan lets the certificate drop more states. The bound is tightest around the plan
it is built for, so it is built again for the best one.
"""

from collections.abc import Iterator

from meshdsl.planner.bound import Certificate
from meshdsl.planner.extract import Evaluator
from meshdsl.planner.model import Axes, Model
from meshdsl.planner.starts import forward
from meshdsl.planner.sweep import Sweeper

LARGEST = 200_000  # entries of the largest table of a sweep
_ROUNDS = 40
_WORK = 30_000_000  # table entries that all passes of one certificate together may touch
_GAP = 2e-3
_STALLED = 2e-4


def search(model: Model) -> Certificate:
    """The best plan found, memory aside, with its lower bound."""
    evaluator, sweeper = Evaluator(model), Sweeper(model, LARGEST)
    axes = sweep_order(model.width)
    first = Certificate(model, evaluator.evaluate(sweeper.sweep(forward(model), axes, rounds=2)))
    suggested = []
    for _ in _rounds(first):
        first.tighten()
        suggested.append(evaluator.evaluate(first.suggest()))
        first.offer(suggested[-1])
    for start in sorted(suggested, key=lambda choice: choice.cost)[:2]:
        first.offer(evaluator.evaluate(sweeper.sweep(start.rows, axes, rounds=1)))
    first.offer(evaluator.evaluate(Sweeper(model, 10 * LARGEST).sweep(first.best.rows, axes, rounds=1)))
    if first.gap < _GAP:
        return first
    second = Certificate(model, first.best, before=first)
    for _ in _rounds(second):
        second.tighten()
        second.offer(evaluator.evaluate(second.suggest()))
    return second


def sweep_order(width: int) -> list[Axes]:
    """All mesh axes together, then one by one."""
    return [*([tuple(range(width))] if width > 1 else []), *((axis,) for axis in range(width))]


def _rounds(certificate: Certificate) -> Iterator[int]:
    """Rounds that the problem's size allows, at least one, until the gap is closed or nothing moves."""
    for i in range(max(1, min(_ROUNDS, _WORK // max(1, certificate.work)))):
        before = certificate.gap
        yield i
        if certificate.gap < _GAP or before - certificate.gap < _STALLED:
            return
