from itertools import chain, combinations

import jax
import jax.numpy as jnp
import pytest

from meshdsl.ir.graph import walk
from meshdsl.ir.index import producers
from meshdsl.ir.rewrite import values
from meshdsl.recomputation.levels import reads_residual, recomputable
from meshdsl.recomputation.min_cut import RematPrices, cheapest_recomputation
from meshdsl.recomputation.segments import _shortest
from meshdsl.trace import trace


def step(w, x):
    def loss(w):
        a = jnp.sin(x @ w)
        b = jnp.tanh(a) * jnp.exp(a)
        return (b * jnp.cos(b @ w)).sum()

    return jax.grad(loss)(w)


def cost(graph, ops, prices):
    """Seconds of a choice by its definition: of all that is needed, what is kept and what runs twice."""
    made = producers(graph)
    waiting = [x for op in graph.ops if reads_residual(op) for x in values(op.inputs)]
    seen, twice, seconds = set(), set(), 0.0
    while waiting:
        x = waiting.pop()
        op = made.get(x.id)
        if op is None or op.phase != "forward" or x.id in seen:
            continue
        seen.add(x.id)
        if op.id not in ops:
            seconds += prices.kept[x.id]
        elif op.id not in twice:
            twice.add(op.id)
            seconds += prices.again[op.id]
            waiting += values(op.inputs)
    return seconds


@pytest.mark.parametrize("price", [0.1, 0.4, 0.7, 1.5, 5.0])
def test_the_cut_is_the_cheapest_of_all_choices(price):
    program = trace(step, (jnp.ones((4, 4)), jnp.ones((2, 4))))
    graph, ops = program.graph, sorted(recomputable(program))
    every = [op for _, op in walk(graph)]
    prices = RematPrices(
        {v.id: price * (1 + v.id % 3) for op in every for v in op.outputs}, {op.id: 1.0 + op.id % 4 for op in every}
    )
    found = cheapest_recomputation(graph, ops, prices).ops
    choices = chain.from_iterable(combinations(ops, n) for n in range(len(ops) + 1))
    assert cost(graph, found, prices) == pytest.approx(min(cost(graph, set(some), prices) for some in choices))


def test_of_a_scan_in_a_layer_only_what_is_needed_runs_again():
    def step(w, x):
        def loss(w):
            def layer(y, w):
                _, made = jax.lax.scan(lambda c, row: (jnp.tanh(c + row), (jnp.sin(c + row) @ w,)), y[0], y)
                return made[0], None

            return (jax.lax.scan(layer, x, w)[0] ** 2).sum()

        return jax.grad(loss)(w)

    program = trace(step, (jnp.ones((3, 4, 4)), jnp.ones((8, 4))))
    every = [op for _, op in walk(program.graph)]
    (scan,) = (op for op in every if op.name == "scan" and op.id in recomputable(program))
    product = next(op for op in scan.bodies[0].ops if op.name == "dot_general")
    prices = RematPrices({v.id: 3.0 for op in every for v in op.outputs}, {op.id: 1.0 for op in every})
    found = cheapest_recomputation(program.graph, recomputable(program), prices)
    assert scan.id in found.ops and product.id not in found.parts
    assert found.parts.intersection(op.id for op in scan.bodies[0].ops)
    kept = {v.id for v in scan.outputs if v.shape == (8, 4)} & found.spared
    assert kept


def largest(residuals, ends):
    """Bytes of the largest segment between these last positions."""
    return max(sum(residuals[a + 1 : b + 1]) for a, b in zip((-1, *ends), (*ends, len(residuals) - 1), strict=True))


def test_segments_pass_least():
    widths, residuals = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]
    for limit in (8, 10, 16, 40):
        cuts = chain.from_iterable(combinations(range(7), n) for n in range(8))
        least = min(sum(widths[end] for end in ends) for ends in cuts if largest(residuals, ends) <= limit)
        found, ends = _shortest(widths, residuals, limit)
        assert sum(widths[end] for end in ends) == least and found == least + largest(residuals, sorted(ends))
