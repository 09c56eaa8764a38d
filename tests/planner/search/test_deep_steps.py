"""Steps that are more than one stack of layers: their equal layers are found, and their plans proved."""

import pytest

from bench import deep_steps
from meshdsl.layouts.mesh import Mesh
from meshdsl.pins import make_pins
from meshdsl.planner.encoding.blocks import LayerBlocks
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model
from meshdsl.planner.search.search import search
from meshdsl.trace import trace
from tests.planner.graphs import limited, searched, solved

MESH = Mesh(data=16, model=8, topology="dgx-h100")


def model_of(program):
    traced = trace(program.step, program.args)
    return Model(make_problem(traced, MESH, make_pins(traced, MESH, program.layouts)))


@pytest.mark.parametrize(
    ("program", "copies"),
    [
        pytest.param(deep_steps.encoder_decoder(10, 2048, 512), 3, marks=pytest.mark.sweep),
        (deep_steps.low_rank_adapters(10), 6),
        (deep_steps.gradient_accumulation(8, 2), 5),
        (deep_steps.unrolled_lstm(12), 7),
    ],
    ids=["encoder and decoder", "adapters", "microbatches", "time steps"],
)
def test_equal_layers_are_found(program, copies):
    model = limited(model_of(program), encoding_layers_nodes=0)
    assert max(len(block.copies) for block in LayerBlocks(model, True).blocks) >= copies


@pytest.mark.sweep
@pytest.mark.parametrize("rounds", [True, False])
def test_weights_that_many_read_are_proved_to_lie_well(rounds):
    model = model_of(deep_steps.gradient_accumulation(2, 4))
    if not rounds:
        model = limited(model, search_rounds_entries=0, search_rounds_nodes=0)
    best, bound = searched(model)
    assert bound >= model.scale.seconds(best.cost) * (1 - (1e-6 if rounds else 5e-3))


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [(4, 1024, 256), (6, 512, 512)], ids=["jointly", "in neighbourhoods"])
def test_a_limit_that_the_fastest_plan_keeps_takes_nothing(sizes):
    """Although the plans on the way to it do not."""
    program, mesh = deep_steps.unrolled_lstm(*sizes), Mesh(pod=4, data=4, model=4, topology="dgx-h100")
    traced = trace(program.step, program.args)
    pins = make_pins(traced, mesh, program.layouts)
    free = solved(traced, mesh, pins, 1e15)
    assert solved(traced, mesh, pins, 1.05 * free.peak).seconds == free.seconds


def test_a_bound_that_is_asked_for_later_speaks_of_all_layouts():
    """Whatever layouts the model looks at in the meantime."""
    model = model_of(deep_steps.gradient_accumulation(1, 4))
    expected = search(model, lambda _: False).lower_bound()
    found = search(model, lambda _: False)
    best = found.plan
    model.restricted_to_plan(best.rows)
    assert found.lower_bound() == pytest.approx(expected, rel=1e-9)
    assert expected < model.scale.seconds(best.cost) * (1 - 1e-4)
