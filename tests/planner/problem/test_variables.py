"""Equal operations are of one kind, and what follows from it is one object."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshdsl.ir.index import graph_index
from meshdsl.ir.solution import Pins
from meshdsl.layouts import Layout, Mesh
from meshdsl.layouts.placement import Partial
from meshdsl.planner.costs.traffic import ChainTraffic
from meshdsl.planner.problem.build import Problem, make_problem, remove_unreachable_partials
from meshdsl.planner.problem.model import Model
from meshdsl.planner.problem.variables import NodeClasses, OpClasses
from meshdsl.trace import trace
from meshdsl.util.arrays import intern_ids, object_id
from tests.planner.graphs import STEPS, shape

MESH = Mesh(x=4, y=2)


def layers(w, x):
    for scale in (0.5, 0.5, -0.5):
        x = jnp.tanh(x @ w) * scale
    return x


def nested(w, x):
    def outer(c, _):
        return jax.lax.fori_loop(0, 3, lambda _, c: jnp.maximum(c + jnp.sum(c @ w, axis=0), x), c), None

    return jax.lax.scan(outer, x, None, length=2)[0]


def problem(step, *args, inputs=None):
    program = trace(step, args)
    pins = inputs or (Layout(),) * len(program.inputs)
    return make_problem(program, MESH, Pins(pins, (Layout(),) * len(program.outputs), (None,) * len(program.outputs)))


def named(found, name):
    return [node for node in found.nodes if node.op and node.op.name == name]


def test_equal_operations_are_of_one_kind_and_literals_count():
    found = problem(layers, shape(16, 16), shape(8, 16))
    products, scales = named(found, "dot_general"), named(found, "mul")
    assert len(products) == len(scales) == 3
    assert scales[0].op_class is scales[1].op_class is not scales[2].op_class  # factor < 0: max becomes min
    model = Model(found)
    at = {node: n for n, node in enumerate(found.nodes)}
    assert model.tables[at[products[1]]] is model.tables[at[products[2]]]
    assert model.unary[at[products[1]]] is model.unary[at[products[2]]]


def test_what_is_kept_in_memory_is_part_of_a_kind_and_rows_are_shared():
    program = trace(lambda x: jnp.exp(jnp.exp(jnp.exp(x))), (shape(8, 16),))
    first, second, third, _ = program.graph.ops
    kept = graph_index(program.graph).mask_of(v.id for v in (*first.inputs, *third.outputs))
    kinds = OpClasses(program.graph, ChainTraffic(graph_index(program.graph), kept))
    reads, fused, writes = map(kinds.of, (first, second, third))
    assert [kind.work.accesses for kind in (reads, fused, writes)] == [(1, 0), (0, 0), (0, 1)]
    assert reads.rows is fused.rows is writes.rows
    assert reads.shapes == fused.shapes == (((8, 16), 4), ((8, 16), 4))
    assert kinds.of(first) is reads


def test_nodes_are_twins_only_where_axes_are_stated_in_one_order():
    one, other = Layout.parse("x=S(0) y=S(0)"), Layout.parse("y=S(0) x=S(0)")
    found = problem(lambda a, b, c: a + b + c, *[shape(16, 16)] * 3, inputs=(one, other, one))
    twins = NodeClasses(found.nodes)
    assert twins.map(lambda n: n)[:3] == [0, 1, 0]
    assert Model(found).orders[:3] == [("x", "y"), ("y", "x"), ("x", "y")]


def test_what_is_said_of_twins_is_numbered_as_what_is_said_of_every_node():
    model = Model(problem(layers, shape(16, 16), shape(8, 16)))
    for said in (lambda n: object_id(model.tables[n]), lambda n: object_id(model.unary[n]), lambda n: model.orders[n]):
        every = list(map(said, range(len(model.nodes))))
        assert 1 < len(set(map(id, model.tables))) < len(every)
        assert model.class_ids(said).tolist() == intern_ids(every).tolist()


def test_every_object_has_its_own_identity_and_keeps_it():
    things = [object() for _ in range(10_000)] + [np.zeros(2), np.zeros(2), (), 1, "text", Mesh(x=2), Mesh(x=2)]
    assert len(set(map(object_id, things))) == len({id(thing) for thing in things}) == len(things)
    assert list(map(object_id, things)) == list(map(object_id, list(things)))


def reached(found: Problem):
    """The rows that can be taken, the plain way: again and again through all, until nothing is new."""
    possible, before = set(), None
    while before != possible:
        before, taken = set(possible), []
        for node in found.nodes:
            stated = any(isinstance(p, Partial) for _, p in node.pin.placements)
            taken.append([])
            for row in node.rows:
                ends = [(port, at) for port, at in zip(node.ports, row.outputs) if isinstance(at, Partial)]
                needs = [(port.value.id, at) for port, at in ends if not port.defines]
                if stated or not needs or possible & set(needs):
                    taken[-1].append(row)
                    possible |= {(port.value.id, at) for port, at in ends if port.defines}
    return [tuple(rows) for rows in taken]


@pytest.mark.parametrize("name", [*STEPS, "nested", "layers"])
def test_partial_rows_left_are_those_that_a_plain_search_reaches(name, monkeypatch):
    steps = {"nested": (nested, (shape(8, 8), shape(4, 8))), "layers": (layers, (shape(16, 16), shape(8, 16)))}
    step, args, *_ = {**STEPS, **steps}[name]
    with monkeypatch.context() as patched:
        patched.setattr("meshdsl.planner.problem.build.remove_unreachable_partials", lambda problem: None)
        found = problem(step, *args)
    wanted, before = reached(found), [node.rows for node in found.nodes]
    remove_unreachable_partials(found)
    assert [node.rows for node in found.nodes] == wanted
    assert before != wanted
