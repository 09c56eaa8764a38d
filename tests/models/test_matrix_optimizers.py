"""Optimizers of whole matrices on packed parameters: the updates of unpacked ones, at the bytes of ZeRO-1."""

from itertools import repeat

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import meshdsl as md
from meshdsl.errors import ArgumentError
from meshdsl.models.matrix_optimizers import muon, packed, shampoo, soap
from tests.models.values import filled, quick
from tests.trials import fast_options

PARAMS = {
    "up": jax.ShapeDtypeStruct((3, 4, 12), jnp.float32),
    "down": jax.ShapeDtypeStruct((3, 12, 4), jnp.float32),
    "out": jax.ShapeDtypeStruct((3, 2, 2, 4), jnp.float32),  # heads and elements of one head are rows
    "scale": jax.ShapeDtypeStruct((5,), jnp.float32),
}


def view(path, shape):
    return None if path == "scale" else (1, 2 if path == "out" else 1)


def test_packed_muon_is_muon_on_every_matrix():
    rows = {"up": 1, "down": 1, "out": (1, 2)}
    whole = {name: contrib.MuonDimensionNumbers(rows[name], -1) if name in rows else None for name in PARAMS}
    options = {"ns_steps": 3, "beta": 0.9, "nesterov": False}
    decays = {"weight_decay": 0.5, "adam_weight_decay": 0.5}
    apart = contrib.muon(0.1, muon_weight_dimension_numbers=whole, consistent_rms=0.2, adam_b2=0.9, **options, **decays)

    both = muon(0.1, view, 8, weight_decay=0.5, adam={"b2": 0.9, "nesterov": False}, **options), apart
    params = filled(PARAMS)
    ours, theirs = quick(lambda g: [x.update(g, x.init(params), params)[0] for x in both])(filled(PARAMS))
    for name in PARAMS:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6)
    shapes = jax.eval_shape(both[0].init, PARAMS)
    stacks = {x.shape for x in jax.tree.leaves(shapes) if len(x.shape) == 3}
    assert stacks == {(8, 4, 12), (8, 4, 4)}  # 6 and 3 matrices


def inverse_root(x, order):
    values, vectors = np.linalg.eigh(x)
    return vectors @ np.diag((np.maximum(values, 0) + 1e-4 * values[-1]) ** (-1 / order)) @ vectors.T


def shampoo_of_a_matrix(gradients, left, right, b1, b2):
    """The updates of Gupta et al. 2018, grafted to Adam; the roots are those of steps 0, 2, ..."""
    m = v = 0.0
    statistics = [0.0, 0.0]
    for t, g in enumerate(gradients):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        statistics = [b2 * x + (1 - b2) * gram for x, gram in zip(statistics, (g @ g.T, g.T @ g))]
        if t % 2 == 0:
            one, other = (inverse_root(x, 2 * (left + right)) for x in statistics)
        u = (one if left else np.eye(len(g))) @ m @ (other if right else np.eye(g.shape[1]))
        adam = m / (1 - b1 ** (t + 1)) / (np.sqrt(v / (1 - b2 ** (t + 1))) + 1e-8)
        yield u * np.linalg.norm(adam) / np.linalg.norm(u)


def soap_of_a_matrix(gradients, left, right, b1, b2):
    """Algorithms 3 and 4 of Vyas et al. 2024, with Adam's corrections and a ridge; new bases after steps 0, 2, ..."""
    m = v = 0.0
    statistics, bases = [0.0, 0.0], [np.eye(n) for n in gradients[0].shape]
    for t, g in enumerate(gradients):
        q, p = bases
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * (q.T @ g @ p) ** 2
        n = q.T @ m @ p / (1 - b1 ** (t + 1)) / (np.sqrt(v / (1 - b2 ** (t + 1))) + 1e-8)
        yield q @ n @ p.T
        statistics = [b2 * x + (1 - b2) * gram for x, gram in zip(statistics, (g @ g.T, g.T @ g))]
        if t % 2 == 0:
            ridged = [x + 1e-2 * np.trace(x) / len(x) * np.eye(len(x)) for x in statistics]
            found = [np.linalg.qr(x @ basis)[0] for x, basis in zip(ridged, bases)]
            bases = [new if wanted else old for new, old, wanted in zip(found, bases, (left, right))]


