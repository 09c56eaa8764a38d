"""What plans' texts ask of a program, and the numbers of its values."""

import gc
from weakref import ref

import jax
import jax.numpy as jnp
import pytest

from meshdsl.ir.graph import Value, walk
from meshdsl.ir.index import graph_index
from meshdsl.plan.reasons import reason_index
from meshdsl.trace import trace
from tests.planner.graphs import shape


def step(x, w):
    y, _ = jax.lax.scan(lambda carry, row: (jnp.tanh(carry * row), None), x, w)
    return y * x + y


def test_every_value_is_where_it_is_made_and_has_all_its_readers():
    graph = trace(step, (shape(8), shape(4, 8))).graph
    index, ops = reason_index(graph), list(walk(graph))
    assert reason_index(graph) is index and len({id(home) for home, _ in ops}) == 2
    assert [(home or graph, op) for home, op in index.ops] == ops
    for at, (home, op) in enumerate(ops):
        assert index.order[op.id] == at
        for v in op.outputs:
            assert index.producer(v.id) is op and index.value(v.id) is v and (index.body(v.id) or graph) is home
    read = {(op.id, i): x.id for _, op in ops for i, x in enumerate(op.inputs) if isinstance(x, Value)}
    inside = [v.id for _, op in ops for some in (op.outputs, *(body.inputs for body in op.bodies)) for v in some]
    every = [*(v.id for v in graph.inputs), *inside]
    assert {(op.id, i): v for v in every for op, i in index.uses(v)} == read
    assert index.in_order(sorted(every, reverse=True)) == every
    assert all(index.producer(v.id) is None for home, _ in ops for v in home.inputs)


def test_a_program_is_let_go_of():
    graph = trace(step, (shape(8), shape(4, 8))).graph
    reason_index(graph)
    seen = ref(graph)
    del graph
    gc.collect()
    assert seen() is None


def test_a_value_of_another_program_has_no_number():
    graph = trace(step, (shape(8), shape(4, 8))).graph
    numbers = graph_index(graph)
    ids = [v.id for v in numbers.values]
    assert numbers.numbers_of(ids).tolist() == list(range(len(ids)))
    unknown = next(i for i in range(max(ids) + 2) if i not in ids)
    for value in (unknown, max(ids) + 1):
        with pytest.raises(IndexError):
            numbers.numbers_of([ids[0], value])
