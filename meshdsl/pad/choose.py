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

from meshdsl.beside import Start, beside
from meshdsl.collector import uncollected
from meshdsl.errors import MemoryLimitError
from meshdsl.ir import Op, Program, walk
from meshdsl.layouts.mesh import Mesh
from meshdsl.pad.lengths import padded_length, padded_sizes, stated_sizes
from meshdsl.pad.rewrite import pad_program
from meshdsl.plan.build import build_plan
from meshdsl.plan.overlap import overlapped
from meshdsl.plan.value import Plan
from meshdsl.planner.clock import Clock
from meshdsl.planner.numbering import numbering_of
from meshdsl.planner.solution import Pins
from meshdsl.planner.solve import Found, search_plan
from meshdsl.trace.graphs import values
from meshdsl.units import seconds_text

_SHOWN = 2
_LARGE = 20_000  # operations beyond which a step is not planned again for lengths that each mesh axis divides
Sizes = Mapping[int, int]


@dataclass(frozen=True)
class Chosen:
    """The program to run, its plan, and the attempt that it is, from which planning under other pins can begin."""

    program: Program
    plan: Plan
    attempt: "_Attempt"
    overlap: bool = False

    @uncollected
    def again(self, pins_of: Callable[[Program], Pins]) -> "Chosen | None":
        """The same program under other pins, padded alike, from this plan on; None if it takes a search of its own."""
        program, sizes = self.attempt.program, self.attempt.sizes
        pins = pins_of(program)
        found = (
            self.attempt.outcome.again(pins, self.plan.lower_bound) if isinstance(self.attempt.outcome, Found) else None
        )
        if found is None:
            return None
        notes = [
            f"{_named(self.attempt, n)} is padded to {m} inside the step, as it was before" for n, m in sizes.items()
        ]
        with beside() as start:
            return _chosen(_Attempt(sizes, program, pins, found), [*program.notes, *notes], self.overlap, start)


def plan_program(
    program: Program, mesh: Mesh, pins_of: Callable[[Program], Pins], memory: float | None = None
) -> tuple[Program, Plan]:
    """The program to run, padded where that pays, and its plan (see ``choose_plan``)."""
    chosen = choose_plan(program, mesh, pins_of, memory)
    return chosen.program, chosen.plan


@uncollected
def choose_plan(
    program: Program,
    mesh: Mesh,
    pins_of: Callable[[Program], Pins],
    memory: float | None = None,
    overlap: bool = False,
    seconds: float | None = None,
) -> Chosen:
    """The program to run, padded where that pays, with its plan.

    Args:
      pins_of: reads and checks the pins of a program.
      memory: limit in bytes per device; None takes the topology's.
      overlap: take the plan whose simulated step is the shortest (``plan.overlap``).
      seconds: after which nothing more is tried to improve the plan and its bound.

    Raises PinError and MemoryLimitError as ``solve`` does.
    """
    candidates, clock = padded_sizes(program, mesh), Clock(seconds)
    stated = {n: m for n, m in candidates.items() if n in set(stated_sizes(program.graph, mesh))}
    best = _attempt(program, stated, mesh, pins_of, memory, clock)
    large = numbering_of(program.graph).count > _LARGE
    even = {n for n in candidates if large and n not in stated and not any(n % k for k in mesh.sizes)}
    notes = [*_left(program, mesh, candidates), *(_stated_note(best, n) for n in stated)]
    notes += [_untried_note(program, n) for n in candidates if n in even]
    for n in (n for n in candidates if n not in stated and n not in even and not clock.is_up()):
        trial = _attempt(program, {**best.sizes, n: candidates[n]}, mesh, pins_of, memory, clock)
        notes.append(_note(best, trial, n))
        best = trial if trial.seconds < best.seconds else best
    with beside() as start:
        if isinstance(best.outcome, Found):
            best = replace(best, outcome=best.outcome.settled(start))
        return _in_time(_chosen(best, [*program.notes, *notes], overlap, start), clock)


def _in_time(chosen: Chosen, clock: Clock) -> Chosen:
    """With a note if something was left out for want of time."""
    if not clock.has_stopped:
        return chosen
    said = f"planning was stopped after {seconds_text(clock.seconds or 0.0)}: this is the best plan so far, at most"
    notes = (*chosen.plan.notes, f"{said} {chosen.plan.gap:.1%} from the optimum")
    return replace(chosen, plan=replace(chosen.plan, notes=notes))


