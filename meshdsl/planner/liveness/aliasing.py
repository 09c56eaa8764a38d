"""Which values of a program have memory, and which may share it: true for all plans of the program.

These are the rules of XLA's buffer assignment (``CanShareOperandBufferWithUser``, ``HloAliasAnalysis``):

    fusion   a fused op runs with its last consumer, and its operands must stay live until then
    views    a reshape is its operand under another shape, and takes no memory
    reuse    an elementwise result may overwrite an operand that has no later use, through fused ops too; an update its
             operand; the result of a loop the initial value of its carry
    slices   what a loop reads of a stacked operand in each iteration is a copy, unless it is fused
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from meshdsl.ir.graph import LOOPS, Graph, Op, Value, walk
from meshdsl.ir.host import hosted_values
from meshdsl.ir.index import Flags, GraphIndex, Use, graph_index
from meshdsl.ir.loops import ABSENT, PortRole, carried_inputs, loop_ports
from meshdsl.planner.costs.fusion import PRODUCTS, VIEWS, ends_fusion, materialized
from meshdsl.rules.elementwise import elementwise
from meshdsl.rules.registry import RULES
from meshdsl.util.arrays import Ids, index_array, ranges
from meshdsl.util.lazy import memoize_by_object

# ---- Storage on TPUs -------------------------------------------------------------------------------------------------
# A TPU's matrix unit reads float32 operands as bfloat16 unless more precision is requested. So a value that only
# products use is stored in 16 bits, through reshapes, slices, reshards and the stacks that one loop passes to another:
#
#     half_width(value)  =  float32, and every consumer is a product, or passes it on to a value of half width
#
# and the same for a copy of a value in another layout. A scatter of one element per row, such as the gradient of
# picking each label's logit, becomes a comparison of positions, which is fused. And a value that could be fused is
# recomputed for each of its consumers, for products too (``materialized``). All of this was read from programs that
# libtpu 0.0.52 compiled (``docs/evidence/targets.md``).

_PASSES_ON = VIEWS | set("transpose slice dynamic_slice broadcast_in_dim copy constrain".split())


@dataclass
class OperandUses:
    """Which uses of float32 values need all 32 bits.

    Args:
      all: value id per use.
      full: uses that need all bits.
      values: ids of the values with uses.
      full_values: ids of those with a use that needs all bits.
    """

    all: dict[Use, int] = field(default_factory=dict)
    full: set[Use] = field(default_factory=set)
    values: set[int] = field(default_factory=set)
    full_values: set[int] = field(default_factory=set)

    def add(self, op: Op, operand: int, full: bool) -> None:
        """Adds a use."""
        x = op.inputs[operand]
        if isinstance(x, Value) and x.dtype == jnp.float32:
            self.all[op.id, operand] = x.id
            self.values.add(x.id)
            if full:
                self.full.add((op.id, operand))
                self.full_values.add(x.id)

    def needs_full(self, value: Value) -> bool:
        """Returns whether a value is stored in full, once all its uses were added."""
        return value.id in self.full_values or value.id not in self.values


def operand_uses(graph: Graph) -> OperandUses:
    """Returns how a graph and its bodies use float32 values; the results of the step are used in full."""
    found = OperandUses()
    _add_uses(graph, [True] * len(graph.returned), found)
    return found


def _add_uses(graph: Graph, returned: Sequence[bool], found: OperandUses) -> None:
    """Adds the uses in a graph and its bodies, the last ones first.

    Args:
      returned: per result, whether it is used in full outside.
    """
    for i, full in enumerate(returned):
        found.add(graph.ops[-1], i, full)
    for op in reversed(graph.ops[:-1]):
        for i, full in enumerate(_needs_full(op, found)):
            found.add(op, i, full)


def _needs_full(op: Op, found: OperandUses) -> Iterable[bool]:
    """Returns per operand whether the op uses it in full."""
    if op.name == "scan":  # as its body does; carries are stored in full
        (body,), consts, carries = op.bodies, op.params["num_consts"], op.params["num_carry"]
        stacks = [found.needs_full(value) for value in op.outputs[carries:]]
        _add_uses(body, [*[True] * carries, *stacks], found)
        is_carry = range(consts, consts + carries)
        return [i in is_carry or found.needs_full(value) for i, value in enumerate(body.inputs)]
    for body in op.bodies:
        _add_uses(body, [True] * len(body.returned), found)
    if op.name == "optimization_barrier":
        return [found.needs_full(value) for value in op.outputs]
    if op.name in PRODUCTS:
        precision = op.params.get("precision")
        parts = precision if isinstance(precision, tuple) else (precision,)
        is_default = all(part is None or getattr(part, "name", "") == "DEFAULT" for part in parts)
        return [not is_default] * len(op.inputs)
    passes_on = op.name in _PASSES_ON and not found.needs_full(op.outputs[0])
    return [i > 0 or not passes_on for i in range(len(op.inputs))]


def one_hot_scatters(graph: Graph) -> frozenset[int]:
    """Returns the ids of results of scatters of one element per row, and of the zeros that these add to."""
    found = [op for _, op in walk(graph) if _is_one_hot_scatter(op)]
    filled = {op.outputs[0].id for _, op in walk(graph) if op.name == "broadcast_in_dim"}
    zeros = {x.id for op in found if isinstance(x := op.inputs[0], Value)}
    return frozenset({op.outputs[0].id for op in found} | (zeros & filled))


def _is_one_hot_scatter(op: Op) -> bool:
    if op.name not in ("scatter-add", "scatter_add", "scatter"):
        return False
    dims, rows = op.params["dimension_numbers"], op.inputs[2].shape
    is_one_per_row = prod(op.inputs[0].shape[d] for d in dims.operand_batching_dims) == prod(rows)
    return not dims.update_window_dims and is_one_per_row


# ---- Shared memory ---------------------------------------------------------------------------------------------------

_IDENTITIES = VIEWS | {"constrain", "optimization_barrier"}
_UPDATES = ("dynamic_update_slice", "scatter")


class InPlaceReuse(NamedTuple):
    """Results that may overwrite operands, in the order of positions.

    Args:
      at: positions of the results.
      results: their values.
      options: [results + 1], the first option of each.
      uses: [options], uses of operands that may be overwritten.
    """

    at: Ids
    results: Ids
    options: Ids
    uses: Ids


@dataclass(frozen=True)
class BodyAliases:
    """How the values of a body lie in the memory of the enclosing op.

    Args:
      carried: (input, position among the returned values) that share memory.
      returned: positions of returned values that are directly results of the op.
      sliced: inputs that are slices of a stack on the device, and copies.
    """

    carried: tuple[tuple[int, int], ...] = ()
    returned: tuple[int, ...] = ()
    sliced: frozenset[int] = frozenset()


class BufferAliases:
    """The facts of a program, by the numbers of ``index``.

    Args:
      backend: XLA's backend, which compiles for the devices (see ``Topology``).

    Attributes:
      materialized: [values], whether they are written to the device's memory.
      operand_uses: how float32 values are used, if that decides how they are stored.
      runs_at: [positions], the one at which an op runs: that of its last consumer if it is fused.
      views: positions of ops whose result is their operand.
      reuses: which results may overwrite which operands.
      filled_early: values that lie filled from the start of their graph on: on CPUs, the stacks that its loops make,
        and what is filled with one number, since XLA runs there first what waits for nothing (``BFScheduler``).
      bodies: per graph of the program, how its values lie in the memory around it.
    """

    def __init__(self, graph: Graph, backend: str) -> None:
        from meshdsl.planner.liveness.aliasing_kernels import run_positions  # numba is slow to import

        is_tpu = backend == "tpu"
        self.index = index = graph_index(graph)
        stored = materialized(graph, recompute=is_tpu)
        stored = stored & ~index.mask_of(one_hot_scatters(graph)) if is_tpu else stored
        hosted = hosted_values(graph)
        self.materialized = stored & ~index.mask_of(hosted)
        self.operand_uses = operand_uses(graph) if is_tpu else OperandUses()
        self.runs_at: Ids = run_positions(index, stored)
        candidates = np.flatnonzero(index.positions_named((*_IDENTITIES, "transpose"))).tolist()
        self.views = index_array(at for at in candidates if (op := index.ops[at]) and _is_view(op))
        self.reuses = _reuses(index, stored)
        self.filled_early = _filled(index) if backend == "cpu" else index_array(())
        whole = BodyAliases(sliced=frozenset(range(len(graph.inputs))) - graph.hosted)
        self.bodies = [_body(*block.owner, hosted) if block.owner else whole for block in index.blocks]


@memoize_by_object
def buffer_aliases(graph: Graph, backend: str) -> BufferAliases:
    """Returns the facts of a program for a backend, which are worked out once."""
    return BufferAliases(graph, backend)


def _filled(index: GraphIndex) -> Ids:
    """Returns the values that loops fill, a slice in each iteration, and those that are filled at once."""
    ops = [
        op
        for at in np.flatnonzero(index.positions_named(["scan", "broadcast_in_dim"])).tolist()
        if (op := index.ops[at])
    ]
    stacks = (value for op in ops if op.name == "scan" for value in op.outputs[op.params["num_carry"] :])
    filled = (op.outputs[0] for op in ops if op.name != "scan" and not isinstance(op.inputs[0], Value))
    return index.numbers_of({value.id for value in chain(stacks, filled)})


def _is_view(op: Op) -> bool:
    """Returns whether the result is the operand, at most under another shape."""
    if op.name == "transpose":  # of dims of length 1
        order = [d for d in op.params["permutation"] if op.inputs[0].shape[d] > 1]
        return order == sorted(order)
    return op.name in _IDENTITIES


def _reuses(index: GraphIndex, stored: Flags) -> InPlaceReuse:
    """Returns what elementwise ops may overwrite, through fused ones too, and what updates and loops may."""
    from meshdsl.planner.liveness.aliasing_kernels import overwritable  # numba is slow to import

    names = set(index.op_names)
    is_elementwise = index.positions_named(name for name in names if RULES.get(name) is elementwise)
    found, options = overwritable(index, is_elementwise, stored)
    updates = index.positions_named(name for name in names if name.startswith(_UPDATES))
    others = np.flatnonzero(updates | index.positions_named(LOOPS)).tolist()
    pairs = index_array(x for at in others if (op := index.ops[at]) for pair in _overwritten(op) for x in (at, *pair))
    at, results, operands = pairs.reshape(-1, 3).T
    uses = index.use_numbers_at(at, operands)
    is_value = np.flatnonzero(uses >= 0)
    begins = options.size + np.arange(is_value.size)
    values = index.first_result[at[is_value]] + results[is_value]
    rows = np.concatenate((found, np.stack([at[is_value], values, begins, begins + 1], axis=1)))
    at, results, begins, ends = rows[np.argsort(rows[:, 0], kind="stable")].T
    options = np.append(options, uses[is_value])[ranges(begins, ends - begins)]
    return InPlaceReuse(at, results, np.cumsum([0, *(ends - begins)]), options)


def _overwritten(op: Op) -> Iterator[tuple[int, int]]:
    """Yields (result, operand) by position: results of an update or a loop, and the operand that each may overwrite."""
    if op.name.startswith(_UPDATES):
        yield 0, 0
    elif op.name in ("scan", "while"):
        ports = [port for port in loop_ports(op) if port.operand != ABSENT]
        others = [op.inputs[port.operand] for port in ports if port.role is not PortRole.CARRY]
        for port in ports:
            # an initial value that the loop also uses in every iteration must stay
            if port.role is PortRole.CARRY and not any(op.inputs[port.operand] is x for x in others):
                yield port.result, port.operand


def _body(op: Op, which: int, hosted: Collection[int]) -> BodyAliases:
    body = op.bodies[which]
    if op.name == "cond":
        return BodyAliases(returned=tuple(range(len(body.returned))))
    if body is not op.bodies[-1]:  # the condition of a loop
        return BodyAliases()
    carried = carried_inputs(op)[-1]
    unfused = [inner for inner in body.ops if inner.bodies or _breaks_fusion(inner)]
    used = {x.id for inner in unfused for x in inner.inputs if isinstance(x, Value) and x.id not in hosted}
    sliced = frozenset(i for i, v in enumerate(body.inputs) if i >= carried.stop and v.id in used)
    return BodyAliases(tuple((at, i) for i, at in enumerate(carried)), sliced=sliced)


def _breaks_fusion(op: Op) -> bool:
    return ends_fusion(op.name) and not op.name.startswith("reduce_")
