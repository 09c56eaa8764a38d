"""Plans with buckets against all plans of a small step with all their buckets."""

from dataclasses import replace
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir.graph import Value
from meshdsl.planner.buckets import bucket_faults, find_buckets
from meshdsl.planner.liveness.peak import Peak
from meshdsl.planner.search.search import evaluate_plan
from meshdsl.planner.solve import solution_of
from meshdsl.util.lazy import Lazy


def step(w1, w2, x, y):
    first, second = x.T @ y, (x * x).T @ y
    return w1 - first, w2 - second


def partitions(items):
    """Every way to put items into groups."""
    if not items:
        yield []
        return
    head, *rest = items
    for groups in partitions(rest):
        yield [[head], *groups]
        yield from ([*groups[:i], [head, *group], *groups[i + 1 :]] for i, group in enumerate(groups))


def cheapest(graph, solution):
    """Seconds of a solution of this step with its best buckets, by the formulas of the docs for two devices."""
    mesh, ops = solution.mesh, list(enumerate(graph.ops))
    link, memory = mesh.topology.axis_links(mesh)["data"], mesh.topology.memory_bandwidth
    made = {v.id: (i, 4 * np.prod(v.shape)) for i, op in ops for v in op.outputs}
    sums = [(value, move) for value, tree in solution.trees.items() for move in tree if move.kind == "all-reduce"]
    best = 0.0
    for groups in partitions(sums):
        saved, possible = 0.0, True
        for group in (group for group in groups if len(group) > 1):
            values = [value for value, _ in group]
            needed = min(i for i, op in ops for x in op.inputs if isinstance(x, Value) and x.id in values)
            possible &= max(made[value][0] for value in values) < needed
            size = sum(made[value][1] for value in values)
            one = link.latency + size / link.gathering + 2 * 2 * size / memory
            saved += sum(move.seconds for _, move in group) - one
        best = max(best, saved if possible else 0.0)
    return solution.seconds - best


@pytest.mark.parametrize(("pins", "buckets"), [({"x": "data=S(0)", "y": "data=S(0)"}, 1), ({}, 0)])
def test_the_plan_is_the_cheapest_of_all_plans_with_all_their_buckets(pins, buckets):
    """Dims of 15 elements are not split, which leaves few plans."""
    args = jnp.ones((15, 15)), jnp.ones((15, 15)), jnp.ones((512, 15)), jnp.ones((512, 15))
    planned = md.parallelize(step, "data=2", pins).stages(*args).planned
    found, plan, graph = planned.variant.outcome, planned.plan, planned.program.graph
    least, count, joined = np.inf, 0, 0
    for rows in product(*(map(tuple, states.tolist()) for states in found.model.states)):
        cost = evaluate_plan(found.model, found.fitter.evaluator, np.array(rows))
        if np.isfinite(cost.cost):
            solution = solution_of(found.model, found.fitter.pins, cost, Peak(0, None, Lazy.known(())))
            least, count = min(least, cheapest(graph, solution)), count + 1
            sent = tuple(find_buckets(graph, solution, 2))
            joined += len(sent)
            assert not list(bucket_faults(graph, replace(solution, buckets=sent)))
    assert count > 20 and joined and len(plan.solution.buckets) == buckets
    assert plan.lower_bound <= least * (1 + 1e-6) and plan.seconds == pytest.approx(least, rel=1e-6)
