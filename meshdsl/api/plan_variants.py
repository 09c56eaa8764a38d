"""Whether padding pays: the planner is asked.

A length is a candidate if it does not divide over the mesh but is long enough that the padding
is small, and if a matrix product or lookup works on it. The step is planned as it is written,
then with one candidate after the other padded, longest first; what does not make the plan
faster is undone. A split that the user stated inside the step cannot be had without padding, so
that comes first. A very large step is not planned again for a length that every mesh axis
divides by itself. The plan's notes say what was padded, what was not, and why.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from math import floor, log2

from meshdsl.errors import MemoryLimitError
from meshdsl.ir.graph import LOOPS, Graph, Op, TracedProgram, Value, walk
from meshdsl.ir.index import graph_index
from meshdsl.ir.rewrite import values
from meshdsl.ir.solution import Pins, Solution
from meshdsl.layouts.mesh import Mesh
from meshdsl.padding.min_cut import padded_length, padded_sizes, stated_sizes
from meshdsl.padding.rewrite import pad_program
from meshdsl.plan.build import build_plan
from meshdsl.plan.op_times import OpTimes
from meshdsl.plan.plan import Plan
from meshdsl.plan.reasons import Reasons
from meshdsl.plan.simulate import simulated_seconds
from meshdsl.planner.costs.reshard_cost import OverlapWindow
from meshdsl.planner.solve import SearchResult, solve
from meshdsl.util.runtime import Deadline, Submit, gc_paused, worker_pool
from meshdsl.util.text import seconds_text

# ---- Windows ---------------------------------------------------------------------------------------------------------
# How long independent computing there is between a value and whoever needs it first: its *window*.
#
# A collective on the value can run beside that much computing. Operations are taken in program order, one after the
# other, each as long as the plan computes in it:
#
#     a = x @ u          1 ms
#     b = y @ v          5 ms     the window of ``a`` is 5 ms
#     c = a + b
#
# What a loop reads slice by slice is needed, in the mean, when half of it is over, and what it stacks is ready then; a
# slice itself can be sent while the trip before runs. That is how systems hide communication: layers' parameters are
# gathered one layer ahead, gradients are reduced while the backward pass goes on.


def overlap_windows(program: TracedProgram, work: OpTimes) -> Mapping[int, float]:
    """Seconds per value id and trip; values that nobody reads are absent.

    Args:
      work: what computing takes in a plan.
    """
    made = _OverlapWindows(work)
    made.add(program.graph, {})
    return made.found


class _OverlapWindows:
    def __init__(self, work: OpTimes) -> None:
        self.work, self.found = work, dict[int, float]()
        self._lengths: dict[int, float] = {}

    def add(self, graph: Graph, ready: dict[int, float], late: Mapping[int, float] | None = None) -> None:
        """Note the windows of a graph's values, times counted from its begin.

        Args:
          ready: inputs that are not there just when it begins.
          late: results, by place, that are needed so long after its end.
        """
        now, start = 0.0, dict.fromkeys((v.id for v in graph.inputs), 0.0) | ready
        for op in graph.ops:
            length = self.length(op, graph.trips)
            for i, read in enumerate(op.inputs):
                if isinstance(read, Value):
                    self._read(read, now + self._wait(op, i, length, late or {}) - start[read.id])
            for i, value in enumerate(op.outputs):
                start[value.id] = now + (length / 2 if _stacks(op, i) else length)
            self._bodies(op)
            now += length

    def length(self, op: Op, trips: int) -> float:
        """Seconds of computing in one operation, on one trip of the graph it stands in."""
        if op.name not in LOOPS:
            return self.work.alone(op)
        if op.id not in self._lengths:
            self._lengths[op.id] = sum(self._trip(body) * body.trips / trips for body in op.bodies)
        return self._lengths[op.id]

    def _trip(self, body: Graph) -> float:
        return sum(self.length(op, body.trips) for op in body.ops)

    def _read(self, value: Value, window: float) -> None:
        self.found[value.id] = min(self.found.get(value.id, window), window)

    def _wait(self, op: Op, i: int, length: float, late: Mapping[int, float]) -> float:
        """How long after an operation begins its operand is needed."""
        if op.name == "return":
            return late.get(i, 0.0)
        return length / 2 if _slices(op, i) else 0.0

    def _bodies(self, op: Op) -> None:
        for body in op.bodies:
            trip, held = self._trip(body), _held(op, body)
            ahead = {v.id: -trip for i, v in enumerate(body.inputs) if i in held}
            stacks = {i: trip for i in range(len(body.returned)) if _stacks(op, i)}
            self.add(body, ahead, stacks)


def _slices(op: Op, i: int) -> bool:
    """Whether a loop reads an operand slice by slice."""
    return op.name == "scan" and i >= op.params["num_consts"] + op.params["num_carry"]


def _stacks(op: Op, i: int) -> bool:
    """Whether a loop makes a result slice by slice."""
    return op.name == "scan" and i >= op.params["num_carry"]


def _held(op: Op, body: Graph) -> set[int]:
    """Inputs of a loop's body that are there one trip ahead: all but carries."""
    if op.name == "scan":
        first = op.params["num_consts"]
        return set(range(len(body.inputs))) - set(range(first, first + op.params["num_carry"]))
    if op.name == "while":
        return set(range(op.params["cond_nconsts" if body is op.bodies[0] else "body_nconsts"]))
    return set()


