"""The search: sweeps for a first plan, then bound and plan improve each other.

Axis sweeps stop where no change of a whole axis helps. The certificate's messages speak of all
axes jointly, so the plan they point to often lies elsewhere; sweeping from there gives the next
plan, and a better plan lets the certificate drop more states.
"""

from itertools import permutations

from meshdsl.planner.bound import Certificate
from meshdsl.planner.extract import Evaluator
from meshdsl.planner.model import Model
from meshdsl.planner.sweep import Sweeper

QUICK, EXACT = 20_000, 2_000_000  # largest tables of a sweep, in entries
_ROUNDS = 8
_WORK = 60_000_000  # table entries that all passes together may touch
_GAP = 2e-3


def search(model: Model) -> Certificate:
    """The best plan found, memory aside, with its lower bound."""
    evaluator, quick = Evaluator(model), Sweeper(model, QUICK)
    starts = [evaluator.evaluate(quick.sweep(model.whole, order)) for order in permutations(range(model.width))]
    certificate = Certificate(model, min(starts, key=lambda choice: choice.cost))
    for _ in range(_rounds(certificate)):
        certificate.tighten()
        certificate.offer(evaluator.evaluate(quick.sweep(certificate.suggest(), range(model.width))))
        if certificate.gap < _GAP:
            break
    certificate.offer(evaluator.evaluate(Sweeper(model, EXACT).sweep(certificate.best.rows, range(model.width))))
    return certificate


def _rounds(certificate: Certificate) -> int:
    """Rounds that the problem's size allows, at least one."""
    return max(1, min(_ROUNDS, _WORK // max(1, certificate.work)))
