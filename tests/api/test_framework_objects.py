"""Training state as frameworks hold it: planned, checked and verified, and trained for a few steps as ``jax.jit`` does.

Objects of flax, optax, jmp and plain JAX; those of equinox and haiku are in files of their own.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import optax
from flax import nnx
from flax.training import dynamic_scale, train_state

from tests.api.framework_steps import BATCH, X, proved
from tests.sweeps import swept

# ---- flax.linen ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(16, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.2, deterministic=not train)(nn.relu(x))
        return nn.Dense(4)(x)


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(16)(x)))


class NormState(train_state.TrainState):
    batch_stats: Any
    key: jax.Array


def test_train_state_with_batch_statistics_and_dropout():
    net = Net()
    variables = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    state = NormState.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 100))),
        batch_stats=variables["batch_stats"],
        key=jax.random.key(2),
    )

    def step(state, batch):
        key = jax.random.fold_in(state.key, state.step)

        def loss(params):
            logits, new = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["x"],
                mutable=["batch_stats"],
                rngs={"dropout": key},
            )
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"]), value

    proved(step, state, BATCH, steps=2)

    def evaluate(state, batch):
        logits = state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, batch["x"], train=False)
        return {"correct": jnp.sum(jnp.argmax(logits, -1) == batch["y"]), "logits": logits}

    proved(evaluate, state, BATCH)


class ScaledState(train_state.TrainState):
    scale: dynamic_scale.DynamicScale


def test_dynamic_scale():
    net = Plain()
    state = ScaledState.create(
        apply_fn=net.apply,
        params=net.init(jax.random.key(0), X)["params"],
        tx=optax.sgd(1e-2, momentum=0.9),
        scale=dynamic_scale.DynamicScale(growth_interval=2),
    )

    def step(state, batch):
        def loss(params):
            logits = state.apply_fn({"params": jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)}, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"]).mean()

        scale, finite, value, grads = state.scale.value_and_grad(loss)(state.params)
        new = state.apply_gradients(grads=grads)
        keep = lambda a, b: jax.tree.map(lambda x, y: jnp.where(finite, x, y), a, b)  # noqa: E731
        return new.replace(
            opt_state=keep(new.opt_state, state.opt_state), params=keep(new.params, state.params), scale=scale
        ), value

    proved(step, state, BATCH, steps=3, tolerance=0.05)


def test_nnx_state_in_a_flax_train_state():
    graphdef, params = nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.Param)
    state = train_state.TrainState.create(apply_fn=graphdef.apply, params=params, tx=optax.adam(1e-2))

    def step(state, batch):
        def loss(params):
            logits, _ = state.apply_fn(params)(batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    proved(step, state, BATCH)


# ---- optax -----------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    params: Any
    opt: Any
    ema: Any


OPTIMIZERS = {
    "accumulated on a schedule": lambda: optax.MultiSteps(optax.adamw(1e-2), lambda step: jnp.where(step < 1, 1, 3)),
    "skipped if not finite": lambda: optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=3),
    "injected schedule": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10), weight_decay=1e-3
    ),
    "masked and averaged": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(1e-2), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        optax.ema(0.9),
        optax.scale(-1e-2),
    ),
    "by kind": lambda: optax.multi_transform(
        {"w": optax.adam(1e-2), "b": optax.sgd(1e-2)}, {"a": "w", "b": "b", "c": "w"}
    ),
    "factored": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "on plateau": lambda: optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
}


def params():
    a, c = (0.3 * jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(8, 16), (16, 4)]))
    return {"a": a, "b": jnp.zeros(16), "c": c}


def loss_of(params, batch):
    logits = jnp.tanh(batch["x"] @ params["a"] + params["b"]) @ params["c"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@swept("name", OPTIMIZERS, every=2)
def test_optimizers(name):
    optimizer = OPTIMIZERS[name]()

    def step(state, batch):
        value, grads = jax.value_and_grad(loss_of)(state.params, batch)
        more = {"value": value} if "plateau" in name else {}
        updates, opt = optimizer.update(grads, state.opt, state.params, **more)
        new = optax.apply_updates(state.params, updates)
        return State(new, opt, optax.incremental_update(new, state.ema, 0.1)), value

    proved(step, State(params(), optimizer.init(params()), params()), BATCH)


# ---- jmp -------------------------------------------------------------------------------------------------------------

SCALES = {
    "dynamic": lambda: jmp.DynamicLossScale(jnp.float32(2**12), period=2),
    "overflowing": lambda: jmp.DynamicLossScale(jnp.float32(2**30), period=2),
    "static": lambda: jmp.StaticLossScale(jnp.float32(2**7)),
    "none": jmp.NoOpLossScale,
}


@swept("name", SCALES, every=3)
def test_mixed_precision_with_a_loss_scale(name):
    """A step whose gradients are not finite changes the scale alone."""
    policy, optimizer = jmp.get_policy("params=float32,compute=float16,output=float32"), optax.adam(1e-2)

    def step(state, scale, batch):
        def scaled(params):
            params, x = policy.cast_to_compute((params, batch["x"]))
            value = policy.cast_to_output(loss_of(params, {**batch, "x": x}))
            return scale.scale(value), value

        grads, value = jax.grad(scaled, has_aux=True)(state.params)
        grads = scale.unscale(policy.cast_to_param(grads))
        finite = jmp.all_finite(grads)
        updates, opt = optimizer.update(grads, state.opt)
        new = jmp.select_tree(finite, (optax.apply_updates(state.params, updates), opt), (state.params, state.opt))
        return State(*new, None), scale.adjust(finite), value

    state, scale = State(params(), optimizer.init(params()), None), SCALES[name]()
    sharded = proved(step, state, scale, BATCH, steps=3, tolerance=0.03)
    new, adjusted, _ = sharded(state, scale, BATCH)
    assert jax.tree.structure(adjusted) == jax.tree.structure(scale)
    overflows = name == "overflowing"
    assert int(new.opt[0].count) == (0 if overflows else 1)
    if overflows:
        assert float(adjusted.loss_scale) == 2**29


# ---- plain JAX -------------------------------------------------------------------------------------------------------


def test_scan_over_steps():
    """A whole epoch in one call: the batch dim is the second of the data."""
    optimizer = optax.adam(1e-2)

    def step(params, opt, epoch):
        def one(state, batch):
            value, grads = jax.value_and_grad(loss_of)(state[0], batch)
            updates, opt = optimizer.update(grads, state[1], state[0])
            return (optax.apply_updates(state[0], updates), opt), value

        (params, opt), losses = jax.lax.scan(one, (params, opt), epoch)
        return params, opt, losses

    epoch = jax.tree.map(lambda x: jnp.stack([x, x[::-1], x]), BATCH)
    proved(step, params(), optimizer.init(params()), epoch, layouts={"epoch/**": "data=S(1)"})


# ---- Reinforcement learning ------------------------------------------------------------------------------------------
# In the manner of PureJaxRL: environments step inside a scan, epochs of shuffled minibatches inside it, and the whole
# training inside one more.


def physics(at, action, key):
    """A point that is pushed; an episode ends far away, and starts anew."""
    at = at + 0.1 * jnp.stack([at[:, 1], 2.0 * action - 1.0], -1)
    reward = 1.0 - jnp.abs(at[:, 0])
    done = jnp.abs(at[:, 0]) > 1.0
    fresh = jax.random.uniform(key, at.shape, minval=-0.5, maxval=0.5)
    return jnp.where(done[:, None], fresh, at), reward, done


def policy(params, at):
    hidden = jnp.tanh(at @ params["in"])
    return hidden @ params["act"], (hidden @ params["value"])[..., 0]


def test_training_inside_one_scan():
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))

    def act(carry, _):
        params, at, key = carry
        key, first, second = jax.random.split(key, 3)
        logits, value = policy(params, at)
        action = jax.random.categorical(first, logits)
        taken = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        after, reward, done = physics(at, action, second)
        return (params, after, key), (at, action, taken, value, reward, done)

    def advantage(carry, step):
        gain, following = carry
        value, reward, done = step
        gain = reward + 0.9 * following * (1 - done) - value + 0.8 * (1 - done) * gain
        return (gain, value), gain

    def objective(params, part):
        at, action, before, gain, target = part
        logits, value = policy(params, at)
        ratio = jnp.exp(jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0] - before)
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        clipped = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
        return jnp.mean((value - target) ** 2) - jnp.mean(clipped)

    def epoch(carry, _):
        (params, opt, key), data = carry
        key, own = jax.random.split(key)
        order = jax.random.permutation(own, data[0].shape[0])
        parts = jax.tree.map(lambda x: x[order].reshape(2, -1, *x.shape[1:]), data)

        def minibatch(state, part):
            value, grads = jax.value_and_grad(objective)(state[0], part)
            updates, opt = optimizer.update(grads, state[1])
            return (optax.apply_updates(state[0], updates), opt), value

        (params, opt), values = jax.lax.scan(minibatch, (params, opt), parts)
        return ((params, opt, key), data), values

    def update(carry, _):
        params, opt, at, key = carry
        (_, at, key), (seen, action, taken, value, reward, done) = jax.lax.scan(act, (params, at, key), None, 4)
        last = policy(params, at)[1]
        _, gain = jax.lax.scan(advantage, (jnp.zeros_like(last), last), (value, reward, done), reverse=True)
        data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (seen, action, taken, gain, gain + value))
        ((params, opt, key), _), values = jax.lax.scan(epoch, ((params, opt, key), data), None, 2)
        return (params, opt, at, key), (values.mean(), reward.mean())

    def train(params, opt, at, key):
        return jax.lax.scan(update, (params, opt, at, key), None, 2)

    shapes = {"in": (2, 8), "act": (8, 2), "value": (8, 1)}
    params = {name: 0.3 * jax.random.normal(jax.random.key(i), s) for i, (name, s) in enumerate(shapes.items())}
    args = params, optimizer.init(params), 0.3 * X[:, :2], jax.random.key(5)
    proved(train, *args, layouts={"at": "data=S(0)"})
