"""A certificate: a proved lower bound on the cost of every plan of a model, over all mesh axes jointly.

It is the lower bound of the network ``NetworkBuilder.bounds``, which no plan can undercut, raised by message passing.
States whose min-marginal exceeds the incumbent are pruned, and small remainders are eliminated exactly. Finally the
rest is bounded by mini-buckets: exactly if the treewidth allows, and then the bound is the optimum of the network.
"""

from math import inf
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

PROVED = 1e-9  # relative gap that counts as none: sums of floats round
_ROUNDING = 1e-12  # relative gap that is due to rounding


class Certificate:
    """A lower bound that can be raised.

    Args:
      builder: encodes the states that remain.
      best: the incumbent; states that cannot be part of a better plan are pruned.
      trees: entries that the exact trees of one value may have; if any, all nodes at wide values are kept.
      underpaid: values that networks before this one have undercounted (see ``NetworkBuilder.bounds``).
      work: entries that messages over networks before this one have touched.
      enough: cost from which on a higher bound is of no use.

    Attributes:
      bound: the best lower bound so far.
      best: the incumbent, which better plans may replace.
      work: entries that messages have touched.
    """

    def __init__(
        self,
        builder: NetworkBuilder,
        best: CostedPlan,
        trees: int = 0,
        underpaid: Underpaid = MappingProxyType({}),
        work: int = 0,
        enough: float = inf,
    ) -> None:
        self.builder, self.model, self.best, self.work, self.enough = builder, builder.model, best, work, enough
        self._limits = self.model.limits
        self._trees, self._underpaid = trees, underpaid
        self._assembly = builder.bounds(best, trees, underpaid)
        self._keep = builder.kept_with_trees if trees else frozenset[int]()
        self._clip, self._reduced = best.cost + 1.0, self._assembly.reduced
        self._whole: Network | None = None
        self._messages: MessagePassing | None = None
        self._decoded: Ids | None = None  # by messages that were dropped since
        self.bound: float = 0.0 if self._reduced else sum_of_minima(self._network)

    @property
    def _network(self) -> Network:
        """The network of all copies of all blocks, put together when it is first needed."""
        if self._whole is None:
            self._whole = self._assembly.network
            clip(self._whole, self._clip)
        return self._whole

    # ---- state

    @property
    def gap(self) -> float:
        """The relative gap between the incumbent and the bound."""
        return 1 - self.bound / self.best.cost if self.best.cost else 0.0

    @property
    def is_worth_more(self) -> bool:
        """Whether the gap is worth more work: a wider one is tolerated the more work was spent."""
        return self.bound < self.enough and self.gap > max(PROVED, self._limits.tolerated_gap(self.work))

    @property
    def is_exhausted(self) -> bool:
        """Whether messages have found the minimum of the network, so that no more of them raise the bound."""
        return self._messages is not None and self._messages.gap <= _ROUNDING

    @property
    def entries(self) -> int:
        """Entries of all tables: the work of one pass of messages."""
        return (self._whole or self._assembly).entries

    @property
    def reduced_entries(self) -> int:
        """The same for the reduced step (see ``ReducedDepth``); 0 if there is none."""
        return self._reduced.entries if self._reduced else 0

    @property
    def states(self) -> int:
        """Number of states of the remaining variables."""
        return sum(unary.size for unary in self._network.unary.values())

    @property
    def remaining(self) -> Remaining:
        """The states that a better plan can have."""
        return self.builder.domains.remaining(self._network)

    @property
    def decoded(self) -> Assignment:
        """The plan that messages decode to."""
        if isinstance(self._messages, TRWS):
            return self.builder.domains.rows(self._messages.states)
        return self.best.rows if self._decoded is None else self.builder.domains.rows(self._decoded)

    @property
    def underpaid(self) -> Underpaid:
        """The values that get larger trees in the next network, and assignments in which they were undercounted."""
        return self.builder.underpaid(self.decoded, self.best, self._trees, self._underpaid)

    def tightening_work(self, passes: int) -> int:
        """Returns the entries that ``tighten`` touches, counted as passes do."""
        extra = self._limits.bounds_reparametrize_passes if self._is_reparametrized else 0
        return (2 * passes + extra) * self.entries

    @property
    def _is_reparametrized(self) -> bool:
        """Whether messages are moved into the tables; those of large networks stay beside shared tables."""
        return self.entries <= self._limits.bounds_reparametrize_entries

    # ---- raising

    def pass_messages(self, passes: int) -> None:
        """Passes messages; tables stay as they are, shared between equal layers, as large networks require.

        If there is a reduced step, messages are passed over that until they converge.
        """
        if self._reduced:
            self.bound = max(self.bound, self._reduced.bound(self._clip))
            self._decoded = self._reduced.decoded
            return
        self.work += passes * self.entries
        self._messages = self._messages or TRWS(self._network)
        self._messages.run(passes)
        self.bound = max(self.bound, self._messages.bound)

    def tighten(self, passes: int, evaluator: Evaluator | None = None) -> None:
        """Passes messages, prunes states, moves messages into the tables, and eliminates small remainders.

        Of a large network messages stay beside its tables, until few enough states remain.

        Args:
          evaluator: if given, the decoded plan becomes the incumbent if it is better.
        """
        self.work += self.tightening_work(passes)
        messages = self._messages
        if not isinstance(messages, TRWS):
            messages = self._messages = TRWS(self._network)
            if self._reduced:
                self._reduced.initialize(messages, self._clip)
        messages.run(passes)
        self._consider(messages.states, evaluator)
        if not self._is_reparametrized:
            self.bound = max(self.bound, messages.bound)
            if self.is_worth_more:
                self._messages = messages.pruned(self.best.cost, self._limits.mrf_prune_worth)
            return
        self._messages = self._reduced = None
        messages.reparametrize()
        self.bound = max(self.bound, sum_of_minima(self._network))
        prune_states(self._network, self.best.cost)
        self._network.reduce(self._limits.bounds_reduction_entries, self._keep)
        self.bound = max(self.bound, sum_of_minima(self._network))

    def eliminate_rest(self, cap: int, evaluator: Evaluator | None = None) -> None:
        """Eliminates all remaining variables, in mini-buckets where a table would exceed ``cap`` entries.

        Args:
          evaluator: as for ``tighten``, where no bucket had to be split.
        """
        domains, tables = self._network.listed()
        found = eliminate(domains, tables, [0] * len(domains), cap, self._network.memo)
        if found.exact:
            self._consider(self._network.decode(self._network.order, found.states), evaluator)
        least = found.cost if found.exact else lower_bound(domains, tables, cap)
        self.bound = max(self.bound, self._network.constant + least)

    def _consider(self, chosen: Ids, evaluator: Evaluator | None) -> None:
        """Notes decoded states, and takes their plan as the incumbent if it can be evaluated and is better."""
        self._decoded = chosen
        if evaluator:
            found = evaluator.with_exact_cost(evaluator.evaluate(self.builder.domains.rows(chosen)))
            self.best = min(self.best, found, key=lambda plan: plan.cost)
