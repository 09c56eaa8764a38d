"""The program of ``tiny``, as tasks of launchers train it.

TASKS_FAIL is a step for which process 1 has no batch, but an error. The first attempt of a job of SLURM is slow, so
that it can be stopped; the next ones are not."""

import os
import time
from dataclasses import replace

import jax

from meshdsl.training.batches import Batches, shuffled
from tests.training.tiny import X, Y
from tests.training.tiny import program as tiny

FAILS = int(os.environ.get("TASKS_FAIL", "-1"))
SLOW = "SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ


class Records:
    """Those of ``tiny``, which are slow or end with an error."""

    def __init__(self):
        self.records = shuffled({"x": X, "y": Y})

    def __len__(self):
        return len(self.records)

    def take(self, positions):
        time.sleep(0.1 if SLOW else 0.0)
        if jax.process_index() == 1 and positions[0] // 32 == FAILS - 1:
            raise RuntimeError(f"no batch for step {FAILS}")
        return self.records.take(positions)


program = replace(tiny, batches=lambda: Batches(Records(), 32), evaluate=None)
