"""The training loop: call the step, watch it, save it, and stop cleanly when told to.

    done, state = resumed(run, like=state) or (0, state)
    state, outcome = train(step, state, feed_of(batches), Run(steps=300, folder=Path("runs/gpt")), done)

``step`` is anything called as ``step(*state, batch) -> (*state, loss)``: a planned step or a
plain ``jax.jit`` one. A run goes on from its newest checkpoint with the batches and the losses that it would
have had without the interruption. With several processes all call this; the first shows and writes.
"""

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshdsl.training.batches import Feed
from meshdsl.training.checkpoint import Checkpoints, State
from meshdsl.training.metrics import History, Metrics, Record

# ---- Progress --------------------------------------------------------------------------------------------------------
# What a person sees while a run trains: a bar with loss, speed and time left.


class TrainingBar:
    """A progress bar over the steps of a run; a context manager.

    Args:
      steps: steps of the whole run.
      done: steps that an earlier process did.
      unit: what is counted per second.
      shown: whether anything is shown at all.
    """

    def __init__(self, steps: int, done: int, unit: str, shown: bool = True) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[rate]:,.0f} " + f"{unit}/s"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            disable=not shown,
        )
        self._shown = shown
        self._task = self._progress.add_task("training", total=steps, completed=done, loss=float("nan"), rate=0.0)

    def __enter__(self) -> "TrainingBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, loss: float, units: int) -> None:
        """One step more, with its loss and how many units it had."""
        self._progress.update(self._task, advance=1, loss=loss, rate=units * self._speed())

    def note(self, text: str) -> None:
        """A line above the bar."""
        if self._shown:
            self._progress.console.print(text, highlight=False)

    def _speed(self) -> float:
        return self._progress.tasks[0].speed or 0.0


# ---- Stop ------------------------------------------------------------------------------------------------------------
# Stopping cleanly: a run that is told to end finishes its step, saves, and says how to go on.


class Stop:
    """Hears SIGTERM and Ctrl-C while a run trains; a context manager. A second Ctrl-C ends it at once.

    With several processes jax hears SIGTERM, and all of them agree on the step after which they stop.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        if jax.process_count() == 1:
            self._before = {kind: signal.signal(kind, self._hear) for kind in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def after(self, step: int) -> bool:
        """Whether to stop after this step; every process asks after every step."""
        if jax.process_count() > 1:
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return self._asked

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        self._restore()

    def _restore(self) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)
        self._before = {}


# ---- Loop ------------------------------------------------------------------------------------------------------------


Step = Callable[..., Any]
Evaluate = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """How long a run is and where it is kept.

    Args:
      steps: of the whole run.
      folder: where its checkpoints and its ``metrics.jsonl`` are.
      save_every: steps between checkpoints; the last step is always saved.
      evaluate_every: steps between evaluations on held-out data; the last step always has one.
      unit: what is counted per second.
      units: how many of these a step has.
    """

    steps: int
    folder: Path
    save_every: int = 50
    evaluate_every: int = 50
    unit: str = "steps"
    units: int = 1

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows this many steps."""
        return step % self.save_every == 0 or step == self.steps

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation follows this many steps."""
        return step % self.evaluate_every == 0 or step == self.steps

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"


@dataclass(frozen=True)
class Outcome:
    """What a run measured so far, how many steps it has done, and whether it was stopped before its end."""

    history: History
    done: int
    stopped: bool = False


def resumed(run: Run, like: State) -> tuple[int, State] | None:
    """Steps done and state of the newest checkpoint, placed as ``like``; None if there is none."""
    checkpoints = Checkpoints(run.checkpoints)
    done = checkpoints.newest
    found = None if done is None else (done, checkpoints.restore(done, like))
    checkpoints.close()
    return found


def train(
    step: Step, state: State, feed: Feed, run: Run, done: int = 0, evaluate: Evaluate | None = None
) -> tuple[State, Outcome]:
    """Train ``state``, which ``done`` steps made, to ``run.steps`` steps.

    Args:
      evaluate: ``(*state) -> metrics`` on held-out data; of several values of one, the mean counts.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(Stop())
        bar = stack.enter_context(TrainingBar(run.steps, done, run.unit, shown=_is_first()))
        record = stack.enter_context(Record(run.folder / "metrics.jsonl" if _is_first() else None, done))
        checkpoints = Checkpoints(run.checkpoints)
        stack.callback(checkpoints.close)
        loop = _Loop(step, run, bar, record, checkpoints, evaluate)
        return loop.go(state, feed, done, stop)


@dataclass(frozen=True)
class _Loop:
    step: Step
    run: Run
    bar: TrainingBar
    record: Record
    checkpoints: Checkpoints
    evaluate: Evaluate | None

    def go(self, state: State, feed: Feed, done: int, stop: Stop) -> tuple[State, Outcome]:
        if done:
            self.bar.note(f"resumed after step {done}")
        stopped = False
        for number, batch in zip(range(done + 1, self.run.steps + 1), feed(done), strict=False):
            state, done = self._advance(state, number, batch), number
            stopped = stop.after(number) and number < self.run.steps
            if stopped or self.run.saves(number):
                self.checkpoints.save(number, state)
            if stopped:
                break
        else:
            self._end(state, done)
        return state, Outcome(self.record.history, done, stopped)

    def _advance(self, state: State, number: int, batch: Any) -> State:
        begun = time.perf_counter()
        *after, loss = self.step(*state, batch)
        value = float(loss)
        seconds = time.perf_counter() - begun
        rate = {f"{self.run.unit}/s": round(self.run.units / seconds, 3)}
        self.record.step(number, value, seconds=round(seconds, 6), **rate)
        self.bar.advance(value, self.run.units)
        if self.evaluate is not None and self.run.evaluates(number):
            self._evaluate(tuple(after), number, value)
        return tuple(after)

    def _evaluate(self, state: State, number: int, loss: float) -> None:
        assert self.evaluate is not None
        metrics: Metrics = {name: float(np.mean(value)) for name, value in self.evaluate(*state).items()}
        self.record.evaluation(number, metrics)
        shown = "".join(f"   {name} {value:.3f}" for name, value in metrics.items())
        self.bar.note(f"step {number:5d}   training loss {loss:.3f}{shown}")

    def _end(self, state: State, done: int) -> None:
        """Batches may end before the steps do; what was trained is kept."""
        if done < self.run.steps:
            self.bar.note(f"the batches ended after step {done} of {self.run.steps}")
            if done and self.checkpoints.newest != done:
                self.checkpoints.save(done, state)


def _is_first() -> bool:
    return jax.process_index() == 0
