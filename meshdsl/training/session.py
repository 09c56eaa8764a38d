"""One run of ``meshdsl train``: say what is planned, train, and show what came of it."""

from dataclasses import dataclass
from pathlib import Path

import jax
from rich.console import Console

from meshdsl.api import Program, Sharded
from meshdsl.errors import ArgumentError
from meshdsl.layouts.mesh import Mesh
from meshdsl.plan.text import summary_text
from meshdsl.planned import planned
from meshdsl.training.loop import Outcome, Run
from meshdsl.training.trainer import check_trainable, steps_of, train_program


def check_folder(folder: Path, resume: bool) -> None:
    """Refuse to write over another run."""
    if not resume and any(Run(1, folder).checkpoints.glob("[0-9]*")):
        raise ArgumentError(f"{folder} holds a run: --resume goes on with it, --folder names another place")


@dataclass
class Session:
    """A program to be trained on a mesh, in a folder; with several processes the first speaks.

    Args:
      rules: instead of the program's own.
      memory: limit per device, such as ``"60GiB"``; default is the topology's.
    """

    program: Program
    mesh: Mesh
    folder: Path
    rules: str | None = None
    memory: str | None = None

    def __post_init__(self) -> None:
        """Its console, which is quiet unless this process speaks."""
        self._console = Console(highlight=False, quiet=not self.speaks)

    @property
    def speaks(self) -> bool:
        """Whether this is the first process."""
        return jax.process_index() == 0

    def train(self, steps: int | None, save_every: int, evaluate_every: int) -> Outcome:
        """Train to ``steps`` steps, or those of the program, from the newest checkpoint if there is one."""
        check_trainable(self.program)
        run = Run(steps or steps_of(self.program), self.folder, save_every, evaluate_every)
        _, outcome = train_program(self._planned(), self.program, run)
        if self.speaks:
            self._report(outcome, run)
        return outcome

    def _planned(self) -> Sharded:
        sharded = planned(self.program, self.mesh, self.rules, self.memory)
        with self._console.status(f"planning over {self.mesh}"):
            plan = sharded.plan(*self.program.args)
        if self.speaks:
            self.folder.mkdir(parents=True, exist_ok=True)
            plan.save(self.folder / "plan.json")
        self._console.print(summary_text(plan), markup=False, soft_wrap=True)
        self._console.print(f"\nthe whole plan: {self.folder / 'plan.json'}")
        return sharded

    def _report(self, outcome: Outcome, run: Run) -> None:
        from meshdsl.training.picture import draw_curves  # matplotlib is slow to load

        if outcome.stopped:
            self._console.print(f"stopped after step {outcome.done} of {run.steps}; --resume goes on")
        picture = draw_curves(outcome.history, self.folder / "curves.png")
        self._console.print(f"curves: {picture}   metrics: {self.folder / 'metrics.jsonl'}")
