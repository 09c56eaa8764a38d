"""Stacks that two loops share have their dims in order: in all slices, and in what is gathered for both."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from meshdsl.ir.graph import walk
from meshdsl.ir.host import hosted_values
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.numerics import check_numbers
from meshdsl.lowering.program import lower_program
from meshdsl.lowering.shardings import device_mesh, input_layouts, output_layouts, partition_spec
from meshdsl.lowering.stack_order import shared_stacks
from meshdsl.models import recurrent
from meshdsl.recomputation import recomputing
from meshdsl.recomputation.hosting import hostable
from meshdsl.trace import trace
from tests.lowering.graphs import Hand

MESH = Mesh(x=4, y=2)


def step(w, x, low):
    """A loop over layers, and one over their gradients; ``low`` is only read by the first."""

    def layer(x, slices):
        w, low = slices
        return jnp.where(x > 0, jnp.tanh(x @ w), x) * low.astype(x.dtype), None

    return w - 0.1 * jax.grad(lambda w: (lax.scan(layer, x, (w, low))[0] ** 2).mean())(w)


def args(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(3, 8, 8)), dtype),
        jnp.asarray(rng.normal(size=(16, 8)), dtype),
        jnp.ones((3, 16, 8), jnp.int8),
    )


def sharded(step, args, inputs, platform, **choices):
    """The step lowered for a platform, as a function of whole arrays, and its graph."""
    program = trace(step, args)
    solution = Hand(MESH, **{"carries": [["x=S(0)"]] * 2, **choices}).solve(program, inputs, inputs[:1])
    ins, outs = input_layouts(program, solution), output_layouts(program, solution)
    specs = [
        tuple(partition_spec(layout, len(value.shape)) for layout, value in zip(layouts, values, strict=True))
        for layouts, values in ((ins, program.graph.inputs), (outs, program.graph.returned))
    ]
    local = lower_program(program, solution, platform)
    return (
        jax.shard_map(local, mesh=device_mesh(MESH), in_specs=specs[0], out_specs=specs[1], check_vma=False),
        program.graph,
    )


def eqns_of(jaxpr, name):
    """The equations of a primitive in a jaxpr and in what it calls."""
    found = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name]
    for eqn in jaxpr.eqns:
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            found += eqns_of(inner, name) if hasattr(inner, "eqns") else []
    return found


def test_stacks_are_shared_by_loops_of_one_graph():
    graph = trace(step, args()).graph
    first, second = (op for _, op in walk(graph) if op.name == "scan")
    found = shared_stacks(graph)
    assert graph.inputs[0].id in found.stacks and graph.inputs[2].id not in found.stacks
    residuals = {value.id for value in first.outputs} & {x.id for x in second.inputs}
    assert residuals and residuals <= found.stacks
    assert {op for op, _ in found.written} == {first.bodies[0].ops[-1].id}
    alone = trace(lambda x, xs: lax.scan(lambda c, x: (c + x, c * x), x, xs), (jnp.ones((8, 8)), jnp.ones((3, 8, 8))))
    assert not shared_stacks(alone.graph).stacks


def test_stacks_on_the_host_are_left_to_the_compiler():
    program = trace(step, args())
    graph = recomputing(program, (), (), hostable(program.graph)).program.graph
    loop = next(op for _, op in walk(graph) if op.name == "scan")
    assert {value.id for value in loop.outputs} & hosted_values(graph)
    assert not shared_stacks(graph).stacks & hosted_values(graph)


def test_every_slice_of_a_shared_stack_is_in_order_on_gpus():
    run, graph = sharded(step, args(), ["", "x=S(0)", "x=S(1)"], "gpu")
    found = shared_stacks(graph)
    loops = eqns_of(jax.make_jaxpr(run)(*args()).jaxpr, "scan")
    ordered = [eqn for loop in loops for eqn in eqns_of(loop.params["jaxpr"].jaxpr, "layout_constraint")]
    assert len(ordered) == len(found.read) + len(found.written) > 4
    assert all(eqn.params["layout"].major_to_minor == tuple(range(eqn.invars[0].aval.ndim)) for eqn in ordered)
    run, _ = sharded(step, args(), ["", "x=S(0)", "x=S(1)"], "cpu")
    assert not eqns_of(jax.make_jaxpr(run)(*args()).jaxpr, "layout_constraint")


def test_what_is_gathered_for_two_loops_is_turned_once():
    whole = {("scan", i): "" for i in range(7)}
    run, _ = sharded(step, args(), ["x=S(1)", "", ""], "gpu", carries=[[""]] * 2, reads=whole)
    traced = jax.make_jaxpr(run)(*args()).eqns[0].params["jaxpr"]
    (gather,) = (eqn for eqn in traced.eqns if eqn.primitive.name == "all_gather")
    turned = next(eqn for eqn in traced.eqns if gather.outvars[0] in eqn.invars)
    barrier = next(eqn for eqn in traced.eqns if turned.outvars[0] in eqn.invars)
    assert (turned.primitive.name, barrier.primitive.name) == ("layout_constraint", "optimization_barrier")
    readers = [eqn for eqn in traced.eqns if barrier.outvars[0] in eqn.invars]
    assert [eqn.primitive.name for eqn in readers] == ["scan", "scan"]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_numbers_are_those_of_the_step(dtype):
    run, _ = sharded(step, args(dtype), ["x=S(1)", "x=S(0)", "x=S(1)"], "gpu")
    check_numbers([jax.jit(step)(*args(dtype))], [jax.jit(run)(*args(dtype))[0]], ["w"])


@pytest.mark.skipif(find_spec("jax_cuda12_plugin") is None, reason="jax's CUDA plugin is not installed")
def test_no_stack_is_copied_between_two_loops_on_gpus():
    model = recurrent.program(recurrent.Config(16, 128, vocab=64), recurrent.RULES["fsdp"], 16, 256)
    mesh = md.Mesh(data=8, topology="dgx-h100")
    sharded = md.parallelize(model.step, mesh, rules=model.rules, donate_argnums=(0, 1), memory=1e12)
    held = sharded.verify(*model.args, target="dgx-h100:8").held
    assert held.compiled_memory == pytest.approx(held.memory, rel=0.05)
