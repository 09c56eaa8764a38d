"""A core laid out flat for the compiled loops, and what its states cost and use."""

from functools import cached_property

import numpy as np

from meshdsl.planner.exact import Costs, Ints
from meshdsl.planner.messages import Messages, cap
from meshdsl.planner.strategies.core import Core


class FlatCore:
    """The variables of a core by position, with costs that are finite.

    Args:
      core: whose arrays are left as they are.
      top: what an impossible combination costs.
    """

    def __init__(self, core: Core, top: float) -> None:
        from meshdsl.planner.strategies.kernels import Held

        self.core, self.limit, self.top = core, core.usage.limit, top
        network = core.network.copy()
        cap(network, top)
        self.messages = Messages(network)
        self.order, self.flat = self.messages.order.tolist(), self.messages.flat
        self.unary, self.tables = self.messages.unary, self.messages.tables
        items = [(i, at, use) for i, v in enumerate(self.order) for at, use in core.usage.held.get(v, {}).items()]
        owner = np.array([i for i, _, _ in items], dtype=np.int64)
        self.held = Held(
            first=np.searchsorted(owner, np.arange(len(self.order) + 1)),
            owner=owner,
            lo=np.array([lo for _, (lo, _), _ in items], dtype=np.int64),
            hi=np.array([hi for _, (_, hi), _ in items], dtype=np.int64),
            begin=np.concatenate([[0], np.cumsum([use.size for _, _, use in items])]).astype(np.int64),
            use=np.concatenate([use for _, _, use in items]) if items else np.zeros(0),
        )

    @property
    def size(self) -> int:
        """Number of variables."""
        return len(self.order)

    @cached_property
    def edges(self) -> list[tuple[int, int, Costs]]:
        """Pairs of neighbours by position, and their tables."""
        network, at = self.messages.network, {v: i for i, v in enumerate(self.order)}
        return [(i, at[w], t) for v, i in at.items() for w, t in network.near[v].items() if i < at[w]]

    def priced(self, prices: Costs) -> Costs:
        """What states cost by themselves when memory has a price at every point."""
        from meshdsl.planner.strategies import kernels

        return kernels.priced(self.held, self.flat.start, self.unary, prices)

    def used(self, states: Ints) -> Costs:
        """What the states use at every point."""
        from meshdsl.planner.strategies import kernels

        return kernels.profile(self.held, states, self.limit.size)

    def cost(self, states: Ints) -> float:
        """What the states cost, without what contraction has settled."""
        from meshdsl.planner.strategies import kernels

        return kernels.cost(self.flat, self.unary, self.tables, states)

    def choice(self, states: Ints) -> list[int]:
        """The strategies of all nodes of the instance."""
        return self.core.choice(dict(zip(self.order, states.tolist(), strict=True)))
