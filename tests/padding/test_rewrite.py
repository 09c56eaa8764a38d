"""The padded program computes what the program does, wherever it is padded and whatever its inputs hold."""

from functools import partial
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax

import meshdsl as md
from meshdsl.ir.graph import walk
from meshdsl.padding import pad_program
from meshdsl.padding.min_cut import by_operation, padded_groups
from meshdsl.rules.dim_groups import dim_groups
from meshdsl.trace import trace
from tests.trace.interpreter import run_graph

N, M = 11, 3
SIZES = {N: 16}
PLACES = np.array([0, 10, 11, 13, 15, 16, 99, -1, -3, 5], np.int32)  # in bounds, in the padding, beyond it, below zero


def everywhere(graph, sizes):
    return somewhere(graph, sizes, lambda: True)


def somewhere(graph, sizes, picks):
    """Strands of the right length that ``picks`` says, instead of the cheapest cut."""
    return by_operation((op, s) for _, op in walk(graph) for s in dim_groups(op) if s.size in sizes and picks())


def padded(step, args, cut=everywhere):
    program = trace(step, args)
    with patch("meshdsl.padding.rewrite.padded_groups", cut):
        return program, pad_program(program, SIZES)


def assert_same(step, args, cut=everywhere, compiled=jax.jit):
    before, after = padded(step, args, cut)
    both = compiled(lambda *xs: (run_graph(before.graph, xs), run_graph(after.graph, xs)))
    for leaf, a, b in zip(before.outputs, *both(*jax.tree.leaves(args)), strict=True):
        np.testing.assert_array_equal(np.asarray(b), np.asarray(a), err_msg=leaf.path)
    return after


def tame(x):
    """Whole numbers that stay small, so that sums are exact in any order."""
    return jnp.where(jnp.abs(x) <= 64, x, jnp.where(jnp.isfinite(x), jnp.sign(x) * 2, x))


def table(x):
    """Anything as [N, M]."""
    return x if x.shape == (N, M) else x.T if x.shape == (M, N) else jnp.broadcast_to(x[:, None], (N, M))


def looked_up(mode):
    return lambda x, y: table(x).at[PLACES].get(mode=mode, fill_value=-7).sum(0) + table(y)


def added_to(mode):
    return lambda x, y: table(x).at[PLACES].add(table(y)[: len(PLACES)], mode=mode)


STEPS = {
    "add": lambda x, y: table(x) + table(y),
    "mul": lambda x, y: table(x) * table(y),
    "sub": lambda x, y: x - table(y)[:, 0] if x.shape == (N,) else x - 1.0,
    "scale": lambda x, y: x * 2.0,
    "shift": lambda x, y: x + 1.0,
    "divide": lambda x, y: jnp.where(y == 0, x, x) / 1.0 if x.shape == y.shape else 1.0 / x,
    "max": lambda x, y: jnp.maximum(table(x), table(y)),
    "select": lambda x, y: jnp.where(table(y) > 0, table(x), 0.0),
    "where inf": lambda x, y: jnp.where(jnp.isinf(x), x, -x),
    "transpose": lambda x, y: x.T,
    "reshape": lambda x, y: (table(x).reshape(N, 1, M) + 1).reshape(N, M),
    "column": lambda x, y: table(x)[:, 1],
    "joined": lambda x, y: jnp.concatenate([table(x), table(y)], 1)[:, 2:5],
    "reversed": lambda x, y: table(x)[:, ::-1],
    "turned": lambda x, y: x[::-1],
    "running": lambda x, y: lax.cumsum(table(x), 0),
    "running across": lambda x, y: lax.cumsum(table(x), 1),
    "sorted across": lambda x, y: jnp.sort(table(x), 1),
    "positions": lambda x, y: x + lax.broadcasted_iota(jnp.float32, x.shape, 0),
    "sum": lambda x, y: table(y) - table(x).sum(0),
    "sum across": lambda x, y: table(x).sum(1),
    "product": lambda x, y: table(y) * jnp.sign(jnp.prod(jnp.sign(table(x)), 0)),
    "most": lambda x, y: table(y) + table(x).max(0),
    "least": lambda x, y: table(y) + table(x).min(0),
    "any": lambda x, y: jnp.where((table(x) > 2).any(0), table(y), 1.0),
    "all": lambda x, y: jnp.where((table(x) > -2).all(0), table(y), 1.0),
    "argmax": lambda x, y: table(y) + jnp.argmax(table(x), 0).astype(jnp.float32),
    "argmin": lambda x, y: table(y) + jnp.argmin(table(x), 0).astype(jnp.float32),
    "largest": lambda x, y: table(y) + sum(lax.top_k(table(x).T, 3)).sum(1),
    "dot": lambda x, y: table(y) @ (table(x).T @ table(y)),
    "outer": lambda x, y: tame(table(x) @ table(y).T) @ table(x),
    "batched": lambda x, y: jnp.einsum("nk,nj->nk", table(x), table(y)),
    "one hot": lambda x, y: table(x) + jax.nn.one_hot(jnp.array([2, 10, 12]), N).T,
    "rows": lambda x, y: tame(table(x))[jnp.clip(jnp.nan_to_num(table(y)[:, 0], posinf=14), -3, 14).astype(jnp.int32)],
    "along": lambda x, y: table(y) + jnp.take_along_axis(table(x), jnp.array([[1, 12, 10]]), 0, mode="fill"),
    "filled": looked_up("fill"),
    "clipped": looked_up("clip"),
    "promised": looked_up("promise_in_bounds"),
    "pairs": lambda x, y: table(y) + table(x).at[PLACES[:M], jnp.arange(M)].get(mode="clip"),
    "add dropped": added_to("drop"),
    "add clipped": added_to("clip"),
    "set row": lambda x, y: lax.dynamic_update_slice(table(x), table(y)[:, :1], (0, 1)),
    "cut columns": lambda x, y: lax.dynamic_slice(table(x), (0, 1), (N, 1))[:, 0],
}


