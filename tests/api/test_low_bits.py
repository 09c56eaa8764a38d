"""``low_bits=``: plans that round what they send are within the budget, and send what they say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.errors import ArgumentError, CheckError, PlanFileError
from meshdsl.layouts import Link
from meshdsl.planner.objective import exact_surcharge
from tests.sweeps import swept

SLOW = dataclasses.replace(md.topology("dgx-h100"), name="slow", overhead=0.0, links=(Link(1e-9, 1e6),))
MESHES = [md.Mesh(data=8, topology=SLOW), md.Mesh(data=4, model=2, topology=SLOW)]
BUDGETS = (0.002, 0.01, "0.03:float8_e4m3fn")


def filled(*shape):
    return np.random.default_rng(len(shape) + sum(shape)).normal(0, 0.2, shape).astype(np.float32)


def trained(loss):
    def step(p, b):
        value, g = jax.value_and_grad(loss)(p, b)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, g), value

    return step


def mlp_loss(p, b):
    return jnp.mean((jnp.tanh(b @ p["up"]) @ p["down"] - b) ** 2)


def layers_loss(p, b):
    out, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None), b, p)
    return jnp.mean((out - 1) ** 2)


def attention_loss(p, b):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", b, p[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k) / 4)
    out = jnp.einsum("bhst,bthe->bshe", weights, v)
    return jnp.mean((jnp.einsum("bshe,hed->bsd", out, p["o"]) - b) ** 2)


OPTIMIZER = optax.adamw(1e-3)


def adam(s, b):
    p, state = s
    value, g = jax.value_and_grad(mlp_loss)(p, b)
    updates, state = OPTIMIZER.update(g, state, p)
    return (optax.apply_updates(p, updates), state), value


WEIGHTS, BATCH = {"up": filled(64, 250), "down": filled(250, 64)}, filled(128, 64)  # parts that are no whole blocks
STACK = {"up": filled(4, 64, 128), "down": filled(4, 128, 64)}
HEADS = {"q": filled(64, 8, 16), "k": filled(64, 8, 16), "v": filled(64, 8, 16), "o": filled(8, 16, 64)}
SHARDED = {"b": "data=S(0)", "p/**": "data=S(0)"}
STEPS = {
    "mlp": (trained(mlp_loss), (WEIGHTS, BATCH), {"b": "data=S(0)", "p/up": "data=S(0)", "p/down": "data=S(1)"}),
    "layers": (trained(layers_loss), (STACK, BATCH), {"b": "data=S(0)", "p/**": "data=S(1)"}),
    "attention": (trained(attention_loss), (HEADS, filled(16, 32, 64)), SHARDED),
    "zero-1": (adam, ((WEIGHTS, OPTIMIZER.init(WEIGHTS)), BATCH), {"b": "data=S(0)", "s/0/**": "data=B"}),
}
DTYPES = ("float32", "bfloat16")
CASES = [(name, mesh, low, dtype) for low in BUDGETS for dtype in DTYPES for mesh in MESHES for name in STEPS]


def equal_on_all_devices(tree):
    for x in jax.tree.leaves(tree):
        known = {}
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(known.setdefault(str(shard.index), shard.data), shard.data)


@swept(
    ("name", "mesh", "low_bits", "dtype"),
    CASES,
    kept=[("layers", MESHES[0], 0.01, "float32"), ("mlp", MESHES[1], BUDGETS[2], "bfloat16")],
)
def test_steps_are_within_the_budget_and_send_what_is_planned(name, mesh, low_bits, dtype):
    step, args, layouts = STEPS[name]
    args = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, args)
    sharded, full = (md.parallelize(step, mesh, layouts, low_bits=low) for low in (low_bits, None))
    plan, whole = sharded.plan(*args), full.plan(*args)
    formats = {c.format for c in plan.collectives} - {""}
    coarsest = {0.002: "bfloat16" if dtype == "float32" else "", 0.01: "int8"}.get(low_bits, "float8_e4m3fn")
    assert formats == {coarsest} - {""}
    assert plan.bytes <= (0.55 if formats else 1) * whole.bytes and plan.lower_bound <= plan.seconds <= whole.seconds
    report = sharded.verify(*args)
    assert report.equal and (report.sums is None or report.sums.equal)
    equal_on_all_devices(sharded(*args))
    assert sharded.check(*args).ok


def still(p, b):
    """Trains nothing: the weights have to stay as they are, bit by bit."""
    value, g = jax.value_and_grad(mlp_loss)(p, b)
    return jax.tree.map(lambda w, g: w - 0 * g, p, g), value


def still_in_a_loop(p, b):
    return jax.lax.scan(lambda p, _: still(p, b), p, None, length=2)


@swept("step", [still, still_in_a_loop], kept=(still_in_a_loop,))
@swept("mesh", MESHES, kept=MESHES[:1], ids=str)
@pytest.mark.parametrize("outputs", [None, {"0/**": "data=B"}], ids=["same", "gathered"])
def test_no_state_is_rounded(step, mesh, outputs):
    sharded = md.parallelize(
        step, mesh, {"b": "data=S(0)", "p/up": "data=S(0)", "p/down": "data=S(1)"}, outputs, low_bits=0.01
    )
    made, _ = sharded(WEIGHTS, BATCH)
    assert any(c.format for c in sharded.plan(WEIGHTS, BATCH).collectives)
    jax.tree.map(np.testing.assert_array_equal, made, WEIGHTS)
    assert sharded.verify(WEIGHTS, BATCH, sums=0).equal


@pytest.mark.parametrize(
    ("step", "layout"),
    [
        (lambda t, new: jnp.roll(t, -4, 0).at[-4:].set(new), "S(0)"),
        (lambda t, new: t[:, ::-1][:, jnp.arange(64) ^ 1], "S(1)"),
        (lambda t, new: md.constrain(t, "data=B").at[:4].set(new), "S(0)"),
        (lambda t, new: jnp.take(md.constrain(t, "data=B"), jnp.asarray([3, 1, 2, 0] * 16), 0), "S(0)"),
    ],
    ids=["ring", "columns", "set", "taken"],
)
def test_state_that_moves_is_exact(step, layout):
    args = filled(64, 64), filled(4, 64)
    sharded = md.parallelize(step, MESHES[0], {"t": f"data={layout}"}, low_bits=0.01)
    assert sum(c.bytes for c in sharded.plan(*args).collectives)
    np.testing.assert_array_equal(sharded(*args), jax.jit(step)(*args))


OPTIMIZERS = {"adam": optax.adam(1e-2), "adamw": optax.adamw(1e-2), "momentum": optax.sgd(0.1, momentum=0.9)}


@swept("name", OPTIMIZERS, kept=("adamw",))
def test_updates_of_whole_weights_are_rounded_and_weights_are_not(name):
    optimizer = OPTIMIZERS[name]

    def step(p, state, b):
        updates, state = optimizer.update(jax.grad(mlp_loss)(p, b), state, p)
        return optax.apply_updates(p, updates), state

    layouts = {"b": "data=S(0)", "p/*": "data=B", "state/**/up": "data=S(0)", "state/**/down": "data=S(1)"}
    sharded, full = (md.parallelize(step, MESHES[0], layouts, low_bits=low) for low in (0.01, None))
    state = optimizer.init(WEIGHTS)
    plan = sharded.plan(WEIGHTS, state, BATCH)
    assert {c.sent for c in plan.collectives if c.phase == "optimizer"} == {"all-gather int8"}
    assert plan.bytes < 0.3 * full.plan(WEIGHTS, state, BATCH).bytes
    assert sharded.verify(WEIGHTS, state, BATCH).equal
    made, expected = (run(WEIGHTS, state, BATCH)[0] for run in (sharded, jax.jit(step)))
    for key, w in WEIGHTS.items():
        moved, change = np.asarray(made[key]) - w, np.asarray(expected[key]) - w
        lost = 0.02 if name == "momentum" else 0.15  # the first step of Adam takes the signs of the smallest gradients
        assert 0 < np.linalg.norm(moved - change) < lost * np.linalg.norm(change)


def steps(p, momentum, batches):
    """Takes four steps; where an update runs whole on every device, it is sent the weights in full."""

    def step(carry, b):
        p, m = carry
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, jax.grad(mlp_loss)(p, b))
        return (jax.tree.map(lambda w, m: w - 0.1 * m, p, m), m), None

    return jax.lax.scan(step, (p, momentum), batches)[0]


STEPPED = WEIGHTS, jax.tree.map(np.zeros_like, WEIGHTS), filled(4, 128, 64)


@swept("mesh", MESHES, kept=MESHES[:1], ids=str)
def test_states_that_are_read_elsewhere_are_priced_in_full(mesh):
    layouts = {"batches": "data=S(1)", "p/up": "data=S(0)", "p/down": "data=S(1)"}
    sharded = md.parallelize(steps, mesh, layouts, low_bits=0.01)
    planned = sharded.stages(*STEPPED).planned
    assert planned.plan.gap < 0.01 and planned.variant.seconds == pytest.approx(planned.plan.seconds)
    assert sharded.verify(*STEPPED, sums=0).equal
    assert sharded.check(*STEPPED, tolerance=0.02).ok  # errors of four steps add up


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_no_plan_undercuts_the_objective(mesh):
    """Plans drawn at random, which read state where it does not lie, and do not."""
    sharded = md.parallelize(steps, mesh, {"batches": "data=S(1)"}, low_bits=0.01)
    found = sharded.stages(*STEPPED).planned.variant.outcome
    rng, in_full = np.random.default_rng(0), 0
    for share in np.linspace(0.02, 0.5, 60):
        rows = found.fit.plan.rows.copy()
        for n in np.flatnonzero(rng.random(len(rows)) < share):
            states = found.model.states[n]
            rows[n] = states[rng.integers(len(states))]
        drawn = found.at_rows(rows)
        if np.isfinite(drawn.seconds):
            assert drawn.seconds <= drawn.unproved_solution.seconds * (1 + 1e-6)
            in_full += exact_surcharge(found.model, rows) > 0
    assert in_full > 5


@pytest.mark.parametrize("first", ["g", "m"])
def test_a_sum_that_may_replace_either_operand_is_exact(first):
    """Of two arguments of one type, the first is taken for the one that is replaced, whichever that is."""
    layouts = {"m": "data=S(0)", "g": "data=B"}

    def decayed(m):
        return md.constrain(m * 0.5, "data=B")

    step = {"g": lambda g, m: g + decayed(m), "m": lambda m, g: g + decayed(m)}[first]
    sharded = md.parallelize(step, MESHES[0], layouts, low_bits=0.01)
    args = {"g": np.zeros((64, 64), np.float32), "m": filled(64, 64)}
    assert sharded.plan(**args).bytes
    np.testing.assert_array_equal(sharded(**args), args["m"] * 0.5)


def test_states_that_change_places_are_exact():
    def step(t):
        return {"a": md.constrain(t["b"], "data=B") * 2, "b": md.constrain(t["a"], "data=B") * 2}

    t = {"a": filled(64, 64), "b": filled(64, 64) + 1}
    sharded = md.parallelize(step, MESHES[0], {"t/*": "data=S(0)"}, low_bits=0.01)
    assert sum(c.bytes for c in sharded.plan(t).collectives)
    jax.tree.map(np.testing.assert_array_equal, sharded(t), jax.jit(step)(t))


def test_a_maximum_finds_itself():
    """The gradient of a maximum goes to the elements that equal it: there are none if it is rounded."""

    def step(w, b):
        made = md.constrain(jnp.tanh(b @ w), "data=S(1)")
        return jnp.sum(made == md.constrain(jnp.max(made, axis=0), "data=B"), axis=0)

    sharded = md.parallelize(step, MESHES[0], {"b": "data=B", "w": "data=S(1)"}, low_bits=0.01)
    assert sharded(filled(64, 256), filled(128, 64)).min() == 1


def test_a_saved_plan_rounds_as_it_says(tmp_path):
    step, args, layouts = STEPS["mlp"]
    plan = md.parallelize(step, MESHES[0], layouts, low_bits=0.01).plan(*args)
    plan.save(tmp_path / "p.json")
    loaded = md.load_plan(tmp_path / "p.json")
    assert loaded == plan and loaded.low_bits == "0.01"
    again = md.parallelize(step, MESHES[0], layouts, plan=loaded)
    assert again.verify(*args).equal and "budget 1.00%" in str(again.check(*args))
    text = str(plan)
    assert "all-gather int8" in text and "collectives: int8, which loses 0.65% of normal numbers" in text
    other = md.parallelize(step, MESHES[0], layouts).plan(*args)
    assert ("low_bits", "0.01", "none") in plan.diff(other).made_for
    with pytest.raises(
        ArgumentError, match=r"low_bits: plan= runs a plan as it is, low_bits=0.01 looks for another one"
    ):
        md.parallelize(step, MESHES[0], layouts, plan=loaded, low_bits=0.01)
    file = tmp_path / "p.json"
    file.write_text(file.read_text().replace('"low_bits":"0.01"', '"low_bits":"0.002"'))
    with pytest.raises(PlanFileError, match=r"sends int8, which loses more than low_bits=0.002"):
        md.load_plan(file)


def test_more_than_the_budget_is_an_error():
    """What is small beside what is sent with it is lost."""

    def step(w, b):
        return jnp.tanh(md.constrain(md.constrain(b @ w, "data=S(0)") + 1000.0, "data=B") - 1000.0)

    sharded = md.parallelize(step, MESHES[0], {"b": "data=S(0)", "w": "data=B"}, low_bits=0.01)
    with pytest.raises(
        CheckError,
        match=r"root mean square error \d+\.\d\d%, budget 1.00% .*\ncollectives round what they send, and ",
    ):
        sharded.check(filled(64, 32), filled(128, 64))


def test_equal_rows_of_bytes_are_sent_twice():
    """Of a block, its view and its cast, compilers could see that their rounded parts are equal."""

    def step(x, w):
        one = md.constrain(x, "data=S(2) model=B").reshape(8, 64) @ w[0]
        two = md.constrain(x.reshape(8, 16, 4), "data=S(1) model=B").reshape(8, 64) @ w[1]
        wide = md.constrain(x.astype(jnp.float32), "data=S(0) model=B")
        three = md.constrain(wide, "data=S(2) model=B").reshape(8, 64) @ w[2]
        return one, two, three

    args = jnp.asarray(filled(8, 1, 64), jnp.bfloat16), jnp.asarray(filled(3, 64, 8), jnp.bfloat16)
    sharded = md.parallelize(step, MESHES[1], {"x": "data=S(0) model=B", "w": "data=B model=B"}, low_bits=0.01)
    assert [c.sent for c in sharded.plan(*args).collectives].count("all-to-all int8") == 3
    assert sharded.verify(*args).equal


def test_nothing_smaller_within_the_budget_sends_in_full():
    step, args, layouts = STEPS["mlp"]
    args = jax.tree.map(lambda x: x.astype(jnp.bfloat16), args)
    plan = md.parallelize(step, MESHES[0], layouts, low_bits=0.002).plan(*args)
    assert "low_bits=0.002: all is sent in full: nothing that may be rounded is cheaper so" in plan.notes
