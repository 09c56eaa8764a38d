"""Ports of loops and conditionals, checked on loops of every small signature in which no two arrays share a shape."""

from itertools import count, product

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshdsl.ir.check import check_graph
from meshdsl.ir.graph import walk
from meshdsl.ir.loops import (
    ABSENT,
    LoopPort,
    PortRole,
    body_operands,
    carried_inputs,
    loop_ports,
    split_operands,
    with_ports,
)
from meshdsl.ir.rewrite import filtered
from meshdsl.trace.read_jaxpr import read_jaxpr

LENGTH = 3


def total(arrays):
    return sum([jnp.sum(x) for x in arrays], jnp.float32(0))


def scan(consts, carries, slices, stacks):
    sizes = count(1)

    def loop(closed, carry, xs):
        def step(carry, slices):
            read = total((*closed, *slices))
            return tuple(x + read for x in carry), tuple(jnp.ones(50 + k) * read for k in range(stacks))

        return lax.scan(step, carry, xs, LENGTH)

    given = [[jnp.zeros(next(sizes)) for _ in range(n)] for n in (consts, carries)]
    return only_loop(loop, *map(tuple, given), tuple(jnp.zeros((LENGTH, next(sizes))) for _ in range(slices)))


def while_loop(condition, consts, carries, _):
    sizes = count(1)

    def loop(asked, closed, carry):
        return lax.while_loop(lambda c: total(asked) < 3, lambda c: tuple(x + total(closed) for x in c), carry)

    return only_loop(loop, *[tuple(jnp.zeros(next(sizes)) for _ in range(n)) for n in (condition, consts, carries)])


def cond(branches, operands, results, _):
    def loop(index, given):
        def branch(*xs):
            return tuple(jnp.ones(50 + k) * total(xs) for k in range(results))

        return lax.switch(index, [branch] * (branches + 2), *given)

    return only_loop(loop, jnp.int32(0), tuple(jnp.zeros(1 + i) for i in range(operands)))


def only_loop(function, *arguments):
    graph = read_jaxpr(jax.make_jaxpr(function)(*arguments))
    check_graph(graph)
    (op,) = [op for _, op in walk(graph) if op.bodies]
    return op


LOOPS = [(make, sizes) for make in (scan, while_loop, cond) for sizes in product(range(3), repeat=4) if any(sizes)]
LOOPS = [(make, sizes) for make, sizes in LOOPS if make is scan or not sizes[3]]


@pytest.mark.parametrize(("make", "sizes"), LOOPS)
def test_ports_are_the_paths_of_arrays(make, sizes):
    if make is scan and not (sizes[1] or sizes[2] or sizes[3]):
        return  # JAX traces no scan without effects
    op = make(*sizes)
    ports = list(loop_ports(op))
    assert [p.operand for p in ports if p.operand != ABSENT] == list(range(len(op.inputs)))
    assert [p.result for p in ports if p.result != ABSENT] == list(range(len(op.outputs)))
    for which, body in enumerate(op.bodies):
        assert [i for p in ports for b, i in p.inputs if b == which] == list(range(len(body.inputs)))
        assert [j for p in ports for b, j in p.outputs if b == which] == list(range(len(body.returned)))
    for port in ports:
        ends = [op.inputs[port.operand].shape] if port.operand != ABSENT else []
        ends += [op.outputs[port.result].shape] if port.result != ABSENT else []
        inside = [op.bodies[b].inputs[i].shape for b, i in port.inputs]
        inside += [op.bodies[b].returned[j].shape for b, j in port.outputs]
        assert {(LENGTH,) * port.stacked + shape for shape in inside} | set(ends) == set(ends or inside)


@pytest.mark.parametrize(("make", "sizes"), LOOPS)
def test_derived_views(make, sizes):
    op = make(*sizes)
    ports = list(loop_ports(op))
    again = with_ports(op, ports)
    assert (again.inputs, again.outputs, again.params) == (op.inputs, op.outputs, op.params)
    assert [(b.inputs, b.returned) for b in again.bodies] == [(b.inputs, b.returned) for b in op.bodies]
    assert sum(split_operands(op, op.inputs), ()) == op.inputs
    for body, operands, carried in zip(op.bodies, body_operands(op), carried_inputs(op), strict=True):
        shapes = [x.shape[1:] if i >= carried.stop and op.name == "scan" else x.shape for i, x in enumerate(operands)]
        assert shapes == [v.shape for v in body.inputs]
        assert len(carried) == sum(p.role is PortRole.CARRY for p in ports)


def test_the_roles():
    op = scan(1, 1, 1, 1)
    assert list(loop_ports(op)) == [
        LoopPort(PortRole.CONST, 0, ((0, 0),)),
        LoopPort(PortRole.CARRY, 1, ((0, 1),), ((0, 0),), 0),
        LoopPort(PortRole.SLICE, 2, ((0, 2),)),
        LoopPort(PortRole.STACK, outputs=((0, 1),), result=1),
    ]
    op = while_loop(1, 1, 1, 0)
    assert list(loop_ports(op)) == [
        LoopPort(PortRole.CONST, 0, ((0, 0),)),
        LoopPort(PortRole.CONST, 1, ((1, 0),)),
        LoopPort(PortRole.CARRY, 2, ((0, 1), (1, 1)), ((1, 0),), 0),
        LoopPort(PortRole.PREDICATE, outputs=((0, 0),)),
    ]
    op = cond(0, 1, 1, 0)
    assert list(loop_ports(op)) == [
        LoopPort(PortRole.PREDICATE, 0),
        LoopPort(PortRole.OPERAND, 1, ((0, 0), (1, 0))),
        LoopPort(PortRole.RESULT, outputs=((0, 0), (1, 0)), result=0),
    ]
    assert list(loop_ports(op.bodies[0].ops[-1])) == []


@pytest.mark.parametrize(("make", "sizes"), [(scan, (2, 2, 2, 2)), (while_loop, (2, 2, 2, 0)), (cond, (1, 2, 2, 0))])
def test_dropping_ports_leaves_consistent_counts(make, sizes):
    op = make(*sizes)
    ports = list(loop_ports(op))
    for k, port in enumerate(ports):
        if port.role is PortRole.PREDICATE:
            continue
        fewer = with_ports(op, filtered(ports, (i != k for i in range(len(ports)))))
        kept = list(loop_ports(fewer))
        assert [p.role for p in kept] == [p.role for i, p in enumerate(ports) if i != k]
        assert fewer.inputs == tuple(x for i, x in enumerate(op.inputs) if i != port.operand)
        assert fewer.outputs == tuple(x for i, x in enumerate(op.outputs) if i != port.result)


def test_a_carry_can_become_a_const():
    op = scan(1, 2, 1, 0)
    ports = list(loop_ports(op))
    ports[2] = LoopPort(PortRole.CONST, ports[2].operand, ports[2].inputs)
    changed = with_ports(op, ports)
    assert changed.inputs == (op.inputs[0], op.inputs[2], op.inputs[1], op.inputs[3])
    assert (changed.params["num_consts"], changed.params["num_carry"]) == (2, 1)
    assert changed.outputs == op.outputs[:1]