def drawn(kind, seed):
    """Two tables of small whole numbers, with infinities and NaN among them if they are to be "wild"."""
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((N, M), (M, N)))
    for z in (x, y) if kind == "wild" else ():
        at = rng.integers(0, z.size, 5)
        z.flat[at] = rng.choice([np.inf, -np.inf, np.nan], 5)
    return x, y


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=6),
    operands=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=6, max_size=6),
    kind=st.sampled_from(["tame", "wild"]),
    chance=st.sampled_from([0.5, 0.9, 1.0]),
    seed=st.integers(0, 999),
)
def test_random_programs(names, operands, kind, chance, seed):
    def step(*pool):
        pool = list(pool)
        for name, (i, j) in zip(names, operands, strict=False):
            pool.append(tame(STEPS[name](pool[i % len(pool)], pool[j % len(pool)])))
        return pool[2:]

    rng = np.random.default_rng(seed)
    assert_same(step, drawn(kind, seed), lambda graph, sizes: somewhere(graph, sizes, lambda: rng.random() < chance))


@pytest.mark.parametrize("kind", ["tame", "wild"])
def test_every_step_by_itself(kind):
    after = assert_same(lambda x, y: {n: tame(step(x, y)) for n, step in STEPS.items()}, drawn(kind, 0))
    assert any(16 in v.shape for _, op in walk(after.graph) for v in op.outputs)


def stacked(x, y):
    """Consts, carries, rows that are read and rows that are made; the columns of both are the long dim."""

    def trip(carry, row):
        total, most = carry
        return (tame(total + row * x.sum()), jnp.maximum(most, row + x.ravel()[:N])), tame(row - total)

    (total, most), made = lax.scan(trip, (jnp.zeros(N), jnp.ones(N)), table(y).T)
    return made.T + total[:, None] * most.max()


def counted(x, y):
    """The condition reads a const and the carry."""

    def go_on(state):
        i, z = state
        return (i < 3) & (jnp.nan_to_num(z).sum() * table(y)[0, 0] < 50)

    return lax.while_loop(go_on, lambda s: (s[0] + 1, tame(s[1] + table(x) * table(y))), (0, table(x)))[1]


def branched(x, y):
    return lax.cond(x.ravel()[0] > 0, lambda a, b: a + b, lambda a, b: lax.cumsum(b, 0), table(x), table(y))


@pytest.mark.parametrize("step", [stacked, counted, branched])
@pytest.mark.parametrize("chance", [0.4, 0.7, 1.0])
@pytest.mark.parametrize("kind", ["tame", "wild"])
def test_loops(step, chance, kind):
    """What a loop hands on is padded inside and outside, or on one side alone."""
    rng = np.random.default_rng(int(10 * chance))
    cut = partial(somewhere, picks=lambda: rng.random() < chance)
    after = assert_same(step, drawn(kind, 1), cut, compiled=lambda run: run)
    inside = [v for op in after.graph.ops for body in op.bodies for v in body.inputs if 16 in v.shape]
    assert inside or chance < 1


