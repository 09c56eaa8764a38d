"""Every data-moving primitive, proved."""

import jax.numpy as jnp
import pytest
from jax import lax

from meshdsl.layouts.placement import B, S
from meshdsl.rules import rows_of
from meshdsl.trace.passes.permutations import deal_p
from meshdsl.trace.passes.rolls import roll_p
from meshdsl.trace.passes.share_halos import rolls_p, shifts_p
from tests.rules.data import bools, floats, ints
from tests.rules.prover import drawn, prove, sample
from tests.sweeps import swept

CASES = []


def case(*args, **options):
    CASES.append(sample(*args, **options))


def reshape(before, after):
    case("reshape", lambda x: lax.reshape(x, after), floats(*before))


case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (12, 24, 36), (0, 2)), floats(12, 36))
case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (12, 24), (0, 1)), floats(1, 24))
case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (24,), ()), floats())
case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (12, 24), (1,)), bools(24))
case("broadcast_in_dim", lambda: lax.broadcast_in_dim(0.0, (12, 24), ()))  # zeros add up to zero
case("broadcast_in_dim", lambda: lax.broadcast_in_dim(3, (12,), ()))
reshape((12, 24), (288,))
reshape((288,), (12, 24))
reshape((12, 6, 4), (12, 24))
reshape((24, 12), (12, 24))
reshape((6, 12), (1, 6, 12, 1))
reshape((12, 2, 12), (12, 24))
reshape((4, 9), (6, 6))
reshape((12, 6), (4, 18))
reshape((8, 9), (12, 6))
reshape((1, 24), (24,))
reshape((24,), (2, 12))
case("reshape", lambda x: lax.reshape(x, (24, 12), (1, 0)), floats(12, 24))
case("squeeze", lambda x: lax.squeeze(x, (1,)), floats(12, 1, 24))
case("transpose", lambda x: lax.transpose(x, (2, 0, 1)), floats(12, 24, 36))
case("rev", lambda x: lax.rev(x, (1,)), floats(12, 24))
case("deal", lambda x: deal_p.bind(x, which=(0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11)), floats(12, 6))
case("deal", lambda x: deal_p.bind(x, which=tuple(range(23, -1, -1))), ints(24))
case("deal", lambda x: deal_p.bind(x, which=(0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11)), floats(12))
case("roll", lambda x: roll_p.bind(x, axis=1, shift=4), floats(6, 12))
case("roll", lambda x: roll_p.bind(x, axis=0, shift=12), ints(24))
case("roll", lambda x: roll_p.bind(x, axis=0, shift=5), bools(6))
case("rev", lambda x: lax.rev(x, (0, 1)), bools(12, 6))
case("slice", lambda x: lax.slice(x, (0, 3), (12, 15)), floats(12, 24))
case("slice", lambda x: lax.slice(x, (0, 0), (12, 12)), floats(12, 24))
case("slice", lambda x: lax.slice(x, (0, 1), (12, 7)), floats(12, 24))
case("slice", lambda x: lax.slice(x, (11, 3), (12, 5)), floats(12, 24))
case("slice", lambda x: lax.slice(x, (2, 0), (3, 18), (1, 6)), ints(12, 24))
case("slice", lambda x: lax.slice(x, (1, 5), (12, 17), (5, 1)), bools(12, 24))
case("slice", lambda x: lax.slice(x, (3, 1), (12, 19)), ints(18, 24))
case("slice", lambda x: lax.slice(x, (2, 3), (20, 21), (3, 3)), bools(24, 24))
case("slice", lambda x: lax.slice(x, (0, 0), (12, 24), (1, 2)), floats(12, 24))
case("slice", lambda x: lax.slice(x, (0, 1), (12, 24), (1, 2)), floats(12, 24))
case("slice", lambda x: lax.slice(x, (2, 0), (12, 23), (3, 2)), floats(12, 24))
case("slice", lambda x: lax.slice(x, (0, 2), (12, 24), (1, 2)), floats(12, 24))
WHOLE, MOVED = "each device pads a whole operand instead", "each device moves its block instead"


def blocks(*dims, moved=()):
    """Rows that would hold too: from blocks of these dims, or from whole operands."""
    return {"excused": {f"S({d}), B -> S({d})": WHOLE for d in dims} | {f"B, B -> S({d})": MOVED for d in moved}}


