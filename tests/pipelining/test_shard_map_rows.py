"""The user's ``jax.shard_map`` in microbatches: the numbers of the whole batch, or a refusal by line."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshdsl as md
from tests.api.shard_map_steps import drawn, over, over_data, ring
from tests.api.test_jit_semantics import same
from tests.sweeps import swept

MESH = md.Mesh(data=4, model=2)
W, X = drawn(8, 8, seed=1) / 2, drawn(16, 8)
ROWS, WHOLE = P("data"), P()
BOTH, TURNED = P(("data", "model")), P(("model", "data"))


def planned(step, count=2, **options):
    return md.parallelize(step, MESH, pipeline=md.Pipeline(count, batch="x", **options))


def squares(run, w, x):
    return jax.value_and_grad(lambda w: jnp.mean(run(x @ w, w) ** 2))(w)


# ---- Bodies of rows --------------------------------------------------------------------------------------------------


def tensor_parallel(w, x):
    run = over(
        lambda x, u, v: lax.psum(jax.nn.relu(x @ u) @ v, "model"),
        in_specs=(ROWS, P(None, "model"), P("model")),
        out_specs=ROWS,
    )
    return squares(lambda h, w: run(h, w, w.T), w, x)


def tensor_parallel_alone(w, x):
    def body(x, w):
        return lax.psum(jnp.tanh(x @ w) @ w.T, "model")

    run = over(body, in_specs=(WHOLE, P(None, "model")), out_specs=WHOLE, axis_names={"model"})
    return squares(run, w, x)


def fsdp(w, x):
    def loss(w, x):
        return lax.pmean((jnp.tanh(x @ lax.all_gather(w, "data", tiled=True)) ** 2).mean(), "data")

    return jax.value_and_grad(lambda w: over(loss, in_specs=(ROWS, ROWS), out_specs=WHOLE)(w, x))(w)


def data_parallel_by_hand(w, x):
    """Even what follows the sum over the batch is in the body."""

    def update(w, x):
        g = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)
        return w / (1 + jnp.sqrt(jnp.abs(lax.psum(g, "data"))))

    return over_data(update, in_specs=(WHOLE, ROWS), out_specs=WHOLE, check_vma=False)(w, x)


def ring_of_sequences(w, x):
    """Another dim than the batch travels."""

    def attend(q, k):
        def body(carry, _):
            k, out = carry
            return (lax.ppermute(k, "data", ring(4)), out + jnp.einsum("bqd,bkd->bqd", q, k)), None

        return lax.scan(body, (k, jnp.zeros_like(q)), None, length=4)[0][1]

    spec = P(None, "data")
    run = over(attend, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    return squares(lambda h, w: run(h.reshape(4, 4, 8), jnp.tanh(h.reshape(4, 4, 8))), w, x)


def remat_of_a_scan(w, x):
    def layer(x, w):
        gathered = over(
            lambda x, w: jnp.tanh(x @ lax.all_gather(w, "model", tiled=True)),
            in_specs=(ROWS, P("model")),
            out_specs=ROWS,
            check_vma=False,
        )
        return gathered(x, w), None

    loss = lambda w: (lax.scan(jax.checkpoint(layer), x, jnp.stack([w, w.T, -w]))[0] ** 2).mean()  # noqa: E731
    return jax.value_and_grad(loss)(w)


def loop_and_branch(w, x):
    def body(x, w):
        h = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h + x @ w), jnp.zeros_like(x))
        return lax.cond(w.sum() > 0, jnp.sin, lambda h: h * 2, h)

    return squares(over(body, in_specs=(ROWS, WHOLE), out_specs=ROWS, check_vma=False), w, x)


def sums_of_rows(w, x):
    def body(x, w):
        h = jnp.tanh(x @ w)
        return h, lax.psum(h.sum(0), "data"), lax.pmax(h.max(0), ("data", "model"))

    return over(body, in_specs=(ROWS, WHOLE), out_specs=(ROWS, WHOLE, WHOLE), check_vma=False)(x, w)


def beside_the_batch(w, x):
    """One shard_map of weights before the loop, one of gradients after it."""
    whole = over(lambda w: lax.all_gather(w, "data", tiled=True), in_specs=ROWS, out_specs=WHOLE, check_vma=False)
    g = jax.grad(lambda w: jnp.mean((x @ whole(w)) ** 2))(w)
    return w - over(lambda g: g * (1 + lax.axis_index("data")), in_specs=ROWS, out_specs=ROWS)(g)


def zero(w, x):
    """Each device updates its rows of weights and momentum, after clipping by the norm of all."""

    def update(w, m, x):
        mean = lambda w: (jnp.tanh(x @ w) ** 2).mean()  # noqa: E731
        loss, g = jax.value_and_grad(mean)(lax.all_gather(w, "data", tiled=True))
        g = lax.psum_scatter(g, "data", tiled=True) / 4
        m = 0.9 * m + g / jnp.sqrt(lax.psum((g**2).sum(), "data"))
        return w - 0.1 * m, m, lax.pmean(loss, "data")

    return over(update, in_specs=(ROWS, ROWS, ROWS), out_specs=(ROWS, ROWS, WHOLE), check_vma=False)(w, w.T, x)


def zero_of_flat_weights(w, x):
    """Weights are whole, the optimizer's state is flat and split over all devices, which differ in one number, too."""

    def update(w, s, x):
        g = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)
        g = lax.psum_scatter(g.ravel(), ("data", "model"), tiled=True) / 2
        mine = lax.dynamic_slice_in_dim(w.ravel(), lax.axis_index(("data", "model")) * g.size, g.size)
        s = s + g**2 + g.sum() ** 2
        new = lax.all_gather(mine - 0.1 * g / jnp.sqrt(s), ("data", "model"), tiled=True)
        return new.reshape(w.shape), s

    return over(update, in_specs=(WHOLE, BOTH, ROWS), out_specs=(WHOLE, BOTH), check_vma=False)(w, jnp.ones(64), x)


