"""Programs with loops and transforms that partitioners gather: right numbers, and nothing gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md

MESH = md.Mesh(x=4, y=2)


def array(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def checked(step, args, layouts, **options):
    """The plan, once numbers and compiled collectives are right."""
    sharded = md.parallelize(step, MESH, layouts, **options)
    sharded.check(*args)
    sharded.verify(*args)
    return sharded.plan(*args)


def microbatches(w, x):
    """T2: the rows that are split are dealt to two microbatches."""

    def loss(w, rows):
        return jnp.mean(jnp.tanh(rows @ w) ** 2)

    rows = x.reshape(2, -1, x.shape[1])
    return w - 0.1 * jax.lax.scan(lambda g, r: (g + jax.grad(loss)(w, r), None), jnp.zeros_like(w), rows)[0]


def test_rows_dealt_to_microbatches_are_not_gathered():
    args = (array(0, 2048, 64), array(1, 1024, 2048))
    free = checked(microbatches, args, {"x": "x=S(0)", "w": "x=B y=B"})
    by_hand = md.parallelize(microbatches, MESH, {"x": "x=S(0) y=B", "w": "x=B y=B"}).plan(*args)
    assert not [c for c in free.collectives if c.kind == "all-gather" and c.value == "x"]
    assert free.seconds <= by_hand.seconds * (1 + 1e-9)


def test_a_scan_over_dealt_rows_gathers_nothing():
    def step(x):
        return jax.lax.scan(lambda c, r: (c + jnp.tanh(r), None), jnp.zeros((4, 64)), x.reshape(2, 4, 64))[0]

    plan = checked(step, (array(0, 8, 64),), {"x": "x=S(0)"})
    assert [c.kind for c in plan.collectives] == ["all-to-all"]


@pytest.mark.parametrize("table", ["x=B y=B", "x=S(0) y=B", "x=S(1) y=B", "x=S(0) y=S(1)"])
def test_rows_added_to_a_table_in_a_loop(table):
    """T6: the gradient of an embedding, accumulated over microbatches; rows collide within and between them."""
    ids, rows = jax.random.randint(jax.random.key(0), (4, 64), 0, 48), array(1, 4, 64, 16)

    def step(ids, rows):
        def add(total, batch):
            return total.at[batch[0]].add(batch[1]), None

        return jax.lax.scan(add, jnp.zeros((48, 16)), (ids, rows))[0]

    sharded = md.parallelize(step, MESH, {"*": "x=S(1)"}, outputs={"**": table})
    sharded.verify(ids, rows)
    expected = np.zeros((48, 16), np.float64)
    np.add.at(expected, np.asarray(ids), np.asarray(rows, np.float64))
    np.testing.assert_allclose(sharded(ids, rows), expected, rtol=1e-5, atol=1e-5)


def fourier(w, x):
    """A Fourier operator on lines: the lowest frequencies of each are mixed over channels."""

    def loss(w):
        low = jnp.fft.rfft(x, axis=1)[:, :8]
        mixed = jnp.einsum("bkc,kcd->bkd", low, w[0] + 1j * w[1])
        return jnp.mean(jnp.fft.irfft(jnp.pad(mixed, ((0, 0), (0, 25), (0, 0))), axis=1) ** 2)

    return w - 0.1 * jax.grad(loss)(w)


def test_transforms_of_other_dims_are_local():
    """T25: the batch is split."""
    plan = checked(lambda x: jnp.fft.ifft2(jnp.fft.fft2(x) * 2).real, (array(0, 16, 8, 8),), {"x": "x=S(0)"})
    assert plan.collectives == ()


def test_the_gradient_of_a_fourier_operator_is_reduced_once():
    args, layouts = (array(0, 2, 8, 16, 16), array(1, 64, 64, 16)), {"w": "x=B y=B", "x": "x=S(0) y=S(0)"}
    plan = checked(fourier, args, layouts)
    assert [(c.kind, c.axes, c.bytes) for c in plan.collectives] == [("all-reduce", ("x", "y"), 7 / 4 * args[0].nbytes)]


def recurrence(a, b):
    """A linear recurrence over time, all steps at once."""

    def then(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(then, (a, b))[1]


def largest_so_far(a, b):
    """From the end."""
    return jax.lax.associative_scan(jnp.maximum, a * b, reverse=True)


def gradient_of_recurrence(a, b):
    return jax.grad(lambda a, b: jnp.sum(jnp.sin(recurrence(a, b))), (0, 1))(a, b)


SPLIT_TIME = {"layouts": {"*": "x=S(0) y=B"}, "outputs": {"**": "x=S(0) y=B"}}


@pytest.mark.parametrize("step", [gradient_of_recurrence, largest_so_far])
def test_an_associative_scan_over_split_time_hands_on_slices(step):
    """A few slices per level where blocks are long, and what is left of a block at the top: far from the operands."""
    args = [jax.ShapeDtypeStruct((2048, 1021), jnp.float32)] * 2
    plan = md.parallelize(step, MESH, **SPLIT_TIME).plan(*args)
    gathered = sum(c.bytes for c in plan.collectives if c.kind == "all-gather" and "x" in c.axes)
    assert gathered <= 2048 * 1021 * 4 / 32
    assert {c.kind for c in plan.collectives} >= {"collective-permute"}


@pytest.mark.parametrize(("step", "length"), [(gradient_of_recurrence, 64), (largest_so_far, 256)])
def test_an_associative_scan_over_split_time_is_right(step, length):
    plan = checked(step, (jnp.tanh(array(0, length, 1021)), array(1, length, 1021)), **SPLIT_TIME)
    assert {c.kind for c in plan.collectives} >= {"collective-permute"}
