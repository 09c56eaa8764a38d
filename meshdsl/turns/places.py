"""What a step does per microbatch: the algebra of layouts, on one axis that lies in time.

The ways in which a turn has a value (``placing`` says what they mean), the rows of the rules by which operations can be
done in turns, and how far a value that lies one way is from being read another way.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from meshdsl.ir import Literal, Op
from meshdsl.layouts.placement import B, Partial, Placement, Split
from meshdsl.layouts.rule import Signature
from meshdsl.rules.registry import all_broadcast, rows_of
from meshdsl.trace.graphs import Atom


class Own(Enum):
    """How a value is had that is on no device of an axis in time."""

    SAME = "the same in all turns"
    EACH = "each turn's own"
    WHOLE = "of the whole batch"


SAME, EACH, WHOLE = Own
Place = Placement | Own


@dataclass
class Placing:
    """Where everything is made.

    Args:
      turns: microbatches.
      places: per value, bodies included.
      rows: per operation that is done in turns, how it reads and makes what it does.
      late: per value that is WHOLE, the operation because of which it is.
    """

    turns: int
    places: dict[int, Place] = field(default_factory=dict)
    rows: dict[int, Signature] = field(default_factory=dict)
    late: dict[int, Op] = field(default_factory=dict)

    def of(self, x: Atom) -> Place:
        """Where a value is made; a literal is everywhere."""
        return B if isinstance(x, Literal) else self.places.get(x.id, B)

    def in_turns(self, op: Op) -> bool:
        """Whether an operation of the step itself is done in every turn."""
        return any(self.of(v) not in (B, WHOLE) for v in op.outputs)


def held(place: Place) -> Placement:
    """What a turn has of a value that is made so."""
    return place if isinstance(place, Placement) else B


Change = Callable[[Place, Placement], int | None]


def turned_rows(op: Op, turns: int) -> Iterator[Signature]:
    """How an operation without bodies can be done in turns."""
    for row in _passing(op) if op.name == "constrain" else rows_of(op):
        ports = zip((*row.inputs, *row.outputs), (*op.inputs, *op.outputs), strict=True)
        even = all(x.shape[int(p.dim)] % turns == 0 for p, x in ports if isinstance(p, Split))
        if even and row.size % turns == 0 and not row.collectives:
            yield row


def _passing(op: Op) -> Iterator[Signature]:
    """A stated layout speaks of devices; in time a value stays as it is."""
    yield all_broadcast(op)
    for p in (*map(Split, range(len(op.outputs[0].shape))), Partial("sum"), Partial("max"), Partial("min")):
        yield Signature((p,), (p,))


def unchanged(have: Place, want: Placement) -> int | None:
    """0 if an operation reads what there is; None if that cannot be had."""
    return 0 if have == want or (want is B and isinstance(have, Own)) else None


def changed(have: Place, want: Placement) -> int | None:
    """How much has to change, if a turn may take its block of what is whole, or have it as its share of a sum."""
    if unchanged(have, want) == 0 or isinstance(have, Partial | Split):
        return unchanged(have, want)
    return 1 if isinstance(want, Split) else 3


def estimated(have: Place, want: Placement) -> int | None:
    """Likewise, if a sum may be taken to be as many times the turn's share as there are turns."""
    if isinstance(have, Partial) and not isinstance(want, Partial):
        return 2 if want is B else 3
    return changed(have, want)


class NeedsWhole(Exception):
    """An operation in a loop that cannot be done in turns."""

    def __init__(self, op: Op) -> None:
        super().__init__(op)
        self.op = op


def join(op: Op, a: Place, b: Place) -> Place:
    """What holds both."""
    if a == b or b is B:
        return a
    if a is B:
        return b
    if {a, b} == {SAME, EACH} or (EACH in (a, b) and Partial("sum") in (a, b)):
        return EACH
    if SAME in (a, b):
        return b if a is SAME else a
    raise NeedsWhole(op)


def sliced(op: Op, place: Place) -> Place:
    """Where slices of what a scan goes over are."""
    if place == Split(0):
        raise NeedsWhole(op)
    return Split(int(place.dim) - 1) if isinstance(place, Split) else place


def made(place: Place, stacked: bool = False) -> Place:
    """Where a result of a loop is that is done in turns."""
    if isinstance(place, Split) and stacked:
        return Split(int(place.dim) + 1)
    return SAME if place is B else place
