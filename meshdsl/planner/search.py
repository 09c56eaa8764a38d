"""The search: messages point to a plan, a certificate says how good it is, sweeps improve what it leaves open.

Messages see all axes jointly and end within 1% of the optimum on training steps of any depth, but
may settle badly where a few operations disagree; a sweep decides one mesh axis exactly. What shares moves
otherwise than the network has it is polished at last.

This looks at the joint states of two mesh axes. On a mesh of more, where these are too many, it goes from
neighbourhood to neighbourhood of the best plan so far: first the axes take rows in two groups, then two
axes move and the others stay. If they can be looked at once, messages give the first plan and the bound.
"""

from collections.abc import Iterator
from itertools import combinations

from meshdsl.planner.bound import Certificate
from meshdsl.planner.eliminate import eliminate
from meshdsl.planner.exact import TIES
from meshdsl.planner.extract import Choice, Evaluator
from meshdsl.planner.joint import Joint
from meshdsl.planner.messages import Messages, cap
from meshdsl.planner.model import Model
from meshdsl.planner.near import Groups
from meshdsl.planner.network import Network
from meshdsl.planner.polish import polished
from meshdsl.planner.projection import projections
from meshdsl.planner.sweep import States, Sweeper, sweep_order

_LARGEST = 20_000  # entries of the largest table of a sweep
_ROUNDS = 3  # sweeps over all axes
_WORK = 200_000_000  # table entries that the passes of messages of one stage may touch together
_LEAST, _MOST = 64, 192  # passes
_AT_A_TIME, _IDLE = 8, 2  # the search ends when so many passes have found nothing better, so many times
_GAP, _OPEN = 1e-2, 2e-2  # gaps: good enough; large enough to sweep
_JOINTLY = 2_000_000  # pairs of layouts, over all values, that can be looked at together ...
_ONCE = 20_000_000  # ... and once, for the certificate
_SMALL, _MIDDLE = 50_000, 1_000_000  # networks of fewer entries are eliminated at last ...
_NARROW, _WIDE = 1 << 20, 1 << 14  # ... with tables of so many at most
_STALLED, _TIED = 2e-4, 1e-9
_FEW = 4_000  # states of nodes that are polished
_FORKS = 32  # readers of which each may come first


def search(model: Model) -> tuple[Choice, float]:
    """The best plan found, memory aside, and seconds that no plan can undercut."""
    evaluator = Evaluator(model)
    if _jointly(model, _ONCE):
        best, bound = _proved(Joint(model), evaluator)
        if not _jointly(model, _JOINTLY) and bound < (1 - _GAP) * best.cost:
            best = evaluator.exact(min((best, *plans(model, evaluator, best)), key=lambda choice: choice.cost))
    else:
        best = evaluator.exact(min(plans(model, evaluator), key=lambda choice: choice.cost))
        bound = sum(_raised(Certificate(Joint(part), part.seen(best))) for part in projections(model))
    safe = bound - TIES - 1e-9 * abs(bound)  # sums of floats round
    return best, max(0.0, model.scale.seconds(min(safe, best.cost)))


def _proved(joint: Joint, evaluator: Evaluator) -> tuple[Choice, float]:
    """Where the messages point, with its bound; swept if that leaves much open."""
    network, model = joint.plans(), joint.model
    start = _pointed_to(network, evaluator.evaluate(model.whole).cost)
    best = evaluator.exact(evaluator.evaluate(joint.rows(start)))
    certificate = Certificate(joint, best)
    bound = _raised(certificate)
    if certificate.gap >= _OPEN:
        swept = _swept(network, start, _every_axis(model), model.width)
        better = evaluator.exact(evaluator.evaluate(joint.rows(swept)))
        if better.cost < best.cost:
            start, certificate.best = swept, better
            bound = _raised(certificate)
    if certificate.gap > _TIED:
        found = certificate.best
        if network.entries < _SMALL and len(joint.chains) <= _FORKS:
            found = _rechained(joint, start, found, evaluator)
        certificate.best = evaluator.exact(polished(model, evaluator, found, _FEW))
    return certificate.best, bound


