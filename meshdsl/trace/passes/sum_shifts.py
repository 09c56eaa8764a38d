"""Sums of shifts: arrays that are shifted and added up are added up on the way.

    pad(a, (1, -1)) + pad(b, (2, -2)) + pad(c, (3, -3))
    pad(a + pad(b + pad(c, (1, -1)), (1, -1)), (1, -1))

The gradient of a stencil adds to every row the contributions of the rows around it, each shifted to it. Shifted one by
one, the three arrays above send six rows of each block, added up on the way they send three (Horner's scheme in the
shift). This is the transpose of ``share_halos``, which lets several shifts of one array fetch the widest halo once.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
from jax import lax

from meshdsl.ir.graph import Atom, Graph, Op, Value
from meshdsl.ir.index import consumers, producers
from meshdsl.ir.rewrite import Table, fresh_ids, in_bodies, look_up, substitute, with_ops
from meshdsl.rules.elementwise import is_zero
from meshdsl.trace.passes.share_halos import move_of, scaled, unscaled
from meshdsl.trace.read_jaxpr import written

Side = tuple[int, int]  # a dim, and 1 for shifts forward, -1 for shifts backward


def sum_shifts(graph: Graph) -> Graph:
    """Returns the graph with sums of shifted arrays in this form."""
    return _summed(graph, fresh_ids(graph))


def _summed(graph: Graph, ids: Iterator[int]) -> Graph:
    makers, readers = producers(graph), consumers(graph)
    table: Table = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(lambda body: _summed(body, ids), op)
        terms = list(_terms(op, makers, readers)) if op.name == "add_any" and not _is_inner(op, readers) else []
        sides = _sides(terms, makers, readers)
        if not sides:
            ops.append(substitute(op, table))
            continue
        shifted = {each.term.id for arrays in sides.values() for each in arrays}
        rest = [x for x in terms if x.id not in shifted]
        read = [look_up(x, table) for x in (*rest, *(each.source for arrays in sides.values() for each in arrays))]
        made, table[op.outputs[0].id] = written(partial(_total, rest=len(rest), sides=sides), read, ids, op)
        ops += made
    return with_ops(graph, ops)


def _is_inner(op: Op, readers: Mapping[int, Sequence[Op]]) -> bool:
    """Whether the sum is only a term of another one."""
    users = readers.get(op.outputs[0].id, ())
    return len(users) == 1 and users[0].name == "add_any"


def _terms(op: Op, makers: Mapping[int, Op], readers: Mapping[int, Sequence[Op]]) -> Iterator[Atom]:
    """The terms of a sum of sums, in order."""
    todo = list(reversed(op.inputs))
    while todo:
        x = todo.pop()
        maker = makers.get(x.id)
        if maker is not None and maker.name == "add_any" and len(readers[x.id]) == 1:
            todo += reversed(maker.inputs)
        else:
            yield x


class _Shifted(NamedTuple):
    """A term of a sum: an array that is shifted, then scaled; ``scales`` has the last operation first."""

    term: Atom
    source: Value
    scales: tuple[Op, ...]
    distance: int


def _sides(
    terms: Sequence[Atom], makers: Mapping[int, Op], readers: Mapping[int, Sequence[Op]]
) -> dict[Side, list[_Shifted]]:
    """The shifted terms by side to which they are shifted, where several arrays are shifted to one side.

    Several shifts of one array are left to ``share_halos``.
    """
    found: dict[Side, list[_Shifted]] = {}
    for term in terms:
        if not isinstance(term, Value):
            continue
        x, scales = unscaled(term, makers)
        maker, made = makers.get(x.id), (x, *(op.outputs[0] for op in scales))
        once = all(len(readers.get(v.id, ())) == 1 for v in made)
        if maker is None or maker.name != "pad" or not once or not is_zero(maker.inputs[1]):
            continue
        source, moved = maker.inputs[0], [(d, by) for d, by in enumerate(move_of(maker)) if by]
        if len(moved) == 1 and isinstance(source, Value):
            ((d, by),) = moved
            found.setdefault((d, 1 if by > 0 else -1), []).append(_Shifted(term, source, scales, abs(by)))
    several = {side: {unscaled(each.source, makers)[0].id for each in shifted} for side, shifted in found.items()}
    return {side: shifted for side, shifted in found.items() if len(several[side]) > 1}


def _total(*arrays: jax.Array, rest: int, sides: Mapping[Side, Sequence[_Shifted]]) -> jax.Array:
    """The sum of the first ``rest`` arrays and of the others, scaled and shifted."""
    total, others = list(arrays[:rest]), iter(arrays[rest:])
    for (d, sign), shifted in sides.items():
        at: dict[int, list[jax.Array]] = {}
        for each in shifted:
            at.setdefault(each.distance, []).append(scaled(next(others), each.scales))
        found: jax.Array | None = None
        far = sorted(at, reverse=True)
        for distance, nearer in zip(far, (*far[1:], 0), strict=True):
            here = reduce(lax.add, at[distance] if found is None else [*at[distance], found])
            by = sign * (distance - nearer)
            config = [(by, -by, 0) if e == d else (0, 0, 0) for e in range(here.ndim)]
            found = lax.pad(here, lax.full((), 0, here.dtype), config)
        assert found is not None
        total.append(found)
    return reduce(lax.add, total)