# ---- Overlap ---------------------------------------------------------------------------------------------------------
# Planning for a step in which communication runs beside the computation.
#
# The planner's objective has one thing after the other. Here a collective that can hide behind independent computing
# costs only what sticks out of it: one that takes ``c`` seconds, of a value with a window of ``w``
# (``overlap_windows``), costs
#
#     max(0, c - w) + price * min(c, w)        0 <= price <= 1
#
# The links are busy also with what is hidden, and who waits for them waits longer: that is the price of a hidden
# second, which nobody knows beforehand (it is a Lagrange multiplier of "no link sends for longer than the step takes").
# So several prices are tried, and of all plans found the one is taken whose simulated step is the shortest
# (``plan.simulated_seconds``), the one that was found without any of this among them: the simulation lets every link
# send one thing after the other, so nothing is hidden twice.


_PRICES = (0.5, 0.25, 0.0)
_ROUNDS = 2  # the windows are those of the best plan so far
_BETTER = 1 - 1e-9


def plan_with_overlap(found: SearchResult) -> tuple[SearchResult, str]:
    """The plan whose simulated step is the shortest of those tried, ``found`` among them, and what to say about it."""
    best, least = found, (first := _simulated(found))
    for _ in range(_ROUNDS):
        start = best
        for price in _PRICES:
            if found.model.clock.is_up():
                break
            trial, seconds = _hidden(start, price)
            if trial and seconds < least * _BETTER:
                best, least = trial, seconds
        if best is start:
            break
    return best, _overlap_note(first, least, best is not found)


def _hidden(found: SearchResult, price: float) -> tuple[SearchResult | None, float]:
    """The best plan where a hidden second costs so much, and how long it takes; None if none fits the memory."""
    solution = found.unproved_solution()
    spare = overlap_windows(found.model.problem.program, _work(found, solution))
    rounded = {v: 2.0 ** floor(log2(window)) for v, window in spare.items() if window > 0}  # so that tables are shared
    try:
        trial = found.with_overlap({v: OverlapWindow(window, price) for v, window in rounded.items()})
    except MemoryLimitError:
        return None, 0.0
    return (trial, _simulated(trial)) if trial.peak.bytes <= found.limit else (None, 0.0)


def _simulated(found: SearchResult) -> float:
    solution = found.unproved_solution()
    return simulated_seconds(found.model.problem.program, solution, _work(found, solution))


def _work(found: SearchResult, solution: Solution) -> OpTimes:
    problem = found.model.problem
    return OpTimes(problem.program, solution, Reasons(problem.program, solution), problem.kinds)


def _overlap_note(before: float, after: float, other: bool) -> str:
    alone = "the plan that is fastest one thing after the other"
    if other:
        return f"chosen by the time with overlap, {seconds_text(after)}; {alone} takes {seconds_text(before)} so"
    return f"chosen by the time with overlap: {alone} is the fastest found so, too"


# ---- Choose ----------------------------------------------------------------------------------------------------------


_SHOWN = 2
_LARGE = 20_000  # operations beyond which a step is not planned again for lengths that each mesh axis divides
Sizes = Mapping[int, int]


