"""The search: messages point to a plan, sweeps improve it, a certificate says how good it is.

The messages speak of all axes jointly but decide hesitantly; sweeps decide exactly but see one
axis at a time. Either alone stops 10% or more above the optimum on real steps, a sweep from
where the messages point within 1 or 2%.

This looks at the joint states of two mesh axes. On a mesh of more it goes from neighbourhood to
neighbourhood of the best plan so far: first the axes take rows in two groups, then two axes
move and the others stay.
"""

from collections.abc import Iterator
from itertools import combinations

from meshdsl.planner.bound import Certificate
from meshdsl.planner.exact import TIES
from meshdsl.planner.extract import Choice, Evaluator
from meshdsl.planner.joint import Joint
from meshdsl.planner.messages import cap, pass_messages, point
from meshdsl.planner.model import Model
from meshdsl.planner.near import Groups
from meshdsl.planner.network import Network
from meshdsl.planner.projection import projections
from meshdsl.planner.sweep import Sweeper, sweep_order

_LARGEST = 20_000  # entries of the largest table of a sweep
_ROUNDS = 3  # sweeps over all axes
_WORK = 8_000_000  # table entries that the passes of messages of one stage may touch together
_PASSES = 6, 24  # at most: to find a plan, to prove a bound
_AT_A_TIME = 8
_GAP = 1e-2
_JOINTLY = 2_000_000  # pairs of layouts, over all values, that can be looked at together
_SMALL, _NARROW, _WIDE = 50_000, 1 << 20, 1 << 14  # networks of fewer entries are finished with larger tables
_STALLED = 2e-4


def search(model: Model) -> tuple[Choice, float]:
    """The best plan found, memory aside, and seconds that no plan can undercut."""
    evaluator = Evaluator(model)
    found, joint = plans(model, evaluator)
    best = evaluator.exact(min(found, key=lambda choice: choice.cost))
    if _jointly(model):
        bound = _raised(Certificate(joint, best))
    else:
        bound = sum(_raised(Certificate(Joint(part), part.seen(best))) for part in projections(model))
    safe = bound - TIES - 1e-9 * abs(bound)  # sums of floats round
    return best, max(0.0, model.scale.seconds(min(safe, best.cost)))


def _raised(certificate: Certificate) -> float:
    """The bound after as many passes of messages as are affordable and help."""
    passes = _affordable(certificate.work, _PASSES[1])
    for done in range(0, passes, _AT_A_TIME):
        before = certificate.gap
        certificate.tighten(min(_AT_A_TIME, passes - done))
        if certificate.gap < _GAP or before - certificate.gap < _STALLED:
            break
    if certificate.gap >= _GAP:
        certificate.finish(_NARROW if certificate.work < _SMALL else _WIDE)
    return certificate.bound


def plans(model: Model, evaluator: Evaluator) -> tuple[list[Choice], Joint]:
    """Good plans at the model's present memory prices, and the plan that does everything everywhere.

    Also the joint states that were looked at last.
    """
    found: list[Choice] = []
    for groups in _neighbourhoods(model):
        if not _jointly(model):
            model.focus(groups, min(found, key=evaluator.objective).rows if found else model.whole)
        found = found or [evaluator.evaluate(model.whole)]
        joint = Joint(model)
        found += _plans_near(joint, groups, evaluator, min(found, key=evaluator.objective))
    return found, joint


def _jointly(model: Model) -> bool:
    """Whether the states of all mesh axes can be looked at together."""
    layouts = sum(model.distances[value].fitting.size ** 2 for value in model.problem.defined)
    return len(model.wide) <= 2 or layouts <= _JOINTLY


def _neighbourhoods(model: Model) -> Iterator[Groups]:
    """Groups of mesh axes that move at the same time: all axes in two groups, then two axes."""
    axes = model.wide
    if _jointly(model):
        yield tuple((axis,) for axis in axes)
    else:
        yield from ((axes[:i], axes[i:]) for i in range(1, len(axes)))
        yield from (((a,), (b,)) for a, b in combinations(axes, 2))


def _plans_near(joint: Joint, groups: Groups, evaluator: Evaluator, best: Choice) -> list[Choice]:
    network = joint.plans()
    start = _pointed_to(network, best.cost)
    swept = Sweeper(network, joint.model.width, _LARGEST).sweep(start, sweep_order(groups), _ROUNDS)
    return [evaluator.evaluate(joint.rows(chosen)) for chosen in (start, swept)]


def _pointed_to(network: Network, limit: float) -> dict[int, int]:
    """The states that messages point to, for all variables."""
    guide = network.copy()
    cap(guide, limit + 1.0)
    pass_messages(guide, _affordable(guide.entries, _PASSES[0]))
    return point(guide)


def _affordable(entries: int, most: int) -> int:
    return max(2, min(most, _WORK // max(1, entries)))