@pytest.mark.parametrize("largest", [4, 12])  # the sides of 12 have statistics, or not
@pytest.mark.parametrize(("made", "of_a_matrix"), [(shampoo, shampoo_of_a_matrix), (soap, soap_of_a_matrix)])
def test_updates_are_those_of_every_matrix_alone(made, of_a_matrix, largest):
    optimizer = made(1.0, view, 8, b1=0.9, b2=0.8, every=2, largest=largest)
    draw = np.random.default_rng(0)
    gradients = [jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), PARAMS) for _ in range(5)]

    @quick
    def updates(gradients):
        def one(state, g):
            found, state = optimizer.update(g, state, g)
            return state, found

        return jax.lax.scan(one, optimizer.init(gradients[0]), jax.tree.map(lambda *x: jnp.stack(x), *gradients))[1]

    found = updates(gradients)
    for name, rows in {"up": 4, "down": 12, "out": 4}.items():
        for layer in range(3):
            alone = [np.float64(g[name][layer]).reshape(rows, -1) for g in gradients]
            sides = (n <= largest for n in alone[0].shape)
            want = list(of_a_matrix(alone, *sides, 0.9, 0.8))
            np.testing.assert_allclose(
                found[name][:, layer].reshape(5, rows, -1), np.negative(want), rtol=2e-3, atol=2e-4
            )


@pytest.mark.parametrize("made", [shampoo, soap])
def test_24_steps_on_8_owners_are_those_of_one_device(made):
    optimizer = made(1e-2, lambda path, shape: (0, 1), 8, "data", every=5)

    def loss(params, x, y):
        for w in params:
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return jnp.mean((x - y) ** 2)

    def step(params, state, x, y):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    up, down = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 24), (24, 8)))
    params = filled([{"up": up, "down": down}] * 3)  # 6 matrices
    x, y = filled([jax.ShapeDtypeStruct((64, 8), jnp.float32)] * 2, 1.0)
    args = params, optimizer.init(params), x, y
    sharded = md.parallelize(step, "data=8", {"x": "data=S(0)", "y": "data=S(0)", "params/**": "data=B"})
    plan = sharded.plan(*args)
    sent = {c.kind: c.bytes for c in plan.collectives}
    assert sent.pop("all-reduce") == 2 * 4 * 7 // 8  # the loss
    assert sent == dict.fromkeys(("reduce-scatter", "all-gather"), 4 * 8 * 8 * 24 * 7 // 8)
    stack = f"state/inner_states/{made.__name__}/inner_state/0/stacks/8x24_float32"
    assert {str(plan.layout(f"{stack}/statistics/{side}")) for side in (0, 1)} == {"data=S(0)"}

    alone = quick(step)
    one = other = args
    losses = []
    for _ in repeat(None, 24):
        *one, a = alone(*one[:2], x, y)
        *other, b = sharded(*other[:2], x, y)
        losses.append((float(a), float(b)))
    assert losses[-1][0] < 0.9 * losses[0][0]
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-5)
    for a, b in zip(jax.tree.leaves(one[0]), jax.tree.leaves(other[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_gradients_of_zero_change_nothing():
    """As those of packed zeros, and of layers behind one that begins at zero."""
    for made in (shampoo, soap):
        optimizer = made(1.0, view, 8, every=1)
        params = jax.tree.map(jnp.zeros_like, filled(PARAMS))
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = quick(optimizer.update)(params, state, params)
        assert not any(np.any(x) for x in jax.tree.leaves(updates))
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state))


def test_matrices_of_another_dtype_have_their_own_stack():
    params = PARAMS | {"down": jax.ShapeDtypeStruct((3, 12, 4), jnp.bfloat16)}
    optimizer = muon(0.1, view, 8, weight_decay=0.1)
    state = jax.eval_shape(optimizer.init, params)
    updates, after = jax.eval_shape(optimizer.update, params, state, params)
    assert updates == params
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    momentum = state.inner_states["muon"].inner_state[0][0].mu
    assert sorted(momentum) == ["4x12_bfloat16", "4x12_float32", "4x4_float32"]
    mixed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)  # gradients
    assert jax.eval_shape(optimizer.update, mixed, state, params)[0] == mixed


