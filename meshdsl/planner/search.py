"""The search: sweeps for a first plan, then bound and plan improve each other.

Axis sweeps stop where no change of a whole axis helps. The certificate's messages speak of all
axes jointly, so the plan they point to often lies elsewhere; sweeping from there gives the next
plan, and a better plan lets the certificate drop more states.
"""

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
    axes = range(model.width)
    certificate = Certificate(model, evaluator.evaluate(quick.sweep(model.whole, axes, rounds=2)))
    for _ in range(_rounds(certificate)):
        certificate.tighten()
        certificate.offer(evaluator.evaluate(certificate.suggest()))
        if certificate.gap < _GAP:
            break
    for sweeper in (quick, Sweeper(model, EXACT)):
        certificate.offer(evaluator.evaluate(sweeper.sweep(certificate.best.rows, axes)))
        certificate.tighten()
    return certificate


def _rounds(certificate: Certificate) -> int:
    """Rounds that the problem's size allows, at least one."""
    return max(1, min(_ROUNDS, _WORK // max(1, certificate.work)))
