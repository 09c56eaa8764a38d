"""Collectives read from compiled text: every form that backends write, and programs of the XLA partitioner."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.hlo.collectives import compiled_collectives
from meshdsl.lowering.shardings import device_mesh

MESH = Mesh(x=4, y=2)
X, Y = "replica_groups={{0,2,4,6},{1,3,5,7}}", "replica_groups=[4,2]<=[8]"


def module(*lines, others=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m\n\n{others}\nENTRY %main (a: f32[8,4]) -> f32[8,4] {{\n{body}\n}}\n"


def only(text):
    (found,) = compiled_collectives(text, MESH)
    return found.kind, found.axes, found.bytes


ARRAY = 8 * 4 * 4
FORMS = {
    f"%r = f32[32,4]{{1,0}} all-gather(%a), channel_id=1, {X}, dimensions={{0}}": ("all-gather", "x", 3 * ARRAY),
    f"%r = f32[8,4]{{1,0:T(8,128)}} all-reduce(f32[8,4]{{1,0}} %a), {Y}, to_apply=%add": ("all-reduce", "y", ARRAY),
    f"%r = f32[2,4]{{1,0}} reduce-scatter(%a), {X}, dimensions={{0}}": ("reduce-scatter", "x", ARRAY * 3 // 4),
    f"%r = f32[8,4]{{1,0}} all-to-all(%a), {X}, dimensions={{0}}": ("all-to-all", "x", ARRAY * 3 // 4),
    f"%r = (f32[4,4]{{1,0}}, f32[4,4]{{1,0}}) all-to-all(%b, %c), {Y}": ("all-to-all", "y", ARRAY // 2),
    "%r = f32[8,4]{1,0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}": ("collective-permute", "y", ARRAY),
    f"%r = (f32[8,4]{{1,0}}, /*index=1*/bf16[8]{{0}}) all-reduce(%a, %b), {Y}, to_apply=%add": (
        "all-reduce",
        "y",
        ARRAY + 16,
    ),
    f"%s = (f32[8,4]{{1,0}}, f32[32,4]{{1,0}}) all-gather-start(%a), {X}, dimensions={{0}}": (
        "all-gather",
        "x",
        3 * ARRAY,
    ),
    f"%s = ((f32[8,4]{{1,0}}, f32[2]{{0}}), (f32[16,4]{{1,0}}, f32[4]{{0}})) all-gather-start(%a, %b), {Y}": (
        "all-gather",
        "y",
        ARRAY + 8,
    ),
    f"%s = f32[8,4]{{1,0}} all-reduce-start(%a), {Y}, to_apply=%add": ("all-reduce", "y", ARRAY),
    f"%s = (f32[8,4]{{1,0}}, f32[2]{{0}}) all-reduce-start(%a, %b), {Y}, to_apply=%add": ("all-reduce", "y", ARRAY + 8),
    f"%s = ((f32[8,4]{{1,0}}), f32[2,4]{{1,0}}, u32[]) reduce-scatter-start(%a), {X}": (
        "reduce-scatter",
        "x",
        ARRAY * 3 // 4,
    ),
    "%s = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[], u32[]) collective-permute-start(%a), "
    "source_target_pairs={{0,2},{2,0}}": ("collective-permute", "x", ARRAY),
    f"%r = pred[16]{{0}} all-gather(%a), {Y}, dimensions={{0}}": ("all-gather", "y", 8),
    f"%r = s4[16]{{0:E(4)}} all-gather(%a), {Y}, dimensions={{0}}": ("all-gather", "y", 4),
}


@pytest.mark.parametrize(("line", "expected"), FORMS.items())
def test_forms(line, expected):
    done = "%d = f32[8,4]{1,0} all-reduce-done(%s)"
    kind, axes, size = expected
    assert only(module(line, done)) == (kind, (axes,), size)


def test_groups_of_one_communicate_nothing():
    lines = (
        "%r = f32[8,4]{1,0} all-reduce(%a), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add",
        "%p = f32[8,4]{1,0} collective-permute(%a), source_target_pairs={{0,0},{1,1}}",
    )
    assert compiled_collectives(module(*lines), MESH) == ()


def test_groups_that_are_no_axes():
    (found,) = compiled_collectives(
        module("%r = f32[8]{0} all-reduce(%a), replica_groups={{0,2},{4,6},{1,3},{5,7}}, to_apply=%add"), MESH
    )
    assert (found.axes, found.group, found.bytes) == (None, 2, 32)


BODY = f"""%inner (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {{
  %r = f32[8,4]{{1,0}} all-reduce(%g), {Y}, to_apply=%add
}}

%less (p: (s32[], f32[8,4])) -> pred[] {{
  %n = s32[] constant(6)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

%outer (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {{
  %w = (s32[], f32[8,4]{{1,0}}) while(%t), condition=%less, body=%inner
}}
"""
KNOWN = 'backend_config={"known_trip_count":{"n":"5"},"x":{}}'


def test_trips_multiply_and_come_from_the_compiler_or_the_condition():
    text = module(f"%w = (s32[], f32[8,4]{{1,0}}) while(%t), condition=%less, body=%outer, {KNOWN}", others=BODY)
    (found,) = compiled_collectives(text, MESH)
    assert (found.trips, found.known) == (30, True)


def test_unknown_trips_count_once():
    unknown = BODY.replace("direction=LT", "direction=NE")
    text = module(f"%w = (s32[], f32[8,4]{{1,0}}) while(%t), condition=%less, body=%outer, {KNOWN}", others=unknown)
    (found,) = compiled_collectives(text, MESH)
    assert (found.trips, found.known) == (5, False)


@pytest.mark.parametrize(
    "call",
    [
        "%c = f32[8,4]{1,0} call(%a), to_apply=%inner",
        "%c = f32[8,4]{1,0} fusion(%a), kind=kCustom, calls=%inner",
        "%c = f32[8,4]{1,0} conditional(%i, %a, %b), branch_computations={%less, %inner}",
        "%c = f32[8,4]{1,0} conditional(%i, %a, %b), true_computation=%inner, false_computation=%less",
        "%c = ((f32[8,4]{1,0}), f32[8,4]{1,0}) async-start(%a), calls=%inner",
    ],
)
def test_called_computations(call):
    assert only(module(call, others=BODY)) == ("all-reduce", ("y",), ARRAY)


def test_fused_reduce_scatter_of_a_tpu():
    fused = BODY.replace("%inner", "%all-reduce-scatter.1")
    text = module("%c = f32[4,4]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1", others=fused)
    assert only(text) == ("reduce-scatter", ("y",), ARRAY // 2)


ASYNC = f"""%start (p: bf16[8]) -> (bf16[8], bf16[16]) {{
  %g = bf16[16]{{0:T(8,128)(2,1)}} all-gather(%p), {Y}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}
  ROOT %c = (bf16[8]{{0}}, bf16[16]{{0}}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion (p: bf16[8]) -> (bf16[8], bf16[16]) {{
  %g = bf16[16]{{0:T(8,128)(2,1)}} all-gather(%p), {Y}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}
}}

%done (p: bf16[8]) -> bf16[16] {{
  %g = bf16[16]{{0:T(8,128)(2,1)}} all-gather(%p), {Y}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}
  ROOT %c = bf16[16]{{0}} custom-call(%p, %g), custom_call_target="AsyncCollectiveDone"
}}
"""


def test_chain_of_fusions_of_a_tpu_counts_once():
    calls = [
        f"%f{i} = bf16[16]{{0}} fusion(%a), kind=kCustom, calls=%{name}"
        for i, name in enumerate(("start", "async_collective_fusion", "done"))
    ]
    assert only(module(*calls, others=ASYNC)) == ("all-gather", ("y",), 16)


def test_trips_of_a_tpu_loop():
    tiled = BODY.replace("%n = s32[]", "%n = s32[]{:T(128)}").replace("= pred[]", "= pred[]{:T(512)}")
    (found,) = compiled_collectives(
        module("%w = (s32[]{:T(128)}, f32[8,4]{1,0}) while(%t), condition=%less, body=%inner", others=tiled), MESH
    )
    assert (found.trips, found.known) == (6, True)


@pytest.mark.parametrize(
    ("planned", "sent", "size"),
    [("bfloat16", "f32", 16), ("float32", "bf16", 32), ("bfloat16", "bf16", 16), ("int8", "s32", 32)],
)
def test_floats_count_in_the_planned_width(planned, sent, size):
    scope = f'metadata={{op_name="jit(step)/while/body/all-reduce(y) {planned}/psum"}}'
    (found,) = compiled_collectives(module(f"%r = {sent}[8]{{0}} all-reduce(%a), {Y}, to_apply=%add, {scope}"), MESH)
    assert (found.recast, found.bytes) == (planned[-2:] != sent[-2:] and sent != "s32", Fraction(size))


@pytest.mark.parametrize("done", [False, True])
def test_tensors_combined_into_one_count_each_in_its_own_width(done):
    scopes = [f'metadata={{op_name="all-reduce(y) {name}/psum"}}' for name in ("bfloat16", "float32")]
    both = "(f32[8]{0}, f32[2]{0:T(128)})"
    lines = [f"%r = {both} all-reduce{'-start' * done}(%a, %b), {Y}, to_apply=%add, {scopes[0]}"]
    lines += [f"%d = {both} all-reduce-done({both} %r)"] if done else []
    taken = "%d" if done else "%r"
    lines += [f"%t{i} = f32[] get-tuple-element({both} {taken}), index={i}, {scopes[i]}" for i in (1, 0)]
    assert only(module(*lines)) == ("all-reduce", ("y",), 16 + 8)


def test_program_of_the_xla_partitioner():
    devices = device_mesh(MESH)
    split = [NamedSharding(devices, PartitionSpec(*axes)) for axes in (("x", "y"), ("y", None), ("x", None))]
    x, w = jnp.ones((16, 32)), jnp.ones((32, 8))

    def step(x, w):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c + x @ w), None), jnp.zeros((16, 8)), None, length=3)[0]

    text = jax.jit(step, in_shardings=tuple(split[:2]), out_shardings=split[2]).lower(x, w).compile().as_text()
    found = [(c.kind, c.axes, c.bytes * c.trips) for c in compiled_collectives(text, MESH)]
    assert found == [("all-reduce", ("y",), 4 * 8 * 4)]
