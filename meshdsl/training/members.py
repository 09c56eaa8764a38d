"""Which processes a supervised run goes on with: fewer when one cannot be started any more, later all again.

A process that fails is started again, with all others. If the same one fails again before a step was done, its device
is taken to be gone: the run goes on without it, over a mesh that is as much smaller. Some time later all are started
again; if one fails before a step, the run goes back to those that worked, and waits twice as long for the next try.
"""

import time
from collections.abc import Callable

from meshdsl.errors import LayoutError
from meshdsl.layouts.mesh import Mesh

_LONGEST = 6 * 3600.0  # seconds between two attempts to start all


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

    def grow(self) -> None:
        """Takes all."""
        self._before, self.present = self.present, self.all
        self._suspect = self._since = None

    def stepped(self) -> None:
        """Those present have done a step together."""
        self._suspect = None
        if self.is_growing:
            self._before, self.wait = (), self._first_wait
        elif self.present != self.all and self._since is None:
            self._since = self._clock()

    def failed(self, who: int | None, plannable: Callable[[], int]) -> bool:
        """Decides who goes on after a fault; whether enough are left.

        Args:
          who: the position, among those present, of the process that failed; None if that is not known.
          plannable: the largest number of processes below the present one that there is a plan for; 0 if there is none.
        """
        slot = None if who is None else self.present[who]
        again, self._suspect = self._suspect == (slot,), (slot,)
        if self.is_growing:
            self.present, self._before, self._suspect = self._before, (), None
            self.wait = min(2 * self.wait, _LONGEST)
        elif again and self.least < len(self.all):
            left = plannable() if len(self.present) > self.least else 0
            if left < self.least:
                return False
            gone = self.present[-1] if slot is None else slot
            self.present = tuple(each for each in self.present if each != gone)[:left]
            self._suspect = self._since = None
        return True


def smaller_meshes(mesh: Mesh, count: int, axis: str, below: int, least: int) -> dict[int, Mesh]:
    """Returns the meshes of fewer processes, each with as many devices as before, by their number; the largest first.

    Args:
      mesh: of all processes.
      count: number of all.
      axis: the mesh axis that shrinks.
      below: number of processes that has to go down.
      least: fewest processes.
    """
    found, stated = {}, mesh.topology if mesh.states_topology else None
    for processes in range(below - 1, least - 1, -1):
        size, rest = divmod(mesh.axis(axis) * processes, count)
        try:
            if size and not rest:
                found[processes] = Mesh(topology=stated, **{**mesh.sizes_by_name, axis: size})
        except LayoutError:  # the topology has no links for such a mesh
            continue
    return found
