"""The planner against exhaustive search: plans are optimal where they can be checked, bounds never pass them."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from math import inf

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import MemoryLimitError, PinError
from meshdsl.ir.graph import Literal
from meshdsl.ir.solution import Pins
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.topology import Link, Topology
from meshdsl.planner.bounds.certificate import Certificate
from meshdsl.planner.bounds.tighten import raise_bound
from meshdsl.planner.costs.reshard_cost import axis_groups_in_pairs, axis_groups_merged, axis_groups_split
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.objective import Evaluator, trees_of
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model
from meshdsl.planner.search import search as search_module
from meshdsl.planner.search.local_search import close_gap
from meshdsl.planner.search.search import search
from meshdsl.trace import trace
from tests.planner.graphs import ONE, STEPS, TWO, exhaustive, layout_of, limited, problem_of, searched, shape, solved
from tests.sweeps import swept

SMALL = [("matmul", ONE), ("two layers", ONE), ("shared", ONE), ("gradient", ONE), ("looped", ONE), ("matmul", TWO)]


@swept(("name", "mesh"), SMALL, ids=str, left=(("gradient", ONE),))
def test_the_plan_is_the_cheapest_and_the_bound_below_it(name, mesh):
    model = problem_of(name, mesh)
    best = exhaustive(model)
    assert best is not None, "small enough to be checked"
    found, bound = searched(model)
    exact = model.scale.seconds(best)
    assert bound <= exact * (1 + 1e-9)
    assert model.scale.seconds(found.cost) == pytest.approx(exact, rel=1e-9)


LINKS = (Link(latency=1e-9, bandwidth=1e6),)
SLOW = md.Mesh(x=4, topology=Topology("slow", 1e12, 1e12, 1e12, 1e10, 0.0, LINKS))


@pytest.mark.parametrize("name", ["shared", "looped"])
def test_the_plan_in_fewer_bits_is_the_cheapest(name):
    step, args, pins = STEPS[name]
    program = replace(trace(step, args), low_bits=md.LowBits(0.01))
    outputs = tuple(Layout() for _ in program.outputs)
    every = Pins(tuple(map(Layout.parse, pins)), outputs, (None,) * len(outputs))
    model = Model(make_problem(program, SLOW, every))
    best, (found, bound) = exhaustive(model), searched(model)
    assert best is not None, "small enough to be checked"
    assert bound <= best * (1 + 1e-9) and found.cost == pytest.approx(best, rel=1e-9)
    full = searched(Model(make_problem(replace(program, low_bits=None), SLOW, every)))[0]
    assert model.scale.seconds(found.cost) < model.scale.seconds(full.cost)
    assert any(step.format for tree in trees_of(model, found).values() for step in tree)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("mesh", [ONE, TWO, md.Mesh(x=2, y=2, z=2)], ids=str)
def test_the_gap_is_closed_on_small_steps(name, mesh):
    model = problem_of(name, mesh)
    found, bound = searched(model)
    seconds = model.scale.seconds(found.cost)
    assert seconds * (1 - 2e-9) < bound <= seconds


@pytest.mark.parametrize("large", [0, 2_000_000], ids=["messages beside tables", "settled"])
def test_rounds_prove_a_plan_and_leave_no_better_one(large):
    """From a bad plan, with bounds that do not know trees; a step of several shared values."""

    def step(w, x):
        h = jnp.tanh(x @ w)
        return jax.grad(lambda w: jnp.sum((h @ w.T + x @ w) ** 2) + jnp.sum(jnp.sin(h @ w) * h))(w)

    program = trace(step, (shape(32, 32), shape(64, 32)))
    pins = Pins((md.Layout(), md.Layout.parse("x=S(0)")), (md.Layout(),), (0,))
    model = limited(Model(make_problem(program, TWO, pins)), bounds_reparametrize_entries=large)
    evaluator = Evaluator(model)
    start = Certificate(NetworkBuilder(model), evaluator.evaluate(model.first_states))
    best, bound = close_gap(start, evaluator)
    assert best.cost < start.best.cost or best is start.best
    assert bound == pytest.approx(best.cost, rel=2e-9)
    assert best.cost == search(model).plan.cost


def test_a_plan_that_only_warm_starts_others_is_proved_when_asked(monkeypatch):
    monkeypatch.setattr(search_module, "close_gap", lambda *_: pytest.fail("rounds for a plan where others start"))
    monkeypatch.setattr(search_module, "raise_bound", lambda *_: pytest.fail("a bound that nobody asked for"))
    model = problem_of("gradient", TWO)
    found = search(model, is_warm_start=lambda plan: True)
    assert 0 < found.lower_bound() <= model.scale.seconds(found.plan.cost)


def test_messages_end_where_a_higher_bound_is_of_no_use():
    model = limited(problem_of("gradient", TWO), encoding_reduction_entries=1, bounds_reduction_entries=1)
    start = Evaluator(model).evaluate(model.first_states)
    whole, part = (Certificate(NetworkBuilder(model), start, enough=enough) for enough in (inf, 0.1 * start.cost))
    assert part.enough <= raise_bound(part) < raise_bound(whole)
    assert part.work == 0 < whole.work


@pytest.mark.parametrize("name", STEPS)
def test_a_bound_without_settled_tables_is_below_every_plan_and_near_the_other(name):
    model = problem_of(name, TWO)
    best = search(model).plan
    lifted, settled = (Certificate(NetworkBuilder(model), best) for _ in range(2))
    lifted.pass_messages(16)
    settled.tighten(16)
    assert lifted.bound <= best.cost
    assert lifted.gap < settled.gap + 0.02


def test_a_plan_that_does_not_fit_is_not_taken_through_rounds(monkeypatch):
    monkeypatch.setattr(search_module, "close_gap", lambda *_: pytest.fail("rounds for a plan that does not fit"))
    many = problem_of("gradient", md.Mesh(x=2, y=2, z=2))
    for model in (problem_of("gradient", TWO), limited(many, search_joint_pairs=0)):
        best, bound = searched(model, is_worth_rounds=lambda plan: False)
        assert 0 < bound <= model.scale.seconds(best.cost)


def neighbourhoods_seen(monkeypatch, bound, **limits):
    """A step on three axes that are not searched jointly, and the groups of axes that have moved, in order."""
    monkeypatch.setattr(search_module, "bound_on_many_axes", lambda *_: bound)
    model = problem_of("gradient", md.Mesh(x=2, y=2, z=2))
    model = limited(model, search_joint_pairs=0, search_joint_pairs_once=0, **limits)
    seen, restricted = [], model.restricted

    def noted(groups, around):
        seen.append(groups)
        return restricted(groups, around)

    model.restricted = noted
    return model, seen


@pytest.mark.parametrize("first", [True, False])
def test_on_many_axes_fewer_are_tried_again_from_the_first_plan_that_fits(monkeypatch, first):
    """If that is not proved; what was tried while nothing fitted was not taken through rounds."""
    model, seen = neighbourhoods_seen(monkeypatch, 0.0)
    whole = search_module.evaluate_plan(model, Evaluator(model), model.first_states)
    search(model, lambda choice: first or choice.cost < whole.cost)
    fewer = list(axis_groups_merged(model.parallel_axes))
    assert seen[: len(fewer)] == fewer
    assert (seen[-len(fewer) :] == fewer) is not first


@pytest.mark.parametrize("fits", [True, False])
def test_a_large_step_that_does_not_fit_is_searched_in_two_groups_of_axes(monkeypatch, fits):
    model, seen = neighbourhoods_seen(monkeypatch, 1e30, search_deep_nodes=0)
    search(model, lambda _: fits)
    assert seen == [
        *axis_groups_split(model.parallel_axes),
        *(axis_groups_in_pairs(model.parallel_axes) if fits else ()),
    ]


@pytest.mark.parametrize("worth", [0.0, 1.0])
def test_pairs_of_axes_move_only_where_two_groups_of_axes_saved_enough(monkeypatch, worth):
    model, seen = neighbourhoods_seen(monkeypatch, 1e30, search_pairs_worth=worth)
    search(model)
    assert seen == [
        *axis_groups_merged(model.parallel_axes),
        *(() if worth else axis_groups_in_pairs(model.parallel_axes)),
    ]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("mesh", [md.Mesh(x=2, y=2, z=2), md.Mesh(x=4, y=2, z=2)], ids=str)
@pytest.mark.parametrize("once", [0, 20_000_000])
def test_neighbourhoods_of_three_axes_find_the_plans_that_all_states_together_give(name, mesh, once):
    whole = search(problem_of(name, mesh)).plan
    model = limited(problem_of(name, mesh), search_joint_pairs=0, search_joint_pairs_once=once)
    found, bound = searched(model)
    assert found.cost <= whole.cost * 1.02
    assert (0.98 * model.scale.seconds(found.cost) if once else 0.0) < bound <= model.scale.seconds(whole.cost)


@pytest.mark.parametrize("name", STEPS)
def test_two_axes_are_never_worse_than_one_of_as_many_devices(name):
    """Local moves over several axes are one move, as collectives are."""
    seconds = []
    for mesh in (md.Mesh(x=4, y=4), md.Mesh(x=4, y=2, y2=2)):
        model = problem_of(name, mesh)
        seconds.append(model.scale.seconds(search(model).plan.cost))
    assert seconds[1] <= seconds[0] * (1 + 1e-8)


def test_five_axes_are_planned_and_no_worse_than_fewer():
    """Of as many devices; layouts of a matrix over five axes are 3,552."""
    seconds = []
    for mesh in (md.Mesh(x=4, y=16), md.Mesh(x=4, y=4, y2=2, y3=2), md.Mesh(x=4, y=2, y2=2, y3=2, y4=2)):
        model = problem_of("gradient", mesh)
        best, bound = searched(model)
        seconds.append(model.scale.seconds(best.cost))
        assert 0 < bound <= seconds[-1]
    assert seconds[2] <= seconds[1] * (1 + 1e-8) <= seconds[0] * (1 + 2e-8)


def test_the_same_problem_has_the_same_solution():
    step, args, pins = STEPS["gradient"]
    solutions = []
    for _ in range(2):
        program = trace(step, args)
        solutions.append(solved(program, TWO, Pins(tuple(map(md.Layout.parse, pins)), (md.Layout(),), (0,))))
    assert solutions[0] == solutions[1]


@pytest.mark.parametrize(
    ("name", "least"), [("matmul", 0), ("two layers", 1), ("shared", 1), ("gradient", 1), ("looped", 1)]
)
def test_of_equal_plans_the_one_with_the_fewest_collectives_is_taken(name, least):
    """Where nothing takes any time, only they tell plans apart."""
    free = Topology("free", 1e30, 1e30, 1e30, 1e12, 0.0, (Link(0.0, 1e30),))
    model = problem_of(name, md.Mesh(x=2, y=2, topology=free))
    moves = [move for tree in trees_of(model, search(model).plan).values() for move in tree]
    assert len(moves) == least and all(move.kind in COLLECTIVES for move in moves)


PLAN = """
import hashlib
from tests.planner.graphs import TWO, layout_of, limited, problem_of, searched
from meshdsl.planner.search.search import search
print(hashlib.sha256(search(problem_of("shared", TWO)).plan.rows.tobytes()).hexdigest())
"""


def test_the_plan_does_not_depend_on_the_process():
    run = partial(subprocess.run, [sys.executable, "-c", PLAN], capture_output=True, text=True, check=True)
    said = [run(env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")]
    assert said[0] == said[1] and len(said[0]) == 65


def test_states_that_agree_with_pins_only():
    model = problem_of("two layers", TWO)
    best = search(model).plan
    assert {model.nodes[n].label for n in range(2)} == {"input a", "input b"}
    for n, (axis, placed) in enumerate((("x", md.S(0)), ("y", md.S(1)))):
        assert layout_of(model, n, 0, best.rows[n]).on(axis) is placed


def too_small(step, args, pins, mesh, memory):
    """The lines of the error when nothing fits."""
    program = trace(step, args)
    free = (md.Layout(),) * len(program.outputs)
    with pytest.raises(MemoryLimitError) as error:
        solved(program, mesh, Pins(tuple(map(md.Layout.parse, pins)), free, (None,) * len(free)), memory=memory)
    return str(error.value).splitlines()


def test_a_limit_that_nothing_meets_says_the_least_and_what_holds_it():
    lines = too_small(lambda a, b: a @ b, (shape(64, 32), shape(32, 16)), ("x=B", ""), ONE, 1000.0)
    assert lines[0].startswith("no plan fits memory=1 kB per device; the least possible is 9.73 kB at ")
    assert "  8.19 kB: a, pinned to x=B" in lines
    assert "infeasible: the arguments alone need 8.70 kB per device, even fully sharded under their pins" in lines
    assert lines[-1] == "use more devices, a smaller batch, jax.checkpoint, or raise memory="


def test_when_memory_is_short_larger_meshes_are_tried_until_one_fits():
    lines = too_small(lambda a, b: a @ b, (shape(64, 32), shape(32, 64)), ("", ""), md.Mesh(x=1, y=2), 13_000.0)
    tried = [line for line in lines if line.startswith("on mesh")]
    assert tried[0].startswith("on mesh x=1,y=4 the least found is ") and "fits" not in tried[0]
    fitting = tried[-1].removesuffix(", which fits").split(" the least found is ")
    assert tried[-1].endswith(", which fits") and fitting[0] == "on mesh x=1,y=8"
    program = trace(lambda a, b: a @ b, (shape(64, 32), shape(32, 64)))
    fitting = solved(program, md.Mesh(x=1, y=8), Pins((md.Layout(),) * 2, (md.Layout(),), (None,)), memory=13_000.0)
    assert fitting.peak <= 13_000.0


def test_when_memory_is_short_larger_meshes_that_do_not_help_are_left_out():
    lines = too_small(lambda a: jnp.sum(a), (shape(4, 6),), ("",), md.Mesh(x=2, y=2), 1.0)
    assert not [line for line in lines if line.startswith("on mesh x=16") or line.startswith("on mesh x=32")]


def test_when_memory_is_short_what_the_backward_pass_reads_is_summed():
    def step(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w.T @ w) ** 2))(w)

    lines = too_small(step, (shape(8, 128), shape(1024, 8)), ("", "x=B"), ONE, 1000.0)
    kept = [line for line in lines if "jax.checkpoint recomputes them instead" in line]
    assert len(kept) == 1 and "kB are residuals for the backward pass" in kept[0]


def test_a_value_that_is_partial_in_two_ways_is_an_error():
    program = trace(lambda a: md.constrain(a + 1.0, "x=P y=P(max)"), (shape(8, 8),))
    with pytest.raises(PinError) as error:
        solved(program, TWO, Pins((md.Layout(),), (md.Layout(),), (None,)))
    assert "pinned to x=P y=P(max), shape [8, 8]" in str(error.value)
    assert "a value is partial in one way only" in str(error.value)


def test_partial_placements_only_come_from_upstream():
    program = trace(lambda a: a + 1.0, (shape(8, 8),))
    problem = make_problem(program, ONE, Pins((md.Layout(),), (md.Layout(),), (None,)))
    assert all("P" not in str(row) for node in problem.nodes for row in node.rows)


def test_equal_operations_share_rows_although_their_literals_are_arrays():
    program = trace(lambda x: (x * 2.0, jnp.sin(x) * 2.0, x * 3.0), (shape(8, 4),))
    for op in program.graph.ops:
        for x in (x for x in op.inputs if isinstance(x, Literal)):
            x.value = np.array(x.value)
    nodes = make_problem(program, ONE, Pins((Layout(),), (Layout(),) * 3, (None,) * 3)).nodes
    twice, again, thrice = (node.rows for node in nodes if node.op is not None and node.op.name == "mul")
    assert twice is again and twice is not thrice


def test_operations_that_differ_in_a_literal_have_rows_of_their_own():
    """Seed 90035: ones were taken for parts of a sum, because zeros of their shape are."""

    def step(x):
        most = jnp.max(x, 0)
        return 2.0 * most, -2.0 * most, jnp.zeros((8, 4)) - x, jnp.ones((8, 4)) - x

    program = trace(step, (shape(8, 4),))
    nodes = make_problem(program, ONE, Pins((Layout(),), (Layout(),) * 4, (None,) * 4)).nodes
    for name in ("mul", "broadcast_in_dim"):
        first, second = (node.rows for node in nodes if node.op is not None and node.op.name == name)
        assert set(first) != set(second)


@pytest.mark.parametrize("mesh", [TWO, md.Mesh(x=2, y=2, z=2)], ids=str)
def test_moves_that_were_found_near_a_plan_take_the_cheapest_way_of_all(mesh):
    model, rng, cheaper = problem_of("two layers", mesh), np.random.default_rng(0), 0
    evaluator = Evaluator(model)
    states = [np.argwhere(np.isfinite(model.unary[n])) for n in range(len(model.nodes))]
    for _ in range(20):
        rows = np.array([rng.choice(s) for s in states])
        restricted = evaluator.at(model.restricted(((0, 1),), rows))
        near = restricted.evaluate(rows)
        found = restricted.with_exact_cost(near)
        assert evaluator.evaluate(rows).cost <= found.cost <= near.cost
        cheaper += found.cost < near.cost
    assert cheaper
