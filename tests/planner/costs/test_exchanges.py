"""Collectives inside local programs: priced as listed, kept in their loops, never two different ones at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.placement import B, S
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.layouts.topology import Link, Topology
from meshdsl.plan.reasons import collectives_inside
from meshdsl.planner.costs.op_cost import exchange_seconds
from meshdsl.rules import rows_of
from meshdsl.trace import trace

MESH = md.Mesh(x=4, y=2)
SLOW = Topology("slow links", 1e10, 1e10, 4e9, 4e9, 0.0, (Link(latency=0.0, bandwidth=1e6),))
EDGES = (Exchange("window", 0, 0, before=1, after=1),)
SUMS = (Exchange("gather", 0, 1, length=1),)
ROWS = (
    Signature((), (B, B)),
    Signature((), (S(0), S(0)), collectives=EDGES),
    Signature((), (S(1), S(1)), collectives=SUMS),
    Signature((), (S(2), S(2))),
)


def test_rows_that_exchange_differently_do_not_meet():
    seconds = exchange_seconds(ROWS, (((16, 16, 16), 4),) * 2, MESH)
    assert np.isinf(seconds[1, 2])
    assert np.isinf(seconds[2, 1])
    assert np.isfinite(seconds).sum() == 14
    assert seconds[0, 3] == seconds[3, 3] == 0


def test_blocks_too_small_for_a_gather_do_not_exchange():
    rows = (Signature((), (B,)), Signature((), (S(0),), collectives=(Exchange("gather", 0, 0, length=3),)))
    seconds = exchange_seconds(rows, (((8,), 4),), MESH)
    assert np.isfinite(seconds).tolist() == [[True, True], [False, False]]


def test_no_exchange_costs_nothing():
    assert exchange_seconds(ROWS[:1] + ROWS[3:], (((16, 16, 16), 4),) * 2, MESH) == 0.0


STEPS = {
    "cumsum": (lambda x: jnp.cumsum(x, 0), "x=S(0) y=S(0)"),
    "other dim": (lambda x: jnp.cumsum(x, 1), "x=S(0) y=S(1)"),
    "two dims": (lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (4, 3), (1, 1), "SAME"), "x=S(0) y=S(1)"),
}


@pytest.mark.parametrize("name", STEPS)
def test_listed_as_priced(name):
    (step, layout), mesh = STEPS[name], md.Mesh(x=4, y=2, topology=SLOW)
    x = jax.ShapeDtypeStruct((48, 16), jnp.bfloat16)
    solution = md.parallelize(step, mesh, {"*": layout}, outputs={"**": layout}).plan(x).solution
    graph = trace(step, (x,)).graph
    (op,) = [op for op in graph.ops if op.name != "return"]
    rows = rows_of(op)
    shapes = tuple((v.shape, v.itemsize) for v in (*op.inputs, *op.outputs))
    tables = exchange_seconds(
        tuple(Signature((), (*r.inputs, *r.outputs), r.size, r.collectives) for r in rows), shapes, mesh
    )
    state = tuple(rows.index(row) for row in solution.rows[op.id])
    listed = list(collectives_inside(graph, solution))
    assert listed
    assert sum(c.seconds for c in listed) == pytest.approx(float(tables[state]))


def test_a_gather_stays_in_the_loop_it_is_planned_in():
    def step(w, xs):
        def trip(total, x):  # a barrier, or the running sum would be made in front of the loop
            return total + x * jnp.cumsum(jax.lax.optimization_barrier(w), 0), None

        return jax.lax.scan(trip, jnp.zeros_like(w), xs)[0]

    args = (jnp.sin(jnp.arange(4096.0 * 64)).reshape(4096, 64), jnp.ones((3, 4096, 64)))
    sharded = md.parallelize(step, MESH, {"w": "x=S(0) y=B", "xs": "x=S(1) y=B"}, outputs={"**": "x=S(0)"})
    assert [(c.kind, c.axes, c.trips) for c in sharded.plan(*args).collectives] == [("all-gather", ("x",), 3)]
    sharded.check(*args)
    sharded.verify(*args)


def test_a_plan_file_keeps_them(tmp_path):
    step, layout = STEPS["cumsum"]
    plan = md.parallelize(step, MESH, {"*": layout}, outputs={"**": layout}).plan(jnp.ones((48, 16)))
    plan.save(tmp_path / "p.json")
    assert md.load_plan(tmp_path / "p.json") == plan
    assert any(row.collectives for rows in plan.solution.rows.values() for row in rows)


def pooled(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3, 1), (2, 1), "SAME")


BLOCKS = {
    "one result of two": (lambda x: jax.lax.top_k(x.T, 4)[0], 128, "", ["all-gather"]),
    "sort": (lambda x: jnp.sort(x, 0), 128, "x=S(0)", ["collective-permute"]),
    "pool": (pooled, 128, "x=S(0)", ["collective-permute"]),
    "gradient of a pool": (jax.grad(lambda x: jnp.sin(pooled(x)).sum()), 128, "x=S(0)", ["collective-permute"] * 3),
    "shrinking": (
        lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 1), (1, 1), "VALID"),
        130,
        "x=S(0)",
        ["collective-permute"] * 2,
    ),
    "slice": (lambda x: x[2:-6] + 1, 128, "x=S(0)", ["collective-permute"] * 2),
    "product": (lambda x: jnp.prod(x, 0), 128, "", ["all-gather"]),
}  # a step, the length of its operand, its result's pin, what it communicates


@pytest.mark.parametrize("name", BLOCKS)
def test_runs_on_blocks(name):
    step, length, pin, kinds = BLOCKS[name]
    x = jnp.sin(jnp.arange(length * 8.0) * 1.7).reshape(length, 8)
    mesh = md.Mesh(x=2, y=2, topology=SLOW)
    sharded = md.parallelize(step, mesh, {"*": "x=S(0) y=B"}, outputs={"**": pin or "x=B"})
    assert [c.kind for c in sharded.plan(x).collectives] == kinds
    sharded.check(x)
    sharded.verify(x)
