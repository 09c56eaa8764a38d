"""Which values come apart in slices along their first dim: what loops read or stack trip by trip, and what is alike.

The parameters of layers are read slice by slice by the loop over layers, their gradients stacked by it. A cast or a sum
of stacks is a stack, and so is what a loop around hands to it whole. Another value whose first dim only happens to be
as long (48 sequences beside 48 layers) is none.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from meshdsl.ir import Graph, Op, Value, walk
from meshdsl.planner.costs import is_heavy
from meshdsl.trace.graphs import Atom, carried_of, operands_of, values

Pair = tuple[Value, Value]


def stacks(graph: Graph) -> set[int]:
    """Ids of the values that come apart, those in bodies too."""
    rest = [v.id for _, op in walk(graph) for v in _by_slice(op)]
    near = _near(graph) if rest else {}
    found = set[int]()
    while rest:
        v = rest.pop()
        if v not in found:
            found.add(v)
            rest += near.get(v, ())
    return found


def _near(graph: Graph) -> dict[int, set[int]]:
    """Per value id, the values that come apart if it does."""
    near: dict[int, set[int]] = defaultdict(set)
    for _, op in walk(graph):
        for a, b in _alike(op):
            if a.shape and b.shape and a.shape[0] == b.shape[0]:
                near[a.id].add(b.id)
                near[b.id].add(a.id)
    return near


def turns(op: Op) -> bool:
    """Whether slices of what it reads are no slices of what it makes."""
    return op.name == "rev" or (op.name == "transpose" and op.params["permutation"][:1] != (0,))


def _by_slice(op: Op) -> list[Value]:
    """What a scan reads and stacks trip by trip."""
    if op.name != "scan":
        return []
    carried = carried_of(op)[0]
    return [*values(op.inputs[carried.stop :]), *op.outputs[len(carried) :]]


def _alike(op: Op) -> Iterator[Pair]:
    """Values that are stacks together, if their first dims are as long."""
    if op.bodies:
        for body, operands, carried in zip(op.bodies, operands_of(op), carried_of(op), strict=True):
            whole = len(operands) if op.name != "scan" else carried.stop
            yield from _pairs(operands[:whole], body.inputs[:whole])
            results = body.returned if op.name != "scan" else body.returned[: len(carried)]
            yield from _pairs(results, op.outputs) if len(results) <= len(op.outputs) else ()
    elif not is_heavy(op.name) and not turns(op):
        read = list(values(op.inputs))
        yield from ((v, made) for v in read for made in op.outputs)


def _pairs(some: Sequence[Atom], others: Sequence[Value]) -> Iterator[Pair]:
    return ((a, b) for a, b in zip(some, others, strict=False) if isinstance(a, Value))
