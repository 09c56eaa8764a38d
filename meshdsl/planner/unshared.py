"""Latencies that no bucket shares, for a bound on plans with buckets that is near to what runs.

Where any collective may be one of a bucket (``buckets``), a bound without their latencies holds for every plan. It is
far below a step that waits for one small collective after the other, as normalisation does in every layer. But a value
is resharded for a use at some point of the span from its producer to that use, and a bucket is sent at one point:

    m1 = mean x          [ sum ]                      the spans of m1 and m2 have no point in common,
    h = f x m1                 |                      so two latencies are paid if both are sums over devices;
    m2 = mean h                [ sum ]                that of g, used at the end, may share with either
    y = f h m2       g: [------|-------- sum ---]

So the latencies of uses with disjoint spans count in full, and those of all others not at all. Which uses these are is
for us to choose, and a good choice counts where cheap plans have their collectives. It is made in rounds: the uses with
disjoint spans where the plans so far have most collectives (weighted interval scheduling), then the cheapest plan at
these prices, and so on. Every mean of such choices holds as well, as a bucket has a point in common with at most one
use of each; that of the rounds tends to the best one (fictitious play; Brown 1951, Robinson 1951).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshdsl.ir.graph import Graph, Value
from meshdsl.ir.index import Use
from meshdsl.layouts.collective_cost import BUCKETED
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.reshard import ReshardStep, steps_to
from meshdsl.planner.buckets import every_graph, is_sendable

_USE_WORTH = 1e-3  # of a use without collectives, in collectives


class UnsharedUses:
    """Chooses the uses whose latencies count, round by round.

    Args:
      graph: of the program.

    Attributes:
      shares: by use, the part of its latency that counts.
    """

    def __init__(self, graph: Graph) -> None:
        self._graphs = [(one, dict(_sendable_uses(one))) for one in every_graph(graph)]
        self._worth, self._rounds = defaultdict[Use, float](float), 0
        self.shares: dict[Use, float] = {}

    def add(self, layouts: Mapping[Use, Layout], trees: Mapping[int, Sequence[ReshardStep]]) -> None:
        """Chooses again, knowing one more plan: the later a round, the more its choice counts.

        Args:
          layouts: of every use.
          trees: the reshard steps of each value that has any.
        """
        self._rounds += 1
        part = 2 / (self._rounds + 1)
        self.shares = {use: (1 - part) * share for use, share in self.shares.items() if part < 1}
        for graph, values in self._graphs:
            for use, value in values.items():
                steps = steps_to(layouts[use], trees[value]) if value in trees else ()
                self._worth[use] += sum(step.kind in BUCKETED for step in steps)
            for use in self._disjoint(graph, values):
                self.shares[use] = self.shares.get(use, 0.0) + part

    def _disjoint(self, graph: Graph, values: Mapping[Use, int]) -> Iterator[Use]:
        """Yields uses of one graph with disjoint spans, those with most collectives, then most uses."""
        ready = {v.id: 0 for v in graph.inputs} | {v.id: i + 1 for i, op in enumerate(graph.ops) for v in op.outputs}
        best: list[tuple[float, Any]] = [(0.0, None)]  # of the uses up to a position: their worth, and a linked list
        for op in graph.ops:
            most = best[-1]
            for use in ((op.id, i) for i in range(len(op.inputs))):
                if use in values:
                    worth, before = best[ready[values[use]]]
                    worth += _USE_WORTH + self._worth[use] / self._rounds
                    most = max(most, (worth, (use, before)), key=lambda each: each[0])
            best.append(most)
        rest = best[-1][1]
        while rest:
            use, rest = rest
            yield use


def _sendable_uses(graph: Graph) -> Iterator[tuple[Use, int]]:
    """Yields the uses that may be resharded in a bucket, with the ids of their values."""
    for op in graph.ops:
        for i, x in enumerate(op.inputs):
            if isinstance(x, Value) and is_sendable(x):
                yield (op.id, i), x.id
