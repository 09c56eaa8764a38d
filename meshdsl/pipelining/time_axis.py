"""Which operations of a step run once per microbatch: an abstract interpretation over the microbatch axis.

The iterations of a loop over microbatches are treated as the ranks of one more mesh axis, which extends over time
instead of devices. The layout algebra then answers the question as it does for devices: the batch is ``S(0)`` on this
axis, a sum over the batch is ``P``, a parameter is ``B``, and the rules of the operations propagate the rest.

    loss = mean((x @ w - y) ** 2)     x, y: S(0)   w: B   x @ w: S(0)   loss: P
    g    = transpose(x) @ d           d: S(0)      g: P   (a gradient: accumulated, then reduced over devices once)
    w    = w - 0.1 * g / norm(g)      norm is not linear, so it needs the whole sum: AFTER_LOOP

**Lattice.** Every value has a *time placement*:

    B                computed before the loop, independent of the batch
    INVARIANT        computed in every iteration, equal in all of them (the counter of a loop over layers)
    S(d), P(r)       computed per microbatch: its block, or its contribution to a reduction over the batch
    PER_MICROBATCH   computed from one microbatch alone, in place of an AFTER_LOOP value that an iteration would need
    AFTER_LOOP       computed after the loop from what all iterations produced: the optimizer's part of the step

``join`` is the least upper bound of the order below; two values without one need the whole batch at once, which raises
``NeedsWholeBatch``. No chain is longer than four, so fixed points over loop carries terminate.

    B  <  INVARIANT  <  S(d),  P(sum) < PER_MICROBATCH,  P(max),  P(min),  AFTER_LOOP

An iteration cannot use an AFTER_LOOP value (batch statistics, a denominator that depends on the data): that is an error
naming the line. On request (``Pipeline(per_microbatch=True)``) PER_MICROBATCH replaces it: with m microbatches a sum
over the batch is estimated as m times the iteration's own, and a result is the mean over all iterations. That is the
same step with gradient accumulation.

**Transfer functions** (``_Analysis``), by the property that justifies each:

    all operands B                       hoisted: the results are B
    a stage cut                          identity: results are placed as the operands
    an operand is AFTER_LOOP             strict: the results are AFTER_LOOP
    a rule row accepts the operands      the rule: the row's outputs (linear operations keep P)
    a loop or conditional                fixed point over its carries, or join over its branches
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from meshdsl.errors import PipelineError, faults, shortened
from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.loops import split_operands
from meshdsl.ir.rewrite import values
from meshdsl.layouts.placement import B, Partial, Placement, Split
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.rules.registry import all_broadcast, rows_of
from meshdsl.trace.annotate import OPTIMIZER

_FAULTS_LISTED = 6  # operations that an error lists before it counts the rest

# ---- Lattice ---------------------------------------------------------------------------------------------------------


class TimeExtent(Enum):
    """Time placements that no device axis has."""

    INVARIANT = "equal in all iterations"
    PER_MICROBATCH = "of one microbatch"
    AFTER_LOOP = "of the whole batch"


INVARIANT, PER_MICROBATCH, AFTER_LOOP = TimeExtent
TimePlace = Placement | TimeExtent


@dataclass
class TimePlacement:
    """The result of the analysis.

    Args:
      microbatches: iterations of the loop over microbatches.
      places: time placement per value id, loop bodies included; B where absent.
      rows: per id of an operation that runs per microbatch, the rule row that it runs by.
      blame: per id of an AFTER_LOOP value, the first operation that needed the whole batch.
    """

    microbatches: int
    places: dict[int, TimePlace] = field(default_factory=dict)
    rows: dict[int, Signature] = field(default_factory=dict)
    blame: dict[int, Op] = field(default_factory=dict)

    def of(self, x: Atom) -> TimePlace:
        """Returns the time placement of a value; literals are B."""
        return B if isinstance(x, Literal) else self.places.get(x.id, B)

    def is_per_microbatch(self, op: Op) -> bool:
        """Returns whether a top-level operation runs in every iteration."""
        return any(self.of(v) not in (B, AFTER_LOOP) for v in op.outputs)


def local_placement(place: TimePlace) -> Placement:
    """Returns how an iteration holds a value: its block, its contribution, or the whole value."""
    return place if isinstance(place, Placement) else B


class NeedsWholeBatch(Exception):
    """An operation that cannot run per microbatch."""

    def __init__(self, op: Op) -> None:
        super().__init__(op)
        self.op = op


def join(op: Op, a: TimePlace, b: TimePlace) -> TimePlace:
    """Returns the least upper bound of two placements; raises NeedsWholeBatch, naming ``op``, if there is none."""
    if a == b or b is B:
        return a
    if a is B:
        return b
    if {a, b} == {INVARIANT, PER_MICROBATCH} or (PER_MICROBATCH in (a, b) and Partial("sum") in (a, b)):
        return PER_MICROBATCH
    if INVARIANT in (a, b):
        return b if a is INVARIANT else a
    raise NeedsWholeBatch(op)


# ---- Rule rows on the microbatch axis --------------------------------------------------------------------------------


def time_rows(op: Op, microbatches: int) -> Iterator[Signature]:
    """Yields the rule rows by which an operation without bodies can run per microbatch.

    Rows need dims that divide by themselves, and no exchange between iterations. A layout constraint is about devices,
    so that it accepts any placement in time.
    """
    if op.name == "constrain":
        places = (*map(Split, range(len(op.outputs[0].shape))), Partial("sum"), Partial("max"), Partial("min"))
        rows: Sequence[Signature] = (all_broadcast(op), *(Signature((p,), (p,)) for p in places))
    else:
        rows = rows_of(op)
    for row in rows:
        ports = zip((*row.inputs, *row.outputs), (*op.inputs, *op.outputs), strict=True)
        divides = all(x.shape[int(p.dim)] % microbatches == 0 for p, x in ports if isinstance(p, Split))
        if divides and row.size % microbatches == 0 and not (row.collectives or row.majors):
            yield row


ConversionCost = Callable[[TimePlace, Placement], int | None]


def exact_use(current: TimePlace, required: Placement) -> int | None:
    """Returns 0 if a row reads the operand as it is, None otherwise."""
    return 0 if current == required or (required is B and isinstance(current, TimeExtent)) else None


def local_use(current: TimePlace, required: Placement) -> int | None:
    """Returns what it costs to slice a block of a whole operand (1), or to count it as one contribution (3)."""
    if exact_use(current, required) == 0 or isinstance(current, Partial | Split):
        return exact_use(current, required)
    return 1 if isinstance(required, Split) else 3


def estimated_use(current: TimePlace, required: Placement) -> int | None:
    """Returns the cost as ``local_use``, a sum also being estimated from this iteration's contribution (2 or 3)."""
    if isinstance(current, Partial) and not isinstance(required, Partial):
        return 2 if required is B else 3
    return local_use(current, required)


