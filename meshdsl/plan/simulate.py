"""The step simulated with communication beside computation: list scheduling of tasks on streams (Graham 1966).

A device computes one thing after the other, and so does every link send; each is a *stream*. A task takes one stream
for some time and begins when the tasks it waits for are over and its stream is free; of several that could begin, the
first in program order does. So a collective whose result is not needed yet runs beside the computation, and one that
the next operation needs delays it:

    compute  [ layer 0 ][ layer 1 ]......[ layer 2 ]
    link     [ gather 1 ][    gather 2    ]

``build_tasks`` turns a planned program into tasks. A graph becomes a *fragment*: its tasks, and the tasks that each of
its results waits for. A loop is its body's fragment once per iteration; iterations in the middle of a loop that
contains loops are taken as one, as long as all of them.

Transfers from and to the host's memory take the device's computation: nothing is hidden behind them, or they behind it.

While a collective runs beside it, the computation takes longer by the topology's ``contention``. Where collectives run
beside products alone (``beside_products``), they wait while anything else is computed, and one after the other while
nothing is.

The topology says what the system that runs the step makes of this. Our own programs are limited by their compiler. A
collective runs beside the computation of its own loop body, or of its own piece of the program between two loops, and
only if it is of a kind that the compiler makes ``asynchronous``; any other takes the device's computation and its link
at once. Loops that the plan prefetches send beside other iterations, but for the first and the last one
(``meshdsl.ir.prefetch``). A ring is a loop whose iterations are a hop beside a part of its products
(``meshdsl.ir.rings``). Where the compiler ``merges`` products that read the same operand, all of them wait for the
operands of each (``meshdsl.plan.merged``).

Other systems hide more (``across_loops``). There, a *stack*, a value that a loop reads or writes slice by slice
(the parameters of layers, their gradients), is known slice by slice: a slice is ready when its iteration is over, and a
collective on a stack is sent slice by slice, as systems do that send in buckets. So the next layer's parameters are
gathered beside this layer, and gradients are reduced while the backward pass goes on, wherever the plan has put the
collectives. Where a system sends collectives beside matrix products in ``pieces``, the operands and results of such a
product are cut into that many.

Reference: R. L. Graham, "Bounds for certain multiprocessing anomalies", Bell System Technical Journal 45, 1966.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple

from meshdsl.ir.graph import LOOPS, Graph, Literal, Op, TracedProgram, Value, walk
from meshdsl.ir.host import TO_DEVICE
from meshdsl.ir.loops import ABSENT, LoopPort, PortRole, loop_ports, split_operands
from meshdsl.ir.prefetch import PipelinedLoop
from meshdsl.ir.rewrite import values
from meshdsl.ir.rings import ProductParts, ProductRing, chosen_rings
from meshdsl.ir.solution import Bucket, Prefetch, Solution
from meshdsl.layouts.collective_cost import COLLECTIVES, slowest_link
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.reshard import ReshardStep
from meshdsl.plan.merged import merged_products
from meshdsl.plan.op_times import OpTimes
from meshdsl.plan.reasons import collectives_inside
from meshdsl.planner.costs.fusion import PRODUCTS, ends_fusion

COMPUTE = ""  # the stream of a device's computation; links have names
EXACT_ITERATIONS = 2  # iterations at either end of a loop of loops that are simulated one by one
MAX_ITERATIONS = 128  # groups of iterations into which the iterations of another loop are collected


NOTHING: Mapping[Any, int] = {}
# a value and the layout it is resharded to (the first one of a bucket), or an operation and which of its exchanges
Sent = tuple[int, Layout | int]


def simulated_seconds(program: TracedProgram, solution: Solution, times: OpTimes) -> float:
    """Seconds of one step with communication hidden behind independent compute."""
    topology = solution.mesh.topology
    spans = list_schedule(build_tasks(program, solution, times), topology.contention, topology.beside_products)
    return max((span.end for span in spans), default=0.0)


def simulate(program: TracedProgram, solution: Solution, times: OpTimes) -> tuple[float, dict[Sent, float]]:
    """Seconds of one step, and per collective those of them in which the device waits for it and computes nothing."""
    tasks, topology = build_tasks(program, solution, times), solution.mesh.topology
    spans = list_schedule(tasks, topology.contention, topology.beside_products)
    exposed: dict[Sent, float] = defaultdict(float)
    for task, seconds in zip(tasks, exposed_seconds(tasks, spans), strict=True):
        if task.sent is not None:
            exposed[task.sent] += seconds
    return max((span.end for span in spans), default=0.0), exposed


# ---- List scheduling -------------------------------------------------------------------------------------------------


class SimulatedTask(NamedTuple):
    """Something that occupies a stream for some time.

    Args:
      stream: ``COMPUTE``, or the name of a link.
      seconds: how long it takes.
      after: positions of the tasks that have to be over before it begins.
      follows: its priority is that of the last task that it waits for, not its own position.
      sent: the collective that it is, or is a part of.
      link: the stream of a collective that nothing is computed beside, which takes ``COMPUTE`` and this one.
      product: it is a matrix product or a convolution, or several.
    """

    stream: str
    seconds: float
    after: frozenset[int] = frozenset()
    follows: bool = False
    sent: Sent | None = None
    link: str = COMPUTE
    product: bool = False


class TaskSpan(NamedTuple):
    """When a task begins and ends, in seconds from the beginning of the step."""

    begin: float
    end: float


def list_schedule(
    tasks: Sequence[SimulatedTask], contention: float = 0.0, beside_products: bool = False
) -> list[TaskSpan]:
    """When each task runs; a task may only wait for tasks in front of it.

    Args:
      contention: by which part of its time computation takes longer while a collective runs beside it.
      beside_products: collectives run beside products alone: they wait while anything else is computed, and where
        nothing is, one is sent after the other.
    """
    consumers: list[list[int]] = [[] for _ in tasks]
    missing = [len(task.after) for task in tasks]
    for i, task in enumerate(tasks):
        for other in task.after:
            consumers[other].append(i)
    priority = _priorities(tasks)
    taken = [{task.stream, task.link or task.stream} for task in tasks]
    ready: dict[str, list[tuple[int, int]]] = {task.stream: [] for task in tasks}
    running: list[tuple[float, int, int]] = []  # when a task is over, the task, and the number of this estimate
    estimates = [0] * len(tasks)
    busy: set[str] = set()
    begins, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    beside, pace, sending = 0, _Pace(contention), _Sending()

    def begin(now: float, stream: str) -> None:
        nonlocal beside
        needed = taken[ready[stream][0][1]] if ready[stream] else {stream}
        if ready[stream] and not needed & busy:
            _, i = heappop(ready[stream])
            busy.update(needed)
            begins[i] = now
            heappush(running, (now + tasks[i].seconds, i, 0))
            if _is_beside(tasks[i]):
                beside += 1
                sending.left[i] = tasks[i].seconds, now
            elif _is_computation(tasks[i]):
                pace.begin(i, tasks[i].seconds, now)

    for i, task in enumerate(tasks):
        if not missing[i]:
            heappush(ready[task.stream], (priority[i], i))
    now, touched = 0.0, set(ready)
    while True:
        for stream in sorted(touched):
            begin(now, stream)
        if contention and (end := pace.change(beside > 0, now)) is not None:
            estimates[pace.task] += 1
            heappush(running, (end, pace.task, estimates[pace.task]))
        if beside_products and not (pace.task >= 0 and tasks[pace.task].product):
            waiting = sorted(sending.left)[COMPUTE not in busy :]
        else:
            waiting = []
        for i, end in sending.change(waiting, now):
            estimates[i] += 1
            heappush(running, (end, i, estimates[i]))
        while running and running[0][2] != estimates[running[0][1]]:
            heappop(running)
        if not running:
            return list(map(TaskSpan, begins, ends))
        now, touched = running[0][0], {COMPUTE} & ready.keys()  # a collective may wait for its link there
        while running and running[0][0] == now:
            _, i, number = heappop(running)
            if number != estimates[i]:
                continue
            ends[i] = now
            busy -= taken[i]
            touched |= taken[i] & ready.keys()
            beside -= _is_beside(tasks[i])
            sending.left.pop(i, None)
            if _is_computation(tasks[i]):
                pace.end()
            for consumer in consumers[i]:
                missing[consumer] -= 1
                if not missing[consumer]:
                    heappush(ready[tasks[consumer].stream], (priority[consumer], consumer))
                    touched.add(tasks[consumer].stream)


class _Pace:
    """How fast the computation goes: slower while collectives run beside it."""

    def __init__(self, contention: float) -> None:
        self.contention, self.task = contention, -1
        self._left = self._since = 0.0  # seconds of undisturbed computation that were left at a time
        self._slowed = False

    def begin(self, task: int, seconds: float, now: float) -> None:
        self.task, self._left, self._since, self._slowed = task, seconds, now, False

    def end(self) -> None:
        self.task = -1

    def change(self, slowed: bool, now: float) -> float | None:
        """When the task is over if it is slowed down from now on, or no longer; None if nothing changes."""
        if self.task < 0 or slowed == self._slowed:
            return None
        self._left -= (now - self._since) / self._factor
        self._since, self._slowed = now, slowed
        return now + self._left * self._factor

    @property
    def _factor(self) -> float:
        return 1 + self.contention * self._slowed


class _Sending:
    """Collectives that are sent, some of which wait.

    Attributes:
      left: per task, the seconds that were left of it at a time.
    """

    def __init__(self) -> None:
        self.left: dict[int, tuple[float, float]] = {}
        self._waiting = frozenset[int]()

    def change(self, waiting: Iterable[int], now: float) -> list[tuple[int, float]]:
        """Tasks that wait from now on, or go on, and when they are over: never, as long as they wait."""
        before, self._waiting = self._waiting, frozenset(waiting)
        found = []
        for i in sorted(before ^ self._waiting):
            if i in self._waiting:
                seconds, since = self.left[i]
                self.left[i] = seconds - (now - since), now
                found.append((i, inf))
            elif i in self.left:
                seconds, _ = self.left[i]
                self.left[i] = seconds, now
                found.append((i, now + seconds))
        return found


def _is_computation(task: SimulatedTask) -> bool:
    return task.stream == COMPUTE and task.sent is None


def _is_beside(task: SimulatedTask) -> bool:
    """Whether a task is a collective that computation may run beside."""
    return task.stream != COMPUTE


def exposed_seconds(tasks: Sequence[SimulatedTask], spans: Sequence[TaskSpan]) -> list[float]:
    """Per task, the seconds in which it runs and nothing is computed; tasks that run at the same time share them."""
    found, running, computing, last = [0.0] * len(tasks), set[int](), 0, 0.0
    times = [(time, time == span.begin, i) for i, span in enumerate(spans) if span.begin < span.end for time in span]
    for now, starts, i in sorted(times):
        if not computing:
            for other in running:
                found[other] += (now - last) / len(running)
        last = now
        if _is_computation(tasks[i]):
            computing += 1 if starts else -1
        elif starts:
            running.add(i)
        else:
            running.discard(i)
    return found


def _priorities(tasks: Sequence[SimulatedTask]) -> list[int]:
    """Per task, its place in the order in which ready tasks begin."""
    priority = list(range(len(tasks)))
    for i, task in enumerate(tasks):
        if task.follows and task.after:
            priority[i] = max(priority[other] for other in task.after)
    return priority


# ---- Stacks: values that are known slice by slice --------------------------------------------------------------------

Pair = tuple[Value, Value]


def stacks(graph: Graph) -> set[int]:
    """Ids of the values, in bodies too, that are known slice by slice along their first dim.

    These are the stacks that a scan reads or writes, a cast or a sum of stacks, and the value that a stack is inside or
    outside of a surrounding loop. Another value whose first dim happens to be as long (48 sequences beside 48 layers)
    is none.
    """
    rest = [v.id for _, op in walk(graph) for v in _sliced_by(op)]
    related = _related(graph) if rest else {}
    found = set[int]()
    while rest:
        v = rest.pop()
        if v not in found:
            found.add(v)
            rest += related.get(v, ())
    return found


def _sliced_by(op: Op) -> list[Value]:
    """The stacks that a scan reads and writes slice by slice."""
    ports = [port for port in loop_ports(op) if port.stacked]
    read = values(op.inputs[port.operand] for port in ports if port.operand != ABSENT)
    return [*read, *(op.outputs[port.result] for port in ports if port.result != ABSENT)]


def _related(graph: Graph) -> dict[int, set[int]]:
    """Per value id, the values that are stacks if it is."""
    related: dict[int, set[int]] = defaultdict(set)
    for _, op in walk(graph):
        for a, b in _pairs(op):
            if a.shape and b.shape and a.shape[0] == b.shape[0]:
                related[a.id].add(b.id)
                related[b.id].add(a.id)
    return related


def _pairs(op: Op) -> Iterator[Pair]:
    """Values that are stacks together, if their first dims are equally long."""
    if op.bodies:
        for port in loop_ports(op):
            if not port.stacked and port.role is not PortRole.PREDICATE:
                yield from _port_pairs(op, port)
    elif not ends_fusion(op.name) and not reorders_slices(op):
        operands = list(values(op.inputs))
        yield from ((v, result) for v in operands for result in op.outputs)


def _port_pairs(op: Op, port: LoopPort) -> Iterator[Pair]:
    """The operand of a loop with the inputs of bodies, and the values that bodies return with the result."""
    if port.operand != ABSENT and isinstance(outer := op.inputs[port.operand], Value):
        yield from ((outer, op.bodies[body].inputs[i]) for body, i in port.inputs)
    for body, j in port.outputs:
        if isinstance(returned := op.bodies[body].returned[j], Value):
            yield returned, op.outputs[port.result]


def reorders_slices(op: Op) -> bool:
    """Whether slice ``i`` of the result does not come from slice ``i`` of the operand."""
    return op.name == "rev" or (op.name == "transpose" and op.params["permutation"][:1] != (0,))


# ---- From a program to tasks -----------------------------------------------------------------------------------------

Refs = frozenset[int]  # positions of tasks; a negative number refers to an input of the fragment, or a slice of it
Slices = tuple[Refs, ...]  # what a value waits for: one entry for the whole value, or one per slice or piece
_INPUT_REFS = 1 << 20  # references that belong to each input: 0 for the whole value, then one per slice
_READY: Slices = (frozenset(),)


@dataclass(frozen=True)
class TaskFragment:
    """The tasks of a graph, and what each of its results waits for; it is inserted wherever the graph runs."""

    tasks: tuple[SimulatedTask, ...]
    results: tuple[Slices, ...]


def build_tasks(program: TracedProgram, solution: Solution, times: OpTimes) -> list[SimulatedTask]:
    """The tasks of a whole step, in program order."""
    fragment = _TaskBuilder(program, solution, times).fragment(program.graph)
    return [task._replace(after=frozenset([i for i in task.after if i >= 0])) for task in fragment.tasks]


class _TaskBuilder:
    """Builds the fragments of a program's graphs under one solution.

    Attributes:
      pieces: into how many pieces collectives beside matrix products are cut.
      stream: the slowest link of the axes that a collective uses.
      rings: per operation id of a product that runs in parts, or of what runs with it, its ring.
      inside: per operation id, the collectives of its local program, as (kind, stream, seconds).
      across_loops: whether collectives run beside other iterations, and beside loops.
      asynchronous: kinds of collectives that run beside computation.
      divides: whether anything in the program comes in slices or pieces.
      merges: bytes up to which products of the same operand are one; 0 if none are, as where anything is divided.
    """

    def __init__(self, program: TracedProgram, solution: Solution, times: OpTimes) -> None:
        self.solution, self.times = solution, times
        topology = solution.mesh.topology
        self.pieces, self.across_loops = topology.pieces, topology.across_loops
        self.asynchronous = topology.asynchronous
        self.stream = partial(slowest_link, mesh=solution.mesh)
        self.inside: dict[int, list[tuple[str, str, float]]] = {}
        for found in collectives_inside(program.graph, solution):
            self.inside.setdefault(found.op.id, []).append((found.kind, self.stream(found.axes), found.seconds))
        self._stacks = stacks(program.graph) if self.across_loops else set()
        self.divides = self.pieces > 1 or bool(self._stacks)
        self.merges = 0.0 if self.divides else topology.merges
        self._fragments: dict[int, TaskFragment] = {}
        self.buckets = {step: bucket for bucket in solution.buckets for step in bucket.steps}
        rings = chosen_rings(program.graph, solution)
        self.rings = {op.id: ring for ring in rings for op in ring.ops}

    def fragment(self, graph: Graph) -> TaskFragment:
        """The fragment of a graph, built once."""
        if id(graph) not in self._fragments:
            self._fragments[id(graph)] = _FragmentBuilder(self, graph).build()
        return self._fragments[id(graph)]

    def prefetched(self, op: Op) -> tuple[frozenset[Sent], frozenset[Sent]]:
        """The collectives that a scan sends one iteration ahead, and one behind, where the plan says so."""
        choice = None if self.across_loops else self.solution.prefetch.get(op.id)
        if choice is None:
            return frozenset(), frozenset()
        parts = Prefetch(ahead=choice.ahead), Prefetch(behind=choice.behind)
        ahead, behind = (PipelinedLoop.of(op, part, self.solution).steps for part in parts)
        return frozenset((v.id, step.after) for v, step in ahead), frozenset((v.id, step.after) for v, step in behind)

    def slice_count(self, value: Value) -> int:
        """The number of slices in which a value is known."""
        return value.shape[0] if value.id in self._stacks else 1


class _FragmentBuilder:
    """Builds the fragment of one graph.

    Attributes:
      tasks: the tasks so far.
      over: per task, tasks that are known to be over when it is, itself included.
      own: per value id, what the value waits for in its own layout.
      resharded: the same per value id and other layout.
      barrier: what every later task waits for, since a loop is over.
      begun: the first task since the last barrier.
    """

    def __init__(self, builder: _TaskBuilder, graph: Graph) -> None:
        self.builder, self.graph, self.solution = builder, graph, builder.solution
        self.tasks: list[SimulatedTask] = []
        self.over: list[Refs] = []
        self.own: dict[int, Slices] = {}
        self.resharded: dict[tuple[int, Layout], Slices] = {}
        self.barrier = frozenset[int]()
        self.begun = 0
        self.values = {v.id: v for v in (*graph.inputs, *(v for op in graph.ops for v in op.outputs))}
        for k, value in enumerate(graph.inputs):
            count = builder.slice_count(value)
            refs = range(1, count + 1) if count > 1 else (0,)
            self.own[value.id] = tuple(frozenset({-1 - k * _INPUT_REFS - i}) for i in refs)

    def build(self) -> TaskFragment:
        """Adds all operations; the results may need reshard steps too."""
        builder = self.builder
        for ops in merged_products(self.graph, self.solution, builder.merges, builder.rings):
            if len(ops) == 1:
                self._add(ops[0])
            else:
                self._add_merged(ops)
        results = tuple(self._operands(self.graph.ops[-1]))
        return TaskFragment(tuple(self.tasks), results)

    def _add(self, op: Op) -> None:
        if ring := self.builder.rings.get(op.id):
            if ring.products[0].op is op:
                self._add_ring(ring)
            return
        operands = self._operands(op)
        if op.bodies:
            results = _LOOPS[op.name](self, op, operands)
            self.own |= zip([v.id for v in op.outputs], results, strict=True)
        else:
            if op.name == TO_DEVICE and self.tasks:  # no earlier than the operation that reads it
                operands.append((frozenset({len(self.tasks) - 1}),))
            made = self._compute(op, operands)
            for v in op.outputs:
                self.own[v.id] = made

    def _add_merged(self, ops: Sequence[Op]) -> None:
        """Products that are one: it waits for the operands of all."""
        operands = [slices for op in ops for slices in self._operands(op)]
        seconds = sum(map(self.builder.times.compute_seconds, ops))
        made = self._divided(COMPUTE, seconds, operands, 1, product=True)
        self.own |= {v.id: made for op in ops for v in op.outputs}

    def _add_ring(self, ring: ProductRing) -> None:
        """The products of a ring: a loop of hops beside parts, with a part without a hop behind it or in front."""
        sent, stream, apart = ring.ring, self.builder.stream(ring.step.axes), not self.builder.across_loops
        fixed = ((x, uses) for each in ring.products for x, uses in self._fixed(each))
        state = [self._in_layout(x, layout) for x, layout in fixed]
        if ring.gathers:
            state.append(self._in_layout(ring.value, ring.step.before))
        seconds = self.builder.times.ring_part_seconds(ring)
        if apart:
            self._part()
        for passes, parts in ring.schedule:
            key, hop = (sent.value, sent.layout), list[Slices]()
            if passes:
                hop = [self._sent("collective-permute", stream, ring.hop, state, 1, key)]
            state = [*hop, self._divided(COMPUTE, parts * seconds, state, 1, separate=True, product=True)]
        if apart:
            self._part()
        made = (_union([refs for slices in state for refs in slices]),)
        for each in ring.products if ring.gathers else ():
            self.own[each.op.outputs[0].id] = made
        self.resharded[sent.value, sent.layout] = made
        self.own |= {v.id: made for op in ring.between for v in op.outputs}

    def _fixed(self, product: ProductParts) -> Iterator[tuple[Value, Layout]]:
        """The operands of a product that do not travel, with the layouts in which it reads them."""
        for i, x in enumerate(product.op.inputs):
            if i != product.port and isinstance(x, Value):
                yield x, self.solution.uses[product.op.id, i]

    def _operands(self, op: Op) -> list[Slices]:
        """What each operand waits for in the layout it is used in; a reshard step is sent when it is first needed."""
        own, uses, trees = self.own, self.solution.uses, self.solution.trees
        return [
            _READY if isinstance(x, Literal) else self._in_layout(x, uses[op.id, i]) if x.id in trees else own[x.id]
            for i, x in enumerate(op.inputs)
        ]

    def _in_layout(self, value: Value, layout: Layout) -> Slices:
        """What a value waits for in a layout."""
        own = self.solution.layouts[value.id]
        if layout is own or layout == own:
            return self.own[value.id]
        if (value.id, layout) not in self.resharded:
            if bucket := self.builder.buckets.get((value.id, layout)):
                self._send(bucket)
            else:
                step = self._step(value.id, layout)
                self.resharded[value.id, layout] = self.own[value.id] if step is None else self._reshard(value, step)
        return self.resharded[value.id, layout]

    def _step(self, value: int, layout: Layout) -> ReshardStep | None:
        return next((m for m in self.solution.trees.get(value, ()) if m.after == layout), None)

    def _send(self, bucket: Bucket) -> None:
        """A bucket: it waits for all that it sends, and all that it sends for it."""
        steps = [self._step(value, layout) for value, layout in bucket.steps]
        sources = [
            self._in_layout(self.values[v], m.before) for (v, _), m in zip(bucket.steps, steps, strict=True) if m
        ]
        stream = self.builder.stream(bucket.axes)
        sent = self._sent(bucket.kind, stream, bucket.seconds, sources, 1, bucket.steps[0])
        self.resharded |= dict.fromkeys(bucket.steps, sent)

    def _reshard(self, value: Value, step: ReshardStep) -> Slices:
        """A reshard step, slice by slice or piece by piece."""
        slices = self._in_layout(value, step.before)
        if step.kind not in COLLECTIVES:
            return self._divided(COMPUTE, step.seconds, [slices], len(slices))
        whole = len(slices) == 1 and self.builder.slice_count(value) == 1
        count = self.builder.pieces if whole else len(slices)
        sent = value.id, step.after
        return self._sent(step.kind, self.builder.stream(step.axes), step.seconds, [slices], count, sent)

    def _compute(self, op: Op, operands: Sequence[Slices]) -> Slices:
        """The exchanges of an operation's local program, then its computation."""
        builder, seconds = self.builder, self.builder.times.compute_seconds(op)
        count = self._common_slices(op, operands) if builder.divides else 1
        for i, (kind, stream, sent) in enumerate(builder.inside.get(op.id, ())):
            operands = [self._sent(kind, stream, sent, operands, count, (op.id, i))]
        if builder.divides and self._in_pieces(op, operands, count):
            return self._divided(COMPUTE, seconds, operands, builder.pieces, separate=True, product=True)
        return self._divided(COMPUTE, seconds, operands, count, product=op.name in PRODUCTS)

    def _common_slices(self, op: Op, operands: Sequence[Slices]) -> int:
        """The number of slices in which an operation computes, each slice of its results from the same slice."""
        counts = {self.builder.slice_count(v) for v in op.outputs} | {len(s) for s in operands if len(s) > 1}
        whole = op.phase == "optimizer" or ends_fusion(op.name) or reorders_slices(op)
        return 1 if whole or len(counts) != 1 else counts.pop()

    def _in_pieces(self, op: Op, operands: Sequence[Slices], count: int) -> bool:
        """Whether the operation is a matrix product beside a collective that is sent in pieces."""
        sliced = count > 1 or any(self.builder.slice_count(v) > 1 for v in op.outputs)
        if self.builder.pieces == 1 or op.name not in PRODUCTS or sliced:
            return False
        sent = any(step.kind in COLLECTIVES for v in op.outputs for step in self.solution.trees.get(v.id, ()))
        return sent or any(len(slices) == self.builder.pieces for slices in operands)

    def _sent(
        self, kind: str, stream: str, seconds: float, operands: Sequence[Slices], count: int, sent: Sent
    ) -> Slices:
        """A collective in ``count`` parts; one that is not asynchronous stops the computation."""
        stopped = kind not in self.builder.asynchronous
        link, stream = (stream, COMPUTE) if stopped else (COMPUTE, stream)
        return self._divided(stream, seconds, operands, count, sent=sent, link=link)

    def _divided(
        self,
        stream: str,
        seconds: float,
        operands: Sequence[Slices],
        count: int,
        separate: bool = False,
        sent: Sent | None = None,
        link: str = COMPUTE,
        product: bool = False,
    ) -> Slices:
        """``count`` tasks that share ``seconds``, each after its slice of the operands.

        Args:
          separate: they are not merged with the task before, since others may wait for one of them.
          sent: the collective that they are.
          link: as in ``SimulatedTask``.
          product: they are matrix products or convolutions.
        """
        if count == 1:
            after = _union([refs for slices in operands for refs in slices])
            return (self._task(SimulatedTask(stream, seconds, after, False, sent, link, product), separate),)
        waits = [_union([s[i] if len(s) == count else _union(s) for s in operands]) for i in range(count)]
        return tuple(
            self._task(SimulatedTask(stream, seconds / count, refs, True, sent, link, product), separate)
            for refs in waits
        )

    def _task(self, task: SimulatedTask, separate: bool) -> Refs:
        """Adds one task; the last one becomes longer instead if it waits for as much and nothing waits for it yet."""
        after = task.after
        if not task.seconds:
            return after
        after |= self.barrier
        here, over = len(self.tasks), self.over[-1] if self.over else frozenset()
        last = self.tasks[-1] if here else task
        apart = separate or not here or task.sent is not None or last.sent is not None or task.product != last.product
        if not apart and task.stream == last.stream == COMPUTE and after <= over:
            self.tasks[-1] = last._replace(seconds=last.seconds + task.seconds)
            return frozenset({here - 1})
        self.tasks.append(task._replace(after=after))
        self.over.append(after | over | {here} if here - 1 in after else after | {here})
        return frozenset({here})

    def insert(
        self, fragment: TaskFragment, inputs: Sequence[Slices], times: int = 1, moved: Mapping[Sent, int] = NOTHING
    ) -> list[Slices]:
        """Inserts a fragment for these inputs, each task ``times`` as long, and returns what its results wait for.

        Args:
          moved: collectives of other iterations, how many times as long; nothing here waits for them, nor they for it.
        """
        apart = not self.builder.across_loops
        if apart:
            self._part()
        first, barrier = len(self.tasks), self.barrier

        def here(refs: Refs) -> Refs:
            known = (i for i in refs if i < 0 or fragment.tasks[i].sent not in moved) if moved else refs
            return _union([frozenset({i + first}) if i >= 0 else _input(i, inputs) for i in known])

        for task in fragment.tasks:
            apart_from_all = task.sent is not None and task.sent in moved
            after = barrier if apart_from_all else here(task.after) | barrier
            count = moved[task.sent] if apart_from_all and task.sent is not None else times
            self.over.append(after | {len(self.tasks)})
            self.tasks.append(task._replace(seconds=task.seconds * count, after=after))
        if apart:
            self._part()
        return [tuple(map(here, slices)) for slices in fragment.results]

    def send(self, fragment: TaskFragment, sent: Collection[Sent]) -> None:
        """Adds collectives of a fragment alone: those in front of a loop and behind it."""
        self._part()
        for task in fragment.tasks:
            if task.sent in sent:
                self.over.append(self.barrier | {len(self.tasks)})
                self.tasks.append(task._replace(after=self.barrier))
        self._part()

    def _part(self) -> None:
        """Adds a task without duration that waits for all others, and that all later ones wait for."""
        if self.begun < len(self.tasks):
            after = frozenset(range(self.begun, len(self.tasks)))
            self.barrier = frozenset({len(self.tasks)})
            self.tasks.append(SimulatedTask(COMPUTE, 0.0, after))
            self.over.append(after | self.barrier)
            self.begun = len(self.tasks)


