"""Compiled programs on simulated devices: right ones agree, faulty ones are found, with the operation and its axes."""

import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshdsl as md
from meshdsl.errors import CheckError
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.hlo.parse import parse_module
from meshdsl.lowering.partitioner import CompiledModules, compiled_modules
from meshdsl.lowering.simulation.check import check_program
from meshdsl.lowering.simulation.comparison import ProgramPair
from meshdsl.lowering.simulation.numbers import PRIME, PrimeField
from tests.lowering.simulation.mutants import mutants
from tests.lowering.simulation.programs import AUTO, PROGRAMS, shape

MESH = Mesh(x=4, y=2)
# of all mutants, these compute the same: maxima doubled or over more devices, gathered rows in another order, summed
EQUIVALENT = 0.05


@cache
def compiled(name) -> CompiledModules:
    step, args = PROGRAMS[name]()
    return compiled_modules(jax.jit(step).lower(*args))


def checked(name, **changed):
    step, args = PROGRAMS[name]()
    texts = {**compiled(name).__dict__, **changed}
    paths = [str(i) for i in range(len(jax.tree.leaves(jax.eval_shape(step, *args))))]
    return check_program(name, CompiledModules(**texts), MESH, paths)


@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs_agree(name):
    found = checked(name)
    assert found.equal and not found.unfollowed and len(found.agreeing) == found.results, str(found)


def test_mutants_are_found():
    rng, missed, count = np.random.default_rng(0), [], 0
    for name in ("two_matrices", "embedding", "stencil", "ring", "partly_manual"):
        whole = parse_module(compiled(name).whole)
        for mutant in mutants(compiled(name).partitioned, MESH.size, rng):
            pair = ProgramPair(whole, parse_module(mutant.text), MESH.size)
            count += 1
            if not any(x.differs for x in pair.compare(PrimeField(), 0, 1e8)):
                missed.append(f"{name}, {mutant.kind}: {mutant.line}")
    assert count > 50 and len(missed) <= EQUIVALENT * count, "\n".join(missed)


def fault_of(name, kind, line):
    """What the check says of the first mutant of a kind on a line that contains a text."""
    rng = np.random.default_rng(0)
    found = next(x for x in mutants(compiled(name).partitioned, 8, rng) if x.kind == kind and line in x.line)
    check = checked(name, partitioned=found.text)
    assert not check.equal
    return check.faults[0]


def test_faults_are_named():
    dropped = fault_of("two_matrices", "dropped", "all-reduce(%dot.1)")
    assert (dropped.kind, dropped.operation, dropped.axes) == ("missing reduction", "dot", ("y",))
    assert "x=S(0) y=P" in dropped.text and "subtract reads it as if it were whole" in dropped.text
    assert dropped.place.file.endswith("programs.py") and dropped.stage == "partitioned"
    doubled = fault_of("two_matrices", "doubled", "all-reduce(%dot.1)")
    assert (doubled.kind, doubled.operation, doubled.axes) == ("doubled reduction", "all-reduce", ("y",))
    assert "the result is 2 times x=S(0) y=B of dot_general" in doubled.text
    groups = fault_of("two_matrices", "groups", "all-reduce(%dot.1)")
    assert groups.kind == "reduction over other axes" and "where the partial sums lie over y" in groups.text
    pairs = fault_of("stencil", "pairs", "collective-permute")
    assert (pairs.kind, pairs.operation) == ("blocks of other devices", "collective-permute")


