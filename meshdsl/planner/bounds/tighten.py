"""How far the bound of a network is raised: by as many passes of messages as are affordable and help."""

from itertools import chain, repeat

from meshdsl.planner.bounds.certificate import Certificate
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.encoding.projection import projections
from meshdsl.planner.objective import CostedPlan, Evaluator
from meshdsl.planner.problem.model import Model

# ---- Closing ---------------------------------------------------------------------------------------------------------
# Closing the gap: rounds in which the bound and the best plan leave each other fewer and fewer states.
#
# A round builds the network of bounds from the states that are left, with exact trees for every value
# whose readers can still ask for few sets of layouts (``sets``), passes messages, tries each plan they
# point to, and drops states that no better plan can have. Fewer states make the trees of more values
# exact, so the next round sees more; so do those values of which the network has let the last plan pointed to pay too
# little. Where all are exact and few states are left, the plan is proved.
#
# What is spent is counted in table entries, not in seconds: the same problem gives the same plan everywhere.


PROVED = 1e-9  # gap that is none
OPEN = 5e-3  # gap that is worth a search for a better plan
FIRST_TREES, TREES = 1 << 15, 1 << 18  # entries of the exact trees of one value: at first, and in a round
_CLOSING_WORK, _LIFTING = 64_000_000_000, 1_000_000_000  # entries that all passes may touch together
_NEARLY, _LAST = 1e-4, 48_000_000_000  # a gap for which so much of that is not worth it ...
_QUICK = 2_000_000  # ... unless the network has fewer entries
_PASSES = (8, 16, 32, 64)  # at a time; the last again and again
_CLOSING_SMALL, _LARGEST = 50_000, 1 << 20  # a network of fewer entries is eliminated, with tables of so many at most
_CLOSING_HELPED = 0.95  # what has helped has left no more of the gap, or of what is in question, than this
_Open = tuple[float, int]  # gap, and states in question


def tighten_without_search(certificate: Certificate, most: int) -> Certificate:
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
        certificate = Certificate(NetworkBuilder(last.model, last.left), last.best, TREES, last.underpaid)
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
        small = certificate.work < _CLOSING_SMALL and i >= len(_PASSES)
        if small or (passes >= least and not _has_helped(now, certificate)):
            break
    if certificate.gap > PROVED and certificate.work < _CLOSING_SMALL:
        certificate.finish(_LARGEST, evaluator)
    return work


def _is_worth(certificate: Certificate, work: int) -> bool:
    """Whether the gap is worth more passes, ``work`` being left."""
    quick = certificate.gap > _NEARLY or certificate.work <= _QUICK
    return certificate.gap > PROVED and work > (0 if quick else _LAST)


def _has_helped(before: _Open, certificate: Certificate) -> bool:
    gap, states = before
    return certificate.gap < _CLOSING_HELPED * gap or certificate.states < _CLOSING_HELPED * states


# ---- Raising ---------------------------------------------------------------------------------------------------------


GAP = 1e-2  # large enough for more than messages
_WORK = 200_000_000  # table entries that passes of messages may touch together in any case ...
_FURTHER = 8_000_000_000  # ... and as long as the last ones have helped
_FIRST, _LEAST, MOST = 8, 64, 192  # passes: of the first stage, and of all stages at least and at most
_SHAPES = 10_000_000  # pairs of layouts, over all shapes, up to which many axes are seen jointly, ...
_LIGHT = 1_000_000_000  # ... and entries
_LIFTED = 400_000_000  # entries of a network with a shorter step that passes over all of it are affordable for
_SETTLED = 4_000_000  # entries of a network of bounds up to which states that cannot be optimal are looked for
_SMALL, _MIDDLE = 50_000, 1_000_000  # networks of fewer entries are eliminated at last ...
_NARROW, _WIDE = 1 << 20, 1 << 14  # ... with tables of so many at most
_REDRAWN = 4  # times that a network is drawn anew at most
_HELPED = 0.9  # what is left of the gap at most by what has helped
_TIGHT, _STALLED = 2e-3, 2e-4  # a bound is raised until so little is open, or a stage of passes has helped no more


