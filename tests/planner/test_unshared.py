"""Latencies that no bucket shares: every plan with its buckets costs at least as much as at these prices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir.graph import Value
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import P
from meshdsl.layouts.reshard import reshard_steps
from meshdsl.planner.buckets import find_buckets, with_buckets
from meshdsl.planner.search.search import evaluate_plan
from meshdsl.planner.unshared import UnsharedUses
from meshdsl.trace import trace


def normalised(x):
    centred = x - jnp.mean(x, 0)
    return centred / jnp.sqrt(jnp.mean(centred**2, 0) + 1e-3)


def trained(loss):
    def step(params, x):
        gradients = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return step


def deep(params, x):
    for w in params:
        x = jnp.tanh(normalised(x @ w))
    return jnp.mean(x**2)


def wide(params, x):
    return sum(jnp.mean(normalised(jnp.tanh(x @ w)) ** 4) for w in params)


def looped(params, x):
    x = jax.lax.scan(lambda x, w: (jnp.tanh(normalised(x @ w)), None), x, jnp.stack(params))[0]
    return jnp.mean(x**2)


def planned(loss, mesh, layers=3, rows=64, width=8):
    args = [jnp.ones((width, width))] * layers, jnp.ones((rows, width))
    return md.parallelize(trained(loss), mesh, {"x": "data=S(0)"}).stages(*args).planned


@pytest.mark.parametrize("mesh", ["data=4", "data=2,model=2"])
@pytest.mark.parametrize("loss", [deep, wide, looped])
def test_no_plan_with_its_buckets_undercuts_these_prices(loss, mesh):
    """Plans near the best one and far from it, drawn at random."""
    one = planned(loss, mesh)
    found, graph = one.variant.outcome, one.program.graph
    priced, rng, shared = found.at_unshared_latencies(found.seconds).search, np.random.default_rng(0), 0
    assert priced.model.unshared
    for share in np.linspace(0, 0.5, 40):
        rows = found.fit.plan.rows.copy()
        for n in np.flatnonzero(rng.random(len(rows)) < share):
            states = found.model.states[n]
            rows[n] = states[rng.integers(len(states))]
        plan = evaluate_plan(priced.model, priced.fitter.evaluator, rows)
        if np.isfinite(plan.cost):
            apart = found.at_rows(rows).unproved_solution
            sent = with_buckets(apart, graph, find_buckets(graph, apart, 2))
            assert priced.model.scale.seconds(plan.cost) <= sent.seconds * (1 + 1e-6)
            shared += len(sent.buckets)
    assert shared > 10


def test_shares_of_uses_with_a_point_in_common_add_up_to_one_at_most():
    """After a round for a plan that sums at each use, and one for a plan that sums only what is used at the end."""
    one = trace(lambda x: x * jnp.tan(jnp.cos(jnp.sin(x))), (jnp.ones(8),)).graph
    mesh = md.Mesh(data=4)
    tree = [next(step for step in reshard_steps(Layout(data=P), (8,), 4, mesh) if step.kind == "all-reduce")]
    reads = [((op.id, i), x) for op in one.ops for i, x in enumerate(op.inputs) if isinstance(x, Value)]
    early, late = reads[0][0], next(use for use, x in reads[1:] if x.id == one.inputs[0].id)
    unshared = UnsharedUses(one)
    unshared.add({use: tree[0].after for use, _ in reads}, {x.id: tree for _, x in reads})
    assert unshared.shares.get(early) == 1 and late not in unshared.shares
    for _ in range(9):
        unshared.add(
            {use: tree[0].after if use == late else tree[0].before for use, _ in reads}, {reads[0][1].id: tree}
        )
    assert 0 < unshared.shares[early] < 1 and 0 < unshared.shares[late] < 1
    made, load = {v.id: i for i, op in enumerate(one.ops) for v in op.outputs}, np.zeros(len(one.ops))
    for (op, _), share, x in ((use, unshared.shares.get(use, 0.0), x) for use, x in reads):
        at = [each.id for each in one.ops].index(op)
        load[made.get(x.id, -1) + 1 : at + 1] += share  # sent behind its producer, in front of the use at the latest
    assert load.max() <= 1 + 1e-9


@pytest.mark.parametrize("loss", [deep, looped])
def test_a_chain_of_small_sums_is_proved(loss):
    """Each layer waits for the sums of the one before it, so that no bucket takes more than those of one layer."""
    plan = planned(loss, "data=4", layers=6, rows=1 << 16, width=64).plan
    waiting = sum(c.trips for c in plan.collectives)
    assert waiting >= 6 and plan.gap < 0.01
