"""The search: messages point to a plan, sweeps improve it, a certificate says how good it is.

The messages speak of all axes jointly but decide hesitantly; sweeps decide exactly but see one
axis at a time. Either alone stops 10% or more above the optimum on real steps, a sweep from
where the messages point within 1 or 2%.
"""

from meshdsl.planner.bound import Certificate
from meshdsl.planner.extract import Choice, Evaluator
from meshdsl.planner.joint import Joint
from meshdsl.planner.messages import cap, pass_messages, point
from meshdsl.planner.model import Model
from meshdsl.planner.network import Network
from meshdsl.planner.sweep import Sweeper, sweep_order

_LARGEST = 20_000  # entries of the largest table of a sweep
_ROUNDS = 3  # sweeps over all axes
_WORK = 8_000_000  # table entries that the passes of messages of one stage may touch together
_PASSES = 6, 24  # at most: to find a plan, to prove a bound
_AT_A_TIME = 8
_GAP = 1e-2
_SMALL, _NARROW, _WIDE = 50_000, 1 << 20, 1 << 14  # networks of fewer entries are finished with larger tables
_STALLED = 2e-4


def search(model: Model) -> Certificate:
    """The best plan found, memory aside, with its lower bound."""
    joint = Joint(model)
    certificate = Certificate(joint, min(plans(joint, Evaluator(model)), key=lambda choice: choice.cost))
    passes = _affordable(certificate.work, _PASSES[1])
    for done in range(0, passes, _AT_A_TIME):
        before = certificate.gap
        certificate.tighten(min(_AT_A_TIME, passes - done))
        if certificate.gap < _GAP or before - certificate.gap < _STALLED:
            break
    if certificate.gap >= _GAP:
        certificate.finish(_NARROW if certificate.work < _SMALL else _WIDE)
    return certificate


def plans(joint: Joint, evaluator: Evaluator) -> list[Choice]:
    """Good plans at the model's present memory prices, and the plan that does everything everywhere."""
    model, network = joint.model, joint.plans()
    first = evaluator.evaluate(model.whole)
    start = _pointed_to(network, first.cost)
    swept = Sweeper(network, model.width, _LARGEST).sweep(start, sweep_order(model.width), _ROUNDS)
    return [first, *(evaluator.evaluate(joint.rows(chosen)) for chosen in (start, swept))]


def _pointed_to(network: Network, limit: float) -> dict[int, int]:
    """The states that messages point to, for all variables."""
    guide = network.copy()
    cap(guide, limit + 1.0)
    pass_messages(guide, _affordable(guide.entries, _PASSES[0]))
    return point(guide)


def _affordable(entries: int, most: int) -> int:
    return max(2, min(most, _WORK // max(1, entries)))
