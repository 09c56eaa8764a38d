"""Closing the gap: rounds in which the bound and the best plan leave each other fewer and fewer states.

A round builds the network of bounds from the states that are left, with exact trees for every value
whose readers can still ask for few sets of layouts (``sets``), passes messages, tries each plan they
point to, and drops states that no better plan can have. Fewer states make the trees of more values
exact, so the next round sees more; so do those values of which the network has let the last plan pointed to pay too
little. Where all are exact and few states are left, the plan is proved.

What is spent is counted in table entries, not in seconds: the same problem gives the same plan everywhere.
"""

from itertools import chain, repeat

from meshdsl.planner.bound import Certificate
from meshdsl.planner.extract import Choice, Evaluator
from meshdsl.planner.joint import Joint
from meshdsl.planner.neighbourhoods import improved

PROVED = 1e-9  # gap that is none
OPEN = 5e-3  # gap that is worth a search for a better plan
FIRST_TREES, TREES = 1 << 15, 1 << 18  # entries of the exact trees of one value: at first, and in a round
_WORK, _LIFTING = 64_000_000_000, 1_000_000_000  # entries that all passes may touch together
_NEARLY, _LAST = 1e-4, 48_000_000_000  # a gap for which so much of that is not worth it ...
_QUICK = 2_000_000  # ... unless the network has fewer entries
_PASSES = (8, 16, 32, 64)  # at a time; the last again and again
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


def lifted(certificate: Certificate, most: int) -> Certificate:
    """One that proves more, from rounds that look for no plan.

    Args:
      most: entries that may be touched, where the network is large.
    """
    work = _LIFTING if certificate.work <= _QUICK else most
    return _rounds(certificate, None, _tightened(certificate, None, work, _PASSES[1]))[0]


def _rounds(certificate: Certificate, evaluator: Evaluator | None, work: int) -> tuple[Certificate, int]:
    """Rounds as long as they help, and the work that is left."""
    before = (1.0, certificate.states + 1)
    while _is_worth(certificate, work) and _has_helped(before, certificate):
        if certificate.model.clock.is_up():
            break
        last, before = certificate, (certificate.gap, certificate.states)
        certificate = Certificate(Joint(last.model, last.left), last.best, TREES, last.missed)
        work = _tightened(certificate, evaluator, work, _PASSES[1])
        certificate.bound = max(certificate.bound, last.bound)
    return certificate, work


def _tightened(certificate: Certificate, evaluator: Evaluator | None, work: int, least: int) -> int:
    """Pass messages until they help no more.

    Args:
      work: entries that may be touched; what is left of them is returned.
      least: passes at a time that are tried whether they help or not.
    """
    for i, passes in enumerate(chain(_PASSES, repeat(_PASSES[-1]))):
        now = certificate.gap, certificate.states
        work -= certificate.touched(passes)
        if not _is_worth(certificate, work) or certificate.model.clock.is_up():
            return work
        certificate.tighten(passes, evaluator)
        small = certificate.work < _SMALL and i >= len(_PASSES)
        if small or (passes >= least and not _has_helped(now, certificate)):
            break
    if certificate.gap > PROVED and certificate.work < _SMALL:
        certificate.finish(_LARGEST, evaluator)
    return work


def _is_worth(certificate: Certificate, work: int) -> bool:
    """Whether the gap is worth more passes, ``work`` being left."""
    quick = certificate.gap > _NEARLY or certificate.work <= _QUICK
    return certificate.gap > PROVED and work > (0 if quick else _LAST)


def _has_helped(before: _Open, certificate: Certificate) -> bool:
    gap, states = before
    return certificate.gap < _HELPED * gap or certificate.states < _HELPED * states
