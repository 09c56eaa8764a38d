"""What a step does per microbatch: the algebra of layouts, on one axis that lies in time.

The turns of a loop over microbatches are the ranks of this axis. What is known of the batch is ``S`` there, sums over
the batch are ``P``, and what does not depend on it is ``B``; the rules of all operations say the rest. Going through a
step in its order, every value gets one of

    S(d), P    made in a turn: its part, to be joined or added up after the loop
    B          made before the loop
    SAME       made in every turn, equal in all of them (the counter of a loop over layers)
    WHOLE      made after the loop, from what all turns have made: the optimizer's part of the step
    EACH       made in every turn from that microbatch alone, in place of a WHOLE that a turn would have to read

A turn cannot read a WHOLE (batch statistics, a denominator that depends on the data), which is an error that names
the line. EACH stands for it where that was asked for: with m turns, a sum over the batch is then taken to be m times
the turn's, and what is returned of it is the mean of all turns. That is the same step, accumulated by microbatches.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from meshdsl.errors import PipelineError, faults, shortened
from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.rewrite import values
from meshdsl.layouts.placement import B, Partial, Placement, Split
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.rules.registry import all_broadcast, rows_of
from meshdsl.trace.annotate import OPTIMIZER

# ---- Places ----------------------------------------------------------------------------------------------------------
# What a step does per microbatch: the algebra of layouts, on one axis that lies in time.
#
# The ways in which a turn has a value (``placing`` says what they mean), the rows of the rules by which operations can
# be done in turns, and how far a value that lies one way is from being read another way.


class TimeExtent(Enum):
    """How a value is had that is on no device of an axis in time."""

    SAME = "the same in all turns"
    EACH = "each turn's own"
    WHOLE = "of the whole batch"


SAME, EACH, WHOLE = TimeExtent
Place = Placement | TimeExtent


@dataclass
class TimePlacement:
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
    return 0 if have == want or (want is B and isinstance(have, TimeExtent)) else None


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


# ---- Placing ---------------------------------------------------------------------------------------------------------


_SHOWN = 6


def analyze_time_axis(graph: Graph, turns: int, batch: Collection[int], each: bool = False) -> TimePlacement:
    """Where everything in a step is made.

    Args:
      batch: ids of the inputs that are split in turns, on their first dim.
      each: take EACH for what a turn would have to read of the whole batch.

    Raises PipelineError that lists what needs the whole batch inside the loop.
    """
    own: set[int] = set()
    while True:
        deduction = _Deduction(TimePlacement(turns), each, own)
        deduction.step(graph, batch)
        wanted = deduction.unmet - own
        if not deduction.wrong:
            return deduction.placing
        if not each or not wanted:
            rows = shortened(list(deduction.wrong.values()), _SHOWN)
            remedy = "" if each else "Pipeline(per_microbatch=True) takes every microbatch for itself there"
            raise PipelineError(faults("microbatches: these need the whole batch at once:", rows, remedy))
        own |= wanted


class _Deduction:
    """One way through a step.

    Args:
      each: EACH is taken where a sum is needed.
      own: ids of values to make as EACH.
    """

    def __init__(self, placing: TimePlacement, each: bool, own: Collection[int]) -> None:
        self.placing, self.each, self.own = placing, each, own
        self.wrong: dict[int, str] = {}
        self.unmet: set[int] = set()
        self._makers: dict[int, Op] = {}
        self._rows: dict[int, tuple[Signature, ...]] = {}

    def step(self, graph: Graph, batch: Collection[int]) -> None:
        """Place the values of a whole step."""
        for v in graph.inputs:
            self.placing.places[v.id] = Split(0) if v.id in batch else B
        for op in graph.ops[:-1]:
            self._makers.update((v.id, op) for v in op.outputs)
            self._place(op)

    def _place(self, op: Op) -> None:
        found = {self.placing.of(x) for x in op.inputs}
        parts = any(isinstance(p, Split) for p in found)
        if found <= {B}:
            self._give(op, (B,) * len(op.outputs))
        elif op.name == "stage":
            self._hand_on(op)
        elif WHOLE in found:
            read = [x for x in values(op.inputs) if self.placing.of(x) is WHOLE]
            self._late(op, self.placing.late[read[0].id])
            if parts:
                self._unmet(op, read)
        elif parts or self._is_own(op) or (op.phase != OPTIMIZER and self._stays(op)):
            self._turned(op)
        else:
            self._late(op, op)

    def _hand_on(self, op: Op) -> None:
        """What goes through a cut is on its other side as it was."""
        self._give(op, [self.placing.of(x) for x in op.inputs])
        late, pairs = self.placing.late, zip(op.inputs, op.outputs, strict=True)
        late.update((v.id, late[x.id]) for x, v in pairs if isinstance(x, Value) and x.id in late)

    def _is_own(self, op: Op) -> bool:
        return any(v.id in self.own for v in op.outputs)

    def _stays(self, op: Op) -> bool:
        """Whether an operation on sums can be done before they are added up, as it is linear."""
        if op.bodies:
            return False
        row = self._row(op, unchanged)
        return row is not None and (any(isinstance(p, Partial) for p in row.outputs) or self._all_same(op))

    def _all_same(self, op: Op) -> bool:
        return {self.placing.of(x) for x in op.inputs} <= {B, SAME}

    def _turned(self, op: Op) -> None:
        """An operation that reads parts, done in turns if it can be."""
        try:
            self._in_turn(op)
        except NeedsWhole as need:
            sums = [x for x in op.inputs if isinstance(self.placing.of(x), Partial)]
            if sums or self._is_own(op) or op.bodies:
                self._wrong(need.op, need.op)
            self._late(op, need.op)

    def _in_turn(self, op: Op) -> None:
        """Place the results of an operation that is done in turns; raises NeedsWhole if it cannot be."""
        if op.bodies:
            self._give(op, _LOOPS[op.name](self, op))
            return
        row = self._row(op, estimated if self.each else changed)
        if row is None:
            raise NeedsWhole(op)
        self.placing.rows[op.id] = row
        read = {self._read(x, want) for x, want in zip(op.inputs, row.inputs, strict=True)}
        whole: Place = EACH if EACH in read else SAME
        self._give(op, [whole if p is B else p for p in row.outputs])

    def _read(self, x: Atom, want: Placement) -> Place:
        have = self.placing.of(x)
        return EACH if isinstance(have, Partial) and not isinstance(want, Partial) else have

    def _row(self, op: Op, change: Change) -> Signature | None:
        """The row that takes the operands as they are, or nearly so."""
        costs = ((self._cost(op, row, change), i) for i, row in enumerate(self._rows_of(op)))
        best = min(((c, i) for c, i in costs if c is not None), default=None)
        return self._rows_of(op)[best[1]] if best else None

    def _cost(self, op: Op, row: Signature, change: Change) -> int | None:
        costs = [change(self.placing.of(x), want) for x, want in zip(op.inputs, row.inputs, strict=True)]
        return None if None in costs else sum(c for c in costs if c is not None)

    def _rows_of(self, op: Op) -> tuple[Signature, ...]:
        if op.id not in self._rows:
            self._rows[op.id] = tuple(turned_rows(op, self.placing.turns))
        return self._rows[op.id]

    def _give(self, op: Op, places: Sequence[Place]) -> None:
        self.placing.places.update((v.id, p) for v, p in zip(op.outputs, places, strict=True))

    def _late(self, op: Op, why: Op) -> None:
        self._give(op, (WHOLE,) * len(op.outputs))
        self.placing.late.update((v.id, why) for v in op.outputs)

    def _unmet(self, op: Op, reads: Sequence[Value]) -> None:
        """Note that a turn would have to read values of the whole batch."""
        for x in reads:
            self._wrong(self.placing.late[x.id], op)
            pending = [x.id]
            while pending:
                v = pending.pop()
                if self.placing.places.get(v) is WHOLE and v not in self.unmet:
                    self.unmet.add(v)
                    pending += [y.id for y in values(self._makers[v].inputs)]

    def _wrong(self, why: Op, reader: Op) -> None:
        said = f"{why.called} at {why.source}"
        more = "" if reader is why else f", which {reader.called} at {reader.source} reads per microbatch"
        self.wrong.setdefault(why.id, said + more)

    def body(self, graph: Graph, given: Sequence[Place]) -> list[Place]:
        """Place the values of a loop's body, given where its inputs are; what it returns."""
        self.placing.places.update((v.id, p) for v, p in zip(graph.inputs, given, strict=True))
        for op in graph.ops[:-1]:
            if {self.placing.of(x) for x in op.inputs} <= {B}:
                self._give(op, (B,) * len(op.outputs))
            else:
                self._in_turn(op)
        return [self.placing.of(x) for x in graph.returned]

    def carried(
        self, op: Op, body: Graph, fixed: Sequence[Place], start: Sequence[Place], rest: Sequence[Place]
    ) -> list[Place]:
        """Where a loop's carries are in the end, and what else its body returns."""
        carry = list(start)
        while True:
            found = self.body(body, [*fixed, *carry, *rest])
            after = [join(op, a, b) for a, b in zip(carry, found, strict=False)]
            if after == carry:
                return [*carry, *found[len(carry) :]]
            carry = after


