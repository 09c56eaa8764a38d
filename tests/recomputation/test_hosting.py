import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshdsl.ir.graph import walk
from meshdsl.ir.host import TO_DEVICE, TO_HOST, hosted_residuals, hosted_values
from meshdsl.recomputation import recomputing
from meshdsl.recomputation.hosting import hostable
from meshdsl.recomputation.levels import recomputable
from meshdsl.trace import trace
from meshdsl.trace.annotate import FORWARD
from tests.recomputation.steps import SINES, arguments, microbatched, scanned, sines
from tests.recomputation.test_rewrite import run


@pytest.mark.parametrize("step", [scanned, microbatched])
def test_any_choice_gives_the_same_bits(step):
    args = arguments()
    program, draw = trace(step, args), random.Random(step.__name__)
    expected, ops, values = run(program, args, compiled=False), recomputable(program), sorted(hostable(program.graph))
    for share in (0.0, 0.5):
        again, sent = {op for op in ops if draw.random() < share}, {v for v in values if draw.random() < 0.7}
        made = recomputing(program, again, (), sent).program
        assert hosted_residuals(made.graph)
        for found, wanted in zip(run(made, args, compiled=False), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_a_residual_is_sent_where_it_is_made_and_back_where_the_body_begins():
    program = trace(scanned, arguments())
    made = recomputing(program, (), (), hostable(program.graph)).program
    loops = [(op, op.bodies[0]) for op in made.graph.ops if op.name == "scan"]
    ((forward, first),) = [(op, body) for op, body in loops if op.phase == FORWARD]
    ((_, second),) = [(op, body) for op, body in loops if op.phase != FORWARD]
    made_by = {v.id: i for i, op in enumerate(first.ops) for v in op.outputs}
    for i, op in enumerate(first.ops):
        if op.name == TO_HOST:
            between = first.ops[made_by.get(op.inputs[0].id, -1) + 1 : i]
            assert all(other.name == TO_HOST for other in between)
    names, hosted = [op.name for op in second.ops], hosted_values(made.graph)
    count = names.count(TO_DEVICE)
    assert count == len(hosted_residuals(made.graph)) > 3 and names[:count] == [TO_DEVICE] * count
    assert sum(v.id in hosted for v in forward.outputs) == count


def test_only_what_backward_loops_read_can_be_sent():
    assert not hostable(trace(sines, SINES).graph)

    def step(weights, x, key):
        def loss(weights):
            y, outs = jax.lax.scan(lambda y, w: (y := jnp.tanh(y @ w), y), x, weights[0])
            return (y**2).sum(), outs

        gradient, outs = jax.grad(loss, has_aux=True)(weights)
        return gradient, outs

    program = trace(step, arguments())
    made = recomputing(program, (), (), hostable(program.graph)).program
    returned = {x.id for x in made.graph.returned if hasattr(x, "id")}
    assert returned.isdisjoint(hosted_values(made.graph))


def test_transfers_are_not_computed_again():
    program = trace(scanned, arguments())
    made = recomputing(program, recomputable(program), (), hostable(program.graph)).program
    assert not {op.id for _, op in walk(made.graph) if op.name in (TO_HOST, TO_DEVICE)} & recomputable(made)
