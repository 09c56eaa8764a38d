"""The same step through the XLA partitioner: same numbers, shardings as planned."""

import jax
import jax.numpy as jnp
import pytest

from meshdsl.lowering.numerics import check_numbers
from meshdsl.lowering.shardings import device_mesh, input_layouts, output_layouts, place, shardings
from tests.lowering.graphs import Hand, program_of
from tests.lowering.gspmd import constrained_function
from tests.lowering.test_program import LAYOUTS, MESH, accumulate, mlp, mlp_args


def run_constrained(step, args, hand, inputs, outputs):
    program = program_of(step, *args)
    solution = hand.solve(program, inputs, outputs)
    devices = device_mesh(MESH)
    ins = shardings(input_layouts(program, solution), program.graph.inputs, devices)
    outs = shardings(output_layouts(program, solution), program.graph.returned, devices)
    jitted = jax.jit(constrained_function(program, solution, devices), in_shardings=ins, out_shardings=outs)
    got = jitted(*place(args, ins))
    check_numbers(jax.tree.leaves(step(*args)), got, [leaf.path for leaf in program.outputs])
    return jitted.lower(*args).as_text()


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_mlp(layouts):
    text = run_constrained(mlp, mlp_args(), Hand(MESH), *layouts)
    assert "sharding_constraint" in text or "Sharding" in text


def test_loop_with_partial_carry():
    args = [jnp.ones((16, 16)) / 16, jnp.linspace(0, 1, 5 * 8 * 16).reshape(5, 8, 16)]
    run_constrained(accumulate, args, Hand(MESH, carries=[["x=P"]]), ["", "x=S(1)"], [""])