def test_reductions_of_every_type():
    def step(x):
        whole = [x.astype(t) for t in (jnp.int8, jnp.uint8, jnp.int32, jnp.bfloat16, jnp.float16)]
        reduced = [f(y, 0) for y in whole for f in (jnp.sum, jnp.prod, jnp.max, jnp.min, jnp.argmax, jnp.argmin)]
        bits = [f(whole[i], (0,)) for i in (0, 1, 2) for f in (lax.reduce_or, lax.reduce_and, lax.reduce_xor)]
        ends = [f(lax.complex(x, -x), (0,)) for f in (lax.reduce_max, lax.reduce_min)]  # ordered as pairs
        return [*reduced, *bits, *ends, lax.reduce_and(x > 0, (0,)), lax.reduce_or(x > 9, (0,))]

    assert_same(step, (np.random.default_rng(1).integers(1, 4, (N, M)).astype(np.float32),))


def test_extremes_of_nothing_but_infinities():
    def step(x):
        return x.max(0), (-x).min(0), jnp.argmax(x, 0), jnp.argmin(-x, 0), *lax.top_k(x.T, 2), *lax.top_k(x.T, N)

    assert_same(step, (np.full((N, M), -np.inf, np.float32),))


@pytest.mark.parametrize(("dtype", "looked_up"), [(jnp.int8, False), (jnp.uint8, True), (jnp.int16, True)])
def test_narrow_indices_cannot_name_the_padding(dtype, looked_up):
    numbers = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    program = trace(
        lambda t, at: lax.gather(t, at, numbers, (1,), mode="fill"),
        (np.arange(100, dtype=np.float32), np.zeros((4, 1), dtype)),
    )
    assert [s.ports for s in dim_groups(program.graph.ops[0]) if s.size == 100] == [((0, 0),)] * looked_up


def test_loops_are_padded_inside():
    def step(w, xs):
        def trip(carry, x):
            logits = x @ w.T
            return carry + jax.nn.relu(logits - logits.max(-1, keepdims=True) + 1) @ w, logits.argmax(-1)

        return lax.scan(trip, jnp.zeros((4, M)), xs)

    rng = np.random.default_rng(2)
    args = tuple(rng.integers(-2, 3, shape).astype(np.float32) for shape in ((N, M), (5, 4, M)))
    before, after = padded(step, args)
    got, expected = (run_graph(p.graph, [jnp.asarray(x) for x in args]) for p in (after, before))
    assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))
    assert [op.outputs[0].shape for _, op in walk(after.graph) if op.name == "pad"]


def test_effects_keys_and_boundaries_see_the_written_size():
    def step(w, x):
        y = md.constrain(x @ w, "model=S(1)")
        jax.debug.callback(lambda z: None, y)
        return y, jax.random.normal(jax.random.key(0), (4, N)) + y

    _, after = padded(step, (np.ones((M, N), np.float32), np.ones((4, M), np.float32)))
    for op in after.graph.ops:
        if op.name in ("debug_callback", "random_bits", "return"):
            assert not any(16 in v.shape for v in (*op.inputs, *op.outputs))
    assert next(op for op in after.graph.ops if op.name == "constrain").outputs[0].shape == (4, 16)


def test_the_cut_leaves_the_optimizer_alone():
    def step(w, m, x, y):
        def loss(w):
            logits = x @ w.T
            return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[:, None], -1)[:, 0]).mean()

        g = jax.grad(loss)(w)
        m = 0.9 * m + g + 0.01 * w
        return w - 0.1 * m, m

    w = np.ones((N, M), np.float32)
    program = trace(step, (w, w, w[:8], np.zeros(8, np.int32)))
    after = pad_program(program, SIZES)
    pads = [op.inputs[0] for op in after.graph.ops if op.name == "pad"]
    slices = [op for op in after.graph.ops if op.name == "slice" and 16 in op.inputs[0].shape]
    assert len(pads) == 1 and len(slices) == 1
    phases = {op.phase for op in after.graph.ops if any(16 in v.shape for v in op.outputs)}
    assert phases == {"forward", "backward"}


def test_without_a_product_lookup_or_reduction_nothing_is_padded():
    program = trace(lambda x: jnp.exp(x) + 1, (np.ones(N, np.float32),))
    assert pad_program(program, SIZES) is program


def test_reductions_are_worth_padding_for_lengths_that_no_product_has():
    def step(x, w):
        return jnp.square(x).sum(0), (w @ w.T).sum(), jnp.square(w).sum(0)

    program = trace(step, (np.ones((N, M), np.float32), np.ones((M, N + 2), np.float32)))
    chosen = padded_groups(program.graph, {N: 16, N + 2: 16})
    assert {op.name for op, groups in chosen.items() if any(g.size == N for g in groups)} == {"square", "reduce_sum"}
    assert padded_groups(program.graph, {N: 16}, reductions=False) == {}
