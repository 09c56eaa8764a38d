"""Runs in a process of their own: one that ends it, or stands still, is a run that failed.

Some do, on CPUs: threads of XLA's runtime wait for each other when collectives, or the batches of a decomposition, take
all of them (``docs/evidence/fuzz.md``).
"""

import multiprocessing
from multiprocessing.connection import Connection

from tests.fuzz.run import run
from tests.fuzz.tally import Tally

STILL = 300.0  # seconds that a run may take, besides those for a smaller failing case
_IN_A_ROW = 5


class Worker:
    """A process in which runs are made, another one after one that has not come back."""

    def __init__(self, patience: float) -> None:
        self.patience, self._lost = patience, 0
        self._begin()

    def _begin(self) -> None:
        spawned = multiprocessing.get_context("spawn")
        self._here, there = spawned.Pipe()
        self._process = spawned.Process(target=_serve, args=(there, self.patience), daemon=True)
        self._process.start()
        there.close()

    def run(self, seed: int) -> tuple[Tally, str]:
        """What one seed's run has counted, and its error, if it failed; RuntimeError if none runs any more."""
        try:
            self._here.send(seed)
            if self._here.poll(STILL + self.patience):
                found: tuple[Tally, str] = self._here.recv()
                self._lost = 0
                return found
            error = f"it stands still, for {STILL + self.patience:.0f} s"
        except (EOFError, OSError):
            error = "its process has ended"
        self._lost += 1
        if self._lost == _IN_A_ROW:
            raise RuntimeError(f"{_IN_A_ROW} runs in a row did not come back, the last of seed {seed}: {error}")
        self.end()
        self._begin()
        return Tally(), error

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, patience: float) -> None:
    """Answer the seeds that come through a pipe, for good."""
    while True:
        seed, tally, error = pipe.recv(), Tally(), ""
        try:
            run(seed, tally, patience)
        except Exception as failure:
            error = str(failure) or repr(failure)
        pipe.send((tally, error))
