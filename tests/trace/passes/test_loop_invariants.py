"""Loops compute what changes from trip to trip, and nothing else."""

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.trace.passes.loop_invariants import hoist_invariants
from tests.trace.passes.test_cleanup_passes import X, cleaned, names


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_what_is_the_same_in_every_trip_is_computed_before_it(loop):
    """A norm of shared weights is one collective, as compilers have it, not one per trip."""

    def body(x, w):
        return jnp.tanh(x @ (w / jnp.linalg.norm(w)))

    def step(x, w):
        if loop == "scan":
            return jax.lax.scan(lambda x, _: (body(x, w), None), x, None, length=3)[0]
        return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, body(s[1], w)), (0, x))[1]

    graph = cleaned(step, X, X, by=hoist_invariants)
    made = next(op for op in graph.ops if op.name == loop)
    assert {"sqrt", "div"} <= set(names(graph)) and not {"sqrt", "div"} & set(names(made.bodies[-1]))
    assert "tanh" in names(made.bodies[-1])
    sharded = md.parallelize(step, md.Mesh(x=2), {"x": "x=S(0)", "w": "x=S(0)"}, {"**": "x=S(0)"})
    assert sharded.verify(jnp.eye(4), jnp.eye(4)).equal and sharded.check(jnp.eye(4), jnp.eye(4)).ok


@pytest.mark.parametrize(
    "same",
    [lambda w: jnp.broadcast_to(w, (3, 4, 4)).sum(0), lambda w: jax.lax.optimization_barrier(w) * 2],
    ids=["larger", "barrier"],
)
def test_what_would_take_room_or_is_there_to_stay_stays_in_its_loop(same):
    def step(x, w):
        return jax.lax.scan(lambda x, _: (x @ same(w), None), x, None, length=3)[0]

    before, after = (cleaned(step, X, X, by=by) for by in (lambda graph: graph, hoist_invariants))
    assert names(before) == names(after) == ["scan", "return"]
    assert names(before.ops[0].bodies[0]) == names(after.ops[0].bodies[0])
