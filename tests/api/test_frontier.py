"""Step time against memory limit."""

from math import inf
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.errors import ArgumentError, MemoryLimitError, MeshDSLError


def step(params, x):
    def loss(params):
        y = x
        for w in params:
            y = jnp.tanh(jnp.sin(y @ w))
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


ARGS = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3, jax.ShapeDtypeStruct((2048, 64), jnp.float32)


def sharded(**options):
    return md.parallelize(step, "data=4", md.data_parallel(), **options)


@pytest.fixture(scope="module")
def curve():
    return sharded(remat="auto").frontier(*ARGS, points=4)


def test_the_curve_falls_from_the_least_memory_to_the_fastest_plan(curve):
    limits = [each.limit for each in curve.points]
    seconds = [each.seconds for each in curve.points]
    assert len(limits) > 2 and limits == sorted(limits) and limits[-1] == inf
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] == sharded().plan(*ARGS).seconds
    for each, after in zip(curve.points, curve.points[1:], strict=False):
        assert each.plan.memory <= each.limit < after.plan.memory and 0 <= each.gap < 1
        saved = each.seconds - after.seconds
        assert each.price == pytest.approx(saved * 2**30 / (after.plan.memory - each.limit)) and saved > 0
    assert curve.least == curve.points[0].plan.memory
    with pytest.raises(MemoryLimitError) as error:
        sharded(memory="1B").plan(*ARGS)
    assert error.value.least > curve.least  # of a plan that keeps everything


def test_points_are_plans_within_their_limit(curve):
    first = curve.points[0]
    assert sharded(remat="auto", memory=first.limit).plan(*ARGS).seconds == first.seconds
    same = sharded(remat="auto").frontier(*ARGS, limits=[first.limit, "1B"])  # the second one is left out
    assert [each.limit for each in same.points] == [first.limit, inf] and same.least == 0


def test_table_and_picture(curve):
    text = str(curve).splitlines()
    assert len(text) == 2 + len(curve.points) and text[0].startswith("step time of step by memory limit")
    assert text[-1].startswith("none") and "against no limit" in text[1]
    picture = ElementTree.fromstring(curve.svg())
    dots = picture.findall("{http://www.w3.org/2000/svg}circle")
    assert len(dots) == len(curve.points) and curve.svg() in curve.page()
    heights = [float(dot.get("cy")) for dot in dots]  # from the top
    assert heights == sorted(heights) and all(0 <= y <= 300 for y in heights)


def test_what_has_no_frontier(nothing_is_compiled):
    with pytest.raises(ArgumentError, match="points=1 of a frontier: give 2 or more"):
        sharded().frontier(*ARGS, points=1)
    with pytest.raises(MeshDSLError, match="'much' is not a size"):
        sharded().frontier(*ARGS, limits=["much"])
    with pytest.raises(MemoryLimitError, match="no plan fits memory=1 B"):
        sharded().frontier(*ARGS, limits=["1B"])
    alone = md.parallelize(jnp.sin, "data=2").frontier(jax.ShapeDtypeStruct((8,), jnp.float32))
    assert len(alone.points) == 1 and alone.svg()
