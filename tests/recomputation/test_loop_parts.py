import random
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshdsl.ir.graph import walk
from meshdsl.recomputation import recomputing
from meshdsl.recomputation.levels import layer_loops, recomputable
from meshdsl.recomputation.loop_parts import dividing, loop_families, mixed_choice
from meshdsl.recomputation.min_cut import RematChoice
from meshdsl.trace import trace
from tests.recomputation.steps import layer, microbatched, updated
from tests.recomputation.test_rewrite import run

LENGTH, WIDTH, ROWS = 5, 8, 16


def both_ways(weights, x, key):
    """Two loops over layers, one of them in reverse; what both stack is read again outside."""

    def loss(weights):
        slices = weights, jax.random.split(key, LENGTH)
        y, sums = jax.lax.scan(lambda y, each: (layer(each[0], y, each[1]), y.sum(0)), x, slices)
        z, rows = jax.lax.scan(lambda z, each: (jnp.sin(z * each[0]), z[0]), y, (sums,), reverse=True)
        return (z**2).mean() + (sums * rows[::-1]).sum()

    return updated(loss, weights)


def in_microbatches(weights, x, key):
    return microbatched(weights, x, key, both_ways)


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [0.3 * jax.random.normal(key, (LENGTH, WIDTH, WIDTH)) for key in keys[:2]]
    return weights, jax.random.normal(keys[2], (ROWS, WIDTH)), keys[2]


def choice(ops):
    return RematChoice(frozenset(ops), frozenset(), frozenset(), frozenset(ops))


@pytest.mark.parametrize("step", [both_ways, in_microbatches])
def test_parts_with_any_choices_give_the_same_bits(step):
    args = arguments()
    program, draw = trace(step, args), random.Random(step.__name__)
    ops, expected = sorted(recomputable(program)), run(program, args, compiled=False)
    families = list(loop_families(program.graph))
    assert [family.length for family in families] == [LENGTH, LENGTH]
    for part in (0.01, 0.5, 1.0):
        some = [choice(op for op in ops if draw.random() < 0.5) for _ in range(2)]
        mixed = mixed_choice(program.graph, *some, part)
        assert [k for _, k in mixed.trips] == [min(max(2, ceil(part * LENGTH)), LENGTH - 2)] * 2
        divided = dividing(program, dict(mixed.trips))
        rewrite = divided.rewrite(mixed)
        assert rewrite[0] <= recomputable(divided.program)
        for made in (divided.program, recomputing(divided.program, *rewrite).program):
            for found, wanted in zip(run(made, args, compiled=False), expected, strict=True):
                np.testing.assert_array_equal(found, wanted)


def test_parts_hand_their_stacks_to_each_other_unjoined():
    args = jnp.ones((LENGTH, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH))

    def step(weights, x):
        def loss(weights):
            return (jax.lax.scan(lambda y, w: (jnp.sin(y @ w), None), x, weights)[0] ** 2).mean()

        return jax.grad(loss)(weights)

    program = trace(step, args)
    (family,) = loop_families(program.graph)
    graph = dividing(program, dict.fromkeys(family.forward, 2)).program.graph
    assert sorted(pair.forward.params["length"] for pair in layer_loops(graph)) == [2, 3]
    assert [op.outputs[0].shape for _, op in walk(graph) if op.name == "concatenate"] == [args[0].shape]  # the gradient
    assert sum(op.name == "slice" for _, op in walk(graph)) == 2  # of the weights, for both passes


def test_loops_that_read_stacks_of_others_may_be_divided_elsewhere():
    args = arguments()
    program = trace(both_ways, args)
    expected, families = run(program, args, compiled=False), list(loop_families(program.graph))
    trips = {id: k for family, k in zip(families, (2, 3), strict=True) for id in family.forward}
    for found, wanted in zip(run(dividing(program, trips).program, args, compiled=False), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_what_cannot_be_divided_is_left():
    args = arguments()
    program = trace(both_ways, args)
    whole = {id: LENGTH for family in loop_families(program.graph) for id in family.forward}
    graph = dividing(program, {0: 1, **whole}).program.graph
    assert [op.name for _, op in walk(graph)] == [op.name for _, op in walk(program.graph)]
    assert mixed_choice(program.graph, choice(()), choice(()), 0.5) is None
