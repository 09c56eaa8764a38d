"""Every mesh of so many devices, planned and ranked."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.api.mesh_search import ConfigurationSearch, configurations, search_tables
from meshdsl.api.program import parallelize_program
from meshdsl.layouts.topology import Link, Topology
from tests.pipelining.stacks import arguments, plain_step

SHAPES = (jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32))


def step(w, x):
    return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), jnp.mean(x)


def test_every_mesh_is_planned_and_the_fastest_is_first():
    program = md.Program(step, SHAPES, layouts={"x": "data=S(0)"})
    said = []
    found = md.search(program, devices=8, topology="dgx-h100", progress=said.append)
    assert {each.mesh for each in found.candidates} == {f"data={n},model={8 // n}" for n in (1, 2, 4, 8)}
    seconds = [each.seconds for each in found.candidates]
    assert seconds == sorted(seconds) and found.best.seconds == seconds[0]
    assert said[0] == "tracing" and "bounding 1 of 4: data=1,model=8" in said and len(said) == 9
    for each in (each for each in found.candidates if each.plan):
        alone = md.parallelize(step, md.Mesh.parse(each.mesh, "dgx-h100"), {"x": "data=S(0)"}, donate_argnums=0).plan(
            *SHAPES
        )
        assert (alone.seconds, alone.bytes) == (each.plan.seconds, each.plan.bytes)
    first, *_ = str(found).splitlines()
    assert first.split() == ["mesh", "microbatches", "schedule", "step", "gap", "bubble", "sent", "memory"]


def test_a_function_with_its_arguments_in_microbatches():
    found = md.search(step, *SHAPES, devices=4, axes=("data",), layouts={"x": "data=S(0)"}, microbatches=(1, 4, 3))
    counts = {each.microbatches: each for each in found.candidates}
    assert {counts[4].plan is None, counts[1].plan is None} <= {False, counts[4].pruned, counts[1].pruned}
    assert counts[3].plan is None and "microbatches" in counts[3].fault
    assert " ".join(str(found).split()).endswith(counts[3].fault)


def test_a_step_for_one_device_is_traced_for_every_mesh():
    def local(w, x):
        return w - jax.lax.pmean(jax.grad(lambda w: jnp.mean((x @ w - (x @ w).mean(0)) ** 2))(w), "batch")

    program = md.Program(local, SHAPES, layouts={"x": "data=S(0)"}, axis_names={"batch": "data"})
    found = md.search(program, devices=4, axes=("data", "model"))
    assert {each.mesh for each in found.candidates} == {"data=1,model=4", "data=2,model=2", "data=4,model=1"}
    for each in (each for each in found.candidates if each.plan):
        assert each.plan.bytes == parallelize_program(program, md.Mesh.parse(each.mesh)).plan(*SHAPES).bytes


@pytest.mark.parametrize("uneven", ["pad", "replicate"])
def test_a_step_for_one_device_with_an_uneven_rule(uneven):
    def local(w, x):
        grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w.array)
        return md.named(w.array - jax.lax.pmean(grad, "batch"), "embed hidden")

    w = md.named(jax.ShapeDtypeStruct((8, 30), jnp.float32), "embed hidden")
    options = {"rules": "hidden:model", "axis_names": {"batch": "data"}, "uneven": uneven}
    program = md.Program(local, (w, jax.ShapeDtypeStruct((16, 8), jnp.float32)), layouts={"x": "data=S(0)"}, **options)
    found = md.search(program, devices=4, axes=("data", "model"))
    assert all(each.plan or each.pruned for each in found.candidates)
    (plan,) = (each.plan for each in found.candidates if each.mesh == "data=1,model=4")
    assert plan.padded == (((30, 32),) if uneven == "pad" else ())
    assert sum("model=S(1) does not divide" in note for note in plan.notes) == 1


def stack(**changed):
    params, batch = arguments(batch=32)
    batch.pop("mask")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
    return md.Program(plain_step, shapes, **{"layouts": {"batch/*": "data=S(0)"}, **changed})


def test_pipelines_are_tried_and_what_cannot_be_the_best_is_not_planned():
    way = {"axes": ("pipe",), "microbatches": (2, 3, 16), "schedules": ("1f1b", "interleaved"), "chunks": (1, 2)}
    found = md.search(stack(layouts=None), devices=2, **way)
    assert len(found.candidates) == 3 * 2
    staged = [each for each in found.candidates if each.plan]
    assert staged and all(each.plan.pipeline.axis == "pipe" and 0 < each.bubble < 1 for each in staged)
    pruned = [each for each in found.candidates if each.pruned]
    assert {(each.microbatches, each.config.schedule) for each in pruned} >= {(16, "1f1b"), (16, "interleaved x2")}
    assert all(each.least >= found.best.seconds for each in pruned)
    assert "pruned: takes" in str(found) and {"bubble", "seconds", "schedule"} <= set(found.best.facts)
    assert all("divide" in each.fault for each in found.candidates if each.microbatches == 3)


@pytest.mark.parametrize("topology", ["cpu", "dgx-h100"])
def test_what_needs_no_planning_is_never_above_the_plan(topology):
    space = ConfigurationSearch(stack(), topology, None, None)
    for config in configurations(2, ("pipe", "data"), None, (1, 4), ("gpipe",), (1,)):
        bounded = space.bounded(config)
        plan = bounded.plan()
        assert 0 < bounded.seconds <= plan.seconds and 0 < bounded.memory <= plan.memory, config


def test_ways_with_and_without_recomputing():
    found = configurations(2, ("pipe",), md.Pipeline(1, axis="pipe"), (4,), ("1f1b", "zb"), (1, 2), ("stage", "none"))
    assert [config.schedule for config in found] == ["1f1b", "1f1b kept", "zb", "zb kept", "zb x2", "zb x2 kept"]
    assert all(config.pipeline.axis == "pipe" and config.pipeline.microbatches == 4 for config in found)


def test_axes_and_microbatches_that_are_tried_if_nothing_is_said():
    def axes(program):
        return ConfigurationSearch(program, "cpu", None, None).axes

    assert axes(md.Program(step, SHAPES)) == ["data", "model"]
    assert axes(md.Program(step, SHAPES, {"x": "dp=S(0)"})) == ["dp", "model"]
    assert axes(md.Program(step, SHAPES, {"x": "model=S(0) dp=S(1) data=B"})) == ["data", "dp", "model"]
    assert axes(stack()) == ["pipe", "data", "model"]
    counts = {config.mesh: config.microbatches for config in configurations(4, ("pipe",), None, None, ("1f1b",), (1,))}
    assert counts | {
        config.mesh: config.microbatches for config in configurations(1, ("pipe",), None, None, ("1f1b",), (1,))
    } == {
        "pipe=4": 16,
        "pipe=1": 1,
    }
    assert configurations(2, ("pipe",), md.Pipeline(8), None, ("1f1b",), (1,))[0].microbatches == 8


def test_a_program_is_planned_as_it_was_searched():
    found = md.search(stack(layouts=None), devices=2, axes=("pipe",), microbatches=(4,)).best
    program = replace(stack(layouts=None), pipeline=found.pipeline)
    plan = parallelize_program(program, md.Mesh(pipe=2)).plan(*program.args)
    assert plan.pipeline.axis == "pipe" and not plan.diff(found.plan)


def test_what_has_no_plan_is_told_by_its_reason():
    found = md.search(step, *SHAPES, devices=6, axes=("a", "b"), layouts={"w": "a=S(0)"})
    told = " ".join(str(found).partition("\n\n")[2].split())
    for n, near in ((3, "63, 66"), (6, "60, 66")):
        said = f"w float32[64,256]: dim 0 of size 64 does not divide over a={n}; nearest sizes that work: {near}"
        assert f"a={n},b={6 // n} layouts['w']: {said}" in told and "arguments:" not in told
    rows = [replace(found.candidates[-1], fault="too slow", pruned=True) for _ in range(3)]
    rows += [replace(rows[0], fault=f"takes {n} s") for n in range(9)]
    (table,) = search_tables(rows)
    assert "and 2 more" in table[1][0] and table[-1] == ("... 2 more", "", "", "2 pruned, 0 infeasible")


def test_layers_lie_on_the_axis_of_stages_unless_something_does():
    free, pinned = (
        ConfigurationSearch(stack(), "cpu", None, None),
        ConfigurationSearch(stack(rules="layers:pipe"), "cpu", None, None),
    )
    assert set(free._layouts) == {"batch/*", "params/layers/up", "params/layers/down"}
    assert set(pinned._layouts) == {"batch/*"}


def test_the_bound_of_a_configuration_is_below_every_variant():
    """Arrays are joined and then reduced: each reduced by itself, the copy that joins them is saved."""

    def joined(x):
        return jnp.sum(jnp.concatenate([jnp.tanh(x), x[:1]]), 0)

    topology = Topology("narrow", 1e10, 1e10, 4e9, 4e9, 0.0, (Link(1e-6, 1e6),))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    found = md.search(joined, x, devices=8, topology=topology, axes=("a", "b"))
    assert found.best.plan.regions and found.best.least > 0
    for each in (each for each in found.candidates if each.plan):
        assert each.least <= each.plan.seconds


def test_none_fits():
    found = md.search(step, *SHAPES, devices=2, memory="10kB")
    assert all(each.plan is None for each in found.candidates)
    assert all(each.pruned and "needs" in each.fault for each in found.candidates)
    with pytest.raises(md.MeshDSLError, match="no candidate can be planned"):
        _ = found.best


@pytest.mark.parametrize(
    "options, said",
    [
        ({"devices": 0}, "devices: "),
        ({"devices": 4, "axes": "data"}, "axes: 'data'"),
        ({"devices": 4, "axes": ("a", "a")}, "axes: "),
        ({"devices": 4, "microbatches": 2}, "microbatches: 2"),
        ({"devices": 4, "microbatches": (0,)}, "microbatches: "),
        ({"devices": 4, "schedules": "1f1b"}, "schedules: '1f1b'"),
        ({"devices": 4, "recompute": "none"}, "recompute: 'none'"),
        ({"devices": 4, "chunks": (2,)}, "chunks: .* only 'interleaved'"),
        ({"devices": 4, "axes": ("pipe",), "schedules": ("1f1",)}, "did you mean '1f1b'"),
    ],
)
def test_bad_input(options, said):
    with pytest.raises(md.MeshDSLError, match=said):
        md.search(step, *SHAPES, **options)
    with pytest.raises(md.MeshDSLError, match="beside a program"):
        md.search(md.Program(step, SHAPES), *SHAPES, devices=2)


def test_plans_are_searched_with_the_overlap_of_the_program():
    program = md.Program(step, SHAPES, layouts={"x": "data=S(0)"}, overlap=md.Overlap("full", rings="*"))
    found = md.search(program, devices=4, topology="dgx-h100")
    for each in (each for each in found.candidates if each.plan):
        plan = parallelize_program(program, md.Mesh.parse(each.mesh, "dgx-h100")).plan(*program.args)
        assert each.least <= each.seconds == plan.simulated_seconds == each.facts["seconds"]
        assert not plan.diff(each.plan)
    assert any(each.plan and "ring" in str(each.plan) for each in found.candidates) and found.best.gap is None
