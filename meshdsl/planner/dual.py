"""A bound that knows the memory limit: what memory holds at least at one operation has a price.

For every price, and every plan that fits,

    seconds >= seconds + price * (floor - limit) >= least of (seconds + price * floor) - price * limit

since a plan that fits has floor <= memory <= limit (Lagrangian relaxation). The least is bounded as ever, on the
network whose nodes pay for the bytes that they hold in any case (``floor``), in rounds where it is not too large, or
of small steps at least drawn anew.

Every plan known, whether it fits or not, says what this can be at most: a line over the price. Of the operations at
which plans were too large the one counts where their least is highest, and prices are looked for from there on
(cutting planes, Kelley 1960).
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from meshdsl.planner.bound import Certificate
from meshdsl.planner.closing import FIRST_TREES, lifted
from meshdsl.planner.exact import TIES
from meshdsl.planner.extract import Choice
from meshdsl.planner.fit import Fitter
from meshdsl.planner.floor import Floor
from meshdsl.planner.joint import Joint
from meshdsl.planner.prices import Prices
from meshdsl.planner.raising import GAP, has_few_layouts, is_light, raised, redrawn
from meshdsl.planner.search import jointly

_SMALL = 8_000  # nodes up to which ...
_STEPS, _FACTOR = 4, 1.4  # ... more prices are tried where all states are searched, and how far they are apart at first
_WORTH = 2e-3  # part of a plan's cost that a bound may say more than without memory, to be worth its time on others
_LARGEST = 2_000_000  # entries of a network that is taken through rounds


def dual_bound(fitter: Fitter, free: Choice, best: Choice, limit: float) -> float:
    """What no plan that fits can cost less than; 0 where memory says nothing, or too little for what it takes.

    Args:
      free: the cheapest plan found that need not fit. best: the cheapest found that fits.
    """
    model, plans = fitter.model, (free, *fitter.over, best)
    if fitter.bound >= best.cost:
        return fitter.bound
    floors = (floor for floor in fitter.points.floors if floor.bytes(free) > limit)
    full = [_Dual(floor, plans, limit, not fitter.quick) for floor in floors]
    if not full or not has_few_layouts(model) or model.clock.is_up():
        return fitter.bound
    most = max(full, key=lambda dual: dual.hoped)
    little = model.scale.seconds(free.cost + _WORTH * best.cost)
    if not most.price or not (most.is_small or (most.hoped > little and not fitter.quick)):
        return fitter.bound
    steps = _STEPS if most.is_small and jointly(model) and not fitter.quick else 0
    return max(fitter.bound, most.best(steps))


class _Dual:
    """The bound as a function of the price, which rises to its best value and falls again.

    ``hoped`` are the seconds that it can be at most, as far as known plans say, and ``price`` where; 0 for no price.

    Args:
      plans: that are known; the last one fits.
      rounds: whether small networks go through them.
    """

    def __init__(self, floor: Floor, plans: Sequence[Choice], limit: float, rounds: bool) -> None:
        self.floor, self.choice, self.limit, self.model = floor, plans[-1], limit, floor.model
        self._known: dict[float, float] = {}
        self._rounds = rounds
        self.is_small = len(self.model.nodes) <= _SMALL
        lines = {(self.model.scale.seconds(plan.cost), floor.bytes(plan) - limit) for plan in plans}
        crossings = [(a - b) / (y - x) for (a, x), (b, y) in combinations(lines, 2) if (a - b) * (y - x) > 0]
        self.hoped, self.price = max(
            (min(cost + price * over for cost, over in lines), price) for price in (0.0, *crossings)
        )

    def best(self, steps: int) -> float:
        """The highest bound found, from that price on, in so many steps.

        On while it rises, and back; shorter ones as long as much is open.
        """
        price, factor, ahead = self.price, _FACTOR, True
        self.at(price)
        for _ in range(steps):
            if self.model.clock.is_up():
                break
            if self.at(price * factor) > self.at(price):
                price, ahead = price * factor, False
            elif ahead:
                factor, ahead = 1 / factor, False
            elif self.at(price) < (1 - GAP) * self.choice.cost:
                factor, ahead = factor**-0.5, True
            else:
                break
        return max(self._known.values(), default=0.0)

    def at(self, price: float) -> float:
        """The bound at a price."""
        if price not in self._known:
            self._known[price] = self._bound(price)
        return self._known[price]

    def _bound(self, price: float) -> float:
        """In exact costs, rounded down."""
        model = self.model
        model.focus()
        model.prices = self.floor.prices(price)
        paid = self.paid(price)
        joint, priced = Joint(model), Choice(self.choice.rows, paid, {})
        certificate = Certificate(joint, priced, FIRST_TREES)
        least = min(paid, self._least(certificate))
        model.prices = Prices()
        return least - self._rounded - float(model.scale.pack(np.asarray(price * self.limit)))

    def _least(self, certificate: Certificate) -> float:
        """What a certificate proves, in rounds where that is quick."""
        if self._rounds and certificate.work <= _LARGEST:
            return lifted(certificate)
        if not is_light(certificate):
            return 0.0
        raised(certificate)
        return redrawn(certificate) if self._rounds and self.is_small else certificate.bound

    def paid(self, price: float) -> float:
        """What the plan costs in the network at most, where every term is rounded by itself."""
        held = self.model.scale.pack(np.asarray(price * self.floor.bytes(self.choice)))
        return self.choice.cost + float(held) + self._rounded

    @property
    def _rounded(self) -> float:
        return (self.floor.rounded + 1) * TIES