@dataclass(frozen=True)
class PlannedProgram:
    """The program to run, its plan, and the attempt that it is, from which planning under other pins can begin."""

    program: TracedProgram
    plan: Plan
    attempt: "_Variant"
    overlap: bool = False

    @gc_paused
    def again(self, pins_of: Callable[[TracedProgram], Pins]) -> "PlannedProgram | None":
        """The same program under other pins, padded alike, from this plan on; None if it takes a search of its own."""
        program, sizes = self.attempt.program, self.attempt.sizes
        pins = pins_of(program)
        found = (
            self.attempt.outcome.replan(pins, self.plan.lower_bound)
            if isinstance(self.attempt.outcome, SearchResult)
            else None
        )
        if found is None:
            return None
        notes = [
            f"{_named(self.attempt, n)} is padded to {m} inside the step, as it was before" for n, m in sizes.items()
        ]
        with worker_pool() as start:
            return _chosen(_Variant(sizes, program, pins, found), [*program.notes, *notes], self.overlap, start)


def plan_program(
    program: TracedProgram, mesh: Mesh, pins_of: Callable[[TracedProgram], Pins], memory: float | None = None
) -> tuple[TracedProgram, Plan]:
    """The program to run, padded where that pays, and its plan (see ``plan_best_variant``)."""
    chosen = plan_best_variant(program, mesh, pins_of, memory)
    return chosen.program, chosen.plan


@gc_paused
def plan_best_variant(
    program: TracedProgram,
    mesh: Mesh,
    pins_of: Callable[[TracedProgram], Pins],
    memory: float | None = None,
    overlap: bool = False,
    seconds: float | None = None,
) -> PlannedProgram:
    """The program to run, padded where that pays, with its plan.

    Args:
      pins_of: reads and checks the pins of a program.
      memory: limit in bytes per device; None takes the topology's.
      overlap: take the plan whose simulated step is the shortest (``plan.overlap``).
      seconds: after which nothing more is tried to improve the plan and its bound.

    Raises PinError and MemoryLimitError as ``solve`` does.
    """
    candidates, clock = padded_sizes(program, mesh), Deadline(seconds)
    stated = {n: m for n, m in candidates.items() if n in set(stated_sizes(program.graph, mesh))}
    best = _attempt(program, stated, mesh, pins_of, memory, clock)
    large = graph_index(program.graph).count > _LARGE
    even = {n for n in candidates if large and n not in stated and not any(n % k for k in mesh.sizes)}
    notes = [*_left(program, mesh, candidates), *(_stated_note(best, n) for n in stated)]
    notes += [_untried_note(program, n) for n in candidates if n in even]
    for n in (n for n in candidates if n not in stated and n not in even and not clock.is_up()):
        trial = _attempt(program, {**best.sizes, n: candidates[n]}, mesh, pins_of, memory, clock)
        notes.append(_note(best, trial, n))
        best = trial if trial.seconds < best.seconds else best
    with worker_pool() as start:
        if isinstance(best.outcome, SearchResult):
            best = replace(best, outcome=best.outcome.polish(start))
        return _in_time(_chosen(best, [*program.notes, *notes], overlap, start), clock)


def _in_time(chosen: PlannedProgram, clock: Deadline) -> PlannedProgram:
    """With a note if something was left out for want of time."""
    if not clock.has_stopped:
        return chosen
    said = f"planning was stopped after {seconds_text(clock.seconds or 0.0)}: this is the best plan so far, at most"
    notes = (*chosen.plan.notes, f"{said} {chosen.plan.gap:.1%} from the optimum")
    return replace(chosen, plan=replace(chosen.plan, notes=notes))


def _chosen(best: "_Variant", notes: list[str], overlap: bool, start: Submit) -> PlannedProgram:
    """What the best attempt has led to.

    Args:
      start: for what proves the bound, which is mostly compiled loops, beside the building of the plan.
    """
    found = best.outcome
    if isinstance(found, MemoryLimitError):
        raise found
    if overlap:
        found, said = plan_with_overlap(found)
        notes = [*notes, said]
    program, solution = replace(best.program, notes=notes), found.unproved_solution()
    bound = start(found.certify)
    plan = build_plan(program, solution, best.pins, found.model.problem.kinds)
    plan = replace(plan, padded=tuple(best.sizes.items()), solution=replace(solution, lower_bound=bound.result()))
    return PlannedProgram(program, plan, replace(best, outcome=found.released()), overlap)


