"""Which values collectives may round (``low_bits=``): all floats but those that a step or a loop goes on from.

What is rounded each time that it is sent must not be what is sent again next time: the errors would add up, and an
update smaller than the rounding error would be lost. So in full are

    results    of the step, of a loop's carry and of a cond's branches, and what is only cast or reshaped to them
    state      everything on the way from an input to a result that may replace it or another of its type, and
               likewise of a carry, where that is elementwise or moves all of the data, through loops as well.
               What is added to an input on the way to the result that replaces it is no state: its rounding error is a
               part of the change, not of the input
    compared   what is tested for equality, with what it is the maximum or minimum of: the gradient of a maximum looks
               for it among the elements, and would find none

    w (may be rounded) -> gathered for the forward pass -> ... -> gradient (may be rounded)
    momentum (full), gradient -> new momentum (full) -> update (may be rounded) -> w + update (full)

The master copy of a weight is therefore exact, while the copies that the step computes with may be rounded, as in
ZeRO++ (Wang et al. 2023). An update that runs where the weight does not lie reads a copy of it, and this one is sent in
full (``ExactUse``). The objective adds to the price of the rounded copy what sending it in full costs more; in the
plan, ``sent_in_full`` replaces the steps. The two agree unless the cheapest way in full leads over other layouts than
the cheapest rounded one: then the objective is lower, and so still a bound.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import jax.numpy as jnp

from meshdsl.ir.graph import Atom, Graph, Op, TracedProgram, Value, walk
from meshdsl.ir.loops import PortRole, loop_ports
from meshdsl.ir.solution import Pins, Solution
from meshdsl.layouts.reshard import ReshardStep, reshard_edges, steps_to
from meshdsl.rules.dim_groups import DATA_MOVEMENT, ELEMENTWISE
from meshdsl.rules.registry import RULES

_PASSING = (
    ELEMENTWISE
    | DATA_MOVEMENT
    | set("constrain to_host to_device roll rolls shifts deal enter_shard_map leave_shard_map ppermute".split())
)
_VIEWS = frozenset("reshape transpose squeeze broadcast_in_dim constrain to_host to_device".split())
_EXTREMES = frozenset("reduce_max reduce_min max min".split())
_RECAST = _VIEWS | {"convert_element_type", "copy"}
_Pairs = Sequence[tuple[set[int], set[int]]]  # inputs, and results any of which may replace any of these
_Known = Mapping[int, int | None]  # by result, the input that it is known to replace
_Use = tuple[Op, int, int]  # an operation, and the positions of an operand and of a result
Trees = dict[int, tuple[ReshardStep, ...]]


class ExactUse(NamedTuple):
    """A use of a value that may be rounded where it is sent in full.

    Args:
      op, operand: that read it.
      trips: how often per step.
      share: the part that this use pays of what is beyond the price of a rounded copy; each use of a value pays the
        same, since they may read one copy.
    """

    op: Op
    operand: int
    trips: int
    share: float


def low_bit_formats(program: TracedProgram, pins: Pins) -> tuple[dict[int, tuple[str, ...]], tuple[ExactUse, ...]]:
    """Returns, by value id, formats of fewer bits in which a value may be sent, and the uses that get it in full.

    Values without formats are left out.
    """
    low_bits = program.low_bits
    if low_bits is None:
        return {}, ()
    whole: set[int] = set()
    found: dict[int, tuple[str, ...]] = {}
    state: dict[tuple[int, int], tuple[Op, int]] = {}  # by use
    graphs = list(_replacements(program, pins))
    for graph, results, known in graphs:
        whole |= _behind(results, graph.ops)
        whole |= _behind([x for op in graph.ops if op.name in ("eq", "ne") for x in op.inputs], graph.ops, _EXTREMES)
        for sources, uses in _states(graph, known):
            whole |= {op.outputs[j].id for op, _, j in uses}
            whole |= sources & {op.inputs[i].id for op, i, _ in uses if op.bodies}
            state |= {(op.id, i): (op, graph.trips) for op, i, _ in uses}
    for graph, _, _ in graphs:
        for value in (*graph.inputs, *(v for op in graph.ops for v in op.outputs)):
            is_float = jnp.issubdtype(value.dtype, jnp.floating)
            formats = low_bits.allowed(jnp.dtype(value.dtype).name) if is_float and value.id not in whole else ()
            if formats:
                found[value.id] = formats
    exact = [(op, i, trips) for (_, i), (op, trips) in state.items() if op.inputs[i].id in found]
    counts = Counter(op.inputs[i].id for op, i, _ in exact)
    return found, tuple(ExactUse(op, i, trips, 1 / counts[op.inputs[i].id]) for op, i, trips in exact)


def sent_in_full(solution: Solution, uses: Iterable[ExactUse]) -> Solution:
    """Returns the solution with the copies that these uses read sent in full, at their price."""
    trees, seconds = dict(solution.trees), solution.seconds
    for op, i, trips, _ in uses:
        x = op.inputs[i]
        if isinstance(x, Value) and x.id in trees:
            seconds += _send_in_full(trees, x, solution, (op.id, i)) * trips
    return replace(solution, trees=trees, seconds=seconds)


def _send_in_full(trees: Trees, value: Value, solution: Solution, use: tuple[int, int]) -> float:
    """Changes the steps on the way to a use; returns the seconds that this costs."""
    more = 0.0
    for step in [step for step in steps_to(solution.uses[use], trees[value.id]) if step.format]:
        edges = reshard_edges(step.before, len(value.shape), solution.mesh)
        plain = min((edge.of(value.bytes) for edge in edges if edge.after == step.after), key=lambda x: x.seconds)
        trees[value.id] = tuple(plain if each is step else each for each in trees[value.id])
        more += plain.seconds - step.seconds
    return more


# ---- State -----------------------------------------------------------------------------------------------------------


def _replacements(program: TracedProgram, pins: Pins) -> Iterator[tuple[Graph, list[Atom], _Known]]:
    """Yields every graph, with the results that are sent in full, and the inputs that these are known to replace.

    What a scan stacks may be sent in few bits.
    """
    yield program.graph, list(program.graph.returned), dict(enumerate(pins.follows))
    for _, op in walk(program.graph):
        for which, body in enumerate(op.bodies):
            results, known = [], dict[int, int | None]()
            for port in loop_ports(op):
                for inside, j in port.outputs:
                    if inside == which and port.role is not PortRole.STACK:
                        results.append(body.returned[j])
                        known[j] = next((i for other, i in port.inputs if other == which), None)
            yield body, results, known


def _pairs(graph: Graph, known: _Known) -> _Pairs:
    """Returns inputs and results of one type, and every result with the input that it is known to replace.

    A result may replace any input of its type, as where steps swap two.
    """
    alike = defaultdict[object, tuple[set[int], set[int]]](lambda: (set(), set()))
    for which, ends in enumerate((graph.inputs, graph.returned)):
        for i, x in enumerate(ends):
            if isinstance(x, Value):
                alike[x.shape, x.dtype][which].add(i)
    others = [({i}, {j}) for j, i in known.items() if i is not None and isinstance(graph.returned[j], Value)]
    return [pair for pair in (*alike.values(), *others) if all(pair)]


def _behind(results: Sequence[Atom], ops: Sequence[Op], others: Collection[str] = ()) -> set[int]:
    """Returns the ids of results, and of values that are only cast, reshaped or passed on to them.

    Args:
      others: names of more operations that they may pass.
    """
    found = {x.id for x in results if isinstance(x, Value)}
    for op in reversed(ops):
        is_view = op.name in _VIEWS or op.name in others or (op.name in ELEMENTWISE and len(op.inputs) == 1)
        if is_view and not found.isdisjoint(v.id for v in op.outputs):
            found.update(x.id for x in op.inputs if isinstance(x, Value))
    return found


def _passes(op: Op) -> list[tuple[int, int]]:
    """Returns operands and results of an operation between which state may pass."""
    every = [(i, j) for i in range(len(op.inputs)) for j in range(len(op.outputs))]
    if op.name in _PASSING:
        return every
    if op.bodies:
        return _through_loop(op)
    if op.name.startswith("scatter"):
        return [(0, 0)]
    if op.name == "gather":  # of a table, only if as much is read as it holds: a permutation
        return [(0, 0)] if prod(op.inputs[0].shape) == prod(op.outputs[0].shape) else []
    if op.name in RULES and op.name != "ruled":
        return []
    types = [[(x.shape, x.dtype) for x in ends] for ends in (op.inputs, op.outputs)]
    return [(i, j) for i, j in every if types[0][i] == types[1][j]]


def _through_loop(op: Op) -> list[tuple[int, int]]:
    """Returns operands and results of a loop or cond between which state passes, in its bodies and round by round."""
    ports = list(loop_ports(op))
    into = defaultdict[int, set[int]](set)  # by port, those whose results are made of it in one round
    for which, body in enumerate(op.bodies):
        readers = _readers(body)
        for a, port in enumerate(ports):
            starts = [body.inputs[i].id for inside, i in port.inputs if inside == which]
            found = _reached(starts, readers.__getitem__)
            ends = [
                (b, body.returned[j].id)
                for b, other in enumerate(ports)
                for inside, j in other.outputs
                if inside == which
            ]
            into[a].update(b for b, end in ends if end in found)
    ways = (
        (port.operand, ports[b].result)
        for a, port in enumerate(ports)
        for b in sorted(_reached((a,), into.__getitem__))
    )
    return [(i, j) for i, j in ways if i >= 0 and j >= 0]


def _readers(graph: Graph) -> dict[int, list[int]]:
    """Returns, by value id, the ids of the results to which state passes from it."""
    readers = defaultdict[int, list[int]](list)
    for op in graph.ops:
        for i, j in _passes(op):
            readers[op.inputs[i].id].append(op.outputs[j].id)
    return readers


def _states(graph: Graph, known: _Known) -> Iterator[tuple[set[int], list[_Use]]]:
    """Yields the ids of inputs that results replace, and where the results are made of them."""
    changes = _changes(graph, known)
    makers, readers = defaultdict[int, list[_Use]](list), defaultdict[int, list[int]](list)
    for op in graph.ops:
        for i, j in _passes(op):
            if (op.id, i) not in changes:
                makers[op.outputs[j].id].append((op, i, j))
                readers[op.inputs[i].id].append(op.outputs[j].id)
    for inputs, results in _pairs(graph, known):
        sources = {graph.inputs[i].id for i in inputs}
        ahead = _reached(sources, readers.__getitem__)
        ends = {graph.returned[j].id for j in results}
        back = _reached(ends, lambda v: [op.inputs[i].id for op, i, _ in makers[v]])
        uses = [use for v in sorted(ahead & back) for use in makers[v] if use[0].inputs[use[1]].id in ahead]
        if uses:
            yield sources, uses


def _changes(graph: Graph, known: _Known) -> set[tuple[int, int]]:
    """Returns the operands, by operation and position, that are added to an input on the way to what replaces it.

    All inputs of its type that such an operand is made of must be known to be replaced, since the match may be wrong:
    where ``grads + 0.9 * momentum`` is matched with ``grads``, nothing replaces ``momentum``, which is the state.
    """
    replacing = {i: j for j, i in known.items() if i is not None}
    recast = {x.id: i for i, x in enumerate(graph.inputs)}  # by value, the input of which it is a view or a cast
    made_of = defaultdict[int, set[int]](set, {x.id: {i} for i, x in enumerate(graph.inputs)})  # by value, inputs
    candidates = list[tuple[Op, int, int]]()
    for op in graph.ops:
        for i, j in _passes(op):
            made_of[op.outputs[j].id] |= made_of[op.inputs[i].id]
        if op.name in _RECAST and op.inputs[0].id in recast:
            recast[op.outputs[0].id] = recast[op.inputs[0].id]
        for kept in {"add": (0, 1), "add_any": (0, 1), "sub": (0,)}.get(op.name, ()):
            source = recast.get(op.inputs[kept].id)
            if source in replacing:
                candidates.append((op, 1 - kept, source))
    readers, found = _readers(graph), set[tuple[int, int]]()
    for op, change, source in candidates:
        result = graph.returned[replacing[source]]
        inputs = made_of[op.inputs[change].id]
        alike = {i for i in inputs if (graph.inputs[i].shape, graph.inputs[i].dtype) == (result.shape, result.dtype)}
        if alike <= replacing.keys() and result.id in _reached([op.outputs[0].id], readers.__getitem__):
            found.add((op.id, change))
    return found


def _reached(starts: Iterable[int], neighbours: Callable[[int], Iterable[int]]) -> set[int]:
    found = set(starts)
    due = list(found)
    while due:
        new = set(neighbours(due.pop())) - found
        found |= new
        due += new
    return found
