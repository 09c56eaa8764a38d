"""What operations read and write, and what they take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshdsl.ir.graph import walk
from meshdsl.lowering.hlo.flops import product_flops
from meshdsl.lowering.hlo.parse import parse_module
from meshdsl.planner.costs.op_cost import materialized_ids, work_of
from meshdsl.trace.read_jaxpr import read_jaxpr

LARGE, SMALL = np.zeros((64, 8), np.float32), np.zeros((1, 8), np.float32)
INDEX = np.zeros((1, 1), np.int32)


def work(name, function, *args):
    graph = read_jaxpr(jax.make_jaxpr(function)(*args))
    (op,) = (op for _, op in walk(graph) if op.name == name)
    return work_of(op, materialized_ids(graph))


def test_writing_a_part_of_a_buffer_touches_that_part_twice_and_nothing_else():
    written = work("dynamic_update_slice", lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)), LARGE, SMALL, 3)
    assert written.accesses == (0, 2, 0, 0, 0)[: len(written.accesses)]
    assert sum(work("scatter", lambda x, i, y: x.at[i].set(y), LARGE, INDEX[0], SMALL).accesses) == 2


@pytest.mark.parametrize(
    ("name", "view"), [("reshape", lambda x: x.reshape(8, 64)), ("squeeze", lambda x: jnp.squeeze(x, 1))]
)
def test_a_view_moves_nothing(name, view):
    wide = np.zeros((64, 1, 8), np.float32)
    assert not any(work(name, lambda x, w: view(jnp.sin(x)) @ w, wide, np.ones((view(wide).shape[1], 2))).accesses)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("slice", lambda x: x[:4]),
        ("dynamic_slice", lambda x: lax.dynamic_slice_in_dim(x, x[0, 0].astype(int), 4)),
    ],
)
def test_a_part_is_read_also_if_it_is_fused(name, part):
    """As much of it as is made; what pads a step and cuts it again would be cheaper than the step."""
    made = work(name, lambda x: jnp.sum(part(x) * 2), LARGE)
    assert made.accesses[0] == 0 and made.accesses[-1] == 1
    assert work(name, lambda x: part(x), LARGE).accesses[-1] == 2


def conv(strides=(1, 1), padding="SAME", groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    options = {"dimension_numbers": numbers, "feature_group_count": groups}
    return lambda x, w: lax.conv_general_dilated(x, w, strides, padding, **options)


@pytest.mark.parametrize("options", [{}, {"strides": (2, 2)}, {"padding": "VALID"}, {"groups": 4}], ids=str)
def test_padding_and_gaps_of_a_convolution_are_no_work(options):
    """As the lowered program has them, of the gradients too: a stride's is a convolution with gaps."""
    x, w = jnp.zeros((2, 9, 9, 8)), jnp.zeros((3, 3, 8 // options.get("groups", 1), 16))
    step = jax.grad(lambda x, w: jnp.sum(conv(**options)(x, w) ** 2), (0, 1))
    graph = read_jaxpr(jax.make_jaxpr(step)(x, w))
    counted = sum(work_of(op, set()).flops for _, op in walk(graph))
    assert counted == product_flops(parse_module(jax.jit(step).lower(x, w).as_text("hlo")))
