"""A sum of tables over discrete variables, two at most in each, that can be made smaller exactly.

*Elimination* minimises away a variable with one or two neighbours: what is left over is a table
over the neighbours. A training step is mostly chains, so a few hundred variables of ten thousand
remain. Equal parts of a model have the same tables, as objects, and ask the same questions; each
is answered once (``Memo``).
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.util.arrays import Costs, Ids, object_id

# ---- Derived ---------------------------------------------------------------------------------------------------------
# What is made of arrays, made once; and the ways in which the tables of a network are made.


class Memo:
    """Arrays made from other arrays, each made once: equal parts of a model stay the same objects.

    Results are known by the identity of the arrays they come from, which are kept alive.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def get(self, how: Hashable, sources: tuple[Any, ...], make: Callable[..., Any]) -> Any:
        """``make(*sources)``, remembered under ``how`` and the sources."""
        key = (how, *map(object_id, sources))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = (make(*sources), sources)
        return found[0]

    def copy(self) -> "Memo":
        """What is made from now on is kept apart."""
        other = Memo()
        other._known = dict(self._known)
        return other

    def plus(self, a: Costs, b: Costs) -> Costs:
        """The sum of two arrays."""
        return np.asarray(self.get("plus", (a, b), np.add))

    def turned(self, table: Costs) -> Costs:
        """The transpose; turned twice, the array itself."""
        other: Costs = self.get("turned", (table,), np.transpose)
        self._known["turned", object_id(other)] = (table, (other,))
        return other


def some(array: NDArray[Any], keep: Ids) -> NDArray[Any]:
    """Some entries."""
    return array[keep]


def merged(unary: Costs, other: Costs, between: Costs, image: Ids) -> Costs:
    """The table of a variable and another one, whose state ``image`` says."""
    return np.asarray(unary + other[image] + between[image, np.arange(image.size)])


def least(unary: Costs, table: Costs) -> Costs:
    """The cheapest state of a variable for each of its only neighbour's, as a table of one row."""
    return np.asarray((unary[:, None] + table).min(axis=0)[None])


def plus_row(unary: Costs, row: Costs) -> Costs:
    """A variable's table and one of one row."""
    return np.asarray(unary + row[0])


def least_of_two(unary: Costs, left: Costs, right: Costs) -> Costs:
    """The cheapest way from each state of one neighbour to each of the other's over the shared middle."""
    left = left + unary[:, None]
    if left.size * right.shape[1] <= 1 << 18:
        return np.asarray((left[:, :, None] + right[:, None, :]).min(axis=0))
    found: Costs = left[0][:, None] + right[0][None]
    for from_left, from_right in zip(left[1:], right[1:], strict=True):
        np.minimum(found, from_left[:, None] + from_right[None], out=found)
    return found


# ---- Trail -----------------------------------------------------------------------------------------------------------
# What a network has lost: the variables that were eliminated, whose best states follow from those of the others.


Labels = NDArray[np.intp]
UNDECIDED = np.iinfo(np.intp).max  # no table has this state, so reading what is not decided yet is an error


@dataclass(frozen=True)
class Eliminated:
    """A variable that was eliminated: its states and tables at that time, by neighbour."""

    variable: int
    labels: Labels | None
    unary: Costs
    ends: tuple[tuple[int, Labels | None, Costs], ...]

    def decode(self, chosen: Labels) -> None:
        """Add its best state, given those of the variables that were left, by label."""
        cost = self.unary
        for w, labels, table in self.ends:
            at = chosen[w]
            cost = cost + table[:, at if labels is None else np.searchsorted(labels, at)]
        best = int(cost.argmin())
        chosen[self.variable] = best if self.labels is None else self.labels[best]


@dataclass(frozen=True)
class EliminatedCopies:
    """What was eliminated of a network before it was added, so many times.

    Args:
      numbers: [copies, names], what its variables ``names`` are called.
    """

    trail: "list[Eliminated | EliminatedCopies]"
    names: list[int]
    numbers: Labels

    def decode(self, chosen: Labels) -> None:
        """Add the best states of all copies, given those of the variables that were left; their names are kept."""
        column = {v: i for i, v in enumerate(self.names)}
        states: dict[int, Labels] = {}

        def of(v: int) -> Labels:
            if v not in states:
                states[v] = chosen[self.numbers[:, column[v]]]
            return states[v]

        for gone in reversed(self.trail):
            assert isinstance(gone, Eliminated), "what is added has nothing added to it"
            cost = np.broadcast_to(gone.unary[:, None], (gone.unary.size, len(self.numbers)))
            for w, _, table in gone.ends:
                cost = cost + table[:, of(w)]
            states[gone.variable] = cost.argmin(axis=0)
            if gone.variable in column:
                chosen[self.numbers[:, column[gone.variable]]] = states[gone.variable]


# ---- Network ---------------------------------------------------------------------------------------------------------