def _union(refs: Sequence[Refs]) -> Refs:
    return refs[0] if len(refs) == 1 else frozenset().union(*refs)


def _input(ref: int, inputs: Sequence[Slices]) -> Refs:
    """What a reference to an input of a fragment, or to a slice of it, waits for."""
    k, i = divmod(-1 - ref, _INPUT_REFS)
    return inputs[k][i - 1] if 0 < i <= len(inputs[k]) != 1 else _union(inputs[k])


# ---- Loops -----------------------------------------------------------------------------------------------------------


def _scan(into: _FragmentBuilder, op: Op, given: list[Slices]) -> list[Slices]:
    operands, length = split_operands(op, given), op.params["length"]
    fragment, carry = into.builder.fragment(op.bodies[0]), list(operands.carry)
    carries = len(carry)
    stacked: list[list[Refs]] = [[frozenset()] * length for _ in op.outputs[carries:]]
    ahead, behind = into.builder.prefetched(op)
    if ahead:
        into.send(fragment, ahead)
    for group in _iteration_groups(op):
        places = [length - 1 - i for i in group] if op.params["reverse"] else list(group)
        slices = [(_union([s[i] for i in places]) if len(s) == length else _union(s),) for s in operands.slices]
        moved = dict.fromkeys(ahead, len(group) - (length - 1 in group))
        moved |= dict.fromkeys(behind, len(group) - (0 in group))
        made = into.insert(fragment, [*operands.consts, *carry, *slices], len(places), moved)
        carry = made[:carries]
        for stack, one in zip(stacked, made[carries:], strict=True):
            for i in places:
                stack[i] = _union(one)
    if behind:
        into.send(fragment, behind)
    if not into.builder.across_loops:
        return [*carry, *((_union(stack),) for stack in stacked)]
    return [*carry, *map(tuple, stacked)]


