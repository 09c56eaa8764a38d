"""The plan that a search of equal layers begins from."""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.ir.solution import Pins
from meshdsl.layouts import Layout
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model
from meshdsl.planner.search.search import search
from meshdsl.trace import trace
from tests.planner.graphs import limited, shape


def test_what_is_done_once_is_weighed_against_all_layers():
    """To gather weights that all layers share pays in sixty layers, not in six."""

    def step(weights, x):
        h = x
        for _ in range(60):
            a, b, c = weights
            h = h + jnp.sin(jax.nn.softmax(jnp.tanh(h @ a) @ b, -1) @ c) * 2
        return h.sum()

    mesh = md.Mesh(x=4, y=2, topology="dgx-h100")
    program = trace(step, ([shape(2048, 2048)] * 3, shape(64, 2048)))
    split = Layout.parse("x=S(0), y=S(1)")
    model = Model(make_problem(program, mesh, Pins((split,) * 3 + (Layout.parse("x=S(0)"),), (Layout(),), (None,))))
    best = search(model, lambda _: False).plan
    model = limited(model, encoding_layers_nodes=100)
    found = search(model, lambda _: False, joint := NetworkBuilder(model)).plan
    assert joint.drops_layers and model.hints.weigh_layers
    assert found.cost <= best.cost * (1 + 1e-2)
