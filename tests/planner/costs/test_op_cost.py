"""What operations read and write, and what they take."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshdsl.api import parallelize
from meshdsl.ir.graph import walk
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, P, S
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.lowering.hlo.flops import product_flops
from meshdsl.lowering.hlo.parse import parse_module
from meshdsl.planner.costs.op_cost import flops_of, work_of, work_seconds
from meshdsl.planner.costs.traffic import traffic_of
from meshdsl.trace.read_jaxpr import read_jaxpr

LARGE, SMALL = np.zeros((64, 8), np.float32), np.zeros((1, 8), np.float32)
INDEX = np.zeros((1, 1), np.int32)
FOUR = Mesh(data=4)
CPU = FOUR.topology


def work(name, function, *args):
    graph = read_jaxpr(jax.make_jaxpr(function)(*args))
    (op,) = (op for _, op in walk(graph) if op.name == name)
    return work_of(op, traffic_of(graph, "chains").of(op))


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
    counted = sum(flops_of(op) for _, op in walk(graph))
    assert counted == product_flops(parse_module(jax.jit(step).lower(x, w).as_text("hlo")))


@pytest.mark.parametrize(("groups", "rate"), [(4, CPU.flops32), (8, CPU.grouped), (1, CPU.flops32)])
def test_one_group_per_device_runs_as_a_convolution_without_groups(groups, rate):
    """The gradient of a kernel whose images each device has of its own is a convolution with a group per device."""
    x, w = np.zeros((2, 9, 9, 64), np.float32), np.zeros((3, 3, 64 // groups, 64), np.float32)
    made, shapes = work("conv_general_dilated", conv(groups=groups), x, w), ((x.shape, 0), (w.shape, 0), (x.shape, 0))
    rows = Signature((B, B), (B,)), Signature((S(3), S(3 if groups > 1 else 2)), (S(3) if groups > 1 else P,))
    whole, split = work_seconds([Signature((), (*row.inputs, *row.outputs)) for row in rows], shapes, made, FOUR)
    assert split == pytest.approx(made.flops / 4 / rate + CPU.overhead)
    assert whole == pytest.approx(made.flops / (CPU.grouped if groups > 1 else CPU.flops32) + CPU.overhead)


EIGHT, SMALLER, SCALE = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu


@pytest.mark.parametrize(
    ("left", "right", "rate"),
    [
        *((EIGHT, EIGHT, 8e14), (SMALLER, EIGHT, 8e14), ("int8", "int8", 4e14), ("uint8", "int8", 4e14)),
        *((EIGHT, "bfloat16", 2e14), ("bfloat16", "bfloat16", 2e14), ("float32", EIGHT, 1e14), (EIGHT, "int8", 2e14)),
    ],
)
def test_products_of_eight_bits_have_rates_of_their_own(left, right, rate):
    """Both operands have 8 bits, of one kind; one alone is widened, and where no rate is stated, both are."""
    fast = replace(CPU, flops16=2e14, flops32=1e14, flops8=8e14, ops8=4e14, memory_bandwidth=1e18, overhead=0.0)
    x, y = jax.ShapeDtypeStruct((64, 32), left), jax.ShapeDtypeStruct((32, 16), right)
    made = work("dot_general", lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32), x, y)
    shapes, rows = (((64, 32), 1), ((32, 16), 1), ((64, 16), 4)), (Signature((), (B, B, B)),)
    assert work_seconds(rows, shapes, made, Mesh(data=1, topology=fast)) == pytest.approx(2 * 64 * 32 * 16 / rate)
    slow = replace(fast, flops8=0.0, ops8=0.0)
    expected = 2 * 64 * 32 * 16 / min(rate, 2e14)
    assert work_seconds(rows, shapes, made, Mesh(data=1, topology=slow)) == pytest.approx(expected)


def test_a_scaled_product_is_a_product_of_widened_operands():
    """Compilers of H100 and of TPU v5e widen it (jax 0.11); its FLOPs are those of the product alone."""
    numbers = ((1,), (0,)), ((), ())
    shapes = ((64, 32), EIGHT), ((32, 16), EIGHT), ((64, 1), SCALE), ((1, 16), SCALE)

    def dot(x, y, a, b):
        return lax.scaled_dot(
            x, y, lhs_scale=a, rhs_scale=b, dimension_numbers=numbers, preferred_element_type=jnp.float32
        )

    args = [jax.ShapeDtypeStruct(*each) for each in shapes]
    made = work("scaled_dot", dot, *args)
    assert (made.flops, made.rate, [side.length for side in made.sides]) == (2 * 64 * 32 * 16, "flops16", [64, 16, 32])
    assert product_flops(parse_module(jax.jit(dot).lower(*args).compile().as_text())) == made.flops


def test_decompositions_of_replicated_matrices_are_shared_by_the_devices():
    """An eigendecomposition multiplies its matrix by one vector per column, a factorization works in panels of 32."""
    matrices = np.zeros((8, 256, 256), np.float32)
    assert work("eigh", jnp.linalg.eigh, matrices).accesses[0] == 256
    assert work("cholesky", jnp.linalg.cholesky, matrices).accesses[0] == 8

    def vectors(x):
        return jnp.linalg.eigh(x)[1] + 1

    plan = parallelize(vectors, "data=8", {"x": "data=B"}, outputs={"**": "data=B"}).plan(matrices)
    assert [c.kind for c in plan.collectives] == ["all-gather"]