def _scan(deduction: _Deduction, op: Op) -> list[Place]:
    (body,), consts, carries = op.bodies, op.params["num_consts"], op.params["num_carry"]
    given = [deduction.placing.of(x) for x in op.inputs]
    slices = [sliced(op, p) for p in given[consts + carries :]]
    found = deduction.carried(op, body, given[:consts], given[consts : consts + carries], slices)
    return [made(p, i >= carries) for i, p in enumerate(found)]


def _while(deduction: _Deduction, op: Op) -> list[Place]:
    (condition, body), split = op.bodies, op.params["cond_nconsts"]
    start = split + op.params["body_nconsts"]
    given = [deduction.placing.of(x) for x in op.inputs]
    carry = deduction.carried(op, body, given[split:start], given[start:], ())
    if held(deduction.body(condition, [*given[:split], *carry])[0]) is not B:
        raise NeedsWhole(op)
    return [made(p) for p in carry]


def _cond(deduction: _Deduction, op: Op) -> list[Place]:
    index, *given = (deduction.placing.of(x) for x in op.inputs)
    if held(index) is not B:
        raise NeedsWhole(op)
    places: list[Place] = [index] * len(op.outputs)
    for body in op.bodies:
        places = [join(op, a, b) for a, b in zip(places, deduction.body(body, given), strict=True)]
    return [made(p) for p in places]


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
