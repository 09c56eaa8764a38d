"""Strands through loops and conditionals: what they hand on is as long inside as outside.

    scan    a const, a slice of a stack     operand = what the body takes
            a carry                         operand = what the body takes = what it returns = result
            a row of a stack that is made   what the body returns = result
    while   likewise, the carry being taken by the condition as well
    cond    an operand is what every branch takes, a result what every branch returns

So a parameter is padded once, in front of the loop, and a carry stays padded through all trips.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from meshdsl.ir import Op
from meshdsl.pad.strand import InnerPort, Strand


@dataclass(frozen=True)
class _Handed:
    """One array that is handed on.

    Args:
      ports: operands of the loop, and beyond them results.
      inside: per place in a body: the body, and what it takes or, beyond that, returns.
      stacked: the loop has it with a dim in front that the body has not.
    """

    ports: tuple[int, ...]
    inside: tuple[tuple[int, int], ...]
    stacked: bool = False


def loop_strands(op: Op) -> Iterator[Strand]:
    """A strand per dim of what a loop or conditional hands on."""
    atoms = (*op.inputs, *op.outputs)
    for handed in _HANDED[op.name](op):
        first = int(handed.stacked)
        for d, n in enumerate(atoms[handed.ports[0]].shape[first:]):
            inside: tuple[InnerPort, ...] = tuple((body, (port, d)) for body, port in handed.inside)
            yield Strand(n, tuple((port, d + first) for port in handed.ports), inside=inside)


def _scan(op: Op) -> Iterator[_Handed]:
    consts, stacks, results = op.params["num_consts"], op.params["num_consts"] + op.params["num_carry"], len(op.inputs)
    yield from (_Handed((i,), ((0, i),)) for i in range(consts))
    for i in range(consts, stacks):
        made = results + i - consts
        yield _Handed((i, made), ((0, i), (0, made)))
    alone = (*range(stacks, results), *range(results + stacks - consts, results + len(op.outputs)))
    yield from (_Handed((i,), ((0, i),), stacked=True) for i in alone)


def _while(op: Op) -> Iterator[_Handed]:
    asked, closed = op.params["cond_nconsts"], op.params["body_nconsts"]
    yield from (_Handed((i,), ((0, i),)) for i in range(asked))
    yield from (_Handed((asked + i,), ((1, i),)) for i in range(closed))
    carries = len(op.outputs)
    for i in range(carries):
        inside = (0, asked + i), (1, closed + i), (1, closed + carries + i)
        yield _Handed((asked + closed + i, len(op.inputs) + i), inside)


def _cond(op: Op) -> Iterator[_Handed]:
    branches, ports = range(len(op.bodies)), len(op.inputs) + len(op.outputs)
    yield from (_Handed((i,), tuple((branch, i - 1) for branch in branches)) for i in range(1, ports))


_HANDED = {"scan": _scan, "while": _while, "cond": _cond}