def _iteration_groups(op: Op) -> Iterator[Sequence[int]]:
    """The iterations of a scan; those of a group are taken as one that is as long as all of them."""
    length, nested = op.params["length"], any(inner.name in LOOPS for inner in op.bodies[0].ops)
    if not nested or length <= 2 * EXACT_ITERATIONS + 1:
        size = max(1, -(-length // MAX_ITERATIONS))
        yield from (range(i, min(i + size, length)) for i in range(0, length, size))
        return
    yield from ([i] for i in range(EXACT_ITERATIONS))
    yield range(EXACT_ITERATIONS, length - EXACT_ITERATIONS)
    yield from ([i] for i in range(length - EXACT_ITERATIONS, length))


def _while(into: _FragmentBuilder, op: Op, given: list[Slices]) -> list[Slices]:
    operands, iterations = split_operands(op, given), op.bodies[1].trips // max(1, into.graph.trips)
    condition, body = map(into.builder.fragment, op.bodies)
    into.insert(condition, [*operands.condition, *operands.carry], max(1, iterations))
    if not iterations:  # expected not to run
        return [*operands.carry]
    return into.insert(body, [*operands.consts, *operands.carry], iterations)


def _cond(into: _FragmentBuilder, op: Op, given: list[Slices]) -> list[Slices]:
    """All branches one after the other, as the plan counts them."""
    operands = split_operands(op, given).consts
    made = [into.insert(into.builder.fragment(body), operands) for body in op.bodies]
    return [(_union([refs for slices in results for refs in slices]),) for results in zip(*made, strict=True)]


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