class Network:
    """Variables with a table each, and a table per pair of neighbours.

    ``near[v][w]`` is the table of v and w with v's states along the first dim. ``labels`` names
    the states of variables that have lost some. ``marks`` is what the maker of a variable says
    about its states, a row each; ``place`` orders the variables: neighbours should be near.

    Args:
      known: numbers below this one are those of variables that ``put`` adds.
    """

    def __init__(self, derived: Memo | None = None, known: int = 0) -> None:
        self.derived, self._next = derived or Memo(), known
        self.unary: dict[int, Costs] = {}
        self.near: dict[int, dict[int, Costs]] = {}
        self.labels: dict[int, Labels] = {}
        self.marks: dict[int, Labels | None] = {}
        self.place: dict[int, float] = {}
        self.constant = 0.0
        self.trail: list[Eliminated | EliminatedCopies] = []

    def copy(self) -> "Network":
        """A network of its own with the same tables."""
        other = Network(self.derived)
        other.unary, other.labels, other.trail = dict(self.unary), dict(self.labels), list(self.trail)
        other.near = {v: dict(tables) for v, tables in self.near.items()}
        other.constant, other.marks, other.place = self.constant, dict(self.marks), dict(self.place)
        other._next = self._next
        return other

    def times(self, weight: int) -> "Network":
        """The same with all costs so many times as high."""
        if weight == 1:
            return self
        other, many = self.copy(), partial(self.derived.get, ("times", weight))
        other.unary = {v: many((unary,), lambda costs: costs * weight) for v, unary in self.unary.items()}
        for v, near in self.near.items():
            for w, table in near.items():
                if v < w:
                    other.near[v][w] = many((table,), lambda costs: costs * weight)
                    other.near[w][v] = self.derived.turned(other.near[v][w])
        other.constant *= weight
        return other

    def put(self, v: int, unary: Costs, marks: Labels | None = None) -> None:
        """Add a variable of a known number, which is its place in order."""
        self.unary[v], self.near[v], self.marks[v], self.place[v] = unary, {}, marks, float(v)

    def new(self, unary: Costs, marks: Labels | None = None, after: int | None = None) -> int:
        """Add a variable, in order right after another one."""
        v, self._next = self._next, self._next + 1
        self.put(v, unary, marks)
        if after is not None:
            self.place[v] = self.place[after] + 2.0**-10
        return v

    def numbered(self, part: "Network", names: Sequence[int], copies: Labels) -> "Replica":
        """Copies of a network of its own, all variables of which have numbers here from now on.

        Args:
          names: variables of ``part`` that have names here.
          copies: [copies, names]: the names in each copy; several may be one.
        """
        known = set(names)
        fresh = [v for v in part.unary if v not in known]
        new = self._next + np.arange(len(copies) * len(fresh)).reshape(len(copies), -1)
        self._next += new.size
        return Replica(part, [*names, *fresh], np.hstack([copies, new]))

    def stamp(self, stamp: "Replica") -> None:
        """Add copies of a network; variables that are here already get its tables besides."""
        part, every, numbers = stamp
        near = part.near.items()
        tables = [(v, w, table, part.near[w][v]) for v, tables in near for w, table in tables.items() if v < w]
        for copy in numbers.tolist():
            to = dict(zip(every, copy, strict=True))
            for v, unary in part.unary.items():
                before = int(part.place[v])
                self._join(to[v], unary, part.marks[v], to.get(before, before) + part.place[v] - before)
            for v, w, table, turned in tables:
                a, b = to[v], to[w]
                if a == b or b in self.near[a]:
                    self.add(a, b, table)
                else:
                    self.near[a][b], self.near[b][a] = table, turned
        self.constant += part.constant * len(numbers)
        self.trail.append(EliminatedCopies(part.trail, every, numbers))

    def _join(self, v: int, unary: Costs, marks: Labels | None, place: float) -> None:
        """Add a variable, or to the table of one that is here."""
        if v not in self.unary:
            self.put(v, unary, marks)
            self.place[v] = place
        elif unary.any():
            self.unary[v] = self.derived.plus(self.unary[v], unary)

    def add(self, a: int, b: int, table: Costs) -> None:
        """Add a table over two variables, a's states along the first dim; a and b may be the same."""
        if a == b:
            self.unary[a] = self.derived.plus(self.unary[a], self.derived.get("own", (table,), np.diagonal))
            return
        known = self.near[a].get(b)
        if known is not None:
            table = self.derived.plus(known, table)
        self.near[a][b], self.near[b][a] = table, self.derived.turned(table)

    def restrict(self, v: int, keep: Labels) -> None:
        """Leave these states of a variable, given by position in rising order."""
        derived, labels = self.derived.get, self.labels.get(v)
        self.unary[v] = derived("some", (self.unary[v], keep), some)
        self.labels[v] = keep if labels is None else derived("some", (labels, keep), some)
        for w, table in self.near[v].items():
            self.near[v][w] = derived("some", (table, keep), some)
            self.near[w][v] = self.derived.turned(self.near[v][w])

    def cut(self, keep: dict[int, Labels]) -> None:
        """Leave these states of every variable, given by position in rising order; equal tables stay one."""
        cut, whole = Memo(), {v: states.size == self.unary[v].size for v, states in keep.items()}
        same = Memo()
        alike = {v: same.get(states.tobytes(), (), lambda states=states: states) for v, states in keep.items()}
        for v, states in alike.items():
            if not whole[v]:
                self.unary[v] = self.unary[v][states]
                labels = self.labels.get(v)
                self.labels[v] = states if labels is None else labels[states]
            for w, table in self.near[v].items():
                if v < w and not (whole[v] and whole[w]):
                    left = cut.get("some", (table, states, alike[w]), lambda t, a, b: t[np.ix_(a, b)])
                    self.near[v][w], self.near[w][v] = left, cut.turned(left)

    def merge(self, v: int, w: int, image: Labels) -> None:
        """Make ``v`` a part of its neighbour ``w``: it takes state ``image[j]`` where w takes j, whatever else."""
        unary, near, cut = self.unary.pop(v), self.near.pop(v), self.derived.get
        between = near.pop(w)
        self.trail.append(Eliminated(v, self.labels.get(v), unary, ((w, self.labels.get(w), between),)))
        self.unary[w] = cut("merged", (self.unary[w], unary, between, image), merged)
        del self.near[w][v]
        for u, table in near.items():
            del self.near[u][v]
            self.add(w, u, cut("some", (table, image), some))

    @property
    def order(self) -> list[int]:
        """The variables that are left, in order."""
        return sorted(self.unary, key=lambda v: (self.place[v], v))

    @property
    def entries(self) -> int:
        """Entries of all tables: what one pass of messages costs."""
        return sum(table.size for v, tables in self.near.items() for w, table in tables.items() if v < w)

    def listed(self) -> tuple[list[int], list[tuple[tuple[int, ...], Costs]]]:
        """Number of states per variable that is left, in order, and the tables by positions in that order."""
        at = {v: i for i, v in enumerate(self.order)}
        tables: list[tuple[tuple[int, ...], Costs]] = [((i,), self.unary[v]) for v, i in at.items()]
        tables += [((i, at[w]), t) for v, i in at.items() for w, t in self.near[v].items() if i < at[w]]
        return [self.unary[v].size for v in at], tables

    def reduce(self, largest: int, keep: frozenset[int] = frozenset()) -> None:
        """Eliminate variables with at most two neighbours while no table passes ``largest`` entries."""
        todo: Iterable[int] = self.unary
        while todo:
            touched: set[int] = set()
            for v in sorted(todo):
                if v in self.unary and v not in keep and self._small(v, largest):
                    touched.update(self.near[v])
                    self._eliminate(v)
            todo = touched

    def _small(self, v: int, largest: int) -> bool:
        near = self.near[v]
        if len(near) > 2:
            return self.unary[v].size == 1
        size = self.unary[v].size
        for w in near:
            size *= self.unary[w].size
        return size <= largest

    def _eliminate(self, v: int) -> None:
        unary, near, derived = self.unary.pop(v), self.near.pop(v), self.derived
        ends = tuple((w, self.labels.get(w), table) for w, table in near.items())
        self.trail.append(Eliminated(v, self.labels.get(v), unary, ends))
        for w in near:
            del self.near[w][v]
        if unary.size == 1 or len(near) == 1:
            for w, table in near.items():
                part = table if unary.size == 1 else derived.get("one", (unary, table), least)
                self.unary[w] = derived.get("row", (self.unary[w], part), plus_row)
            self.constant += float(unary[0]) if unary.size == 1 else 0.0
        elif near:
            (a, left), (b, right) = near.items()
            self.add(a, b, derived.get("two", (unary, left, right), least_of_two))
        else:
            self.constant += float(unary.min())

    def named(self, order: Sequence[int], positions: NDArray[np.int64]) -> Labels:
        """The states of all variables, those lost included, given those that are left, in order, by position."""
        at = zip(order, positions.tolist(), strict=True)
        return self.decode(order, [self.labels[v][i] if v in self.labels else i for v, i in at])

    def decode(self, left: Sequence[int], labels: Sequence[int]) -> Labels:
        """The states of all variables, the best ones of those eliminated, given those that are left, by label."""
        chosen = np.full(self._next, UNDECIDED)
        chosen[np.asarray(left, dtype=np.intp)] = labels
        for gone in reversed(self.trail):
            gone.decode(chosen)
        return chosen


class Replica(NamedTuple):
    """A network, and what its variables are called in each of its copies elsewhere.

    Args:
      variables: of the network, those that it has lost among them. numbers: [copies, variables]; several may be one.
    """

    part: Network
    variables: list[int]
    numbers: Labels
