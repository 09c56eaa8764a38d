"""The certificate: a proved lower bound on the seconds of every plan of the problem.

The bound speaks of all mesh axes at once. It is the lower bound of the network ``NetworkBuilder.bounds``,
which no plan can undercut, raised by message passing; states that cannot be in a better plan go,
and what has become small is eliminated. At last the rest is eliminated as well, as exactly as its
width allows: if it is narrow, the bound is the optimum.
"""

from types import MappingProxyType

from meshdsl.planner.encoding.fanout import Underpaid
from meshdsl.planner.encoding.hubs import Remaining
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.mrf.elimination import eliminate, lower_bound
from meshdsl.planner.mrf.network import Network
from meshdsl.planner.mrf.trws import TRWS, MessagePassing, clip, prune_states, sum_of_minima
from meshdsl.planner.objective import CostedPlan, Evaluator
from meshdsl.planner.problem.model import Assignment
from meshdsl.util.arrays import Ids

_SMALL = 1 << 20  # entries that one step of elimination may touch
_LARGE = 2_000_000  # entries of a network from which on messages stay beside the tables ...
_SETTLING = 100  # ... for settling takes as long as so many sweeps
_WORTH = 0.9
_NOTHING = 1e-12  # part of a cost that is rounding


class Certificate:
    """A lower bound on the problem that can be raised.

    Args:
      best: a plan; its cost is what the bound is compared with, and states that cannot beat
        it are dropped.
      trees: entries that the exact trees of one value may have; if any may, all nodes beside shared values stay.
      missed: plans that networks before this one have let some values pay too little in (see
      ``NetworkBuilder.bounds``).
    """

    def __init__(
        self, joint: NetworkBuilder, best: CostedPlan, trees: int = 0, underpaid: Underpaid = MappingProxyType({})
    ) -> None:
        self.joint, self.model, self.best = joint, joint.model, best
        self._trees, self._underpaid = trees, underpaid
        self._whole, self._stays = joint.bounds(best, trees, underpaid), joint.kept_with_trees if trees else frozenset()
        self._limit, self._shorter = best.cost + 1.0, self._whole.reduced
        self._made: Network | None = None
        self._messages: MessagePassing | None = None
        self._pointed: Ids | None = None  # states that messages which are gone pointed to
        self.bound: float = 0.0 if self._shorter else sum_of_minima(self._network)

    @property
    def _network(self) -> Network:
        """The network of all copies of all blocks, put together when it is first asked for."""
        if self._made is None:
            self._made = self._whole.network
            clip(self._made, self._limit)
        return self._made

    @property
    def gap(self) -> float:
        """How far the best plan can be from the bound, as a part of its cost."""
        return 1 - self.bound / self.best.cost if self.best.cost else 0.0

    @property
    def exhausted(self) -> bool:
        """Whether messages have found the minimum of the network, which no more of them raise."""
        return self._messages is not None and self._messages.gap <= _NOTHING

    @property
    def work(self) -> int:
        """Entries of all tables: what one pass of messages costs."""
        return (self._made or self._whole).entries

    @property
    def shortened(self) -> int:
        """The same for the network of a shorter step, if there is one (see ``Shorter``)."""
        return self._shorter.entries if self._shorter else 0

    @property
    def left(self) -> Remaining:
        """The states that a better plan can have."""
        return self.joint.domains.remaining(self._network)

    @property
    def underpaid(self) -> Underpaid:
        """The values that are worth more in the next network, with the plans that say so."""
        return self.joint.underpaid(self.pointed, self.best, self._trees, self._underpaid)

    @property
    def pointed(self) -> Assignment:
        """The plan that messages point to."""
        if isinstance(self._messages, TRWS):
            return self.joint.domains.rows(self._messages.states)
        return self.best.rows if self._pointed is None else self.joint.domains.rows(self._pointed)

    @property
    def states(self) -> int:
        """Number of states of the variables that are left."""
        return sum(unary.size for unary in self._network.unary.values())

    def touched(self, passes: int) -> int:
        """Entries that ``tighten`` touches, counted as passes do."""
        return (2 * passes + (_SETTLING if self.work <= _LARGE else 0)) * self.work

    def lift(self, passes: int) -> None:
        """Pass messages and leave the tables as they are, shared between equal layers, which large networks need.

        Those of a shorter step are passed as often as helps.
        """
        if self._shorter:
            self.bound = max(self.bound, self._shorter.bound(self._limit))
            self._pointed = self._shorter.decoded
            return
        self._messages = self._messages or TRWS(self._network)
        self._messages.run(passes)
        self.bound = max(self.bound, self._messages.bound)

    def tighten(self, passes: int, evaluator: Evaluator | None = None) -> None:
        """Pass messages, drop states that cannot be optimal, eliminate what has become small.

        Those of ``lift`` are not those of tables that can change, and begin anew where there are several blocks; those
        of a large network stay beside its tables, until few enough states are left.

        Args:
          evaluator: if there is one, the plan that the messages point to may be the best from now on.
        """
        messages = self._messages
        if not isinstance(messages, TRWS):
            messages = self._messages = TRWS(self._network)
            if self._shorter:
                self._shorter.initialize(messages, self._limit)
        messages.run(passes)
        self._consider(messages.states, evaluator)
        if self.work > _LARGE:
            self.bound = max(self.bound, messages.bound)
            self._messages = messages.pruned(self.best.cost, _WORTH)
            return
        self._messages = self._shorter = None
        messages.reparametrize()
        self.bound = max(self.bound, sum_of_minima(self._network))
        prune_states(self._network, self.best.cost)
        self._network.reduce(_SMALL, self._stays)
        self.bound = max(self.bound, sum_of_minima(self._network))

    def finish(self, largest: int, evaluator: Evaluator | None = None) -> None:
        """Eliminate what is left, in groups where a table would pass ``largest`` entries; it often ends the proof.

        Args:
          evaluator: as for ``tighten``, if nothing had to be split.
        """
        domains, tables = self._network.listed()
        found = eliminate(domains, tables, [0] * len(domains), largest, self._network.memo)
        if found.exact:
            self._consider(self._network.decode(self._network.order, found.states), evaluator)
        least = found.cost if found.exact else lower_bound(domains, tables, largest)
        self.bound = max(self.bound, self._network.constant + least)

    def _consider(self, chosen: Ids, evaluator: Evaluator | None) -> None:
        """Note some states of the variables; take the plan that they stand for if it can be seen to be better."""
        self._pointed = chosen
        if evaluator:
            found = evaluator.exact(evaluator.evaluate(self.joint.domains.rows(chosen)))
            self.best = min(self.best, found, key=lambda choice: choice.cost)
