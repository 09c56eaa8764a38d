"""Which processes a supervised run goes on with: fewer when one cannot be started any more, later all again.

A process that fails is started again, with all others. If the same one fails again before a step was done, its device
is taken to be gone, as those of a machine that is silent are: the run goes on without it, over a mesh that is as much
smaller. Some time later all are started again; if one fails before a step, the run goes back to those that worked, and
waits twice as long for the next try.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from meshdsl.errors import LayoutError
from meshdsl.layouts.mesh import Mesh

Plannable = Callable[[int], int]
_SHORTEST, _LONGEST = 1.0, 6 * 3600.0  # seconds between two attempts to start all, once one has failed


class Members:
    """The processes that are to be started, by their numbers.

    Args:
      count: number of all.
      least: fewest to go on with.
      wait: seconds of training with fewer after which all are tried again.
      clock: seconds.
    """

    def __init__(self, count: int, least: int, wait: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.all = self.present = tuple(range(count))
        self.least, self.wait = least, wait
        self._first_wait, self._clock = wait, clock
        self._suspect: tuple[int | None] | None = None  # of the last fault
        self._before: tuple[int, ...] = ()  # that worked, while all are tried again
        self._since: float | None = None  # first step of fewer than all

    @property
    def is_growing(self) -> bool:
        """Whether all are tried again and have done no step yet."""
        return bool(self._before)

    @property
    def may_grow(self) -> bool:
        """Whether it is time to try all again."""
        return self._since is not None and self._clock() - self._since >= self.wait

    def grow(self, present: Sequence[int]) -> None:
        """Takes more, as far as they are here."""
        self._before, self.present = self.present, tuple(present)
        self._suspect = self._since = None

    def stepped(self) -> None:
        """Those present have done a step together."""
        self._suspect = None
        if self.is_growing:
            self._before, self.wait = (), self._first_wait
        elif self.present != self.all and self._since is None:
            self._since = self._clock()

    def failed(self, who: int | None, plannable: Plannable) -> bool:
        """Decides who goes on after a fault; whether enough are left.

        Args:
          who: the process that failed; None if that is not known.
          plannable: the largest number of processes, of at most so many, that there is a plan for; 0 if there is none.
        """
        again, self._suspect = self._suspect == (who,), (who,)
        if self.is_growing:
            self.present, self._suspect = self._before, None
            self._end_growth()
            return True
        if again and self.least < len(self.all):
            return self.lost({self.present[-1] if who is None else who}, plannable)
        return True

    def lost(self, gone: Collection[int], plannable: Plannable) -> bool:
        """Leaves out processes that are gone for certain; whether enough are left."""
        rest = tuple(each for each in self.present if each not in gone)
        if rest == self.present:
            return True
        if self.is_growing:
            self._end_growth()
        left = plannable(len(rest)) if len(rest) >= self.least else 0
        if left < self.least:
            return False
        self.present = rest[:left]
        self._suspect = self._since = None
        return True

    def _end_growth(self) -> None:
        self._before, self.wait = (), min(2 * max(self.wait, _SHORTEST), _LONGEST)

    # ---- For another supervisor that goes on ----

    @property
    def memory(self) -> dict[str, Any]:
        """What ``restore`` takes, as JSON."""
        return {"present": self.present, "before": self._before, "wait": self.wait, "suspect": self._suspect}

    def restore(self, memory: dict[str, Any]) -> None:
        """Goes on where another one was."""
        self.present, self._before, self.wait = tuple(memory["present"]), tuple(memory["before"]), memory["wait"]
        self._suspect = tuple(memory["suspect"]) if memory["suspect"] else None


def smaller_meshes(mesh: Mesh, count: int, axis: str, most: int, least: int) -> dict[int, Mesh]:
    """Returns the meshes of fewer processes, each with as many devices as before, by their number; the largest first.

    Args:
      mesh: of all processes.
      count: number of all.
      axis: the mesh axis that shrinks.
      most: most processes.
      least: fewest processes.
    """
    found, stated = {}, mesh.topology if mesh.states_topology else None
    for processes in range(most, least - 1, -1):
        size, rest = divmod(mesh.axis(axis) * processes, count)
        try:
            if size and not rest:
                found[processes] = Mesh(topology=stated, **{**mesh.sizes_by_name, axis: size})
        except LayoutError:  # the topology has no links for such a mesh
            continue
    return found
