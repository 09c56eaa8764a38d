"""The training loop: steps, evaluations, checkpoints, and a clean stop.

    done, state = restore_newest(run, like=state) or (0, state)
    state, outcome = train(step, state, host_feed(batches), Run(steps=300, folder=Path("runs/gpt")), done)

``step`` is called as ``step(*state, batch) -> (*state, loss)``: a planned step or a plain ``jax.jit`` step. A run
resumes from its newest checkpoint with the batches and losses that it would have had without the interruption. With
several processes all call this; the first one shows progress and writes metrics.

Devices do not wait for Python: a thread makes and places the next batches, the loss of a step is read when the next
one has been started, and checkpoints are written in the background. Several steps can go in one dispatch
(``meshdsl.training.sink``).
"""

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from rich import get_console
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshdsl.errors import ArgumentError, NonFiniteError
from meshdsl.training.batches import BatchesEnded, Feed, ReadAhead, ReadingStopped, at_least
from meshdsl.training.observing.events import COMPILED, FIRST_STEP, LAST_STEP, add_event
from meshdsl.training.observing.metrics import History, Metrics, MetricsFile, OnMetrics, RecentLosses
from meshdsl.training.observing.profile import Profile
from meshdsl.training.observing.step_times import DeviceMemory, SlowestProcess, StepTimes
from meshdsl.training.saving.checkpoint import FACTS, Checkpoints, State
from meshdsl.training.saving.folder import CHECKPOINTS, METRICS, PROFILE
from meshdsl.training.saving.storage import CheckpointCopies, Mirror, is_staged
from meshdsl.training.sink import Sink, check_sink
from meshdsl.util.text import seconds_text

# ---- Progress bar ----------------------------------------------------------------------------------------------------


_WIDE = 80  # characters of a terminal that has room for all columns
_REDRAW = 0.1  # seconds between two updates of the bar


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
        self._shown, self._unit, self._steps = shown, unit, steps
        self._done, self._counted, self._drawn = done, 0, 0.0
        self._last = 0.0, 0  # loss and units of the last step
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
        if self._counted:  # the run ends before its last step
            self._draw(time.monotonic())
        self._progress.stop()

    def advance(self, loss: float, units: int) -> None:
        """Counts one more step, with its loss and number of units; it is drawn a few times per second."""
        self._counted, self._last = self._counted + 1, (loss, units)
        now = time.monotonic()
        if now - self._drawn >= _REDRAW or self._counted + self._done >= self._steps:
            self._draw(now)

    def _draw(self, now: float) -> None:
        loss, units = self._last
        figures = f"loss {loss:.3f}"
        if self._drawn:  # the first step compiles
            figures += f"  {units * self._counted / (now - self._drawn):,.0f} {self._unit}/s"
        self._progress.update(self._task, advance=self._counted, figures=figures)
        self._done, self._counted, self._drawn = self._done + self._counted, 0, now

    def stopping(self) -> None:
        """Says that the run ends after this step; it only changes a value, so that handlers of signals may call it."""
        self._progress.update(self._task, description="stopping after this step")

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._shown:
            self._progress.console.print(text, highlight=False)


