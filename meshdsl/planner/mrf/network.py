"""A sum of tables over discrete variables, at most two in each, and its exact reduction.

``Network.reduce`` minimises away every variable with at most two neighbours; the result is a table over these
neighbours, so the network stays pairwise. A training step consists mostly of chains, so a few hundred of ten thousand
variables remain. (Variable elimination occurs three times, each for another shape of problem. Here no table may exceed
two variables, and the network is wanted afterwards. ``elimination`` continues where three or more neighbours are left:
its tables have any arity, and it ends with a cost and a state. ``contest.bucket_kernels`` is compiled, since a local
search calls it thousands of times on small subgraphs, with orders that noise varies. They add tables in different
orders, so that one implementation would change the rounding of costs, and with it plans.)

Repeated layers have equal tables, as one object each, and ask the same operations of them; ``Memo`` answers each once.

Example: eliminating b from the chain ``a - b - c`` leaves the table ``min_b (u_b + t_ab + t_bc)`` between a and c, and
eliminating all three leaves the minimum:

    network = Network()
    a, b, c = (network.new_variable(np.zeros(2)) for _ in range(3))
    network.add(a, b, np.array([[0.0, 3.0], [2.0, 1.0]]))
    network.add(b, c, np.array([[1.0, 4.0], [0.0, 2.0]]))
    network.reduce(largest=100)
    network.constant  # 1.0
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.util.arrays import Costs, Ids, object_id

Labels = NDArray[np.intp]  # states of a variable by their original numbers
UNDECIDED = np.iinfo(np.intp).max  # no table has this state, so that reading an undecided variable is an error
_BROADCAST_ENTRIES = 1 << 18  # up to which one broadcast beats a loop over the middle states; the result is the same

# ---- Memo ------------------------------------------------------------------------------------------------------------


class Memo:
    """Results of operations on arrays, computed once per key and operands.

    Operands are compared by identity and kept alive. So equal parts of a model, whose tables are the same objects, also
    have the same results as objects.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def get(self, key: Hashable, sources: tuple[Any, ...], make: Callable[..., Any]) -> Any:
        """Returns ``make(*sources)``, remembered under ``key`` and the identity of the sources."""
        full = (key, *map(object_id, sources))
        found = self._known.get(full)
        if found is None:
            found = self._known[full] = (make(*sources), sources)
        return found[0]

    def copy(self) -> "Memo":
        """Returns a memo that knows all results so far; each of the two learns the later ones by itself."""
        other = Memo()
        other._known = dict(self._known)
        return other

    def sum(self, a: Costs, b: Costs) -> Costs:
        """Returns the sum of two arrays."""
        return np.asarray(self.get("sum", (a, b), np.add))

    def transpose(self, table: Costs) -> Costs:
        """Returns the transpose; the transpose of that is ``table`` itself."""
        other: Costs = self.get("transpose", (table,), np.transpose)
        self._known["transpose", object_id(other)] = (table, (other,))
        return other


def _take_rows(array: NDArray[Any], keep: Ids) -> NDArray[Any]:
    """Returns the entries ``keep`` along the first dim."""
    return array[keep]


def _merged_unary(unary: Costs, other: Costs, between: Costs, image: Ids) -> Costs:
    """Returns the table of a variable with that of another one, whose state is ``image``, and of their edge."""
    return np.asarray(unary + other[image] + between[image, np.arange(image.size)])


def _min_over_one(unary: Costs, table: Costs) -> Costs:
    """Returns, as a table of one row, the least cost of a variable for each state of its only neighbour."""
    return np.asarray((unary[:, None] + table).min(axis=0)[None])


def _plus_row(unary: Costs, row: Costs) -> Costs:
    return np.asarray(unary + row[0])


def _min_over_middle(unary: Costs, left: Costs, right: Costs) -> Costs:
    """Returns the least cost of a variable for each pair of states of its two neighbours."""
    left = left + unary[:, None]
    if left.size * right.shape[1] <= _BROADCAST_ENTRIES:
        return np.asarray((left[:, :, None] + right[:, None, :]).min(axis=0))
    found: Costs = left[0][:, None] + right[0][None]
    for from_left, from_right in zip(left[1:], right[1:], strict=True):
        np.minimum(found, from_left[:, None] + from_right[None], out=found)
    return found


