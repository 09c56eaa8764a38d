"""The certificate: a proved lower bound on the seconds of every plan of the problem.

The bound speaks of all mesh axes at once. It is the lower bound of the network ``Joint.bounds``,
which no plan can undercut, raised by message passing; states that cannot be in a better plan go,
and what has become small is eliminated. At last the rest is eliminated as well, as exactly as its
width allows: if it is narrow, the bound is the optimum.
"""

from meshdsl.planner.eliminate import lower_bound
from meshdsl.planner.extract import Choice
from meshdsl.planner.joint import Joint
from meshdsl.planner.messages import Messages, bound, cap, fix

_SMALL = 1 << 20  # entries that one step of elimination may touch


class Certificate:
    """A lower bound on the problem that can be raised.

    Args:
      best: a plan; its cost is what the bound is compared with, and states that cannot beat
        it are dropped.
    """

    def __init__(self, joint: Joint, best: Choice) -> None:
        self.joint, self.model, self.best = joint, joint.model, best
        self._network = joint.bounds(best)
        cap(self._network, best.cost + 1.0)
        self.bound: float = bound(self._network)

    @property
    def gap(self) -> float:
        """How far the best plan can be from the bound, as a part of its cost."""
        return 1 - self.bound / self.best.cost if self.best.cost else 0.0

    @property
    def work(self) -> int:
        """Entries of all tables: what one pass of messages costs."""
        return self._network.entries

    def tighten(self, passes: int) -> None:
        """Pass messages, drop states that cannot be optimal, eliminate what has become small."""
        messages = Messages(self._network)
        messages.run(passes)
        messages.settle()
        self.bound = max(self.bound, bound(self._network))
        fix(self._network, self.best.cost)
        self._network.reduce(_SMALL)
        self.bound = max(self.bound, bound(self._network))

    def finish(self, largest: int) -> None:
        """Eliminate what is left, in groups where a table would pass ``largest`` entries; it often ends the proof."""
        domains, tables = self._network.listed()
        self.bound = max(self.bound, self._network.constant + lower_bound(domains, tables, largest))
