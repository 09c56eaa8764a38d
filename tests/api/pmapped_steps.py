"""Steps written for ``jax.pmap`` over the axis ``batch``, as practitioners write them: name -> ``Case``."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

K = 8  # devices
ROWS, IN, OUT = 16, 8, 4


def normal(seed, *shape):
    return np.asarray(jax.random.normal(jax.random.key(seed), shape))


@dataclass(frozen=True)
class Case:
    """A step, its whole arguments, and the dim along which each is cut, None if it is whole on every device.

    Args:
      joined: per flat result, the dim along which blocks are joined; None if devices agree.
    """

    step: Any
    args: tuple
    cuts: tuple
    joined: tuple
    layouts: dict = field(default_factory=dict)
    outputs: dict = field(default_factory=dict)


W, X, Y = normal(0, IN, OUT), normal(1, ROWS, IN), normal(2, ROWS, OUT)
PARAMS = {"w": W, "b": np.zeros(OUT, np.float32)}


def predict(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


def sgd(params, x, y):
    def loss(params):
        return jnp.mean((predict(params, x) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    grads = lax.pmean(grads, axis_name="batch")
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), lax.pmean(value, "batch")


def local_statistics(params, x, y):
    """Batch normalisation of each device's rows alone."""

    def loss(params):
        h = predict(params, x)
        h = (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5)
        return jnp.mean((h - y) ** 2)

    grads = lax.pmean(jax.grad(loss)(params), "batch")
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def synchronised_statistics(params, x, y):
    def loss(params):
        h = predict(params, x)
        mean = lax.pmean(h.mean(0), "batch")
        var = lax.pmean((h**2).mean(0), "batch") - mean**2
        return jnp.mean(((h - mean) * lax.rsqrt(var + 1e-5) - y) ** 2)

    return lax.pmean(jax.grad(loss)(params), "batch")


def statistics_in_groups(params, x, y):
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def loss(params):
        h = predict(params, x)
        mean = lax.pmean(h.mean(0), "batch", axis_index_groups=groups)
        return jnp.mean((h - mean - y) ** 2) + lax.pmax(jnp.abs(y).max(), "batch", axis_index_groups=groups)

    return lax.pmean(jax.grad(loss)(params), "batch")


def dropout(params, x, y, rng):
    rng = jax.random.fold_in(rng, lax.axis_index("batch"))

    def loss(params):
        h = predict(params, x)
        keep = jax.random.bernoulli(rng, 0.7, h.shape)
        return jnp.mean((jnp.where(keep, h / 0.7, 0.0) - y) ** 2)

    return lax.pmean(jax.grad(loss)(params), "batch")


def weighted(params, x, y, mask):
    """A mean over the rows of all devices that count."""

    def loss(params):
        errors = ((predict(params, x) - y) ** 2).sum(-1) * mask
        return errors.sum() / jnp.maximum(lax.psum(mask.sum(), "batch"), 1.0)

    return lax.psum(jax.grad(loss)(params), "batch")


def metrics_of_each(params, x, y):
    h = predict(params, x)
    return {"loss": jnp.mean((h - y) ** 2), "logits": h, "count": lax.psum(x.shape[0], "batch")}


def scaled(params, x, y):
    n, same = lax.axis_size("batch"), lax.psum(1, "batch")
    return lax.psum(predict(params, x).sum(0) / n / same, "batch") * (1 + lax.axis_index("batch"))


def contrastive(params, x, y):
    def loss(params):
        f = predict(params, x)
        every = lax.all_gather(f, "batch").reshape(-1, OUT)
        logits = f @ every.T
        labels = lax.axis_index("batch") * f.shape[0] + jnp.arange(f.shape[0])
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(f.shape[0]), labels])

    return lax.pmean(jax.grad(loss)(params), "batch")


