"""The training loop: call the step, watch it, save it, resume it.

    state, history = train(step, init(), batches, Run(steps=300, folder=Path("runs/gpt")))

``step`` is anything called as ``step(*state, batch) -> (*state, loss)``: a planned step or a
plain ``jax.jit`` one. If ``folder`` holds checkpoints the run goes on from the newest, with
the batches and the losses that it would have had without the interruption.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshdsl.training.batches import Batch, BatchIterator
from meshdsl.training.checkpoint import Checkpoints, State
from meshdsl.training.progress import TrainingBar

Step = Callable[..., Any]
Evaluate = Callable[..., Any]


@dataclass(frozen=True)
class Run:
    """How long a run is and where it is kept.

    Args:
      save_every: steps between checkpoints; the last step is always saved.
      evaluate_every: steps between evaluations on held-out text; the last step always has one.
    """

    steps: int
    folder: Path
    save_every: int = 50
    evaluate_every: int = 50

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows this many steps."""
        return step % self.save_every == 0 or step == self.steps

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation follows this many steps."""
        return step % self.evaluate_every == 0 or step == self.steps


@dataclass
class History:
    """Loss of every step, and ``[step, loss]`` of every evaluation, in nats per token."""

    losses: list[float] = field(default_factory=list)
    held_out: list[list[float]] = field(default_factory=list)


def train(
    step: Step, state: State, batches: BatchIterator, run: Run, evaluate: Evaluate | None = None
) -> tuple[State, History]:
    """Train to ``run.steps`` steps, from the newest checkpoint in ``run.folder`` if there is one.

    Args:
      evaluate: ``(*state) -> losses`` on held-out batches; their mean is kept and shown.
    """
    checkpoints = Checkpoints(run.folder / "checkpoints")
    state, history = _resume(checkpoints, state, batches)
    done = len(history.losses)
    with TrainingBar(run.steps, done) as bar:
        if done:
            bar.note(f"resumed after step {done}")
        for number in range(done + 1, run.steps + 1):
            state, loss = _advance(step, state, next(batches), bar)
            history.losses.append(loss)
            if evaluate is not None and run.evaluates(number):
                _evaluate(evaluate, state, number, history, bar)
            if run.saves(number):
                checkpoints.save(number, state, _notes(history, batches))
    checkpoints.close()
    return state, history


def _advance(step: Step, state: State, batch: Batch, bar: TrainingBar) -> tuple[State, float]:
    *after, loss = step(*state, batch)
    value = float(loss)
    bar.advance(value, tokens=int(np.size(jax.tree.leaves(batch)[0])))
    return tuple(after), value


def _evaluate(evaluate: Evaluate, state: State, number: int, history: History, bar: TrainingBar) -> None:
    loss = float(np.mean(evaluate(*state)))
    history.held_out.append([number, loss])
    bar.note(f"step {number:5d}   training loss {history.losses[-1]:.3f}   held-out loss {loss:.3f}")


def _notes(history: History, batches: BatchIterator) -> dict[str, Any]:
    return {"losses": history.losses, "held_out": history.held_out, "batches": batches.get_state()}


def _resume(checkpoints: Checkpoints, state: State, batches: BatchIterator) -> tuple[State, History]:
    found = checkpoints.restore(state)
    if found is None:
        return state, History()
    _, state, notes = found
    batches.set_state(notes["batches"])
    return state, History(notes["losses"], notes["held_out"])
