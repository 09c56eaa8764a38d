"""What runs beside collectives, in programs cut from those of the compilers of a TPU v5e and an H100."""

from dataclasses import replace

import pytest

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Link, Topology
from meshdsl.lowering.hlo.parse import parse_module
from meshdsl.lowering.hlo.schedule import read_schedule
from meshdsl.lowering.hlo.traffic import moved_bytes

SPEEDS = Topology("one byte per second", 16.0, 16.0, 1e9, 1e10, 0.0, (Link(0.0, 1.0),))
MESH = Mesh(data=4, topology=SPEEDS)
ALL = "replica_groups={{0,1,2,3}}"
SCOPE = 'metadata={op_name="jit(step)/shard_map/while/body/closed_call/all-gather(data) bfloat16/all_gather"}'
SYNC, ASYNC = (
    f'backend_config={{"collective_backend_config":{{"is_sync":{x},"is_pipelined":false}}}}' for x in ("true", "false")
)
GATHERED = 3 * 32 * 2  # seconds: three blocks of 4 x 8 elements of two bytes
PRODUCT = 2 * 16 * 8 * 8 / 16  # seconds of a product of 16 x 8 by 8 x 8

CHAIN = f'{ALL}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}, {SCOPE}'
PARTS = f"""
%fused (a: bf16[16,8], b: bf16[8,8]) -> bf16[16,8] {{
  %a = bf16[16,8]{{1,0}} parameter(0)
  %b = bf16[8,8]{{1,0}} parameter(1)
  ROOT %c = bf16[16,8]{{1,0}} convolution(%a, %b), dim_labels=bf_io->bf
}}

%gemm (a: bf16[16,8], b: bf16[8,8]) -> bf16[16,8] {{
  %a = bf16[16,8]{{1,0}} parameter(0)
  %b = bf16[8,8]{{1,0}} parameter(1)
  ROOT %d = bf16[16,8]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%start (p: bf16[4,8]) -> (bf16[4,8], bf16[16,8], u32[]) {{
  %p = bf16[4,8]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  %g = bf16[16,8]{{1,0:T(8,128)(2,1)}} all-gather(%p), {CHAIN}
  ROOT %c = (bf16[4,8]{{1,0}}, bf16[16,8]{{1,0}}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

%async_fusion.105 (p: bf16[4,8], q: bf16[16,8], a: bf16[16,8], b: bf16[8,8]) -> (bf16[16,8], bf16[16,8]) {{
  %p = bf16[4,8]{{1,0}} parameter(0)
  %a = bf16[16,8]{{1,0}} parameter(2)
  %b = bf16[8,8]{{1,0}} parameter(3)
  %c = bf16[16,8]{{1,0}} convolution(%a, %b), dim_labels=bf_io->bf
  %g = bf16[16,8]{{1,0}} all-gather(%p), {CHAIN}
  ROOT %t = (bf16[16,8]{{1,0}}, bf16[16,8]{{1,0}}) tuple(%c, %g)
}}

%done (p: bf16[4,8], q: bf16[16,8]) -> bf16[16,8] {{
  %p = bf16[4,8]{{1,0}} parameter(0)
  %g = bf16[16,8]{{1,0}} all-gather(%p), {CHAIN}
  ROOT %c = bf16[16,8]{{1,0}} custom-call(%p, %g), custom_call_target="AsyncCollectiveDone"
}}
"""
START = (
    f"%s = ((bf16[4,8]{{1,0}}), bf16[16,8]{{1,0}}) all-gather-start(%p), channel_id=1, {ALL}, dimensions={{0}}, {SCOPE}"
)
DONE = "%e = bf16[16,8]{1,0} all-gather-done(%s)"
GEMM = "%gemm.1 = bf16[16,8]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm"
COPY = "%n = bf16[16,8]{1,0} copy(%x)"
REDUCE = f"%r = bf16[16,8]{{1,0}} all-reduce-start(%x), {ALL}, to_apply=%add, {ASYNC}"
REDUCED = "%q = bf16[16,8]{1,0} all-reduce-done(%r)"


def entry(*lines, parts=PARTS):
    body = "".join(f"  {line}\n" for line in lines)
    return f"{parts}\nENTRY %main (p: bf16[4,8], x: bf16[16,8], w: bf16[8,8]) -> bf16[16,8] {{\n{body}}}\n"


def read(text, mesh=MESH):
    return [(c.sent.kind, c.seconds, c.covered, c.beside) for c in read_schedule(parse_module(text), mesh).collectives]