EXACT = [
    *(tensor_parallel, tensor_parallel_alone, fsdp, data_parallel_by_hand, ring_of_sequences, remat_of_a_scan),
    *(loop_and_branch, sums_of_rows, beside_the_batch, zero, zero_of_flat_weights),
]


@swept("step", EXACT, every=2)
def test_numbers_of_the_whole_batch(step):
    sharded = planned(step)
    same(sharded(W, X), jax.jit(step)(W, X), atol=1e-4)
    sharded.check(W, X)
    sharded.verify(W, X)


def test_collectives_run_per_microbatch():
    plan = planned(tensor_parallel, count=4).plan(W, X)
    sums = [c for c in plan.collectives if "in the user's shard_map" in c.reason and c.axes == ("model",)]
    assert {c.trips for c in sums} == {4}


def test_estimates_of_a_mean_over_the_batch():
    """As the same step without a shard_map has them."""

    def centred(w, x):
        return squares(
            over(lambda h, w: h - lax.pmean(h.mean(0), "data"), in_specs=(ROWS, WHOLE), out_specs=ROWS), w, x
        )

    def plain(w, x):
        return squares(lambda h, w: h - h.mean(0), w, x)

    with pytest.raises(md.PipelineError, match=r"sub at test_shard_map_rows.py:\d+"):
        planned(centred).plan(W, X)
    sharded = planned(centred, per_microbatch=True)
    same(sharded(W, X), planned(plain, per_microbatch=True)(W, X), atol=1e-5)
    sharded.check(W, X)


# ---- Bodies that depend on where a row is ----------------------------------------------------------------------------


def each(body, specs=ROWS, out=ROWS):
    return lambda w, x: (over(body, in_specs=specs, out_specs=out, check_vma=False)(x @ w), w.sum())


def two_orders(w, x):
    body = over(jnp.multiply, in_specs=(P(("data", "model")), P(("model", "data"))), out_specs=P(("data", "model")))
    return body(x @ w, x), w.sum()


def starts_from_places(w, x):
    def body(x):
        start = jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)
        return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h + x), start)

    return each(body)(w, x)


REFUSED = {
    "neighbours": (each(lambda x: lax.ppermute(x, "data", ring(4))), "exchanges rows of the batch over data"),
    "index": (each(lambda x: x * lax.axis_index("data")), "rows of the batch and what each device has of its own"),
    "place in a block": (
        each(lambda x: x * jnp.arange(4.0)[:, None]),
        "depends on where on the devices along data a row",
    ),
    "place in a loop": (starts_from_places, "depends on where on the devices along data a row of the batch is"),
    "sums that stay": (
        each(lambda x: x.sum(0, keepdims=True)),
        "returns a sum over the rows of each device along data",
    ),
    "sums said to be equal": (
        each(lambda x: x.sum(0), out=WHOLE),
        "returns a sum over the rows of each device along data",
    ),
    "another order": (each(jnp.sin, BOTH, TURNED), "returns rows of the batch otherwise than they are split over data"),
    "two orders": (two_orders, "rows of the batch and rows of the batch in another order, along data"),
    "copies": (each(jnp.sin, WHOLE), "returns what devices along data have of all rows as if it were their rows"),
    "sum of rows": (each(lambda x: lax.psum(x, "data"), out=WHOLE), "exchanges rows of the batch over data"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_where_rows_are(name):
    step, why = REFUSED[name]
    with pytest.raises(md.PipelineError) as caught:
        planned(step).plan(W, X)
    title, row, *_, remedy = str(caught.value).splitlines()
    assert title.endswith("does not run in microbatches:")
    assert "test_shard_map_rows.py:" in row and why in row
    assert remedy == "compute it outside of the shard_map, or loop over the microbatches inside the step"
