"""Regions: all that has a dim which is one too short, from slices to where it is put back.

Slices enter a region; operations that treat every position of a dim alike are inside; it is left
through a pad, or behind one other element. If anything in it is read in another way, it cannot be
lengthened (see ``shifts``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp

from meshdsl.ir import Graph, Op, Value
from meshdsl.rules.elementwise import elementwise
from meshdsl.rules.registry import RULES
from meshdsl.trace.graphs import makers_of, value_ids, values

_CUTS = ("split", "slice", "pad")
Place = tuple[Value, int]  # a value and its dim
_LIKE_OTHERS = frozenset(
    "broadcast_in_dim transpose squeeze reshape dot_general reduce_sum reduce_max reduce_min reduce_prod".split()
)  # beside the elementwise ones: operations that treat every position of a kept dim alike


@dataclass(frozen=True)
class Cut:
    """A slice of one dim, the ``stride``-th elements of it from ``start`` on."""

    source: Value
    result: Value
    dim: int
    start: int
    stride: int

    @property
    def length(self) -> int:
        """Of the slice."""
        return self.result.shape[self.dim]

    @property
    def extensible(self) -> bool:
        """Whether the source has an element before the slice's first one, or ends there."""
        return self.start >= self.stride or (self.start, self.stride) == (0, 1)


def cuts_of(op: Op) -> Iterator[Cut]:
    """The results that are slices of one dim."""
    if op.name == "split":
        dim, sizes, (source,) = op.params["axis"], op.params["sizes"], values(op.inputs)
        yield from (Cut(source, v, dim, int(sum(sizes[:i])), 1) for i, v in enumerate(op.outputs))
    elif op.name == "slice":
        (source,), (result,) = values(op.inputs), op.outputs
        dims = [d for d, (n, m) in enumerate(zip(source.shape, result.shape, strict=True)) if n != m]
        strides = op.params["strides"] or (1,) * len(source.shape)
        yield from (
            Cut(source, result, d, int(op.params["start_indices"][d]), int(strides[d])) for d in dims if len(dims) == 1
        )
    elif op.name == "pad" and isinstance(op.inputs[0], Value):
        cut = {d: amounts for d, amounts in enumerate(op.params["padding_config"]) if any(amounts)}
        yield from (
            Cut(op.inputs[0], op.outputs[0], d, -int(low), 1) for d, (low, *_) in cut.items() if _only_cuts(op, d)
        )


def _only_cuts(op: Op, dim: int) -> bool:
    """Whether a pad does nothing but cut elements off one dim."""
    others = [a for d, a in enumerate(op.params["padding_config"]) if d != dim]
    return not any(map(any, others)) and all(n <= 0 for n in op.params["padding_config"][dim])


class Flow:
    """Who makes and who reads each value of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.cuts = {cut.result.id: cut for op in graph.ops if op.name in _CUTS for cut in cuts_of(op)}

    @cached_property
    def makers(self) -> dict[int, Op]:
        """By value id, the operation that makes it."""
        return makers_of(self._graph)

    @cached_property
    def readers(self) -> dict[int, list[Op]]:
        """By value id, the operations that read it, each once."""
        found: dict[int, list[Op]] = {}
        for op in self._graph.ops:
            for value in dict.fromkeys(value_ids(op.inputs)):
                found.setdefault(value, []).append(op)
        return found

    def region(self, cut: Cut) -> tuple[dict[int, int], bool]:
        """The dims by value id that have to be lengthened with this slice, and whether all of them can be."""
        found, todo = {cut.result.id: cut.dim}, [(cut.result, cut.dim)]
        while todo:
            value, dim = todo.pop()
            for together in self._neighbours(value, dim):
                if together is None or any(found.get(v.id, d) != d for v, d in together):
                    return found, False
                todo += [(v, d) for v, d in together if v.id not in found]
                found.update((v.id, d) for v, d in together)
        return found, True

    def _neighbours(self, value: Value, dim: int) -> "Iterator[list[Place] | None]":
        """Per operation that makes or reads the value, what has the same dim; None if it needs the dim as it is."""
        maker = self.makers.get(value.id)
        if maker is None or jnp.issubdtype(value.dtype, jax.dtypes.extended):
            yield None
        elif not self._enters(value, dim):
            yield _together(maker, value, dim)
        for op in self.readers.get(value.id, ()):
            yield [] if _leaves(op, value, dim) else _together(op, value, dim)

    def _enters(self, value: Value, dim: int) -> bool:
        cut = self.cuts.get(value.id)
        return cut is not None and cut.dim == dim and cut.extensible


def _leaves(op: Op, value: Value, dim: int) -> bool:
    """Whether ``op`` puts the dim back: behind one other element, or among padding."""
    if op.name == "pad":
        return any(op.params["padding_config"][dim]) and op.inputs[1] is not value and not _only_cuts(op, dim)
    if op.name != "concatenate" or op.params["dimension"] != dim or len(op.inputs) != 2:
        return False
    return op.inputs[0].shape[dim] == 1 and op.inputs[1] is value and op.inputs[0] is not value


def _together(op: Op, value: Value, dim: int) -> list[Place] | None:
    """The operands' and results' dims that are this dim of ``value``; None if the operation needs more than that."""
    known = op.name in _LIKE_OTHERS or (op.name in RULES and RULES[op.name] is elementwise)
    if not known or op.effects:
        return None
    rule, ports = RULES[op.name](op), (*op.inputs, *op.outputs)
    placed = [(x, dims) for x, dims in zip(ports, (*rule.inputs, *rule.outputs), strict=True) if isinstance(x, Value)]
    own = {dims[dim] for x, dims in placed if x is value}
    factor = own.pop() if len(own) == 1 else ()
    found = [(x, d) for x, dims in placed for d, names in enumerate(dims) if set(names) & set(factor)]
    alike = len(factor) == 1 and all(x.shape[d] == value.shape[dim] for x, d in found)
    twice = len({x.id for x, _ in found}) < len({(x.id, d) for x, d in found})
    return found if alike and not twice and factor[0] not in rule.reduced else None
