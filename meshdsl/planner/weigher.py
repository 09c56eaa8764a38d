"""What plans of a model hold in memory, and the best one that comes of two of them."""

from collections.abc import Iterable
from functools import partial
from weakref import WeakKeyDictionary

from meshdsl.planner.extract import Choice, Evaluator
from meshdsl.planner.memory import Liveness, Peak
from meshdsl.planner.mix import Judge, Mixer
from meshdsl.planner.parts import Groups, Parts
from meshdsl.planner.placer import Placer
from meshdsl.planner.search import evaluated

_TRIED = 50_000  # operations of all plans together that are made of halves of parts


class Weigher:
    """Weighs plans.

    Args:
      evaluator: of the model.
      donated: positions of the inputs that are given up.
    """

    def __init__(self, evaluator: Evaluator, donated: frozenset[int]) -> None:
        self.model, self._evaluator, self._donated = evaluator.model, evaluator, donated
        self._placer = Placer(self.model)
        self._peaks: WeakKeyDictionary[Choice, Peak] = WeakKeyDictionary()
        self._latest: tuple[Choice, Liveness] | None = None

    def peak(self, choice: Choice) -> Peak:
        """The fullest point of a plan."""
        if choice not in self._peaks:
            self._peaks[choice] = self._lives(choice).peak()
        return self._peaks[choice]

    def unpriced(self, choice: Choice, limit: float, priced: Iterable[int]) -> Peak | None:
        """The point at which a plan holds most of what has no price, if more than a limit: no price will do then.

        Args:
          priced: ids of the values that have one.
        """
        lives = self._lives(choice)
        free = ~lives.placed.timeline.numbers.flags(priced)
        held = [(int(lives.by_value(point[1])[free].sum()), point) for point in lives.over(limit)]
        most, point = max(held, key=lambda found: found[0], default=(0, (0, ())))
        return lives.at(*point) if most > limit else None

    def mixed(self, best: Choice, over: Choice, limit: float) -> Choice:
        """``best`` with as much as fits of what ``over`` does, which does not fit."""
        made = partial(evaluated, self.model, self._evaluator)
        judge = Judge(limit, made, self.peak, lambda choice: self._lives(choice).over(limit), self._parts)
        return Mixer(self.model, best, over, judge, _TRIED // len(self.model.nodes)).mixed()

    def _lives(self, choice: Choice) -> Liveness:
        """The memory of a plan; that of the last one asked for is kept."""
        if self._latest is None or self._latest[0] is not choice:
            self._latest = choice, Liveness(self._placer.placed(choice), self._donated)
        return self._latest[1]

    def _parts(self, one: Choice, other: Choice, groups: Groups) -> Parts:
        """Two plans, come apart."""
        lives = self._lives(one), self._lives(other)
        return Parts(self._evaluator, groups, (one, other), lives, self._placer.values)
