"""Slices, pads, updates and shifts at odd lengths and places: the traced program computes what the step does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshdsl.trace import trace
from tests.stencils import with_gradient
from tests.sweeps import swept
from tests.trace.interpreter import run

LENGTHS = (8, 9)


def equal(step, *args, compiled=jax.jit):
    program = trace(step, args)
    made, expected = compiled(lambda *xs: run(program, *xs))(*args), jax.jit(step)(*args)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        largest = np.max(np.abs(b), initial=1.0, where=np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * largest)
    return program.graph


def positions(x):
    """Positions count from the first element of a slice, the first of equal ones wins."""
    d = jnp.round(x[1:] - x[:-1])
    return jnp.argmax(d, 0), jnp.argmin(d, 0), lax.top_k(d.T, 2), jnp.argmax(jnp.full_like(d, -jnp.inf), 0)


def running(x):
    d = x[1:] - x[:-1]
    return [jnp.pad(f(d, 0), ((0, 1), (0, 0))) for f in (jnp.cumsum, jnp.cumprod, lax.cummax, lax.cumlogsumexp)] + [
        jnp.pad(lax.cumsum(d, 0, reverse=True), ((1, 0), (0, 0)))
    ]


def sorted_inside(x):
    """A form that needs the elements and no others, between two that do not."""
    d = x[1:] - x[:-1]
    return jnp.sum(jnp.sort(d, 0) * d), x.at[1:].set(jnp.sort(d, 0) - d)


def infinite(x):
    """What stands beside the elements is infinite or NaN, and never seen."""
    r = jnp.log(x[2:] / x[:-2]) / (x[2:] - x[:-2])
    return jnp.max(r), jnp.min(r), jnp.sum(r), jnp.prod(r / 4), r.T @ r, x.at[1:-1].multiply(r)


def kinds_of_updates(x):
    d = x[1:] - x[:-1]
    y = x.at[1:].add(d).at[:-1].subtract(d * 2).at[1:].multiply(d).at[:-1].min(d).at[1:].max(-d)
    return y.at[1:].divide(d + 9).at[0].power(2.0).at[-1].apply(jnp.sin)


def outside(x):
    """Static positions out of bounds, clipped or dropped."""
    n = len(x)
    return (
        x.at[n + 3].set(0.0),
        x.at[-n - 2].add(5.0),
        x.at[jnp.array([n - 1, n])].set(1.0),
        x.at[jnp.arange(0, 3 * n, 3)].set(2.0, mode="drop"),
        lax.dynamic_update_slice(x, x[:2] * 3, (n - 1, 5)),
        lax.dynamic_slice(x, (n, -4), (2, 3)),
        x.at[jnp.array([n - 2, n + 1])].get(mode="clip"),
    )


def strides(x):
    n = len(x)
    return (
        x[::2],
        x[1::3],
        x[n - 1 :: -2],
        x.at[1::2].set(7.0),
        x.at[::3].add(x[::3]),
        jnp.pad(x[1::2], ((0, 3), (0, 0))),
    )


def frames(x):
    """Windows looked up by their positions: each as a row, or a column, apart or mixed up."""
    n = len(x)
    each, turned = np.arange(n - 2)[:, None] + np.arange(3), jnp.arange(2)[:, None] + 2 * jnp.arange(n // 2)
    mixed = np.arange(n - 3)[:, None] + np.array([3, 0, 1])
    columns = jnp.take(x, jnp.arange(4)[:, None] + jnp.arange(2), axis=1)
    repeated = jnp.arange(n)[:, None] + jnp.zeros((1, 2), int)
    outside = jnp.take(x, jnp.arange(n)[:, None] + jnp.arange(2), axis=0, mode="clip")
    return x[each], x[turned] * 2, x[mixed], columns, x[repeated], outside, x.at[mixed].add(x[each][:-1] ** 2)


def runs(x):
    """Positions in a few runs, which may overlap, or in none."""
    n = len(x)
    which, columns = np.r_[2 : n - 1, 0:5], jnp.concatenate([jnp.arange(4), jnp.arange(2, 6)])
    outside = x.at[jnp.arange(3, n + 3)].get(mode="fill", fill_value=2.0)
    return x[which] * 2, x[:, columns], x[np.array([3, 1, 0, 5])], x.at[which].add(x[which] ** 2), outside


def kept_dims(x):
    """Lookups of blocks of one element, whose dim the result keeps."""
    row, n = x[:, 0], len(x)
    each = jax.vmap(lambda i: lax.dynamic_slice_in_dim(row, i, 1))
    frames, runs, strided = np.arange(n - 2)[:, None] + np.arange(3), np.r_[2 : n - 1, 0:5], np.arange(0, n, 2)
    return jax.vmap(each)(frames), each(runs) * 2, each(strided)


def between(x):
    return lax.pad(x[1:], 2.0, ((3, 2, 1), (0, 0, 0))), lax.pad(x, 0.0, ((-1, 4, 2), (1, -1, 0)))


def both_dims(x):
    inner = x[1:-1, 1:-1] * 2
    return x.at[1:-1, 1:-1].set(inner), x.at[1:-1, 1].add(inner[:, 0]), jnp.pad(x[2:, 1:], ((1, 1), (0, 1)))


def joined(x):
    n = len(x)
    return jnp.concatenate([x[: n // 2], x[:1], x[n // 2 : -1]]), jnp.concatenate([x[1:] - x[:-1], x[1:] + x[:-1]])


def reversed_(x):
    d = x[1:] - x[:-1]
    return jnp.sum(d[::-1] * d), x.at[1:].set(d[::-1])


def in_loops(x):
    """A short carry, short slices of a stack, a short result, and a condition on a reduction."""
    d = x[1:] - x[:-1]

    def body(carry, row):
        carry = carry * 0.5 + row
        return carry, carry[1:] - carry[:-1]

    last, stack = lax.scan(body, d, jnp.stack([d, 2 * d, d * d]))
    looped = lax.while_loop(lambda c: jnp.sum(c**2) > 0.1, lambda c: c / 2, d)
    chosen = lax.cond(jnp.max(d) > 0, lambda c: c * 2, lambda c: c - 1, d)
    return x.at[1:].add(last + chosen), jnp.sum(stack), x.at[:-1].add(looped)


def counted(x):
    d = x[1:] - x[:-1]
    return jnp.sum(d * jnp.arange(len(d))[:, None]), x.at[1:].set(
        jnp.broadcast_to(jnp.arange(len(d))[:, None] * 1.0, d.shape)
    )


def looked_up(x):
    """Short queries, and updates that are added up by them."""
    which = jnp.clip(jnp.round(x[1:, 0] * 2).astype(int), 0, len(x) - 1)
    return jnp.sum(x[which] * x[1:]), jnp.zeros_like(x).at[which].add(x[:-1])


def ghosts(x):
    p = jnp.sin(jnp.pad(x, ((1, 1), (0, 0)), mode="reflect"))
    flux = (p[1:] + p[:-1]) * jnp.arange(len(x) + 1)[:, None]
    return flux[1:] - flux[:-1], flux[0], jnp.max(flux[1:-1]), jnp.split(p, [1, len(x) + 1])


def shifted_sums(x):
    def loss(x):
        a, b = x[3:] * x[:-3], jnp.sin(x[2:]) * x[:-2]
        return jnp.sum(a**2) + jnp.sum(b**3) + jnp.sum((0.5 * x[1:] + 2 * x[:-1]) ** 2)

    return jax.grad(loss)(x)


WITH_GRADIENTS = (
    infinite,
    running,
    both_dims,
    joined,
    reversed_,
    counted,
    looked_up,
    ghosts,
    strides,
    between,
    frames,
    runs,
    kept_dims,
)
FORWARD = (positions, sorted_inside, kinds_of_updates, outside, shifted_sums)


@swept("length", LENGTHS, kept=(9,))
def test_computes_the_same(length):
    x = np.random.default_rng(length).uniform(0.5, 2.0, (length, 6)).astype("f")
    equal(lambda x: [f(x) for f in FORWARD] + [with_gradient(f)(x) for f in WITH_GRADIENTS], x)


@pytest.mark.parametrize("length", [8, 9])
def test_in_loops(length):
    x = np.random.default_rng(length).uniform(0.5, 2.0, (length, 3)).astype("f")
    equal(in_loops, x, compiled=lambda f: f)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "bfloat16", "complex64"])
def test_of_other_dtypes(dtype):
    x = np.random.default_rng(1).integers(0, 3, (8, 4)).astype(jnp.dtype(dtype))

    def step(x):
        first = x.at[1:-1].set(x[2:]) if dtype == "bool" else x.at[1:-1].add(x[2:] * x[:-2])
        changed = x[1:] != x[:-1]
        p = jnp.concatenate([x[-1:], x, x[:1]])
        return first.real * 1, jnp.sum(changed, 0), jnp.any(changed), p[2:].real * 1, x[-1].real * 1

    equal(step, x)


def test_keys_are_left_alone():
    def step(seed):
        keys = jax.random.split(jax.random.key(seed), 8)
        pairs = jnp.concatenate([keys[:1], keys[1:]])
        return jax.vmap(jax.random.uniform)(pairs[:-1]), jax.random.key_data(keys[1:])

    equal(step, 3)


def names(graph):
    return [op.name for op in graph.ops]


def chained(x):
    """The start is the end of a chain of operations, each of which reads the one before twice."""
    at = lax.full((), 1, "int32")
    for _ in range(600):
        at = at * at + 1
    return lax.dynamic_slice_in_dim(x, at, 2), lax.dynamic_update_slice_in_dim(x, -x[:2], at & 3, 0)


def wrapped(x):
    return x.at[lax.iota("uint8", 2) * jnp.uint8(100) + jnp.uint8(200)].get(mode="promise_in_bounds")


def chosen(x):
    return lax.dynamic_slice_in_dim(x, lax.select_n(lax.full((), 2, "int32"), *map(jnp.int32, (5, 6, 7))), 1)


@pytest.mark.parametrize("step", [chained, wrapped, chosen])
def test_indices_are_evaluated_as_the_step_computes_them(step):
    equal(step, jnp.arange(512.0))


@pytest.mark.parametrize(("length", "grid"), [(16, 16), (12, 12), (17, 17), (18, 18), (14, 14), (15, 15)])
def test_differences_are_as_long_as_the_array_unless_they_divide_better(length, grid):
    """A difference of 17 elements has 16, which divide as they are."""
    graph = equal(lambda x: jnp.sum(jnp.sin(x[1:] - x[:-1])), np.arange(length, dtype="f"))
    (found,) = {op.outputs[0].shape[0] for op in graph.ops if op.name == "sin"}
    assert found == (grid if grid % 2 == 0 else grid - 1)


def test_long_arrays_that_are_used_whole_stay():
    """Slices are not pushed through what is computed anyway, nor through a dim that divides."""
    graph = equal(lambda x: (jnp.sin(x)[2:] - jnp.sin(x)[:-2], jnp.sin(x)), np.arange(64, dtype="f"))
    assert names(graph).count("sin") == 1