# ---- Analysis --------------------------------------------------------------------------------------------------------


def analyze_time_axis(
    graph: Graph, microbatches: int, batch: Collection[int], per_microbatch: bool = False
) -> TimePlacement:
    """Returns the time placement of every value of a step.

    Args:
      microbatches: blocks into which the first dim of the batch is split.
      batch: ids of the inputs that are the batch.
      per_microbatch: replace AFTER_LOOP values that an iteration needs by PER_MICROBATCH ones. The analysis is then
        repeated with the replaced values until no further one is needed.

    Raises PipelineError that lists the operations in the loop that need the whole batch.
    """
    replaced: set[int] = set()
    while True:
        analysis = _Analysis(TimePlacement(microbatches), per_microbatch, replaced)
        analysis.place_step(graph, batch)
        if not analysis.faults:
            return analysis.result
        missing = analysis.unavailable - replaced
        if not per_microbatch or not missing:
            rows = shortened(list(analysis.faults.values()), _FAULTS_LISTED)
            remedy = "" if per_microbatch else "Pipeline(per_microbatch=True) computes these per microbatch instead"
            raise PipelineError(faults("microbatches: these operations need the whole batch at once:", rows, remedy))
        replaced |= missing


class _Analysis:
    """One forward pass over a step.

    Args:
      estimate: sums over the batch may be estimated from one microbatch.
      replaced: ids of values to compute as PER_MICROBATCH.

    ``faults`` has the text per operation that needs the whole batch, ``unavailable`` the ids of AFTER_LOOP values that
    the loop needs, with everything that they are computed from.
    """

    def __init__(self, result: TimePlacement, estimate: bool, replaced: Collection[int]) -> None:
        self.result, self.estimate, self.replaced = result, estimate, replaced
        self.faults: dict[int, str] = {}
        self.unavailable: set[int] = set()
        self._producers: dict[int, Op] = {}
        self._time_rows: dict[int, tuple[Signature, ...]] = {}

    def place_step(self, graph: Graph, batch: Collection[int]) -> None:
        """Place the inputs of a step, then its operations in order."""
        for v in graph.inputs:
            self.result.places[v.id] = Split(0) if v.id in batch else B
        for op in graph.ops[:-1]:
            self._producers.update((v.id, op) for v in op.outputs)
            self._place(op)

    def _place(self, op: Op) -> None:
        """Place the results of one top-level operation."""
        operands = {self.result.of(x) for x in op.inputs}
        has_block = any(isinstance(p, Split) for p in operands)
        if operands <= {B}:
            self._set(op, (B,) * len(op.outputs))
        elif op.name == "stage":
            self._pass_cut(op)
        elif AFTER_LOOP in operands:
            late = [x for x in values(op.inputs) if self.result.of(x) is AFTER_LOOP]
            self._set_after_loop(op, self.result.blame[late[0].id])
            if has_block:
                self._report_unavailable(op, late)
        elif (
            has_block or self._is_replaced(op) or ((op.phase != OPTIMIZER or op.manual) and self._commutes_with_sum(op))
        ):
            self._place_in_loop(op)
        else:
            self._set_after_loop(op, op)

    def _place_in_loop(self, op: Op) -> None:
        """Place an operation in the loop if it can run there, else after it."""
        try:
            self._run_per_microbatch(op)
        except NeedsWholeBatch as need:
            reads_sum = any(isinstance(self.result.of(x), Partial) for x in op.inputs)
            if reads_sum or self._is_replaced(op) or op.bodies:
                self._report(need.op, need.op)
            self._set_after_loop(op, need.op)

    # Property: a stage cut is the identity.

    def _pass_cut(self, op: Op) -> None:
        self._set(op, [self.result.of(x) for x in op.inputs])
        blame, pairs = self.result.blame, zip(op.inputs, op.outputs, strict=True)
        blame.update((v.id, blame[x.id]) for x, v in pairs if isinstance(x, Value) and x.id in blame)

    # Property: the rule of the operation.

    def _commutes_with_sum(self, op: Op) -> bool:
        """Returns whether an operation on sums may run before they are complete, being linear."""
        if op.bodies:
            return False
        row = self._cheapest_row(op, exact_use)
        if row is None:
            return False
        invariant = {self.result.of(x) for x in op.inputs} <= {B, INVARIANT}
        return invariant or any(isinstance(p, Partial) for p in row.outputs)

    def _run_per_microbatch(self, op: Op) -> None:
        """Place the results of an operation in the loop; raises NeedsWholeBatch if no row accepts its operands."""
        if op.bodies:
            self._set(op, _LOOPS[op.name](self, op))
            return
        row = self._cheapest_row(op, estimated_use if self.estimate else local_use)
        if row is None:
            raise NeedsWholeBatch(op)
        self.result.rows[op.id] = row
        estimated = any(
            self.result.of(x) is PER_MICROBATCH
            or (isinstance(self.result.of(x), Partial) and not isinstance(required, Partial))
            for x, required in zip(op.inputs, row.inputs, strict=True)
        )
        whole = PER_MICROBATCH if estimated else INVARIANT
        self._set(op, [whole if p is B else p for p in row.outputs])

    def _cheapest_row(self, op: Op, cost: ConversionCost) -> Signature | None:
        """Returns the first row of least conversion cost, None if no row accepts the operands."""
        if op.id not in self._time_rows:
            self._time_rows[op.id] = tuple(time_rows(op, self.result.microbatches))
        best: tuple[int, Signature] | None = None
        for row in self._time_rows[op.id]:
            costs = [cost(self.result.of(x), required) for x, required in zip(op.inputs, row.inputs, strict=True)]
            total = sum(c for c in costs if c is not None)
            if None not in costs and (best is None or total < best[0]):
                best = total, row
        return best[1] if best else None

    # Property: a value of the whole batch exists only after the loop.

    def _is_replaced(self, op: Op) -> bool:
        return any(v.id in self.replaced for v in op.outputs)

    def _set_after_loop(self, op: Op, blame: Op) -> None:
        self._set(op, (AFTER_LOOP,) * len(op.outputs))
        self.result.blame.update((v.id, blame) for v in op.outputs)

    def _report_unavailable(self, op: Op, operands: Sequence[Value]) -> None:
        """Record that an iteration would need these values of the whole batch, and what they are computed from."""
        for x in operands:
            self._report(self.result.blame[x.id], op)
            pending = [x.id]
            while pending:
                v = pending.pop()
                if self.result.places.get(v) is AFTER_LOOP and v not in self.unavailable:
                    self.unavailable.add(v)
                    pending += [y.id for y in values(self._producers[v].inputs)]

    def _report(self, cause: Op, consumer: Op) -> None:
        text = f"{cause.called} at {cause.source}"
        if consumer is not cause:
            text += f", which {consumer.called} at {consumer.source} reads per microbatch"
        self.faults.setdefault(cause.id, text)

    # Property: a loop is a fixed point over its carries.

    def place_body(self, graph: Graph, inputs: Sequence[TimePlace]) -> list[TimePlace]:
        """Place the values of a body whose inputs are placed so; returns the placements of what it returns."""
        self.result.places.update((v.id, p) for v, p in zip(graph.inputs, inputs, strict=True))
        for op in graph.ops[:-1]:
            if {self.result.of(x) for x in op.inputs} <= {B}:
                self._set(op, (B,) * len(op.outputs))
            else:
                self._run_per_microbatch(op)
        return [self.result.of(x) for x in graph.returned]

    def fixed_point(
        self,
        op: Op,
        body: Graph,
        consts: Sequence[TimePlace],
        carries: Sequence[TimePlace],
        slices: Sequence[TimePlace],
    ) -> list[TimePlace]:
        """Returns the placements of a loop's final carries, then of whatever else its body returns."""
        carry = list(carries)
        while True:
            returned = self.place_body(body, [*consts, *carry, *slices])
            joined = [join(op, a, b) for a, b in zip(carry, returned, strict=False)]
            if joined == carry:
                return [*carry, *returned[len(carry) :]]
            carry = joined

    def _set(self, op: Op, places: Sequence[TimePlace]) -> None:
        self.result.places.update((v.id, p) for v, p in zip(op.outputs, places, strict=True))