def _chosen(best: "_Attempt", notes: list[str], overlap: bool, start: Start) -> Chosen:
    """What the best attempt has led to.

    Args:
      start: for what proves the bound, which is mostly compiled loops, beside the building of the plan.
    """
    found = best.outcome
    if isinstance(found, MemoryLimitError):
        raise found
    if overlap:
        found, said = overlapped(found)
        notes = [*notes, said]
    program, solution = replace(best.program, notes=notes), found.draft()
    bound = start(found.bound)
    plan = build_plan(program, solution, best.pins, found.model.problem.kinds)
    plan = replace(plan, padded=tuple(best.sizes.items()), solution=replace(solution, lower_bound=bound.result()))
    return Chosen(program, plan, replace(best, outcome=found.spent()), overlap)


@dataclass(frozen=True)
class _Attempt:
    """One program, planned or found not to fit."""

    sizes: Sizes
    program: Program
    pins: Pins
    outcome: Found | MemoryLimitError

    @property
    def seconds(self) -> float:
        """Of the plan; without end if there is none."""
        return self.outcome.seconds if isinstance(self.outcome, Found) else float("inf")

    def __str__(self) -> str:
        return seconds_text(self.seconds) if isinstance(self.outcome, Found) else "does not fit the memory"


def _attempt(
    program: Program,
    sizes: Sizes,
    mesh: Mesh,
    pins_of: Callable[[Program], Pins],
    memory: float | None,
    clock: Clock,
) -> _Attempt:
    made = pad_program(program, sizes)
    pins = pins_of(made)
    try:
        return _Attempt(sizes, made, pins, search_plan(made, mesh, pins, memory, clock))
    except MemoryLimitError as error:
        return _Attempt(sizes, made, pins, error)


def _stated_note(made: _Attempt, n: int) -> str:
    said = f"{_named(made, n)} is padded to {made.sizes[n]} inside the step, as a split of it is stated"
    return said + _each_trip(made, n)


def _untried_note(program: Program, n: int) -> str:
    what = _several(_dims(program, n)) or "a dim"
    return f"{what} ({n}) stays so: every mesh axis divides it, and padding for several together was not tried"


def _note(before: _Attempt, after: _Attempt, n: int) -> str:
    what, m = _named(after, n), after.sizes[n]
    if after.seconds < before.seconds:
        return f"{what} is padded to {m} inside the step: {after}; without, {before}{_each_trip(after, n)}"
    said = f"{what} does not divide over the mesh and stays so: padded to {m}, {after}; without, {before}"
    return said + _each_trip(after, n)


def _each_trip(made: _Attempt, n: int) -> str:
    """Padding that a loop does not pass on: what it takes and returns keeps its size."""
    m, graph = made.sizes[n], made.program.graph
    loops = (op for _, op in walk(graph) if op.name in ("scan", "while"))
    again = (op for op in loops for body in op.bodies for inner in body.ops if _pads(inner, n, m))
    return next((f"; {op.name} at {op.source} hands it on unpadded, and pads it on every trip" for op in again), "")


def _pads(op: Op, n: int, m: int) -> bool:
    return op.name == "pad" and n in op.inputs[0].shape and m in op.outputs[0].shape


def _left(program: Program, mesh: Mesh, candidates: Sizes) -> Iterator[str]:
    """A line per length of inputs that does not divide and is read by nothing that would gain from it."""
    for n in dict.fromkeys(n for leaf in program.inputs for n in leaf.shape):
        if n not in candidates and padded_length(n, mesh) > n:
            what = _several(_dims(program, n))
            yield f"{what} ({n}) does not divide over the mesh and stays so: no matrix product or lookup works on it"


def _named(made: _Attempt, n: int) -> str:
    """The inputs that are padded from ``n``, else those of that length, else the first operation on the longer dim."""
    graph, m = made.program.graph, made.sizes[n]
    read = {x.id for op in graph.ops if op.name == "pad" and m in op.outputs[0].shape for x in values(op.inputs)}
    longer = (f"{op.name} at {op.source}" for _, op in walk(graph) if any(m in v.shape for v in op.outputs))
    found = _dims(made.program, n, read) or _dims(made.program, n) or [next(longer)]
    return f"{_several(found)} ({n})"


def _dims(program: Program, n: int, among: Container[int] | None = None) -> list[str]:
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