def test_a_bug_of_the_partitioner():
    """The gradient of a depthwise convolution is summed over the other axis as well."""

    def loss(params, x):
        made = jax.lax.conv_general_dilated(
            x, params["kernel"], (1,), "SAME", feature_group_count=8, dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jnp.mean(jnp.tanh(made) ** 2)

    args = {"kernel": shape((3, 1, 8))}, shape((16, 12, 8), "x")
    with pytest.raises(CheckError) as raised:
        md.inspect(jax.jit(jax.value_and_grad(loss)), *args).check()
    text = str(raised.value)
    assert "loss on mesh x=4,y=2: 1 of 2 results agree with the step" in text
    assert "wrong: 1/kernel\n  reduction over other axes: all-reduce over x,y of test_check.py:" in text
    assert "sums over x,y, where the partial sums lie over x (x=P y=B); the result is 2 times x=B y=B" in text
    assert md.inspect(jax.jit(loss), *args).check().agreeing == ("the result",)


def split(step, args, specs, **axes):
    """A step of two arguments under ``jax.jit``, as compiled, whether it is right on devices, and their mesh."""
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
    *given, made = (NamedSharding(mesh, spec) for spec in specs)
    jitted, whole = jax.jit(step, in_shardings=tuple(given), out_shardings=made), np.asarray(step(*args))
    right = [np.array_equal(np.asarray(each.data), whole[each.index]) for each in jitted(*args).addressable_shards]
    return compiled_modules(jitted.lower(*args)), all(right), Mesh(**axes)


PRODUCTS = {  # wrong on jax 0.10.2 and 0.12.0
    # the partitioner's last all-gather, which states no line of its own, is over the wrong devices
    "bd,df->bf": (P(("data", "fsdp"), "model"), P("model", "fsdp"), P("data", "model")),
    # a sum over fsdp is missing, as in openxla/xla#40034, and blocks are whole that should be split
    "bshk,hdk->bsd": (P("model", None, "fsdp", "data"), P(("fsdp", "model"), None, "data"), P("data", "model", "fsdp")),
}


@pytest.mark.parametrize("text", PRODUCTS)
def test_products_are_called_wrong_where_devices_have_them_wrong(text):
    sizes = {"b": 4, "s": 8, "h": 4, "k": 4, "d": 8, "f": 8}
    rng = np.random.default_rng(0)
    args = tuple(
        rng.integers(-3, 4, [sizes[dim] for dim in dims]).astype("float32") for dims in text.split("->")[0].split(",")
    )
    modules, right, mesh = split(lambda x, y: jnp.einsum(text, x, y), args, PRODUCTS[text], data=2, model=2, fsdp=2)
    check = check_program("step", modules, mesh, ["0"])
    assert check.equal == right, str(check)
    assert check.equal or check.faults[0].place.file == __file__


def test_a_product_whose_sum_over_the_replicas_is_missing():
    """Gradients of weights that are split over one of two axes, as openxla/xla#40034 describes them."""
    args = tuple(np.ones((16, 8), "float32") for _ in range(2))
    rows = P(("data", "fsdp"))
    modules, right, mesh = split(lambda x, y: x.T @ y, args, (rows, rows, P("fsdp")), data=2, fsdp=4)
    assert right and check_program("step", modules, mesh, ["w"]).equal
    last = re.compile(r"ROOT (%\S+) = (\S+) all-reduce\((%\S+?)\).*")
    assert last.search(modules.partitioned)
    forgotten = replace(modules, partitioned=last.sub(r"ROOT \1 = \2 copy(\3)", modules.partitioned), optimized="")
    (fault,) = check_program("step", forgotten, mesh, ["w"]).faults
    assert (fault.kind, fault.operation, fault.axes) == ("missing reduction", "dot", ("data",))
    assert fault.place.file == __file__


def test_what_cannot_be_followed():
    check = md.inspect(jax.jit(lambda x: (jnp.linalg.cholesky(x[0]), x * 2)), shape((4, 8, 8), "x")).check()
    assert check.agreeing == ("1",) and check.equal
    assert {(each.operation, each.stage) for each in check.unfollowed} == {
        ("custom-call", "partitioned"),
        ("custom-call", "optimized"),
    }
    assert "not followed: 0\n  custom-call of test_check.py:" in str(check)
    with pytest.raises(CheckError, match="computes more than 1e\\+02 elements on 8 simulated devices\ngive smaller"):
        md.inspect(jax.jit(jnp.tanh), shape((4, 8, 8), "x")).check(limit=100)


def test_a_program_that_is_not_partitioned():
    modules = compiled_modules(jax.jit(lambda x: jnp.zeros(3)).lower(shape((16,), "x")))
    check = check_program("step", modules, MESH, ["the result"])
    assert check.agreeing == ("the result",)


def test_types_of_values():
    step, args = PROGRAMS["two_matrices"]()
    found = md.inspect(jax.jit(step), *args).types()
    layouts = [(x.operation, str(x.layout)) for x in found.values if x.operation in ("dot", "tanh", "all-reduce")]
    assert layouts[:4] == [
        ("dot", "x=S(0) y=S(1)"),
        ("tanh", "x=S(0) y=S(1)"),
        ("dot", "x=S(0) y=P"),
        ("all-reduce", "x=S(0) y=B"),
    ]
    assert all(x.layout is not None for x in found.values)
    assert "x=S(0) y=P     programs.py:" in str(found)


@pytest.mark.parametrize("name", ["two_matrices", "embedding", "accumulation"])
def test_planned_programs_agree(name):
    step, args = PROGRAMS[name]()
    sharded = md.parallelize(lambda *args: step(*args), "x=4,y=2", "as-given")
    results = len(jax.tree.leaves(jax.eval_shape(step, *args)))
    check = check_program(name, compiled_modules(sharded.lower(*args)), MESH, list(map(str, range(results))))
    assert len(check.agreeing) == results, str(check)


def test_complex_numbers_are_floats():
    step = jax.jit(lambda x: jnp.abs(jnp.fft.fft(jax.lax.complex(x, x) * 2j, axis=1)) ** 2)
    assert md.inspect(step, shape((16, 8), "x", "y")).check().agreeing == ("the result",)


def test_products_of_integers_are_floats_if_asked_for():
    step = jax.jit(lambda x, y: jax.lax.dot(x, y, preferred_element_type=jnp.float32))
    args = (shape((16, 8), "x", "y", dtype=jnp.int16), shape((8, 4), dtype=jnp.int16))
    assert md.inspect(step, *args).check().agreeing == ("the result",)


def test_a_start_that_is_not_neutral():
    """XLA leaves it out where a dim of length 1 is reduced; and one operation makes all results."""

    def largest(a, b):
        return jnp.maximum(a[0], b[0]), jnp.minimum(a[1], b[1])

    step = jax.jit(lambda x, i: jax.lax.reduce((x, i), (np.float32(3), np.int32(0)), largest, (0,)))
    check = md.inspect(step, shape((4, 6), "x"), shape((4, 6), "x", dtype=jnp.int32)).check(raises=False)
    assert check.equal and not check.agreeing
    assert {each.results for each in check.unfollowed} == {("0", "1")}


def test_not_a_number_is_sorted_to_the_end():
    step = jax.jit(lambda x, i: jnp.argsort(jnp.take_along_axis(x, i, axis=1), axis=0))
    args = shape((16, 4), "x"), shape((16, 4), dtype=jnp.int32)
    assert md.inspect(step, *args).check().agreeing == ("the result",)


def test_many_short_floats_are_added_at_indices():
    """The compiler of CPUs widens them, adds, and shortens the sum."""
    step = jax.jit(lambda x, i: jnp.zeros((16, 4), x.dtype).at[i].add(x))
    args = shape((2048, 4), "x", dtype=jnp.bfloat16), shape((2048,), "x", dtype=jnp.int32)
    assert md.inspect(step, *args).check().agreeing == ("the result",)


def test_sums_that_cancel():
    """What is left of them is rounding errors, which differ."""
    step = jax.jit(lambda x: jnp.einsum("bm,pq->b", x - x.mean(-1, keepdims=True), x - x.mean(-1, keepdims=True)))
    assert md.inspect(step, shape((16, 12), "x", "y")).check().agreeing == ("the result",)


def test_sums_that_cancel_but_for_a_rounded_constant():
    """A mean over 3 is divided by 3, or multiplied by a rounded third."""

    def step(x, start):
        part = jax.lax.dynamic_slice_in_dim(x, start, 3, 1)
        off = (part - part.mean(-1, keepdims=True)) * jax.lax.rsqrt(part.var(-1, keepdims=True) + 0.5)
        return jnp.sum(off, axis=1, keepdims=True)

    check = md.inspect(jax.jit(step), shape((16, 12)), shape((), dtype=jnp.int32)).check(raises=False)
    assert not check.faults, str(check)


def test_sums_of_single_elements_that_are_not_numbers():
    step = jax.jit(lambda x: jnp.sqrt(-1 - x * x).reshape(16, 1).sum(1))
    assert md.inspect(step, shape((16,), "x")).check().agreeing == ("the result",)


def test_a_field():
    field, rng = PrimeField(), np.random.default_rng(0)
    a, b = field.random(rng, (3, 40, 50)), field.random(rng, (3, 50, 20))
    exact = (a.astype(object) @ b.astype(object)) % PRIME
    assert (field.matmul(a, b) == exact.astype(np.int64)).all()
    numbers = np.array([0.5, -0.25, 3.0, 1e-3, np.inf, -np.inf])
    assert (np.argsort(field.order(field.of(numbers)))[[0, -1]] == [5, 4]).all()
    assert (np.argsort(field.order(field.of(numbers[:3]))) == [1, 0, 2]).all()
    assert field.multiply(field.of(np.array(0.75)), field.of(np.array(8.0))) == 6
    assert (field.ordered(field.order(a)) == a).all()
    assert (field.divide(field.multiply(a, a + 1), a + 1) == a)[(a + 1) % PRIME != 0].all()


def test_a_cached_program_is_compiled_again(tmp_path):
    before = {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir", "jax_enable_compilation_cache")}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        step = jax.jit(lambda x: x.sum())
        for _ in range(2):
            assert compiled_modules(step.lower(shape((64,), "x", mesh=AUTO))).partitioned
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


# the sum is moved behind the loop, and in every iteration devices but the first forget theirs (openxla/xla#49143)
BODY = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%body (state: (s32[], f32[4], f32[ROWS,4])) -> (s32[], f32[4], f32[ROWS,4]) {
  %state = (s32[], f32[4]{0}, f32[ROWS,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %total = f32[4]{0} get-tuple-element(%state), index=1
  %x = f32[ROWS,4]{1,0} get-tuple-element(%state), index=2
  %zero = f32[] constant(0)
  %rows = f32[4]{0} reduce(%x, %zero), dimensions={0}, to_apply=%sum
  FORGOTTEN
  %added = f32[4]{0} add(%KEPT, %rows)
  ROOT %out = (s32[], f32[4]{0}, f32[ROWS,4]{1,0}) tuple(%next, %added, %x)
}

%condition (state: (s32[], f32[4], f32[ROWS,4])) -> pred[] {
  %state = (s32[], f32[4]{0}, f32[ROWS,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %n = s32[] constant(3)
  ROOT %go = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[ROWS,4]) -> f32[4] {
  %x = f32[ROWS,4]{1,0} parameter(0), sharding={devices=[2,1]<=[2]}
  %start = s32[] constant(0)
  %zero = f32[] constant(0)
  %zeros = f32[4]{0} broadcast(%zero), dimensions={}
  %state = (s32[], f32[4]{0}, f32[ROWS,4]{1,0}) tuple(%start, %zeros, %x)
  %loop = (s32[], f32[4]{0}, f32[ROWS,4]{1,0}) while(%state), condition=%condition, body=%body
  END
}
"""
END = "ROOT %total = f32[4]{0} get-tuple-element(%loop), index=1"
SUMMED = (
    "%part = f32[4]{0} get-tuple-element(%loop), index=1\n  ROOT %total = f32[4]{0} all-reduce(%part), to_apply=%sum"
)
FORGOTTEN = """%device = u32[] partition-id()
  %first = u32[] constant(0)
  %other = pred[] compare(%device, %first), direction=NE
  %others = pred[4]{0} broadcast(%other), dimensions={}
  %nothing = f32[4]{0} broadcast(%zero), dimensions={}
  %kept = f32[4]{0} select(%others, %nothing, %total)"""


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_sum_that_is_moved_out_of_a_loop(forgotten):
    def text(rows, end, forgets):
        kept = "kept" if forgets else "total"
        lines = BODY.replace("END", end).replace("FORGOTTEN", FORGOTTEN if forgets else "").replace("KEPT", kept)
        return "HloModule m, num_partitions=2\n" + lines.replace("ROWS", str(rows))

    modules = CompiledModules(text(2, END, False), "", text(1, SUMMED, forgotten))
    check = check_program("step", modules, Mesh(data=2), ["total"])
    assert check.equal is not forgotten and check.stages == ("optimized",), str(check)
    if forgotten:
        assert check.faults[0].operation == "while" and "in its first iteration" in check.faults[0].text


def test_a_fault_of_large_integers_only():
    """As of an index that a compiler does not clamp."""
    text = """HloModule m, num_partitions=2

ENTRY %main (x: f32[4], i: s32[]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %i = s32[] parameter(1)
  %two = s32[] constant(2)
  %large = pred[] compare(%i, %two), direction=GE
  %all = pred[4]{0} broadcast(%large), dimensions={}
  %double = f32[4]{0} add(%x, %x)
  ROOT %out = f32[4]{0} select(%all, %double, %x)
}
"""
    wrong = text.replace("select(%all, %double, %x)", "select(%all, %x, %x)")
    check = check_program("step", CompiledModules(text, wrong, ""), Mesh(data=2), ["out"], inputs=8)
    assert check.faults[0].text.endswith("right if all integer arguments are below 2, so an index may be out of range")


def test_two_inputs_enter_both_branches():
    step = jax.jit(lambda x, go, i: jax.lax.cond(go, jnp.sin, jnp.cos, jax.lax.switch(i, (jnp.tanh, jnp.exp), x)))
    args = shape((16, 4), "x"), shape((), dtype=jnp.bool_), shape((), dtype=jnp.int32)
    modules = compiled_modules(step.lower(*args))
    pair = ProgramPair(parse_module(modules.whole), parse_module(modules.partitioned), MESH.size)
    drawn = [pair.arguments(PrimeField(), seed) for seed in range(2)]
    assert {bool(go[0]) for _, go, _ in drawn} == {False, True}
    assert {int(i[0]) > 0 for *_, i in drawn} == {False, True}
