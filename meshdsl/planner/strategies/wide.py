"""Local search over wide parts of a core: they are solved exactly, cycles and all, under allowances of memory.

A step makes a plan for some variables (``plans``), lets what is free use what room there is (``allowances``), and
solves it (``buckets``). Every other step allows one variable more than there is room for, and others less.
"""

import numpy as np

from meshdsl.planner.exact import Costs, Ints
from meshdsl.planner.strategies.flat import FlatCore
from meshdsl.planner.strategies.plans import Plan

_WIDTHS = (12, 14, 16, 18)  # binary logarithms of how many entries tables may have
_CANDIDATES = 300  # variables that a plan is made for at most
_NOISE = (3.0, 30.0)  # in neighbours: how far it is chance which variables are held
_SEEDS = 2**31


class Wide:
    """Steps from states to states; those that fit lead to none that do not, or that cost more.

    Args:
      random: where chance comes from.
    """

    def __init__(self, flat: FlatCore, random: np.random.Generator) -> None:
        self.flat, self.random = flat, random

    def plan(self) -> Plan:
        """A plan for all variables, or for some near each other, of random width."""
        from meshdsl.planner.strategies import plans

        n, random = self.flat.size, self.random
        count = min(n, _CANDIDATES)
        candidates = random.integers(0, n - count + 1) + random.permutation(count)
        noise = random.random(count) * random.choice(_NOISE)
        made: Plan = plans.planned(self.flat.flat, candidates, noise, float(random.choice(_WIDTHS)))
        return made

    def solve(self, costs: Costs, plan: Plan, states: Ints) -> Ints:
        """States with the best ones of what is free, at these costs of states by themselves."""
        from meshdsl.planner.strategies import buckets

        states = states.copy()
        buckets.solve(self.flat.flat, costs, self.flat.tables, plan, states)
        return states

    def improved(self, states: Ints, exchange: bool) -> Ints:
        """States that cost no more, by one step."""
        found = self.within(states, exchange)
        return states if found is None or self.flat.cost(found) > self.flat.cost(states) else found

    def within(self, states: Ints, exchange: bool = False) -> Ints | None:
        """States within the limit, whether these are or not; None if there are none near."""
        from meshdsl.planner.strategies import allowances

        flat, plan, seed = self.flat, self.plan(), int(self.random.integers(_SEEDS))
        most, room = states.copy(), flat.limit - flat.used(states)
        what = flat.held, flat.flat.start, plan.order, most
        eager = allowances.enlarge(*what, room, seed) if exchange else -1
        if not allowances.lower(*what, room, eager, seed + 1):
            return None
        allowances.fill(*what, room, seed + 2)
        found = self.solve(allowances.allowed(*what, flat.unary, flat.top), plan, states)
        return found if flat.cost(found) < flat.top and (flat.used(found) <= flat.limit).all() else None
