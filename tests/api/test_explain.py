"""Why an input has its layout: what every other layout would cost."""

import re

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.api.explain import explain, possible_layouts

MESH = md.Mesh(data=4, model=2)


def step(w, x):
    return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


ARGS = (jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32))


def sharded(**pins):
    return md.parallelize(step, MESH, {"x": "data=S(0)", **pins})


def test_every_layout_that_divides():
    assert {str(x) for x in possible_layouts((6, 4), md.Mesh(a=2, b=3))} == {
        f"a={a} b={b}" for a in ("B", "S(0)", "S(1)") for b in ("B", "S(0)")
    }
    assert [str(x) for x in possible_layouts((), MESH)] == ["data=B model=B"]


def test_alternatives_are_plans_of_their_own():
    found = sharded().explain("w", *ARGS)
    assert len(found.alternatives) == 9
    seconds = [each.plan.seconds for each in found.alternatives]
    assert seconds == sorted(seconds) and seconds[0] == pytest.approx(found.plan.seconds)
    for each in found.alternatives:
        assert each.plan.layout("w") == each.layout
        pinned = sharded(w=each.layout).plan(*ARGS)
        assert (pinned.seconds, pinned.bytes) == (each.plan.seconds, each.plan.bytes)


def test_a_pin_shows_what_it_costs():
    text = str(sharded(w="data=S(1)").explain("w", *ARGS))
    first = text.splitlines()[0]
    assert first.startswith("w float32[64,256] has data=S(1)") and "data is pinned" in first
    assert re.search(r"^model=S\(1\) .* -\d+(\.\d+)?% ", text, re.MULTILINE), text
    assert "no axis is pinned" in str(sharded().explain("w", *ARGS))


def test_without_a_program_it_says_what_the_plan_knows():
    plan = sharded(w="data=S(0)").plan(*ARGS)
    found = explain(plan, "w")
    assert not found.alternatives
    assert any("all-gather over data" in line for line in str(found).splitlines()), str(found)


def test_what_does_not_fit_says_so():
    limited = md.parallelize(step, MESH, {"x": "data=S(0)"}, memory=175_000)
    text = str(limited.explain("w", *ARGS))
    assert "exceeds the memory limit" in text


def test_no_such_input():
    with pytest.raises(md.MeshDSLError, match=r"no input 'v' in the plan"):
        sharded().explain("v", *ARGS)