@dataclass(frozen=True)
class _Variant:
    """One program, planned or found not to fit."""

    sizes: Sizes
    program: TracedProgram
    pins: Pins
    outcome: SearchResult | MemoryLimitError

    @property
    def seconds(self) -> float:
        """Of the plan; without end if there is none."""
        return self.outcome.seconds if isinstance(self.outcome, SearchResult) else float("inf")

    def __str__(self) -> str:
        return seconds_text(self.seconds) if isinstance(self.outcome, SearchResult) else "does not fit the memory"


def _attempt(
    program: TracedProgram,
    sizes: Sizes,
    mesh: Mesh,
    pins_of: Callable[[TracedProgram], Pins],
    memory: float | None,
    clock: Deadline,
) -> _Variant:
    made = pad_program(program, sizes)
    pins = pins_of(made)
    try:
        return _Variant(sizes, made, pins, solve(made, mesh, pins, memory, clock))
    except MemoryLimitError as error:
        return _Variant(sizes, made, pins, error)


def _stated_note(made: _Variant, n: int) -> str:
    said = f"{_named(made, n)} is padded to {made.sizes[n]} inside the step, as a split of it is stated"
    return said + _each_trip(made, n)


def _untried_note(program: TracedProgram, n: int) -> str:
    what = _several(_dims(program, n)) or "a dim"
    return f"{what} ({n}) stays so: every mesh axis divides it, and padding for several together was not tried"


def _note(before: _Variant, after: _Variant, n: int) -> str:
    what, m = _named(after, n), after.sizes[n]
    if after.seconds < before.seconds:
        return f"{what} is padded to {m} inside the step: {after}; without, {before}{_each_trip(after, n)}"
    said = f"{what} does not divide over the mesh and stays so: padded to {m}, {after}; without, {before}"
    return said + _each_trip(after, n)


def _each_trip(made: _Variant, n: int) -> str:
    """Padding that a loop does not pass on: what it takes and returns keeps its size."""
    m, graph = made.sizes[n], made.program.graph
    loops = (op for _, op in walk(graph) if op.name in ("scan", "while"))
    again = (op for op in loops for body in op.bodies for inner in body.ops if _pads(inner, n, m))
    return next((f"; {op.name} at {op.source} hands it on unpadded, and pads it on every trip" for op in again), "")


def _pads(op: Op, n: int, m: int) -> bool:
    return op.name == "pad" and n in op.inputs[0].shape and m in op.outputs[0].shape


def _left(program: TracedProgram, mesh: Mesh, candidates: Sizes) -> Iterator[str]:
    """A line per length of inputs that does not divide and is read by nothing that would gain from it."""
    for n in dict.fromkeys(n for leaf in program.inputs for n in leaf.shape):
        if n not in candidates and padded_length(n, mesh) > n:
            what = _several(_dims(program, n))
            yield f"{what} ({n}) does not divide over the mesh and stays so: no matrix product or lookup works on it"


def _named(made: _Variant, n: int) -> str:
    """The inputs that are padded from ``n``, else those of that length, else the first operation on the longer dim."""
    graph, m = made.program.graph, made.sizes[n]
    read = {x.id for op in graph.ops if op.name == "pad" and m in op.outputs[0].shape for x in values(op.inputs)}
    longer = (f"{op.name} at {op.source}" for _, op in walk(graph) if any(m in v.shape for v in op.outputs))
    found = _dims(made.program, n, read) or _dims(made.program, n) or [next(longer)]
    return f"{_several(found)} ({n})"


def _dims(program: TracedProgram, n: int, among: Container[int] | None = None) -> list[str]:
    """The dims of length ``n`` of the inputs, or of those with these ids."""
    leaves = zip(program.inputs, program.graph.inputs, strict=True)
    return [
        f"dim {d} of {leaf.path}"
        for leaf, value in leaves
        for d, size in enumerate(leaf.shape)
        if size == n and (among is None or value.id in among)
    ]


def _several(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
