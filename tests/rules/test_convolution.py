"""Convolution and pooling, with their gradients, proved."""

from functools import partial

import jax
import numpy as np
import pytest
from jax import lax

from meshdsl.layouts.placement import S
from meshdsl.rules import rows_of
from tests.rules.data import bits, complexes, floats
from tests.rules.listed import wrong
from tests.rules.prover import drawn, prove, sample
from tests.sweeps import swept

CASES = []
IMAGES = ("NWC", "WIO", "NWC")


def case(*args, **options):
    CASES.append(sample(*args, **options))


def conv(x, w, stride=1, padding="VALID", **options):
    return lax.conv_general_dilated(x, w, (stride,), padding, dimension_numbers=IMAGES, **options)


def cotangent(argument, shape, **options):
    """The gradient convolution alone: linear, so only one convolution is traced."""

    def run(y, other):
        given = (lambda w: conv(other, w, **options)) if argument else (lambda x: conv(x, other, **options))
        return jax.linear_transpose(given, jax.ShapeDtypeStruct(shape, "float32"))(y)[0]

    return run


CASES_OF = {
    "plain": ((6, 6, 6), (3, 6, 6), {"padding": "SAME"}),
    "pointwise": ((6, 6, 6), (1, 6, 6), {}),
    "patches": ((2, 12, 3), (2, 3, 6), {"stride": 2}),
    "strided": ((2, 12, 2), (3, 2, 2), {"stride": 2, "padding": "SAME"}),
    "shrinking": ((2, 36, 2), (7, 2, 2), {}),
    "wide": ((2, 6, 2), (4, 2, 2), {"padding": "SAME", "rhs_dilation": (2,)}),
    "depthwise": ((6, 4, 6), (3, 1, 6), {"padding": "SAME", "feature_group_count": 6}),
    "grouped": ((2, 4, 12), (3, 2, 12), {"padding": "SAME", "feature_group_count": 6}),
    "batch groups": ((12, 4, 6), (3, 6, 12), {"padding": "SAME", "batch_group_count": 6}),
}
SPREADING = []  # XLA on CPU adds zeros times the other groups, so an infinite part would spread to all trials
for kind, (images, kernels, options) in CASES_OF.items():
    result = jax.eval_shape(partial(conv, **options), np.zeros(images, "f"), np.zeros(kernels, "f")).shape
    convs = [
        ("conv_general_dilated", partial(conv, **options), floats(*images), floats(*kernels)),
        ("conv_general_dilated", cotangent(0, images, **options), floats(*result), floats(*kernels)),
        ("conv_general_dilated", cotangent(1, kernels, **options), floats(*result), floats(*images)),
    ]
    spreading = {"grouped": [2], "batch groups": [0]}.get(kind, [])
    other = {"plain": [0], "wide": [0, 1]}.get(kind, [])
    for i, made in enumerate(convs):
        if i in spreading:
            SPREADING.append(made)
        else:
            case(*made, excused={"S(1), S(0) -> P": "the result is split instead"} if i in other else None)

WHOLE = (bits(2, 4, 6, dtype="int8"), bits(1, 6, 6, dtype="int8"))
case("conv_general_dilated", partial(conv, preferred_element_type="float32"), *WHOLE)
DISTINCT = (np.arange(72.0, dtype="float32").reshape(6, 12) * 5 % 72) - 30
for kind, start in ((lax.add, 0.0), (lax.max, -np.inf), (lax.min, np.inf), (lax.mul, 1.0)):
    name = {lax.add: "_sum", lax.max: "_max", lax.min: "_min", lax.mul: ""}[kind]
    for window, stride, padding in ((2, 2, "VALID"), (3, 2, "SAME"), (2, 1, "VALID")):
        case(
            f"reduce_window{name}",
            lambda x, args=(start, kind, (1, window), (1, stride), padding): lax.reduce_window(x, *args),
            floats(6, 12),
        )
    case(
        f"reduce_window{name}",
        lambda x, args=(start, kind, (1, 7), (1, 1), "VALID"): lax.reduce_window(x, *args),
        floats(2, 24),
    )
    if kind in (lax.max, lax.min):  # of complex numbers, which have no partial extremes
        args = (np.complex64(start), kind, (1, 3), (1, 2), "SAME")
        case(f"reduce_window{name}", lambda x, args=args: lax.reduce_window(x, *args), complexes(6, 12))


def largest(width, stride, padding):
    return lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, width), (1, stride), padding)


POOLS = {"patches": (2, 2, "VALID"), "overlapping": (3, 2, "SAME"), "by one": (4, 1, "SAME"), "apart": (2, 3, "VALID")}
for pool in (POOLS["patches"], POOLS["overlapping"]):
    case("select_and_gather_add", lambda t, x, f=largest(*pool): jax.jvp(f, (x,), (t,))[1], floats(6, 12), DISTINCT)


@swept("case", CASES, ids=str, kind=lambda case: case.name, every=5)
def test_rule(case):
    assert prove(case) == []


@pytest.mark.parametrize("args", SPREADING, ids=["grouped", "batch groups"])
def test_batch_groups(args):
    assert wrong(*args) == []


@pytest.mark.parametrize("pool", POOLS)
def test_gradient_of_max_pooling(pool):
    """Listed rows only: JAX does not notice in time that other blocks do not fit together."""
    pooled = largest(*POOLS[pool])
    cotangent = floats(*jax.eval_shape(pooled, DISTINCT).shape)
    assert wrong("select_and_scatter_add", lambda y, x: jax.vjp(pooled, x)[1](y)[0], cotangent, DISTINCT) == []


def test_the_gradient_of_overlapping_pools_is_split():
    op, _ = drawn(
        sample(
            "select_and_scatter_add", lambda y, x: jax.vjp(largest(3, 2, "SAME"), x)[1](y)[0], floats(6, 6), DISTINCT
        ),
        np.random.default_rng(0),
    )
    (row,) = [row for row in rows_of(op) if row.outputs == (S(1),)]
    assert [str(e) for e in row.collectives] == [
        "1 of dim 1 in front of each block, 0 behind it",
        "2 of dim 1 in front of each block, 1 behind it",
    ]
