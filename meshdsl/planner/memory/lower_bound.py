"""The bytes that memory certainly holds while an op runs, whatever the plan, as a sum of terms of few variables.

Predicted memory (``planner.liveness``) depends on a whole plan: copies are shared, made early where they are smaller,
and overwritten in place. Part of it does not. The following are certainly live while an op runs (``surely_live``),
each with a size that follows from the states of one node, or of two; the graphs around the op count as well:

    inputs that are not donated              in their own layout, at every op
    operands of the op                       in the layout in which it uses them; not again if that is the layout of
                                             such an input
    results of the op                        in their own layout
    values produced before and consumed      in some layout on the resharding path to the later consumer, after the
    later once, and before at most once      path to the earlier consumer has branched off
    operands consumed once before and        the same for the later consumer, unless that copy can be the operand
    once later                               itself
    other values consumed later              in their own layout if a consumer uses them so; else in the smallest of all

The sum never exceeds the predicted memory of a plan, so a bound may put a price on it (``dual``).
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from meshdsl.ir.graph import Op, Value
from meshdsl.ir.index import Flags, GraphIndex
from meshdsl.planner.costs.op_cost import local_share
from meshdsl.planner.liveness.aliasing import BufferAliases, buffer_aliases
from meshdsl.planner.objective import CostedPlan, ResidentCopies
from meshdsl.planner.problem.model import Assignment, Model, Prices
from meshdsl.planner.problem.ports import End, Wiring
from meshdsl.util.arrays import Costs, Ids, group_by, index_array, object_id, row_ids

# ---- Values that are live in every plan ------------------------------------------------------------------------------
# Values that may lie elsewhere are left out: views, fused values, and in a loop body whatever may share memory with the
# graph around the loop. Of an operand and a result that may overwrite it, and is then as large, the operand counts if
# it is among the others, else the result.

_AFTER, _TIMES = 2, 3  # times of a use: before an op runs (0), meanwhile (1), afterwards (2)


@dataclass(frozen=True)
class SurelyLive:
    """Values that one graph holds while one of its ops runs, as numbers of values and uses.

    Args:
      operands: per operand, a use by the op, or by an earlier one that is fused into this op or a later one.
      results: values.
      waiting: per value that was produced before and is consumed afterwards, its last use.
      consumed_once: [values], whether such a value has only one use afterwards.
      reused: [values, 2], of the operands with one use before, one while the op runs and one afterwards, the last two.
    """

    operands: Ids
    results: Ids
    waiting: Ids
    consumed_once: Flags
    reused: Ids


def surely_live(aliases: BufferAliases, at: int, counted: Flags) -> SurelyLive:
    """Returns the values that the graph of a position certainly holds while the op there runs.

    Args:
      counted: inputs of the graph that have memory of their own.
    """
    index, block = aliases.index, int(aliases.index.block_of[at])
    start, stop = index.blocks[block].start, index.blocks[block].stop
    own = aliases.materialized & (index.producer >= start)
    inside = (own | counted) & ~index.mask(_views(aliases)[0]) & ~_in_outer_memory(aliases, block)
    uses = np.arange(index.first_use[start], index.first_use[stop])
    positions, runs_at = index.use_position[uses], aliases.runs_at[index.use_position[uses]]
    now = uses[(positions <= at) & (runs_at >= at)]
    waits = inside & (counted | (index.producer < at))
    waits[index.use_value[now]] = False
    after = uses[(positions > at) & waits[index.use_value[uses]]]
    waiting = _last_uses(index, after)

    results, options = _reuse_options(aliases, at)
    overwritten = index.use_value[options]
    # either the operand or the result that may overwrite it is live; the result counts unless the operand waits
    is_either = inside[results] & inside[overwritten] & ~index.mask(index.use_value[waiting])[overwritten]
    may_overwrite = _with_viewed(aliases, overwritten)
    surely = now[inside[index.use_value[now]] & ~may_overwrite[index.use_value[now]]]
    operands = _last_uses(index, np.append(surely, options[is_either]))
    produced = inside & (index.producer == at)
    produced[results[is_either]] = False
    once = np.bincount(index.use_value[after], minlength=inside.size) == 1
    reused = _used_at_all_times(index, uses, np.where(positions > at, _AFTER, runs_at >= at))
    is_operand = index.mask(index.use_value[operands])[index.use_value[reused[:, 0]]]
    return SurelyLive(operands, np.flatnonzero(produced), waiting, once, reused[is_operand])


def _used_at_all_times(index: GraphIndex, uses: Ids, times: Ids) -> Ids:
    """Returns [values, 2], the last two uses of values with exactly one use before, while and after an op runs.

    Args:
      times: [uses], 0, 1 or 2.
    """
    values, count = index.use_value[uses], len(index.values)
    counts = np.bincount(values * _TIMES + times, minlength=count * _TIMES).reshape(-1, _TIMES)
    found = np.full((count, _TIMES), -1)
    found[values, times] = uses
    last_two: Ids = found[(counts == 1).all(axis=1), 1:]
    return last_two


def _last_uses(index: GraphIndex, uses: Ids) -> Ids:
    """Returns one use per value: by the last op that uses it, as its first such operand."""
    order = np.lexsort((index.use_operand[uses], -index.use_position[uses], index.use_value[uses]))
    return uses[order[np.flatnonzero(np.diff(index.use_value[uses[order]], prepend=-1))]]


def _reuse_options(aliases: BufferAliases, at: int) -> tuple[Ids, Ids]:
    """Returns the results of an op, and the uses that each may overwrite, in pairs."""
    reuses = aliases.reuses
    first, last = np.searchsorted(reuses.at, (at, at + 1))
    options = reuses.options[first : last + 1]
    return np.repeat(reuses.results[first:last], np.diff(options)), reuses.uses[options[0] : options[-1]]


def _views(aliases: BufferAliases) -> tuple[Ids, Ids]:
    """Returns values that may be views, and the value that each views."""
    index = aliases.index
    viewed = index.use_numbers_at(aliases.views, np.zeros_like(aliases.views))
    return index.first_result[aliases.views[viewed >= 0]], index.use_value[viewed[viewed >= 0]]


def _with_viewed(aliases: BufferAliases, values: Ids) -> Flags:
    """Returns a mask of values and of everything that they view."""
    views, viewed = _views(aliases)
    return _reachable(aliases.index.mask(values), views, viewed)


def _in_outer_memory(aliases: BufferAliases, block: int) -> Flags:
    """Returns a mask of the values of a body that may lie in memory around it: in a carry's place, or as a result."""
    index, (start, stop, *_, owner) = aliases.index, aliases.index.blocks[block]
    if owner is None:
        return index.mask(np.empty(0, dtype=np.intp))
    inputs = [index.first_result[start - 1] + i for i, _ in aliases.bodies[block].carried]
    views, viewed = _views(aliases)
    reuses = aliases.reuses
    overwritten, results = index.use_value[reuses.uses], np.repeat(reuses.results, np.diff(reuses.options))
    carried = index.mask(np.array(inputs, dtype=np.intp))
    found = _reachable(carried, np.append(viewed, overwritten), np.append(views, results))
    returned = index.use_value[index.first_use[stop - 1] : index.first_use[stop]]
    return found | _with_viewed(aliases, returned)


