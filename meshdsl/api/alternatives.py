"""Choose among the functions that a step offers (``md.alternatives``): plan the step with each, and take the fastest.

Names are chosen one after the other, in the order in which the step says them, the others as taken so far: one plan,
and one more per further function. A function whose plan does not fit the memory, or that refuses the shapes or the
layouts, is left out; a note of the plan says why. The bound of the plan is that of the step with the functions taken.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import NamedTuple

from meshdsl.api.plan_variants import PlannedProgram
from meshdsl.api.stages import CallStages
from meshdsl.errors import MemoryLimitError, MeshDSLError, TraceError, first_fault
from meshdsl.ir.graph import TracedProgram
from meshdsl.trace.device_axes import DeviceMap
from meshdsl.util.text import bytes_text, seconds_text

Choices = tuple[tuple[str, str], ...]  # names, and the functions taken
Trace = Callable[[Choices], tuple[DeviceMap | None, TracedProgram]]


class _TriedFunction(NamedTuple):
    """The step with one more of its functions chosen.

    Args:
      function: the one that is tried.
      stages: of the step.
      planned: the program and its plan, or why there is none.
    """

    function: str
    stages: CallStages
    planned: PlannedProgram | MeshDSLError

    @property
    def seconds(self) -> float:
        if isinstance(self.planned, MeshDSLError):
            return inf
        return self.stages.seconds_of(self.planned.plan)

    @property
    def least(self) -> float:
        """The least memory found, of a step that does not fit."""
        return self.planned.least or inf if isinstance(self.planned, MemoryLimitError) else inf

    def __str__(self) -> str:
        if isinstance(self.planned, MemoryLimitError) and self.planned.least:
            return f"{self.function} does not fit: the least found has {bytes_text(self.planned.least)}"
        if isinstance(self.planned, MeshDSLError):
            return f"{self.function} cannot be planned: {first_fault(self.planned)}"
        return f"{self.function} {seconds_text(self.seconds)}"


def with_best_alternatives(stages: CallStages, trace: Trace) -> CallStages:
    """Return the stages of the fastest plan among the alternatives of a step.

    Args:
      stages: of the step with the first function of each, or with those of an earlier plan of the same call.
      trace: returns the step's program with other functions, and the devices that it is written for, if it is.

    Raises:
      TraceError: a function returns other types than the first one.
      MemoryLimitError: nothing that was tried fits the memory; the error is that of the smallest plan found.
    """

    def attempt(function: str, choices: Choices) -> _TriedFunction:
        try:
            devices, program = trace(choices)
        except MeshDSLError as error:
            return _TriedFunction(function, stages, error)
        except Exception as error:
            error.add_note(f"{function!r} of alternatives was taken, instead of the first")
            raise
        _check_same_results(stages.traced, program, function)
        tried = replace(stages, traced=program, devices=devices, start=None)
        trial = planned(function, tried, MeshDSLError)
        if isinstance(trial.planned, PlannedProgram | MemoryLimitError):
            rivals.append(tried)
        return trial

    def planned(function: str, tried: CallStages, caught: type[MeshDSLError]) -> _TriedFunction:
        try:
            return _TriedFunction(function, tried, tried.planned)
        except caught as error:
            return _TriedFunction(function, tried, error)

    rivals, notes, chosen = [stages], list[str](), set[str]()
    best = planned("", stages, MemoryLimitError)
    while due := [each for each in best.stages.traced.alternatives if each.name not in chosen]:
        name, first, functions = due[0]
        trials = [best._replace(function=first)]
        trials += [
            attempt(other, tuple({**dict(best.stages.traced.taken), name: other}.items()))
            for other in functions
            if other != first
        ]
        best = min(trials, key=lambda trial: (trial.seconds, trial.least))
        chosen.add(name)
        taken = "none has a plan" if isinstance(best.planned, MeshDSLError) else f"{best.function} is taken"
        notes.append(f"alternatives of {name}: {taken}; {'; '.join(map(str, trials))}")
    if isinstance(best.planned, MeshDSLError):
        for note in notes:
            best.planned.add_note(note)
        raise best.planned
    plan = replace(best.planned.plan, notes=(*best.planned.plan.notes, *notes))
    others = tuple(replace(each) for each in rivals if each is not best.stages)  # without their plans
    return replace(best.stages, chosen=replace(best.planned, plan=plan), rivals=others)


def _check_same_results(first: TracedProgram, other: TracedProgram, function: str) -> None:
    """Raise TraceError if a step returns other types with another function."""
    if len(first.outputs) != len(other.outputs):
        raise TraceError(
            f"alternatives: with {function!r}, {first.name} returns {len(other.outputs)} arrays instead of "
            f"{len(first.outputs)}; functions that can be chosen return the same"
        )
    for one, two in zip(first.outputs, other.outputs, strict=True):
        if (one.path, one.shape, one.dtype) != (two.path, two.shape, two.dtype):
            raise TraceError(
                f"alternatives: with {function!r}, {first.name} returns {two.path or 'result'} {two.type} instead of "
                f"{one.path or 'result'} {one.type}; functions that can be chosen return the same"
            )