def _rechained(joint: Joint, start: States, best: Choice, evaluator: Evaluator) -> Choice:
    """The best plan of small networks whose chains begin with one reader or another, value by value."""
    first: dict[int, int] = {}
    for value, reader in joint.chains:
        network = joint.plans({**first, value: reader})
        found = evaluator.evaluate(joint.rows(_eliminated(network, start)))
        if found.cost < best.cost:
            best, first[value] = found, reader
    return best


def _eliminated(network: Network, start: States) -> States:
    """The best states of a small network; where it is wide, some stay where they are."""
    domains, tables = network.listed()
    found = eliminate(domains, tables, [start[v] for v in network.order], _NARROW)
    return network.decode(dict(zip(network.order, found.states.tolist(), strict=True)))


def _raised(certificate: Certificate) -> float:
    """The bound after as many passes of messages as are affordable and help."""
    left, passes = _affordable(certificate.work), _AT_A_TIME
    while left > 0 and certificate.gap >= _GAP:
        before = certificate.gap
        certificate.tighten(min(passes, left))
        left, passes = left - passes, 2 * passes
        if before - certificate.gap < _STALLED:
            break
    if certificate.gap >= _GAP and certificate.work < _MIDDLE:
        certificate.finish(_NARROW if certificate.work < _SMALL else _WIDE)
    return certificate.bound


def plans(model: Model, evaluator: Evaluator, known: Choice | None = None) -> list[Choice]:
    """Good plans at the model's present memory prices.

    Args:
      known: a plan to begin from; without it, the one that does everything everywhere.
    """
    if _jointly(model, _JOINTLY):
        return _plans_near(Joint(model), _every_axis(model), evaluator, evaluator.evaluate(model.whole))
    found = [] if known is None else [known]
    for groups in _neighbourhoods(model.wide, known is None):
        best = min(found, key=evaluator.objective) if found else None
        model.focus(groups, model.whole if best is None else best.rows)
        found += _plans_near(Joint(model), groups, evaluator, best or evaluator.evaluate(model.whole))
    return found


def _jointly(model: Model, most: int) -> bool:
    """Whether the states of all mesh axes can be looked at together, with so many pairs of layouts at most."""
    layouts = sum(model.distances[value].fitting.size ** 2 for value in model.problem.defined)
    return len(model.wide) <= 2 or layouts <= most


def _every_axis(model: Model) -> Groups:
    return tuple((axis,) for axis in model.wide)


def _neighbourhoods(axes: tuple[int, ...], far: bool) -> Iterator[Groups]:
    """Groups of mesh axes that move at the same time: all axes in two groups, if ``far``, then two axes."""
    if far:
        yield from ((axes[:i], axes[i:]) for i in range(1, len(axes)))
    yield from (((a,), (b,)) for a, b in combinations(axes, 2))


def _plans_near(joint: Joint, groups: Groups, evaluator: Evaluator, best: Choice) -> list[Choice]:
    network = joint.plans()
    start = _pointed_to(network, evaluator.objective(best))
    swept = _swept(network, start, groups, joint.model.width)
    return [evaluator.evaluate(joint.rows(chosen)) for chosen in (start, swept)]


def _swept(network: Network, start: States, groups: Groups, width: int) -> States:
    return Sweeper(network, width, _LARGEST).sweep(start, sweep_order(groups), _ROUNDS)


def _pointed_to(network: Network, limit: float) -> States:
    """The states that messages point to, for all variables."""
    guide = network.copy()
    cap(guide, limit + 1.0)
    messages = Messages(guide)
    idle = 0
    for _ in range(_affordable(guide.entries) // _AT_A_TIME):
        before = messages.cost
        messages.run(_AT_A_TIME)
        idle = 0 if messages.cost < before else idle + 1
        if idle == _IDLE:
            break
    return messages.states


def _affordable(entries: int) -> int:
    """Passes of messages that a stage may take."""
    return max(_LEAST, min(_MOST, _WORK // max(1, entries)))
