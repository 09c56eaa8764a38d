"""The search for the cheapest plan, memory aside.

Messages decode to a plan, a certificate says how good it is, and rounds of both close the gap between them. Messages
see all mesh axes jointly and end within 1% of the optimum on training steps of any depth, but may converge badly where
a few ops disagree; a sweep then solves one mesh axis exactly. Steps of up to a few thousand nodes go through rounds
that prove the plan, or find a better one (``local_search.close_gap``).

This works on the joint states of two mesh axes. On a mesh with more axes, whose joint states are too many, the search
moves from neighbourhood to neighbourhood of the best plan so far. First the axes take equal rows in one or two groups,
as if there were no more axes; then two axes move and the others stay, but not in a large step that exceeds the memory.
Where a plan is not proved to be near the optimum, fewer axes are tried again, so that more axes are never worse than
fewer. If all axes can be encoded jointly once, that gives the bound.

A plan that exceeds the memory is only where the search for one that fits begins (``planner.memory``): it is not worth
rounds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from math import inf
from typing import NamedTuple

import numpy as np

from meshdsl.planner.bounds.certificate import Certificate
from meshdsl.planner.bounds.tighten import (
    RisingBound,
    affordable_passes,
    bound_in_rounds,
    bound_jointly,
    bound_on_axes_apart,
    bound_on_many_axes,
    raise_bound,
    rebuild_and_raise,
)
from meshdsl.planner.costs.fixed_point import TIES
from meshdsl.planner.costs.reshard_cost import (
    Groups,
    axis_groups_in_pairs,
    axis_groups_in_two,
    axis_groups_merged,
    axis_groups_of_plan,
    axis_groups_split,
    singleton_groups,
)
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.limits import SearchLimits
from meshdsl.planner.mrf.network import Labels, Network
from meshdsl.planner.mrf.trws import TRWS
from meshdsl.planner.objective import CostedPlan, Evaluator, view_of_plan
from meshdsl.planner.problem.model import Assignment, Model
from meshdsl.planner.search.local_search import AxisDescent, close_gap, sweep_order
from meshdsl.util.runtime import run_parallel

ROUNDING = 1e-9  # relative rounding error of a sum of costs, by which bounds are lowered
PlanPredicate = Callable[[CostedPlan], bool]

# ---- Results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SearchOutcome:
    """The best plan found, memory aside, and a lower bound that is raised when it is first read.

    Attributes:
      cost_bound: a cost that no plan undercuts.
    """

    model: Model
    plan: CostedPlan
    cost_bound: RisingBound

    def lower_bound(self, enough: float = inf) -> float:
        """Returns seconds that no plan undercuts: rounded down, and no more than the plan takes.

        Args:
          enough: seconds from which on a higher bound is of no use.
        """
        enough = min(self.model.scale.cost(enough), (1 - self.model.limits.worth_gap) * self.plan.cost)
        return _seconds(self.model, self.plan, self.cost_bound.at_least(enough, useful=enough))


def _seconds(model: Model, best: CostedPlan, bound: float) -> float:
    safe = bound - TIES - ROUNDING * abs(bound)
    return max(0.0, model.scale.seconds(min(safe, best.cost)))


class _Found(NamedTuple):
    plan: CostedPlan
    bound: RisingBound


def evaluate_plan(model: Model, evaluator: Evaluator, rows: Assignment) -> CostedPlan:
    """Returns an assignment with its exact cost."""
    evaluator = evaluator.at(view_of_plan(model, rows))
    return evaluator.with_exact_cost(evaluator.evaluate(rows))


def repair_for_pins(model: Model, evaluator: Evaluator, known: Assignment) -> CostedPlan:
    """Returns a plan found under other pins, with every node that the present pins forbid replicated."""
    return evaluate_plan(model, evaluator, np.where(evaluator.allowed(known)[:, None], known, model.first_states))


# ---- Entry points ----------------------------------------------------------------------------------------------------


def search(
    model: Model,
    is_worth_rounds: PlanPredicate = lambda _: True,
    builder: NetworkBuilder | None = None,
    known: Assignment | None = None,
    evaluator: Evaluator | None = None,
    is_warm_start: PlanPredicate = lambda _: False,
) -> SearchOutcome:
    """Searches for the cheapest plan, memory aside.

    Args:
      is_worth_rounds: whether a plan is worth rounds of improvement and proof.
      builder: the networks of all states, if ``searches_jointly`` and they were built before.
      known: a plan to start from, perhaps of other pins; the search and the proof are then quick ones.
      evaluator: of the model, if there is one.
      is_warm_start: whether a plan only warm-starts searches at other prices, and is not worth rounds and a proof.
    """
    limits, evaluator = model.limits, evaluator or Evaluator(model)
    best = evaluate_plan(model, evaluator, model.first_states)
    if known is not None:
        best = min(best, repair_for_pins(model, evaluator, known), key=lambda plan: plan.cost)
    if searches_jointly(model):
        builder, thorough = builder or NetworkBuilder(model), known is None
        best, bound = _search_jointly(builder, evaluator, best, is_worth_rounds, thorough, is_warm_start)
        may_merge_axes = True
    else:
        may_merge_axes = not is_worth_rounds(best)  # the first neighbourhoods are then searched without rounds
        best, bound = _search_neighbourhoods(model, evaluator, best, is_worth_rounds, known is None)
    enough = 1 - max(limits.bounds_open_gap, limits.worth_gap)
    is_open = may_merge_axes and known is None and is_worth_rounds(best) and not is_warm_start(best)
    if is_open and (proved := bound.at_least(enough * best.cost)) < enough * best.cost:
        first = best
        best = _move(model, axis_groups_merged(model.parallel_axes), evaluator, first, is_worth_rounds, True)
        if best.cost < enough * first.cost and not searches_jointly(model):
            bound = RisingBound(partial(bound_on_many_axes, model, best, False), known=proved)
    return SearchOutcome(model, best, bound)


def quick_bound(model: Model, best: CostedPlan) -> float:
    """Returns seconds that no plan undercuts, memory aside, with little work."""
    if not searches_jointly(model):
        apart = bound_on_axes_apart(model, best) if model.limits.worth_gap else bound_on_many_axes(model, best, True)
        return _seconds(model, best, apart)
    return _seconds(model, best, bound_jointly(NetworkBuilder(model), best, model.limits.search_quick_passes, False))


def priced_plans(
    model: Model,
    evaluator: Evaluator,
    known: Sequence[CostedPlan],
    builder: NetworkBuilder | None,
    sweep: bool,
    thorough: bool,
) -> list[CostedPlan]:
    """Returns good plans at the model's present memory prices.

    Args:
      known: plans, the best of which at these prices is where to start.
      builder: the networks at other prices, if ``searches_jointly`` and they were built before.
      sweep: whether the axes are then solved exactly, one at a time.
      thorough: on many mesh axes, also let any two move alone, and all move in any two groups; otherwise all move in
        the two groups in which the plan has them.
    """
    costs = [evaluator.priced_cost(plan) for plan in known]
    best = known[int(np.argmin(costs))]
    if searches_jointly(model):
        here = builder.priced(model) if builder else NetworkBuilder(model)
        return _decoded_plans(here, singleton_groups(model.parallel_axes) if sweep else (), evaluator, min(costs))
    found = [best]
    for groups in (
        axis_groups_in_two(model.parallel_axes) if thorough else (axis_groups_of_plan(model.parallel_axes, best.rows),)
    ):
        near = model.restricted(groups, best.rows)
        plans = _decoded_plans(NetworkBuilder(near), groups, evaluator.at(near), evaluator.priced_cost(best))
        best = min([best, *plans], key=evaluator.priced_cost)
        found += plans
    return found


def searches_jointly(model: Model) -> bool:
    """Whether the states of all mesh axes are searched together."""
    return len(model.parallel_axes) <= 2 or _layout_pairs(model) <= model.limits.search_joint_pairs


def _layout_pairs(model: Model) -> int:
    """Returns the number of pairs of layouts, over all values."""
    sizes = np.array([distances.feasible.size for distances in model.reshard_costs.distinct])
    return int((sizes[model.spaces[model.wiring.producer[model.wiring.producer >= 0]]] ** 2).sum())


# ---- All axes jointly ------------------------------------------------------------------------------------------------


def _search_jointly(
    builder: NetworkBuilder,
    evaluator: Evaluator,
    known: CostedPlan,
    is_worth_rounds: PlanPredicate,
    thorough: bool,
    is_warm_start: PlanPredicate = lambda _: False,
) -> _Found:
    """Returns the better of ``known`` and the decoded plan, swept and closed where much is open.

    Args:
      thorough: otherwise messages are few, and nothing is swept.
    """
    model, limits = builder.model, builder.model.limits
    most = limits.bounds_passes_most if thorough else limits.search_quick_passes
    entries, start = builder.plan_entries, initial_plan(builder, evaluator, known.cost, thorough)
    best = evaluator.with_exact_cost(start.plan)
    is_small = entries <= limits.search_rounds_entries or len(model.nodes) <= limits.search_rounds_nodes
    is_done = start.gap <= limits.search_decoded_gap or not thorough or not is_worth_rounds(best)
    if (not is_small and is_done) or (limits.worth_gap and not thorough) or is_warm_start(best):
        best = min(known, best, key=lambda plan: plan.cost)
        return _Found(best, RisingBound(partial(bound_jointly, builder, best, most, thorough)))
    certificate = Certificate(builder, best, limits.bounds_first_tree_entries)
    raise_bound(certificate, evaluator, most, is_small)
    if thorough and start.gap > _gap_worth_sweep(model) and certificate.gap >= limits.bounds_wide_gap:
        swept = _sweep(start, singleton_groups(model.parallel_axes), model)
        better = evaluator.with_exact_cost(evaluator.evaluate(builder.whole_plan(swept)))
        if better.cost < certificate.best.cost:
            certificate.best = better
            raise_bound(certificate, evaluator, prune=is_small)
    best = certificate.best
    if is_small and is_worth_rounds(best):
        best, proved = close_gap(certificate, evaluator)
        bound = RisingBound(known=proved)
    elif thorough:
        bound = RisingBound(partial(_rebuilt_bound, certificate, most))
    else:
        bound = RisingBound(known=certificate.bound)
    return _Found(known if known.cost < best.cost else best, bound)


def _rebuilt_bound(certificate: Certificate, most: int, enough: float) -> float:
    certificate.enough = enough
    return rebuild_and_raise(certificate, most).bound


# ---- Neighbourhoods of axes ------------------------------------------------------------------------------------------


def _search_neighbourhoods(
    model: Model, evaluator: Evaluator, best: CostedPlan, is_worth_rounds: PlanPredicate, thorough: bool
) -> _Found:
    """Returns the best plan found from neighbourhood to neighbourhood, from ``best`` on.

    Args:
      thorough: first move all axes in one group and in two, and pairs of axes only where two groups were worth it.
    """
    limits, axes = model.limits, model.parallel_axes
    is_deep = len(model.nodes) > limits.search_deep_nodes
    moves_pairs = limits.search_quick_pairs
    if thorough:
        if not is_deep:
            best = _move(model, ((axes,),), evaluator, best, is_worth_rounds, True)
        tied = best.cost
        if is_deep or not model.deadline.expired():
            best = _move(model, axis_groups_split(axes), evaluator, best, is_worth_rounds, True)
        has_gained = best.cost <= (1 - limits.search_pairs_worth) * tied
        moves_pairs = has_gained and (not is_deep or is_worth_rounds(best))
    if moves_pairs:
        best = _move(model, axis_groups_in_pairs(axes), evaluator, best, is_worth_rounds, thorough)
    elif not thorough:
        best = _move(model, (axis_groups_of_plan(axes, best.rows),), evaluator, best, is_worth_rounds, False)
    many = partial(bound_on_many_axes, model, best, not thorough)
    may_join = _layout_pairs(model) <= limits.search_joint_pairs_once and is_worth_rounds(best)
    if limits.worth_gap:  # from here on the joint network takes less off a plan than the gap that is tolerated
        whole = [partial(bound_in_rounds, model, best) if may_join else many] if thorough else []
        return _Found(best, RisingBound(partial(bound_on_axes_apart, model, best), *whole))
    if may_join and not model.deadline.expired():
        certificate = Certificate(NetworkBuilder(model), best, limits.bounds_first_tree_entries)
        raise_bound(certificate, evaluator, prune=True)
        best, bound = close_gap(certificate, evaluator)
        return _Found(best, RisingBound(known=bound))
    return _Found(best, RisingBound(many))


def _move(
    model: Model,
    neighbourhoods: Iterable[Groups],
    evaluator: Evaluator,
    best: CostedPlan,
    is_worth_rounds: PlanPredicate,
    both: bool,
) -> CostedPlan:
    """Returns the best plan found from neighbourhood to neighbourhood, each around the best plan so far.

    Args:
      neighbourhoods: groups of axes that take equal rows; all other axes stay.
      both: as for ``initial_plan``, where all axes move.
    """
    limits = model.limits
    for i, groups in enumerate(neighbourhoods):
        if i and model.deadline.expired():
            break
        near = model.restricted(groups, best.rows)
        here, builder, moves_all = (
            evaluator.at(near),
            NetworkBuilder(near),
            sum(map(len, groups)) == len(model.parallel_axes),
        )
        is_small = builder.plan_entries <= limits.search_near_entries and len(model.nodes) <= limits.search_deep_nodes
        if is_small and is_worth_rounds(best):
            best = _search_jointly(builder, here, best, is_worth_rounds, True).plan
        else:
            found = _decoded_plans(builder, groups, here, here.priced_cost(best), both and moves_all)
            best = min((best, *map(here.with_exact_cost, found)), key=lambda plan: plan.cost)
    return best


# ---- Initial plan ----------------------------------------------------------------------------------------------------


class InitialPlan(NamedTuple):
    """The plan that messages on a network decode to.

    Args:
      network: of plans, of the reduced step.
      states: the decoded states of its variables.
      gap: relative gap between the decoded states and the bound of the messages.
      weighs: whether layers of the reduced step cost as much as all layers that they represent.
    """

    plan: CostedPlan
    network: Network
    states: Labels
    gap: float
    weighs: bool


def initial_plan(builder: NetworkBuilder, evaluator: Evaluator, limit: float, both: bool) -> InitialPlan:
    """Returns the plan that messages decode to.

    Args:
      limit: cost of a known plan, at which entries of tables are clipped.
      both: where a reduced step stands for the whole one, try with and without weighing its layers by the number that
        they represent, and note the better in ``SearchHints``; otherwise do as an earlier search noted.
    """
    networks: dict[bool, Network] = {}
    for weighs in (False, True) if both and builder.drops_layers else (builder.model.hints.weigh_layers,):
        networks[weighs] = builder.reduced_plans(weighs)
    patient, limits = builder.drops_layers, builder.model.limits
    decoded = run_parallel([partial(_decode, network, limit, patient, limits) for network in networks.values()])
    found = [
        InitialPlan(evaluator.evaluate(builder.whole_plan(states)), network, states, gap, weighs)
        for (weighs, network), (states, gap) in zip(networks.items(), decoded, strict=True)
    ]
    best = min(found, key=lambda start: start.plan.cost)
    builder.model.hints.weigh_layers = best.weighs
    return best


def _decode(network: Network, limit: float, patient: bool, limits: SearchLimits) -> tuple[Labels, float]:
    """Passes messages; returns the states that they decode to, for all variables, and the gap to their bound.

    Args:
      patient: go on while the bound rises, although nothing better is decoded.
    """
    messages, step = TRWS(network, limit + 1.0), limits.search_start_passes
    idle, passes = 0, chain([1, step - 1], repeat(step))
    for _ in range(affordable_passes(messages.entries, limits) // step):
        cost, lower = messages.cost, messages.lower
        messages.run(next(passes))
        rises = patient and messages.lower - lower > limits.search_start_rise * messages.cost
        idle = 0 if messages.cost < cost or rises else idle + 1
        if idle == limits.search_start_patience or messages.gap <= limits.search_decoded_gap:
            break
    return messages.states, messages.gap


def _decoded_plans(
    builder: NetworkBuilder, groups: Groups, evaluator: Evaluator, limit: float, both: bool = False
) -> list[CostedPlan]:
    """Returns the initial plan and, where its gap is worth it, the one after a sweep over groups of axes."""
    start = initial_plan(builder, evaluator, limit, both)
    if not groups or start.gap <= _gap_worth_sweep(builder.model):
        return [start.plan]
    return [start.plan, evaluator.evaluate(builder.whole_plan(_sweep(start, groups, builder.model)))]


def _gap_worth_sweep(model: Model) -> float:
    """Returns the gap that messages must leave open for a sweep to be worth its time."""
    limits = model.limits
    return limits.search_decoded_gap if len(model.nodes) <= limits.search_deep_nodes else limits.search_deep_gap


def _sweep(start: InitialPlan, groups: Groups, model: Model) -> Labels:
    descent = AxisDescent(start.network, model.width, model.limits.search_sweep_entries)
    return descent.sweep(start.states, sweep_order(groups), model.limits.search_sweep_rounds)