CASES = {
    "TPU, plain": [f"%g = bf16[16,8]{{1,0}} all-gather(%p), {ALL}, dimensions={{0}}, {SCOPE}", GEMM],
    "GPU, start and done around a product": [f"{START}, {ASYNC}", GEMM, DONE],
    "GPU, said to be synchronous": [f"{START}, {SYNC}", GEMM, DONE],
    "GPU, nothing but a copy between": [GEMM, f"{START}, {ASYNC}", COPY, DONE],
    "GPU, a call of cuBLAS": [
        f"{START}, {ASYNC}",
        '%gemm.1 = (bf16[16,8]{1,0}, s8[4096]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}',
        DONE,
    ],
    "TPU, a fusion with a convolution": [
        f"{START}, {ASYNC}",
        "%gemm.1 = bf16[16,8]{1,0:T(8,128)(2,1)} fusion(%x, %w), kind=kOutput, calls=%fused",
        DONE,
    ],
    "TPU, a chain of fusions": [
        "%s = (bf16[4,8]{1,0}, bf16[16,8]{1,0}, u32[]{:S(2)}) fusion(%p), kind=kCustom, calls=%start",
        "%gemm.1 = (bf16[16,8]{1,0}, bf16[16,8]{1,0}) fusion(%s, %x, %w), kind=kOutput, calls=%async_fusion.105",
        "%e = bf16[16,8]{1,0} fusion(%s), kind=kCustom, calls=%done",
    ],
}
SYNCHRONOUS = ("TPU, plain", "GPU, said to be synchronous", "GPU, nothing but a copy between")
TYPED = ["%p = bf16[4,8]{1,0} parameter(0)", "%x = bf16[16,8]{1,0} parameter(1)", "%w = bf16[8,8]{1,0} parameter(2)"]


@pytest.mark.parametrize("name", CASES)
def test_what_stands_between_start_and_done(name):
    covered, beside = (0.0, ()) if name in SYNCHRONOUS else (PRODUCT, ("gemm.1",))
    assert read(entry(*TYPED, *CASES[name])) == [("all-gather", GATHERED, covered, beside)]


LOOP = f"""
%body (t: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {{
  %p = bf16[4,8]{{1,0}} parameter(0)
  %x = bf16[16,8]{{1,0}} get-tuple-element(%t), index=1
  %w = bf16[8,8]{{1,0}} get-tuple-element(%t), index=2
  {START}, {ASYNC}
  {GEMM}
  {DONE}
  %gemm.2 = bf16[16,8]{{1,0}} fusion(%x, %w), kind=kCustom, calls=%gemm
}}
"""
WHILE = (
    '%while.1 = (s32[], bf16[4,8]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}'
)


def test_trips_of_loops_multiply_and_a_loop_with_products_is_one_product():
    text = entry(REDUCE, WHILE, REDUCED, parts=PARTS + LOOP)
    outer, inner = read_schedule(parse_module(text), MESH).collectives
    assert (inner.sent.trips, inner.covered, inner.beside) == (5, PRODUCT, ("gemm.1",))
    left = 5 * (2 * PRODUCT) - 5 * PRODUCT  # what the gathers in the loop leave of its products
    assert (outer.seconds, outer.covered, outer.beside) == (2 * GATHERED * 4 / 4, min(2 * GATHERED, left), ("while.1",))


def test_transfers_over_one_link_share_the_seconds_of_a_product():
    both = read(entry(*TYPED, f"{START}, {ASYNC}", REDUCE, GEMM, DONE, REDUCED))
    assert [covered for _, _, covered, _ in both] == [PRODUCT, 0.0]  # the one that ends first, then what is left
    longer = read(entry(*TYPED, f"{START}, {ASYNC}", REDUCE, *[GEMM] * 4, DONE, REDUCED))
    assert [covered for _, _, covered, _ in longer] == [GATHERED, 4 * PRODUCT - GATHERED]


def test_transfers_over_two_links_do_not():
    speeds = Topology("two links", 16.0, 16.0, 1e9, 1e10, 0.0, (Link(0.0, 2.0, 2), Link(0.0, 1.0)))
    mesh = Mesh(data=2, model=2, topology=speeds)
    start = START.replace(ALL, "replica_groups={{0,2},{1,3}}").replace("bf16[16,8]", "bf16[8,8]")
    reduce = REDUCE.replace(ALL, "replica_groups={{0,1},{2,3}}")
    found = read(entry(*TYPED, f"{start}, {ASYNC}", reduce, GEMM, DONE, REDUCED), mesh)
    assert [covered for _, _, covered, _ in found] == [64.0, PRODUCT]


