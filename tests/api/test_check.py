"""What ``check`` says it tested, and plans that divide as much as they can."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import ArgumentError, CheckError
from tests.api.refusals import ARGS, MESH, message, step


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize("result", [None, (), {"a": None}, []])
def test_a_step_without_results(result):
    def silent(x):
        jax.debug.callback(print, x.sum())
        return result

    assert message(CheckError, lambda: md.parallelize(silent, MESH).check(jnp.ones(8))) == (
        "silent returns no arrays, so there is nothing to compare\nreturn what the step computes"
    )


def test_the_report_says_what_was_divided():
    def counted(w, n, batch):
        return step(w, batch), n + 1

    many = jax.tree.map(lambda x: jnp.tile(x, (1024, 1)), ARGS[1])  # rows enough for dividing them to pay
    report = md.parallelize(counted, MESH, {"batch/x": "data=S(0) model=B", "w": "data=B model=B"}).check(
        ARGS[0], jnp.int32(0), many
    )
    assert report.divided["data"] > 0.8 and report.undivided == ("1",)
    assert str(report).splitlines()[-2:] == [
        f"compute divided: {report.divided['data']:.0%} over data, {report.divided['model']:.0%} over model",
        "1 of 2 outputs would agree under any plan, since nothing divided or communicated leads to it: 1",
    ]


def test_a_report_of_nothing_divided_says_so():
    whole = {"**": "data=B model=B"}
    report = md.parallelize(step, MESH, whole, outputs=whole).check(*ARGS)
    assert str(report).splitlines()[-2:] == [
        "compute divided: 0% over data, 0% over model",
        "no output depends on anything divided or communicated: nothing was tested; "
        "larger arguments, or check(..., divide='most'), test more",
    ]


def mlp(params, batch):
    def loss(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


RNG = np.random.default_rng(0)
SMALL = (
    {"a": RNG.normal(size=(8, 8)).astype("f4"), "b": RNG.normal(size=(8, 8)).astype("f4")},
    {"x": RNG.normal(size=(8, 8)).astype("f4"), "y": RNG.normal(size=(8, 8)).astype("f4")},
)


def test_most_divided():
    """At a small size nothing is worth a message, so a plan leaves everything whole; what is tested at most is not."""
    sharded = md.parallelize(mlp, MESH)
    planned = sharded.check(*SMALL)
    most = sharded.check(*SMALL, divide="most")
    assert all(most.divided[axis] > 0.9 for axis in ("data", "model")) and most.undivided == ()
    assert planned.divided["model"] < most.divided["model"]
    assert sharded.plan(*SMALL) is sharded.plan(*SMALL) and not sharded.plan(*SMALL).collectives


def test_most_divided_meets_the_pins():
    def told(x, w):
        return md.constrain(x @ w, "data=S(0) model=B")

    sharded = md.parallelize(told, MESH, {"w": "data=B model=B"}, outputs={"**": "data=S(0) model=B"})
    args = SMALL[1]["x"], SMALL[0]["a"]
    assert sharded.check(*args, divide="most").divided["data"] == 1.0
    plan = sharded.stages(*args).most_divided.planned.plan
    assert plan.layout("w") == md.Layout(data=md.B, model=md.B)
    assert plan.outputs[0].layout == md.Layout(data=md.S(0), model=md.B)


@pytest.mark.parametrize(
    "options",
    [
        {"donate_argnums": 0},
        {"pipeline": md.Pipeline(microbatches=2)},
        {"overlap": True},
        {"memory": "1MB"},
        {"time_limit": 5.0},
        {"rules": md.Rules()},
    ],
    ids=lambda o: next(iter(o)),
)
def test_most_divided_under_every_option(options):
    assert md.parallelize(mlp, MESH, **options).check(*SMALL, divide="most").ok


def test_most_divided_beside_a_given_plan():
    plan = md.parallelize(mlp, MESH).plan(*SMALL)
    given = md.parallelize(mlp, MESH, plan=plan)
    assert given.check(*SMALL, divide="most").divided["data"] > given.check(*SMALL).divided["data"]


def test_most_divided_pads():
    """A dim that does not divide is padded, if that divides more."""
    sharded = md.parallelize(lambda x, w: x @ w, MESH)
    report = sharded.check(np.ones((7, 8), np.float32), np.ones((8, 5), np.float32), divide="most")
    assert report.divided["data"] > 0.9


def test_most_divided_in_loops():
    def deep(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, ws)

    report = md.parallelize(deep, MESH).check(np.ones((3, 8, 8), np.float32) / 9, SMALL[1]["x"], divide="most")
    assert report.undivided == () and min(report.divided.values()) > 0.9


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize(
    ("divide", "said"),
    [
        ("mots", "divide: no way 'mots' to divide; did you mean 'most'?"),
        (True, "divide: no way True to divide; known: planned, most"),
    ],
)
def test_what_is_no_way_to_divide(divide, said):
    assert message(ArgumentError, lambda: md.parallelize(step, MESH).check(*ARGS, divide=divide)) == said
