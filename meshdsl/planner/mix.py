"""Where two plans differ: parts that one can take over from the other, each by itself."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from meshdsl.planner.extract import Choice
from meshdsl.planner.model import Assignment, Model
from meshdsl.planner.numbering import grouped, numbered

_SMALLEST = 8  # nodes of a half of a group
_IN_A_ROW = 3  # parts of a round that do not fit
_WORTH = 1e-4  # part of a plan's cost that groups of one kind must be able to save
_KINDS, _LAST = 12, 3  # of groups that are tried one by one, so many tries being left at last
_LARGEST = 0.5  # part of all nodes

Groups = list[list[int]]  # of nodes


class Mixer:
    """Looks for the cheapest plan that does some things as one that does not fit does them: as many as fit.

    Where what is done otherwise comes in groups of few kinds, as in equal layers, all of a kind are tried together, and
    those taken over that need least memory for what they save. Of equal groups that are too much, so many are tried
    next as fit if all need as much; where groups differ, half.

    Args:
      best: fits. over: does not.
      made: the plan of some rows. room: bytes that a plan leaves of the limit, below 0 for one that does not fit.
      tries: plans that are made, or a few more.
    """

    def __init__(
        self,
        model: Model,
        best: Choice,
        over: Choice,
        made: Callable[[Assignment], Choice],
        room: Callable[[Choice], float],
        tries: int,
    ) -> None:
        self.model, self.best, self.over = model, best, over
        self._made, self._room, self._tries = made, room, tries

    def mixed(self) -> Choice:
        """The best plan in the end."""
        parts = [apart(self.model, self.best, self.over)]
        while parts and self._goes_on:
            parts = self._round(parts)
        return self.best

    @property
    def _goes_on(self) -> bool:
        """Whether another plan may be made."""
        return self._tries > 0 and not self.model.clock.is_up()

    def _round(self, parts: list[Groups]) -> list[Groups]:
        """Try parts, and say which to try next; where some in a row are too much, the others are halved untried."""
        left, failed = list[Groups](), 0
        for some in parts:
            if failed >= _IN_A_ROW or not self._goes_on:
                left += split(some, 0.5)
            elif self._takes(trial := self._tried(some)):
                self.best, failed = trial.plan, 0
            else:
                failed += 1
                left += self._smaller(some, trial)
        return left

    def _tried(self, some: Groups) -> "_Trial":
        """The best plan with some groups as the other one has them."""
        rows, nodes = self.best.rows.copy(), list(chain.from_iterable(some))
        rows[nodes] = self.over.rows[nodes]
        self._tries, plan = self._tries - 1, self._made(rows)
        saved = self.best.cost - plan.cost
        return _Trial(plan, saved, self._room(self.best) - self._room(plan) if saved > 0 else 0.0)

    def _takes(self, trial: "_Trial") -> bool:
        """Whether it is better and fits."""
        return trial.saved > 0 and trial.needs <= self._room(self.best)

    def _smaller(self, some: Groups, trial: "_Trial") -> list[Groups]:
        """What to try where some groups are too much together."""
        kinds = self._kinds(some)
        if 1 < len(kinds) <= min(_KINDS, len(some) // 2):
            return self._ranked(kinds)
        if len(kinds) > 1 or trial.saved <= 0:
            return split(some, 0.5)
        share = self._room(self.best) / trial.needs
        if share * len(some) < 1 < len(some) or share * trial.saved < _WORTH * self.best.cost:
            return []
        return split(some, share)

    def _kinds(self, some: Groups) -> list[Groups]:
        """Groups by kind: as large as each other, and with a first node of one kind, as those of equal layers have."""
        kinds = numbered((len(group), id(self.model.nodes[group[0]].kind)) for group in some)
        return [[some[i] for i in alike] for alike in grouped(kinds)]

    def _ranked(self, kinds: list[Groups]) -> list[Groups]:
        """Take over as many as fit together, those first that need least for what they save; what is left of each kind.

        What kinds need by themselves may not add up: if what should fit does not, there is so much less room.
        """
        kinds = sorted(kinds, key=lambda kind: -len(kind) * len(kind[0]))
        few = max(_LAST, self._tries - _LAST)
        trials = [(kind, self._tried(kind)) for kind in kinds[:few] if self._goes_on]
        better = [(kind, trial.needs, trial.needs / trial.saved) for kind, trial in trials if trial.saved > 0]
        better.sort(key=lambda found: found[2])
        room = budget = self._room(self.best)
        left = list[Groups]()
        for _ in range(_LAST):
            together, left = _filled([(kind, needs) for kind, needs, _ in better], budget)
            if not together or not self._goes_on:
                break
            trial = self._tried(together)
            if self._takes(trial):
                self.best = trial.plan
                break
            left.append(together)
            if trial.saved <= 0:
                break
            budget -= trial.needs - room
        return [*left, *kinds[few:]]


def _filled(kinds: Sequence[tuple[Groups, float]], room: float) -> tuple[Groups, list[Groups]]:
    """As many groups, kind after kind, as fit if all of a kind need as much; what is left of each kind."""
    together, left = Groups(), list[Groups]()
    for kind, needs in kinds:
        count = len(kind) if needs <= room else max(0, int(room / needs * len(kind)))
        together, room = together + kind[:count], room - needs * count / len(kind)
        left += [kind[count:]] if count < len(kind) else []
    return together, left


class _Trial(NamedTuple):
    """A plan, what it costs less than the best one, and the bytes that it needs more."""

    plan: Choice
    saved: float
    needs: float


def apart(model: Model, one: Choice, other: Choice) -> Groups:
    """Groups of nodes that two plans treat differently, joined by the values whose layouts differ at both ends.

    Where that is most of them, the nodes of each of several equal layers are a group of their own. The nodes of a group
    come as they are met from its first in program order on, so that its first half is near: of equal layers in a row,
    each with its part of the backward pass, the first ones.
    """
    ports, wiring = model.ports, model.wiring
    moved = np.flatnonzero(ports.layouts(one.rows) != ports.layouts(other.rows))
    readers, values = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for n, value in zip(wiring.nodes[moved].tolist(), wiring.values[moved].tolist(), strict=True):
        readers[value].append(n)
        values[n].append(value)
    left = dict.fromkeys(np.flatnonzero((one.rows != other.rows).any(axis=1)).tolist())
    found: list[list[int]] = []
    while left:
        first = next(iter(left))
        group = [first]
        del left[first]
        for n in group:  # which grows
            near = [m for value in values[n] for m in readers.pop(value, ()) if m in left]
            for m in dict.fromkeys(near):
                del left[m]
                group.append(m)
        found += _by_layer(model, group) if len(group) > _LARGEST * len(model.nodes) else [group]
    return found


def _by_layer(model: Model, group: list[int]) -> list[list[int]]:
    """The nodes of each layer, and those of none."""
    nodes = np.array(group)
    return [nodes[some].tolist() for some in grouped(model.layers.layer[nodes])]


def split(some: Groups, share: float) -> list[Groups]:
    """A share of the groups and the rest, or one that is large enough in halves; none of plans that differ in moves."""
    if len(some) > 1:
        first = min(max(1, int(share * len(some))), len(some) - 1)
        return [some[:first], some[first:]]
    nodes = some[0] if some else []
    half = len(nodes) // 2
    return [[nodes[:half]], [nodes[half:]]] if half >= _SMALLEST else []