HOST_COPIES = (("", ":S(5)"), (":S(5)", ""), (":S(1)", ""))  # spaces of result and operand: from, to, and none of it


def replay(*lines, contention=0.0):
    speeds = replace(SPEEDS, contention=contention, host_memory=1e10, host_load=1.0, host_store=1e9)
    return read_schedule(parse_module(entry(*TYPED, *lines, parts=PARTS + LOOP)), Mesh(data=4, topology=speeds))


def test_a_replayed_schedule_waits_for_what_is_not_beside_products():
    def close(seconds):
        return pytest.approx(seconds, abs=1e-5)  # memory is fast here

    assert replay(f"{START}, {ASYNC}", GEMM, DONE).seconds == close(max(GATHERED, PRODUCT))
    assert replay(f"{START}, {SYNC}", GEMM, DONE).seconds == close(GATHERED + PRODUCT)
    assert replay(f"{START}, {ASYNC}", REDUCE, GEMM, DONE, REDUCED).seconds == close(3 * GATHERED)  # over one link
    assert replay(WHILE).seconds == close(5 * (max(GATHERED, PRODUCT) + PRODUCT))
    assert replay(WHILE).computing == close(5 * 2 * PRODUCT)
    copied = [f"%f = (bf16[16,8]{{1,0{x}}}, bf16[16,8]{{1,0{y}}}, u32[]) copy-start(%x)" for x, y in HOST_COPIES]
    done = "%h = bf16[16,8]{1,0} copy-done(%f)"
    assert [replay(each, GEMM, done).seconds for each in copied] == [close(256 / 1), close(PRODUCT), close(PRODUCT)]
    assert replay(f"{START}, {ASYNC}", GEMM, DONE, contention=1.0).seconds == close(GATHERED + PRODUCT - GATHERED / 2)


FUSED = """
%slice (s: f32[9,8], i: s32[]) -> f32[1,8] {
  %s = f32[9,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %d = f32[1,8]{1,0} dynamic-slice(%s, %i, %z), dynamic_slice_sizes={1,8}
  ROOT %n = f32[1,8]{1,0} negate(%d)
}

%scattered (s: f32[9,8], i: s32[], x: f32[1,8]) -> f32[9,8] {
  %s = f32[9,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[1,8]{1,0} parameter(2)
  ROOT %u = f32[9,8]{1,0} scatter(%s, %i, %x), to_apply=%add
}

%update (s: f32[9,8], x: f32[1,8], i: s32[]) -> f32[9,8] {
  %s = f32[9,8]{1,0} parameter(0)
  %x = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %u = f32[9,8]{1,0} dynamic-update-slice(%s, %x, %i, %z)
}
"""
ROW = 8 * 4
CUBLAS = 'custom_call_target="__cublas$gemm"'  # whose second result is a workspace


@pytest.mark.parametrize("line, moved", [
    ("%f = f32[1,8]{1,0} fusion(%s, %i), kind=kLoop, calls=%slice", 2 * ROW + 4),
    ("%f = f32[9,8]{1,0} fusion(%s, %x, %i), kind=kLoop, calls=%update", 3 * ROW + 4),
    ("%f = f32[9,8]{1,0} add(%s, %s)", 18 * ROW),
    ("%f = f32[9,8]{1,0} scatter(%s, %i, %x), to_apply=%add", 3 * ROW + 4),
    ("%f = f32[9,8]{1,0} fusion(%s, %i, %x), kind=kInput, calls=%scattered", 3 * ROW + 4),
    (f"%f = (f32[9,8]{{1,0}}, s8[4096]{{0}}) custom-call(%s, %x), {CUBLAS}", 0),
    ("%f = f32[9,8]{1,0} bitcast(%s)", 0),
    ("%f = f32[9,8]{1,0} all-gather-done(%s)", 0),
])  # fmt: skip
def test_bytes_that_instructions_read_and_write(line, moved):
    given = ("%s = f32[9,8]{1,0} parameter(0)", "%x = f32[1,8]{1,0} parameter(1)", "%i = s32[] parameter(2)")
    module = parse_module(entry(*given, line, parts=FUSED))
    lines = {each.name: each for each in module.computations[module.entry]}
    assert moved_bytes(lines["f"], lines, module) == moved
