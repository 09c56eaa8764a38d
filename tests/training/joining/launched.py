"""The program of ``tiny``, as tasks of launchers train it.

The first evaluation of process 1 fails if TASKS_FAILED names a file, which it then makes; the next ones do not. The
first attempt of a job of SLURM is slow, so that it can be stopped."""

import os
import time
from dataclasses import replace
from pathlib import Path

import jax

from meshdsl.training.batches import Batches, shuffled
from tests.training.tiny import X, Y
from tests.training.tiny import program as tiny

SLOW = "SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ


class SlowRecords:
    """Those of ``tiny``."""

    def __init__(self):
        self.records = shuffled({"x": X, "y": Y})

    def __len__(self):
        return len(self.records)

    def take(self, positions):
        time.sleep(0.1 if SLOW else 0.0)
        return self.records.take(positions)


def evaluate(w, key):
    failed = Path(os.environ["TASKS_FAILED"])
    if jax.process_index() == 1 and not failed.exists():
        failed.touch()
        raise RuntimeError("no evaluation")
    return {}


program = replace(
    tiny, batches=lambda: Batches(SlowRecords(), 32), evaluate=evaluate if "TASKS_FAILED" in os.environ else None
)
