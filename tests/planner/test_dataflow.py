"""What is asked of a program's arrays, against the plain way through its operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.example_steps import load_example
from meshdsl.ir.graph import Value, walk
from meshdsl.ir.index import graph_index, ops_named
from meshdsl.planner.costs.fusion import PRODUCTS, ends_fusion, materialized
from meshdsl.planner.liveness.aliasing import buffer_aliases
from meshdsl.planner.problem.build import _constants
from meshdsl.rules.elementwise import elementwise
from meshdsl.rules.registry import RULES
from meshdsl.trace import trace
from meshdsl.trace.passes.duplicate import CHEAP
from tests.planner.graphs import STEPS, shape


def nested(w, x):
    def outer(c, row):
        inner = jax.lax.fori_loop(0, 3, lambda _, c: jnp.maximum(c + jnp.sum(c @ w, axis=0), x), c)
        return jax.lax.cond(row.sum() > 0, lambda c: c * 2.0, lambda c: c @ w, inner), None

    return jax.lax.scan(outer, x, w)[0] + jnp.eye(8)[:4]


def masked(x):
    return jnp.where(jnp.arange(8) < jnp.arange(8)[:, None], x * 0.5, -1.0).astype(jnp.bfloat16)


MORE = {"nested": (nested, (shape(8, 8), shape(4, 8))), "masked": (masked, (shape(8, 8),))}


@pytest.fixture(params=[*STEPS, *MORE, "gpt"])
def graph(request):
    if request.param == "gpt":
        program = load_example("gpt").program
        return trace(program.step, program.args).graph
    step, args, *_ = {**STEPS, **MORE}[request.param]
    return trace(step, args).graph


def graphs(graph):
    return [graph, *(body for _, op in walk(graph) for body in op.bodies)]


def home_of(part, graph):
    return part.owner[0].bodies[part.owner[1]] if part.owner else graph


def values(op):
    return [x for x in op.inputs if isinstance(x, Value)]


def test_all_is_numbered_once_and_in_order(graph):
    numbers = graph_index(graph)
    assert graph_index(graph) is numbers and numbers.op_count == len(list(walk(graph)))
    homes = {op.id: home for home, op in walk(graph)}
    assert {op.id for op in numbers.ops if op} == homes.keys()
    for part in numbers.blocks:
        home = home_of(part, graph)
        assert numbers.ops[part.start - 1] is None and tuple(numbers.ops[part.start : part.stop]) == home.ops
        assert part.inputs == home.inputs and part.trips == home.trips
    literals = [(at, i, x) for at, op in enumerate(numbers.ops) if op for i, x in enumerate(op.inputs)]
    assert numbers.literals == [found for found in literals if not isinstance(found[-1], Value)]
    for at, op in enumerate(numbers.ops):
        made = op.outputs if op else next(part.inputs for part in numbers.blocks if part.start - 1 == at)
        assert numbers.values[numbers.first_result[at] : numbers.first_result[at + 1]] == list(made)
        assert all(numbers.producer[numbers.number_of(v.id)] == at and numbers.value(v.id) is v for v in made)
        readings = range(numbers.first_use[at], numbers.first_use[at + 1])
        read = [(op.id, i, x.id) for i, x in enumerate(op.inputs) if isinstance(x, Value)] if op else []
        assert [(*numbers.uses[r], numbers.values[numbers.use_value[r]].id) for r in readings] == read
        assert all(numbers.use_position[r] == at for r in readings)
        if op:
            asked = [(op.id, i) for i in range(len(op.inputs))]
            known = dict(zip([each[:2] for each in read], readings, strict=True))
            assert numbers.use_numbers(asked).tolist() == [known.get(reading, -1) for reading in asked]
            assert numbers.enclosing_ops(op.id)[-1] is op
            bodies = [outer.bodies for outer in numbers.enclosing_ops(op.id)[:-1]]
            inside = ({inner.id for body in some for _, inner in walk(body)} for some in bodies)
            assert all(op.id in ids for ids in inside)
    for v, size, trips in zip(numbers.values, numbers.bytes, numbers.trips, strict=True):
        assert size == v.bytes and trips in {home.trips for home in graphs(graph)}
    assert [numbers.shapes[i] for i in numbers.shape] == [v.shape for v in numbers.values]
    for name in {op.name for _, op in walk(graph)}:
        assert {op.id for op in ops_named(graph, name)} == {op.id for _, op in walk(graph) if op.name == name}


def test_readers_are_those_of_each_value(graph):
    numbers = graph_index(graph)
    for i, value in enumerate(numbers.values):
        found = [numbers.uses[r] for r in numbers.uses_of(np.array([i]))]
        ops = (op for op in numbers.ops if op)
        assert found == [(op.id, k) for op in ops for k, x in enumerate(op.inputs) if x is value]


@pytest.mark.parametrize("again", [False, True])
def test_what_is_written_to_memory_is_heavy_or_read_by_several(graph, again):
    wanted = set()
    for home in graphs(graph):
        wanted |= {v.id for v in home.inputs}
        for op in home.ops:
            fusing = op.name.startswith("reduce_") or (again and op.name in PRODUCTS)
            if op.bodies or ends_fusion(op.name):
                wanted |= {v.id for v in op.outputs} | ({v.id for v in values(op)} if not fusing else set())
            others = {v.id for other in home.ops if other is not op for v in values(other)}
            wanted |= set() if again else others & {v.id for v in values(op)}
    assert set(graph_index(graph).ids(materialized(graph, again))) == wanted


def runs(home, kept):
    """Where each operation runs, the plain way: with the last one that reads what it makes, if none of that is kept."""
    found = list(range(len(home.ops)))
    for at in reversed(range(len(home.ops))):
        made = {v.id for v in home.ops[at].outputs}
        if made and not made & kept:
            readers = [k for k, op in enumerate(home.ops) if made & {v.id for v in values(op)}]
            found[at] = max([at if not reads(home, v, readers) else latest(home, v, readers, found) for v in made])
    return found


def reads(home, value, readers):
    return [k for k in readers if value in {v.id for v in values(home.ops[k])}]


def latest(home, value, readers, found):
    return max(found[k] for k in reads(home, value, readers))


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_fused_operations_run_with_their_last_readers(graph, backend):
    places, numbers = buffer_aliases(graph, backend), graph_index(graph)
    kept = set(numbers.ids(places.materialized))
    for part in numbers.blocks:
        home = home_of(part, graph)
        assert (places.runs_at[part.start : part.stop] - part.start).tolist() == runs(home, kept)


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_results_may_be_written_over_operands_that_are_as_large_through_fused_ones(graph, backend):
    places, numbers = buffer_aliases(graph, backend), graph_index(graph)
    kept, fused, wanted = set(numbers.ids(places.materialized)), {}, {}
    for op in (op for op in numbers.ops if op and RULES.get(op.name) is elementwise):
        (made,) = op.outputs
        over = []
        for i, x in enumerate(op.inputs):
            if isinstance(x, Value) and x.shape == made.shape:
                over += [(op.id, i), *fused.get(x.id, [])]
        if over:
            (wanted if made.id in kept else fused)[made.id] = list(dict.fromkeys(over))
    at, made, options, over = places.reuses
    assert (np.diff(at) >= 0).all()
    found = {}
    for i, value in enumerate(made.tolist()):
        op = numbers.ops[at[i]]
        if RULES.get(op.name) is elementwise:
            found[numbers.values[value].id] = [numbers.uses[r] for r in over[options[i] : options[i + 1]]]
        else:  # an update or a loop
            ((_, operand),) = [numbers.uses[r] for r in over[options[i] : options[i + 1]]]
            assert op.inputs[operand].shape == numbers.values[value].shape
    assert found == wanted


def test_what_is_fused_many_times_over_is_an_option_once():
    """Squares of squares: each reads the one before it twice, and on a TPU none of them is kept."""

    def step(x):
        for _ in range(40):
            x = x * x
        return x

    places = buffer_aliases(trace(step, (shape(4, 8),)).graph, "tpu")
    assert places.reuses.uses.size == len(set(places.reuses.uses.tolist())) == 2 * 40


def test_what_cheap_operations_make_of_nothing_is_found(graph):
    numbers = graph_index(graph)
    wanted = set()
    for op in (op for op in numbers.ops if op):
        if op.name in CHEAP and not op.effects and {v.id for v in values(op)} <= wanted:
            wanted |= {v.id for v in op.outputs}
    assert set(numbers.ids(_constants(numbers))) == wanted


def test_a_mask_is_constants():
    numbers = graph_index(trace(masked, (shape(8, 8),)).graph)
    assert _constants(numbers).any()
