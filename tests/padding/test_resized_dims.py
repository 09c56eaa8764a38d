"""Windows and reshapes on padded dims: the padded program computes what the program does, wherever it is padded."""

from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from meshdsl.api.plan_variants import plan_best_variant
from meshdsl.api.stages import SLOW_DEVICES
from meshdsl.ir.graph import walk
from meshdsl.layouts.topology import Link, Topology
from meshdsl.padding import pad_program
from meshdsl.padding.min_cut import by_operation, padded_sizes
from meshdsl.padding.resized_dims import merged_dims, padding_groups, with_merged
from meshdsl.padding.uneven_pins import UnevenPins
from meshdsl.pins import UserPins
from meshdsl.trace import trace
from tests.trace.interpreter import run_graph

N, SIZES = 22, {22: 24, 20: 24, 11: 16, 10: 16, 12: 16, 14: 16, 21: 24}
NUMBERS = ("NWC", "WIO", "NWC")


def conv(x, k, padding, stride=1, groups=1, spread=1, holes=1, batches=1):
    return lax.conv_general_dilated(x, k, (stride,), padding, (spread,), (holes,), NUMBERS, groups, batches)


def pool(x, kind, start, window, stride, padding):
    return lax.reduce_window(x, start, kind, (1, window, 1), (1, stride, 1), padding)


def gradient(step, arguments):
    return jax.grad(lambda x, k: jnp.sum(step(x, k) ** 2), arguments)


STEPS = {
    "by weights": gradient(lambda x, k: conv(x, k, "VALID"), 1),
    "by strided weights": gradient(lambda x, k: conv(x, k, "VALID", 2, holes=2), 1),
    "by pooled maxima": gradient(lambda x, k: pool(x, lax.max, -jnp.inf, 9, 1, "VALID"), 0),
    "by pooled maxima of the inside": gradient(
        lambda x, k: pool(jnp.tanh(x[:, :20]), lax.max, -jnp.inf, 7, 1, "VALID"), 0
    ),
    "by pooled minima": gradient(lambda x, k: pool(x, lax.min, jnp.inf, 9, 1, "VALID"), 0),
    "by same maxima": gradient(lambda x, k: pool(x - 9, lax.max, -jnp.inf, 3, 2, "SAME"), 0),
    "by same minima": gradient(lambda x, k: pool(x + 9, lax.min, jnp.inf, 2, 2, "SAME"), 0),
    "by maxima of fewer": gradient(
        lambda x, k: pool(x[:, :21] - 9, lax.max, -jnp.inf, 4, 3, ((0, 0), (1, 3), (0, 0))), 0
    ),
    "by pooled sums": gradient(lambda x, k: pool(x, lax.add, 0.0, 3, 2, "VALID"), 0),
    "valid": lambda x, k: conv(x, k, "VALID"),
    "same": lambda x, k: conv(x, k, "SAME"),
    "twice": lambda x, k: conv(jnp.maximum(conv(x, k, "VALID"), 0.0), k, "VALID"),
    "strided": lambda x, k: conv(x, k, "SAME", 2),
    "strided valid": lambda x, k: conv(x, k, "VALID", 2),
    "spread": lambda x, k: conv(x, k, [(1, 1)], spread=2),
    "holes": lambda x, k: conv(x, k, "SAME", holes=2),
    "asymmetric": lambda x, k: conv(x, k, [(0, 3)]),
    "cropping": lambda x, k: conv(x, k, [(-1, -2)]),
    "depthwise": lambda x, k: conv(x, k[:, :1].repeat(2, 2)[:, :, :4], "VALID", groups=4),
    "groups alone": lambda x, k: conv(x.transpose(0, 2, 1), k[:, :1, :1].repeat(N, 2), "SAME", groups=N),
    "groups of the batch alone": lambda x, k: conv(x.transpose(1, 0, 2), k[:, :, :1].repeat(N, 2), "SAME", batches=N),
    "pooled": lambda x, k: pool(x, lax.max, -jnp.inf, 3, 1, "VALID"),
    "pooled same": lambda x, k: pool(x, lax.add, 0.0, 3, 1, "SAME"),
    "pooled strided": lambda x, k: pool(x, lax.min, jnp.inf, 2, 2, "VALID"),
    "pooled far": lambda x, k: pool(x, lax.max, -jnp.inf, 3, 2, ((0, 0), (1, 3), (0, 0))),
    "pooled twice": lambda x, k: pool(pool(x, lax.add, 0.0, 3, 1, "VALID"), lax.max, -jnp.inf, 2, 1, "SAME"),
    "over channels": lambda x, k: lax.reduce_window(x, 0.0, lax.add, (1, 1, 2), (1, 1, 2), "VALID"),
    "merged": lambda x, k: (x.transpose(1, 0, 2).reshape(N * 2, 4) * 2.0).sum(0),
    "merged and split": lambda x, k: jnp.tanh(x.transpose(1, 0, 2).reshape(N * 8)).reshape(N, 8).max(0),
    "split": lambda x, k: (x.reshape(2, 11, 2, 4) + 1.0).sum(1),
    "rows of all": lambda x, k: jax.nn.softmax((x[0] @ k[0]).reshape(N * 4)),
    "running": lambda x, k: lax.cumsum(x, 1) * 2.0 + lax.cummax(x, 1, reverse=True),
    "running back": lambda x, k: lax.cumsum(jnp.sign(x), 1, reverse=True) - lax.cumlogsumexp(x, 1, reverse=True),
    "products": lambda x, k: lax.cumprod(jnp.sign(x), 1, reverse=True) + lax.cummin(x, 1),
    "solved": lambda x, k: jnp.linalg.cholesky(jnp.einsum("bni,bnj->nij", x, x) + 4 * jnp.eye(4)).sum((1, 2)),
    "transformed": lambda x, k: jnp.abs(jnp.fft.rfft(x)).sum(1),
}


