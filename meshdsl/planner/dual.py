"""A bound that knows the memory limit: what memory holds at least at one operation has a price.

For every price, and every plan that fits,

    seconds >= seconds + price * (floor - limit) >= least of (seconds + price * floor) - price * limit

since a plan that fits has floor <= memory <= limit (Lagrangian relaxation). The least is bounded as ever, on the
network whose nodes pay for the bytes that they hold in any case (``floor``). Prices are looked for near the one at
which the plan was found, with a few messages each; the best of them is taken through rounds.
"""

import numpy as np

from meshdsl.ir import Op
from meshdsl.planner.bound import Certificate
from meshdsl.planner.closing import FIRST_TREES, lifted
from meshdsl.planner.exact import TIES
from meshdsl.planner.extract import Choice
from meshdsl.planner.fit import Fitter
from meshdsl.planner.floor import Floor
from meshdsl.planner.joint import Joint
from meshdsl.planner.prices import Prices
from meshdsl.planner.search import jointly, raised

_STEPS, _FACTOR = 5, 1.6  # prices that are tried, and how far they are apart
_LARGEST = 2_000_000  # entries of a network that is taken through rounds


def dual_bound(fitter: Fitter, free: Choice, best: Choice, limit: float) -> float:
    """What no plan that fits can cost less than; 0 where memory says nothing.

    Args:
      free: the cheapest plan found that need not fit. best: the cheapest found that fits.
    """
    model = fitter.model
    floors = [Floor(model, fitter.pins.donated, op) for op in _outermost(fitter)]
    floor = max(floors, key=lambda floor: floor.bytes(free), default=None)
    if floor is None or floor.bytes(free) <= limit or not jointly(model) or model.clock.is_up():
        return 0.0
    return _Dual(floor, best, limit).best(fitter.price)


def _outermost(fitter: Fitter) -> list[Op]:
    """The operations of the outermost graph at which plans were too large."""
    ops = {op.id: op for op in fitter.model.problem.program.graph.ops}
    found = {fitter.around[op][0] for op in fitter.points if op in fitter.around}
    return [ops[op] for op in sorted(found)]


class _Dual:
    """The bound as a function of the price, which rises to its best value and falls again."""

    def __init__(self, floor: Floor, choice: Choice, limit: float) -> None:
        self.floor, self.choice, self.limit, self.model = floor, choice, limit, floor.model
        self._known: dict[float, float] = {}

    def best(self, price: float) -> float:
        """The highest bound found, from a price on."""
        step, clock = _FACTOR, self.model.clock
        for _ in range(_STEPS):
            if clock.is_up():
                break
            if self._quick(price * step) > self._quick(price):
                price *= step
            elif step > 1 and len(self._known) == 2:
                step = 1 / step
            else:
                break
        return self._quick(price) if clock.is_up() else max(self._quick(price), self._bound(price, True))

    def _quick(self, price: float) -> float:
        if price not in self._known:
            self._known[price] = self._bound(price, False)
        return self._known[price]

    def _bound(self, price: float, rounds: bool) -> float:
        """The bound at a price, in exact costs, rounded down."""
        model = self.model
        model.focus()
        held = {end: (price, self.floor.shares(end)) for end in self.floor.ends}
        model.prices = Prices(read=dict.fromkeys(self.floor.copies, price), held=held)
        paid = self.choice.cost + float(model.scale.pack(np.asarray(price * self.floor.bytes(self.choice))))
        joint, priced = Joint(model), Choice(self.choice.rows, paid, {})
        certificate = Certificate(joint, priced, FIRST_TREES if rounds else 0)
        least = raised(certificate)
        if rounds and certificate.work <= _LARGEST:
            least = max(least, lifted(certificate))
        model.prices = Prices()
        rounded = (len(self.floor.copies) + 1) * TIES
        return least - rounded - float(model.scale.pack(np.asarray(price * self.limit)))