# ---- Decoding --------------------------------------------------------------------------------------------------------
# The states of eliminated variables follow from those of the remaining ones, in reverse order of elimination.


@dataclass(frozen=True)
class Eliminated:
    """An eliminated variable: its states and tables at that time, by neighbour."""

    variable: int
    labels: Labels | None
    unary: Costs
    ends: tuple[tuple[int, Labels | None, Costs], ...]

    def decode(self, chosen: Labels) -> None:
        """Adds the variable's best state, given those of its neighbours, by label."""
        cost = self.unary
        for w, labels, table in self.ends:
            at = chosen[w]
            cost = cost + table[:, at if labels is None else np.searchsorted(labels, at)]
        best = int(cost.argmin())
        chosen[self.variable] = best if self.labels is None else self.labels[best]


@dataclass(frozen=True)
class EliminatedCopies:
    """The variables that a network had eliminated before its copies were added to another one.

    Args:
      eliminated: those variables, in order of elimination.
      names: variables of the network.
      numbers: [copies, names], their numbers in each copy.
    """

    eliminated: "list[Eliminated | EliminatedCopies]"
    names: list[int]
    numbers: Labels

    def decode(self, chosen: Labels) -> None:
        """Adds the best states in all copies, given those of the remaining variables, whose labels are positions."""
        column = {v: i for i, v in enumerate(self.names)}
        states: dict[int, Labels] = {}

        def states_of(v: int) -> Labels:
            if v not in states:
                states[v] = chosen[self.numbers[:, column[v]]]
            return states[v]

        for each in reversed(self.eliminated):
            assert isinstance(each, Eliminated), "a replicated network contains no replicas itself"
            cost = np.broadcast_to(each.unary[:, None], (each.unary.size, len(self.numbers)))
            for w, _, table in each.ends:
                cost = cost + table[:, states_of(w)]
            states[each.variable] = cost.argmin(axis=0)
            if each.variable in column:
                chosen[self.numbers[:, column[each.variable]]] = states[each.variable]


# ---- Network ---------------------------------------------------------------------------------------------------------


