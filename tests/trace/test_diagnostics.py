"""Steps that fail while they are traced: what is said, and in whose terms."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshdsl.errors import TraceError
from meshdsl.trace import trace

X = np.ones((4, 3), np.float32)
REMEDY = (
    "a trace knows shapes, no values: choose with jnp.where or jax.lax.cond, loop with jax.lax, "
    "or pass what decides through static_argnames"
)


def branch(params, x):
    return params["w"] if (x * params["b"]).sum() > 0 else x


def said(step, *args):
    with pytest.raises(TraceError) as caught:
        trace(step, args)
    return str(caught.value).splitlines()


def test_a_branch_on_a_value():
    title, what, which, remedy = said(branch, {"w": X, "b": X, "c": X}, X)
    assert title == "branch cannot be traced:"
    line = branch.__code__.co_firstlineno + 1
    assert what == f"  test_diagnostics.py:{line}: Attempted boolean conversion of traced array with shape bool[]."
    assert which == "  it depends on params/b, x"
    assert remedy == REMEDY


@pytest.mark.parametrize(
    "step",
    [
        lambda x: np.asarray(x),
        lambda x: float(x.sum()),
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: list(range(x[0, 0].astype(int))),
        lambda x: jnp.zeros(x[0, 0].astype(int)),
        lambda x: jax.grad(lambda x: x.sum() if x[0, 0] > 0 else 0.0)(x),
    ],
)
def test_what_needs_a_value(step):
    lines = said(step, X)
    assert (lines[0], lines[-1]) == ("step cannot be traced:", REMEDY)
    assert lines[1].startswith("  test_diagnostics.py:")


def test_what_the_step_raises_passes_with_a_note():
    def step(params, batch):
        return params["w"] @ batch["x"]

    with pytest.raises(TypeError, match="dot_general requires contracting dimensions") as caught:
        trace(step, ({"w": X}, {"x": X, "y": 1}))
    assert (
        caught.value.__notes__[-1]
        == "step was traced with params/w float32[4,3], batch/x float32[4,3], batch/y ~int32[]"
    )


def test_arguments_behind_many_arrays_are_in_the_note():
    layers = {f"layer{i}": X for i in range(9)}
    with pytest.raises(TypeError) as caught:
        trace(lambda params, batch: params["layer8"] @ batch, (layers, X))
    shown = ", ".join(f"params/layer{i} float32[4,3]" for i in range(8))
    assert caught.value.__notes__[-1].endswith(f"was traced with {shown}, ... and 1 more, batch float32[4,3]")


def test_a_partial_goes_by_its_function():
    assert said(partial(branch, {"w": X, "b": X}), X)[0] == "branch cannot be traced:"


def test_what_is_changed_in_place():
    total = jax.new_ref(jnp.zeros(3))

    def add(x):
        total[...] += x.sum(0)
        return x

    way = "float32[3] can be changed in place (jax.Ref); pass its value, and return the new one"
    assert said(add, X) == ["add cannot be planned:", f"  a value that it closes over: {way}"]
    assert said(lambda total: total, total) == ["<lambda> cannot be traced:", f"  total: {way}"]
    both = said(lambda total, name: total, total, "text")
    assert both[1:] == [
        f"  total: {way}",
        "  name: 'text' is a str, not an array",
        "pass values that are not arrays through static_argnames",
    ]


def test_a_result_that_is_no_array():
    assert said(lambda x: "done", X)[1] == "  the result: 'done' is a str, not an array"
