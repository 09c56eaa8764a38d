"""Planning again under other pins: the same plans as anew, without tracing or building tables again."""

from dataclasses import replace
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import ArgumentError, MemoryLimitError
from meshdsl.ir.solution import Pins
from meshdsl.planner.limits import EFFORTS, SearchLimits
from meshdsl.planner.problem.build import make_problem, repin
from meshdsl.planner.problem.model import Model, is_refinement
from meshdsl.trace import trace
from tests.planner.graphs import CHAINS, STEPS, TWO, searched

solve_module = import_module("meshdsl.planner.solve")
MESH = md.Mesh(data=4, model=2)
ARGS = ({"up": np.ones((64, 256), np.float32), "down": np.ones((256, 64), np.float32)}, np.ones((512, 64), np.float32))


def step(w, x):
    def loss(w):
        return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"] - x) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))


def sharded(traced=None, **stated):
    def counted(w, x):
        if traced is not None:
            traced.append(x.shape)
        return step(w, x)

    return md.parallelize(counted, MESH, {"x": "data=S(0)"}, **stated)


@pytest.mark.parametrize("layout", ["model=S(1)", "data=S(0) model=S(0)", "data=B model=B"])
def test_another_pin_gives_the_plan_that_planning_anew_gives(layout):
    traced = []
    first = sharded(traced)
    first.plan(*ARGS)
    changed = first.with_pins({"w/up": layout})
    plan = changed.plan(*ARGS)
    assert len(traced) == 1
    anew = md.parallelize(step, MESH, {"x": "data=S(0)", "w/up": layout}).plan(*ARGS)
    assert plan.seconds == pytest.approx(anew.seconds)
    assert 0 < plan.lower_bound <= plan.seconds
    for axis, placed in md.Layout.parse(layout).placements:
        assert plan.layout("w/up").on(axis) is placed
    changed.verify(*ARGS)
    changed.check(*ARGS)


def test_pins_are_replaced_and_taken_out():
    first = sharded()
    first.plan(*ARGS)
    second = first.with_pins({"w/up": "data=S(0) model=S(0)"})
    assert second.plan(*ARGS).seconds > first.plan(*ARGS).seconds
    third = second.with_pins({"w/up": None})
    assert third.plan(*ARGS).seconds == pytest.approx(first.plan(*ARGS).seconds)
    assert third.options.layouts == first.options.layouts
    assert second.with_pins({"w/up": "data=S(1)"}).plan(*ARGS).layout("w/up").on("data") is md.S(1)


def test_the_bound_stays_where_pins_are_added():
    first = sharded()
    bound = first.plan(*ARGS).lower_bound
    same = str(first.plan(*ARGS).layout("w/up"))
    assert first.with_pins({"w/up": same}).plan(*ARGS).lower_bound == bound
    dear = first.with_pins({"w/up": "data=S(0) model=S(0)"})
    plan = dear.plan(*ARGS)
    assert bound < plan.lower_bound <= plan.seconds
    assert dear.with_pins({"w/up": None}).plan(*ARGS).lower_bound < plan.lower_bound


def test_the_bound_stays_where_a_pin_changes_that_costs_little():
    """It was proved without that pin."""
    first = sharded()
    bound = first.plan(*ARGS).lower_bound
    free = first.plan(*ARGS).layout("w/down")
    same = first.with_pins({"w/down": str(free)})
    assert same.plan(*ARGS).lower_bound == bound
    other = same.with_pins({"w/down": f"data={free.on('data')}"})
    assert not is_refinement(*(each.stages(*ARGS).pins for each in (other, same)), MESH)
    assert other.plan(*ARGS).lower_bound == bound
    dear = other.with_pins({"w/down": "data=S(0) model=S(0)", "w/up": "data=S(0) model=S(0)"})
    assert dear.plan(*ARGS).lower_bound > bound


