"""Changes in place that the caller would never see are errors, and leave nothing behind."""

from collections import deque
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshdsl.errors import TraceError
from meshdsl.trace import trace

W, X = np.ones((4, 4), np.float32), np.ones((2, 4), np.float32)
REMEDY = "return what the step changes, or hold it in an nnx.Variable or nnx.Module that is an argument"


@jax.tree_util.register_dataclass
@dataclass
class Stats:
    mean: object


def loss_of(w, x):
    return ((x @ w) ** 2).mean()


def dict_argument(params, x):
    loss, gradient = jax.value_and_grad(loss_of)(params["w"], x)
    params["w"] = params["w"] - 0.1 * gradient
    return loss


def nested_argument(state, x):
    state["opt"]["count"] += 1
    return x


def list_item(layers, x):
    layers[1] = layers[1] * 2
    return x @ layers[0]


def appended(history, x):
    loss = loss_of(W, x)
    history.append(loss)
    return loss


def new_key(stats, x):
    stats["norm"] = jnp.abs(x).max()
    return x


def attribute(stats, x):
    stats.mean = 0.9 * stats.mean + 0.1 * x.mean(0)
    return x - stats.mean


def keyword(x, *, params):
    params.update(w=params["w"] + x.sum())
    return x


ARGUMENTS = {
    "params/w": (dict_argument, ({"w": W}, X), {}, 2),
    "state/opt/count": (nested_argument, ({"opt": {"count": np.int32(0)}}, X), {}, 1),
    "layers/1": (list_item, ([W, W], X), {}, 1),
    "history/0": (appended, ([], X), {}, -2),
    "stats/norm": (new_key, ({}, X), {}, 1),
    "stats/mean": (attribute, (Stats(W[0]), X), {}, 1),
    "params/w ": (keyword, (X,), {"params": {"w": W}}, 1),
}


@pytest.mark.parametrize("path", ARGUMENTS)
def test_arguments(path):
    step, args, kwargs, line = ARGUMENTS[path]
    with pytest.raises(TraceError) as caught:
        trace(step, args, kwargs)
    title, row, remedy = str(caught.value).splitlines()
    assert title == f"{step.__name__} changes what a call cannot give back:"
    assert row.startswith(f"  {path.strip()} is changed in place at test_lost_changes.py:")
    if line > 0:
        assert row.endswith(f":{step.__code__.co_firstlineno + line}")
    assert remedy == REMEDY


def scratch(batch, x):
    batch["image"] = batch["image"] / 255
    labels = batch.pop("label")
    batch["unused"] = 1.0
    return batch["image"] @ W + labels + x


def returned(params, x):
    params["w"] = params["w"] + x.sum()
    return params


def returned_value(params, layers, x):
    params["w"] = params["w"] + x.sum()
    layers[0] = layers[0] * 2
    layers[1], layers[0] = layers[0], layers[1]
    return params["w"], layers


def returned_list(history, x):
    history.append(x.sum())
    return history


def scratch_under_grad(batch, w):
    def loss(w):
        batch["hidden"] = batch["image"] @ w
        return (batch["hidden"] ** 2).sum()

    return jax.grad(loss)(w)


PLACES = {scratch: ["image"], scratch_under_grad: ["hidden"]}


@pytest.mark.parametrize(
    ("step", "args"),
    [
        (scratch_under_grad, ({"image": X}, W)),
        (scratch, ({"image": X, "label": X}, X)),
        (returned, ({"w": W}, X)),
        (returned_value, ({"w": W}, [W, W], X)),
        (returned_list, ([X[0]], X)),
        (lambda tree, x: optax.apply_updates(tree, {"w": x.sum()}), ({"w": W}, X)),
    ],
)
def test_changes_for_the_step_itself_and_returned_ones(step, args):
    program = trace(step, args)
    assert len(program.outputs) == len(jax.tree.leaves(jax.eval_shape(step, *jax.tree.map(jnp.asarray, args))))
    assert [note.partition(" at ")[0] for note in program.notes] == (
        [f"batch/{key} is changed in place" for key in PLACES.get(step, ())]
    )


class Trainer:
    def __init__(self):
        self.w, self.seen = W, []

    def step(self, x):
        loss, gradient = jax.value_and_grad(loss_of)(self.w, x)
        self.w = self.w - gradient
        return loss

    def remember(self, x):
        self.seen.append(x)
        return x.sum()

    def __call__(self, x):
        self.w = self.w * x.sum()
        return x @ W


