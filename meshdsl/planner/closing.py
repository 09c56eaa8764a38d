"""Closing the gap: rounds in which the bound and the best plan leave each other fewer and fewer states.

A round builds the network of bounds from the states that are left, with exact trees for every value
whose readers can still ask for few sets of layouts (``sets``), passes messages, tries each plan they
point to, and drops states that no better plan can have. Fewer states make the trees of more values
exact, so the next round sees more. Where all are exact and few states are left, the plan is proved.

What is spent is counted in table entries, not in seconds: the same problem gives the same plan everywhere.
"""

from meshdsl.planner.bound import Certificate
from meshdsl.planner.extract import Choice, Evaluator
from meshdsl.planner.joint import Joint
from meshdsl.planner.neighbourhoods import improved

PROVED = 1e-9  # gap that is none
OPEN = 5e-3  # gap that is worth a search for a better plan
FIRST_TREES, _TREES = 1 << 15, 1 << 18  # entries of the exact trees of one value: at first, and in a round
_WORK = 4_000_000_000  # entries that all passes may touch together
_PASSES = (8, 16, 32, 64)
_SMALL, _LARGEST = 50_000, 1 << 20  # a network of fewer entries is eliminated, with tables of so many at most
_HELPED = 0.95  # what has helped has left no more of the gap, or of what is in question, than this
_Open = tuple[float, int]  # gap, and states in question


def closed(certificate: Certificate, evaluator: Evaluator) -> tuple[Choice, float]:
    """A plan as good as the certificate's or better, and a cost that no plan undercuts."""
    work = _tightened(certificate, evaluator, _WORK, _PASSES[-1])
    clock = certificate.model.clock
    while certificate.gap > PROVED and not clock.is_up():
        certificate, work = _rounds(certificate, evaluator, work)
        best = certificate.best
        if certificate.gap > OPEN and not clock.is_up():
            certificate.best = improved(Joint(certificate.model, certificate.left), best, evaluator)
        if certificate.best is best or work <= 0:
            break
    return certificate.best, min(certificate.bound, certificate.best.cost)


def lifted(certificate: Certificate) -> float:
    """A cost that no plan undercuts, from rounds that look for no plan."""
    return _rounds(certificate, None, _tightened(certificate, None, _WORK // 4, _PASSES[1]))[0].bound


def _rounds(certificate: Certificate, evaluator: Evaluator | None, work: int) -> tuple[Certificate, int]:
    """Rounds as long as they help, and the work that is left."""
    before = (1.0, certificate.states + 1)
    while certificate.gap > PROVED and work > 0 and _has_helped(before, certificate):
        if certificate.model.clock.is_up():
            break
        last, before = certificate, (certificate.gap, certificate.states)
        certificate = Certificate(Joint(last.model, last.left), last.best, _TREES)
        certificate.bound = max(certificate.bound, last.bound)
        work = _tightened(certificate, evaluator, work, _PASSES[1])
    return certificate, work


def _tightened(certificate: Certificate, evaluator: Evaluator | None, work: int, least: int) -> int:
    """Pass messages until they help no more.

    Args:
      work: entries that may be touched; what is left of them is returned.
      least: passes at a time that are tried whether they help or not.
    """
    for passes in _PASSES:
        now = certificate.gap, certificate.states
        work -= 2 * passes * certificate.work
        if now[0] <= PROVED or work <= 0 or certificate.model.clock.is_up():
            return work
        certificate.tighten(passes, evaluator)
        if passes >= least and not _has_helped(now, certificate):
            break
    if certificate.gap > PROVED and certificate.work < _SMALL:
        certificate.finish(_LARGEST, evaluator)
    return work


def _has_helped(before: _Open, certificate: Certificate) -> bool:
    gap, states = before
    return certificate.gap < _HELPED * gap or certificate.states < _HELPED * states
