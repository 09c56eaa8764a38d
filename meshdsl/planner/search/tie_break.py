"""Among plans of equal cost, one with the fewest distinct layouts, which a person finds simplest.

Collectives and reshard steps are part of the cost itself (``costs.fixed_point``); the number of distinct layouts of a
plan is no sum over nodes. So one layout at a time, the rarest first, is forbidden: nodes that have it may take any
state whose layouts the plan has elsewhere, all others stay, and this sub-problem is solved exactly. If the result costs
no more and is feasible, it is the plan from then on. Most layouts need no such trial: some node without them would cost
more than it and all reshards around it cost now.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from meshdsl.layouts.layout import Layout
from meshdsl.planner.encoding.hubs import Remaining
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.mrf.elimination import eliminate
from meshdsl.planner.objective import CostedPlan, Evaluator
from meshdsl.planner.problem.model import Model
from meshdsl.util.arrays import Ids, unique_sorted


def fewest_layouts(
    model: Model, evaluator: Evaluator, best: CostedPlan, is_feasible: Callable[[CostedPlan], bool]
) -> CostedPlan:
    """Returns a feasible plan that costs no more than ``best``, with as few distinct layouts as are found."""
    limits = model.limits
    layouts, trials = (
        _layouts_of(model, best),
        min(limits.search_tie_trials, limits.search_tie_nodes // len(model.nodes)),
    )
    for layout in _rarest_first(model, layouts):
        domain = _without(model, evaluator, best, layouts, layout) if trials and not model.deadline.expired() else None
        if domain is not None:
            trials -= 1
            found = _solved(NetworkBuilder(model, domain), evaluator)
            others = _layouts_of(model, found)
            has_fewer = unique_sorted(others).size < unique_sorted(layouts).size
            if found.cost <= best.cost and has_fewer and is_feasible(found):
                best, layouts = found, others
    return best


def count_layouts(model: Model, plan: CostedPlan) -> int:
    """Returns the number of distinct layouts in which values are produced and consumed."""
    return unique_sorted(_layouts_of(model, plan)).size


def _layouts_of(model: Model, plan: CostedPlan) -> Ids:
    """Returns the layouts of all ports, by their numbers in ``Ports.every``."""
    return model.ports.layout_numbers(model.ports.layouts(plan.rows))


def _rarest_first(model: Model, layouts: Ids) -> list[int]:
    every, (found, counts) = list(model.ports.all_layouts), np.unique(layouts, return_counts=True)
    ranked = sorted(zip(counts.tolist(), found.tolist(), strict=True), key=lambda pair: (pair[0], str(every[pair[1]])))
    return [layout for _, layout in ranked]


def _without(model: Model, evaluator: Evaluator, best: CostedPlan, layouts: Ids, layout: int) -> Remaining | None:
    """Returns the states of all nodes without a layout; None if for some node no state could cost as little."""
    ports, every = model.ports, list(model.ports.all_layouts)
    used = {every[i] for i in set(layouts.tolist()) - {layout}}
    elsewhere = {value: read for read in ports.resharded(ports.layouts(best.rows)) for value in read.values}
    remaining: dict[int, Ids] = {}
    surcharge = evaluator.surcharge(ports.layouts(best.rows))
    for n in unique_sorted(model.wiring.node_of[layouts == layout]).tolist():
        values = dict.fromkeys(model.wiring.value_at((n, p)) for p in range(len(model.wiring.ports(n))))
        most = evaluator.local_cost(n, values, best.rows, elsewhere) + surcharge
        keep = model.unary[n][tuple(model.states[n].T)] <= most
        for p in range(len(model.wiring.ports(n))):
            keep &= _has_one_of(model, n, p, used)
        if not keep.any():
            return None
        remaining[n] = np.flatnonzero(keep)
    fixed = (n for n in range(len(model.nodes)) if n not in remaining)
    return remaining | {n: np.flatnonzero((model.states[n] == best.rows[n]).all(axis=1)) for n in fixed}


def _has_one_of(model: Model, n: int, p: int, used: set[Layout]) -> NDArray[np.bool_]:
    """Returns per state of a node whether the layout of a port is one of these."""
    value = model.wiring.value_at((n, p))
    places, domain = model.layout_ids(n, p, model.states[n].T), model.domain(value)
    every = model.reshard_costs[value].space.layouts
    is_used = np.array([*(every[i] in used for i in domain.layouts), False])
    return np.asarray(is_used[places])


def _solved(builder: NetworkBuilder, evaluator: Evaluator) -> CostedPlan:
    """Returns the cheapest plan of the remaining states, or one near it where a table would be too large."""
    network = builder.plans()
    domains, tables = network.listed()
    found = eliminate(domains, tables, [0] * len(domains), builder.model.limits.search_tie_entries)
    rows = builder.domains.rows(network.decode(network.order, found.states))
    return evaluator.with_exact_cost(evaluator.evaluate(rows))