class Network:
    """Variables with a table each, and one table per pair of neighbours.

    Args:
      memo: results on tables that other networks share; a new one by default.
      reserved: variables up to this number are added by ``add_variable``; ``new_variable`` counts from there.

    Attributes:
      unary: per variable, the cost of each state.
      pairwise: ``pairwise[v][w]`` is the table of v and w with v's states along the first dim; ``pairwise[w][v]`` is
        its transpose.
      labels: original state numbers of variables that have lost states.
      coordinates: [states, mesh axes] per variable, if its creator gave any: the part of a state on every axis.
      position: where a variable stands in order of messages and output; neighbours should be near.
      constant: cost of the eliminated variables.
      eliminated: those variables, in order.
    """

    def __init__(self, memo: Memo | None = None, reserved: int = 0) -> None:
        self.memo, self._next = memo or Memo(), reserved
        self.unary: dict[int, Costs] = {}
        self.pairwise: dict[int, dict[int, Costs]] = {}
        self.labels: dict[int, Labels] = {}
        self.coordinates: dict[int, Labels | None] = {}
        self.position: dict[int, float] = {}
        self.constant = 0.0
        self.eliminated: list[Eliminated | EliminatedCopies] = []

    def copy(self) -> "Network":
        """Returns an independent network with the same tables."""
        other = Network(self.memo)
        other.unary, other.labels, other.eliminated = dict(self.unary), dict(self.labels), list(self.eliminated)
        other.pairwise = {v: dict(tables) for v, tables in self.pairwise.items()}
        other.constant, other.coordinates, other.position = self.constant, dict(self.coordinates), dict(self.position)
        other._next = self._next
        return other

    def scaled(self, weight: int) -> "Network":
        """Returns the network with all costs multiplied by ``weight``."""
        if weight == 1:
            return self
        other, scaled = self.copy(), partial(self.memo.get, ("scaled", weight))
        other.unary = {v: scaled((unary,), lambda costs: costs * weight) for v, unary in self.unary.items()}
        for v, tables in self.pairwise.items():
            for w, table in tables.items():
                if v < w:
                    other.pairwise[v][w] = scaled((table,), lambda costs: costs * weight)
                    other.pairwise[w][v] = self.memo.transpose(other.pairwise[v][w])
        other.constant *= weight
        return other

    # ---- adding

    def add_variable(self, v: int, unary: Costs, coordinates: Labels | None = None) -> None:
        """Adds a variable of a given number, which is also its position."""
        self.unary[v], self.pairwise[v], self.coordinates[v], self.position[v] = unary, {}, coordinates, float(v)

    def new_variable(self, unary: Costs, coordinates: Labels | None = None, after: int | None = None) -> int:
        """Adds a variable, positioned right behind another one, and returns its number."""
        v, self._next = self._next, self._next + 1
        self.add_variable(v, unary, coordinates)
        if after is not None:
            self.position[v] = self.position[after] + 2.0**-10
        return v

    def add(self, a: int, b: int, table: Costs) -> None:
        """Adds a table over two variables, a's states along the first dim; a and b may be the same."""
        if a == b:
            self.unary[a] = self.memo.sum(self.unary[a], self.memo.get("own", (table,), np.diagonal))
            return
        known = self.pairwise[a].get(b)
        if known is not None:
            table = self.memo.sum(known, table)
        self.pairwise[a][b], self.pairwise[b][a] = table, self.memo.transpose(table)

    def replicate(self, part: "Network", names: Sequence[int], copies: Labels) -> "Replica":
        """Numbers the variables of copies of another network, all of which then have numbers here.

        Args:
          part: the network.
          names: its variables that have numbers here already.
          copies: [copies, names], those numbers in each copy; several may be equal.
        """
        known = set(names)
        fresh = [v for v in part.unary if v not in known]
        new = self._next + np.arange(len(copies) * len(fresh)).reshape(len(copies), -1)
        self._next += new.size
        return Replica(part, [*names, *fresh], np.hstack([copies, new]))

    def add_replica(self, replica: "Replica") -> None:
        """Adds copies of a network; the tables of variables that exist already add up."""
        part, every, numbers = replica
        rows = part.pairwise.items()
        tables = [(v, w, table, part.pairwise[w][v]) for v, row in rows for w, table in row.items() if v < w]
        for copy in numbers.tolist():
            to = dict(zip(every, copy, strict=True))
            for v, unary in part.unary.items():
                before = int(part.position[v])
                position = to.get(before, before) + part.position[v] - before
                if to[v] not in self.unary:
                    self.add_variable(to[v], unary, part.coordinates[v])
                    self.position[to[v]] = position
                elif unary.any():
                    self.unary[to[v]] = self.memo.sum(self.unary[to[v]], unary)
            for v, w, table, transposed in tables:
                a, b = to[v], to[w]
                if a == b or b in self.pairwise[a]:
                    self.add(a, b, table)
                else:
                    self.pairwise[a][b], self.pairwise[b][a] = table, transposed
        self.constant += part.constant * len(numbers)
        self.eliminated.append(EliminatedCopies(part.eliminated, every, numbers))

    # ---- removing states and variables

    def restrict(self, v: int, keep: Labels) -> None:
        """Keeps only these states of a variable, given by position in ascending order."""
        get, labels = self.memo.get, self.labels.get(v)
        self.unary[v] = get("rows", (self.unary[v], keep), _take_rows)
        self.labels[v] = keep if labels is None else get("rows", (labels, keep), _take_rows)
        for w, table in self.pairwise[v].items():
            self.pairwise[v][w] = get("rows", (table, keep), _take_rows)
            self.pairwise[w][v] = self.memo.transpose(self.pairwise[v][w])

    def restrict_all(self, keep: dict[int, Labels]) -> None:
        """Keeps only these states of every variable, by position in ascending order; equal tables stay one object."""
        cuts, whole = Memo(), {v: states.size == self.unary[v].size for v, states in keep.items()}
        same = Memo()
        kept = {v: same.get(states.tobytes(), (), lambda states=states: states) for v, states in keep.items()}
        for v, states in kept.items():
            if not whole[v]:
                self.unary[v] = self.unary[v][states]
                labels = self.labels.get(v)
                self.labels[v] = states if labels is None else labels[states]
            for w, table in self.pairwise[v].items():
                if v < w and not (whole[v] and whole[w]):
                    cut = cuts.get("cut", (table, states, kept[w]), lambda t, a, b: t[np.ix_(a, b)])
                    self.pairwise[v][w], self.pairwise[w][v] = cut, cuts.transpose(cut)

    def merge(self, v: int, w: int, image: Labels) -> None:
        """Makes ``v`` a function of its neighbour ``w``: in state j of w, it is in state ``image[j]``."""
        unary, tables, get = self.unary.pop(v), self.pairwise.pop(v), self.memo.get
        between = tables.pop(w)
        self.eliminated.append(Eliminated(v, self.labels.get(v), unary, ((w, self.labels.get(w), between),)))
        self.unary[w] = get("merged", (self.unary[w], unary, between, image), _merged_unary)
        del self.pairwise[w][v]
        for u, table in tables.items():
            del self.pairwise[u][v]
            self.add(w, u, get("rows", (table, image), _take_rows))

    def reduce(self, largest: int, keep: frozenset[int] = frozenset()) -> None:
        """Eliminates variables with at most two neighbours, exactly.

        Args:
          largest: entries that the table over a variable and its neighbours may have.
          keep: variables that stay.
        """
        todo: Iterable[int] = self.unary
        while todo:
            touched: set[int] = set()
            for v in sorted(todo):
                if v in self.unary and v not in keep and self._is_reducible(v, largest):
                    touched.update(self.pairwise[v])
                    self._eliminate(v)
            todo = touched

    def _is_reducible(self, v: int, largest: int) -> bool:
        neighbours = self.pairwise[v]
        if len(neighbours) > 2:
            return self.unary[v].size == 1
        size = self.unary[v].size
        for w in neighbours:
            size *= self.unary[w].size
        return size <= largest

    def _eliminate(self, v: int) -> None:
        unary, tables, memo = self.unary.pop(v), self.pairwise.pop(v), self.memo
        ends = tuple((w, self.labels.get(w), table) for w, table in tables.items())
        self.eliminated.append(Eliminated(v, self.labels.get(v), unary, ends))
        for w in tables:
            del self.pairwise[w][v]
        if unary.size == 1 or len(tables) == 1:
            for w, table in tables.items():
                row = table if unary.size == 1 else memo.get("one", (unary, table), _min_over_one)
                self.unary[w] = memo.get("row", (self.unary[w], row), _plus_row)
            self.constant += float(unary[0]) if unary.size == 1 else 0.0
        elif tables:
            (a, left), (b, right) = tables.items()
            self.add(a, b, memo.get("two", (unary, left, right), _min_over_middle))
        else:
            self.constant += float(unary.min())

    # ---- reading

    @property
    def order(self) -> list[int]:
        """The remaining variables by position."""
        return sorted(self.unary, key=lambda v: (self.position[v], v))

    @property
    def entries(self) -> int:
        """Entries of all pairwise tables: the work of one pass of messages."""
        return sum(table.size for v, tables in self.pairwise.items() for w, table in tables.items() if v < w)

    def listed(self) -> tuple[list[int], list[tuple[tuple[int, ...], Costs]]]:
        """Returns the number of states per remaining variable, in order, and all tables with their scopes.

        A scope names variables by their index in that order. This is the input of ``elimination``.
        """
        at = {v: i for i, v in enumerate(self.order)}
        tables: list[tuple[tuple[int, ...], Costs]] = [((i,), self.unary[v]) for v, i in at.items()]
        tables += [((i, at[w]), t) for v, i in at.items() for w, t in self.pairwise[v].items() if i < at[w]]
        return [self.unary[v].size for v in at], tables

    def decode(self, order: Sequence[int], positions: NDArray[np.int64]) -> Labels:
        """Returns the labels of all variables, eliminated ones included, given positions of states in ``order``."""
        at = zip(order, positions.tolist(), strict=True)
        return self.decode_labels(order, [self.labels[v][i] if v in self.labels else i for v, i in at])

    def decode_labels(self, variables: Sequence[int], labels: Sequence[int]) -> Labels:
        """Returns the labels of all variables: the given ones, and the best ones of the eliminated variables."""
        chosen = np.full(self._next, UNDECIDED)
        chosen[np.asarray(variables, dtype=np.intp)] = labels
        for each in reversed(self.eliminated):
            each.decode(chosen)
        return chosen


class Replica(NamedTuple):
    """Copies of a network inside another one.

    Args:
      part: the network.
      variables: its variables, eliminated ones that have a number elsewhere included.
      numbers: [copies, variables], their numbers in each copy; several may be equal.
    """

    part: Network
    variables: list[int]
    numbers: Labels
