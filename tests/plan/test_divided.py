"""How much of a step a plan divides, and which results nothing divided leads to."""

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.plan.divided import undivided_outputs

MESH = md.Mesh(data=4, model=2)
X, W = jnp.ones((8, 16)), jnp.ones((16, 16))


def facts(step, layouts, *args, mesh=MESH, outputs=None):
    stages = md.parallelize(step, mesh, layouts, outputs).stages(*args)
    program, plan = stages.planned.program, stages.planned.plan
    return dict(plan.utilization.divided), undivided_outputs(program, plan.solution)


WHOLE = {"**": "data=B model=B"}


def test_shares_are_weighed_by_the_seconds_of_whole_arrays():
    """Two products of equal work, the second of which is computed everywhere alike."""

    def step(x, w, v):
        return md.constrain(x, "data=S(0) model=B") @ w, md.constrain(v @ w, "data=B model=B")

    given = {"x": "data=S(0) model=B", "w": "data=B model=B", "v": "data=B model=B"}
    shares, undivided = facts(step, given, X, W, X, outputs={"0": "data=S(0) model=B", "1": "data=B model=B"})
    assert shares == {"data": pytest.approx(0.5), "model": 0.0}
    assert undivided == ("1",)


def test_everything_divided_over_two_axes():
    shares, undivided = facts(
        lambda x, w: x @ w,
        {"x": "data=S(0) model=B", "w": "data=B model=S(1)"},
        X,
        W,
        outputs={"**": "data=S(0) model=S(1)"},
    )
    assert shares == {"data": 1.0, "model": 1.0} and undivided == ()


def test_contracted_dims_are_divided_work_too():
    shares, undivided = facts(
        lambda x, w: x @ w, {"x": "data=S(1) model=B", "w": "data=S(0) model=B"}, X, W, outputs={"**": "data=B model=B"}
    )
    assert shares == {"data": 1.0, "model": 0.0} and undivided == ()


def test_axes_of_one_device_are_not_listed():
    assert set(facts(lambda x: x * 2, {"x": "data=S(0)"}, X, mesh=md.Mesh(data=4, one=1))[0]) == {"data"}


def test_iterations_count():
    """Three products in a loop over whole arrays, and one that is divided."""

    def step(x, w):
        whole, _ = jax.lax.scan(lambda c, _: (md.constrain(c @ w, "data=B"), None), md.constrain(w, "data=B"), None, 3)
        return md.constrain(w, "data=S(0)") @ w, whole

    shares, undivided = facts(
        step, {"**": "data=B"}, X, W, mesh=md.Mesh(data=4), outputs={"0": "data=S(0)", "1": "data=B"}
    )
    assert shares["data"] == pytest.approx(0.25) and undivided == ("1",)


SPLIT = {"x": "data=S(0) model=B"}


def counted(x, n):
    return x * 2, n + 1


def carried(x, n):
    (x, n), sums = jax.lax.scan(lambda c, _: ((jnp.sin(c[0]), c[1] + 1), c[0].sum()), (x, n), None, 3)
    return x, n, sums


def late(x, n):
    """The second carry is reached in the second iteration only."""
    (_, b, c), _ = jax.lax.scan(lambda s, _: ((s[0], s[1] + s[0].sum(), s[2] + s[1]), None), (x, 0.0, 1.0), None, 3)
    return b, c, n


def stacked(x, n):
    return jax.lax.scan(lambda c, row: (c + 1, row * 2), n, jnp.ones(5)), x.sum()


def counting_loop(x, n):
    return jax.lax.while_loop(lambda s: s[1] < 3, lambda s: (s[0] * 2, s[1] + 1), (x, n))


def loop_until(x, n):
    """How often it runs depends on what is divided."""
    return jax.lax.while_loop(lambda s: s[0].sum() < 1e4, lambda s: (s[0] * 2, s[1] + 1), (x, n))


def branch(x, n):
    return jax.lax.cond(n > 0, lambda x, n: (x, n), lambda x, n: (x * 2, n + 1), x, n)


def chosen(x, n):
    return jax.lax.cond(x.sum() > 0, lambda n: n, lambda n: n + 1, n), n


def nested(x, n):
    def outer(c, _):
        return jax.lax.scan(lambda c, _: ((c[0] * 2, c[1] + 1), c[1]), c, None, 2)

    return jax.lax.scan(outer, (x, n), None, 2)


def constants(x, n):
    return x + jnp.arange(8.0)[:, None], jnp.arange(3) + n, 1.0


def reduced(x, n):
    return jnp.mean(x), jnp.max(x) * n, n


UNDIVIDED = {
    counted: ("1",),
    carried: ("1",),
    late: ("2",),
    stacked: ("0/0", "0/1"),
    counting_loop: ("1",),
    loop_until: (),
    branch: ("1",),
    chosen: ("1",),
    nested: ("0/1", "1"),
    constants: ("1", "2"),
    reduced: ("2",),
}


@pytest.mark.parametrize("step", UNDIVIDED, ids=lambda step: step.__name__)
def test_results_that_nothing_divided_leads_to(step):
    _, undivided = facts(step, SPLIT, X, jnp.int32(1))
    assert undivided == UNDIVIDED[step]


def test_nothing_divided_at_all():
    shares, undivided = facts(lambda x, w: (x @ w, x.sum()), WHOLE, X, W, outputs=WHOLE)
    assert shares == {"data": 0.0, "model": 0.0} and undivided == ("0", "1")


def test_a_reshard_alone_counts():
    """The result is an input sent from one layout to another."""
    assert facts(lambda x: x, {"x": "data=S(0)"}, X, outputs={"**": "data=B"})[1] == ()
