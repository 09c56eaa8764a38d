"""Parts of dims that are only reduced are computed where they lie, with the same numbers, and only where that pays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from meshdsl.ir.graph import walk
from meshdsl.layouts.topology import Link, Topology
from meshdsl.padding.regions import compute_regions
from meshdsl.trace import trace
from tests.sweeps import swept
from tests.trace.interpreter import run_graph

SLOW_LINKS = Topology("slow links", 1e9, 1e9, 1e9, 4e9, 0.0, (Link(0.0, 1e6),))
SUMS = 64  # bytes of sums over the mesh
WEIGHTS = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)


def halves(x, y):
    a, b = jnp.split(x, 2)
    return jnp.tanh(a).sum() + jnp.max(b, 0) * jnp.argmin(a, 0)


def tail(x, y):
    return jnp.mean(x[24:] ** 2) + lax.pad(jnp.exp(x[24:]), 3.0, ((24, 0, 0), (0, 0, 0))).min()


def counted(x, y):
    return jnp.sum(x[8:24] * jnp.arange(16.0)[:, None])


def padded(x, y):
    return jnp.mean((jnp.pad(x, 3, constant_values=2.0) + 1) ** 2)


def dilated(x, y):
    return jnp.sum(jnp.cos(lax.pad(x, 0.5, ((2, 1, 2), (0, 0, 0)))))


def joined(x, y):
    z = jnp.concatenate([jnp.tanh(x), y, x[:1] * 0], 0)
    return jnp.mean(z**2) + jnp.max(z, 0) * jnp.prod(jnp.sign(z), 0) + jnp.any(z > 1)


def normalised(x, y):
    """The row of a class in front of the others."""
    z = jax.nn.softmax(jnp.concatenate([y[:1], x], 0), 0)
    return jnp.sum(z * z) + jnp.sum(jnp.concatenate([x, y], 1) * jnp.arange(16.0), 1).max()


def around(x, y):
    return jnp.sum(jnp.concatenate([jnp.concatenate([x, y], 0)] * 2, 1) ** 2)


def every_third(x, y):
    """Masks with strides; the last stride is not full."""
    z = jnp.exp(x[1:30:3]) * jnp.arange(10.0)[:, None]
    return jnp.mean(z) + jax.nn.softmax(z @ WEIGHTS, 0).max(1).sum() + jnp.min(x[::3], 0)


def every_third_of_both(x, y):
    return jnp.max(x[::3, ::5] * y[::3, ::5] + 1, 0) * jnp.sum(lax.pad(x[2:11], 2.0, ((1, 2, 2), (0, 0, 0))))


def neighbours(x, y):
    """Slices that differ by a place: one of them stays, the others are shifted."""
    z = jnp.sin(x[17:]) - x[16:-1] * y[15:-2]
    return jnp.sum(z, 0) + jnp.max(x[0:30:3] * y[1:30:3] - x[2:30:3], 0)


def looked_up(x, y):
    return jnp.sum(jnp.tanh(x[np.r_[0:8, 16:24]]) * y[np.r_[0:8, 16:24]], 0)


def carried(x, y):
    """A far slice that loops and conditionals have as their state."""
    last, sums = lax.scan(lambda c, _: (jnp.sin(c), c.sum(0)), x[16:], None, 3)
    return lax.cond(sums.sum() > 0, jnp.cos, jnp.tanh, last).sum(0) + sums[1]


def products(x, y):
    z = jnp.concatenate([x, y])
    hidden = jnp.tanh(z @ WEIGHTS)
    return jnp.sum(jnp.tanh(hidden.T @ z), 0) + jnp.einsum("ni,nij->nj", z, z[..., None] * hidden[:, None]).max(0)


def summed_up(x, y):
    z = jnp.concatenate([x, y])
    return jnp.sum(jnp.cumsum(z, 0) * z + jnp.exp(lax.cumsum(z, reverse=True) / 9), 0) / 64


def extremes(x, y):
    """Their gradients cut the dim in halves."""
    z = lax.stop_gradient(jnp.concatenate([x, y]))
    return lax.cummax(z, reverse=True).sum(0) + lax.cummin(z).sum(0) + lax.cumprod(jnp.tanh(z) + 1.5).min(0)


STEPS = {
    f.__name__: f
    for f in (
        *(halves, tail, counted, padded, dilated, joined, normalised, around),
        *(every_third, every_third_of_both, neighbours, looked_up, carried, products, summed_up, extremes),
    )
}
X = np.random.default_rng(0).normal(size=(2, 32, 8)).astype(np.float32)


def both(step):
    """The results, and the gradients of the sum of their squares."""

    def run(x, y):
        gradients = jax.grad(lambda x, y: jnp.sum(jnp.square(step(x, y))), (0, 1))(x, y)
        return step(x, y), gradients

    return run


@swept("name", STEPS, every=2)
def test_the_same_numbers(name):
    for step in (STEPS[name], both(STEPS[name])):
        before = trace(step, tuple(X))
        after = compute_regions(before)
        assert after is not before
        for got, expected in zip(run_graph(after.graph, X), run_graph(before.graph, X), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * max(0.1, np.abs(expected).max()))


CUT = {"normalised", "around", "dilated", "every_third_of_both"}  # in other places


@pytest.mark.parametrize("name", sorted(STEPS.keys() - CUT))
def test_nothing_is_cut_or_joined(name):
    program = compute_regions(trace(STEPS[name], tuple(X)))
    assert not {"concatenate", "split"} & {op.name for _, op in walk(program.graph)}
    assert not [op for _, op in walk(program.graph) if op.name == "slice" and op.outputs[0].shape[0] > 1]


STAY = {
    "returned": lambda x, y: jnp.concatenate([x, y]),
    "by an argument": lambda x, y: jnp.sum(jnp.concatenate([x[0], y[0]]) @ y[:16]),
    "sorted": lambda x, y: jnp.sum(jnp.sort(jnp.concatenate([x, y]), 0) ** 2),
    "numbers of places": lambda x, y: jnp.argmax(x[1::3], 0),
    "strides that divide": lambda x, y: jnp.sum(jnp.tanh(x[1::2])),
    "rotated halves": lambda x, y: jnp.sum(jnp.tanh(jnp.concatenate([x[:, 4:], -x[:, :4]], 1) @ (y[:8] * 2))),
    "other joints": lambda x, y: jnp.sum(jnp.concatenate([x, y]) * jnp.concatenate([y[:3], x, y[3:]])),
    "both halves": lambda x, y: jnp.sum(x[:16] * x[16:]),
    "a part of another": lambda x, y: jnp.sum(x[:16] * y[16:]),
    "few rows": lambda x, y: jnp.sum(jnp.tanh(x[:2])),
}


@pytest.mark.parametrize("name", STAY)
def test_others_stay(name):
    program = trace(STAY[name], tuple(X))
    assert compute_regions(program) is program


def planned(step, pin="x=S(0)"):
    x = jax.ShapeDtypeStruct((2048, 64), jnp.float32)
    pins = {"x": pin, "y": pin}
    return md.parallelize(step, md.Mesh(x=8, topology=SLOW_LINKS), pins).plan(x, x)


@pytest.mark.parametrize("step", [padded, dilated], ids=lambda step: step.__name__)
def test_only_sums_are_sent(step):
    plan = planned(step)
    assert plan.regions and plan.bytes <= SUMS
    assert "computed where they lie" in " ".join(plan.notes)


def test_dims_that_are_not_split_are_cut():
    assert not planned(lambda x, y: jnp.sum(jnp.tanh(x[1024:])), "x=S(1)").regions


@pytest.mark.sweep
def test_they_run_and_are_saved(tmp_path):
    def step(x, y):
        return {name: both(each)(x, y) for name, each in STEPS.items()}

    mesh, pins = md.Mesh(x=8, topology=SLOW_LINKS), {"x": "x=S(0)", "y": "x=S(0)"}
    sharded = md.parallelize(step, mesh, pins)
    plan = sharded.plan(*X)
    assert plan.regions
    assert sharded.check(*X).divided["x"] > 0.5
    sharded.verify(*X)
    plan.save(tmp_path / "plan.json")
    again = md.parallelize(step, mesh, pins, plan=md.load_plan(tmp_path / "plan.json"))
    assert again.plan(*X) == plan
    jax.tree.map(np.testing.assert_array_equal, again(*X), sharded(*X))