def everything(graph, sizes):
    longer = with_merged(graph, sizes)
    return by_operation((op, group) for _, op in walk(graph) for group in padding_groups(op, longer))


def drawn(kind):
    rng = np.random.default_rng(0)
    x, k = rng.integers(-3, 4, (2, N, 4)).astype(np.float32), rng.integers(-2, 3, (3, 4, 4)).astype(np.float32)
    if kind == "wild":
        x.flat[rng.integers(0, x.size, 4)] = [np.inf, -np.inf, np.nan, np.inf]
    return x, k


@pytest.mark.parametrize("kind", ["tame", "wild"])
def test_every_step_padded_everywhere(kind):
    args = drawn(kind)
    programs = {}
    for name, step in STEPS.items():
        if kind == "wild" and name in ("solved", "transformed"):
            continue
        program = trace(step, args)
        with patch("meshdsl.padding.rewrite.padded_groups", everything):
            programs[name] = program, pad_program(program, SIZES)
        assert any({16, 24, 48, 96, 192} & {*v.shape} for _, op in walk(programs[name][1].graph) for v in op.outputs)
    run = jax.jit(lambda *xs: {name: [run_graph(p.graph, xs) for p in both] for name, both in programs.items()})
    for name, (before, after) in run(*args).items():
        np.testing.assert_allclose(np.asarray(after[0]), np.asarray(before[0]), rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", ["valid", "same", "pooled", "pooled strided", "merged", "twice"])
def test_gradients_padded_where_it_pays(name):
    args = drawn("tame")
    program = trace(jax.grad(lambda x, k: jnp.square(STEPS[name](x, k)).sum(), (0, 1)), args)
    after = pad_program(program, {**SIZES, 2 * N: 48})
    assert after is not program
    for got, expected in zip(*(jax.jit(lambda *xs, p=p: run_graph(p.graph, xs))(*args) for p in (after, program))):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_merged_dims():
    def of(before, after):
        (op,) = (op for op in trace(lambda x: x.reshape(after), (np.ones(before),)).graph.ops if op.name == "reshape")
        return merged_dims(op)

    assert of((30, 16, 8), (480, 8)) == [(0, 0)]
    assert of((480, 8), (30, 16, 8)) == [(0, 0)]
    assert of((4, 30, 16), (4, 480)) == [(1, 1)]
    assert of((30, 16), (16, 30)) == []
    assert of((6, 5, 7, 3), (30, 21)) == [(0, 0), (2, 1)]
    assert of((30, 1, 4), (30, 4)) == []
    graph = trace(lambda x: jnp.tanh(x.reshape(480, 8)).reshape(60, 8, 8), (np.ones((30, 16, 8)),)).graph
    assert with_merged(graph, {30: 32}) == {30: 32, 480: 512, 60: 64}


def test_reductions_alone_are_candidates_and_only_of_long_dims():
    mesh = md.Mesh(x=8)
    step = lambda x: jax.nn.softmax(x, axis=0).max(0)  # noqa: E731
    assert padded_sizes(trace(step, (np.ones((103, 4)),)), mesh) == {103: 104}
    assert padded_sizes(trace(step, (np.ones((103, 4)),)), mesh, reductions=False) == {}
    assert padded_sizes(trace(step, (np.ones((30, 4)),)), mesh) == {}
    assert padded_sizes(trace(jnp.tanh, (np.ones((103, 4)),)), mesh) == {}


FREE_LINKS = Topology("free links", 1e10, 1e10, 4e9, 4e9, 0.0, (Link(0.0, 1e8),))


def valid_layers(x, k):
    """Two convolutions, pooling and a mean: 2046, 2044 and 2042 rows of 2048 that are split."""
    h = jax.nn.relu(conv(x, k, "VALID"))
    h = pool(conv(h, k, "VALID"), lax.max, -jnp.inf, 3, 1, "VALID")
    return jnp.mean(h * h)


def test_layers_that_each_lose_some_rows_stay_split():
    mesh = md.Mesh(x=8, topology=FREE_LINKS)
    args = jax.ShapeDtypeStruct((2, 2048, 16), jnp.float32), jax.ShapeDtypeStruct((3, 16, 16), jnp.float32)
    plan = plan_best_variant(trace(valid_layers, args), mesh, UserPins({"x": "x=S(1)", "k": "x=B"})).plan
    assert dict(plan.padded).keys() == {2046, 2044, 2042}
    assert plan.bytes == 3 * 2 * 2 * 16 * 4 + 7  # halos of two rows, and the sum
    step = jax.grad(valid_layers, (0, 1))
    plan = plan_best_variant(trace(step, args), mesh, UserPins({"x": "x=S(1)", "k": "x=B"})).plan
    assert plan.bytes < 12 * 2 * 2 * 16 * 4 + 2 * 3 * 16 * 16 * 4  # both ways, and the gradient of the weights


def test_pooling_of_an_odd_length_stays_split():
    """The gradient of maxima three wide and two apart: windows would see the padding of 495 rows to 496."""

    def step(k, x):
        return jnp.sum(jnp.tanh(pool(jnp.tanh(x @ k), lax.max, -jnp.inf, 3, 2, "SAME")) ** 2)

    args = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((2, 495, 8), jnp.float32)
    pins = UserPins({"k": "x=B", "x": "x=S(1)"}, uneven="pad")
    mesh = md.Mesh(x=8, topology=FREE_LINKS)
    written = trace(jax.grad(step), args)
    program = UnevenPins.of(written, mesh, pins).constrained(written)
    assert plan_best_variant(program, mesh, pins).plan.bytes < 16 * 2 * 8 * 4 + 2 * 8 * 8 * 4


def test_they_run():
    rng = np.random.default_rng(0)
    args = rng.normal(size=(2, 256, 4)).astype(np.float32), rng.normal(size=(3, 4, 4)).astype(np.float32)
    sharded = md.parallelize(
        jax.value_and_grad(valid_layers, (0, 1)), md.Mesh(x=8, topology=SLOW_DEVICES), {"x": "x=S(1)", "k": "x=B"}
    )
    assert sharded.plan(*args).padded
    assert sharded.check(*args).divided["x"] > 0.5
    sharded.verify(*args)


STATISTICS = {
    "norm": lambda x: (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-3),
    "softmax": lambda x: jax.nn.softmax(x, 0),
    "means": lambda x: (x.mean(), x.mean(0), x.max(), jnp.linalg.norm(x, axis=1).min()),
    "extremes": lambda x: (x.argmax(0), x.min(0), (x > 0).any(0), jnp.prod(jnp.sign(x), 0)),
    "logsumexp": lambda x: jax.nn.logsumexp(x, 0) - jnp.log(jnp.sum(jnp.exp(x), axis=0)),
    "gradient": jax.grad(lambda x: jnp.square(jax.nn.log_softmax(x, 0)).mean()),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_over_an_odd_length(name):
    """Padded because a constraint asks for it, so whatever it costs."""
    x = np.random.default_rng(0).normal(size=(103, 4)).astype(np.float32)
    sharded = md.parallelize(lambda x: STATISTICS[name](md.constrain(x, "x=S(0)")), "x=8")
    assert sharded.plan(x).padded == ((103, 104),)
    sharded.check(x)
    sharded.verify(x)