def zero_by_hand(params, momentum, x, y):
    """Every device updates its rows of ``w``: reduce-scatter, update, all-gather."""

    def loss(params):
        return jnp.mean((predict(params, x) - y) ** 2)

    grads = lax.psum_scatter(jax.grad(loss)(params)["w"], "batch", scatter_dimension=0, tiled=True) / K
    momentum = 0.9 * momentum + grads
    rows = lax.dynamic_slice_in_dim(params["w"], lax.axis_index("batch") * (IN // K), IN // K)
    w = lax.all_gather(rows - 0.1 * momentum, "batch", axis=0, tiled=True)
    return {**params, "w": w}, momentum


def heat(u):
    """One-dimensional diffusion; devices send the rows at their ends to their neighbours, none beyond the walls."""
    left = lax.ppermute(u[-1:], "batch", [(i, i + 1) for i in range(K - 1)])
    right = lax.ppermute(u[:1], "batch", [(i + 1, i) for i in range(K - 1)])
    wide = jnp.concatenate([left, u, right])
    return u + 0.1 * (wide[2:] - 2 * u + wide[:-2])


def heat_scanned(u):
    return lax.scan(lambda u, _: (heat(u), lax.pmax(jnp.abs(u).max(), "batch")), u, None, length=3)


def columns(u):
    """Blocks of columns, in a ring."""
    return u - lax.ppermute(u, "batch", [(i, (i + 1) % K) for i in range(K)])


def swapped(x):
    """Every device sends a part of its columns to every device."""
    return lax.all_to_all(x, "batch", split_axis=1, concat_axis=0, tiled=True)


def swapped_in_groups(x):
    groups = [[0, 2, 4, 6], [1, 3, 5, 7]]
    other = lax.all_to_all(x, "batch", 1, 1, axis_index_groups=groups, tiled=True)
    return (
        other,
        lax.all_gather(x, "batch", axis_index_groups=groups, tiled=True),
        lax.psum_scatter(x, "batch", scatter_dimension=1, axis_index_groups=groups, tiled=True),
    )


def accumulated(params, x, y):
    """Gradients of two microbatches per device, summed in a scan and averaged once."""

    def loss(params, x, y):
        return jnp.mean((predict(params, x) - y) ** 2)

    def add(total, rows):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *rows)), None

    halves = (x.reshape(2, -1, *x.shape[1:]), y.reshape(2, -1, *y.shape[1:]))
    total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), halves)
    return jax.tree.map(lambda p, g: p - 0.05 * lax.pmean(g, "batch"), params, total)


def branching(params, x, y):
    grads = lax.cond(x.sum() > 0, lambda: jax.tree.map(jnp.ones_like, params), lambda: params)
    clipped = jax.tree.map(lambda g: jnp.clip(g, -lax.pmax(jnp.abs(g).max(), "batch") / 2, 1.0), grads)
    return lax.pmean(clipped, "batch")


LEARNT = (None, None)  # joined: both parameters agree on all devices
BATCH = {"x": "data=S(0)", "y": "data=S(0)"}


def on_batch(step, joined, *more, cuts=()):
    layouts = BATCH | {"mask": "data=S(0)"} if cuts == (0,) else BATCH
    return Case(step, (PARAMS, X, Y, *more), (None, 0, 0, *cuts), joined, layouts)


CASES = {
    "sgd": on_batch(sgd, (*LEARNT, None)),
    "local statistics": on_batch(local_statistics, LEARNT),
    "synchronised statistics": on_batch(synchronised_statistics, LEARNT),
    "statistics in groups": on_batch(statistics_in_groups, LEARNT),
    "dropout": on_batch(dropout, LEARNT, jax.random.key(3), cuts=(None,)),
    "weighted": on_batch(weighted, LEARNT, (normal(4, ROWS) > 0).astype(np.float32), cuts=(0,)),
    "metrics of each": on_batch(metrics_of_each, (None, 0, 0)),
    "scaled": on_batch(scaled, (0,)),
    "contrastive": on_batch(contrastive, LEARNT),
    "accumulated": Case(
        accumulated, (PARAMS, normal(5, 2 * ROWS, IN), normal(6, 2 * ROWS, OUT)), (None, 0, 0), LEARNT, BATCH
    ),
    "branching": on_batch(branching, LEARNT),
    "zero by hand": Case(
        zero_by_hand, (PARAMS, 0 * W, X, Y), (None, 0, 0, 0), (None, None, 0), BATCH | {"momentum": "data=S(0)"}
    ),
    "heat": Case(heat, (normal(7, 32, 3),), (0,), (0,), {"u": "data=S(0)"}),
    "heat scanned": Case(heat_scanned, (normal(7, 32, 3),), (0,), (0, None), {"u": "data=S(0)"}),
    "columns": Case(columns, (normal(8, 3, 16),), (1,), (1,), {"u": "data=S(1)"}),
    "swapped": Case(swapped, (X,), (0,), (1,), {"x": "data=S(0)"}, {"": "data=S(1)"}),
    "swapped in groups": Case(swapped_in_groups, (X,), (0,), (0, 0, 0), {"x": "data=S(0)"}),
}


def pmapped(case):
    """The results of ``jax.pmap``, stacked as it stacks them, then joined as the case says."""
    stacked = [
        x if cut is None else jax.tree.map(lambda x, cut=cut: np.stack(np.split(x, K, cut)), x)
        for x, cut in zip(case.args, case.cuts, strict=True)
    ]
    in_axes = tuple(None if cut is None else 0 for cut in case.cuts)
    results = jax.pmap(case.step, axis_name="batch", in_axes=in_axes)(*stacked)
    flat, tree = jax.tree.flatten(results)
    return tree.unflatten(_joined(np.asarray(x), dim) for x, dim in zip(flat, case.joined, strict=True))


def _joined(x, dim):
    if dim is None:
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
        return x[0]
    return np.concatenate(list(x), dim) if x.ndim > 1 else x