def test_a_bound_that_a_pin_raises_is_not_that_of_the_pins_before(monkeypatch):
    """The pin costs little, so the bound without it holds; what memory says with it does not when it is taken out."""
    limits = replace(SearchLimits(), solve_replan_cost=0.05)
    monkeypatch.setitem(EFFORTS, "default", limits)

    def step(w, x):
        def loss(w):
            return jnp.mean((x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"] - x) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

    w = {name: np.ones(shape, np.float32) for name, shape in {"up": (96, 384), "bias": 384, "down": (384, 96)}.items()}
    args, on = (w, np.ones((256, 96), np.float32)), {"mesh": md.Mesh(data=8, topology=CHAINS), "donate_argnums": 0}
    limit = 0.9 * md.parallelize(step, memory="1TB", **on).plan(*args).memory
    first = md.parallelize(step, memory=limit, **on)
    before = first.plan(*args)
    second = first.with_pins({"w/down": "data=S(1)"})
    assert before.lower_bound < second.plan(*args).lower_bound and second.plan(*args).seconds < 1.05 * before.seconds
    again = second.with_pins({"w/down": None}).plan(*args)
    assert again.lower_bound <= before.seconds


def program_of(sharded):
    """What was traced for the only call."""
    ((stages),) = sharded._stages.values()
    return stages.planned.program


def test_what_adds_to_pins():
    def pins(*layouts):
        return Pins(tuple(map(md.Layout.parse, layouts)), (), ())

    free, split = pins("", "data=S(0)"), pins("model=B", "data=S(0) model=S(0)")
    assert is_refinement(split, free, MESH)
    assert not is_refinement(free, split, MESH)
    assert not is_refinement(pins("", "data=S(1)"), free, MESH)
    assert not is_refinement(pins("", "model=S(0) data=S(0)"), free, MESH)


def test_without_a_plan_before_it_plans_anew():
    plan = sharded().with_pins({"w/up": "model=S(1)"}).plan(*ARGS)
    assert plan.layout("w/up").on("model") is md.S(1)


def test_padding_stays_and_the_plan_says_so():
    def uneven(w, x):
        return jnp.sum(md.constrain(x @ w, "model=S(1)"))

    first = md.parallelize(uneven, "model=8")
    args = np.ones((64, 103), np.float32), np.ones((16, 64), np.float32)
    first.plan(*args)
    again = first.with_pins({"x": "model=B"})
    plan = again.plan(*args)
    assert plan.padded == ((103, 104),)
    assert any("(103) is padded to 104 inside the step, as in the previous plan" in note for note in plan.notes)
    again.check(*args)


def test_a_limit_is_kept_from_the_prices_that_met_it():
    free = sharded().plan(*ARGS).memory
    tight = sharded(memory=0.9 * free)
    assert tight.plan(*ARGS).memory <= 0.9 * free
    again = tight.with_pins({"w/up": "model=S(1)"})
    assert again.plan(*ARGS).memory <= 0.9 * free
    with pytest.raises(MemoryLimitError):
        sharded(memory=0.2 * free).with_pins({"*": "data=B model=B"}).plan(*ARGS)


def test_where_memory_is_short_it_goes_on_at_the_price_that_met_it(monkeypatch):
    """Nothing is searched again memory aside, unless that has become another question."""
    searched, search = [], solve_module.search
    limits = replace(SearchLimits(), solve_small_nodes=0)
    monkeypatch.setitem(EFFORTS, "default", limits)
    monkeypatch.setattr(solve_module, "search", lambda *given: searched.append(given) or search(*given))
    limit = 0.85 * sharded().plan(*ARGS).memory
    tight = sharded(memory=limit)
    before = tight.plan(*ARGS)
    searched.clear()
    same = tight.with_pins({"w/up": str(before.layout("w/up"))}).plan(*ARGS)
    assert not searched and same.memory <= limit
    assert same.seconds <= before.seconds * (1 + 1e-9) and 0 < same.lower_bound <= same.seconds
    again = tight.with_pins({"w/*": "data=S(0) model=S(0)"}).plan(*ARGS)
    assert searched and again.memory <= limit
    assert 0 < again.lower_bound <= again.seconds


def test_what_is_no_pin():
    with pytest.raises(ArgumentError) as error:
        sharded().with_pins({"xs": None, 3: "data=S(0)"})
    assert "no pin 'xs' to remove; did you mean 'x'?" in str(error.value)
    assert "layouts: 3 is an int, not a glob" in str(error.value)


@pytest.mark.parametrize("name", STEPS)
def test_a_model_under_other_pins_has_the_same_tables_and_the_same_optimum(name):
    make, args, pins = STEPS[name]
    program = trace(make, args)
    free = (md.Layout(),) * len(program.outputs)
    stated = Pins(tuple(map(md.Layout.parse, pins)), free, (None,) * len(free))
    other = Pins((md.Layout(),) * len(pins), free, (None,) * len(free))
    model = Model(make_problem(program, TWO, stated))
    problem = repin(model.problem, other)
    again, anew = model.repinned(problem), Model(make_problem(program, TWO, other))
    assert again.tables is model.tables and again.scale == anew.scale
    (a, bound), (b, least) = searched(again), searched(anew)
    assert a.cost == b.cost and bound == least
