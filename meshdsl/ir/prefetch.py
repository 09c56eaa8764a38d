"""Software pipelining of loops over layers: which collectives of an iteration run beside another iteration's compute.

A scan reads slices of stacks (the parameters of a layer) and writes slices of stacks (its gradients). A collective on a
slice that is read depends on nothing that the loop computes, so it can be sent one iteration *ahead*; one that only
leaves as a slice is needed by nothing in the loop, so it can be sent one iteration *behind*:

    iteration       0                    1                    2                    3
    compute         [ layer 0 ]          [ layer 1 ]          [ layer 2 ]          [ layer 3 ]
    links   [g 0]   [ gather 1 ]         [ gather 2, red 0 ]  [ gather 3, red 1 ]  [ red 2 ]     [red 3]

What is ahead is carried from one iteration to the next as a *copy* of a value in another layout, and what is behind as
the value before its collectives: the second buffer. Every collective is still sent once per iteration, so its bytes and
their number are those of the plan without.

``PipelinedLoop.of`` works out what a choice (``Prefetch``) means for a loop. A value is *early* if it is computed from
one slice by operations on single elements or by views alone, such as a cast, a transpose, or the barrier in front of
recomputation; a copy of it is *sent* if a collective is on the way to it. Sent copies that the rest of the body reads
are carried. A *late* operation is one of that kind between the collectives of a value and a slice of a result.

Reference: M. Lam, "Software pipelining: an effective scheduling technique for VLIW machines", PLDI 1988.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from meshdsl.ir.graph import Graph, Op, Value, walk
from meshdsl.ir.host import hosted_values
from meshdsl.ir.index import producers
from meshdsl.ir.loops import PortRole, loop_ports
from meshdsl.ir.rewrite import value_ids, values
from meshdsl.ir.solution import Prefetch, Solution
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.reshard import ReshardStep, steps_to

_LEAST_LEFT = 2  # iterations that stay in the loop: compilers inline a loop of one
_CHEAP = frozenset(
    (
        *("reshape", "transpose", "squeeze", "expand_dims", "optimization_barrier", "constrain", "copy"),
        *("convert_element_type", "reduce_precision", "neg", "mul", "div", "add", "sub"),  # with literals alone
    )
)
_PARTS = ("slice", "dynamic_slice", "gather")  # compilers drop what only the rest of a peeled iteration's results needs
SentStep = tuple[Value, ReshardStep]


@dataclass(frozen=True)
class PipelinedLoop:
    """A scan with collectives ahead and behind.

    Args:
      early: operations in front of collectives on slices; they run one iteration ahead, ...
      moved: ... and those of them that read sent copies, by id, then alone.
      copies: the sent copies that the rest of the body reads, as (value, layout).
      late: operations behind collectives; they run one iteration behind.
      unreduced: the values that they and the slices of the results are made from.
      stacks: positions, among the values that the body returns, of these slices.
      ahead: the collectives of an iteration that are sent in the one before, with their values.
      behind: those that are sent in the one after.
    """

    early: tuple[Op, ...]
    moved: frozenset[int]
    copies: tuple[tuple[Value, Layout], ...]
    late: tuple[Op, ...]
    unreduced: tuple[Value, ...]
    stacks: tuple[int, ...]
    ahead: tuple[SentStep, ...]
    behind: tuple[SentStep, ...]

    @staticmethod
    def of(op: Op, choice: Prefetch, solution: Solution) -> "PipelinedLoop":
        """Returns what ``choice`` means for a scan."""
        body = op.bodies[0]
        ahead = _Ahead(body, choice.ahead, solution)
        late = [_LateChain.of(body, j, solution) for j in choice.behind]
        chains = [chain for chain in late if chain]
        ops = {id(each) for chain in chains for each in chain.ops}
        return PipelinedLoop(
            early=ahead.ops,
            moved=frozenset(ahead.moved),
            copies=ahead.copies,
            late=tuple(each for each in body.ops if id(each) in ops),
            unreduced=tuple(chain.value for chain in chains),
            stacks=tuple(choice.behind),
            ahead=_collectives_of(ahead.steps),
            behind=_collectives_of(sent for chain in chains for sent in chain.steps),
        )

    @property
    def steps(self) -> tuple[SentStep, ...]:
        """The collectives of an iteration that run beside the compute of others."""
        return (*self.ahead, *self.behind)

    def second_buffer(self, solution: Solution) -> int:
        """Returns the bytes that one device holds from an iteration to the next."""
        held = (*self.copies, *((value, solution.layouts[value.id]) for value in self.unreduced))
        sizes = solution.mesh.sizes_by_name
        return sum(int(prod(layout.local_shape(value.shape, sizes)) * value.itemsize) for value, layout in held)


def _collectives_of(steps: Iterable[SentStep]) -> tuple[SentStep, ...]:
    return tuple((value, step) for value, step in steps if step.kind in COLLECTIVES)


def pipelined_loops(graph: Graph, solution: Solution) -> dict[int, PipelinedLoop]:
    """Returns the loops of a program that send ahead or behind, by op id."""
    chosen = solution.prefetch
    return {op.id: PipelinedLoop.of(op, chosen[op.id], solution) for _, op in walk(graph) if op.id in chosen}


def prefetchable(graph: Graph, solution: Solution) -> dict[int, Prefetch]:
    """Returns all that loops can send ahead and behind, by op id, without the loops that are left as they are.

    Those are loops that are not scans, that are short or unrolled, inside of the user's shard_map, stack anything but
    plain numbers, have stacks in the host's memory, or results of which a part is read. A loop whose last carry nobody
    reads sends nothing ahead if its body sends anything else: behind the loop, compilers would drop collectives that
    only this carry needs.
    """
    scans = [(inside, op) for inside, op in walk(graph) if op.name == "scan"]
    hosted = hosted_values(graph)
    found = {
        op.id: _prefetch(inside, op, solution)
        for inside, op in scans
        if hosted.isdisjoint(value_ids((*op.inputs, *op.outputs)))
    }
    return {op: choice for op, choice in found.items() if choice}


def _prefetch(graph: Graph, op: Op, solution: Solution) -> Prefetch:
    if op.params.get("unroll", 1) != 1 or op.manual or not all(isinstance(v.dtype, np.dtype) for v in op.outputs):
        return Prefetch()
    if _is_read_in_part(graph, {value.id for value in op.outputs}):
        return Prefetch()
    body, left = op.bodies[0], op.params["length"] - _LEAST_LEFT
    slices = [i for port in loop_ports(op) if port.role is PortRole.SLICE for _, i in port.inputs]
    stacks = [j for port in loop_ports(op) if port.role is PortRole.STACK for _, j in port.outputs]
    ahead = tuple(i for i in slices if left >= 1 and _Ahead(body, (i,), solution).copies)
    early, enough = _Ahead(body, slices, solution).early, left >= 1 + bool(ahead)
    chains = ((j, _LateChain.of(body, j, solution)) for j in stacks if enough)
    choice = Prefetch(ahead, tuple(j for j, chain in chains if chain and chain.value.id not in early))
    read = {x.id for other in graph.ops for x in values(other.inputs)}
    if all(op.outputs[port.result].id in read for port in loop_ports(op) if port.role is PortRole.CARRY):
        return choice
    own = {(value.id, step) for value, step in PipelinedLoop.of(op, choice, solution).steps}
    return choice if own.issuperset(_collectives(body, solution)) else replace(choice, ahead=())


def _collectives(body: Graph, solution: Solution) -> Iterator[tuple[int, ReshardStep | None]]:
    """The collectives of a body and the bodies in it, with values; an operation that exchanges data has none."""
    for inside in (body, *(inner for _, op in walk(body) for inner in op.bodies)):
        for value in (*inside.inputs, *(v for op in inside.ops for v in op.outputs)):
            yield from ((value.id, step) for step in solution.trees.get(value.id, ()) if step.kind in COLLECTIVES)
        yield from ((op.id, None) for op in inside.ops if solution.exchanging(op.id))


def _is_cheap(op: Op) -> bool:
    return op.name in _CHEAP and not op.effects and len(tuple(values(op.inputs))) == 1 == len(op.outputs)


# ---- Ahead -----------------------------------------------------------------------------------------------------------


class _Ahead:
    """What is sent ahead if some slices are.

    Attributes:
      early: ids of the values that are computed from these slices alone.
      ops: early operations that collectives depend on.
      moved: ids of those that read sent copies.
      copies: sent copies that other operations read.
      steps: reshard steps on the way to sent copies.
    """

    def __init__(self, body: Graph, slices: Collection[int], solution: Solution) -> None:
        early, made = {body.inputs[i].id: body.inputs[i] for i in slices}, dict[int, Op]()
        for op in body.ops:
            if _is_cheap(op) and next(values(op.inputs)).id in early:
                early[op.outputs[0].id], made[op.outputs[0].id] = op.outputs[0], op
        sends = {v for v in early if any(step.kind in COLLECTIVES for step in solution.trees.get(v, ()))}
        for v in reversed(made):
            if v in sends:
                sends.add(next(values(made[v].inputs)).id)
        self.early, self.ops = frozenset(early), tuple(op for v, op in made.items() if v in sends)
        self.moved: set[int] = set()
        self.steps: list[SentStep] = []
        sent = set[tuple[int, Layout]]()
        for value in (x for v, x in early.items() if v in sends):  # in program order
            maker = made.get(value.id)
            if maker and any(read in sent for read, _ in _reads(maker, solution)):
                self.moved.add(maker.id)
                sent.add((value.id, solution.layouts[value.id]))
            for step in solution.trees.get(value.id, ()):
                if step.kind in COLLECTIVES or (value.id, step.before) in sent:
                    sent.add((value.id, step.after))
                    self.steps.append((value, step))
        inside = {op.id for op in self.ops}
        rest = (op for op in body.ops if op.id not in inside)
        found = {read: (x, read[1]) for op in rest for read, x in _reads(op, solution) if read in sent}
        self.copies = tuple(found.values())


def _reads(op: Op, solution: Solution) -> Iterator[tuple[tuple[int, Layout], Value]]:
    """The copies that an operation reads, by value id and layout, with their values."""
    for i, x in enumerate(op.inputs):
        if isinstance(x, Value):
            yield (x.id, solution.uses[op.id, i]), x


# ---- Behind ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LateChain:
    """The way of a value through collectives and cheap operations to a slice of a result.

    Args:
      value: in front of the first collective.
      ops: behind it.
      steps: reshard steps of ``value`` and of the results of ``ops``.
    """

    value: Value
    ops: tuple[Op, ...]
    steps: tuple[SentStep, ...]

    @staticmethod
    def of(body: Graph, position: int, solution: Solution) -> "_LateChain | None":
        """Returns the longest chain that ends in what the body returns at ``position``; None if there is none."""
        made = producers(body)
        reads = Counter(x.id for op in body.ops for x in values(op.inputs))
        x, reader, index = body.returned[position], body.ops[-1], position
        ops, steps, found = list[Op](), list[SentStep](), None
        while isinstance(x, Value) and x.id in made:
            path = _path(x, solution.uses[reader.id, index], solution)
            steps = [*((x, step) for step in path), *steps]
            if any(step.kind in COLLECTIVES for step in path) and _is_sent_once(body, x, reader, index, solution):
                found = _LateChain(x, tuple(ops), tuple(steps))
            reader = made[x.id]
            if not _is_cheap(reader) or reads[x.id] > 1:
                break
            ops = [reader, *ops]
            index, x = next((i, y) for i, y in enumerate(reader.inputs) if isinstance(y, Value))
        return found


def _is_read_in_part(graph: Graph, results: set[int]) -> bool:
    """Whether an operation reads a part of one of the values, or of what cheap operations make of it."""
    reached = set(results)
    for op in graph.ops:
        if any(x.id in reached for x in values(op.inputs)):
            if op.name in _PARTS:
                return True
            if _is_cheap(op):
                reached.update(value.id for value in op.outputs)
    return False


def _is_sent_once(body: Graph, value: Value, reader: Op, index: int, solution: Solution) -> bool:
    """Whether no other operation reads a copy of the value that a collective makes."""
    layouts = (
        solution.uses[op.id, i]
        for op in body.ops
        for i, x in enumerate(op.inputs)
        if x is value and (op.id, i) != (reader.id, index)
    )
    return not any(step.kind in COLLECTIVES for layout in layouts for step in _path(value, layout, solution))


def _path(value: Value, layout: Layout, solution: Solution) -> Sequence[ReshardStep]:
    """The reshard steps from the value's own layout to another one."""
    return list(steps_to(layout, solution.trees.get(value.id, ())))[::-1]
