"""Each clean-up by itself: what it takes out and what it must leave."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import meshdsl as md
from meshdsl.api.stages import SLOW_DEVICES
from meshdsl.ir.check import check_graph
from meshdsl.ir.graph import Literal, walk
from meshdsl.trace import trace
from meshdsl.trace.passes.canonicalize import materialize_constants, remove_identities
from meshdsl.trace.passes.cse import cse
from meshdsl.trace.passes.dce import dce
from meshdsl.trace.passes.duplicate import LONGEST, clone_cheap_constants
from meshdsl.trace.passes.loop_invariants import invariant_carries_to_consts
from meshdsl.trace.read_jaxpr import read_jaxpr
from tests.trace.interpreter import run_graph
from tests.trace.steps import gpt, gpt_step, halving, unused

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def cleaned(step, *args, by):
    graph = by(read_jaxpr(jax.make_jaxpr(step)(*args)))
    check_graph(graph)
    return graph


def names(graph):
    return [op.name for op in graph.ops]


@pytest.mark.parametrize(
    "identity",
    [
        lambda x: jax.lax.stop_gradient(x),
        lambda x: jnp.array(x),
        lambda x: jax.lax.convert_element_type(x, jnp.float32),
        lambda x: jax.lax.reshape(x, (4, 4)),
        lambda x: jax.lax.transpose(x, (0, 1)),
        lambda x: jax.lax.slice(x, (0, 0), (4, 4)),
        lambda x: jax.lax.concatenate([x], 0),
        lambda x: jax.lax.broadcast_in_dim(x, (4, 4), (0, 1)),
        lambda x: jax.device_put(x, jax.devices()[0]),
        lambda x: checkpoint_name(x, "kept"),
        lambda x: jax.lax.reduce_sum_p.bind(x, axes=(), out_sharding=None),
        lambda x: jax.lax.pad(x, 2.0, ((0, 0, 0), (0, 0, 0))),
        lambda x: x * 1.0,
        lambda x: 1.0 * x,
        lambda x: x / 1,
        lambda x: x - 0.0,
        lambda x: jax.lax.max(x, -jnp.inf),
        lambda x: jax.lax.max(-jnp.inf, x),
        lambda x: jax.lax.min(x, jnp.inf),
    ],
)
def test_identities_go(identity):
    graph = cleaned(lambda x: jnp.sin(identity(x)), X, by=remove_identities)
    assert names(graph) == ["sin", "return"]
    assert graph.ops[0].inputs == graph.inputs


@pytest.mark.parametrize(
    "reshapes",
    [
        lambda x: jnp.squeeze(x.reshape(2, 8).reshape(1, 16), 0).reshape(4, 4),
        lambda x: jnp.squeeze(jnp.expand_dims(x, (0, 2)), (0, 2)),
    ],
)
def test_reshapes_that_lead_back_go(reshapes):
    graph = dce(cleaned(lambda x: jnp.sin(reshapes(x)), X, by=remove_identities))
    assert names(graph) == ["sin", "return"]
    assert graph.ops[0].inputs == graph.inputs


@pytest.mark.parametrize(
    "identity",
    [
        lambda x: jax.lax.rev(x, (1, 3)),
        lambda x: jax.lax.transpose(x, (0, 3, 2, 1)),
        lambda x: jax.lax.transpose(x, (0, 1, 2, 3)),
        lambda x: jax.lax.cumsum(x, 1),
    ],
)
def test_identities_on_dims_of_one_go(identity):
    thin = jax.ShapeDtypeStruct((4, 1, 3, 1), jnp.float32)
    assert names(cleaned(lambda x: jnp.sin(identity(x)), thin, by=remove_identities)) == ["sin", "return"]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.astype(jnp.bfloat16),
        lambda x: x.T,
        lambda x: jax.lax.reshape(x, (4, 4), (1, 0)),
        lambda x: jax.lax.rev(x, (0,)),
        lambda x: jax.lax.reduce_precision(x, 5, 10),
        lambda x: jax.lax.optimization_barrier(x),
        lambda x: x[::-1],
        lambda x: x * 2.0,
        lambda x: 0.0 - x,
        lambda x: 1 / x,
        lambda x: jax.lax.max(x, jnp.inf),
        lambda x: jax.lax.min(-jnp.inf, x),
        lambda x: jax.lax.max(x, 0.0),
        lambda x: jax.lax.cumsum(x, 0),
        lambda x: jax.lax.pad(x, 2.0, ((1, -1, 0), (0, 0, 0))),
        lambda x: jax.lax.pad(x, 2.0, ((-1, 1, 0), (1, -1, 0))),
    ],
)
def test_what_changes_something_stays(change):
    assert len(cleaned(change, X, by=remove_identities).ops) > 1


@pytest.mark.parametrize(
    "cancelled",
    [
        lambda x: x * 0,
        lambda x: 0 * x,
        lambda x: x & 0,
        lambda x: x | -1,
        lambda x: x.astype(jnp.uint8) | np.uint8(255),
        lambda x: (x > 1) | True,
        lambda x: (x > 1) & False,
        lambda x: x - x,
        lambda x: x ^ x,
        *[lambda x, compare=compare: getattr(x, compare)(x) for compare in ("__eq__", "__ne__", "__lt__", "__ge__")],
        lambda x: x.astype(float) ** 0,
        lambda x: x.astype(jnp.uint32) >= 0,
        lambda x: np.uint32(0) > x.astype(jnp.uint32),
        lambda x: x.astype(jnp.int8) <= np.int8(127),
        lambda x: np.int8(-128) > x.astype(jnp.int8),
    ],
)
def test_what_cancels_reads_nothing(cancelled):
    x = jnp.arange(-2, 7).reshape(3, 3)
    graph = dce(cleaned(cancelled, x, by=materialize_constants))
    assert names(graph) == ["broadcast_in_dim", "return"]
    (found,) = run_graph(graph, [x])
    assert (found.dtype, found.tolist()) == (cancelled(x).dtype, cancelled(x).tolist())


@pytest.mark.parametrize(
    "stays",
    [
        lambda x: x.astype(jnp.uint8) > 0,
        lambda x: x.astype(jnp.int8) < 127,
        lambda x: x * 0.0,
        lambda x: x - x,
        lambda x: x == x,
        lambda x: x.astype(int) | 1,
        lambda x: x**1.5,
    ],
)
def test_what_does_not_cancel_stays(stays):
    x = jnp.array([1.0, jnp.inf, -jnp.inf, 2.0])
    graph = dce(cleaned(stays, x, by=materialize_constants))
    assert names(graph)[-2] != "broadcast_in_dim"
    np.testing.assert_array_equal(*run_graph(graph, [x]), stays(x))


def test_parts_of_a_complex_number_are_what_it_was_made_of():
    def step(x, y):
        z = jax.lax.complex(x, y)
        return jnp.real(z), jnp.imag(z)

    graph = dce(cleaned(step, X, X, by=remove_identities))
    assert names(graph) == ["return"] and graph.returned == graph.inputs


def test_unread_operations_go():
    graph = cleaned(lambda x: (jnp.sin(x), jnp.cos(x))[0], X, by=dce)
    assert names(graph) == ["sin", "return"]


def test_effects_stay():
    def step(x):
        jax.debug.print("{}", jnp.sum(x))
        return x

    *_, printing, end = trace(step, (X,)).graph.ops
    assert (printing.effects, printing.outputs, end.name) == (True, (), "return")


def test_unread_parts_of_a_scan_go():
    (scan,) = (op for op in cleaned(unused, jnp.float32(2), X, by=dce).ops if op.name == "scan")
    assert (scan.params["num_consts"], scan.params["num_carry"]) == (0, 1)
    assert len(scan.inputs) == 2 and len(scan.outputs) == 2
    assert "reduce_sum" not in [op.name for _, op in walk(scan.bodies[0])]


def test_a_carry_that_a_read_carry_needs_stays():
    def step(x):
        return jax.lax.scan(lambda c, _: ((c[0] + c[1], c[1] * 2), None), (x, x), None, length=3)[0][0]

    assert cleaned(step, X, by=dce).ops[0].params["num_carry"] == 2


def test_unread_parts_of_while_and_cond_go():
    loop = next(op for op in cleaned(lambda x: halving(x)[1], jnp.float32(1), by=dce).ops if op.name == "while")
    assert len(loop.outputs) == 1 and len(loop.bodies[0].inputs) == 1

    def branches(x, y, z):
        return jax.lax.cond(x[0, 0] > 0, lambda y, z: (y, z), lambda y, z: (y * 2, z), y, z)[0]

    (cond,) = (op for op in cleaned(branches, X, X, X, by=dce).ops if op.name == "cond")
    assert len(cond.inputs) == 2 and len(cond.outputs) == 1


def test_carries_that_never_change_become_consts():
    def step(w, x):
        return jax.lax.scan(lambda c, _: ((jax.lax.stop_gradient(c[0]), c[1] @ c[0]), c[0]), (w, x), None, length=3)

    read = read_jaxpr(jax.make_jaxpr(step)(X, X))
    before, after = read.ops[0], invariant_carries_to_consts(remove_identities(read)).ops[0]
    assert (before.params["num_consts"], before.params["num_carry"], len(before.outputs)) == (0, 2, 3)
    assert (after.params["num_consts"], after.params["num_carry"], len(after.outputs)) == (1, 1, 2)


def test_a_slice_of_a_slice_is_a_slice():
    def step(x):
        some = jax.lax.slice(x, (2,), (8,), (2,))
        again = jax.lax.slice(x, (4,), (7,), (2,))
        return jax.lax.slice(some, (1,), (3,)), again, jax.lax.slice(x, (4,), (6,)), some

    graph = cleaned(step, jnp.arange(9.0), by=cse)
    assert names(graph).count("slice") == 3
    assert graph.returned[0] is graph.returned[1] is not graph.returned[2]


def test_equal_operations_merge():
    graph = cleaned(lambda x: jnp.sin(x) + jnp.cos(x) * jnp.sin(x), X, by=cse)
    assert names(graph).count("sin") == 1


def test_closed_over_arrays_merge_if_their_elements_are_equal():
    zero, minus = np.zeros(4, np.float32), -np.zeros(4, np.float32)

    def masked(x):
        return x * np.tri(4, dtype=np.float32)

    def step(x):
        twice = masked(x), masked(x)
        alone = x * np.tri(4, k=1, dtype=np.float32), x * zero, x * minus, x[0].astype(int) * np.zeros(4, np.int32)
        return twice, alone, jax.lax.scan(lambda c, _: (masked(c) + masked(c), None), x, None, 3)[0]

    graph = dce(cleaned(step, X, by=cse))
    assert names(graph).count("constant") == 5
    assert graph.returned[0] is graph.returned[1]
    (loop,) = (op for op in graph.ops if op.name == "scan")
    assert names(loop.bodies[0]).count("mul") == 1
    x = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    assert all(map(np.array_equal, run_graph(graph, [x]), jax.tree.leaves(step(x))))


def test_operands_of_sums_and_products_have_no_order():
    def step(x):
        y = jnp.cos(x)
        return x * y + y * x, jnp.maximum(x, y) - jnp.maximum(y, x), (x - y) * (y - x), x + 2.0, 2.0 + x

    found = names(cleaned(step, X, by=cse))
    assert [found.count(name) for name in ("mul", "max", "sub", "add")] == [2, 1, 3, 2]


def test_products_of_transposed_operands_merge():
    """All dims have one length, so that only their places tell the products apart."""

    def step(a, b):
        turned, cut = a.transpose(2, 0, 1), b.transpose(1, 2, 0)
        same = [
            jnp.einsum("xij,xjk->xik", a, b),
            jnp.einsum("jxi,xjk->xik", turned, b),
            jnp.einsum("jxi,jkx->xik", turned, cut),
            jnp.einsum("ijx,xjk->xik", a.transpose(0, 2, 1).transpose(2, 1, 0), b),
        ]
        other = [
            jnp.einsum("jxi,xjk->xki", turned, b).swapaxes(1, 2),
            jnp.einsum("xij,xkj->xik", a, b),
            jnp.einsum("jxi,xjk->xik", a, b),
            jnp.einsum("xij,xjk->xik", b, a),
            jnp.einsum("jxi,xjk->xik", turned.astype(jnp.float16), b),
        ]
        return same, other

    args = np.random.default_rng(0).normal(size=(2, 3, 3, 3)).astype(np.float32)
    graph = cleaned(step, *args, by=cse)
    same, *other = ({x.id for x in graph.returned[:4]}, *({x.id} for x in graph.returned[4:]))
    assert len(same) == 1 and len(same.union(*other)) == 1 + len(other)
    for found, expected in zip(run_graph(graph, args), jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


LOOPS_TWICE = {
    "scan": lambda x, w: jax.lax.scan(lambda c, row: (jnp.tanh(c @ w) + row, c.sum()), x[0], x),
    "nested": lambda x, w: jax.lax.scan(
        lambda c, row: (jax.lax.fori_loop(0, 3, lambda i, c: (c * row) @ w, c), None), x[0], x
    ),
    "while": lambda x, w: jax.lax.while_loop(lambda s: s.sum() < 9, lambda s: s @ w + 1, x),
    "cond": lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: w * 2),
}


def loops(graph):
    return [op.name for op in graph.ops if op.bodies]


@pytest.mark.parametrize("name", LOOPS_TWICE)
def test_equal_loops_merge(name):
    loop = LOOPS_TWICE[name]

    def apart(x, w):
        first, y, z = loop(x, w), x * 2, loop(x, w)
        return first, loop(y, w), z

    assert len(loops(cleaned(apart, X, X, by=cse))) == 2


def test_loops_merge_only_if_their_bodies_agree():
    def scanned(step, x, **options):
        return jax.lax.scan(step, x[0], x, **options)

    def tells(c, row):
        jax.debug.print("{}", row)
        return c + row, None

    pairs = [
        (lambda x: scanned(lambda c, row: (c + row, c), x), lambda x: scanned(lambda c, row: (c + row, row), x)),
        (lambda x: scanned(lambda c, row: (c - row, c), x), lambda x: scanned(lambda c, row: (row - c, c), x)),
        (lambda x: scanned(lambda c, row: (c * 2, c), x), lambda x: scanned(lambda c, row: (c * 3, c), x)),
        (
            lambda x: scanned(lambda c, row: (c + row, c), x),
            lambda x: scanned(lambda c, row: (c + row, c), x, reverse=True),
        ),
        (lambda x: scanned(tells, x), lambda x: scanned(tells, x)),
    ]
    for one, other in pairs:
        assert loops(cleaned(lambda x: (one(x), other(x)), X, by=cse)) == ["scan", "scan"]
    same = pairs[0][0]
    assert loops(cleaned(lambda x: (same(x), same(x)), X, by=cse)) == ["scan"]


def test_a_loop_that_is_run_twice_is_planned_as_the_compiler_merges_it():
    def loss(x, w):
        return sum(jnp.sum(a * b) for a, b in zip(*(LOOPS_TWICE["scan"](x, w) for _ in "ab"), strict=True))

    sharded = md.parallelize(jax.grad(loss), md.Mesh(data=4, model=2, topology=SLOW_DEVICES), {"x": "data=S(0)"})
    args = np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8), np.full((8, 8), 0.1, np.float32)
    sharded.verify(*args)
    assert sharded.check(*args).divided["data"] > 0.5


def test_a_choice_between_equal_cases_is_no_choice():
    def step(x, asked):
        stated = jnp.where(asked, x[0], md.constrain(x[0], "x=S(0)"))
        return jnp.where(asked, x[0], x[:1][0]) + jnp.where(asked, x[0], x[1]) + stated

    graph = trace(step, (X, jax.ShapeDtypeStruct((4,), bool))).graph
    assert names(graph).count("select_n") == 1


def test_a_sort_moves_every_operand_once():
    def step(x, y):
        return jax.lax.sort((x, x * 1, y, x), num_keys=3)

    graph = trace(step, (X, X)).graph
    (sort,) = (op for op in graph.ops if op.name == "sort")
    assert (len(sort.inputs), sort.params["num_keys"]) == (2, 2)
    assert [v.id for v in graph.returned] == [sort.outputs[i].id for i in (0, 0, 1, 0)]


def test_what_must_not_merge():
    def signs(x):
        return jax.lax.atan2(jnp.zeros(()), x[0, 0]), jax.lax.atan2(-jnp.zeros(()), x[0, 0]), x * 0.0, x * -0.0

    assert names(cleaned(signs, X, by=cse)).count("mul") == 2
    barriers = cleaned(lambda x: [jax.lax.optimization_barrier(x) for _ in "ab"], X, by=cse)
    assert names(barriers) == ["optimization_barrier", "optimization_barrier", "return"]
    sums = cleaned(lambda x: (jnp.sum(x, 0), jnp.sum(x, 1)), X, by=cse)
    assert names(sums).count("reduce_sum") == 2
    axes = cleaned(lambda x: (x.astype(jnp.int32), x.astype(jnp.int8)), X, by=cse)
    assert names(axes).count("convert_element_type") == 2


def test_bodies_read_once_what_they_are_given_twice():
    """XLA sees that these choices are none."""

    def step(x, asked, which):
        def scanned(total, rows):
            return total + jnp.where(asked[0], *rows), None

        chosen = jax.lax.cond(which, lambda y: jnp.where(asked, y, x), lambda y: y - x, x)
        return chosen, jax.lax.scan(scanned, x[0], (x, x))[0]

    args = X, jax.ShapeDtypeStruct((4, 4), bool), jax.ShapeDtypeStruct((), bool)
    found = [op.name for _, op in walk(dce(cleaned(step, *args, by=cse)))]
    assert "select_n" not in found and "sub" in found


def test_a_stack_is_not_its_slices_and_a_carry_not_its_start():
    def step(x):
        def scanned(carry, row):
            return carry + jnp.sum(x) * row, carry - x[0]

        return jax.lax.scan(scanned, x[0], x)

    graph = cleaned(step, X, by=cse)
    found = run_graph(graph, [jnp.eye(4)])
    assert all(map(np.allclose, found, step(jnp.eye(4))))


def mask():
    return jnp.tril(jnp.ones((4, 4), bool))


def test_each_reader_has_its_own_mask():
    def step(x):
        allowed = mask()
        return [jnp.where(allowed, x * i, 0.0) for i in range(3)]

    graph = trace(step, (X,)).graph
    masks = [op.inputs[0].id for op in graph.ops if op.name == "select_n" and op.outputs[0] in graph.returned]
    assert len(set(masks)) == 3
    assert names(graph).count("ge") == 3


def test_masks_go_into_loops():
    for _, op in walk(trace(gpt_step, gpt()).graph):
        if op.name == "scan":
            assert op.params["num_consts"] == 0
    assert "ge" in [op.name for _, op in walk(trace(gpt_step, gpt()).graph)]


def test_literals_go_into_loops():
    def step(x):
        y = jax.lax.while_loop(lambda c: c[0, 0] < TWO, lambda c: c * TWO, x)
        return jax.lax.cond(y[0, 0] > 0, lambda y, k: y * k, lambda y, k: y + k, y, TWO)

    TWO = jnp.float32(2)
    loop, *_, cond, _ = (op for op in trace(step, (X,)).graph.ops)
    assert loop.params == {"cond_nconsts": 0, "body_nconsts": 0}
    assert len(cond.inputs) == 2
    assert all(isinstance(body.ops[0].inputs[1], Literal) for body in cond.bodies)


def test_long_chains_are_shared():
    def step(x, n):
        table = jnp.arange(4.0)
        for _ in range(n):
            table = jnp.sin(table)
        return x * table, x + table

    assert names(cleaned(lambda x: step(x, LONGEST - 2), X, by=clone_cheap_constants)).count("iota") == 2
    assert names(cleaned(lambda x: step(x, LONGEST + 1), X, by=clone_cheap_constants)).count("iota") == 1


def test_a_layer_of_a_list_shares_no_constant_with_another():
    graph = trace(gpt_step, gpt(stacked=False)).graph
    free = set()
    for op in graph.ops:
        if all(isinstance(x, Literal) or x.id in free for x in op.inputs):
            free |= {v.id for v in op.outputs}
    readers = [x.id for op in graph.ops for x in op.inputs if not isinstance(x, Literal) and x.id in free]
    outside = [x for op in graph.ops if op.outputs and op.outputs[0].id not in free for x in op.inputs]
    shared = [x.id for x in outside if not isinstance(x, Literal) and x.id in free]
    assert len(shared) == len(set(shared)) and readers


def test_empty_arrays_need_no_operand():
    def step(x):
        return x[1:1] * 2, jax.lax.scan(lambda total, y: (total + y[:0].sum(), y[:0]), 0.0, x)

    graph = cleaned(lambda x: step(x), X, by=lambda graph: dce(materialize_constants(graph)))
    assert names(graph) == ["broadcast_in_dim", "scan", "return"]
    assert names(graph.ops[1].bodies[0])[0] == "broadcast_in_dim"
    plan = md.parallelize(lambda x: x[1:1], md.Mesh(x=2), {"x": "x=S(0)"}, {"**": "x=B"}).plan(X)
    assert not plan.collectives


def test_a_padded_array_without_elements_is_the_padding():
    graph = cleaned(
        lambda x: jax.lax.pad(x[:0], 2.0, ((1, 3, 0), (0, 0, 0))), X, by=lambda g: dce(materialize_constants(g))
    )
    assert names(graph) == ["broadcast_in_dim", "return"]
    assert np.array_equal(run_graph(graph, [jnp.ones((4, 4))])[0], np.full((4, 4), 2.0))


def test_no_zeros_of_empty_arrays_are_added_to_cotangents():
    def step(x):
        return jnp.concatenate([x[2:2], x[:2], x[2:], x[4:]], 0)

    graph = cleaned(
        lambda x, y: jax.vjp(step, x)[1](y),
        X,
        jax.ShapeDtypeStruct((4, 4), X.dtype),
        by=lambda graph: dce(materialize_constants(graph)),
    )
    assert names(graph).count("add_any") == 1


def test_a_scan_of_consts_alone_is_done_once():
    """Nothing changes from trip to trip: slices that nobody reads, carries that nobody changes."""

    def step(x, y):
        return jax.lax.scan(lambda c, row: (c, (jnp.sort(y) + c, 1.0)), x, y)[1]

    graph = trace(step, (X, X)).graph
    assert sorted(names(graph)) == ["add", "broadcast_in_dim", "broadcast_in_dim", "return", "sort"]
    assert [v.shape for v in graph.returned] == [(4, 4, 4), (4,)]
    assert md.parallelize(step, md.Mesh(x=2), {"y": "x=S(0)"}).check(jnp.eye(4), jnp.eye(4)[::-1]).ok


def test_a_while_that_counts_to_one_is_no_loop():
    def step(x, n=1):
        return jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, jnp.sin(s[1]) + x), (0, x))[1]

    assert names(trace(step, (X,)).graph) == ["sin", "add", "return"]
    assert "while" in names(trace(lambda x: step(x, 2), (X,)).graph)
    assert md.parallelize(step, md.Mesh(x=2), {"x": "x=S(0)"}, static_argnames="n").check(jnp.eye(4)).ok


def test_a_scan_of_consts_with_effects_stays():
    def step(x):
        return jax.lax.scan(lambda c, _: (c, jax.debug.print("{}", x.sum())), None, length=3)[1], x

    assert "scan" in names(trace(step, (X,)).graph)


def test_a_sort_of_one_array_twice_that_equals_another_sort():
    def step(x):
        return jax.lax.sort((x,), dimension=0)[0], jax.lax.sort((x, x), dimension=0, num_keys=1)[1]

    graph = trace(step, (X,)).graph
    assert names(graph) == ["sort", "return"]
    assert graph.returned[0] is graph.returned[1]
