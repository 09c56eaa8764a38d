"""Steps that call ``jax.shard_map`` over the axes of the mesh, as people write them: functions and arguments."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import meshdsl as md

SIZES, NAMES = (4, 2), ("data", "model")
DEVICES = jax.make_mesh(SIZES, NAMES, axis_types=(AxisType.Auto,) * 2)
over = partial(jax.shard_map, mesh=DEVICES)
over_data = partial(over, axis_names={"data"})


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


STEPS: dict[str, tuple[Any, ...]] = {}


def step(*args: Any, name: str = "") -> Any:
    """Returns a decorator that registers a step with its arguments."""

    def register(function: Any) -> Any:
        STEPS[name or function.__name__] = (function, *args)
        return function

    return register


def ring(n: int, by: int = 1) -> list[tuple[int, int]]:
    return [(i, (i + by) % n) for i in range(n)]


# ---- Whole meshes ----------------------------------------------------------------------------------------------------


@step(drawn(8, 8), drawn(16, 8))
def mixup(w, x):
    """As in big_vision: examples are mixed with their neighbours on the same device."""

    def mix(x):
        return 0.7 * x + 0.3 * jnp.roll(x, 1, 0)

    mixed = over(mix, in_specs=P("data"), out_specs=P("data"))(x)
    return w - 0.1 * jax.grad(lambda w: jnp.mean((mixed @ w) ** 2))(w)


@step(drawn(16, 8))
def rows_by_device(x):
    """Every device looks up its rows in an order, and takes a branch, of its own."""

    def taken(x):
        at = lax.axis_index("data")
        x = x[(jnp.arange(4) + at) % 4]
        return lax.cond(at + 1 > 2, lambda x: x, jnp.negative, x)

    return over(taken, in_specs=P("data"), out_specs=P("data"))(x)


@step(drawn(2, 16, 4), drawn(4, 4, seed=1))
def ring_attention(x, w):
    """Blocks of keys and values travel around the ring; a running softmax."""

    def attend(q, k, v):
        def body(carry, _):
            k, v, top, total, out = carry
            scores = jnp.einsum("bqd,bkd->bqk", q, k)
            new = jnp.maximum(top, scores.max(-1))
            weight, old = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
            out = out * old[..., None] + jnp.einsum("bqk,bkd->bqd", weight, v)
            total = total * old + weight.sum(-1)
            k, v = lax.ppermute((k, v), "data", ring(4))
            return (k, v, new, total, out), None

        start = lax.pcast(jnp.full(q.shape[:2], -jnp.inf), ("data",), to="varying")
        zero = lax.pcast(jnp.zeros(q.shape[:2]), ("data",), to="varying")
        carry, _ = lax.scan(body, (k, v, start, zero, jnp.zeros_like(q)), None, length=4)
        return carry[4] / carry[3][..., None]

    spec = P(None, "data")
    attention = over(attend, in_specs=(spec,) * 3, out_specs=spec)

    def loss(w):
        q = x @ w
        return (attention(q, jnp.tanh(q), q * 2) ** 2).sum()

    return jax.value_and_grad(loss)(w)


@step(drawn(16, 8), drawn(8, 4, 8, seed=1))
def expert_dispatch(x, experts):
    """Tokens go to the devices of their experts and come back."""

    def dispatch(x, w):
        sent = lax.all_to_all(x.reshape(4, 1, 8), "data", 0, 1)
        made = jnp.einsum("ebd,edf->ebf", sent.reshape(1, 4, 8), w[:1, :, :].mean(1)[:, None, :] * jnp.eye(8))
        back = lax.all_to_all(made.reshape(1, 4, 8), "data", 1, 0)
        return back.reshape(4, 8)

    def loss(experts):
        y = over(dispatch, in_specs=(P("data"), P("data")), out_specs=P("data"))(x, experts)
        return (y * x).sum()

    return jax.value_and_grad(loss)(experts)


@step(drawn(8, 8), drawn(8, 16, seed=1), drawn(16, 8, seed=2))
def megatron(x, w1, w2):
    """Columns of the first matrix and rows of the second on ``model``; one sum."""

    def block(x, w1, w2):
        return lax.psum(jax.nn.relu(x @ w1) @ w2, "model")

    mlp = over(block, in_specs=(P("data"), P(None, "model"), P("model")), out_specs=P("data"))

    def loss(w1, w2):
        return jnp.mean(mlp(x, w1, w2) ** 2)

    g1, g2 = jax.grad(loss, (0, 1))(w1, w2)
    return w1 - 0.1 * g1, w2 - 0.1 * g2


@step(drawn(16, 8), drawn(8, 8, seed=1))
def fsdp(x, w):
    """Weights are gathered for their use; the gradient is scattered by hand."""

    def update(w, x):
        whole = lax.all_gather(w, "data", tiled=True)
        g = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(whole)
        return w - 0.1 * lax.psum_scatter(g, "data", tiled=True) / 4

    return over(update, in_specs=(P("data"), P("data")), out_specs=P("data"), check_vma=False)(w, x)


@step(drawn(16, 8), drawn(8, 8, seed=1))
def fsdp_by_autodiff(x, w):
    def loss(w, x):
        return lax.pmean((jnp.tanh(x @ lax.all_gather(w, "data", tiled=True)) ** 2).mean(), "data")

    return jax.value_and_grad(lambda w: over(loss, in_specs=(P("data"), P("data")), out_specs=P())(w, x))(w)


@step(drawn(16, 8))
def running_sum(x):
    """A running sum over a split dim, by the index of the device."""

    def block(x):
        totals = lax.all_gather(x.sum(0), "data")
        before = jnp.where(jnp.arange(4)[:, None] < lax.axis_index("data"), totals, 0).sum(0)
        return jnp.cumsum(x, 0) + before

    return over(block, in_specs=P("data"), out_specs=P("data"))(x)


@step(drawn(16, 8))
def kernel_per_shard(x):
    def double(source, target):
        target[...] = source[...] * 2 + 1

    def block(x):
        made = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(double, out_shape=made, interpret=True)(x) - lax.psum(x, "model")

    return over(block, in_specs=P("data"), out_specs=P("data"), check_vma=False)(jnp.sin(x)).sum(0)


@step(drawn(16, 8), drawn(3, 8, 8, seed=1))
def in_scan_in_remat(x, layers):
    def layer(x, w):
        def block(x, w):
            y = jnp.tanh(x @ lax.all_gather(w, "model", tiled=True))
            return y + lax.ppermute(y, "data", ring(4))

        return over(block, in_specs=(P("data"), P("model")), out_specs=P("data"), check_vma=False)(x, w), None

    def loss(layers):
        return (lax.scan(jax.checkpoint(layer), x, layers)[0] ** 2).mean()

    return jax.value_and_grad(loss)(layers)


@step(drawn(8, 8))
def replicated_result_unchecked(x):
    def block(x):
        return lax.pmax(x.sum(0), "data"), lax.psum(x, ("data", "model")) / 2

    return over(block, in_specs=P("data"), out_specs=(P(), P()), check_vma=False)(x)


PAIRS, STRIDED = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


@step(drawn(16, 8), drawn(8, 4, seed=1))
def statistics_in_groups(x, w):
    """Synchronised over pairs of devices; the numbers of a literal, of all, and of single devices beside them."""

    def loss(w, x):
        h = jnp.tanh(x @ w)
        h = h - lax.pmean(h.mean(0), "data", axis_index_groups=PAIRS)
        h = h / lax.pmax(jnp.abs(x).max(), "data", axis_index_groups=STRIDED) * lax.psum(1.0, "data")
        h = h + lax.psum(x.sum(), "data", axis_index_groups=[[0], [1], [2], [3]])
        return lax.pmean((h**2).mean(), "data", axis_index_groups=[[0, 1, 2, 3]])[None]

    run = over(loss, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
    return jax.value_and_grad(lambda w: run(w, x).sum())(w)


@step(drawn(16, 8))
def moved_in_groups(x):
    def block(x):
        def body(x, _):
            y = lax.psum_scatter(x, "data", scatter_dimension=1, axis_index_groups=PAIRS, tiled=True)
            y = lax.all_gather(y, "data", axis=1, axis_index_groups=[[3, 1], [0, 2]], tiled=True)
            return jnp.sin(y), None

        y = lax.scan(body, x, None, length=3)[0]
        y = y + lax.all_gather(x, "data", axis_index_groups=[[2, 0, 3, 1]]).sum(0) * lax.axis_index("data")
        return lax.all_to_all(y, "data", 1, 0, axis_index_groups=STRIDED, tiled=True)

    return over(block, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)


@step(drawn(16, 8))
def groups_of_some_axes(x):
    def block(x):
        return jnp.tanh(x @ x.T)[:, :4] + lax.psum(x[:, :4], "data", axis_index_groups=STRIDED)

    return over_data(block, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)


@step(drawn(16, 8))
def two_axes_on_one_dim(x):
    def block(x):
        i = lax.axis_index(("model", "data"))
        return x * i + lax.psum(x.sum(), ("data", "model")) + lax.axis_index("data")

    first = over(block, in_specs=P(("model", "data")), out_specs=P(("model", "data")))(x)
    return over(block, in_specs=P(("data", "model")), out_specs=P(("data", "model")))(first * 2)


@step(drawn(16, 8))
def gathered_over_two_axes(x):
    def block(x):
        y = lax.all_gather(x, ("model", "data"), axis=1)
        z = lax.psum_scatter(y, ("data", "model"), scatter_dimension=1)
        return z + lax.all_to_all(x, ("data", "model"), 1, 1, tiled=True)

    return over(block, in_specs=P(("data", "model")), out_specs=P(("data", "model")))(x)


@step(drawn(8, 8))
def shift_without_wrap(x):
    """Devices at the end receive zeros."""

    def block(x):
        y = lax.ppermute(x, "data", [(0, 1), (1, 2), (2, 3)])
        return y + lax.ppermute(x, ("data", "model"), [(i, i ^ 1) for i in range(8)])

    return over(block, in_specs=P("data", "model"), out_specs=P("data", "model"))(x)


@step(drawn(16, 8))
def permutes_over_two_axes(x):
    """What moves along one of them is sent along that one."""

    def block(x):
        near = lax.ppermute(x, ("data", "model"), [(i, i ^ 1) for i in range(8)])
        return near + lax.ppermute(x, ("data", "model"), [(i, (i + 2) % 8) for i in range(8)])

    return over(block, in_specs=P(("data", "model")), out_specs=P(("data", "model")))(x)


@step(drawn(64, 8))
def untiled_all_to_all(x):
    def block(x):
        return lax.all_to_all(x.reshape(4, 2, 8), "data", 0, 2).reshape(8, 8)

    return over(block, in_specs=P(("data", "model")), out_specs=P(("data", "model")))(x)


@step(drawn(16, 8))
def without_arguments(x):
    def index():
        return lax.axis_index("data").astype(jnp.float32)[None]

    return x * over(index, in_specs=(), out_specs=P("data"))().sum()


@step(drawn(8, 8))
def loops_and_branches(x):
    def block(x):
        def body(carry):
            i, x = carry
            x = lax.cond(i % 2 == 0, lambda x: lax.psum(x, "model") / 2, lambda x: lax.pmin(x, "model") * 1.5, x)
            return i + 1, lax.ppermute(x, "data", ring(4))

        return lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1]

    return over(block, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)


@step(drawn(8, 8))
def trips_that_differ(x):
    """Every device runs its loop as often as its index says."""

    def block(x):
        return lax.fori_loop(0, lax.axis_index("data") + 1, lambda i, x: x * 1.5 + i, x)

    return over(block, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)


@step(drawn(16, 8))
def branch_per_device(x):
    def block(x):
        return lax.switch(lax.axis_index("data"), [jnp.sin, jnp.cos, jnp.tanh, lambda x: 0 * x + 1.0], x)

    return over(block, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)


@step(jax.random.key(0), drawn(16, 8))
def noise_per_device(key, x):
    def block(key, x):
        return x + jax.random.normal(jax.random.fold_in(key, lax.axis_index("data")), x.shape)

    return over(block, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)(key, x)


@step(drawn(8, 8), np.arange(8, dtype=np.int32))
def integers_and_bools(x, i):
    def block(x, i):
        return lax.psum(i, "data"), lax.pmax(x > 0, "data"), lax.all_gather(x > 0, "data", tiled=True), i + 1

    specs = (P(None), P(), P(), P("data"))
    return over(block, in_specs=(P("data"), P("data")), out_specs=specs, check_vma=False)(x, i)


# ---- Some of the axes ------------------------------------------------------------------------------------------------


@step(drawn(16, 8), drawn(8, 16, seed=1), drawn(16, 8, seed=2))
def data_parallel_by_hand(x, w1, w2):
    """``data`` by hand, ``model`` automatic: a gradient step with one mean."""

    def update(w1, w2, x):
        def loss(w1, w2):
            return ((jax.nn.relu(x @ w1) @ w2) ** 2).mean()

        g1, g2 = jax.grad(loss, (0, 1))(w1, w2)
        return w1 - 0.1 * lax.pmean(g1, "data"), w2 - 0.1 * lax.pmean(g2, "data")

    specs = (P(), P(), P("data"))
    return over_data(update, in_specs=specs, out_specs=(P(), P()), check_vma=False)(w1, w2, x)


@step(drawn(16, 8), drawn(8, 8, seed=1))
def automatic_under_grad(x, w):
    def block(w, x):
        y = jnp.tanh(x @ w)
        return lax.psum((y + lax.ppermute(y, "data", ring(4))).sum(), "data")

    run = over_data(block, in_specs=(P(), P("data")), out_specs=P())
    return jax.value_and_grad(lambda w: run(w, x))(w)


@step(drawn(16, 8), drawn(8, 8, seed=1))
def nested(x, w):
    """A shard_map over ``model`` inside one over ``data``."""

    def inner(x, w):
        return lax.psum(x @ w, "model") + lax.axis_index("data") + lax.axis_index("model")

    def outer(x, w):
        specs = (P(None, "model"), P("model"))
        y = jax.shard_map(inner, in_specs=specs, out_specs=P(), axis_names={"model"}, check_vma=False)(x, w)
        return y - lax.pmean(y, "data")

    y = over_data(outer, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False)(x, w)
    return y @ w


@step(drawn(16, 8), drawn(2, 8, 8, seed=1))
def automatic_in_scan(x, layers):
    def block(x, layers):
        def body(x, w):
            y = jnp.tanh(x @ w)
            return lax.ppermute(y, "data", ring(4)), y.mean()

        return lax.scan(body, x, layers)

    run = over_data(block, in_specs=(P("data"), P()), out_specs=(P("data"), P("data")), check_vma=False)

    def loss(layers):
        y, means = over_data(
            lambda x, w: (lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], x.sum()[None]),
            in_specs=(P("data"), P()),
            out_specs=(P("data"), P("data")),
            check_vma=False,
        )(x, layers)
        return (y**2).sum() + means.sum()

    return run(x, layers)[0], jax.grad(loss)(layers)


@step(drawn(16, 8), drawn(8, 8, seed=1))
def columns_of_automatic_axis(x, w):
    """A dim that is split by hand over ``data`` is split further over ``model``, which is automatic."""

    def block(x):
        return jnp.tanh(x) + lax.pmean(x, "data")

    y = over_data(block, in_specs=P("data"), out_specs=P("data"))(md.constrain(x, "data=S(0) model=S(0)"))
    return md.constrain(y, "data=S(0) model=S(0)") @ w


@step(drawn(8, 6, 8), drawn(8, 8, seed=1))
def vmap_of_shard_map(x, w):
    run = over(
        lambda x, w: lax.psum(x @ w, "data"), in_specs=(P(None, "data"), P("data")), out_specs=P(), check_vma=True
    )
    return jax.vmap(lambda x: run(x, w))(x).sum(0)


@step(drawn(8, 4, 8))
def vmap_inside(x):
    def block(x):
        mean = jax.vmap(lambda row: lax.pmean(row, ("i", "data")), axis_name="i")(x)
        return x - mean

    return over(block, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)


@step(drawn(16, 8), drawn(8, 8, seed=1))
def second_derivative(x, w):
    def block(x, w):
        return lax.psum((jnp.sin(x @ w) ** 2).sum(), ("data", "model"))

    f = over(block, in_specs=(P("data"), P(None, "model")), out_specs=P())
    return jax.jvp(lambda w: jax.grad(lambda w: f(x, w))(w), (w,), (jnp.ones_like(w),))


@step(drawn(16, 8), np.zeros((8, 8), np.float32))
def optimizer_around(x, w):
    """A training loop around a step with a body of its own."""

    def body(w, _):
        g = jax.grad(lambda w: fsdp_loss(w, x))(w)
        return w - 0.1 * g, (w * g).sum()

    return lax.scan(body, w + 0.1, None, length=3)


def fsdp_loss(w, x):
    def loss(w, x):
        return lax.pmean((jnp.tanh(x @ lax.all_gather(w, "data", tiled=True)) ** 2).mean(), "data")

    return over_data(loss, in_specs=(P("data"), P("data")), out_specs=P())(w, x)


@step(drawn(16, 8).astype("bfloat16"))
def halves(x):
    def block(x):
        return lax.psum(x, "data") + lax.ppermute(x, "data", ring(4, 3)) + lax.all_gather(x, "model").sum(0)

    return over(block, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)


@step(drawn(8, 8))
def literals(x):
    """Collectives of numbers: known everywhere, nothing to send."""

    def block(x):
        one = lax.pcast(1.0, ("data",), to="varying")
        return x * lax.psum(one, "data") + lax.all_gather(one, "data").sum() + lax.pmax(one, "data")

    return over(block, in_specs=P("data"), out_specs=P("data"), check_vma=True)(x)


@step(drawn(8, 8))
def constant_that_is_sent(x):
    def block(x):
        own = jnp.arange(8.0) + 0 * lax.axis_index("data")
        return x + lax.psum(jnp.arange(8.0), "model") + lax.all_gather(own, "data").sum(0)

    return over(block, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)


@step(drawn(16, 8))
def same_twice(x):
    """The same gather before and after a barrier: sent twice, as remat asks."""

    def block(x):
        f = jax.checkpoint(lambda x: jnp.sin(lax.all_gather(x, "data", tiled=True)).sum())
        return jax.grad(f)(x)

    return over(block, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)


@step(drawn(16, 8), drawn(8, 8, seed=1))
def closures(x, w):
    table = np.arange(8, dtype=np.float32)

    def block(x):
        return lax.psum((x @ w) * table, "model") + jnp.asarray(table)[::-1]

    def loss(x):
        return jnp.sin(over(block, in_specs=P("data"), out_specs=P("data"), check_vma=False)(0.1 * x)).sum()

    return jax.grad(loss)(x)


@step(drawn(16, 8), drawn(8, 8, seed=1) / 4)
def sums_in_loops_that_differ(x, w):
    """Devices along ``data`` loop as often as their index says; those along ``model`` add up in every iteration."""

    def block(x, w):
        def body(_, x):
            split = md.constrain(x, "model=S(1)")
            return jnp.tanh(md.constrain(split @ md.constrain(w, "model=S(0)"), "model=B"))

        return lax.fori_loop(0, lax.axis_index("data"), body, x)

    return over_data(block, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False)(x, w)


@step(drawn(16, 4, 8), drawn(8, 8, seed=1))
def megatron_by_rows_and_sequence(x, w):
    """Sequence parallel around tensor parallel, as Megatron has it."""

    def block(x, w):
        whole = lax.all_gather(x, "model", axis=1, tiled=True)
        return lax.psum_scatter(jax.nn.gelu(whole @ w) @ w.T, "model", scatter_dimension=1, tiled=True)

    specs = (P("data", "model"), P(None, "model"))
    run = over(block, in_specs=specs, out_specs=P("data", "model"))
    return jax.value_and_grad(lambda w: (run(x, w) ** 2).mean())(w)
