"""Where messages point to: the plan that a search begins from."""

from functools import partial
from itertools import chain, repeat
from typing import NamedTuple

from meshdsl.beside import together
from meshdsl.planner.extract import Choice, Evaluator
from meshdsl.planner.joint import Joint
from meshdsl.planner.messages import Messages
from meshdsl.planner.network import Network
from meshdsl.planner.raising import affordable
from meshdsl.planner.trail import Labels

_AT_A_TIME, _IDLE = 8, 2  # the search ends when so many passes have found nothing better, so many times
_RISES = 1e-4  # part of the cost by which what it is at least rises as long as more passes may find something better
EXACT = 1e-6  # what messages may leave open for nothing to be found by a sweep


class Start(NamedTuple):
    """Where messages point to in a network, and the part of its cost that others may save."""

    choice: Choice
    network: Network
    states: Labels
    left: float
    weighs: bool


def started(joint: Joint, evaluator: Evaluator, limit: float, both: bool) -> Start:
    """Where messages point to.

    Args:
      both: where a shorter step stands for the whole one, try if its layers should weigh as much as all of them, which
        the model notes; else they weigh what it says.
    """
    networks: dict[bool, Network] = {}
    for weighs in (False, True) if both and joint.shortened else (joint.model.weighs,):
        joint.model.weighs = weighs
        networks[weighs], _ = joint.searched()
    pointed = together([partial(_pointed_to, network, limit, joint.shortened) for network in networks.values()])
    found = [
        Start(evaluator.evaluate(joint.stretched(states)), network, states, left, weighs)
        for (weighs, network), (states, left) in zip(networks.items(), pointed, strict=True)
    ]
    best = min(found, key=lambda start: start.choice.cost)
    joint.model.weighs = best.weighs
    return best


def _pointed_to(network: Network, limit: float, patient: bool) -> tuple[Labels, float]:
    """The states that messages point to, for all variables, and the part of their cost that others may save.

    Args:
      patient: go on while the bound rises, although nothing better is found.
    """
    messages = Messages(network, limit + 1.0)
    idle, passes = 0, chain([1, _AT_A_TIME - 1], repeat(_AT_A_TIME))
    for _ in range(affordable(messages.entries) // _AT_A_TIME):
        before, lower = messages.cost, messages.lower
        messages.run(next(passes))
        rises = patient and messages.lower - lower > _RISES * messages.cost
        idle = 0 if messages.cost < before or rises else idle + 1
        if idle == _IDLE or messages.gap <= EXACT:
            break
    return messages.states, messages.gap
