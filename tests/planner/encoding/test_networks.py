"""The two networks against the cost of plans: one can always be paid, the other is never above it."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir.solution import Pins
from meshdsl.planner.encoding import fanout as many_module
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.encoding.projection import projections
from meshdsl.planner.objective import Evaluator
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model
from meshdsl.trace import trace
from tests.planner.graphs import ONE, TWO, limited, minimum, shape


def many_readers(readers):
    """A step whose first product is read by that many others, in different ways."""

    def step(a, b):
        c = a @ b
        reads = [c @ b.T, c.T @ a, c.sum(0), c.sum(1), c * 2.0, c.T.reshape(-1), c + 1.0]
        return reads[:readers]

    program = trace(step, (shape(8, 8), shape(8, 8)))
    pins = Pins((md.Layout(),) * 2, (md.Layout(),) * readers, (None,) * readers)
    return lambda mesh: Model(make_problem(program, mesh, pins))


def _any(rng, joint):
    """A state per node, often the last one: then the readers ask for partial copies."""
    counts = [len(states.rows) for states in joint.domains.states]
    return np.array([n - 1 if rng.random() < 0.5 else int(rng.integers(n)) for n in counts])


@pytest.mark.parametrize("mesh", [ONE, TWO], ids=str)
@pytest.mark.parametrize("readers", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("stake", [0.0, 1e9], ids=["pairs", "first forks"])
def test_no_plan_is_below_the_bounds_and_every_cost_of_plans_can_be_paid(mesh, readers, stake):
    model = limited(many_readers(readers)(mesh), encoding_hub_stake=stake, encoding_reduction_entries=0)
    joint, evaluator = NetworkBuilder(model), Evaluator(model)
    rng = np.random.default_rng(readers)
    reference = evaluator.evaluate(model.first_states)
    for _ in range(10):
        chosen = _any(rng, joint)
        cost = evaluator.evaluate(joint.domains.rows(chosen)).cost
        paid, bound = minimum(joint.plans(), chosen), minimum(joint.bounds(reference).network, chosen)
        assert bound <= cost * (1 + 1e-9) <= paid * (1 + 2e-9)
        if readers == 2:
            assert bound == pytest.approx(cost) == paid


@pytest.mark.parametrize("mesh", [ONE, TWO], ids=str)
@pytest.mark.parametrize("readers", [3, 4, 5])
def test_with_exact_trees_the_bounds_are_what_plans_cost(mesh, readers):
    model = limited(many_readers(readers)(mesh), encoding_reduction_entries=0)
    joint, evaluator = NetworkBuilder(model), Evaluator(model)
    rng = np.random.default_rng(readers)
    for _ in range(5):
        chosen = _any(rng, joint)
        cost = evaluator.evaluate(joint.domains.rows(chosen)).cost
        assert minimum(joint.bounds(evaluator.evaluate(model.first_states), 1 << 40).network, chosen) == cost


@pytest.mark.parametrize("more", [0, 1 << 40], ids=["other pairs", "exact trees"])
@pytest.mark.parametrize("readers", [3, 4, 5])
def test_what_pairs_miss_in_a_plan_the_next_bounds_know(readers, more):
    larger = {"encoding_tree_entries": more, "encoding_tree_entries_most": more}
    model = limited(many_readers(readers)(TWO), encoding_reduction_entries=0, encoding_hub_stake=0.0, **larger)
    joint, evaluator = NetworkBuilder(model), Evaluator(model)
    rng = np.random.default_rng(readers)
    reference, risen = evaluator.evaluate(model.first_states), 0
    for _ in range(10):
        chosen, other = (_any(rng, joint) for _ in range(2))
        missed = joint.underpaid(joint.domains.rows(chosen), reference, 0, {})
        before, after = (minimum(joint.bounds(reference, 0, known).network, chosen) for known in ({}, missed))
        cost = evaluator.evaluate(joint.domains.rows(chosen)).cost
        assert before <= after * (1 + 1e-9) and after <= cost * (1 + 1e-9)
        assert bool(missed) == (before < cost * (1 - 1e-9))
        if more:
            assert after == pytest.approx(cost)
        assert minimum(joint.bounds(reference, 0, missed).network, other) <= evaluator.evaluate(
            joint.domains.rows(other)
        ).cost * (1 + 1e-9)
        risen += after > before * (1 + 1e-9)
    assert risen


def test_a_value_of_many_readers_that_has_paid_too_little_gets_its_exact_trees():
    model = limited(many_readers(7)(ONE), encoding_reduction_entries=0)
    joint, evaluator = NetworkBuilder(model), Evaluator(model)
    rng, risen = np.random.default_rng(7), 0
    reference = evaluator.evaluate(model.first_states)
    for _ in range(10):
        chosen = _any(rng, joint)
        missed = joint.underpaid(joint.domains.rows(chosen), reference, 0, {})
        before, after = (minimum(joint.bounds(reference, 0, known).network, chosen) for known in ({}, missed))
        cost = evaluator.evaluate(joint.domains.rows(chosen)).cost
        assert after <= cost * (1 + 1e-9)
        assert after == pytest.approx(cost) if missed else before == pytest.approx(cost)
        again = joint.underpaid(joint.domains.rows(chosen), reference, 0, missed)
        assert {v: len(plans) for v, plans in again.items()} == dict.fromkeys(missed, 1)
        risen += bool(missed) and before < after
    assert risen


def test_values_get_larger_tables_as_long_as_there_is_room(monkeypatch):
    asked, add = [], many_module.add_subset_variable
    monkeypatch.setattr(many_module, "add_subset_variable", lambda *given: asked.append(given[-1]) or add(*given))
    model = many_readers(7)(ONE)
    joint, reference = NetworkBuilder(model), Evaluator(model).evaluate(model.first_states)
    missed = dict.fromkeys(model.widely_used(2), (model.first_states,))
    joint.bounds(reference, 0, missed)
    assert max(asked) > 0
    asked.clear()
    NetworkBuilder(limited(model, encoding_tree_entries_total=0)).bounds(reference, 0, missed)
    assert set(asked) == {0}


def test_states_that_are_left_are_those_of_the_model():
    model = many_readers(3)(TWO)
    whole = NetworkBuilder(model)
    kept = {n: np.arange(0, len(states.cost), 2) for n, states in enumerate(whole.domains.states)}
    some = NetworkBuilder(model, kept)
    assert all(
        (a.rows == b.rows[kept[n]]).all() for n, (a, b) in enumerate(zip(some.domains.states, whole.domains.states))
    )
    network = some.bounds(Evaluator(model).evaluate(model.first_states), 1 << 18).network
    v = next(v for v in network.unary if v < len(whole.domains.states) and network.unary[v].size > 2)
    network.restrict(v, np.array([1, 2]))
    assert some.domains.remaining(network)[v].tolist() == kept[v][1:3].tolist()


@pytest.mark.parametrize("readers", [1, 3])
def test_no_plan_is_below_what_its_traces_on_parts_of_the_axes_cost(readers):
    model = limited(many_readers(readers)(md.Mesh(x=2, y=2, z=2)), encoding_reduction_entries=0)
    evaluator, rng = Evaluator(model), np.random.default_rng(readers)
    whole = NetworkBuilder(model)
    for _ in range(20):
        chosen = _any(rng, whole)
        choice = evaluator.evaluate(whole.domains.rows(chosen))
        bound = 0.0
        for part in projections(model):
            joint, rows = NetworkBuilder(part.model), part.plan(choice).rows
            at = [int((states.rows == row).all(axis=1).argmax()) for states, row in zip(joint.domains.states, rows)]
            assert all((states.rows[i] == row).all() for states, row, i in zip(joint.domains.states, rows, at))
            bound += minimum(joint.bounds(part.plan(evaluator.evaluate(model.first_states))).network, at)
        assert 0.0 < bound <= choice.cost
