"""What computing takes: one figure for equal operations, another where anything differs that counts."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from meshdsl.ir.graph import walk
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.pins import make_pins
from meshdsl.plan.op_times import OpTimes
from meshdsl.plan.reasons import Reasons
from meshdsl.planner.costs.op_cost import work_of
from meshdsl.trace import trace
from tests.planner.graphs import solved

MESH = Mesh(data=4, model=2, topology="dgx-h100")


def step(x, image, kernel):
    for _ in range(3):  # equal layers
        x = jnp.tanh(x @ x) * 2.0
    half = x.astype(jnp.bfloat16)
    products = (half @ half).sum(), (x @ x.T).sum()
    kept = jnp.sin(x)  # of several readers, so in memory; the next is fused
    fused = jnp.sin(x + 1.0).sum()
    ends = kept @ kept, jnp.exp(x), jnp.exp(half), products, fused, x.at[0].set(0.0)
    dims = ("NHWC", "HWIO", "NHWC")
    near = jax.lax.conv_general_dilated(image, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=dims)
    wide = jax.lax.conv_general_dilated(
        image, kernel, (1, 1), ((2, 2), (2, 2)), rhs_dilation=(2, 2), dimension_numbers=dims
    )
    return ends, near, wide


@pytest.fixture(scope="module")
def program():
    shapes = (64, 64), (64, 16, 16, 256), (3, 3, 256, 256)
    return trace(step, tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


@pytest.fixture(scope="module")
def solution(program):
    """Equal rows, so that only what an operation is tells it from others."""
    found = solved(program, MESH, make_pins(program, MESH, {}))
    ops = (op for _, op in walk(program.graph) if op.id in found.rows)
    return replace(found, rows={op.id: (_whole(len(op.inputs), len(op.outputs)),) * 2 for op in ops})


@cache
def _whole(inputs, outputs):
    return Signature((B,) * inputs, (B,) * outputs)


def test_what_is_shared_is_what_each_has_alone(program, solution):
    reasons = Reasons(program, solution)
    together = OpTimes(program, solution, reasons)
    ops = [op for _, op in walk(program.graph)]
    assert [together.compute_seconds(op) for op in ops] == [
        OpTimes(program, solution, reasons).compute_seconds(op) for op in ops
    ]


def test_work_is_found_once_per_kind(program, solution, monkeypatch):
    work, asked = OpTimes(program, solution, Reasons(program, solution)), []
    monkeypatch.setattr(
        "meshdsl.planner.problem.variables.work_of", lambda op, kept: asked.append(op.name) or work_of(op, kept)
    )
    assert all(work.compute_seconds(op) >= 0 for _, op in walk(program.graph))
    names = [op.name for _, op in walk(program.graph)]
    assert 0 < asked.count("tanh") < names.count("tanh")