def closure(state):
    def step(x):
        loss, gradient = jax.value_and_grad(loss_of)(state["w"], x)
        state["w"] = state["w"] - gradient
        return loss

    return step


def nested_closure(seen):
    def layer(x):
        seen.append({"hidden": x})
        return x @ W

    return lambda x: layer(layer(x))


def rebound():
    total = jnp.float32(0)

    def step(x):
        nonlocal total
        total = total + x.sum()
        return x

    return step


TOTAL = jnp.float32(0)


def global_total(x):
    global TOTAL
    TOTAL = TOTAL + x.sum()
    return x


def inner(seen):
    def step(x):
        def body(carry, row):
            seen.append(carry)
            return carry + row.sum(), row

        return jax.lax.scan(body, jnp.float32(0), x)[0]

    return step


def default(x, seen=[]):
    seen.append(x * 2)
    return x


def keyword_default(x, *, seen={}):
    seen["x"] = x * 2
    return x


def queue(recent):
    def step(x):
        recent.append(x.mean())
        return x

    return step


SURROUNDINGS = {
    "recent[1]": lambda: queue(deque([1.0], maxlen=4)),
    "seen[0]  ": lambda: default,
    "seen['x']": lambda: keyword_default,
    "state['w']": lambda: closure({"w": W}),
    "seen[0]": lambda: nested_closure([]),
    "seen[0] ": lambda: inner([]),
    "total": rebound,
    "TOTAL": lambda: global_total,
    "self.w": lambda: Trainer().step,
    "self.seen[0]": lambda: Trainer().remember,
    "step.w": Trainer,
    "state['w'] ": lambda: partial(lambda x, state: state.update(w=state["w"] + x.sum()), state={"w": W}),
    "step.args[0][1]": lambda: partial(lambda seen, x: seen.append(x * 2), [W]),
}


@pytest.mark.parametrize("place", SURROUNDINGS)
def test_surroundings(place):
    step = SURROUNDINGS[place]()
    for _ in range(2):  # nothing is left behind
        with pytest.raises(TraceError) as caught:
            trace(step, (X,))
        _, row, *_, remedy = str(caught.value).splitlines()
        place = place.strip()
        assert row.startswith(f"  {place} is changed in place at test_lost_changes.py")
        assert remedy == REMEDY
    assert not isinstance(TOTAL, jax.core.Tracer)


def test_a_step_in_jit():
    with pytest.raises(TraceError, match=r"state\['w'\] is changed in place"):
        trace(jax.jit(closure({"w": W})), (X,))


def test_what_a_step_may_leave_behind():
    calls, shapes, outside = [], {}, {"scale": jnp.float32(2)}

    def step(x):
        calls.append(1)
        shapes["x"] = x.shape
        return x * outside["scale"]

    trace(step, (X,))
    assert (calls, shapes) == ([1], {"x": (2, 4)})


def captured_variable(model):
    def step(x):
        model.kernel[...] -= 0.1
        return model(x)

    return step


def captured_optimizer(model):
    opt = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(x):
        loss, gradients = nnx.value_and_grad(lambda m: m(x).sum())(model)
        opt.update(model, gradients)
        return loss

    return step


def captured_attribute(model):
    def step(x):
        model.cache = nnx.Variable(x)
        return x

    return step


def captured_rngs(model):
    rngs = nnx.Rngs(0)
    return lambda x: x + rngs.normal(x.shape)


@pytest.mark.parametrize("make", [captured_variable, captured_optimizer, captured_attribute, captured_rngs])
def test_captured_objects(make):
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model))
    with pytest.raises(TraceError) as caught:
        trace(make(model), (X,))
    title, row, remedy = str(caught.value).splitlines()
    assert title.endswith(" cannot be traced:")
    assert row.startswith("  test_lost_changes.py:")
    assert remedy.startswith("a function changes only the objects of nnx that are its arguments")
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, before, nnx.to_pure_dict(nnx.state(model))))


def test_a_captured_object_that_is_only_read():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert len(trace(model, (X,)).outputs) == 1


def test_refs_are_refused():
    with pytest.raises(TraceError, match="can be changed in place"):
        trace(lambda ref, x: x, (jax.new_ref(jnp.ones(3)), X))
