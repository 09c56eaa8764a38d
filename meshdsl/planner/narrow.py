"""What XLA's backend for TPUs keeps in another way than others: the copies that memory is counted for.

A TPU's matrix unit reads float32 in bfloat16 unless it is asked for more precision. So what only products read is kept
in 16 bits, through reshapes, slices, moves between devices and the stacks that a loop hands to another:

    narrow(value)  =  float32, and every reader is a product, or hands it on to something that is narrow

and the same for a copy of a value in another layout. A scatter of one element per row, such as the gradient of picking
each label's logit, becomes a comparison of positions, which is fused. And what could be fused is computed again by each
of its readers, products too (``materialised``). All of this was read from programs that libtpu 0.0.52 compiled
(``docs/targets.md``).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import jax.numpy as jnp

from meshdsl.ir import Graph, Op, Value, walk
from meshdsl.layouts.layout import Layout
from meshdsl.planner.costs import PRODUCTS, VIEWS

_HANDS_ON = VIEWS | set("transpose slice dynamic_slice broadcast_in_dim copy constrain".split())
Reading = tuple[int, int]  # op id, operand
Copied = tuple[int, Layout]  # value id, layout


@dataclass
class Reads:
    """How the float32 values of a program are read.

    Args:
      all: value id per reading. full: the readings that need all 32 bits.
      read: ids of the values that are read. wide: ids of those that are read in full.
    """

    all: dict[Reading, int] = field(default_factory=dict)
    full: set[Reading] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    wide: set[int] = field(default_factory=set)

    def note(self, op: Op, operand: int, full: bool) -> None:
        """Note a reading."""
        x = op.inputs[operand]
        if isinstance(x, Value) and x.dtype == jnp.float32:
            self.all[op.id, operand] = x.id
            self.read.add(x.id)
            if full:
                self.full.add((op.id, operand))
                self.wide.add(x.id)

    def in_full(self, value: Value) -> bool:
        """Whether a value is kept in full, when all that read it have been noted."""
        return value.id in self.wide or value.id not in self.read

    def copies(self, own: Mapping[int, Layout], uses: Mapping[Reading, Layout], given: Iterable[int]) -> set[Copied]:
        """The copies that are kept in 16 bits, by value id and layout, under a choice of layouts.

        Args:
          own: per value id, its own layout. uses: per reading, the layout read.
          given: ids of the arguments, which lie as they were given.
        """
        found = {(value, uses[reading]) for reading, value in self.all.items()}
        found -= {(self.all[reading], uses[reading]) for reading in self.full}
        found -= {(value, own[value]) for value in (*self.wide, *given)}
        return found | {(value, own[value]) for value in self.read - self.wide - set(given)}


def reads(graph: Graph) -> Reads:
    """How the graph and its bodies read float32 values; what the step returns is read in full."""
    found = Reads()
    _visit(graph, [True] * len(graph.returned), found)
    return found


def _visit(graph: Graph, returned: Sequence[bool], found: Reads) -> None:
    """Note the readings of the graph and its bodies, the last ones first.

    Args:
      returned: per result, whether somebody outside reads it in full.
    """
    for i, full in enumerate(returned):
        found.note(graph.ops[-1], i, full)
    for op in reversed(graph.ops[:-1]):
        for i, full in enumerate(_reads(op, found)):
            found.note(op, i, full)


def _reads(op: Op, found: Reads) -> Iterable[bool]:
    """Per operand, whether the operation reads it in full."""
    if op.name == "scan":
        return list(_scanned(op, found))
    for body in op.bodies:
        _visit(body, [True] * len(body.returned), found)
    if op.name == "optimization_barrier":
        return [found.in_full(value) for value in op.outputs]
    if op.name in PRODUCTS:
        return [not _default(op.params.get("precision"))] * len(op.inputs)
    hands_on = op.name in _HANDS_ON and not found.in_full(op.outputs[0])
    return [i > 0 or not hands_on for i in range(len(op.inputs))]


def _scanned(op: Op, found: Reads) -> Iterator[bool]:
    """A loop reads what its body reads; what it carries is kept in full."""
    (body,), consts, carries = op.bodies, op.params["num_consts"], op.params["num_carry"]
    stacks = [found.in_full(value) for value in op.outputs[carries:]]
    _visit(body, [*[True] * carries, *stacks], found)
    for i, value in enumerate(body.inputs):
        yield consts <= i < consts + carries or found.in_full(value)


def _default(precision: object) -> bool:
    """Whether a product is as precise as the backend likes."""
    parts = precision if isinstance(precision, tuple) else (precision,)
    return all(part is None or getattr(part, "name", "") == "DEFAULT" for part in parts)


def picks(graph: Graph) -> frozenset[int]:
    """Ids of the results of scatters of one element per row, and of the zeros that these are added to."""
    found = [op for _, op in walk(graph) if _picks(op)]
    filled = {op.outputs[0].id for _, op in walk(graph) if op.name == "broadcast_in_dim"}
    zeros = {x.id for op in found if isinstance(x := op.inputs[0], Value)}
    return frozenset({op.outputs[0].id for op in found} | (zeros & filled))


def _picks(op: Op) -> bool:
    if op.name not in ("scatter-add", "scatter_add", "scatter"):
        return False
    dims, rows = op.params["dimension_numbers"], op.inputs[2].shape
    alone = prod(op.inputs[0].shape[d] for d in dims.operand_batching_dims) == prod(rows)
    return not dims.update_window_dims and alone
