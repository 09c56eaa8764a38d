"""What a person sees while a run trains: a bar with loss, speed and time left."""

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


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
