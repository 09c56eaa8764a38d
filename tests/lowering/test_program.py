"""Planned steps on eight devices: numbers equal the unsharded step's, collectives equal the planned ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from meshdsl.ir.graph import walk
from meshdsl.ir.host import keep_on_host
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.hlo.collectives import compiled_collectives
from meshdsl.lowering.numerics import check_numbers
from meshdsl.lowering.program import lower_program, sharded_function
from meshdsl.lowering.shardings import device_mesh, input_layouts, output_layouts, place, shardings
from meshdsl.recomputation import recomputing
from meshdsl.recomputation.levels import recomputable
from meshdsl.trace import trace
from tests.lowering.graphs import Hand, planned, program_of, verify_text

MESH = Mesh(x=4, y=2)


def mm(a, b, over=(1, 0)):
    return lax.dot_general(a, b, (((over[0],), (over[1],)), ((), ())))


def mlp(w1, w2, x, y):
    h = jnp.tanh(mm(x, w1))
    d = mm(h, w2) - y
    g2 = mm(h, d, (0, 0))
    g1 = mm(x, mm(d, w2, (1, 1)) * (1.0 - h * h), (0, 0))
    return w1 - 0.1 * g1, w2 - 0.1 * g2, jnp.sum(d * d)


def mlp_args(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = (16, 32), (32, 16), (8, 16), (8, 16)
    return [jnp.asarray(rng.normal(size=s) / 4, dtype) for s in shapes]


def run_planned(step, args, solution_of, inputs, outputs, mesh=MESH):
    """Compile the plan, verify it, run it, check the numbers; the compiled text."""
    program = program_of(step, *args)
    solution = solution_of.solve(program, inputs, outputs)
    devices = device_mesh(mesh)
    ins = shardings(input_layouts(program, solution), program.graph.inputs, devices)
    outs = shardings(output_layouts(program, solution), program.graph.returned, devices)
    jitted = jax.jit(sharded_function(program, solution, devices), in_shardings=ins, out_shardings=outs)
    text = jitted.lower(*args).compile().as_text()
    report = verify_text(planned(program, solution), text, mesh)
    got = jitted(*place(args, ins))
    assert [x.sharding for x in got] == list(outs)
    expected = jax.tree.leaves(jax.jit(step)(*args))
    check_numbers(expected, got, [leaf.path for leaf in program.outputs])
    return report, text


LAYOUTS = {
    "data": (["", "", "x=S(0) y=S(0)", "x=S(0) y=S(0)"], ["", "", ""]),
    "tensor": (["x=S(1) y=S(1)", "x=S(0) y=S(0)", "", ""], ["x=S(1) y=S(1)", "x=S(0) y=S(0)", ""]),
    "both": (["y=S(1)", "y=S(0)", "x=S(0)", "x=S(0)"], ["y=S(1)", "y=S(0)", ""]),
    "fsdp": (["x=S(0) y=S(1)", "x=S(1) y=S(0)", "x=S(0)", "x=S(0)"], ["x=S(0) y=S(1)", "x=S(1) y=S(0)", ""]),
    "minor first": (["y=S(0) x=S(0)", "", "y=S(0) x=S(0)", "x=S(0) y=S(0)"], ["y=S(0) x=S(0)", "", ""]),
}


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_mlp(layouts):
    report, _ = run_planned(mlp, mlp_args(), Hand(MESH), *layouts)
    assert report.lines


def test_data_parallel_reduces_gradients_over_both_axes_at_once():
    report, _ = run_planned(mlp, mlp_args(), Hand(MESH), *LAYOUTS["data"])
    (line,) = report.lines
    assert (line.kind, line.axes, line.planned) == ("all-reduce", "x,y", 2 * 7 * (2 * 16 * 32 + 1) * 4 / 8)


def test_bfloat16_counts_in_the_planned_width():
    report, _ = run_planned(mlp, mlp_args(jnp.bfloat16), Hand(MESH), *LAYOUTS["data"])
    assert report.lines[0].compiled == 2 * 7 * (2 * 16 * 32 + 1) * 2 / 8
    assert "another width" in str(report)


def test_one_device_has_no_collectives():
    mesh = Mesh(x=1, y=1)
    report, _ = run_planned(mlp, mlp_args(), Hand(mesh), [""] * 4, [""] * 3, mesh=mesh)
    assert str(report).endswith("no collectives, as planned")


def accumulate(w, xs):
    """Gradients of a linear map, summed over microbatches."""
    return w - 0.1 * lax.scan(lambda a, x: (a + mm(x, mm(x, w), (0, 0)), None), 0.0 * w, xs)[0]


def test_partial_carry_is_reduced_once_after_the_loop():
    args = [jnp.ones((16, 16)) / 16, jnp.linspace(0, 1, 5 * 8 * 16).reshape(5, 8, 16)]
    hand = Hand(MESH, carries=[["x=P"]])
    report, _ = run_planned(accumulate, args, hand, ["", "x=S(1)"], [""])
    (line,) = report.lines
    assert (line.kind, line.axes, line.planned) == ("all-reduce", "x", 2 * 3 * 16 * 16 * 4 / 4)


def test_carry_reduced_in_every_trip():
    args = [jnp.ones((16, 16)) / 16, jnp.linspace(0, 1, 5 * 8 * 16).reshape(5, 8, 16)]
    report, _ = run_planned(accumulate, args, Hand(MESH, carries=[[""]]), ["", "x=S(1)"], [""])
    assert report.lines[0].planned == 5 * 2 * 3 * 16 * 16 * 4 / 4


def layers(w, x):
    """The same weight in every trip: its gather could leave the loop."""
    return lax.scan(lambda x, _: (jnp.tanh(mm(x, w)), jnp.sum(x)), x, None, length=6)


@pytest.mark.parametrize("inside", [True, False])
def test_gather_stays_where_it_is_planned(inside):
    args = [jnp.ones((16, 16)) / 16, jnp.linspace(0, 1, 8 * 16).reshape(8, 16)]
    reads = {("dot_general", 1): ""} if inside else {("scan", 0): ""}
    hand = Hand(MESH, carries=[["x=S(0)"]], reads=reads)
    report, _ = run_planned(layers, args, hand, ["y=S(0)", "x=S(0)"], ["x=S(0)", ""])
    gather = next(line for line in report.lines if line.kind == "all-gather")
    assert gather.planned == (6 if inside else 1) * 16 * 16 * 4 / 2


def until_small(x, w):
    return lax.while_loop(lambda x: jnp.sum(x * x) > 1e-3, lambda x: mm(x, w), x)


def test_while_compares_one_trip():
    args = [jnp.linspace(0, 1, 8 * 16).reshape(8, 16), 0.5 * jnp.eye(16)]
    hand = Hand(MESH, carries=[["x=S(0)"]])
    report, text = run_planned(until_small, args, hand, ["x=S(0)", "y=S(0)"], ["x=S(0)"])
    assert "a loop with an unknown number of iterations" in str(report)
    assert {c.known for c in compiled_collectives(text, MESH)} == {False}


def branch(index, x, w):
    branches = [lambda x, w: mm(x, w), lambda x, w: x, lambda x, w: mm(x * 2.0, w)]
    return lax.switch(index, branches, x, w)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_branches(index):
    args = [jnp.int32(index), jnp.linspace(0, 1, 8 * 16).reshape(8, 16), jnp.ones((16, 16)) / 16]
    run_planned(branch, args, Hand(MESH), ["", "x=S(0)", "y=S(0)"], [""])


def test_reverse_scan_with_slices_in_and_out():
    def step(x, xs):
        return lax.scan(lambda c, x: (c * 0.5 + x, c * x), x, xs, reverse=True)

    args = [jnp.ones((8, 4)), jnp.linspace(0, 1, 3 * 8 * 4).reshape(3, 8, 4)]
    hand = Hand(MESH, carries=[["x=S(0) y=S(1)"]])
    run_planned(step, args, hand, ["", "x=S(1)"], ["x=S(0)", ""])


def test_collectives_are_named():
    _, text = run_planned(mlp, mlp_args(), Hand(MESH), *LAYOUTS["both"])
    scopes = [c.scope for c in compiled_collectives(text, MESH)]
    assert scopes and all("(" in scope and "float32" in scope for scope in scopes)


def test_what_is_computed_again_waits_for_a_result_no_larger_than_what_is_kept():
    def step(w, x, targets):
        def loss(w):
            logits = jax.nn.log_softmax(jnp.tanh(x @ w["in"]) @ w["out"])
            return -jnp.take_along_axis(logits, targets, 1).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

    args = {"in": jnp.ones((8, 8)), "out": jnp.ones((8, 512))}, jnp.ones((64, 8)), jnp.ones((64, 1), jnp.int32)
    program = trace(step, args)
    large = {op.id for _, op in walk(program.graph) if op.outputs and op.outputs[0].shape == (64, 512)}
    program, mesh = recomputing(program, large & recomputable(program)).program, Mesh(x=1)
    solution = Hand(mesh).solve(program, [""] * 4, [""] * 2)
    local, spec = lower_program(program, solution, "gpu"), PartitionSpec()
    sharded = jax.shard_map(local, mesh=device_mesh(mesh), in_specs=spec, out_specs=spec)
    traced = jax.make_jaxpr(sharded)(*jax.tree.leaves(args)).eqns[0].params["jaxpr"]
    barriers = [eqn for eqn in traced.eqns if eqn.primitive.name == "optimization_barrier" and len(eqn.invars) > 1]
    sizes = [[v.aval.size * v.aval.dtype.itemsize for v in eqn.invars] for eqn in barriers]
    assert sizes and all(size[-1] <= max(size[:-1]) for size in sizes)


def test_what_comes_from_the_host_waits_for_the_results_before_it():
    def step(w, x):
        for each in w:
            x = jnp.tanh(x @ each)
        return x

    args = [jnp.ones((8, 8))] * 3, jnp.ones((64, 8))
    program, mesh = keep_on_host(trace(step, args), range(3), (), (None,)), Mesh(x=1)
    solution = Hand(mesh).solve(program, [""] * 4, [""])
    local, spec = lower_program(program, solution, "gpu"), PartitionSpec()
    sharded = jax.shard_map(local, mesh=device_mesh(mesh), in_specs=spec, out_specs=spec)
    traced = jax.make_jaxpr(sharded)(*jax.tree.leaves(args)).eqns[0].params["jaxpr"]
    loads = [len(eqn.invars) for eqn in traced.eqns if eqn.primitive.name == "optimization_barrier"]
    assert loads == [2, 2]  # the first has no result to wait for