def test_61_layers_on_16_owners_send_5_percent_more_than_zero_1():
    layers, devices = 61, 16
    params = {"w": jax.ShapeDtypeStruct((layers, 32, 32), jnp.float32)}
    optimizer = muon(0.1, lambda path, shape: (1, 1), devices, "data")

    def loss(params, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0])

    def step(params, state, x):
        updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    args = params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((1024, 32), jnp.float32)
    plan = md.parallelize(step, f"data={devices}", {"x": "data=S(0)", "params/*": "data=B"}).plan(*args)
    zero = 2 * 4 * layers * 32 * 32 * (devices - 1) // devices
    assert plan.bytes == zero * 64 // layers <= 1.05 * zero
    assert {c.kind for c in plan.collectives} == {"reduce-scatter", "all-gather"}
    assert str(plan.layout("state/inner_states/muon/inner_state/0/0/mu/32x32_float32")) == "data=S(0)"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, r"packed: down \[3, 12, 4\] is no matrix; give it to another optimizer"),
        ((1, 2), r"view: down \[3, 12, 4\] has 3 dims, which 1 stacked dims and 2 row dims"),
        (1, r"view: 1 for down \[3, 12, 4\] is not \(stacked dims, row dims\); return \(1, 1\) for"),
        ((1.0, 1), r"view: \(1.0, 1\) for down"),
    ],
)
def test_parameters_that_are_no_matrices_are_named(found, message):
    with pytest.raises(ArgumentError, match=message):
        packed(optax.sgd(0.1), lambda path, shape: found).init(PARAMS)


def test_arguments_are_checked_before_anything_is_traced():
    for multiple in (0, 4.0, True):
        with pytest.raises(ArgumentError, match=f"multiple={multiple}: must be the number of devices .* an int"):
            muon(0.1, view, multiple)
    with pytest.raises(ArgumentError, match="multiple=None with owners='data': give the number of devices along data"):
        muon(0.1, view, owners="data")
    with pytest.raises(ArgumentError, match="view=8: must be a function of path and shape"):
        muon(0.1, 8)
    with pytest.raises(ArgumentError, match="every=0: must be the number of updates between two preconditioners, an"):
        shampoo(0.1, view, every=0)
    with pytest.raises(ArgumentError, match=r"b1=1.5: must be at least 0 and below 1"):
        soap(0.1, view, b1=1.5)
    with pytest.raises(ArgumentError, match="ridge=0: must be above 0, since statistics have eigenvalues of 0"):
        shampoo(0.1, view, ridge=0)
    with pytest.raises(ArgumentError, match=r"largest=3: both sides of matrices \[4, 12\] are longer, .* at least 4"):
        jax.eval_shape(soap(0.1, view, largest=3).init, PARAMS)


def test_matrices_split_along_their_rows_are_sent_to_their_owners():
    """One matrix per device, half of them transposed: XLA on CPU fails on such an exchange without a barrier."""

    def exchanged(stacks, _):
        rows = jax.tree.map(lambda x: md.constrain(x, "data=S(1)"), stacks)
        whole = jax.tree.map(lambda x: md.constrain(x, "data=S(0)"), rows)
        return jax.tree.map(lambda x: x / (1 + jnp.sum(x**2, (1, 2), keepdims=True)), whole)

    optimizer = packed(optax.stateless(exchanged), lambda path, shape: (0, 1), 8)

    def loss(params, x):
        for w in params:
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return jnp.sum(x)

    def step(params, x):
        return optimizer.update(jax.grad(loss)(params, x), optimizer.init(params))[0]

    up, down = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 1024), (1024, 256)))
    args = [{"up": up, "down": down}] * 4, jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    sharded = md.parallelize(step, "data=8", {"x": "data=S(0)", "params/**": "data=B"})
    assert [c.kind for c in sharded.plan(*args).collectives].count("all-to-all") == 1
    sharded.lower(*args).compile(fast_options())
