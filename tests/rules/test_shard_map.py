"""Collectives of the user's shard_map on automatic axes: every listed row is right, and no right row is missing.

The manual axis is a leading dim of every operand, under ``vmap``; the rows of the rule are tried on another axis of 2
and 3 simulated devices, each of which runs the collective on its parts.
"""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import meshdsl as md
from meshdsl.custom_rules import simulate as simulated
from meshdsl.ir.graph import Op, Value
from meshdsl.ir.manual import BOUNDARY
from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.placement import B, Partial, S, Split
from meshdsl.layouts.placement import P as Sum
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.lowering.local.registry import Local, run_local
from meshdsl.rules import rows_of
from meshdsl.rules.shard_map import KINDS, manual_axes, manual_row
from tests.rules.prover import implied
from tests.sweeps import swept

DEVICES, SAMPLES = 6, 3  # divisible by 2 and 3, so that the gathered dims are
AXES = {"axes": ("i",), "moved": ("i",), "groups": None}
F32 = np.dtype(np.float32)


def op(name, before, after, **params):
    value, made = Value(0, before, F32), Value(1, after, F32)
    return Op(0, name, None, {**AXES, **params}, (value,), (made,), manual=("i",))


RING = tuple((i, (i + 1) % DEVICES) for i in range(DEVICES - 1))
OPS = [
    op("psum", (6, 12), (6, 12)),
    op("pmax", (6, 12), (6, 12)),
    op("pmin", (12,), (12,)),
    op("ppermute", (6, 12), (6, 12), pairs=RING),
    op("pbroadcast", (6, 12), (6, 12), source=1),
    op("all_gather", (6, 12), (36, 12), dim=0, tiled=True),
    op("all_gather", (6, 12), (6, DEVICES, 12), dim=1, tiled=False),
    op("reduce_scatter", (36, 12), (6, 12), dim=0, tiled=True),
    op("reduce_scatter", (12, DEVICES, 6), (12, 6), dim=1, tiled=False),
    op("all_to_all", (36, 6, 12), (6, 36, 12), split=0, join=1),
    op("all_to_all", (6, 36), (6, 36), split=1, join=1),
]


def run(each, x):
    """The collective on [samples, manual devices, ...]; ``vmap`` has no permutes in which some receive nothing."""
    if each.name == "ppermute":
        moved = np.zeros_like(x)
        for sender, receiver in each.params["pairs"]:
            moved[:, receiver] = x[:, sender]
        return moved
    where = Local({"i": DEVICES}, (md.Layout(),), (md.Layout(),))
    one = jax.vmap(lambda x: run_local(each, (x,), where)[0], axis_name="i")
    return np.asarray(jax.vmap(one)(x))


def shifted(placed):
    """The placement of a value with the manual devices in front."""
    return S(placed.dim + 1) if isinstance(placed, Split) else placed


def holds(each, row, x, devices, rng):
    (before,), (after,) = row.inputs, row.outputs
    parts = simulated.cut(x, (shifted(before),), (devices,), rng)
    found = simulated.join(np.stack([run(each, part) for part in parts]), (shifted(after),))
    return found is not None and simulated.agree(found, run(each, x))


def placements(value):
    return [B, *map(S, range(len(value.shape))), Sum, Partial("max"), Partial("min")]


@swept("each", OPS, ids=lambda each: f"{each.name}-{len(each.inputs[0].shape)}", every=2)
def test_rows(each):
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 9, (SAMPLES, DEVICES, *each.inputs[0].shape)).astype(F32)
    listed = rows_of(each)
    rows = [Signature((a,), (b,)) for a in placements(each.inputs[0]) for b in placements(each.outputs[0])]
    right = [row for row in rows if all(holds(each, row, x, devices, rng) for devices in (2, 3))]
    assert [str(row) for row in listed if row not in right] == []
    assert [str(row) for row in right if not implied(row, listed)] == []


def test_every_collective_is_tried():
    assert {each.name for each in OPS} | {"ragged_all_to_all"} == set(KINDS)


def test_manual_axes_have_one_row():
    """Nothing but the collective itself, on the axes that it moves over, and the cut at the boundary."""
    sent = manual_row(op("psum", (6, 12), (6, 12)), "i")
    assert (sent.inputs, sent.outputs, sent.collectives) == ((B,), (B,), (Exchange("all-reduce", 0),))
    assert manual_row(op("psum", (6, 12), (6, 12)), "j").collectives == ()
    spec = (("b", "a"), ())
    cut = {"spec": spec, "sizes": (("a", 2), ("b", 3), ("c", 2)), "unreduced": ()}
    enter = Op(0, BOUNDARY[0], None, cut, *_ends(), manual=("z",))
    assert manual_axes(enter) == ("b", "a", "c", "z")
    rows = [str(manual_row(enter, axis)) for axis in "abcz"]
    assert rows == ["S(0) -> B", "S(0) -> B", "B -> B", "B -> B"]


def _ends():
    return (Value(0, (12, 4), F32),), (Value(1, (2, 4), F32),)


def test_a_value_is_never_cut_over_its_manual_axes():
    """Not even on the way: the cheapest all-reduce over a slow axis would slice over the fast one, and gather."""
    mesh = md.Mesh(model=2, data=8, topology="dgx-h100")
    devices = jax.sharding.AbstractMesh((2, 8), ("model", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def step(x, w):
        def block(x, w):
            return md.constrain(md.constrain(x, "model=S(1)") @ md.constrain(w, "model=S(0)"), "model=B") ** 2

        run = jax.shard_map(
            block, mesh=devices, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}, check_vma=False
        )
        return run(x, w)

    shapes = jax.ShapeDtypeStruct((4096, 8192), F32), jax.ShapeDtypeStruct((8192, 8192), F32)
    plan = md.parallelize(step, mesh).plan(*shapes)
    assert {c.axes for c in plan.collectives} == {("model",)}