case("pad", lambda x, v: lax.pad(x, v, ((0, 0, 0), (6, 6, 0))), floats(12, 24), floats(), **blocks(moved=[1]))
case("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (6, 6, 0))), floats(12, 24), **blocks(moved=[1]))
case("pad", lambda x: lax.pad(x, 1.5, ((0, 0, 0), (6, 6, 0))), floats(12, 24), **blocks(moved=[1]))
case("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (-6, -6, 0))), floats(12, 24), **blocks(moved=[1]))
case("pad", lambda x, v: lax.pad(x, v, ((2, 4, 0), (-3, 9, 0))), floats(12, 24), floats(), **blocks(moved=[0, 1]))
case("pad", lambda x: lax.pad(x, 0.0, ((2, -2, 0), (0, 1, 1))), floats(6, 6), **blocks(moved=[0, 1]))
case("pad", lambda x: lax.pad(x, 1.5, ((-1, 1, 0),)), floats(12), **blocks(moved=[0]))
case("pad", lambda x: lax.pad(x, 0.0, ((3, -2, 1),)), floats(6), **blocks(moved=[0]))
case("pad", lambda x: lax.pad(x, 1.5, ((0, 3, 0), (0, 2, 0))), floats(21, 22), **blocks(0, 1))
case("pad", lambda x, v: lax.pad(x, v, ((0, 12, 0), (0, 0, 0))), ints(12, 24), ints(), **blocks(0))
case("pad", lambda x: lax.pad(x, -8.0, ((0, 0, 0), (0, 2, 1))), floats(12, 24))
case("pad", lambda x: lax.pad(x, 0.0, ((0, 11, 0), (17, 4, 0))), floats(1, 3), **blocks(1))
case("pad", lambda x, v: lax.pad(x, v, ((-1, 9, 1), (3, 8, 5))), floats(3, 3), floats())
case("pad", lambda x: lax.pad(x, 7, ((-2, 20, 0),)), ints(6), **blocks(0))
case("shifts", lambda x: shifts_p.bind(x, 0.0, moves=((1, 0), (2, 0), (-1, 0))), floats(12, 24))
case("shifts", lambda x, v: shifts_p.bind(x, v, moves=((1, 0), (2, -1), (0, 1))), floats(12, 24), floats())
case("shifts", lambda x: shifts_p.bind(x, 3, moves=((5,), (7,))), ints(24))
case("rolls", lambda x: rolls_p.bind(x, moves=((1, 0), (2, 0), (-1, 0))), floats(12, 24))
case("rolls", lambda x: rolls_p.bind(x, moves=((1, 1), (2, -1), (0, 1))), floats(12, 24))
case("rolls", lambda x: rolls_p.bind(x, moves=((3,), (-3,), (2,))), ints(24))
case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), floats(12, 24))
case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.uint8), floats(12, 24))
case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), ints(24, 4, dtype="uint8", low=0))
case("concatenate", lambda x, y: lax.concatenate([x, y], 1), floats(12, 24), floats(12, 36))
case("concatenate", lambda x, y: lax.concatenate([x, y], 0), bools(12, 24), bools(12, 24))
case("split", lambda x: lax.split(x, (12, 24), 1), floats(12, 36))
case("stack", lambda x, y: jnp.stack([x, y], 1), floats(12, 24), floats(12, 24))
case("unstack", lambda x: jnp.unstack(x, axis=1), floats(12, 2, 24))
case("tile", lambda x: lax.tile(x, (1, 2)), floats(12, 24))
case("iota", lambda: lax.iota(jnp.int32, 24))
case("iota", lambda: lax.broadcasted_iota(jnp.float32, (12, 24), 1))
case("reduce_precision", lambda x: lax.reduce_precision(x, 5, 10), ints(24) / 4.0, excused={"P -> P": "rounds"})


@swept("case", CASES, ids=str, kind=lambda case: case.name)
def test_rule(case):
    assert prove(case) == []


@pytest.mark.parametrize(
    ("before", "after", "splits"),
    [
        ((12, 24), (288,), {(0, 0): 12, (1, 0): 24}),
        ((288,), (12, 24), {(0, 0): 12, (0, 1): 24}),
        ((24, 12), (12, 24), {(0, 0): 12, (0, 1): 2, (1, 1): 12}),
        ((12, 6, 4), (12, 24), {(0, 0): 0, (1, 1): 6, (2, 1): 4}),
        ((12, 6), (4, 18), {(0, 0): 4, (0, 1): 3, (1, 1): 6}),
        ((8, 9), (12, 6), {(0, 0): 4}),
        ((1, 24), (24, 1), {(1, 0): 0}),
        ((4, 0), (0,), {}),
        ((3, 5), (5, 3), {}),
    ],
)
def test_reshape_splits_factors_as_far_as_they_go(before, after, splits, rng):
    op, _ = drawn(sample("reshape", lambda x: lax.reshape(x, after), floats(*before)), rng)
    found = {(r.inputs[0].dim, r.outputs[0].dim): r.size for r in rows_of(op) if isinstance(r.inputs[0], S)}
    assert found == splits


def test_a_literal_is_never_placed(rng):
    op, _ = drawn(sample("pad", lambda x: lax.pad(x, 0.0, ((1, 1, 0),)), floats(12)), rng)
    assert {row.inputs[1] for row in rows_of(op)} == {B}
