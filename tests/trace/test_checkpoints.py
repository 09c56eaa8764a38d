"""A step whose ``jax.checkpoint`` is taken out is the step written without it."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec

from meshdsl.ir.check import check_graph
from meshdsl.ir.graph import LOOPS, walk
from meshdsl.ir.text import param_text
from meshdsl.trace import trace
from meshdsl.trace.forward_pass import _forward_scope
from tests.sweeps import swept
from tests.trace.interpreter import run

POLICIES = jax.checkpoint_policies
KEY = jax.random.key(0)


def layer(x, w):
    return jax.nn.gelu(checkpoint_name(jnp.sin(x @ w), "sin"))


def scanned(mark):
    return lambda ws, x: lax.scan(lambda x, w: (mark(layer)(x, w), None), x, ws)[0].sum()


def unrolled(mark):
    return lambda ws, x: mark(layer)(mark(layer)(x, ws[0]), ws[1]).sum()


def whole_scan(mark):
    """LSTM-like: two carries that begin alike; also a stack that is a result."""

    def cell(carry, w):
        h, m = carry
        m = jnp.tanh(h @ w) * m + jax.nn.sigmoid(h @ w)
        return (jnp.sin(m), m), h

    run = mark(lambda ws, x: lax.scan(cell, (x, x), ws)[1])
    return lambda ws, x: (run(ws, x) ** 2).sum()


def nested(mark):
    group = mark(lambda ws, x: lax.scan(lambda x, w: (mark(layer)(x, w), None), x, ws)[0])
    return lambda ws, x: lax.scan(lambda x, ws: (group(ws, x), None), x, ws.reshape(2, 2, 8, 8))[0].sum()


def chunks(mark):
    """Without a carry, and with what is the same in every chunk."""
    part = mark(lambda x, w: jax.nn.logsumexp(x @ w + jnp.tril(jnp.ones((4, 8))), -1).sum())
    return lambda ws, x: lax.map(lambda x: part(x, ws[0]), x.reshape(4, 4, 8)).sum()


def dropout(mark):
    def drop(x, w, key):
        x = jnp.tanh(x @ w)
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)

    return lambda ws, x: lax.scan(lambda x, wk: (mark(drop)(x, *wk), None), x, (ws, jax.random.split(KEY, 4)))[0].sum()


def conditional(mark):
    part = mark(lambda x, w: lax.cond((x @ w)[0, 0] > 0, jnp.tanh, lambda y: jnp.sin(y) * 3, x @ w))
    return lambda ws, x: lax.scan(lambda x, w: (part(x, w), None), x, ws)[0].sum()


@jax.custom_vjp
def by_hand(x, w):
    return jnp.tanh(x @ w)


by_hand.defvjp(
    lambda x, w: ((y := jnp.tanh(x @ w)), (x, w, jnp.exp(y))),
    lambda kept, g: ((g * kept[2]) @ kept[1].T, kept[0].T @ (g * kept[2])),
)


def custom(mark):
    part = mark(lambda x, w: lax.optimization_barrier(jnp.sin(by_hand(x, w))))
    return lambda ws, x: lax.scan(lambda x, w: (part(x, w), None), x, ws)[0].sum()


def effects(mark):
    def part(x, w):
        jax.debug.callback(lambda x: None, x[0, 0])
        return jnp.tanh(x @ w)

    return lambda ws, x: lax.scan(lambda x, w: (mark(part)(x, w), None), x, ws)[0].sum()


def microbatches(mark):
    loss = scanned(mark)

    def total(ws, x):
        summed = lax.scan(lambda g, x: (g + jax.grad(loss)(ws, x), None), jnp.zeros_like(ws), x.reshape(2, 8, 8))[0]
        return lax.stop_gradient(summed).sum()

    return total


def in_shard_map(mark):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    run = jax.shard_map(
        lambda ws, x: lax.scan(lambda x, w: (mark(layer)(x, w), None), x, ws)[0],
        mesh=mesh,
        in_specs=(whole, rows),
        out_specs=rows,
    )
    return lambda ws, x: run(ws, x).sum()


ARGS = jnp.sin(jnp.arange(256.0).reshape(4, 8, 8)), jnp.cos(jnp.arange(128.0).reshape(16, 8))
LOSSES = scanned, unrolled, whole_scan, nested, chunks, dropout, conditional, custom, effects, microbatches
KEPT = {
    "nothing": None,
    "products": POLICIES.dots_saveable,
    "names": POLICIES.save_only_these_names("sin"),
    "host": POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["sin"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
CASES = [(loss, "nothing") for loss in LOSSES]
CASES += [(loss, kept) for kept in ("products", "names", "host") for loss in (scanned, unrolled, nested)]


def step(loss, mark):
    return jax.value_and_grad(loss(mark))


def marked(loss, policy=None):
    return step(loss, lambda f: jax.checkpoint(f, policy=policy))


def operations(program):
    """Operations with their parameters and types; loops without what they carry and stack."""
    return Counter(
        (op.name, "" if op.name in LOOPS else param_text(op.params), str([v.shape for v in op.outputs[:1]]))
        for _, op in walk(program.graph)
        if op.name != "return"
    )


@pytest.mark.parametrize(("loss", "kept"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_the_program_is_that_without_checkpoints(loss, kept):
    plain = trace(step(loss, lambda f: f), ARGS)
    found = trace(marked(loss, KEPT[kept]), ARGS, checkpoints=False)
    check_graph(found.graph)
    assert operations(found) == operations(plain)
    assert plain.checkpoints and not found.checkpoints
    assert re.fullmatch(r"jax\.checkpoint is taken out \(remat='replace'\): (.*\.py:\d+(, )?)+", found.notes[-1])


@swept("loss", [nested, scanned, whole_scan, dropout, conditional], kept=[conditional], ids=lambda x: x.__name__)
def test_numbers_are_those_of_the_step(loss):
    found = jax.tree.leaves(run(trace(marked(loss), ARGS, checkpoints=False), *ARGS))
    for x, y in zip(found, jax.tree.leaves(marked(loss)(*ARGS)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_blocks_of_a_shard_map():
    def counts(program):  # scalars need a dim to be stacked
        return Counter(
            op.name for _, op in walk(program.graph) if op.name in ("dot_general", "sin", "cos", "tanh", "mul")
        )

    plain, found = trace(step(in_shard_map, lambda f: f), ARGS), trace(marked(in_shard_map), ARGS, checkpoints=False)
    assert not found.notes[1:]
    assert counts(found) == counts(plain)


def test_results_of_effects_stay_apart():
    """Two equal calls of a host function give two batches."""
    shape = jax.ShapeDtypeStruct(ARGS[1].shape, jnp.float32)

    def draw():
        return next(batches)

    def step(ws):
        def gradient():
            x = io_callback(draw, shape, ordered=True)
            return jax.grad(scanned(jax.checkpoint))(ws, x)

        return gradient() + gradient()

    program = trace(step, ARGS[:1], checkpoints=False)
    assert not program.checkpoints
    results = []
    for call in (step, lambda ws: run(program, ws)):
        batches = iter([np.asarray(ARGS[1]), 1 - np.asarray(ARGS[1])])
        results.append(call(ARGS[0]))
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_roundings_of_a_policy_go_in_bfloat16_too():
    args = [x.astype(jnp.bfloat16) for x in ARGS]
    found = trace(marked(scanned, POLICIES.dots_saveable), args, checkpoints=False)
    assert operations(found) == operations(trace(step(scanned, lambda f: f), args))


def test_what_cannot_be_taken_out_is_named():
    def loss(ws, x):
        return lax.cond(x[0, 0] > 0, lambda x: jax.checkpoint(layer)(x, ws[0]), jnp.sin, x).sum()

    why = "no loop of the forward pass belongs to the cond around it"
    found = trace(jax.grad(loss), ARGS, checkpoints=False)
    assert found.checkpoints and not any("is taken out" in note for note in found.notes)
    assert re.fullmatch(
        rf"dot_general at test_checkpoints.py:\d+ is still computed again: {why} \(remat='replace'\)", found.notes[-1]
    )

    def second(w, x):
        return jax.grad(lambda w: (jax.grad(lambda w: jax.checkpoint(layer)(x, w).sum())(w) ** 2).sum())(w)

    found = trace(second, (ARGS[0][0], ARGS[1]), checkpoints=False)
    assert found.notes[-1].endswith("it reads what the forward pass does not compute (remat='replace')")


def test_a_step_without_checkpoints_is_the_same():
    plain, found = (trace(step(scanned, lambda f: f), ARGS, checkpoints=given) for given in (True, False))
    assert operations(found) == operations(plain) and found.checkpoints and found.notes == plain.notes


def test_name_stacks():
    assert _forward_scope("a/transpose(jvp(b(c)))/rematted_computation/d") == "a/jvp(b(c))/d"
    assert _forward_scope("vmap(transpose(jvp()))/transpose(jvp())/e") == "vmap(jvp())/jvp()/e"