def _reachable(found: Flags, sources: Ids, targets: Ids) -> Flags:
    """Returns a mask of values that arcs lead to from some values, and of these."""
    while True:
        further = targets[found[sources] & ~found[targets]]
        if not further.size:
            return found
        found[further] = True


# ---- The lower bound -------------------------------------------------------------------------------------------------

_TWO_CONSUMERS, _THREE_CONSUMERS = 3, 4  # ends of a value, its producer included


class _Ports(NamedTuple):
    """Ports with equal tables.

    Args:
      bytes: [joint states], that a device holds at least.
      nodes, ports: of each.
      least: [ports], bytes in the smallest of all layouts.
    """

    bytes: Costs
    nodes: Ids
    ports: Ids
    least: Costs

    def bytes_in(self, rows: Assignment) -> Costs:
        """Returns [ports], the bytes in an assignment."""
        return np.asarray(self.bytes[tuple(rows[self.nodes].T)])


class MemoryLowerBound:
    """Bytes that memory certainly holds while an op runs.

    Args:
      donated: positions of the inputs whose memory is given up.
      enclosing: the op, after the ops in whose bodies it is, the outermost first.

    Attributes:
      ends: ports that are live in every plan.
      copies: ports that count unless they use an undonated input in its own layout.
      path_ends: ports that pay for the smallest copy on the path to them.
      path_ends_unless: (port, port of the op): as ``path_ends``, unless the op can use that copy.
      waiting: ports that pay in their own layout if that is the producer's, else in the smallest of all layouts.
    """

    def __init__(self, model: Model, donated: frozenset[int], enclosing: Sequence[Op]) -> None:
        graph, self.model = model.problem.program.graph, model
        index, wiring = model.problem.index, model.wiring
        levels = list(_levels(model, enclosing))
        kept = range(len(graph.inputs))
        undonated = index.mask(index_array(i for i in kept if i not in donated and i not in graph.hosted))
        operands = _ports_of(wiring, [level.operands for level in levels])
        later = _ports_of(wiring, [level.waiting for level in levels])
        results = wiring.producer[np.concatenate([level.results for level in levels])]
        given, is_copy = wiring.producer[undonated], undonated[wiring.value_of[operands]]
        self.ends = tuple(wiring.ends_at(np.concatenate((given, operands[~is_copy], results[results >= 0]))))
        self.copies = tuple(wiring.ends_at(operands[is_copy]))

        later = later[~undonated[wiring.value_of[later]]]
        by_size = np.lexsort((later, -index.bytes[wiring.value_of[later]]))
        largest = later[by_size][: model.limits.memory_waiting_values]
        ends = np.bincount(wiring.value_of, minlength=undonated.size)
        consumed_once = np.logical_or.reduce([level.consumed_once for level in levels])
        on_path = ((ends <= _TWO_CONSUMERS) & consumed_once)[wiring.value_of[largest]]
        self.path_ends, self.waiting = (tuple(wiring.ends_at(largest[these])) for these in (on_path, ~on_path))

        now, after = wiring.port_of_use[np.concatenate([level.reused for level in levels])].T
        has_three = ends[wiring.value_of[now]] == _THREE_CONSUMERS
        these = (now >= 0) & (after >= 0) & ~undonated[wiring.value_of[now]] & has_three
        self.path_ends_unless = tuple(zip(wiring.ends_at(after[these]), wiring.ends_at(now[these]), strict=True))

        self._tables: dict[tuple[int, int], Costs] = {}
        self._resident = ResidentCopies(model)
        self._bytes: WeakKeyDictionary[CostedPlan, float] = WeakKeyDictionary()
        self._half_width = bool(buffer_aliases(graph, model.mesh.topology.backend).operand_uses.all)

    def with_model(self, model: Model) -> "MemoryLowerBound":
        """Returns the lower bound for a model of the same program under other pins, with equal donated inputs."""
        other = copy(self)
        other.model, other._resident, other._bytes = model, ResidentCopies(model), WeakKeyDictionary()
        return other

    def bytes(self, plan: CostedPlan) -> float:
        """Returns the bytes that are certainly held in a plan."""
        if plan in self._bytes:
            return self._bytes[plan]
        layouts = self.model.ports.layouts(plan.rows)
        as_produced = layouts == layouts[self.model.wiring.port_producer]
        smallest = self._resident.smallest(self.path_ends, layouts, plan.edges)
        held = sum(self._width(end) * size for end, size in zip(self.path_ends, smallest, strict=True))
        smallest = self._resident.smallest_unless(self.path_ends_unless, layouts, plan.edges)
        held += sum(self._width(end) * size for (end, _), size in zip(self.path_ends_unless, smallest, strict=True))
        ends, copies, waiting = self._groups
        live = sum(same.bytes_in(plan.rows).sum() for same in ends)
        copied = sum(same.bytes_in(plan.rows)[~as_produced[same.ports]].sum() for same in copies)
        waits = sum(np.where(as_produced[same.ports], same.bytes_in(plan.rows), same.least).sum() for same in waiting)
        self._bytes[plan] = held + float(live + copied + waits)
        return self._bytes[plan]

    def prices(self, price: float) -> Prices:
        """Returns the prices of all terms at a price per byte."""
        resident = {end: (price, self._table(end)) for end in self.ends}
        copies, waiting = ({end: price * self._width(end) for end in ends} for ends in (self.copies, self.waiting))
        unless = {end: (price * self._width(end), now) for end, now in self.path_ends_unless}
        on_path = self.path_copy_prices(price)
        return Prices(copy=copies, resident=resident, waiting=waiting, path_copy=on_path, path_copy_unless=unless)

    def path_copy_prices(self, price: float) -> dict[End, float]:
        """Returns the prices of the smallest copies on paths to later consumers, by the port of these."""
        return {end: price * self._width(end) for end in self.path_ends}

    def least(self, end: End, rows: Assignment) -> float:
        """Returns the least bytes of one of ``ends`` over some states of its node."""
        return float(self._table(end)[tuple(rows.T)].min())

    @property
    def rounded_terms(self) -> int:
        """How many of the prices may be rounded up."""
        return len(self.copies) + len(self.waiting) + len(self.path_ends) + len(self.path_ends_unless)

    @cached_property
    def _groups(self) -> list[list[_Ports]]:
        """``ends``, ``copies`` and ``waiting``, each grouped by equal tables."""
        return [list(self._grouped(ends)) for ends in (self.ends, self.copies, self.waiting)]

    def _grouped(self, ends: Sequence[End]) -> Iterator[_Ports]:
        model, wiring = self.model, self.model.wiring
        nodes, ports = index_array(chain.from_iterable(ends)).reshape(-1, 2).T
        tables = model.class_ids(lambda n: object_id(model.tables[n]))
        least = np.array([costs.least_bytes for costs in model.reshard_costs.distinct])
        for same in group_by(row_ids((tables[nodes], ports))):
            end, at = ends[int(same[0])], wiring.first_port[nodes[same]] + ports[same]
            yield _Ports(self._table(end), nodes[same], at, self._width(end) * least[model.spaces[at]])

    def _table(self, end: End) -> Costs:
        """Returns the least bytes of a port per joint state of its node; equal nodes get the same array."""
        table, value = self.model.tables[end[0]], self._value(end)
        key = (object_id(table), end[1])
        if key not in self._tables:
            split = table.codes[end[1]] < len(value.shape)
            self._tables[key] = np.asarray(local_share(self.model.mesh, split) * (value.bytes * self._width(end)))
        return self._tables[key]

    def _width(self, end: End) -> float:
        """Returns the part of a value's bytes that is certainly stored: elements may be stored in 16 bits."""
        return min(1.0, 2 / self._value(end).itemsize) if self._half_width else 1.0

    def _value(self, end: End) -> Value:
        return self.model.problem.index.value(self.model.wiring.value_at(end))


def _ports_of(wiring: Wiring, uses: Sequence[Ids]) -> Ids:
    """Returns the ports of uses, where nodes consume."""
    ports = wiring.port_of_use[np.concatenate(uses)]
    return ports[ports >= 0]


def _levels(model: Model, enclosing: Sequence[Op]) -> Iterator[SurelyLive]:
    """Yields the certainly live values of each enclosing graph, the outermost first."""
    index = model.problem.index
    aliases = buffer_aliases(model.problem.program.graph, model.mesh.topology.backend)
    for op in enclosing:
        at = int(index.position[op.id])
        block = int(index.block_of[at])
        first = index.first_result[index.blocks[block].start - 1]
        yield surely_live(aliases, at, index.mask(index_array(first + i for i in sorted(aliases.bodies[block].sliced))))