def _log_handlers() -> set["logging.StreamHandler[Any]"]:
    """All handlers of ``logging`` that write to a stream."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = (handler for each in loggers if isinstance(each, logging.Logger) for handler in each.handlers)
    return {handler for handler in handlers if isinstance(handler, logging.StreamHandler)}


# ---- Stopping cleanly ------------------------------------------------------------------------------------------------


class StopSignal:
    """Handles SIGTERM and Ctrl-C while a run trains: it finishes its step, saves and ends. A context manager.

    A second Ctrl-C ends the run at once. With several processes jax handles SIGTERM, and all processes agree on the
    dispatch after which they stop: one after the last that any has asked for. A process that waits is at most one
    behind the others, so it takes part in at most ``MARGIN`` more.

    Args:
      notify: called when a signal is received.

    Attributes:
      received: the signal, or 0; with several processes always 0.
    """

    MARGIN = 2  # dispatches
    NOTICE = 4.0  # seconds in which all processes hear of a signal; jax looks for one every second

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self.received = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        main = threading.current_thread() is threading.main_thread()  # others, as in Ray, may not handle signals
        if jax.process_count() == 1 and main:
            self._previous = {kind: signal.signal(kind, self._receive) for kind in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def after(self, dispatch: int) -> int:
        """The signal for which to stop after this dispatch, or 0; every process asks after each, numbered in turn."""
        if jax.process_count() > 1:
            return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(dispatch) else 0
        return self.received

    def announce(self) -> None:
        """Lets all processes stop as if this one had received SIGTERM; it returns when they have agreed."""
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self.NOTICE)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
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
    """Length of a run, its folder, and what it keeps.

    Args:
      steps: steps of the whole run.
      folder: folder of its checkpoints and ``metrics.jsonl``.
      bucket: folder in a bucket that has the checkpoints, and copies of the files of ``folder``; empty without one.
      save_every: steps between checkpoints; the last step is always saved.
      evaluate_every: steps between evaluations on held-out data; the last step always has one.
      unit: name of what is counted per second.
      units: number of these in a step.
      keep: number of checkpoints to keep.
      keep_every: checkpoints after multiples of this many steps are kept as well.
      stops_on_nan: whether a loss that is NaN or infinite ends the run.
      saves_non_finite: whether to save states with NaNs or infinities; otherwise they end the run.
      facts: what checkpoints say of the run, as JSON.
      sink: steps in one dispatch; it divides ``save_every`` and ``evaluate_every``.
      measures_sink: whether so many are taken in one dispatch only if the first steps show that this is faster.
      profile: the first and the last step that are traced by jax's profiler; None for none.
      compute_bound: seconds in which the devices could do the products of a step, for MFU; 0 if that is not known.

    Raises:
      ArgumentError: ``sink`` does not divide, or the run ends before the first step to profile.
    """

    steps: int
    folder: Path
    save_every: int = 50
    evaluate_every: int = 50
    unit: str = "steps"
    units: int = 1
    keep: int = 2
    keep_every: int | None = None
    stops_on_nan: bool = True
    saves_non_finite: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    bucket: str = ""
    sink: int = 1
    measures_sink: bool = False
    profile: tuple[int, int] | None = None
    compute_bound: float = 0.0

    def __post_init__(self) -> None:
        """Checks ``sink`` and ``profile``."""
        check_sink(self.sink, self.save_every, self.evaluate_every)
        if self.profile is not None and 0 < self.steps < self.profile[0]:
            raise ArgumentError(f"--profile {self.profile[0]}:{self.profile[1]} of a run of {self.steps} steps")

    @property
    def length(self) -> str:
        """Its length and what interrupts its steps, in words."""
        return f"{self.steps} steps, saved every {self.save_every}, evaluated every {self.evaluate_every}"

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows this many steps."""
        return step % self.save_every == 0 or step == self.steps

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation follows this many steps."""
        return step % self.evaluate_every == 0 or step == self.steps

    @property
    def place(self) -> Path | str:
        """The folder that all processes share."""
        return self.bucket or self.folder

    def checkpoints(self) -> Checkpoints:
        """Opens the checkpoints."""
        publish = Mirror(self.folder, self.bucket).publish if self.bucket else None
        copy = self.copies.add if is_staged(self.bucket) else None
        folder = epath.Path(self.folder if is_staged(self.bucket) else self.place) / CHECKPOINTS
        return Checkpoints(folder, self.keep, self.keep_every, self.facts, not self.saves_non_finite, publish, copy)

    @property
    def copies(self) -> CheckpointCopies:
        """The copies of checkpoints in a bucket that orbax cannot write to."""
        bucket = f"{self.bucket}/{CHECKPOINTS}"
        return CheckpointCopies(self.folder / CHECKPOINTS, bucket, FACTS, self.keep, self.keep_every)

    def fetch(self) -> None:
        """Copies to the local folder what other machines wrote to the bucket."""
        Mirror(self.folder, self.bucket).fetch()
        if is_staged(self.bucket):
            self.copies.fetch()


@dataclass(frozen=True)
class Outcome:
    """Metrics of a run so far, the steps done, and the signal that stopped it before its end; 0 if none did.

    Args:
      profile: of the steps that were traced, if any were.
    """

    history: History
    done: int
    stopped: int = 0
    profile: Profile | None = None


def restore_newest(run: Run, like: State) -> tuple[int, State] | None:
    """Steps done and state of the newest intact checkpoint, with the shardings of ``like``; None if there is none."""
    with run.checkpoints() as checkpoints:
        return checkpoints.restore_newest(like)


def train(
    step: Step,
    state: State,
    feed: Feed,
    run: Run,
    done: int = 0,
    evaluate: Evaluate | None = None,
    sink: Sink | None = None,
    on_metrics: Iterable[OnMetrics] = (),
    checkpoints: Checkpoints | None = None,
) -> tuple[State, Outcome]:
    """Trains from step ``done`` to ``run.steps``, and returns the state and the outcome.

    Args:
      step: ``step(*state, batch) -> (*state, loss)``.
      state: state after ``done`` steps.
      feed: batches after a number of steps; a thread reads them ahead.
      run: length and folder.
      done: steps that an earlier process did.
      evaluate: ``(*state) -> metrics`` on held-out data; an array of values counts as its mean.
      sink: several steps in one dispatch, in place of ``feed``.
      on_metrics: functions that the first process calls with the steps done and the values of a step or an evaluation.
      checkpoints: those of the run, if they are open.

    Raises:
      NonFiniteError: a loss or a state holds NaNs or infinities; the newest checkpoint is of a step before it.
      CheckpointError: a state cannot be saved.
      Exception: whatever the batches raise, after the state has been saved.
    """
    with ExitStack() as stack:
        first = _is_first()
        bar = stack.enter_context(TrainingBar(run.steps, done, run.unit, shown=first))
        stop = stack.enter_context(StopSignal(bar.stopping))
        file = MetricsFile(run.folder / METRICS, done, on_metrics) if first else MetricsFile(None, done)
        record = stack.enter_context(file)
        held = checkpoints or stack.enter_context(run.checkpoints())
        return _Loop(step, run, bar, record, held, evaluate, sink, state, done).train(feed, stop)


@dataclass
class _Loop:
    step: Step
    run: Run
    bar: TrainingBar
    record: MetricsFile
    checkpoints: Checkpoints
    evaluate: Evaluate | None
    sink: Sink | None
    state: State
    done: int  # steps whose state this is

    def __post_init__(self) -> None:
        self._first = self.done + 1
        self._unread: tuple[int, Any] | None = None  # number of steps of the last dispatch, and their losses
        self._loss = math.nan  # the last one that was read
        self._is_finite = True  # whether the last one that was recorded is
        self._called: set[int] = set()  # numbers of steps in one dispatch, so that the next one does not compile
        self._times, self._memory, self._recent = StepTimes(), DeviceMemory(), RecentLosses()
        self._profile = Profile(self.run.folder / PROFILE, self.run.profile if _is_first() else None)
        self._values: Metrics = {}  # others, of the steps that are recorded next
        for loss in self.record.history.losses[-RecentLosses.WINDOW :]:
            self._recent.spike_above(loss)

    def train(self, feed: Feed, stop: StopSignal) -> tuple[State, Outcome]:
        if self.done >= self.run.steps:
            self.bar.note(f"resumed at {self.done} of {self.run.steps} steps: nothing to do")
            return self.state, Outcome(self.record.history, self.done)
        if self.done:
            self.bar.note(f"resumed after step {self.done}")
        stopped, dispatches, groups, several = 0, 0, 0, jax.process_count() > 1
        with ExitStack() as stack:
            stack.callback(lambda: self._profile.stop(self.done))
            if self.sink is not None:
                with self._times.of("compile"):
                    self.sink.prepare(self.done, self.run.steps)
                units = self.sink.feed(self.done, self.sink.counts(self.done, self.run.steps))
            else:
                take = at_least if several else islice
                units = ((1, batch) for batch in take(feed(self.done), self.run.steps - self.done))
            margin = stop.MARGIN if several else 0
            undecided = self.sink is not None and self.sink.measured  # what is read next depends on what is done
            ahead = ReadAhead(units, 2, lambda: bool(stop.received), 0 if undecided else margin, stop.announce)
            batches = stack.enter_context(ahead)
            if self.sink is not None:
                stack.callback(self.sink.release)  # before the thread is waited for, which may wait for a decision
            rest = None  # dispatches that are left for all, once that is known
            if several:
                batches.wait()
                rest = self._rest(batches)
            while self.done < self.run.steps and not stopped and rest != 0:
                try:
                    with self._times.of("input"):
                        count, batch = next(batches)
                except StopIteration:
                    self.bar.note(f"the batches ended after step {self.done} of {self.run.steps}")
                    break
                except ReadingStopped:
                    stopped = stop.received
                    break
                except Exception:
                    if jax.process_count() == 1:  # others are in a step that this process cannot do
                        self._save_rest()
                    raise
                self._run(count, batch)
                dispatches, groups = dispatches + 1, groups + (count > 1)
                if self.sink is not None and self.sink.is_measured(groups):
                    self._read_losses()
                    self.bar.note(self.sink.decide())
                    batches.margin = margin
                if rest is not None:
                    rest -= 1
                elif self.done < self.run.steps and (stopped := stop.after(dispatches)) and several:
                    rest = self._rest(batches)
                    stopped = stopped if rest is None else 0
        self._note(LAST_STEP, self.done)
        self._save_rest()
        self.checkpoints.wait()
        if stopped and batches.failure is not None:
            raise batches.failure
        profile = self._profile if self._profile.steps else None
        return self.state, Outcome(self.record.history, self.done, stopped, profile)

    def _rest(self, batches: ReadAhead) -> int | None:
        """How many dispatches all processes can still do if the batches of one have ended; None if they have not.

        All processes have to call this, before the same dispatch.
        """
        ended = isinstance(batches.failure, BatchesEnded)
        own = np.array([batches.failure is not None and not ended, ended, batches.left], np.int32)
        found = np.asarray(multihost_utils.process_allgather(own)).reshape(-1, 3)
        if found[:, 0].any() or not found[:, 1].any():
            return None
        batches.margin = 0  # nothing else is agreed on
        rest = int(found[found[:, 1] > 0, 2].min())
        who = np.flatnonzero((found[:, 1] > 0) & (found[:, 2] == rest)).tolist()
        whose = "" if len(who) == len(found) else f" of process {', '.join(map(str, who))}"
        self.bar.note(f"the batches{whose} end after step {self.done + rest} of {self.run.steps}")
        return rest

    def _run(self, count: int, batch: Any) -> None:
        """Starts steps, and meanwhile records those before; then evaluates and saves if it is time to."""
        step = self.step if self.sink is None or count == 1 else self.sink.step
        if self._profile.begins(self.done, count):
            self._wait()
            with self._times.of("profile"):
                self._profile.start(self.done)
        with self._times.of("dispatch" if count in self._called else "compile"):
            *after, losses = step(*self.state, batch)
        self._called.add(count)
        if self.done + 1 == self._first:
            self._note(COMPILED, self._first)
        self._read_losses()
        self.state, self.done, self._unread = tuple(after), self.done + count, (count, losses)
        if self._profile.ends(self.done):
            self._wait()
            with self._times.of("profile"):
                self._profile.stop(self.done)
        evaluates = self.evaluate is not None and self.run.evaluates(self.done)
        if evaluates or self.run.saves(self.done):
            self._compare_processes()
            loss = self._read_losses()
            self.record.flush()
            if self.evaluate is not None and evaluates:
                with self._times.of("evaluation"):
                    self._evaluate(self.evaluate, loss)
        if self.run.saves(self.done):
            self._save()

    def _wait(self) -> None:
        """Waits until the devices are idle."""
        self._read_losses()
        jax.block_until_ready(self.state)

    def _read_losses(self) -> float:
        """Waits for the last steps, records them and returns the last loss; those before are recorded already."""
        if self._unread is None:
            return self._loss
        (count, losses), self._unread = self._unread, None
        values = np.asarray(losses).astype(np.float64).reshape(-1).tolist()
        times = self._times.per_step(count)
        if self.done - count + 1 == self._first:
            self._note(FIRST_STEP, self._first)
        own = times["input seconds"] + times["compute seconds"]
        if self.sink is not None:
            self.sink.add(count, own)
        more = {name: round(spent, 6) for name, spent in times.items()}
        more[f"{self.run.unit}/s"] = round(self.run.units / own, 3)
        if self.run.compute_bound:
            more["MFU"] = round(self.run.compute_bound / own, 4)
        if (peak := self._memory.peak()) is not None:
            more["peak device bytes"] = peak
        more |= self._values
        self._values = {}
        for number, value in enumerate(values, self.done - count + 1):
            self._record(number, value, more)
        self._loss = float(values[-1])
        return self._loss

    def _record(self, number: int, loss: float, more: Metrics) -> None:
        usual = self._recent.spike_above(loss)
        if usual is not None:
            more = {**more, "spike above": usual}
            self.bar.note(f"step {number:5d}   training loss {loss:.3f}: a spike, the recent median is {usual:.3f}")
        self.record.step(number, loss, **more)
        self.bar.advance(loss, self.run.units)
        before, self._is_finite = self._is_finite, math.isfinite(loss)
        if not self._is_finite and before and not self.run.stops_on_nan:
            self.bar.note(f"step {number:5d}   the loss or the state is not finite")
        if not self._is_finite and self.run.stops_on_nan:
            newest = (
                self.checkpoints.newest
            )  # raises if a state before this loss is not finite, which is then the cause
            kept = f"the newest checkpoint is after step {newest}" if newest else "there is no checkpoint"
            raise NonFiniteError(f"the loss of step {number} is {loss}; {kept}")

    def _compare_processes(self) -> None:
        """Adds to the values of this step which process takes longest, and says so if that delays the others."""
        if jax.process_count() == 1:
            return
        busy, step = self._times.busy_per_step()
        seconds = np.asarray(multihost_utils.process_allgather(np.array(busy, np.float32))).reshape(-1).tolist()
        slowest = SlowestProcess.of(seconds)
        self._values = {
            "slowest process": slowest.process,
            "slowest process seconds": round(slowest.seconds, 6),
            "other processes seconds": round(slowest.others, 6),
        }
        if slowest.delays(step):
            own, others = seconds_text(slowest.seconds), seconds_text(slowest.others)
            self.bar.note(
                f"step {self.done:5d}   process {slowest.process}: {own} per step for input and Python, others {others}"
            )

    def _evaluate(self, evaluate: Evaluate, loss: float) -> None:
        metrics: Metrics = {name: float(np.mean(value)) for name, value in evaluate(*self.state).items()}
        self.record.evaluation(self.done, metrics)
        shown = "".join(f"   {name} {value:.3f}" for name, value in metrics.items())
        self.bar.note(f"step {self.done:5d}   training loss {loss:.3f}{shown}")

    def _save(self) -> None:
        self._read_losses()
        self.record.flush()  # a checkpoint never has more steps than the file
        with self._times.of("save"):
            self.checkpoints.save(self.done, self.state)

    def _save_rest(self) -> None:
        """Saves the state unless it is saved, or has not changed."""
        self._read_losses()
        if self.done and self.checkpoints.newest != self.done:
            self._save()

    def _note(self, event: str, step: int) -> None:
        if _is_first():
            add_event(self.run.folder, event, step=step)


def _is_first() -> bool:
    return jax.process_index() == 0
