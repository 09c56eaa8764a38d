"""Steps that change objects of nnx in place do what they do under ``nnx.jit``, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshdsl as md
from meshdsl.api.stages import SLOW_DEVICES
from meshdsl.errors import LayoutError, PinError, TraceError
from tests.sweeps import swept

MESH = md.Mesh(data=4, model=2, topology=SLOW_DEVICES)  # divides small steps as it does large ones
X = np.linspace(-1, 1, 16 * 8, dtype=np.float32).reshape(16, 8)


class Net(nnx.Module):
    """Layers with every kind of state: parameters, batch statistics, random streams."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 12, use_bias=False, rngs=rngs)  # before a norm, a bias has a gradient of rounding
        self.norm = nnx.BatchNorm(12, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.down = nnx.Linear(12, 8, rngs=rngs)

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


class Child(nnx.Module):
    """One layer, which knows the module that holds it, and itself."""

    def __init__(self, parent, rngs):
        self.parent, self.itself = parent, self
        self.up = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.itself.up(x) * self.parent.scale[...]


class Parent(nnx.Module):
    """A circle of references through a list."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(8))
        self.children = nnx.List([Child(self, rngs)])

    def __call__(self, x):
        return self.children[0](x)


class Plain(nnx.Module, pytree=False):
    """An object that jax does not look into."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 8, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.inner(x)


class Lora(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class Gathering(nnx.Module):
    """A layer that sows what it computes."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        x = self.layer(x)
        self.sow(nnx.Intermediate, "hidden", x.mean(0))
        return x


def uneven(rngs):
    return nnx.Sequential(nnx.Linear(8, 7, rngs=rngs), nnx.relu, nnx.Linear(7, 8, rngs=rngs))


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


CASES = {
    "sgd": (descend, lambda: trained(Small, optax.sgd(0.1))),
    "adam, batch statistics, dropout": (
        descend,
        lambda: trained(Net, optax.adam(1e-2, eps=1e-3)),
    ),  # eps: rounding is not amplified
    "tied": (descend, lambda: trained(Tied)),
    "no pytree": (descend, lambda: trained(Plain)),
    "circles": (descend, lambda: trained(Parent)),
    "lora": (descend, lambda: trained(Lora, wrt=nnx.LoRAParam)),
    "uneven": (descend, lambda: trained(uneven)),
    "multi-step": (descend, lambda: trained(Small, optax.MultiSteps(optax.adam(1e-2), 2))),
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
}


CHECKED = {  # also by ``check``, which compiles the step once more
    "adam, batch statistics, dropout",
    "tied",
    "no pytree",
    "circles",
    "random streams",
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


@swept("name", CASES, every=3, kept=CHECKED)
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
    for _ in range(2):
        assert_equal(sharded(*args), jitted(*expected))
        assert_equal(args, expected)
    assert shape(args) == shape(expected)


# ---- Plans -----------------------------------------------------------------------------------------------------------

PINS = {"x": "data=S(0)", "model/up/kernel": "model=S(1)"}


def on_model(x):
    """The dim of an array that is split over the axis ``model``."""
    return next((i for i, axes in enumerate(x.sharding.spec) if "model" in (axes or ())), None)


def inputs(plan):
    return [leaf.path for leaf in plan.inputs]


def test_paths_and_layouts():
    model, opt, x = trained(Small, optax.adam(1e-2))
    sharded = md.parallelize(descend, MESH, {**PINS, "opt/opt_state/0/*/up/kernel": "model=S(1)"})
    plan = sharded.plan(model, opt, x)
    assert {"model/drop/rngs/count", "opt/step", "opt/opt_state/0/count", "x"} <= set(inputs(plan))
    assert plan.layout("opt/opt_state/0/mu/up/kernel").on("model") is md.S(1)
    at, _ = sharded.input_shardings(model, opt, x)
    for _ in range(2):
        sharded(model, opt, x)
        assert on_model(model.up.kernel[...]) == on_model(opt.opt_state[0].mu.up.kernel[...]) == 1
        assert model.up.kernel[...].sharding == at[0].up.kernel.get_raw_value()
    assert len(sharded._stages) == 1


def test_shapes_are_planned_as_arrays_are():
    sharded = md.parallelize(descend, MESH, PINS)
    shapes = nnx.eval_shape(lambda: trained(Small)[:2])
    plan = sharded.plan(*shapes, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert str(plan) == str(sharded.plan(*trained(Small)))
    sharded.verify(*shapes, X)
    with pytest.raises(TraceError, match="cannot run on shapes"):
        sharded(*shapes, X)


def test_a_second_call_finds_everything_in_place(monkeypatch):
    sharded = md.parallelize(descend, MESH, {"x": "data=S(0)"})
    args = trained(Lora, wrt=nnx.LoRAParam)
    sharded(*args)
    base = args[0].layer.kernel.get_raw_value()
    assert base.committed
    monkeypatch.setattr("meshdsl.trace.arguments.flatten_objects", None)  # a call of a known kind takes another way
    sharded(*args)
    assert args[0].layer.kernel.get_raw_value() is base


def test_other_sharing_is_another_kind_of_call():
    def step(a, b):
        a.kernel[...] += 1
        return b(X)

    sharded = md.parallelize(step, MESH)
    one, other = (nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(2))
    apart = sharded(one, other)
    together = sharded(one, one)
    assert len(sharded._stages) == 2
    np.testing.assert_allclose(together, apart + 2 * X.sum(1, keepdims=True), rtol=1e-5, atol=1e-5)
    assert inputs(sharded.plan(one, one)) == ["a/bias", "a/kernel"]


def test_donation():
    model, opt, x = trained(Lora, wrt=nnx.LoRAParam)
    sharded = md.parallelize(descend, MESH, {"x": "data=S(0)"}, donate_argnames=("model", "opt"))
    for _ in range(3):
        lora, base, step = (v.get_raw_value() for v in (model.layer.lora.lora_a, model.layer.kernel, opt.step))
        sharded(model, opt, x)
        assert lora.is_deleted() and step.is_deleted() and not model.layer.kernel.get_raw_value().is_deleted()
    assert not base.is_deleted()
    kept = md.parallelize(descend, MESH, {"x": "data=S(0)"})
    before = model.layer.lora.lora_a.get_raw_value()
    kept(model, opt, x)
    assert not before.is_deleted()


def test_an_array_under_two_names(tmp_path):
    args = model_twice()
    plan = md.parallelize(descend_twice, MESH, {"opt/model/up/kernel": "model=S(1)"}).plan(*args)
    assert plan.layout("model/up/kernel").on("model") is md.S(1)
    assert "opt/model/up/kernel" not in inputs(plan)
    assert plan.layout("opt/model/up/kernel") == plan.layout("model/up/kernel")
    plan.save(tmp_path / "plan.json")
    assert md.load_plan(tmp_path / "plan.json").layout("opt/model/up/kernel") == plan.layout("model/up/kernel")
    with pytest.raises(LayoutError, match="did you mean 'opt/model/up/kernel'"):
        plan.layout("opt/model/up/kernl")
    sharded = md.parallelize(descend_twice, MESH, {"opt/model/up/kernel": "model=S(1)", "**": "data=B"})
    shown = [sharded.explain(f"{start}/up/kernel", *args) for start in ("model", "opt/model")]
    assert str(shown[0]) == str(shown[1]) and len(shown[0].alternatives) == 9
    agreed = {"opt/model/up/kernel": "model=S(1)", "model/up/kernel": "data=S(0)"}
    plan = md.parallelize(descend_twice, MESH, agreed).plan(*args)
    assert str(plan.layout("model/up/kernel")) == "data=S(0) model=S(1)"
    with pytest.raises(PinError) as caught:
        pins = {"model/**/kernel": "model=S(1)", "opt/**/kernel": "model=S(0)", "**/bias": "model=S(0)"}
        md.parallelize(descend_twice, MESH, pins).plan(*args)
    row = "  layouts: model/up/kernel and opt/model/up/kernel are one array, which cannot be both "
    assert str(caught.value).splitlines()[1] == row + "model=S(1) and model=S(0)"


def test_dims_named_by_a_model():
    class Named(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "hidden"))
            self.up = nnx.Linear(8, 16, kernel_init=init, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(16, 8, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.down(self.up(x))

    with nnx.use_eager_sharding(False):
        args = trained(Named, optax.adam(1e-2))
        sharded = md.parallelize(
            descend, MESH, {"x": "data=S(0)"}, rules=md.Rules(params="hidden:model", optimizer="embed:data")
        )
        plan = sharded.plan(*args)
        sharded(*args)
        sharded(*args)
    assert plan.layout("model/up/kernel").on("model") is md.S(1)
    assert plan.layout("opt/opt_state/0/nu/up/kernel").on("data") is md.S(0)
    assert on_model(args[0].up.kernel[...]) == 1
    assert len(sharded._stages) == 1


def test_init_makes_objects_that_share():
    sharded = md.parallelize(descend_twice, MESH, {"x": "data=S(0)", "model/up/kernel": "model=S(1)"})
    model, opt = sharded.init(lambda: model_twice()[:2], X)
    assert opt.model is model
    assert on_model(model.up.kernel[...]) == 1
    expected = model_twice()
    for _ in range(2):
        np.testing.assert_allclose(sharded(model, opt, X), nnx.jit(descend_twice)(*expected), rtol=1e-5)


def test_other_methods_leave_objects_alone():
    args = trained(Small)
    sharded = md.parallelize(descend, MESH, PINS)
    kept = [v.get_raw_value() for _, v in nnx.iter_graph(args) if isinstance(v, nnx.Variable)]
    sharded.plan(*args)
    sharded.lower(*args)
    sharded.with_pins({"x": None}).plan(*args)
    sharded.explain("model/up/kernel", *args)
    sharded.input_shardings(*args)
    sharded.stages(*args)
    assert all(a is b.get_raw_value() for a, (_, b) in zip(kept, _variables(args), strict=True))


def _variables(tree):
    return [(path, v) for path, v in nnx.iter_graph(tree) if isinstance(v, nnx.Variable)]


def test_a_saved_plan(tmp_path):
    args = trained(Small)
    md.parallelize(descend, MESH, {"x": "data=S(0)"}).plan(*args).save(tmp_path / "plan.json")
    sharded = md.parallelize(descend, MESH, {"x": "data=S(0)"}, plan=md.load_plan(tmp_path / "plan.json"))
    expected = trained(Small)
    np.testing.assert_allclose(sharded(*args), nnx.jit(descend)(*expected), rtol=1e-5)
    assert_equal(args, expected)


def test_microbatches():
    def step(model, opt, x):
        loss, grads = nnx.value_and_grad(square)(model, x)
        opt.update(model, grads)
        return loss

    args, expected = trained(Tied), trained(Tied)
    sharded = md.parallelize(step, MESH, {"x": "data=S(0)"}, pipeline=md.Pipeline(microbatches=2))
    sharded.check(*args)
    for _ in range(2):
        np.testing.assert_allclose(sharded(*args), nnx.jit(step)(*expected), rtol=1e-5)
    assert_equal(args, expected)


def test_inside_another_function():
    args, expected = trained(Small), trained(Small)
    sharded = md.parallelize(descend, MESH, {"x": "data=S(0)"})
    outer, plain = nnx.jit(lambda *args: sharded(*args) + sharded(*args)), nnx.jit(descend)
    np.testing.assert_allclose(outer(*args), plain(*expected) + plain(*expected), rtol=1e-5)
    assert_equal(args, expected)


def test_static_arguments():
    def step(model, opt, times, x):
        for _ in range(times):
            loss = descend(model, opt, x)
        return loss

    args, expected = trained(Small), trained(Small)
    sharded = md.parallelize(step, MESH, {"x": "data=S(0)"}, static_argnames="times")
    jitted = nnx.jit(descend)
    for times in (1, 2):
        loss = sharded(*args[:2], times, X)
        np.testing.assert_allclose(loss, [jitted(*expected) for _ in range(times)][-1], rtol=1e-5)
    assert_equal(args, expected)


def test_functional_style_stays_functional():
    """A state that a step takes and returns is a value: the caller's is not changed."""
    graph, state = nnx.split(trained(Small)[:2])

    def step(state, x):
        model, opt = nnx.merge(graph, state)
        loss = descend(model, opt, x)
        return nnx.state((model, opt)), loss

    sharded = md.parallelize(step, MESH, {"x": "data=S(0)"})
    before = [np.asarray(x) for x in jax.tree.leaves(state) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    after, _ = sharded(state, X)
    again, _ = sharded(after, X)
    jitted = jax.jit(step)
    expected, _ = jitted(jitted(state, X)[0], X)
    for a, b in zip(jax.tree.leaves(nnx.to_pure_dict(again)), jax.tree.leaves(nnx.to_pure_dict(expected)), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    unchanged = [x for x in jax.tree.leaves(state) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    assert all((a == b).all() for a, b in zip(before, unchanged, strict=True))
    assert sharded.plan(state, X).notes == ()


def test_modules_in_functional_style():
    """Modules are pytrees too: a step may map over them, and return others."""
    tx = optax.adam(1e-2)

    def step(model, state, x):
        loss, gradients = jax.value_and_grad(square)(model, x)
        updates, state = tx.update(gradients, state, model)
        return optax.apply_updates(model, updates), state, loss

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    state = tx.init(model)
    sharded = md.parallelize(step, MESH, {"x": "data=S(0)"}, donate_argnames=("model", "state"))
    sharded.check(model, state, X)
    assert [leaf.path for leaf in sharded.plan(model, state, X).outputs] == [
        *("0/bias", "0/kernel", "1/0/count", "1/0/mu/bias", "1/0/mu/kernel", "1/0/nu/bias", "1/0/nu/kernel", "2")
    ]
    expected = model, state = jax.tree.map(jnp.copy, (model, state))
    expected = jax.tree.map(jnp.copy, expected)
    for _ in range(2):
        given = model
        *(model, state), loss = sharded(model, state, X)
        *expected, other = jax.jit(step)(*expected, X)
        np.testing.assert_allclose(loss, other, rtol=1e-5)
        assert given is not model and given.kernel.get_raw_value().is_deleted()
    assert_equal((model, state), tuple(expected))


def test_train_state():
    class State(nnx.TrainState):
        counts: nnx.State

    graph, params, counts = nnx.split(Small(nnx.Rngs(0)), nnx.Param, ...)
    state = State.create(graph, params=params, tx=optax.adam(1e-2), counts=counts)

    def step(state, x):
        def loss(params):
            model = nnx.merge(state.graphdef, params, state.counts, copy=True)
            value = square(model, x)
            return value, nnx.state(model, nnx.Not(nnx.Param))

        (value, counts), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(gradients).replace(counts=counts), value

    sharded = md.parallelize(step, MESH, {"x": "data=S(0)"})
    sharded.check(state, X)
    sharded.verify(state, X)
    values = []
    for _ in range(3):
        state, value = sharded(state, X)
        values.append(float(value))
    assert values[2] < values[0]
    assert len(sharded._stages) == 1


def test_a_circle_after_a_tree():
    """Calls without circles do not make jax flatten one, which would use up the interpreter's stack."""
    circle, line = Parent(nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    alone, held = (md.parallelize(f, MESH) for f in (lambda model, x: model(x), lambda models, x: models["one"](x)))
    for model in (line, line, circle, circle, line):
        for result in (alone(model, X), held({"one": model}, X)):
            np.testing.assert_allclose(result, model(X), rtol=1e-5, atol=1e-6)
