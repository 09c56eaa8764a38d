"""The search: sweeps for a first plan, then bound and plan improve each other.

Axis sweeps stop where no change of a whole axis helps. The certificate's messages speak of all
axes jointly, so the plan they point to often lies elsewhere; sweeping from there gives the next
plan, and a better plan lets the certificate drop more states.
"""

from meshdsl.planner.bound import Certificate
from meshdsl.planner.extract import Evaluator
from meshdsl.planner.model import Model
from meshdsl.planner.starts import forward
from meshdsl.planner.sweep import Sweeper

LARGEST = 200_000  # entries of the largest table of a sweep
_ROUNDS = 6
_WORK = 60_000_000  # table entries that all passes together may touch
_GAP = 2e-3


def search(model: Model) -> Certificate:
    """The best plan found, memory aside, with its lower bound."""
    evaluator, sweeper = Evaluator(model), Sweeper(model, LARGEST)
    axes = [(axis,) for axis in range(model.width)]
    certificate = Certificate(model, evaluator.evaluate(sweeper.sweep(forward(model), axes, rounds=3)))
    for _ in range(_rounds(certificate)):
        certificate.tighten()
        certificate.offer(evaluator.evaluate(certificate.suggest()))
        if certificate.gap < _GAP:
            return certificate
    for start in (certificate.suggest(), certificate.best.rows):
        certificate.offer(evaluator.evaluate(sweeper.sweep(start, axes, rounds=3)))
    certificate.tighten()
    return certificate


def _rounds(certificate: Certificate) -> int:
    """Rounds that the problem's size allows, at least one."""
    return max(1, min(_ROUNDS, _WORK // max(1, certificate.work)))
