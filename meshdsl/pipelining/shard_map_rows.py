"""The user's ``jax.shard_map`` in microbatches: its body has to make of a microbatch what it makes of the batch.

A device has block r of the batch, and of a microbatch block r too, which are other rows. So a body can run per
microbatch if what it computes of a row does not depend on the device that has it. On a mesh axis over which a shard_map
divides, values are of four kinds:

    equal     the same on all devices
    own       its own on every device, whatever the rows: a block of weights or of a sequence, an index
    rows      the axis splits the dim that is split in time: the device's rows of the microbatch
    summand   a sum, maximum or minimum over the device's rows

    operation                              equal     own       rows      summand
    ----------------------------------------------------------------------------------
    computes, beside equal operands        equal     own       rows *    summand
    psum, pmax, pmin                       equal     equal     -         equal
    all_gather, pbroadcast                 equal     equal     -         -
    psum_scatter                           own       own       -         own
    other collectives                      own       own       -         -
    leaves, not split by the axis          +         +         -         -
    leaves, split by the axis              +         +         + **      -

    *  or a summand, if it reduces them; an operand beside them that has rows too has to be constant along them
    ** in the dim and over the axes in which they entered; others may be split there in a dim that is not split in time
    -  is refused, as is an operation on two different kinds other than equal

What leaves is *packed*: where it enters another shard_map by the same spec, it is what it was. If it may not leave
otherwise, nothing else may read it. Autodiff passes residuals so.

An iteration may stop in the middle of a body, at a sum over the batch. The rest of the body may read what is equal on
all devices then, and the device's own (``body_exports``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshdsl.errors import PipelineError, faults
from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value, walk
from meshdsl.ir.loops import LoopPort, PortRole, body_operands, loop_ports
from meshdsl.ir.manual import BOUNDARY
from meshdsl.layouts.placement import Partial, Split
from meshdsl.pipelining.time_axis import TimePlacement, local_placement
from meshdsl.rules.registry import all_broadcast
from meshdsl.rules.shard_map import KINDS, split_dim

_REMEDY = "compute it outside of the shard_map, or loop over the microbatches inside the step"
REDUCTIONS = ("psum", "pmax", "pmin")
PASSED = ("optimization_barrier", "constrain")  # operations that a packed value may pass


@dataclass(frozen=True)
class Held:
    """What the devices of an axis have of a value.

    Args:
      kind: of the table above, or packed.
      axes: for rows, the axes that split them, major first.
      inside: for packed, what left, the spec by which it did, and why it may not be read outside, if so.
    """

    kind: str
    axes: tuple[str, ...] = ()
    inside: "tuple[Held, tuple[tuple[str, ...], ...], str] | None" = None


EQUAL, OWN, SUMMAND = Held("equal"), Held("own"), Held("summand")
_WORDS = {
    "own": "what each device has of its own",
    "rows": "rows of the batch",
    "summand": "sums over the rows of each device",
    "packed": "blocks of devices",
}


def check_shard_maps(
    name: str, graph: Graph, placement: TimePlacement, exported: Iterable[Value]
) -> Mapping[int, Sequence[str]]:
    """Returns the axes on whose devices exported values differ, by id of those that differ.

    Args:
      exported: values of the loop that the rest of the step reads.

    Raises PipelineError if a body in the loop depends on which rows a device has.
    """
    sizes = (op.params["sizes"] for _, op in walk(graph) if op.name in BOUNDARY)
    rows: list[str] = []
    producers = {v.id: op for op in graph.ops for v in op.outputs}
    own: dict[int, list[str]] = {}
    for axis in dict.fromkeys(axis for named in sizes for axis, _ in named):
        analysis = _Rows(axis, placement)
        analysis.run(graph)
        for v in exported:
            analysis.leave_loop(producers[v.id], v)
            if analysis.of(v) == OWN:
                own.setdefault(v.id, []).append(axis)
        rows += analysis.faults.values()
    if rows:
        raise PipelineError(faults(f"{name} does not run in microbatches:", dict.fromkeys(rows), _REMEDY))
    return own


@dataclass
class _Rows:
    """The kinds of all values on one axis, and a fault per operation that is refused."""

    axis: str
    placement: TimePlacement
    held: dict[int, Held] = field(default_factory=dict)
    producers: dict[int, Op] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)

    def run(self, graph: Graph) -> None:
        """Finds the kinds of all values, as a fixed point over the carries of loops; then the faults."""
        before: dict[int, Held] | None = None
        while before != self.held:
            before = dict(self.held)
            self.faults.clear()
            self._graph(graph)

    def leave_loop(self, op: Op, v: Value) -> None:
        """Records a fault if the result ``v`` of an operation cannot be passed on after the loop."""
        self._unpacked(op, v)
        held = self.of(v)
        if held.kind in ("rows", "summand"):
            self._fault(op, f"the body goes on after the loop with {_WORDS[held.kind]}, along {self.axis}")

    def of(self, x: Atom) -> Held:
        """Returns the kind of a value; values that are not known yet, and those outside, are equal."""
        return EQUAL if isinstance(x, Literal) else self.held.get(x.id, EQUAL)

    def _graph(self, graph: Graph) -> None:
        for op in graph.ops[:-1]:
            self.producers.update((v.id, op) for v in op.outputs)
            if op.bodies:
                self._loop(op)
            else:
                self.held.update((v.id, held) for v, held in zip(op.outputs, self._results(op), strict=True))

    def _results(self, op: Op) -> Sequence[Held]:
        if op.name in BOUNDARY and self.axis in dict(op.params["sizes"]):
            return [self._entered(op) if op.name == "enter_shard_map" else self._left(op)]
        if self.axis not in op.manual:
            if op.name in PASSED:
                return [self.of(x) for x in op.inputs]
            for x in op.inputs:
                self._unpacked(op, x)
            return [EQUAL] * len(op.outputs)
        if op.name == "axis_index":
            names = op.params["axis_name"]
            return [OWN if self.axis in ((names,) if isinstance(names, str) else names) else EQUAL]
        if op.name in KINDS and self.axis in op.params["moved"]:
            return [self._exchanged(op)]
        return self._computed(op)

    def _time_dim(self, v: Value) -> int | None:
        place = local_placement(self.placement.of(v))
        return int(place.dim) if isinstance(place, Split) else None

    def _fault(self, op: Op, why: str) -> None:
        self.faults.setdefault(op.id, f"{op.called} at {op.source}: {why}")

    def _unpacked(self, op: Op, x: Atom) -> None:
        """Records the fault of an operation that reads a packed value."""
        inside = self.of(x).inside
        if inside and inside[2]:
            self._fault(self.producers.get(x.id, op) if isinstance(x, Value) else op, inside[2])

    def _joined(self, op: Op, all_held: Iterable[Held]) -> Held:
        found = list(dict.fromkeys(all_held))
        kinds = [held for held in found if held != EQUAL]
        if any(held.inside for held in kinds):  # outside of the shard_map, where equal means anything
            why = next((held.inside[2] for held in kinds if held.inside and held.inside[2]), "")
            if len(found) > 1 and why:
                self._fault(op, why)
            return kinds[0] if len(found) == 1 else EQUAL
        if len(kinds) > 1:
            one, other = (_WORDS[held.kind] for held in kinds[:2])
            also = f"{other} in another order" if one == other else other
            self._fault(op, f"computes with {one} and {also}, along {self.axis}")
        return kinds[0] if kinds else EQUAL

    # Property: the spec at the boundary.

    def _entered(self, op: Op) -> Held:
        inside = self.of(op.inputs[0]).inside
        if inside and inside[1] == op.params["spec"]:
            return inside[0]
        self._unpacked(op, op.inputs[0])
        dim = split_dim(op, self.axis)
        if dim is None:
            return OWN if self.axis in op.params["unreduced"] else EQUAL
        return Held("rows", op.params["spec"][dim]) if self._time_dim(op.outputs[0]) == dim else OWN

    def _left(self, op: Op) -> Held:
        held, dim, spec, why = self.of(op.inputs[0]), split_dim(op, self.axis), op.params["spec"], ""
        in_time = dim is not None and self._time_dim(op.outputs[0]) == dim
        if held.kind == "rows" and not (in_time and spec[dim or 0] == held.axes):
            why = f"returns rows of the batch otherwise than they are split over {self.axis}"
        elif held.kind != "rows" and in_time:
            why = f"returns what devices along {self.axis} have of all rows as if it were their rows"
        elif held == SUMMAND and self.axis not in op.params["unreduced"]:
            why = f"returns a sum over the rows of each device along {self.axis}"
        return Held("packed", inside=(held, spec, why))

    # Property: what is exchanged over the axis.

    def _exchanged(self, op: Op) -> Held:
        held = self._joined(op, map(self.of, op.inputs))
        grouped = op.params["groups"] is not None
        if held.kind == "rows":
            self._fault(op, f"exchanges rows of the batch over {self.axis}")
        if held == SUMMAND and (grouped or op.name not in (*REDUCTIONS, "reduce_scatter")):
            self._fault(op, f"exchanges sums over the rows of each device along {self.axis}")
        alike = op.name in (*REDUCTIONS, "all_gather", "pbroadcast") and not grouped
        return EQUAL if alike else OWN

    # Property: the row by which an operation runs per microbatch.

    def _computed(self, op: Op) -> Sequence[Held]:
        held = self._joined(op, map(self.of, op.inputs))
        row = self.placement.rows.get(op.id) or all_broadcast(op)
        if held.kind == "rows":
            beside = [(x, p) for x, p in zip(op.inputs, row.inputs, strict=True) if self.of(x) == EQUAL]
            if not all(self._is_constant(x, int(p.dim) if isinstance(p, Split) else None) for x, p in beside):
                self._fault(op, self._by_place)
            return [SUMMAND if isinstance(p, Partial) else held for p in row.outputs]
        if held == SUMMAND and not all(isinstance(p, Partial) for p in row.outputs):
            self._fault(op, f"goes on with a sum over the rows of each device along {self.axis}")
        return [held] * len(op.outputs)

    @property
    def _by_place(self) -> str:
        return f"depends on where on the devices along {self.axis} a row of the batch is"

    def _is_constant(self, x: Atom, dim: int | None) -> bool:
        """Whether all elements along a dim are known to be equal."""
        if isinstance(x, Literal) or dim is None:
            return True
        op = self.producers.get(x.id)
        return op is not None and op.name == "broadcast_in_dim" and dim not in op.params["broadcast_dimensions"]

    # Property: a loop is a fixed point over its carries.

    def _loop(self, op: Op) -> None:
        for body, operands in zip(op.bodies, body_operands(op), strict=True):
            for v, x in zip(body.inputs, operands, strict=True):
                known = (self.held[v.id],) if v.id in self.held else ()
                self.held[v.id] = self._joined(op, (*known, self.of(x)))
        for port in loop_ports(op):
            self._pass_constant(op, port)
        for body in op.bodies:
            self._graph(body)
        decides = EQUAL
        for port in loop_ports(op):
            made = [self.of(op.bodies[body].returned[at]) for body, at in port.outputs]
            if port.role is PortRole.PREDICATE:
                decides = self._joined(op, made or [self.of(op.inputs[port.operand])])
            for which, at in port.inputs if port.role is PortRole.CARRY else ():
                self._carry(op, port, op.bodies[which].inputs[at], made)
        for port in loop_ports(op):
            if port.role in (PortRole.CARRY, PortRole.STACK, PortRole.RESULT):
                made = [self.of(op.bodies[body].returned[at]) for body, at in port.outputs]
                beside = [decides] if decides != EQUAL else []
                self.held[op.outputs[port.result].id] = self._joined(op, [*beside, *made])

    def _pass_constant(self, op: Op, port: LoopPort) -> None:
        """What is constant outside is so inside."""
        x = op.inputs[port.operand] if port.role in (PortRole.CONST, PortRole.OPERAND) else None
        if isinstance(x, Value) and x.id in self.producers:
            made = self.producers[x.id]
            self.producers.update((op.bodies[body].inputs[at].id, made) for body, at in port.inputs)

    def _carry(self, op: Op, port: LoopPort, v: Value, made: Sequence[Held]) -> None:
        held, start = self._joined(op, (self.of(v), *made)), op.inputs[port.operand]
        self.held[v.id] = held
        if held.kind == "rows" and self.of(start) == EQUAL and not self._is_constant(start, self._time_dim(v)):
            self._fault(op, self._by_place)
