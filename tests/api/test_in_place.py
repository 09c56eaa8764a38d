"""Steps that change objects of nnx in place do what they do under ``nnx.jit``, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshdsl as md

MESH = md.Mesh(data=4, model=2)
X = np.linspace(-1, 1, 16 * 8, dtype=np.float32).reshape(16, 8)


class Net(nnx.Module):
    """Layers with every kind of state: parameters, batch statistics, random streams."""

    def __init__(self, rngs, width=12):
        self.up = nnx.Linear(8, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.down = nnx.Linear(width, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))


class Small(nnx.Module):
    """One layer, and noise."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.up(x))


class Tied(nnx.Module):
    """One kernel under two names, and one layer under two names."""

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.last.kernel = self.first.kernel
        self.again = self.first

    def __call__(self, x):
        return self.again(self.last(nnx.tanh(self.first(x))))


class Plain(nnx.Module, pytree=False):
    """An object that jax does not look into."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 8, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.inner(x)


class Ensemble(nnx.Module):
    def __init__(self, rngs):
        self.members = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))(rngs.fork(split=4))

    def __call__(self, x):
        return nnx.vmap(lambda member, x: member(x), in_axes=(0, None))(self.members, x).mean(0)


class Lora(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class Image(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(4, num_groups=2, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.conv(x.reshape(16, 2, 2, 2))).reshape(16, 16)[:, :8]


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.cell = nnx.GRUCell(8, 8, rngs=rngs)

    def __call__(self, x):
        return nnx.RNN(self.cell)(x.reshape(4, 4, 8)).reshape(16, 8)


class Gathering(nnx.Module):
    """A layer that sows what it computes."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        x = self.layer(x)
        self.sow(nnx.Intermediate, "hidden", x.mean(0))
        return x


def square(model, x):
    return ((model(x) - x) ** 2).mean()


def descend(model, opt, x):
    loss, grads = nnx.value_and_grad(square)(model, x)
    opt.update(model, grads)
    return loss


def trained(module, transform=None, wrt=nnx.Param):
    model = module(nnx.Rngs(0, dropout=1))
    return model, nnx.Optimizer(model, transform or optax.sgd(1e-1, momentum=0.5), wrt=wrt), X


def microsteps(model, opt, x):
    """Gradients accumulated by a scan over modules."""

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def accumulate(model, x):
        return model, nnx.value_and_grad(square)(model, x)

    _, (losses, grads) = accumulate(model, x.reshape(4, 4, 8))
    opt.update(model, jax.tree.map(lambda g: g.mean(0), grads))
    return losses.mean()


def steps_in_a_scan(model, opt, x):
    graph, state = nnx.split((model, opt))

    def body(state, x):
        model, opt = nnx.merge(graph, state)
        loss = descend(model, opt, x)
        return nnx.state((model, opt)), loss

    state, losses = jax.lax.scan(body, state, x.reshape(2, 8, 8))
    nnx.update((model, opt), state)
    return losses


def scalar_metrics():
    model, opt, x = trained(Small)
    return model, opt, nnx.MultiMetric(loss=nnx.metrics.Average("loss"), size=nnx.metrics.Average("size")), x


def measured(model, opt, metrics, x):
    loss = descend(model, opt, x)
    metrics.update(loss=loss, size=jnp.abs(x).mean())


def reset_and_measured(model, opt, metrics, x):
    metrics.reset()
    measured(model, opt, metrics, x)
    return metrics.compute()


def noisy(rngs, x):
    return x + rngs.noise.normal(x.shape) + rngs.normal((8,))


def combined():
    model = Small(nnx.Rngs(0))
    return nnx.ModelAndOptimizer(model, optax.sgd(1e-1, momentum=0.5), wrt=nnx.Param), X


def descend_combined(opt, x):
    loss, grads = nnx.value_and_grad(square)(opt.model, x)
    opt.update(grads)
    return loss


def model_twice():
    (opt, x) = combined()
    return opt.model, opt, x


def descend_twice(model, opt, x):
    loss, grads = nnx.value_and_grad(square)(model, x)
    opt.update(grads)
    return loss + square(model, x)  # the model has been updated through the other name


def in_containers():
    model, opt, x = trained(Small)
    return {"nets": [model], "opt": (opt, jnp.float32(2))}, x


def count(counter, x):
    counter[...] += x.sum().astype(jnp.int32) + 3
    return x * counter[...]


def follow(target, model, opt, x):
    """The target network takes over the parameters in turn softly and at once."""
    loss = descend(model, opt, x)
    soft = jax.tree.map(lambda t, m: 0.9 * t + 0.1 * m, nnx.state(target, nnx.Param), nnx.state(model, nnx.Param))
    nnx.update(target, soft)
    target.up.bias[...] = model.up.bias[...]
    return loss, square(target, x)


def averaged():
    model, opt, x = trained(Small)
    return model, opt, nnx.EMA(nnx.state(model, nnx.Param), 0.9), x


def average(model, opt, ema, x):
    loss = descend(model, opt, x)
    ema.update(nnx.state(model, nnx.Param))
    return loss


def with_modes(model, opt, x):
    model.eval()
    held_out = square(model, x)
    model.train()
    return descend(model, opt, x), held_out


def left_in_eval_mode(model, x):
    model.eval()
    return square(model, x)


def sown_and_popped(model, opt, x):
    loss = descend(model, opt, x)
    return loss, nnx.pop(model, nnx.Intermediate)


def grows(model, x):
    """A variable, a static attribute and a replaced variable, all new in the first call."""
    if not hasattr(model, "seen"):
        model.seen = nnx.Variable(jnp.zeros(8))
        model.used = True
    model.seen[...] += x.sum(0)
    model.up.bias = nnx.Param(model.up.bias[...] + 1)
    return model(x)


