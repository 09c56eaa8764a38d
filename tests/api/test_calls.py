"""Calls of one kind share a plan: what jax takes for the same is one kind, and the log says why another is planned."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import meshdsl as md
from meshdsl.api import stages
from meshdsl.errors import TraceError

MESH = "data=4,model=2"
W, X = np.full((8, 8), 0.5, np.float32), np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)
LABELS = np.arange(16)
ON_DATA = NamedSharding(AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2), PartitionSpec("data"))


@pytest.fixture
def planned(monkeypatch):
    """The programs that were planned, one after the other."""
    programs, plan = [], stages.plan_best_variant

    def counted(program, *rest, **options):
        programs.append(program)
        return plan(program, *rest, **options)

    monkeypatch.setattr(stages, "plan_best_variant", counted)
    return programs


@pytest.fixture
def said(caplog):
    """Returns what was logged, without the name of the step."""
    caplog.set_level(logging.INFO, logger="meshdsl")
    return lambda: [record.getMessage() for record in caplog.records]


def lookup(w, labels):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(w[labels % 8] ** 2))(w)


def scaled(x, s):
    return x * s


# ---- One kind --------------------------------------------------------------------------------------------------------

SAME = {
    "int64": (lookup, W, [LABELS, jnp.asarray(LABELS), LABELS.astype(np.int32), LABELS.astype(">i4").astype(np.int64)]),
    "uint64": (lookup, W, [LABELS.astype(np.uint64), LABELS.astype(np.uint32), jnp.asarray(LABELS, jnp.uint32)]),
    "float64": (scaled, X, [np.float64(2), np.float32(2), np.asarray(2.0), jnp.float32(2)]),
    "complex128": (scaled, X, [np.complex128(2j), np.complex64(2j), jnp.complex64(2j)]),
    "Python int": (scaled, X, [2, 3, jnp.asarray(4)]),
    "Python float": (scaled, X, [2.0, -1.0, jnp.asarray(0.5)]),
    "Python bool": (scaled, X, [True, np.True_, np.asarray(False), jnp.asarray(True)]),
    "a list of rows": (lambda w, rows: [w @ r for r in rows], W, [[X[0], X[1]], [jnp.asarray(X[0]), np.float64(X[1])]]),
    "a view": (scaled, X, [X[::-1].T.T, np.asfortranarray(X), X.astype(np.float64), jnp.asarray(X)]),
    "a scalar array": (scaled, X, [np.array(3), np.int64(3), np.int32(3), jnp.int32(3)]),
}


@pytest.mark.parametrize("name", SAME)
def test_what_jax_takes_for_the_same_is_planned_once(name, planned, said):
    step, first, others = SAME[name]
    sharded, jitted = md.parallelize(step, MESH), jax.jit(step)
    for other in (*others, *others):
        got, want = jax.tree.leaves(sharded(first, other)), jax.tree.leaves(jitted(first, other))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
            assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
    assert len(planned) == len(sharded._stages) == 1
    assert said() == []


def test_shapes_and_values_are_of_one_kind(planned):
    sharded = md.parallelize(lookup, MESH)
    shape = jax.ShapeDtypeStruct((16,), jnp.int32)
    assert sharded.plan(W, shape) is sharded.plan(W, LABELS)
    sharded(W, LABELS)
    sharded.verify(W, shape)
    assert len(planned) == 1


def test_wide_integers_are_their_own_kind_where_jax_has_them(planned):
    sharded = md.parallelize(lambda i: i * 2, MESH)
    with jax.enable_x64(True):
        assert [sharded(i).dtype for i in (LABELS, LABELS.astype(np.int32), LABELS)] == ["int64", "int32", "int64"]
    assert sharded(LABELS).dtype == "int32"
    assert len(planned) == 3


# ---- One plan of several kinds ---------------------------------------------------------------------------------------


def actor_critic(state, batch):
    """As soft actor-critic: a temperature that begins as a number, targets that follow slowly."""

    def loss(p):
        q = jnp.tanh(batch @ p["q"])
        return jnp.mean((q - batch @ state["target"]) ** 2) - jnp.exp(p["log_alpha"]) * jnp.mean(q)

    params = {"q": state["q"], "log_alpha": state["log_alpha"]}
    value, grads = jax.value_and_grad(loss)(params)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    target = jax.tree.map(lambda t, q: 0.9 * t + 0.1 * q, state["target"], new["q"])
    return {**new, "target": target, "steps": state["steps"] + 1}, value


def agent(log_alpha):
    return {"q": W, "target": W, "log_alpha": log_alpha, "steps": 0}


def loss_scaled(state, batch):
    """As dynamic loss scaling: the scale doubles after finite steps."""

    def loss(w):
        return state["scale"] * jnp.mean((batch @ w) ** 2)

    grads = jax.grad(loss)(state["w"]) / state["scale"]
    finite = jnp.isfinite(grads).all()
    scale = jnp.where(finite, jnp.minimum(state["scale"] * 2, jnp.float32(2.0**24)), state["scale"] / 2)
    w = jnp.where(finite, state["w"] - 0.1 * grads, state["w"])
    return {"w": w, "scale": scale, "good": state["good"] + finite}


def trained(state, batch):
    def loss(params):
        return jnp.mean(state.apply_fn(params, batch) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def train_state():
    apply = lambda params, x: jnp.tanh(x @ params["w"]) + params["b"]  # noqa: E731
    return TrainState.create(apply_fn=apply, params={"w": W, "b": W[0]}, tx=optax.adam(1e-2))


def counted(state, batch):
    return {"w": state["w"] * state["decay"] + batch.sum() * 0.01, "n": state["n"] + 1, "decay": state["decay"]}


def restored(tree):
    """As from a checkpoint: numpy arrays, Python numbers gone."""
    return jax.tree.map(np.asarray, tree)


STATES = {
    "soft actor-critic": (actor_critic, lambda: agent(0.0), 0),
    "soft actor-critic with arrays": (actor_critic, lambda: agent(jnp.zeros(())), 0),
    "dynamic loss scale": (loss_scaled, lambda: {"w": W, "scale": 2.0**15, "good": 0}, None),
    "TrainState": (trained, train_state, None),
    "a decay that is passed on": (counted, lambda: {"w": W, "n": 0, "decay": 0.99}, None),
}


@pytest.mark.parametrize("name", STATES)
def test_states_plan_once(name, planned, said):
    """Through calls, after a restoration, and back from the beginning."""
    step, make, result = STATES[name]
    sharded, jitted = md.parallelize(step, MESH, {"batch": "data=S(0)"}), jax.jit(step)
    got, want = make(), make()
    for i in range(4):
        got, want = sharded(got, X), jitted(want, X)
        if result is not None:
            got, want = got[result], want[result]
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
            assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        if i == 1:
            got, want = restored(got), restored(want)
    sharded(make(), X)
    assert len(planned) == 1
    assert all("keeps its plan: " in line for line in said())


def test_a_new_optimizer_in_the_tree_keeps_the_plan(planned, said):
    """Functions are part of the tree of a TrainState, and those of a new one are others."""
    sharded = md.parallelize(trained, MESH, {"batch": "data=S(0)"})
    sharded(train_state(), X)
    sharded(train_state(), X)
    assert len(planned) == 1 and len(sharded._stages) == 2
    assert said() == [
        "trained is traced again and keeps its plan: what the tree of its arguments holds beside arrays changed"
    ]


def half(w, scale, x):
    """bfloat16 times a weak float32 is bfloat16, times a strong one float32: another program."""
    grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) * scale))(w)
    return w - (0.1 * grads).astype(w.dtype), jnp.tanh(x @ w) * scale


def test_layouts_are_taken_over_where_a_weak_type_makes_another_program(planned, said):
    w, x = W.astype(jnp.bfloat16), X.astype(jnp.bfloat16)
    sharded = md.parallelize(half, MESH, {"x": "data=S(0)"})
    first, second = sharded.plan(w, 2.0, x), sharded.plan(w, jnp.float32(2), x)
    assert [a.layout for a in first.inputs] == [a.layout for a in second.inputs]
    assert [a.layout for a in first.outputs] == [a.layout for a in second.outputs]
    assert [a.dtype for a in second.outputs] == ["bfloat16", "float32"]
    assert said() == ["planning half again between the same layouts: scale is float32[] instead of weak float32[]"]
    sharded.check(w, jnp.float32(2), x)
    sharded.verify(w, jnp.float32(2), x)


def averaged(w, rate, x):
    return w - rate * jax.lax.pmean(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), "batch")


def plain(w, rate, x):
    return w - rate * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


@pytest.mark.parametrize(
    ("step", "rows", "stated"),
    [
        (averaged, 16, {"axis_names": {"batch": "data"}}),
        (plain, 15, {"uneven": "pad"}),
        (plain, 15, {"uneven": "replicate"}),
        (lambda w, rate, x: plain(w, rate, jax.lax.with_sharding_constraint(x, ON_DATA)), 16, {}),
    ],
    ids=["axis names", "padded", "replicated", "a constraint of jax"],
)
def test_steps_whose_program_depends_on_the_mesh_keep_their_plans(step, rows, stated, planned):
    sharded = md.parallelize(step, MESH, {"x": "data=S(0)"}, **stated)
    for rate in (0.1, jnp.float32(0.2), np.float32(0.3)):
        np.testing.assert_allclose(sharded(W, rate, X[:rows]), plain(W, rate, X[:rows]), rtol=1e-5)
    sharded.check(W, jnp.float32(0.2), X[:rows])
    sharded.verify(W, jnp.float32(0.2), X[:rows])
    assert len(planned) == 1 and len(sharded._stages) == 2


def test_a_program_that_differs_elsewhere_is_planned_anew(planned):
    def step(x, mode):
        return x @ x.T if mode == "wide" else x.sum(0)

    sharded = md.parallelize(step, MESH, static_argnames="mode")
    alone = md.parallelize(step, MESH, static_argnames="mode")
    sharded.plan(X, "wide")
    assert sharded.plan(X, "narrow") == alone.plan(X, "narrow")
    assert len(planned) == 3


# ---- Reasons ---------------------------------------------------------------------------------------------------------


def anything(x, y=None, mode="a", **more):
    return jax.tree.map(lambda a: a * (2 if mode == "a" else a.ndim + 2.5), (x, y, more))


REASONS = [
    ("y is new", (X, X), {}),
    ("y is gone", (X,), {}),
    ("x is float32[4,8] instead of float32[16,8]", (X[:4],), {}),
    ("x is int32[16,8] instead of float32[16,8]", (X.astype(int),), {}),
    ("static argument mode is 'b' instead of not given", (X,), {"mode": "b"}),
    ("z is new", (X,), {"z": X}),
    ("x is weak float32[] instead of float32[16,8]", (1.0,), {}),
    ("x is gone; x/0 is new and 1 more", ([X, X],), {}),
    ("x is gone; x/a is new; static argument mode is 'b' instead of 'c'", ({"a": X},), {"mode": "b"}),
]


@pytest.mark.parametrize(("reason", "args", "kwargs"), REASONS, ids=[reason for reason, _, _ in REASONS])
def test_reasons(reason, args, kwargs, said):
    sharded = md.parallelize(anything, MESH, static_argnames="mode")
    before = {"y is gone": ((X, X), {}), "static": ((X,), {"mode": "c"})}
    first = before["y is gone"] if reason == "y is gone" else before["static"] if "'c'" in reason else ((X,), {})
    sharded.plan(*first[0], **first[1])
    sharded.plan(*args, **kwargs)
    assert said() == [f"planning anything again: {reason}"]


def test_the_reason_compares_with_the_nearest_kind(said):
    sharded = md.parallelize(scaled, MESH)
    for x, s in ((X, np.float32(1)), (X[:8], np.int32(1)), (X[:8], np.float32(1))):
        sharded.plan(x, s)
    assert said()[-1] == "planning scaled again: s is float32[] instead of int32[]"


def test_an_error_of_another_kind_says_what_is_new_in_the_call():
    sharded = md.parallelize(lambda w, x: x @ w, MESH)
    plan = sharded.plan(W, X)
    for each, note in (
        (sharded, "unlike an earlier call: x is float32[16,7] instead of float32[16,8]"),
        (
            md.parallelize(lambda w, x: x @ w, MESH, plan=plan),
            "plan= is for other arguments:\n  x: float32[16,8] in the plan, float32[16,7] here",
        ),
    ):
        with pytest.raises(TypeError, match="contracting dimensions") as caught:
            each(W, X[:, :7])
        assert caught.value.__notes__[-1] == note


# ---- Forms -----------------------------------------------------------------------------------------------------------


def test_shapes_in_turn_with_static_arguments_and_keywords():
    def step(p, batch, mode="train", *, rate=0.1):
        return jax.tree.map(lambda w: w - rate * batch.mean() * (1 if mode == "train" else 0), p)

    sharded = md.parallelize(step, MESH, {"batch": "data=S(0)"}, static_argnames="mode")
    calls = [((X,), {}), ((X[:8], "eval"), {}), ((X,), {"mode": "eval"}), ((X[:8],), {"rate": 0.5, "mode": "train"})]
    for _ in range(3):
        for args, kwargs in calls:
            got, want = sharded({"w": W}, *args, **kwargs), step({"w": W}, *args, **kwargs)
            np.testing.assert_allclose(got["w"], want["w"], rtol=1e-6)
    assert len(sharded._forms) == len(calls)


def test_equal_static_arguments_of_other_types_are_others():
    sharded = md.parallelize(scaled, MESH, static_argnums=1)
    jitted = jax.jit(scaled, static_argnums=1)
    i = np.arange(8, dtype=np.int32)
    for n in (1, True, 1.0, 1, 1.0):
        assert sharded(i, n).dtype == jitted(i, n).dtype


def test_a_static_argument_by_position_or_name_is_one_kind(planned):
    sharded = md.parallelize(scaled, MESH, static_argnames="s")
    sharded(X, 2)
    sharded(X, s=2)
    assert len(planned) == 1 and len(sharded._stages) == 1


def test_every_call_of_a_form_goes_straight_to_the_program(monkeypatch):
    sharded = md.parallelize(scaled, MESH, static_argnames="s", donate_argnames="x")
    x = sharded(X, 2)
    x = sharded(x, s=2)
    monkeypatch.setattr(sharded, "_flatten", None)
    for _ in range(3):
        x = sharded(x, s=2)
    np.testing.assert_allclose(x, X * 32)


@pytest.mark.parametrize("form", ["numpy", "uncommitted", "committed", "another mesh", "placed"])
@pytest.mark.parametrize("donate", [(), (0,)])
def test_arguments_wherever_they_are(form, donate):
    sharded = md.parallelize(scaled, MESH, {"x": "data=S(0)"}, donate_argnums=donate)
    other = NamedSharding(Mesh(np.array(jax.devices()[::-1]), "d"), PartitionSpec("d"))
    makers = {
        "numpy": lambda: X,
        "uncommitted": lambda: jnp.array(X),
        "committed": lambda: jax.device_put(X, jax.devices()[3]),
        "another mesh": lambda: jax.device_put(X, other),
        "placed": lambda: jax.device_put(X, sharded.input_shardings(X, 2.0)[0][0]),
    }
    for _ in range(3):
        x = makers[form]()
        np.testing.assert_allclose(sharded(x, 2.0), X * 2)
        if isinstance(x, jax.Array):
            assert x.is_deleted() == bool(donate)
    if donate and form != "numpy":
        with pytest.raises(TraceError, match="was donated to an earlier call"):
            sharded(x, 2.0)


def test_objects_whose_state_begins_weak(monkeypatch):
    """The first call makes it strong, so the second one is of another kind; the third goes straight to the program."""
    state = nnx.Variable(jnp.asarray(2.0))
    assert state.get_raw_value().weak_type

    def step(state, x):
        state[...] = state[...] * x.sum()
        return x * state[...]

    sharded, want = md.parallelize(step, MESH, {"x": "data=S(0)"}), 2.0
    for i in range(4):
        if i == 3:
            monkeypatch.setattr(sharded, "_flatten", None)
        got, want = sharded(state, np.ones((4, 1), np.float32)), want * 4
        np.testing.assert_allclose(got, np.full((4, 1), want))
    assert len(sharded._stages) == 2


def test_an_error_of_the_program_is_not_taken_for_one_of_placement():
    def fail(x):
        raise ValueError("no such row")

    def step(x):
        return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    sharded = md.parallelize(step, "data=1")
    for _ in range(2):
        with pytest.raises(Exception, match="no such row"):
            jax.block_until_ready(sharded(X))
