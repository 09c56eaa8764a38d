"""Trackers that metrics of a run are sent to: TensorBoard and Weights & Biases.

Each is a function of the steps done and the values of a line of ``metrics.jsonl``, opened by its first call.
"""

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshdsl.errors import ArgumentError, first_line
from meshdsl.training.observing.metrics import Metrics, OnMetrics

log = logging.getLogger("meshdsl")


class TensorBoard:
    """Writes scalars to ``folder/tensorboard``; a run that resumes hides what earlier ones wrote of its steps."""

    PACKAGE = "tensorboardX"

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def __call__(self, step: int, values: Metrics) -> None:
        """Writes values."""
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(_tag(name), value, step)

    def close(self) -> None:
        """Writes what is still in memory."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """Logs to one run of Weights & Biases per folder, which its environment variables, ``WANDB_...``, configure."""

    PACKAGE = "wandb"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: Any = None

    def __call__(self, step: int, values: Metrics) -> None:
        """Logs values."""
        if self._run is None:
            import wandb

            file = self._folder / "wandb-id"
            if not file.exists():
                file.write_text(secrets.token_hex(8))
            name = self._folder.resolve().name
            self._run = wandb.init(id=file.read_text(), resume="allow", name=name, dir=str(self._folder))
        self._run.log({_tag(name): value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """Sends what is still in memory."""
        if self._run is not None:
            self._run.finish()


_TRACKERS: Mapping[str, type[TensorBoard] | type[WeightsAndBiases]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def check_trackers(names: Iterable[str]) -> None:
    """Raises ArgumentError if the package of a tracker is not installed."""
    for name in names:
        if find_spec(package := _TRACKERS[name].PACKAGE) is None:
            raise ArgumentError(f"--log {name} needs {package}: pip install 'meshdsl[{name}]'")


@contextmanager
def trackers(names: Iterable[str], folder: Path) -> Iterator[list[OnMetrics]]:
    """The trackers of a run, closed at the end; one that fails then leaves a warning."""
    opened = [_TRACKERS[name](folder) for name in dict.fromkeys(names)]
    try:
        yield [*opened]
    finally:
        for each in opened:
            try:
                each.close()
            except Exception as error:  # of whatever the tracker does
                log.warning("%s: %s: %s", type(each).__name__, type(error).__name__, first_line(error))


def _tag(name: str) -> str:
    """A name that trackers take for one value, not for a group: ``tokens_per_s``."""
    return name.replace("/", "_per_").replace(" ", "_")
