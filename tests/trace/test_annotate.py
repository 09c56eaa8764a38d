"""Trips and phases."""

from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest

from meshdsl.ir.graph import walk
from meshdsl.trace import trace
from tests.trace.steps import PARAMS, accumulate, clipped, counted, gpt, gpt_step, halving, mlp

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def by_phase(program):
    found = {}
    for _, op in walk(program.graph):
        if op.name != "return":
            found.setdefault(op.phase, Counter())[op.name] += 1
    return found


def phases(step, *args):
    return {op.name: op.phase for _, op in walk(trace(step, args).graph)}


@pytest.mark.parametrize("stacked", [True, False])
def test_a_training_step(stacked):
    program = trace(gpt_step, gpt(stacked=stacked))
    found = by_phase(program)
    layers = 1 if stacked else 2
    assert found["forward"]["dot_general"] == 8 * layers + 1
    assert found["backward"]["dot_general"] == 16 * layers + 2
    assert not {"dot_general", "gather", "scan", "exp", "tanh"} & set(found["optimizer"])
    assert not {"scatter-add", "add_any"} & set(found["forward"])
    shared = ("return", "broadcast_in_dim")  # zeros have the line of whoever made them first
    lines = {op.source.line for _, op in walk(program.graph) if op.phase == "optimizer" and op.name not in shared}
    first = gpt_step.__code__.co_firstlineno
    assert lines == {first + 2, first + 3}, "all of update and apply_updates, nothing else"
    after = {op.source.line for _, op in walk(program.graph) if op.phase != "optimizer"}
    assert not after & lines
    assert program.graph.ops[-1].phase == "optimizer"


@pytest.mark.parametrize("stacked", [True, False])
def test_backward_scans_hold_only_backward(stacked):
    for _, op in walk(trace(gpt_step, gpt(stacked=stacked)).graph):
        for body in op.bodies:
            assert {inner.phase for _, inner in walk(body)} == {op.phase}


def test_a_sum_of_squares_kept_by_the_optimizer():
    def step(w, total, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        total = total + gradient * gradient
        return w - gradient * jax.lax.rsqrt(total), total

    assert phases(step, X, X, X)["add"] == "optimizer"


def test_accumulation():
    graph = trace(accumulate, (PARAMS, jax.ShapeDtypeStruct((3, 6, 4), jnp.float32))).graph
    scan = next(op for op in graph.ops if op.name == "scan")
    assert scan.phase == "backward"
    inner = Counter((op.name, op.phase) for op in scan.bodies[0].ops if op.name in ("dot_general", "add", "div"))
    assert inner["dot_general", "forward"] == 2
    assert inner["dot_general", "backward"] == 3
    assert inner["add", "backward"] == 3, "gradient + accumulator"
    assert inner["add", "forward"] == 2, "bias, loss + accumulator"
    assert {op.phase for op in graph.ops if op.name == "sub"} == {"optimizer"}


def test_a_loop_over_whole_steps():
    def train(params, xs):
        def step(params, x):
            loss, grads = jax.value_and_grad(mlp)(params, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

        return jax.lax.scan(step, params, xs)

    graph = trace(train, (PARAMS, jax.ShapeDtypeStruct((3, 6, 4), jnp.float32))).graph
    inner = Counter((op.name, op.phase) for op in graph.ops[-2].bodies[0].ops)
    assert inner["sub", "optimizer"] == 3
    assert inner["dot_general", "forward"] == 2


def test_an_optimizer_in_a_loop():
    def step(ws, x):
        grads = jax.grad(lambda ws: jnp.sum(jnp.sin(x @ ws)))(ws)
        return jax.lax.scan(lambda _, wg: (None, wg[0] - jnp.tanh(wg[1])), None, (ws, grads))[1]

    assert phases(step, X, X)["tanh"] == "optimizer"


def test_forward_only():
    assert set(phases(lambda x: jax.lax.scan(lambda c, s: (jnp.sin(c) + s, None), x, x[None])[0], X).values()) == {
        "forward"
    }


def test_the_decay_of_moments_and_step_counts():
    def step(w, state, x):
        updates, state = optax.adam(1e-3).update(jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w), state)
        return w + updates["w"] if isinstance(updates, dict) else w + updates, state

    found = phases(step, X, jax.eval_shape(optax.adam(1e-3).init, X), X)
    assert found["pow"] == "optimizer"
    graph = trace(step, (X, jax.eval_shape(optax.adam(1e-3).init, X), X)).graph
    inputs = {v.id for v in graph.inputs[1:4]}
    assert {op.phase for op in graph.ops if inputs & {getattr(v, "id", -1) for v in op.inputs}} == {"optimizer"}


def test_custom_vjp_and_remat():
    found = trace(jax.grad(lambda x: jnp.sum(clipped(x))), (X,)).graph
    assert {op.phase for op in found.ops if op.name in ("clamp", "cos", "max", "min")} == {"backward"}
    remat = trace(jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x))), (X,)).graph
    assert {op.phase for op in remat.ops if op.name in ("cos", "optimization_barrier")} == {"backward"}


def trips(step, *args):
    return [(body.trips, body.estimated) for _, op in walk(trace(step, args).graph) for body in op.bodies]


def scan_of(inner, length):
    return lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=length)[0]


def test_trips_multiply():
    assert trips(scan_of(scan_of(jnp.sin, 5), 3), X) == [(3, False), (15, False)]
    branch = scan_of(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, scan_of(jnp.cos, 7), x), 2)
    assert sorted(trips(branch, X)) == [(2, False), (2, False), (2, False), (14, False)]


def test_counting_loops():
    def count(start, stop, stride):
        return lambda x: jax.lax.while_loop(lambda c: c[0] < stop, lambda c: (c[0] + stride, c[1] * 2), (start, x))

    assert trips(count(0, 10, 1), X) == [(11, False), (10, False)]
    assert trips(count(1, 10, 4), X) == [(4, False), (3, False)]
    assert trips(count(5, 2, 1), X) == [(1, False), (0, False)]

    def carried(x):
        return jax.lax.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + 1, c[1], c[2] * 2), (0, 6, x))

    assert trips(carried, X) == [(7, False), (6, False)]
    assert trips(counted, jnp.float32(1)) == [(5, False)]
    assert trips(scan_of(lambda x: count(0, 3, 1)(x)[1], 2), X) == [(2, False), (8, False), (6, False)]


def test_guessed_loops():
    assert trips(halving, jnp.float32(1)) == [(11, True), (10, True)]
    assert trips(lambda n, x: jax.lax.fori_loop(0, n, lambda i, c: c * 2, x), jnp.int32(3), X) == [
        (11, True),
        (10, True),
    ]
    assert trips(lambda x: jax.lax.while_loop(lambda c: c < 3.0, lambda c: c + 1.0, x), 0.0) == [(11, True), (10, True)]

    def inner(x):
        return jax.lax.while_loop(lambda c: c[0, 0] < 3.0, scan_of(jnp.sin, 4), x)

    assert trips(inner, X)[-1] == (40, True)
