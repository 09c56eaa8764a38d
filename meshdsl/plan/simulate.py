"""A planned step as jobs on streams (see ``streams``), so that what may overlap does.

A graph becomes a *part*: its jobs, and what each of its results waits for. A loop is its body's part again and again;
trips in the middle of a loop around others are taken as one that is as long as all of them. What is stacked over the
trips of a loop (the parameters of layers, their gradients) is known slice by slice: a slice is ready when the trip
that makes it is over, and a collective on a stack is sent slice by slice, as systems do that send in buckets. So
gathers of the next layer's parameters run beside this layer, and gradients are reduced while the backward pass goes
on, wherever the plan put them. Where the topology says that collectives beside matrix products are sent in
``pieces``, what such a product reads or makes comes apart in as many.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from meshdsl.ir.graph import LOOPS, Graph, Literal, Op, TracedProgram, Value, walk
from meshdsl.ir.loops import ABSENT, LoopPort, PortRole, loop_ports, split_operands
from meshdsl.ir.rewrite import values
from meshdsl.ir.solution import Solution
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.reshard import ReshardStep
from meshdsl.plan.op_times import OpTimes
from meshdsl.plan.reasons import collectives_inside
from meshdsl.planner.costs.op_cost import PRODUCTS, ends_fusion

# ---- Overlap ---------------------------------------------------------------------------------------------------------


def simulated_seconds(program: TracedProgram, solution: Solution, work: OpTimes) -> float:
    """Seconds of a step in which collectives that nobody waits for run beside the computation."""
    return max(list_schedule(build_tasks(program, solution, work)), default=0.0)


# ---- Slices ----------------------------------------------------------------------------------------------------------
# Which values come apart in slices along their first dim: what loops read or stack trip by trip, and what is alike.
#
# The parameters of layers are read slice by slice by the loop over layers, their gradients stacked by it. A cast or a
# sum of stacks is a stack, and so is what a loop around hands to it whole. Another value whose first dim only happens
# to be as long (48 sequences beside 48 layers) is none.


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
    """The stacks that a scan reads and writes slice by slice."""
    ports = [port for port in loop_ports(op) if port.stacked]
    read = values(op.inputs[port.operand] for port in ports if port.operand != ABSENT)
    return [*read, *(op.outputs[port.result] for port in ports if port.result != ABSENT)]


def _alike(op: Op) -> Iterator[Pair]:
    """Values that are stacks together, if their first dims are as long."""
    if op.bodies:
        for port in loop_ports(op):
            if not port.stacked and port.role is not PortRole.PREDICATE:
                yield from _pairs(op, port)
    elif not ends_fusion(op.name) and not turns(op):
        read = list(values(op.inputs))
        yield from ((v, made) for v in read for made in op.outputs)


def _pairs(op: Op, port: LoopPort) -> Iterator[Pair]:
    """The operand of a loop and what the bodies take of it, what they return and the result."""
    if port.operand != ABSENT and isinstance(outer := op.inputs[port.operand], Value):
        yield from ((outer, op.bodies[body].inputs[i]) for body, i in port.inputs)
    for body, j in port.outputs:
        if isinstance(returned := op.bodies[body].returned[j], Value):
            yield returned, op.outputs[port.result]


# ---- Streams ---------------------------------------------------------------------------------------------------------
# Jobs on streams: a device computes one thing after the other, and every link sends one thing after the other.
#
# A job begins when what it waits for is over and its stream is free; of several that could begin, the first in the
# order goes first. So a collective that nobody waits for yet runs beside the computation, and one that the next
# operation needs stands in its way. (List scheduling: Graham 1966.)


COMPUTE = ""


class SimulatedTask(NamedTuple):
    """Something that takes a stream for some time.

    Args:
      stream: ``COMPUTE``, or the name of a link.
      seconds: that it takes.
      after: jobs that must be over, by their position.
      follows: it is due right behind the last job that it waits for, not at its own position.
    """

    stream: str
    seconds: float
    after: frozenset[int] = frozenset()
    follows: bool = False


def list_schedule(jobs: Sequence[SimulatedTask]) -> list[float]:
    """When each job is over, in seconds from the begin; a job only waits for jobs in front of it."""
    readers: list[list[int]] = [[] for _ in jobs]
    missing = [len(job.after) for job in jobs]
    for i, job in enumerate(jobs):
        for other in job.after:
            readers[other].append(i)
    due = _order(jobs)
    ready: dict[str, list[tuple[int, int]]] = {job.stream: [] for job in jobs}
    running: list[tuple[float, int]] = []
    busy: set[str] = set()
    ends = [0.0] * len(jobs)

    def begin(now: float, stream: str) -> None:
        if ready[stream] and stream not in busy:
            _, i = heappop(ready[stream])
            busy.add(stream)
            heappush(running, (now + jobs[i].seconds, i))

    for i, job in enumerate(jobs):
        if not missing[i]:
            heappush(ready[job.stream], (due[i], i))
    for stream in ready:
        begin(0.0, stream)
    while running:
        now = running[0][0]
        touched: set[str] = set()
        while running and running[0][0] == now:
            _, i = heappop(running)
            ends[i] = now
            busy.discard(jobs[i].stream)
            touched.add(jobs[i].stream)
            for reader in readers[i]:
                missing[reader] -= 1
                if not missing[reader]:
                    heappush(ready[jobs[reader].stream], (due[reader], reader))
                    touched.add(jobs[reader].stream)
        for stream in sorted(touched):
            begin(now, stream)
    return ends


def _order(jobs: Sequence[SimulatedTask]) -> list[int]:
    """Where each job is due."""
    due = list(range(len(jobs)))
    for i, job in enumerate(jobs):
        if job.follows and job.after:
            due[i] = max(due[other] for other in job.after)
    return due


# ---- Jobs ------------------------------------------------------------------------------------------------------------


Refs = frozenset[int]  # jobs by position; below 0, what an input waits for
Slices = tuple[Refs, ...]  # one for a value as a whole, or one per slice of its first dim
_SLICES = 1 << 20
_AROUND, _MOST = 2, 128  # trips at either end of a loop of loops that are told apart, and trips of another
NOTHING: Slices = (frozenset(),)


@dataclass(frozen=True)
class StepPart:
    """The jobs of a graph and what its results wait for."""

    jobs: tuple[SimulatedTask, ...]
    results: tuple[Slices, ...]


def build_tasks(program: TracedProgram, solution: Solution, work: OpTimes) -> list[SimulatedTask]:
    """The jobs of a whole step."""
    part = _Maker(program, solution, work).part(program.graph)
    return [
        SimulatedTask(stream, s, frozenset([i for i in after if i >= 0]), due) for stream, s, after, due in part.jobs
    ]


class _Maker:
    """Makes parts of graphs under one solution."""

    def __init__(self, program: TracedProgram, solution: Solution, work: OpTimes) -> None:
        self.solution, self.work = solution, work
        self.streams, self.pieces = _streams(solution.mesh), solution.mesh.topology.pieces
        self.inside: dict[int, list[tuple[str, float]]] = {}
        for found in collectives_inside(program.graph, solution):
            self.inside.setdefault(found.op.id, []).append((self.stream(found.axes), found.seconds))
        self._stacks = stacks(program.graph)
        self.apart = self.pieces > 1 or bool(self._stacks)  # whether anything comes apart
        self._parts: dict[int, StepPart] = {}

    def stream(self, axes: Sequence[str]) -> str:
        """The slowest link that a collective runs over."""
        return max((self.streams[axis] for axis in axes), key=lambda s: s[0])[1]

    def part(self, graph: Graph) -> StepPart:
        """The part of a graph, made once."""
        if id(graph) not in self._parts:
            self._parts[id(graph)] = _TaskBuilder(self, graph).part()
        return self._parts[id(graph)]

    def slices(self, value: Value) -> int:
        """Into how many slices a value comes apart."""
        return value.shape[0] if value.id in self._stacks else 1


class _TaskBuilder:
    """One graph on its way to being a part."""

    def __init__(self, maker: _Maker, graph: Graph) -> None:
        self.maker, self.graph, self.solution = maker, graph, maker.solution
        self.jobs: list[SimulatedTask] = []
        self.over: list[Refs] = []  # per job, what is over when it is, itself too
        self.own: dict[int, Slices] = {}  # by value id, as it lies by itself
        self.moved: dict[tuple[int, Layout], Slices] = {}
        for k, value in enumerate(graph.inputs):
            count = maker.slices(value)
            refs = range(1, count + 1) if count > 1 else (0,)
            self.own[value.id] = tuple(frozenset({-1 - k * _SLICES - i}) for i in refs)

    def part(self) -> StepPart:
        """All of it."""
        for op in self.graph.ops[:-1]:
            self.add(op)
        results = tuple(self.given(self.graph.ops[-1]))  # may need moves
        return StepPart(tuple(self.jobs), results)

    def given(self, op: Op) -> list[Slices]:
        """What each operand waits for, in the layout it is read in; moves are sent when first needed."""
        own, uses, moved = self.own, self.solution.uses, self.solution.trees
        return [
            NOTHING if isinstance(x, Literal) else self.at(x, uses[op.id, i]) if x.id in moved else own[x.id]
            for i, x in enumerate(op.inputs)
        ]

    def at(self, value: Value, layout: Layout) -> Slices:
        """What a value waits for in a layout."""
        own = self.solution.layouts[value.id]
        if layout is own or layout == own:
            return self.own[value.id]
        if (value.id, layout) not in self.moved:
            move = next((m for m in self.solution.trees.get(value.id, ()) if m.after == layout), None)
            self.moved[value.id, layout] = self.own[value.id] if move is None else self.send(value, move)
        return self.moved[value.id, layout]

    def send(self, value: Value, move: ReshardStep) -> Slices:
        """A move, slice by slice or piece by piece."""
        slices = self.at(value, move.before)
        if move.kind not in COLLECTIVES:
            return self.each(COMPUTE, move.seconds, [slices], len(slices))
        whole = len(slices) == 1 and self.maker.slices(value) == 1
        return self.each(
            self.maker.stream(move.axes), move.seconds, [slices], self.maker.pieces if whole else len(slices)
        )

    def add(self, op: Op) -> None:
        """One operation."""
        given = self.given(op)
        if op.bodies:
            self.own |= zip([v.id for v in op.outputs], _LOOPS[op.name](self, op, given), strict=True)
        else:
            made = self.compute(op, given)
            for v in op.outputs:
                self.own[v.id] = made

    def compute(self, op: Op, given: Sequence[Slices]) -> Slices:
        """The work of an operation, after what it exchanges."""
        maker, seconds = self.maker, self.maker.work.alone(op)
        count = self.alike(op, given) if maker.apart else 1
        for stream, sent in maker.inside.get(op.id, ()):
            given = [self.each(stream, sent, given, count)]
        if maker.apart and self.in_pieces(op, given, count):
            return self.each(COMPUTE, seconds, given, maker.pieces, apart=True)
        return self.each(COMPUTE, seconds, given, count)

    def alike(self, op: Op, given: Sequence[Slices]) -> int:
        """In how many slices an operation works: those of what it makes, if it makes each of the same slice."""
        counts = {self.maker.slices(v) for v in op.outputs} | {len(s) for s in given if len(s) > 1}
        whole = op.phase == "optimizer" or ends_fusion(op.name) or turns(op)
        return 1 if whole or len(counts) != 1 else counts.pop()

    def in_pieces(self, op: Op, given: Sequence[Slices], count: int) -> bool:
        """Whether it is a product beside a collective that is sent in pieces."""
        sliced = count > 1 or any(self.maker.slices(v) > 1 for v in op.outputs)
        if self.maker.pieces == 1 or op.name not in PRODUCTS or sliced:
            return False
        sent = any(move.kind in COLLECTIVES for v in op.outputs for move in self.solution.trees.get(v.id, ()))
        return sent or any(len(slices) == self.maker.pieces for slices in given)

    def each(self, stream: str, seconds: float, given: Sequence[Slices], count: int, apart: bool = False) -> Slices:
        """A job for each of so many slices of what is given; ``apart``: somebody may wait for one of them."""
        if count == 1:
            return (self.job(stream, seconds, _union([refs for slices in given for refs in slices]), False, apart),)
        waits = [_union([s[i] if len(s) == count else _union(s) for s in given]) for i in range(count)]
        return tuple(self.job(stream, seconds / count, refs, True, apart) for refs in waits)

    def job(self, stream: str, seconds: float, after: Refs, follows: bool, apart: bool) -> Refs:
        """One job, or more of the last one, if that waits for as much already and nobody waits for it yet."""
        if not seconds:
            return after
        here, over = len(self.jobs), self.over[-1] if self.over else frozenset()
        if here and not apart and stream == self.jobs[-1].stream == COMPUTE and after <= over:
            job = self.jobs[-1]
            self.jobs[-1] = SimulatedTask(COMPUTE, job.seconds + seconds, job.after, job.follows)
            return frozenset({here - 1})
        self.jobs.append(SimulatedTask(stream, seconds, after, follows))
        self.over.append(after | over | {here} if here - 1 in after else after | {here})
        return frozenset({here})

    def run(self, part: StepPart, given: Sequence[Slices], times: int = 1) -> list[Slices]:
        """A part for these inputs, as long as so many of it."""
        first = len(self.jobs)

        def here(refs: Refs) -> Refs:
            return _union([frozenset({i + first}) if i >= 0 else _input(i, given) for i in refs])

        for job in part.jobs:
            after = here(job.after)
            self.over.append(after | {len(self.jobs)})
            self.jobs.append(SimulatedTask(job.stream, job.seconds * times, after, job.follows))
        return [tuple(map(here, slices)) for slices in part.results]


def _scan(run: _TaskBuilder, op: Op, given: list[Slices]) -> list[Slices]:
    operands, length = split_operands(op, given), op.params["length"]
    part, carry = run.maker.part(op.bodies[0]), list(operands.carry)
    carries = len(carry)
    stacked: list[list[Refs]] = [[frozenset()] * length for _ in op.outputs[carries:]]
    for trips in _trips(op):
        places = [length - 1 - i for i in trips] if op.params["reverse"] else list(trips)
        slices = [(_union([s[i] for i in places]) if len(s) == length else _union(s),) for s in operands.slices]
        made = run.run(part, [*operands.consts, *carry, *slices], len(places))
        carry = made[:carries]
        for stack, one in zip(stacked, made[carries:], strict=True):
            for i in places:
                stack[i] = _union(one)
    return [*carry, *map(tuple, stacked)]


def _trips(op: Op) -> Iterator[Sequence[int]]:
    """The trips of a loop, those that are taken as one together."""
    length, nested = op.params["length"], any(inner.name in LOOPS for inner in op.bodies[0].ops)
    if not nested or length <= 2 * _AROUND + 1:
        size = max(1, -(-length // _MOST))
        yield from (range(i, min(i + size, length)) for i in range(0, length, size))
        return
    yield from ([i] for i in range(_AROUND))
    yield range(_AROUND, length - _AROUND)
    yield from ([i] for i in range(length - _AROUND, length))


def _while(run: _TaskBuilder, op: Op, given: list[Slices]) -> list[Slices]:
    operands, trips = split_operands(op, given), max(1, op.bodies[1].trips // run.graph.trips)
    run.run(run.maker.part(op.bodies[0]), [*operands.condition, *operands.carry], trips)
    return run.run(run.maker.part(op.bodies[1]), [*operands.consts, *operands.carry], trips)


def _cond(run: _TaskBuilder, op: Op, given: list[Slices]) -> list[Slices]:
    """Every branch, as the plan counts them."""
    made = [run.run(run.maker.part(body), split_operands(op, given).consts) for body in op.bodies]
    return [(_union([refs for slices in results for refs in slices]),) for results in zip(*made, strict=True)]


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}


def _union(refs: Sequence[Refs]) -> Refs:
    return refs[0] if len(refs) == 1 else frozenset().union(*refs)


def _input(ref: int, given: Sequence[Slices]) -> Refs:
    """What a reference to an input, or to a slice of it, stands for."""
    k, i = divmod(-1 - ref, _SLICES)
    return given[k][i - 1] if 0 < i <= len(given[k]) != 1 else _union(given[k])


def _streams(mesh: Mesh) -> dict[str, tuple[float, str]]:
    """Per axis, how slow its link is, and the link's name: one for all axes that share a switch, else the axis'."""
    own, links = dict(mesh.topology.axes), mesh.topology.axis_links(mesh)
    return {
        name: (1 / link.bandwidth, name if name in own or link.torus else f"{link.bandwidth:g}")
        for name, link in links.items()
    }
