"""Spans and lines of a plan: the step in program order, and its source."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.ir.graph import Source
from meshdsl.plan.reasons import SourceNames

LAYERS = 3


def step(w, batch):
    def loss(w):
        x, _ = jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), batch, w)
        return jnp.mean(jnp.cumsum(x, 0) ** 2)

    return w - 0.1 * jax.grad(loss)(w)


@pytest.fixture(scope="module")
def plan():
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((LAYERS, 64, 64), (128, 64))]
    layouts = {"batch": "data=S(0)", "w": "model=S(1)"}
    return md.parallelize(step, md.Mesh(data=4, model=2), layouts=layouts, donate_argnums=0).plan(*args)


def test_seconds_of_spans_and_collectives_are_those_of_the_plan(plan):
    computed = sum(span.seconds * span.trips for span in plan.spans)
    sent = sum(c.seconds * c.trips for c in plan.collectives)
    assert plan.collectives and computed > 0
    assert computed + sent == pytest.approx(plan.seconds, rel=1e-6)


def test_the_fullest_span_is_the_peak(plan):
    assert max(span.memory for span in plan.spans) == plan.memory


def test_every_collective_is_waited_for_as_often_as_it_runs(plan):
    assert sum(span.collectives for span in plan.spans) == len(plan.collectives)
    left = iter(plan.collectives)
    pairs = [(span, next(left)) for span in plan.spans for _ in range(span.collectives)]
    assert Counter(c.trips for _, c in pairs) == Counter(span.trips for span, _ in pairs)


def test_loops_run_their_spans_again(plan):
    products = [span for span in plan.spans if span.name == "dot_general"]
    assert {span.trips for span in products} == {LAYERS}
    assert {span.phase for span in products} == {"forward", "backward"}


def test_lines_hold_the_text_around_operations(plan):
    own = [line for line in plan.lines if line.function]
    assert {plan.lines[span.line].function for span in plan.spans} <= {line.function for line in own} | {""}
    here = [line for line in own if line.source.startswith("test_spans.py:")]  # jax may know relu from another test
    scan = next(line for line in here if "jax.lax.scan" in line.text)
    name, _, number = scan.source.partition(":")
    assert scan.function.startswith("step.<locals>.loss")
    before = next(line for line in plan.lines if line.source == f"{name}:{int(number) - 1}")
    assert before.text == "    def loss(w):"
    assert [c.source for c in plan.collectives if c.source not in {line.source for line in own}] == []


def test_files_of_one_name_are_told_apart():
    files = ("/a/x/model.py", "/b/x/model.py", "/b/main.py", "")
    places = SourceNames(Source(file, 7) for file in files)
    assert [places.of(Source(file, 7)) for file in files] == ["a/x/model.py:7", "b/x/model.py:7", "main.py:7", "?"]
