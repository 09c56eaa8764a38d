"""The search: messages point to a plan, a certificate says how good it is, rounds of both close the gap between them.

Messages see all axes jointly and end within 1% of the optimum on training steps of any depth, but
may settle badly where a few operations disagree; a sweep decides one mesh axis exactly. Steps of up to a few
thousand operations then go through rounds that prove the plan, or find the better one (``closing``).

This looks at the joint states of two mesh axes. On a mesh of more, where these are too many, it goes from
neighbourhood to neighbourhood of the best plan so far: first the axes take rows in one group or two, as if there
were no more, then two axes move and the others stay; the latter not in a large step that does not fit. If they can be
looked at once, that gives the bound. Where a plan is not proved to be near the optimum, fewer axes are tried as well,
so more axes are not worse than fewer.

A plan that does not fit the memory is only where the search for one that does begins: it is not worth rounds. Of
many axes fewer are tried again then from the plan that they have led to, if that fits.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np

from meshdsl.planner.bounds.certificate import Certificate
from meshdsl.planner.bounds.tighten import (
    FIRST_TREES,
    GAP,
    MOST,
    OPEN,
    affordable,
    bound_on_many_axes,
    lifted_later,
    raise_bound,
    rebuild_and_raise,
)
from meshdsl.planner.costs.fixed_point import TIES
from meshdsl.planner.costs.reshard_cost import (
    Groups,
    apart,
    axis_groups_in_pairs,
    axis_groups_in_two,
    axis_groups_merged,
    axis_groups_of_plan,
    in_two,
)
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.mrf.network import Labels, Network
from meshdsl.planner.mrf.trws import TRWS
from meshdsl.planner.objective import CostedPlan, Evaluator, prepare_model
from meshdsl.planner.problem.model import Assignment, Model
from meshdsl.planner.search.local_search import AxisDescent, close_gap, sweep_order
from meshdsl.util.runtime import run_parallel

# ---- Start -----------------------------------------------------------------------------------------------------------
# Where messages point to: the plan that a search begins from.


_AT_A_TIME, _IDLE = 8, 2  # the search ends when so many passes have found nothing better, so many times
_RISES = 1e-4  # part of the cost by which what it is at least rises as long as more passes may find something better
EXACT = 1e-6  # what messages may leave open for nothing to be found by a sweep


class InitialPlan(NamedTuple):
    """Where messages point to in a network, and the part of its cost that others may save."""

    choice: CostedPlan
    network: Network
    states: Labels
    left: float
    weighs: bool


def initial_plan(joint: NetworkBuilder, evaluator: Evaluator, limit: float, both: bool) -> InitialPlan:
    """Where messages point to.

    Args:
      both: where a shorter step stands for the whole one, try if its layers should weigh as much as all of them, which
        the model notes; else they weigh what it says.
    """
    networks: dict[bool, Network] = {}
    for weighs in (False, True) if both and joint.drops_layers else (joint.model.weighs,):
        joint.model.weighs = weighs
        networks[weighs] = joint.reduced_plans()
    pointed = run_parallel([partial(_pointed_to, network, limit, joint.drops_layers) for network in networks.values()])
    found = [
        InitialPlan(evaluator.evaluate(joint.whole_plan(states)), network, states, left, weighs)
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
    messages = TRWS(network, limit + 1.0)
    idle, passes = 0, chain([1, _AT_A_TIME - 1], repeat(_AT_A_TIME))
    for _ in range(affordable(messages.entries) // _AT_A_TIME):
        before, lower = messages.cost, messages.lower
        messages.run(next(passes))
        rises = patient and messages.lower - lower > _RISES * messages.cost
        idle = 0 if messages.cost < before or rises else idle + 1
        if idle == _IDLE or messages.gap <= EXACT:
            break
    return messages.states, messages.gap


# ---- Search ----------------------------------------------------------------------------------------------------------


_LARGEST = 20_000  # entries of the largest table of a sweep
_ROUNDS = 3  # sweeps over all axes
_QUICK = 24  # passes for a plan that begins from another
_FAR = 5e-2  # the same for steps of more than _DEEPEST nodes, on which a sweep takes far longer than messages do
_JOINTLY = 2_000_000  # pairs of layouts, over all values, that can be looked at together ...
_ONCE = 50_000_000  # ... and once, for the certificate and rounds
_CLOSED = 2_000_000  # entries of a network of plans up to which the gap is closed ...
_FEW = 2_000  # ... and nodes up to which it is in any case
_DEEPEST = 20_000  # nodes up to which rounds are worth their time where a search goes from plan to plan
ROUNDED = 1e-9  # of a bound: sums of floats round
Worth = Callable[[CostedPlan], bool]
Proof = Callable[[], float]  # what no plan costs less than, when it is asked for


def search(model: Model) -> tuple[CostedPlan, float]:
    """The best plan found, memory aside, and seconds that no plan can undercut."""
    best, prove = find(model, lambda _: True)
    return best, prove()


def find(
    model: Model,
    worth: Worth,
    joint: NetworkBuilder | None = None,
    known: Assignment | None = None,
    evaluator: Evaluator | None = None,
) -> tuple[CostedPlan, Callable[[], float]]:
    """The best plan found, memory aside, and what proves seconds that no plan can undercut, when they are asked for.

    Args:
      worth: whether a plan is worth rounds.
      joint: the networks of all states, if they can be looked at together and were made before.
      known: a plan to begin from, perhaps of other pins; the proof is then a quick one.
      evaluator: of the model, if there is one.
    """
    evaluator = evaluator or Evaluator(model)
    best = evaluated(model, evaluator, model.whole)
    proof: Proof = cache(lambda: bound_on_many_axes(model, best, known is not None))
    if known is not None:
        best = min(best, repair_for_pins(model, evaluator, known), key=lambda choice: choice.cost)
    if jointly(model):
        model.focus()
        joint = joint or NetworkBuilder(model)
        best, proof = _proved(joint, evaluator, best, worth, known is None)
        again = True
    else:
        again = not worth(best)  # the first neighbourhoods are not gone through in rounds then
        large = len(model.nodes) > _DEEPEST
        if known is None:  # one group is in two groups
            best = _moved(model, (in_two if large else axis_groups_merged)(model.wide), evaluator, best, worth, True)
        if known is not None or not large or worth(best):
            best = _moved(model, axis_groups_in_pairs(model.wide), evaluator, best, worth, known is None)
        if _layouts(model) <= _ONCE and worth(best) and not model.clock.is_up():
            model.focus()
            certificate = Certificate(NetworkBuilder(model), best, FIRST_TREES)
            raise_bound(certificate, evaluator, settle=True)
            best, bound = close_gap(certificate, evaluator)
            proof = _known(bound)
    if again and known is None and worth(best) and proof() < (1 - OPEN) * best.cost:
        least, first = proof(), best
        best = _moved(model, axis_groups_merged(model.wide), evaluator, first, worth, True)
        if best.cost < (1 - OPEN) * first.cost and not jointly(model):
            proof = cache(lambda: max(least, bound_on_many_axes(model, best, False)))
        model.focus()

    return best, lambda: _seconds(model, best, proof())


def quick_bound(model: Model, best: CostedPlan) -> float:
    """Seconds that no plan can undercut, memory aside, from a plan on, quickly."""
    if not jointly(model):
        return _seconds(model, best, bound_on_many_axes(model, best, True))
    model.focus()
    return _seconds(model, best, lifted_later(NetworkBuilder(model), best, _QUICK, False))


def _seconds(model: Model, best: CostedPlan, least: float) -> float:
    """A bound in seconds, rounded down; no more than what a plan takes."""
    safe = least - TIES - ROUNDED * abs(least)
    return max(0.0, model.scale.seconds(min(safe, best.cost)))


def _moved(
    model: Model, near: Iterable[Groups], evaluator: Evaluator, best: CostedPlan, worth: Worth, both: bool
) -> CostedPlan:
    """The best plan found from neighbourhood to neighbourhood; ``both`` is as for ``initial_plan`` where all axes
    move.
    """
    for i, groups in enumerate(near):
        if i and model.clock.is_up():
            break
        model.focus(groups, best.rows)
        every = sum(map(len, groups)) == len(model.wide)
        best = _near(model, groups, evaluator, best, worth, both and every)
    return best


def evaluated(model: Model, evaluator: Evaluator, rows: Assignment) -> CostedPlan:
    """A plan with its cost."""
    prepare_model(model, rows)
    return evaluator.exact(evaluator.evaluate(rows))


def repair_for_pins(model: Model, evaluator: Evaluator, known: Assignment) -> CostedPlan:
    """A plan of other pins with what these do not allow done everywhere."""
    return evaluated(model, evaluator, np.where(evaluator.allowed(known)[:, None], known, model.whole))


def _near(model: Model, groups: Groups, evaluator: Evaluator, best: CostedPlan, worth: Worth, both: bool) -> CostedPlan:
    """The best plan found among those that are in question."""
    joint = NetworkBuilder(model)
    if joint.plan_entries <= _CLOSED and len(model.nodes) <= _DEEPEST and worth(best):
        return _proved(joint, evaluator, best, worth, True)[0]
    found = _plans_near(joint, groups, evaluator, evaluator.objective(best), both)
    return min((best, *map(evaluator.exact, found)), key=lambda choice: choice.cost)


def _proved(
    joint: NetworkBuilder, evaluator: Evaluator, known: CostedPlan, worth: Worth, sweep: bool
) -> tuple[CostedPlan, Proof]:
    """Where the messages point, with its bound; swept and closed, if that is asked for and leaves much open."""
    model, most = joint.model, MOST if sweep else _QUICK
    entries, start = joint.plan_entries, initial_plan(joint, evaluator, known.cost, sweep)
    best, left = evaluator.exact(start.choice), start.left
    few = entries <= _CLOSED or len(model.nodes) <= _FEW
    if not few and (left <= EXACT or not sweep or not worth(best)):
        best = min(known, best, key=lambda choice: choice.cost)
        return best, cache(lambda: lifted_later(joint, best, most, sweep))
    certificate = Certificate(joint, best, FIRST_TREES)
    raise_bound(certificate, evaluator, most, few)
    if sweep and left > _sweepable(model) and certificate.gap >= GAP:
        swept = _swept(start, apart(model.wide), model.width)
        better = evaluator.exact(evaluator.evaluate(joint.whole_plan(swept)))
        if better.cost < certificate.best.cost:
            certificate.best = better
            raise_bound(certificate, evaluator, settle=few)
    best, bound = certificate.best, certificate.bound
    proof: Proof = cache(lambda: rebuild_and_raise(certificate, most).bound) if sweep else _known(bound)
    if few and worth(best):
        best, bound = close_gap(certificate, evaluator)
        proof = _known(bound)
    return (known if known.cost < best.cost else best), proof


def _known(bound: float) -> Proof:
    return lambda: bound


def plans(
    model: Model,
    evaluator: Evaluator,
    known: Sequence[CostedPlan],
    joint: NetworkBuilder | None,
    sweep: bool,
    every: bool,
) -> list[CostedPlan]:
    """Good plans at the model's present memory prices.

    Args:
      known: plans of which the best at these prices is where to begin.
      joint: the networks at other prices, if all mesh axes can be looked at jointly and they are known.
      sweep: whether one axis at a time is decided exactly then, after messages have.
      every: of many mesh axes, whether two move by themselves as well, the others being as they are, and all do in any
        two groups; else all do in the two groups that they are in.
    """
    paid = [evaluator.objective(choice) for choice in known]
    best = known[int(np.argmin(paid))]
    if jointly(model):
        model.focus()
        here = joint.priced(model) if joint else NetworkBuilder(model)
        return _plans_near(here, apart(model.wide) if sweep else (), evaluator, min(paid))
    found = [best]
    for groups in axis_groups_in_two(model.wide) if every else (axis_groups_of_plan(model.wide, best.rows),):
        model.focus(groups, best.rows)
        near = _plans_near(NetworkBuilder(model), groups, evaluator, evaluator.objective(best))
        best = min([best, *near], key=evaluator.objective)
        found += near
    return found


def jointly(model: Model) -> bool:
    """Whether the states of all mesh axes can be looked at together."""
    return len(model.wide) <= 2 or _layouts(model) <= _JOINTLY


def _layouts(model: Model) -> int:
    """Pairs of layouts, over all values."""
    sizes = np.array([distances.fitting.size for distances in model.distances.every])
    return int((sizes[model.spaces[model.wiring.made[model.wiring.made >= 0]]] ** 2).sum())


def _plans_near(
    joint: NetworkBuilder, groups: Groups, evaluator: Evaluator, limit: float, both: bool = False
) -> list[CostedPlan]:
    start = initial_plan(joint, evaluator, limit, both)
    if not groups or start.left <= _sweepable(joint.model):
        return [start.choice]
    return [start.choice, evaluator.evaluate(joint.whole_plan(_swept(start, groups, joint.model.width)))]


def _sweepable(model: Model) -> float:
    """What messages must leave open for a sweep to be worth its time."""
    return EXACT if len(model.nodes) <= _DEEPEST else _FAR


def _swept(start: InitialPlan, groups: Groups, width: int) -> Labels:
    return AxisDescent(start.network, width, _LARGEST).sweep(start.states, sweep_order(groups), _ROUNDS)
