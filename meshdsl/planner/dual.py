"""A bound that knows the memory limit: what memory holds at least at one operation has a price.

For every price, and every plan that fits,

    seconds >= seconds + price * (floor - limit) >= least of (seconds + price * floor) - price * limit

since a plan that fits has floor <= memory <= limit (Lagrangian relaxation). The least is bounded as ever, on the
network whose nodes pay for the bytes that they hold in any case (``floor``), in rounds where it is not too large. Of
the operations at which plans were too large the one counts that says most; prices are looked for from the one on at
which the plan was found.
"""

import numpy as np

from meshdsl.planner.bound import Certificate
from meshdsl.planner.closing import FIRST_TREES, lifted
from meshdsl.planner.exact import TIES
from meshdsl.planner.extract import Choice
from meshdsl.planner.fit import Fitter
from meshdsl.planner.floor import Floor
from meshdsl.planner.joint import Joint
from meshdsl.planner.prices import Prices
from meshdsl.planner.raising import raised
from meshdsl.planner.search import jointly

_STEPS, _FACTOR = 5, 1.4  # prices that are tried, and how far they are apart
_LARGEST = 2_000_000  # entries of a network that is taken through rounds


def dual_bound(fitter: Fitter, free: Choice, best: Choice, limit: float) -> float:
    """What no plan that fits can cost less than; 0 where memory says nothing.

    Args:
      free: the cheapest plan found that need not fit. best: the cheapest found that fits.
    """
    model = fitter.model
    floors = filter(None, map(fitter.floor, sorted(fitter.points)))
    full = [_Dual(floor, best, limit) for floor in floors if floor.bytes(free) > limit]
    if not full or not jointly(model) or model.clock.is_up():
        return 0.0
    most = max(full, key=lambda dual: dual.bound(fitter.price, False)) if len(full) > 1 else full[0]
    return most.best(fitter.price)


class _Dual:
    """The bound as a function of the price, which rises to its best value and falls again."""

    def __init__(self, floor: Floor, choice: Choice, limit: float) -> None:
        self.floor, self.choice, self.limit, self.model = floor, choice, limit, floor.model
        self._known: dict[float, float] = {}

    def best(self, price: float) -> float:
        """The highest bound found, from a price on."""
        step = _FACTOR
        for _ in range(_STEPS):
            if self.model.clock.is_up():
                break
            if self.at(price * step) > self.at(price):
                price *= step
            elif step > 1 and len(self._known) == 2:
                step = 1 / step
            else:
                break
        return max(self._known.values(), default=0.0)

    def at(self, price: float) -> float:
        """The bound at a price."""
        if price not in self._known:
            self._known[price] = self.bound(price, True)
        return self._known[price]

    def bound(self, price: float, rounds: bool) -> float:
        """As ``at``, in exact costs, rounded down; without rounds, what a few messages say."""
        model = self.model
        model.focus()
        model.prices = self.floor.prices(price)
        paid = self.choice.cost + float(model.scale.pack(np.asarray(price * self.floor.bytes(self.choice))))
        joint, priced = Joint(model), Choice(self.choice.rows, paid, {})
        certificate = Certificate(joint, priced, FIRST_TREES if rounds else 0)
        least = lifted(certificate) if rounds and certificate.work <= _LARGEST else raised(certificate)
        model.prices = Prices()
        rounded = (self.floor.rounded + 1) * TIES
        return least - rounded - float(model.scale.pack(np.asarray(price * self.limit)))