def returns_itself(model, opt, x):
    loss = descend(model, opt, x)
    return {"model": model, "loss": loss}, opt.step


def returns_a_new_one(model, x):
    other = nnx.clone(model)
    other.up.bias[...] += 1
    return other, nnx.Linear(8, 8, rngs=nnx.Rngs(1)), model.up


def holds_a_tree():
    return nnx.Variable({"a": jnp.ones(8), "b": (jnp.zeros(()),)}), X


def changes_a_tree(variable, x):
    value = variable.get_value()
    variable.set_value({"a": value["a"] + x.sum(0), "b": (value["b"][0] + 1,)})
    return x @ variable.get_value()["a"]


class Table(nnx.Module):
    def __init__(self):
        self.rows = jnp.zeros((4, 8))
        self.at = nnx.Variable(jnp.int32(0))


def fills(table, x):
    table.rows = table.rows.at[table.at[...]].set(x.sum(0))
    table.at[...] = (table.at[...] + 1) % 4
    return table.rows


def recreates_key(rngs, x):
    key = rngs.params()
    nnx.reseed(rngs, params=key)
    return x + jax.random.normal(key, (8,))


def keyword_only(x, *, model, opt):
    return descend(model, opt, x)


def two_losses(model, opts, x):
    return [descend(model, opt, x) for opt in opts]


def two_optimizers():
    model = Small(nnx.Rngs(0))
    return model, [nnx.Optimizer(model, optax.sgd(lr), wrt=nnx.Param) for lr in (0.1, 0.01)], X


CASES = {
    "sgd": (descend, lambda: trained(Small, optax.sgd(0.1))),
    "adam, batch statistics, dropout": (descend, lambda: trained(Net, optax.adam(1e-2))),
    "tied": (descend, lambda: trained(Tied)),
    "no pytree": (descend, lambda: trained(Plain)),
    "ensemble": (descend, lambda: trained(Ensemble)),
    "lora": (descend, lambda: trained(Lora, wrt=nnx.LoRAParam)),
    "convolution": (descend, lambda: trained(Image)),
    "recurrent": (descend, lambda: trained(Recurrent)),
    "uneven": (descend, lambda: trained(lambda rngs: Net(rngs, width=7))),
    "multi-step": (descend, lambda: trained(Small, optax.MultiSteps(optax.adam(1e-2), 2))),
    "schedule": (
        descend,
        lambda: trained(Small, optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.1, 0, 9))),
    ),
    "microsteps": (microsteps, lambda: trained(Tied)),
    "steps in a scan": (steps_in_a_scan, lambda: trained(Small)),
    "metrics": (measured, scalar_metrics),
    "metrics that are reset": (reset_and_measured, scalar_metrics),
    "random streams": (noisy, lambda: (nnx.Rngs(0, noise=1), X)),
    "reseeded": (recreates_key, lambda: (nnx.Rngs(params=3), X)),
    "model in the optimizer": (descend_combined, combined),
    "model and its optimizer share": (descend_twice, model_twice),
    "containers": (lambda state, x: descend(state["nets"][0], state["opt"][0], x * state["opt"][1]), in_containers),
    "a variable": (count, lambda: (nnx.Variable(jnp.int32(0)), X)),
    "target network": (follow, lambda: (Small(nnx.Rngs(3)), *trained(Small))),
    "ema": (average, averaged),
    "modes": (with_modes, lambda: trained(Small)),
    "left in eval mode": (left_in_eval_mode, lambda: trained(Small)[::2]),
    "sown and popped": (sown_and_popped, lambda: trained(Gathering)),
    "grows": (grows, lambda: trained(Small)[::2]),
    "returns itself": (returns_itself, lambda: trained(Small)),
    "returns a new one": (returns_a_new_one, lambda: trained(Small)[::2]),
    "a tree in a variable": (changes_a_tree, holds_a_tree),
    "an array in no variable": (fills, lambda: (Table(), X)),
    "two optimizers": (two_losses, two_optimizers),
}


CHECKED = {
    "adam, batch statistics, dropout",
    "tied",
    "no pytree",
    "random streams",
    "grows",
    "model and its optimizer share",
}


def leaves(tree):
    """The numbers in a tree with objects, each variable once; keys as their data."""
    _, state = nnx.split(tree)
    arrays = jax.tree.leaves(state)
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in arrays]


def assert_equal(a, b):
    a, b = leaves(a), leaves(b)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


def shape(tree):
    """Paths, types and settings in a tree with objects, and what is shared."""
    nodes = [
        (path, type(x), x if isinstance(x, bool) else None)
        for path, x in nnx.iter_graph(tree)
        if not any(str(key).startswith("_pytree") for key in path)
    ]
    return nodes, nnx.find_duplicates(tree)


@pytest.mark.parametrize("name", CASES)
def test_as_under_nnx_jit(name):
    step, make = CASES[name]
    args, expected = make(), make()
    jitted, sharded = nnx.jit(step), md.parallelize(step, MESH, {"x": "data=S(0)"} if name != "containers" else None)
    untouched = leaves(args)
    if name in CHECKED:
        sharded.check(*args)
    sharded.verify(*args)
    assert all(x is y for x, y in zip(leaves(args), untouched, strict=True) if x.dtype != np.uint32)
    assert_equal(args, expected)
    for _ in range(3):
        assert_equal(sharded(*args), jitted(*expected))
        assert_equal(args, expected)
    assert shape(args) == shape(expected)
