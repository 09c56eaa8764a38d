"""Plans to report: one with loops and every phase, one of the same step planned otherwise, one with hostile names."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.plan import Line
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.schedules.simulate import PipelineCosts
from tests.programs import small_plan

HOSTILE = ("</script><script>hit()</script>", "\"'`--><img src=x onerror=hit()>", "\u2028\u2029😀", "x" * 10_000)


def step(w, moment, batch):
    def loss(w):
        x, _ = jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), batch, w)
        return jnp.mean(jnp.cumsum(x, 0) ** 2)

    moment = 0.9 * moment + jax.grad(loss)(w)
    return w - 0.1 * moment, moment


def planned(layouts):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 64, 64), (3, 64, 64), (128, 64))]
    return md.parallelize(step, md.Mesh(data=4, model=2), layouts=layouts, donate_argnums=(0, 1)).plan(*args)


@pytest.fixture(scope="session")
def plan():
    return planned({"batch": "data=S(0)", "w": "model=S(1)", "moment": "data=S(1) model=B"})


@pytest.fixture(scope="session")
def other():
    return planned({"batch": "data=S(0)", "w": "data=B model=B"})


@pytest.fixture(scope="session")
def pipelined(plan):
    """The plan as if it were a pipeline."""
    costs = PipelineCosts(18e-6, 36e-6, 0.0, 8e-6, 18e-6, 20e-6, kept=1024, memory=50_000, exchanges=18, sent=9_000)
    return replace(plan, pipeline=Pipelined(md.Pipeline(8), "model", 2, costs=costs))


@pytest.fixture(scope="session")
def hostile():
    """A plan whose names, files, functions, texts, dims and notes are meant to break a page."""
    made, bad = small_plan(), HOSTILE[0]
    array, *rest = made.inputs
    lines = [Line(f"{bad}:{i}", HOSTILE[1], text) for i, text in enumerate(HOSTILE)]
    return replace(
        made,
        name=HOSTILE[1],
        inputs=(*(replace(array, path=text, dims=(bad, HOSTILE[3])) for text in HOSTILE), *rest),
        collectives=tuple(
            replace(c, source=line.source, reason=text, value=text)
            for c, line, text in zip(made.collectives, lines, HOSTILE, strict=False)
        ),
        held=tuple((text, 7) for text in HOSTILE),
        notes=HOSTILE,
        lines=tuple(lines),
    )
