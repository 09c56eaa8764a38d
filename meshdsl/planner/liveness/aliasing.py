"""In which memory a value can be made: what is true of a program under all of its layouts.

    runs     an operation fused into its readers runs with the last of them, and what it reads must be there until then
    views    a reshape is its operand under another shape, and takes no memory
    reuses   an elementwise result may be written over an operand that nobody reads afterwards, through fused ones
             too; an update over what it updates; the result of a loop over what the loop starts from
    slices   what a loop reads of a stack in each trip is a copy where it is not fused

These are the rules of XLA's buffer assignment (``CanShareOperandBufferWithUser``, ``HloAliasAnalysis``).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from meshdsl.ir.graph import LOOPS, Graph, Op, Value, walk
from meshdsl.ir.index import Flags, GraphIndex, graph_index
from meshdsl.ir.loops import ABSENT, PortRole, carried_inputs, loop_ports
from meshdsl.layouts.layout import Layout
from meshdsl.planner.costs.op_cost import PRODUCTS, VIEWS, ends_fusion, materialized
from meshdsl.rules.elementwise import elementwise
from meshdsl.rules.registry import RULES
from meshdsl.util.arrays import Ids, index_array, ranges
from meshdsl.util.lazy import memoize_by_object

# ---- Narrow ----------------------------------------------------------------------------------------------------------
# What XLA's backend for TPUs keeps in another way than others: the copies that memory is counted for.
#
# A TPU's matrix unit reads float32 in bfloat16 unless it is asked for more precision. So what only products read is
# kept in 16 bits, through reshapes, slices, moves between devices and the stacks that a loop hands to another:
#
#     narrow(value)  =  float32, and every reader is a product, or hands it on to something that is narrow
#
# and the same for a copy of a value in another layout. A scatter of one element per row, such as the gradient of
# picking each label's logit, becomes a comparison of positions, which is fused. And what could be fused is computed
# again by each of its readers, products too (``materialised``). All of this was read from programs that libtpu 0.0.52
# compiled (``docs/targets.md``).


_HANDS_ON = VIEWS | set("transpose slice dynamic_slice broadcast_in_dim copy constrain".split())
Reading = tuple[int, int]  # op id, operand
Copied = tuple[int, Layout]  # value id, layout


@dataclass
class OperandReads:
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


def reads(graph: Graph) -> OperandReads:
    """How the graph and its bodies read float32 values; what the step returns is read in full."""
    found = OperandReads()
    _visit(graph, [True] * len(graph.returned), found)
    return found


def _visit(graph: Graph, returned: Sequence[bool], found: OperandReads) -> None:
    """Note the readings of the graph and its bodies, the last ones first.

    Args:
      returned: per result, whether somebody outside reads it in full.
    """
    for i, full in enumerate(returned):
        found.note(graph.ops[-1], i, full)
    for op in reversed(graph.ops[:-1]):
        for i, full in enumerate(_reads(op, found)):
            found.note(op, i, full)


def _reads(op: Op, found: OperandReads) -> Iterable[bool]:
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


def _scanned(op: Op, found: OperandReads) -> Iterator[bool]:
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


# ---- Places ----------------------------------------------------------------------------------------------------------


_SAME = VIEWS | {"constrain", "optimization_barrier"}
_UPDATES = ("dynamic_update_slice", "scatter")


class InPlaceReuse(NamedTuple):
    """Results that may be written over operands, in the order of positions.

    Args:
      at: their positions. made: the values.
      options: per result, and one past the last, the first of the readings (``over``) that it may be written over.
    """

    at: Ids
    made: Ids
    options: Ids
    over: Ids


@dataclass(frozen=True)
class Body:
    """How the values of a body lie in the memory of the operation around it.

    Args:
      carried: (input, position among what is returned) that are one place.
      given: positions of what is returned straight into the results of the operation.
      sliced: inputs that are slices of a stack, and are copies.
    """

    carried: tuple[tuple[int, int], ...] = ()
    given: tuple[int, ...] = ()
    sliced: frozenset[int] = frozenset()


class BufferAliases:
    """The facts of a program; positions, values and readings go by their numbers.

    Args:
      backend: XLA's, which compiles for the devices (see ``Topology``).
      kept: the values that are written to memory.
      reads: how float32 is read, if that decides how it is kept.
      runs: per position, the one at which its operation runs.
      views: positions of operations whose result is their operand.
      reuses: what may be written over what.
      lies: per part of the program, how its values lie in the memory around it.
    """

    def __init__(self, graph: Graph, backend: str) -> None:
        from meshdsl.planner.liveness.aliasing_kernels import (
            run_at,  # with its compiler, too much to import for those who plan nothing
        )

        tpu = backend == "tpu"
        self.numbers = numbers = graph_index(graph)
        kept = materialized(graph, again=tpu)
        self.kept = kept & ~numbers.mask_of(picks(graph)) if tpu else kept
        self.reads = reads(graph) if tpu else OperandReads()
        self.runs: Ids = run_at(numbers, self.kept)
        self.views = _views(numbers)
        self.reuses = _reuses(numbers, self.kept)
        whole = Body(sliced=frozenset(range(len(graph.inputs))))
        self.lies = [_body(*part.owner) if part.owner else whole for part in numbers.blocks]


@memoize_by_object
def buffer_aliases(graph: Graph, backend: str) -> BufferAliases:
    """The facts of a program, worked out once for a backend."""
    return BufferAliases(graph, backend)


def _views(numbers: GraphIndex) -> Ids:
    maybe = np.flatnonzero(numbers.positions_named((*_SAME, "transpose"))).tolist()
    return index_array(at for at in maybe if (op := numbers.ops[at]) and _is_view(op))


def _is_view(op: Op) -> bool:
    """Whether the result is the operand, at most under another shape."""
    if op.name == "transpose":  # of dims of length 1
        order = [d for d in op.params["permutation"] if op.inputs[0].shape[d] > 1]
        return order == sorted(order)
    return op.name in _SAME


def _reuses(numbers: GraphIndex, kept: Flags) -> InPlaceReuse:
    """What may be written over what: by elementwise operations, through fused ones too, and by updates and loops."""
    from meshdsl.planner.liveness.aliasing_kernels import written_over  # with its compiler, as above

    names = set(numbers.op_names)
    by_element = numbers.positions_named(name for name in names if RULES.get(name) is elementwise)
    found, options = written_over(numbers, by_element, kept)
    updates = numbers.positions_named(name for name in names if name.startswith(_UPDATES))
    others = np.flatnonzero(updates | numbers.positions_named(LOOPS)).tolist()
    more = index_array(x for at in others if (op := numbers.ops[at]) for pair in _written_over(op) for x in (at, *pair))
    at, results, operands = more.reshape(-1, 3).T
    over = numbers.use_numbers_at(at, operands)
    there = np.flatnonzero(over >= 0)
    begins = options.size + np.arange(there.size)
    rows = np.stack([at[there], numbers.first_result[at[there]] + results[there], begins, begins + 1], axis=1)
    every = np.concatenate((found, rows))
    at, made, begins, ends = every[np.argsort(every[:, 0], kind="stable")].T
    options = np.append(options, over[there])[ranges(begins, ends - begins)]
    return InPlaceReuse(at, made, np.cumsum([0, *(ends - begins)]), options)


def _written_over(op: Op) -> Iterator[tuple[int, int]]:
    """Results of an update or a loop, and the operand that each may be written over, by position."""
    if op.name.startswith(_UPDATES):
        yield 0, 0
    elif op.name in ("scan", "while"):
        ports = [port for port in loop_ports(op) if port.operand != ABSENT]
        others = [op.inputs[port.operand] for port in ports if port.role is not PortRole.CARRY]
        for port in ports:
            # a carry may overwrite its initial value unless the loop reads that in every iteration too
            if port.role is PortRole.CARRY and not any(op.inputs[port.operand] is x for x in others):
                yield port.result, port.operand


def _body(op: Op, which: int) -> Body:
    body = op.bodies[which]
    if op.name == "cond":
        return Body(given=tuple(range(len(body.returned))))
    if body is not op.bodies[-1]:  # the condition of a loop
        return Body()
    carried = carried_inputs(op)[-1]
    return Body(tuple((at, i) for i, at in enumerate(carried)), sliced=_sliced(body, carried.stop))


def _sliced(body: Graph, first: int) -> frozenset[int]:
    """Inputs from ``first`` on that something reads that is not fused."""
    heavy = [op for op in body.ops if op.bodies or (ends_fusion(op.name) and not op.name.startswith("reduce_"))]
    read = {x.id for op in heavy for x in op.inputs if isinstance(x, Value)}
    return frozenset(i for i, v in enumerate(body.inputs) if i >= first and v.id in read)
