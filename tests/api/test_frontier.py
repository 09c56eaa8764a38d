"""Step time against memory limit."""

from math import inf
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.errors import ArgumentError, MemoryLimitError
from tests.recomputation.steps import SINES, sines


def sharded(**options):
    return md.parallelize(sines, "data=4", md.data_parallel(), **options)


@pytest.fixture(scope="module")
def curve():
    return sharded().frontier(*SINES, points=3)


def test_the_curve_falls_from_the_least_memory_to_the_fastest_plan(curve):
    limits = [each.limit for each in curve.points]
    seconds = [each.seconds for each in curve.points]
    assert len(limits) > 1 and limits == sorted(limits) and limits[-1] == inf
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] == sharded().plan(*SINES).seconds
    for each, after in zip(curve.points, curve.points[1:], strict=False):
        assert each.plan.memory <= each.limit < after.plan.memory and 0 <= each.gap < 1
        saved = each.seconds - after.seconds
        assert each.price == pytest.approx(saved * 2**30 / (after.plan.memory - each.limit)) and saved > 0
    assert curve.least == curve.points[0].plan.memory
    with pytest.raises(MemoryLimitError) as error:
        sharded(memory="1B").plan(*SINES)
    assert error.value.least >= curve.least


def test_limits_that_no_plan_fits_are_left_out():
    same = sharded().frontier(*SINES, limits=["1GB", "1B"])
    assert [each.limit for each in same.points] == [inf] and same.least == 0


def test_table_and_picture(curve):
    text = str(curve).splitlines()
    assert len(text) == 2 + len(curve.points) and text[0].startswith("step time of sines by memory limit")
    assert text[-1].startswith("none") and "against no limit" in text[1]
    picture = ElementTree.fromstring(curve.svg())
    dots = picture.findall("{http://www.w3.org/2000/svg}circle")
    assert len(dots) == len(curve.points) and curve.svg() in curve.page()
    heights = [float(dot.get("cy")) for dot in dots]  # from the top
    assert heights == sorted(heights) and all(0 <= y <= 300 for y in heights)


def test_what_has_no_frontier(nothing_is_compiled):
    for points in (1, "4", 2.5, None):
        with pytest.raises(ArgumentError, match="of a frontier: give 2 or more"):
            sharded().frontier(*SINES, points=points)
    with pytest.raises(ArgumentError, match=r"(?s)'much' is not a size.*'none' is not a size"):
        sharded().frontier(*SINES, limits=["much", None])
    with pytest.raises(MemoryLimitError, match="no plan fits memory=1 B"):
        sharded().frontier(*SINES, limits=["1B"])
    for idle in (jnp.sin, lambda x: x):
        alone = md.parallelize(idle, "data=2").frontier(jax.ShapeDtypeStruct((8,), jnp.float32))
        assert alone.points[-1].limit == inf and alone.page() and str(alone)


def test_plans_that_are_chosen_by_simulated_time_are_ranked_by_it():
    args = jax.ShapeDtypeStruct((128, 128), jnp.float32), jax.ShapeDtypeStruct((512, 128), jnp.float32)
    mesh = md.Mesh(data=4, topology="dgx-h100")
    product = md.parallelize(lambda w, x: jnp.tanh(x @ w).sum(), mesh, md.fsdp(min_size=0), overlap="full")
    curve = product.frontier(*args, points=2)
    assert [each.seconds for each in curve.points] == [each.plan.simulated_seconds for each in curve.points]
    assert {each.gap for each in curve.points} == {None} and curve.svg()
