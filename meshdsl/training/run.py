"""Training an ``md.Program`` as planned, and one run of ``meshdsl train``.

    sharded = parallelize_program(program, mesh)
    state, outcome = train_program(sharded, program, Run(steps=300, folder=Path("runs/gpt")))

``program.init`` makes the state, or the newest checkpoint restores it, in the layouts of the plan; ``program.batches``
feeds the step ``step(*state, batch) -> (*state, loss)``. Objects of nnx in the state change in place, so a step on them
may return the rest of the state, or only the loss.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from meshdsl.api import Program, Sharded
from meshdsl.api.profile import collective_times, times_text
from meshdsl.api.program import parallelize_program
from meshdsl.api.sink import SunkStep
from meshdsl.errors import ArgumentError, PlanFileError, faults, is_a, shortened
from meshdsl.ir.graph import HeldState, array_type
from meshdsl.layouts.machine import kept_topology, topology_of_kind
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Split
from meshdsl.plan.plan import Plan, load_plan
from meshdsl.plan.text import summary_text
from meshdsl.plan.types import Array, PlanData
from meshdsl.trace.objects import holds_objects
from meshdsl.trace.pure_step import Maker
from meshdsl.training.batches import Batches, describe, sharded_feed
from meshdsl.training.joining.agreement import check_common, plan_facts
from meshdsl.training.loop import Outcome, Run, Step, train
from meshdsl.training.observing.events import JOINED, PLANNED, RESTORED, add_event
from meshdsl.training.observing.metrics import OnMetrics
from meshdsl.training.observing.profile import Profile
from meshdsl.training.observing.trackers import trackers
from meshdsl.training.saving.checkpoint import Checkpoints, State, versions
from meshdsl.training.saving.folder import CHECKPOINTS, METRICS, check_free, shared_folder
from meshdsl.training.saving.storage import Mirror, check_backend, is_remote, is_staged, names_in, reported
from meshdsl.training.sink import Sink
from meshdsl.training.supervision.contingency import plan_file
from meshdsl.util.terminal import Work, print_fitted, terminal
from meshdsl.util.text import seconds_text

log = logging.getLogger("meshdsl")

PLAN = "plan.json"  # in the folder of a run
TIMES = "collectives.txt"  # in the folder of a profile
_REQUIRED = {  # fields of a program that training needs, with their purpose
    "init": "it makes the arguments before the batch",
    "batches": "it yields the batches, the step's last argument",
}


# ---- Training a program ----------------------------------------------------------------------------------------------


def check_trainable(program: Program) -> None:
    """Raises ArgumentError, with all faults, unless a program has everything that training needs."""
    rows = [f"{name}: missing; {purpose}" for name, purpose in _REQUIRED.items() if getattr(program, name) is None]
    if not rows:
        shapes, make = abstract_state(program)
        made = _state(make.unflatten(shapes))
        if len(made) != len(program.args) - 1:
            rows.append(f"init: makes {len(made)} arguments; the step takes {len(program.args) - 1} and a batch")
    if rows:
        raise ArgumentError(faults("this program cannot be trained:", rows, "give them to md.Program"))


def check_step(plan: PlanData, count: int, held: HeldState) -> None:
    """Raises ArgumentError, with all faults, unless a step is ``step(*state, batch) -> (*state, loss)``.

    Args:
      plan: plan of the step.
      count: number of arrays of the state.
      held: state that the step changes in place; it may be returned.
    """
    outputs = plan.outputs[: held.results]
    inputs = plan.inputs[:count]
    if len(outputs) != count + 1:
        inputs = tuple(x for i, x in enumerate(inputs) if i not in held.inputs)
    rows = [
        f"result {result.path or i}: {_type(result)}; {before.path} is {_type(before)}"
        for i, (before, result) in enumerate(zip(inputs, outputs, strict=False))
        if _type(before) != _type(result)
    ]
    if len(outputs) != len(inputs) + 1:
        rows = [f"{len(outputs)} arrays; the state has {count}, and the loss is one more"]
    elif outputs[-1].shape:
        rows.append(f"the last result, {_type(outputs[-1])}, is not a loss: a loss is one number")
    if rows:
        raise ArgumentError(
            faults("the step does not return the state and the loss:", shortened(rows), "return (*state, loss)")
        )


def steps_of(program: Program) -> int:
    """The number of steps that the program specifies; ArgumentError if it has none."""
    if program.steps is None:
        raise ArgumentError("the program has no number of steps: give --steps, or md.Program(..., steps=)")
    return program.steps


def train_program(
    sharded: Sharded[..., Any],
    program: Program,
    run: Run,
    on_metrics: Iterable[OnMetrics] = (),
    checkpoints: Checkpoints | None = None,
) -> tuple[State, Outcome]:
    """Trains with the planned step, from the newest checkpoint in the run's folder if there is one.

    Args:
      sharded: the planned step.
      program: the program, with init and batches.
      run: length and folder.
      on_metrics: functions that the first process calls with the steps done and the values of a step or an evaluation.
      checkpoints: those of the run, if they are open.

    Returns:
      The state after the last step, in the layouts of the plan, and the outcome.

    Example:
      >>> train_program(sharded, program, Run(300, folder), [lambda step, values: tracker.log(values, step=step)])
    """
    check_trainable(program)
    program = with_made_state(program)
    shapes, like = abstract_state(program)
    stages = sharded.stages(*program.args)
    check_step(stages.planned.plan, len(shapes), stages.traced.held)
    *_, example = program.args
    *_, batch_places = sharded.input_shardings(*program.args)[0]
    batches = required(program.batches)()
    if not isinstance(batches, Iterable):
        raise ArgumentError(f"batches(): {is_a(batches)}, not something that yields batches")
    if isinstance(batches, Batches):
        run = replace(run, unit=batches.unit, units=batches.units * batches.batch)
    plan, feed = stages.planned.plan, sharded_feed(batches, example, batch_places)
    run = replace(run, compute_bound=plan.utilization.compute_bound if has_known_rate(plan) else 0.0)
    several = SunkStep(stages, run.sink, len(jax.tree.leaves(example))) if run.sink > 1 else None
    sink = None if several is None else Sink(run.sink, several, several.compile, feed.stacked, run.measures_sink)
    places = stages.executable.shardings
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at) for x, at in zip(shapes, places, strict=False)]
    step = returning_state(sharded, [holds_objects(x) for x in program.args[:-1]])
    with run.checkpoints() if checkpoints is None else nullcontext(checkpoints) as held:
        before = time.monotonic()
        found = held.restore_newest(_state(like.unflatten(placed)))
        done, start = found or (0, _state(sharded.init(required(program.init), program.args[-1])))
        if jax.process_index() == 0:
            add_event(run.folder, RESTORED, step=done, seconds=round(time.monotonic() - before, 3))
        state, outcome = train(step, start, feed, run, done, program.evaluate, sink, on_metrics, held)
    if outcome.profile is not None:
        called = (vars(each).get("compiled") for each in (stages.executable, several) if each is not None)
        write_times(outcome.profile, plan, [program for program in called if program is not None])
    return state, outcome


def write_times(profile: Profile, plan: Plan, programs: Sequence[jax.stages.Compiled]) -> None:
    """Writes a table of measured beside predicted seconds into the folder of a profile.

    Args:
      programs: the compiled programs that ran.
    """
    steps = f"{profile.steps} steps of {seconds_text(profile.seconds)} each, predicted {seconds_text(plan.seconds)}"
    times = times_text(collective_times(profile.folder, programs, plan, profile.steps))
    (profile.folder / TIMES).write_text(f"{steps}\n{times}\n")


def has_known_rate(plan: PlanData) -> bool:
    """Whether the plan's topology is one that is known of the devices at hand, so that MFU means something.

    The preset of CPUs describes no machine; a measured topology does.
    """
    device = jax.devices()[0]
    found = kept_topology(device.device_kind, plan.mesh) or topology_of_kind(device.platform, device.device_kind)
    preset = found == topology_of_kind("cpu", "cpu")
    return not found.assumed and not preset and plan.topology == found.topology


def identity(program: Program, plan: PlanData, batches: Any) -> dict[str, Any]:
    """Returns what has to be the same when a run is resumed, on whatever mesh: step, types of a batch, and data."""
    *_, batch = program.args
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return {
        "step": f"{plan.name} {plan.fingerprint[:16]}",
        "batch": ", ".join(f"{keystr(path, simple=True, separator='/')}: {_type(x)}" for path, x in leaves),
        "data": describe(batches),
    }


def check_same(run: Run, checkpoints: Checkpoints, accept_changes: bool = False) -> str:
    """Returns a note if other versions saved the newest checkpoint.

    One whose facts cannot be read is damaged, and the one before it will be restored.

    Raises:
      ArgumentError: it is of another run; the message has every difference.
    """
    saved = checkpoints.newest_facts()
    changed = {name: saved[name] for name in run.facts if name in saved and saved[name] != run.facts[name]}
    if changed and not accept_changes:
        rows = [f"{name}: {run.facts[name]}, and was {before}" for name, before in changed.items()]
        title = f"the run in {run.place} is of something else:"
        raise ArgumentError(
            faults(title, rows, "--accept-changes resumes it nevertheless; --folder names another place")
        )
    now, before = versions(), saved.get("versions", {})
    others = [f"{name} {before[name]} (now {now[name]})" for name in now if before.get(name, now[name]) != now[name]]
    return f"note: the newest checkpoint was saved with {', '.join(others)}" if others else ""


def with_made_state(program: Program) -> Program:
    """Returns the program with shapes of the state that ``init`` makes, if these are objects, as its arguments.

    Objects that are made twice can differ in what is no array, and a step would be planned for each.
    """
    if program.init is None or not holds_objects(program.args[:-1]):
        return program
    shapes, make = abstract_state(program)
    state = make.unflatten(shapes)
    return replace(program, args=(*_state(state), program.args[-1]), init=lambda: make.unflatten(make()))


def skipping(program: Program) -> Program:
    """Returns the program with a step that changes nothing where its loss or new state holds NaNs or infinities.

    Raises:
      ArgumentError: the step changes objects in place.
    """
    if holds_objects(program.args[:-1]):
        raise ArgumentError(
            "--on-nan skip: this step changes objects in place, which cannot be taken back\n"
            "give a step that returns its state, or --on-nan stop"
        )

    @wraps(program.step)
    def step(*args: Any) -> Any:
        *after, loss = program.step(*args)
        floats = [x for x in jax.tree.leaves((after, loss)) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
        bad = sum(jnp.sum(~jnp.isfinite(x), dtype=jnp.int32) for x in floats)
        kept = jax.tree.map(lambda new, old: jnp.where(bad == 0, new, old), tuple(after), args[:-1])
        return (*kept, jnp.where(bad == 0, loss, jnp.nan))  # so that steps that change nothing are seen

    return replace(program, step=step)


def abstract_state(program: Program) -> tuple[list[Any], Maker]:
    """Returns the shapes of the state that a program makes, and its maker, whose ``unflatten`` takes them."""
    make = Maker(required(program.init))
    return jax.eval_shape(make), make


def returning_state(step: Step, in_place: Sequence[bool]) -> Step:
    """Returns a step that returns its whole state.

    Args:
      step: returns the loss after its state, of which it may leave out what it changes in place.
      in_place: for each argument of the state, whether it changes in place.
    """

    def whole(*args: Any) -> tuple[Any, ...]:
        result = step(*args)
        *after, loss = result if isinstance(result, tuple) else (result,)
        if len(after) < len(in_place):
            returned = iter(after)
            after = [x if own else next(returned) for x, own in zip(args, in_place, strict=False)]
        return (*after, loss)

    return whole


def required(make: Callable[..., Any] | None) -> Callable[..., Any]:
    """A function of the program that ``check_trainable`` has found to exist."""
    assert make is not None
    return make


def _state(made: Any) -> State:
    """One argument of the step, or several, as a tuple."""
    return made if isinstance(made, tuple) else (made,)


def _type(x: Array) -> str:
    return array_type(x.dtype, x.shape, ())


# ---- One run of the command ------------------------------------------------------------------------------------------


def check_folder(folder: Path, resume: bool, bucket: str = "") -> None:
    """Raises ArgumentError rather than overwrite another run, or a file, or disturb a run that is going on.

    What other machines wrote to the bucket is here afterwards.
    """
    if any(each.is_file() for each in (folder, *folder.parents)):
        raise ArgumentError(f"{folder} cannot be the folder of a run: there is a file; --folder names another place")
    if bucket:
        check_backend(bucket)
    check_free(bucket or folder)
    for place in (bucket or folder, folder) if is_staged(bucket) else (bucket or folder,):
        if not resume:
            check_new(place)
    if bucket:
        Mirror(folder, bucket).fetch()


def check_new(folder: Path | str) -> None:
    """Raises ArgumentError if the folder holds a run."""
    with reported(f"{folder} cannot be the folder of a run", ArgumentError):
        place = f"{folder}/{CHECKPOINTS}"
        names = names_in(place) if is_remote(folder) else os.listdir(place) if os.path.isdir(place) else []
        held = any(name[0].isdigit() for name in names)
    if held:
        raise ArgumentError(f"{folder} holds a run: --resume continues it, --folder names another place")


def save_for_supervisor(plan: Plan, folder: Path) -> None:
    """Saves a plan where the supervisor of the run in this folder looks for it; others see all of it, or nothing."""
    file = plan_file(folder, plan.mesh)
    file.parent.mkdir(exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    plan.save(temporary)
    os.replace(temporary, file)


@dataclass
class Session:
    """One run of ``meshdsl train``; with several processes the first one prints.

    Args:
      program: the program to train.
      mesh: the mesh to train it on.
      rules: layout rules that replace the program's own.
      memory: memory limit per device, such as ``"60GiB"``; default is the topology's.
      supervised: whether a supervisor may start the run again, also over other meshes: plans are kept for it.
      planned: file of a plan for this launch, which is used if it is one of this step.
      effort: how much planning is worth, as in ``parallelize``.
    """

    program: Program
    mesh: Mesh
    rules: str | None = None
    memory: str | None = None
    supervised: bool = False
    planned: str | None = None
    effort: str = "default"

    def __post_init__(self) -> None:
        """Makes the console, which is quiet unless this is the first process."""
        self.program = with_made_state(self.program)
        self._console = terminal(quiet=not self.is_first)

    @property
    def is_first(self) -> bool:
        """Whether this is the first process."""
        return jax.process_index() == 0

    def train(self, run: Run, accept_changes: bool = False, resume: bool = True, log: Iterable[str] = ()) -> Outcome:
        """Trains from the newest checkpoint if there is one.

        Args:
          run: length, folder, and what it keeps; without a number of steps (0) it has those of the program.
          accept_changes: whether to resume a run of another program, batch or data.
          resume: whether the folder may hold a run.
          log: names of trackers that metrics are sent to.
        """
        check_trainable(self.program)
        run = replace(run, steps=run.steps or steps_of(self.program))
        places = (run.place, run.folder) if is_staged(run.bucket) else (run.place,)
        with ExitStack() as stack:
            for place in places:
                stack.enter_context(shared_folder(place, self.supervised))
            for place in places if not resume else ():
                check_new(place)
            if run.bucket and self.is_first:
                run.fetch()
                what = f"{run.bucket}: what is no checkpoint is written to {run.folder}, and copied with each"
                self._console.print(what, markup=False)
            self._note(run, JOINED, processes=jax.process_count())
            sharded, plan = self._plan(run)
            batches = required(self.program.batches)()
            run = replace(run, facts=identity(self.program, plan, batches))
            check_common({"length": run.length, **versions(), **run.facts, **plan_facts(plan)})
            with run.checkpoints() as checkpoints:
                if note := check_same(run, checkpoints, accept_changes):
                    self._console.print(note, markup=False)
                if self.is_first:
                    plan.save(run.folder / PLAN)
                    if self.supervised:
                        save_for_supervisor(plan, run.folder)
                self._console.print(f"\nthe whole plan: {run.folder / PLAN}", markup=False)
                program = replace(self.program, batches=lambda: batches)
                with trackers(log, run.folder) as on_metrics:
                    _, outcome = train_program(sharded, program, run, on_metrics, checkpoints)
            if self.is_first:
                self._report(outcome, run)
                if run.bucket:
                    Mirror(run.folder, run.bucket).publish()
        return outcome

    def plan_ahead(self, folder: Path) -> None:
        """Plans for the topology of the run in this folder, and keeps the plan for its supervisor."""
        if (folder / PLAN).exists():
            self.mesh = Mesh(topology=load_plan(folder / PLAN).topology, **self.mesh.sizes_by_name)
        plan = self._sharded().plan(*self.program.args)
        save_for_supervisor(plan, folder)

    def _sharded(self, plan: Plan | None = None) -> Sharded[..., Any]:
        return parallelize_program(self.program, self.mesh, self.rules, self.memory, plan, self.effort)

    def _plan(self, run: Run) -> tuple[Sharded[..., Any], Plan]:
        before = time.monotonic()
        found = self._planned_before()
        if found is None:
            sharded = self._sharded()
            with Work(self._console, f"planning over {self.mesh}"):
                found_now = sharded, sharded.plan(*self.program.args)
        sharded, plan = found or found_now
        batch = plan.inputs[len(abstract_state(self.program)[0]) :]
        axes = [axis for axis in plan.mesh.names if any(isinstance(x.layout.on(axis), Split) for x in batch)]
        seconds = round(time.monotonic() - before, 3)
        self._note(run, PLANNED, mesh=str(plan.mesh), seconds=seconds, reused=found is not None, batch=axes)
        print_fitted(self._console, lambda: summary_text(plan))
        return sharded, plan

    def _planned_before(self) -> tuple[Sharded[..., Any], Plan] | None:
        """The step under the plan that was made for this launch; None if there is none, or it is of another step."""
        if self.planned is None or not Path(self.planned).exists():
            return None
        try:
            plan = load_plan(self.planned)
            sharded = self._sharded(plan)
            return sharded, sharded.plan(*self.program.args)
        except PlanFileError as error:
            log.warning("the plan %s is made anew: %s", self.planned, error)
            return None

    def _note(self, run: Run, event: str, **facts: Any) -> None:
        if self.is_first:
            add_event(run.folder, event, **facts)

    def _report(self, outcome: Outcome, run: Run) -> None:
        from meshdsl.training.observing.metrics import draw_curves  # matplotlib is slow to load

        if outcome.stopped:
            self._console.print(f"stopped after step {outcome.done} of {run.steps}; --resume continues")
        if outcome.profile is not None:
            times, folder = (outcome.profile.folder / TIMES).read_text(), outcome.profile.folder
            self._console.print(f"profile in {folder}, of {times}", markup=False, end="")
        picture = draw_curves(outcome.history, run.folder / "curves.png")
        self._console.print(f"curves: {picture}   metrics: {run.folder / METRICS}", markup=False)