# ---- Loops and conditionals ------------------------------------------------------------------------------------------


def _slice_of_stack(op: Op, place: TimePlace) -> TimePlace:
    """Returns the placement of a scan's slices; its leading dim is iterated over and cannot be split in time."""
    if place == Split(0):
        raise NeedsWholeBatch(op)
    return Split(int(place.dim) - 1) if isinstance(place, Split) else place


def _loop_result(place: TimePlace, stacked: bool = False) -> TimePlace:
    """Returns the placement of a loop's result; one that is stacked has a leading dim in addition."""
    if isinstance(place, Split) and stacked:
        return Split(int(place.dim) + 1)
    return INVARIANT if place is B else place


def _scan(analysis: _Analysis, op: Op) -> list[TimePlace]:
    operands = split_operands(op, map(analysis.result.of, op.inputs))
    slices = [_slice_of_stack(op, p) for p in operands.slices]
    returned = analysis.fixed_point(op, op.bodies[0], operands.consts, operands.carry, slices)
    return [_loop_result(p, i >= len(operands.carry)) for i, p in enumerate(returned)]


def _while(analysis: _Analysis, op: Op) -> list[TimePlace]:
    condition, body = op.bodies
    operands = split_operands(op, map(analysis.result.of, op.inputs))
    carry = analysis.fixed_point(op, body, operands.consts, operands.carry, ())
    if local_placement(analysis.place_body(condition, [*operands.condition, *carry])[0]) is not B:
        raise NeedsWholeBatch(op)
    return [_loop_result(p) for p in carry]


def _cond(analysis: _Analysis, op: Op) -> list[TimePlace]:
    operands = split_operands(op, map(analysis.result.of, op.inputs))
    (predicate,) = operands.predicate
    if local_placement(predicate) is not B:
        raise NeedsWholeBatch(op)
    places: list[TimePlace] = [predicate] * len(op.outputs)
    for body in op.bodies:
        places = [join(op, a, b) for a, b in zip(places, analysis.place_body(body, operands.consts), strict=True)]
    return [_loop_result(p) for p in places]


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