def raise_bound(
    certificate: Certificate, evaluator: Evaluator | None = None, most: int = MOST, settle: bool = False
) -> float:
    """The bound after as many passes of messages as are affordable and help.

    Args:
      settle: drop states on the way, for rounds follow; else only where that is cheap.
    """
    if certificate.shortened:
        certificate.lift(1)
    clock, (enough, most), passes, done = certificate.model.clock, _passes(certificate, most, settle), _FIRST, 0
    while done < most and certificate.gap >= _TIGHT and not certificate.exhausted and not clock.is_up():
        before, stage = certificate.gap, min(passes, (enough if done < enough else most) - done)
        (certificate.tighten if settle or certificate.work <= _SETTLED else certificate.lift)(stage)
        done, passes = done + stage, 2 * passes
        if before - certificate.gap < _STALLED or (done >= enough and certificate.gap > _HELPED * before):
            break
    if certificate.gap >= GAP and certificate.work < _MIDDLE and not clock.is_up():
        certificate.finish(_NARROW if certificate.work < _SMALL else _WIDE, evaluator)
    return certificate.bound


def _passes(certificate: Certificate, most: int, settle: bool) -> tuple[int, int]:
    """How many of them are affordable, and how many with those that are only if the last ones have helped."""
    work = max(1, certificate.work)
    if certificate.shortened and work > (_LIFTED if settle else _SETTLED):
        return 0, 0  # more of them than those of the shorter step have found nothing
    enough = min(most, affordable(work))
    return enough, max(enough, min(most, _FURTHER // work))


def affordable(entries: int) -> int:
    """Passes of messages, whether they help or not."""
    return max(_LEAST, min(MOST, _WORK // max(1, entries)))


def bound_on_many_axes(model: Model, best: CostedPlan, quick: bool) -> float:
    """What no plan undercuts on many mesh axes; seen in parts if that is quick or the joint network takes too long."""
    model.focus()
    if not quick and has_few_layouts(model) and not model.clock.is_up():
        certificate = Certificate(NetworkBuilder(model), best, FIRST_TREES)
        if is_light(certificate):
            raise_bound(certificate, settle=True)
            return rebuild_and_raise(certificate, enough=GAP).bound
    return sum(raise_bound(Certificate(NetworkBuilder(part), part.seen(best))) for part in projections(model))


def has_few_layouts(model: Model) -> bool:
    """Whether all mesh axes may be seen jointly for a bound."""
    return sum(distances.fitting.size**2 for distances in model.distances.every) <= _SHAPES


def is_light(certificate: Certificate) -> bool:
    """Whether messages over its network, or over that of a shorter step, are affordable."""
    return (certificate.shortened or certificate.work) <= _LIGHT


def lifted_later(joint: NetworkBuilder, best: CostedPlan, most: int, again: bool) -> float:
    """The bound of a joint network that was made a while ago, redrawn if ``again``."""
    joint.model.focus()
    certificate = Certificate(joint, best, FIRST_TREES)
    raise_bound(certificate, most=most)
    return (rebuild_and_raise(certificate, most) if again else certificate).bound


def rebuild_and_raise(certificate: Certificate, most: int = MOST, enough: float = OPEN) -> Certificate:
    """A certificate that has been raised; if much is open, the last of others, as long as they help.

    In them those values are worth more that pay too little in the plan that messages point to.
    """
    clock = certificate.model.clock
    certificate.model.focus()
    for _ in range(_REDRAWN):
        if certificate.gap <= enough or clock.is_up() or not is_light(certificate):
            break
        before = certificate
        certificate = Certificate(before.joint, before.best, FIRST_TREES, before.underpaid)
        raise_bound(certificate, most=most)
        certificate.bound = max(certificate.bound, before.bound)
        if certificate.gap > _HELPED * before.gap:
            break
    return certificate
