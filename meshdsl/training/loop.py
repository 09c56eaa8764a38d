"""The training loop: steps, evaluations, checkpoints, and a clean stop.

    done, state = restore_newest(run, like=state) or (0, state)
    state, outcome = train(step, state, host_feed(batches), Run(steps=300, folder=Path("runs/gpt")), done)

``step`` is called as ``step(*state, batch) -> (*state, loss)``: a planned step or a plain ``jax.jit`` step. A run
resumes from its newest checkpoint with the batches and losses that it would have had without the interruption. With
several processes all call this; the first one shows progress and writes metrics.
"""

import logging
import signal
import sys
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
from rich import get_console
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshdsl.training.batches import Feed
from meshdsl.training.checkpoint import Checkpoints, State
from meshdsl.training.metrics import History, Metrics, MetricsFile

# ---- Progress bar ----------------------------------------------------------------------------------------------------


_WIDE = 80  # characters of a terminal that has room for all columns


class TrainingBar:
    """A bar with loss, speed and remaining time over the steps of a run; a context manager.

    Meanwhile, what others print, and what handlers of ``logging`` write to standard error, appears above the bar.

    Args:
      steps: steps of the whole run.
      done: steps that an earlier process did.
      unit: name of what is counted per second.
      shown: whether anything is shown.
      console: where; None for standard output.
    """

    def __init__(self, steps: int, done: int, unit: str, shown: bool = True, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            *([TimeElapsedColumn()] if (console or get_console()).width >= _WIDE else []),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not shown or done >= steps,
        )
        self._shown, self._unit = shown, unit
        self._task = self._progress.add_task("training", total=steps, completed=done, figures="compiling")
        self._log_streams: list[tuple[logging.StreamHandler[Any], Any]] = []

    def __enter__(self) -> "TrainingBar":
        errors = sys.stderr
        self._progress.start()  # on a terminal it replaces both streams
        handlers = (each for each in _log_handlers() if each.stream is errors is not sys.stderr)
        self._log_streams = [(each, each.setStream(sys.stderr)) for each in handlers]
        return self

    def __exit__(self, *_: object) -> None:
        for handler, stream in self._log_streams:
            handler.setStream(stream)
        self._progress.stop()

    def advance(self, loss: float, units: int) -> None:
        """Shows one more step, with its loss and number of units."""
        speed = self._speed()
        figures = f"loss {loss:.3f}  {units * speed:,.0f} {self._unit}/s" if speed else f"loss {loss:.3f}"
        self._progress.update(self._task, advance=1, figures=figures)

    def stopping(self) -> None:
        """Says that the run ends after this step; it only changes a value, so that handlers of signals may call it."""
        self._progress.update(self._task, description="stopping after this step")

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._shown:
            self._progress.console.print(text, highlight=False)

    def _speed(self) -> float:
        return self._progress.tasks[0].speed or 0.0


def _log_handlers() -> set["logging.StreamHandler[Any]"]:
    """All handlers of ``logging`` that write to a stream."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = (handler for each in loggers if isinstance(each, logging.Logger) for handler in each.handlers)
    return {handler for handler in handlers if isinstance(handler, logging.StreamHandler)}


# ---- Stopping cleanly ------------------------------------------------------------------------------------------------


class StopSignal:
    """Handles SIGTERM and Ctrl-C while a run trains: it finishes its step, saves and ends. A context manager.

    A second Ctrl-C ends the run at once. With several processes jax handles SIGTERM, and all processes agree on the
    step after which they stop.

    Args:
      notify: called when a signal is received.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._received = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        if jax.process_count() == 1:
            self._previous = {kind: signal.signal(kind, self._receive) for kind in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def after(self, step: int) -> int:
        """The signal for which to stop after this step, or 0; every process calls this after every step."""
        if jax.process_count() > 1:
            return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else 0
        return self._received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        self._restore()
        self._notify()

    def _restore(self) -> None:
        for kind, handler in self._previous.items():
            signal.signal(kind, handler)
        self._previous = {}


# ---- Loop ------------------------------------------------------------------------------------------------------------

Step = Callable[..., Any]
Evaluate = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """Length of a run and its folder.

    Args:
      steps: steps of the whole run.
      folder: folder of its checkpoints and ``metrics.jsonl``.
      save_every: steps between checkpoints; the last step is always saved.
      evaluate_every: steps between evaluations on held-out data; the last step always has one.
      unit: name of what is counted per second.
      units: number of these in a step.
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
    """Metrics of a run so far, the steps done, and the signal that stopped it before its end; 0 if none did."""

    history: History
    done: int
    stopped: int = 0


def restore_newest(run: Run, like: State) -> tuple[int, State] | None:
    """Steps done and state of the newest checkpoint, with the shardings of ``like``; None if there is none."""
    checkpoints = Checkpoints(run.checkpoints)
    done = checkpoints.newest
    found = None if done is None else (done, checkpoints.restore(done, like))
    checkpoints.close()
    return found


def train(
    step: Step, state: State, feed: Feed, run: Run, done: int = 0, evaluate: Evaluate | None = None
) -> tuple[State, Outcome]:
    """Trains from step ``done`` to ``run.steps``, and returns the state and the outcome.

    Args:
      step: ``step(*state, batch) -> (*state, loss)``.
      state: state after ``done`` steps.
      feed: batches after a number of steps.
      run: length and folder.
      done: steps that an earlier process did.
      evaluate: ``(*state) -> metrics`` on held-out data; an array of values counts as its mean.
    """
    with ExitStack() as stack:
        bar = stack.enter_context(TrainingBar(run.steps, done, run.unit, shown=_is_first()))
        stop = stack.enter_context(StopSignal(bar.stopping))
        record = stack.enter_context(MetricsFile(run.folder / "metrics.jsonl" if _is_first() else None, done))
        checkpoints = Checkpoints(run.checkpoints)
        stack.callback(checkpoints.close)
        loop = _Loop(step, run, bar, record, checkpoints, evaluate)
        return loop.train(state, feed, done, stop)


@dataclass(frozen=True)
class _Loop:
    step: Step
    run: Run
    bar: TrainingBar
    record: MetricsFile
    checkpoints: Checkpoints
    evaluate: Evaluate | None

    def train(self, state: State, feed: Feed, done: int, stop: StopSignal) -> tuple[State, Outcome]:
        if done >= self.run.steps:
            self.bar.note(f"resumed at {done} of {self.run.steps} steps: nothing to do")
        elif done:
            self.bar.note(f"resumed after step {done}")
        stopped = 0
        for number, batch in zip(range(done + 1, self.run.steps + 1), feed(done), strict=False):
            state, done = self._step(state, number, batch), number
            stopped = stop.after(number) if number < self.run.steps else 0
            if stopped or self.run.saves(number):
                self.checkpoints.save(number, state)
            if stopped:
                break
        else:
            self._save_rest(state, done)
        return state, Outcome(self.record.history, done, stopped)

    def _step(self, state: State, number: int, batch: Any) -> State:
        start = time.perf_counter()
        *after, loss = self.step(*state, batch)
        value = float(loss)
        seconds = time.perf_counter() - start
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

    def _save_rest(self, state: State, done: int) -> None:
        """Saves the state if the batches ended before the steps did."""
        if done < self.run.steps:
            self.bar.note(f"the batches ended after step {done} of {self.run.steps}")
            if done and self.checkpoints.newest != done:
                self.checkpoints.save(done, state)


def _is_first() -> bool:
    return jax.process_index() == 0
