"""Where a wrong result of a partitioned program comes from.

From the result, values that the step does not have are followed back to those that it has. The first operation on the
way, whose operands are all values of the step, is the fault: a sum over other axes than the partial sums lie over, a
partial sum that is read as if it were whole, blocks that were sent to other devices. Loops and calls are followed
inside, in their first iteration.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.hlo.collectives import KINDS, axes_of_groups, axes_of_pairs, replica_groups, source_target_pairs
from meshdsl.lowering.hlo.parse import Module, called
from meshdsl.lowering.simulation.interpreter import Value
from meshdsl.lowering.simulation.operation import Operation
from meshdsl.lowering.simulation.types import ObservedType, ObservedTypes, Record, Recording

_REDUCING = ("all-reduce", "reduce-scatter")
_WRAPPERS = ("tuple", "get-tuple-element", "while", "call", "conditional", "fusion", "parameter")
_CUTTING = (
    *("slice", "dynamic-slice", "pad", "reshape", "transpose", "copy"),
    *("select", "concatenate", "reverse", "bitcast"),
)
_ENDS = ("xla.sdy.LocalToGlobalShape", "xla.sdy.FuncResultSharding")  # blocks of devices become results
_Node = tuple[str, str, tuple[int, ...]]  # computation, instruction, place in its tuple


@dataclass(frozen=True)
class FaultyOperation:
    """An operation of a compiled program that makes a result wrong.

    Args:
      kind: ``missing reduction``, ``doubled reduction``, ``reduction over other axes``, ``blocks of other devices``, or
        ``another value``.
      operation: of the compiled program; for a missing reduction, the one that computes the partial sum.
      axes: mesh axes of a collective, or of a partial sum that is never reduced.
      text: what it does, in types.
      step: the operation of the step whose value it reads, computes a partial sum of, or hands on; None if unknown.
    """

    kind: str
    operation: Operation
    axes: tuple[str, ...]
    text: str
    step: Operation | None = None


@dataclass(frozen=True)
class FaultFinder:
    """Finds the fault behind a wrong result.

    Args:
      module: the partitioned program. local: its values. types: of these. mesh: names the axes.
    """

    module: Module
    local: Recording
    types: ObservedTypes
    mesh: Mesh

    def fault(self, index: int) -> FaultyOperation | None:
        """Returns the fault behind a result, by its index; None if its values say nothing."""
        entry = self.module.entry
        root = self.module.roots[entry]
        tupled = isinstance(self._value((entry, root, ())), tuple)
        start: _Node = (entry, root, (index,) if tupled else ())
        end = self._resolved(start)
        known = self.types.of(self._value(end))
        if known is not None and known.partial:
            return self._missing(end[0], end[1], known, "it is returned as if it were whole")
        region = self._region(end)
        places = sorted({self.local.places[node[:2]] for node in region})
        inside = {node[0] for node in region}
        own = [record for record in (self.local.records[i] for i in places) if self._is_own(record, inside)]
        if not own:
            return None
        sent = [record for record in own if record.operation.opcode.removesuffix("-start") in KINDS]
        # pieces of blocks that are cut to be sent have no type either
        return self._described(sent[0] if sent and own[0].operation.opcode in _CUTTING else own[0])

    # ---- Walking back ------------------------------------------------------------------------------------------------

    def _region(self, end: _Node) -> list[_Node]:
        """A wrong value, and the values without a type that it is computed from by way of such values."""
        waiting, seen = [end], dict[_Node, None]()
        while waiting:
            node = waiting.pop()
            value = self._value(node)
            if node in seen or value is None or (node != end and self.types.explained(value)):
                continue
            seen[node] = None
            waiting += self._sources(node)
        return list(seen)

    def _sources(self, node: _Node) -> list[_Node]:
        """The values that a value is computed from."""
        computation, name, place = node
        record = self.local.of(computation, name)
        if record is None:
            return []
        operation = record.operation
        operands: list[_Node] = [(computation, operand, ()) for operand in operation.operands]
        if operation.opcode == "tuple":
            return [(computation, operation.operands[place[0]], place[1:])] if place else operands
        if operation.opcode == "get-tuple-element":
            return [(computation, operation.operands[0], (operation.integer("index"), *place))]
        if operation.opcode == "parameter":
            return []
        inside = [
            (body, self.module.roots[body], place)
            for body in called(operation.instruction)
            if body != operation.attributes.get("condition", "").lstrip("%")
        ]
        if operation.attributes.get("custom_call_target", "").strip('"') in _ENDS and place:
            return [(computation, operation.operands[place[0]], place[1:])]
        if operation.opcode == "while":
            return [(computation, operation.operands[0], place), *inside]
        return [*operands, *inside]

    def _value(self, node: _Node) -> Value:
        record = self.local.of(*node[:2])
        value = None if record is None else record.value
        for i in node[2]:
            value = value[i] if isinstance(value, tuple) and i < len(value) else None
        return value

    def _resolved(self, node: _Node) -> _Node:
        """The operation that computes a value, behind tuples, calls and the end of a shard_map."""
        record = self.local.of(*node[:2])
        while record is not None and self._hands_on(record.operation):
            node = self._sources(node)[-1]
            record = self.local.of(*node[:2])
        return node

    @staticmethod
    def _hands_on(operation: Operation) -> bool:
        target = operation.attributes.get("custom_call_target", "").strip('"')
        return operation.opcode in ("tuple", "get-tuple-element", "call") or target in _ENDS

    @staticmethod
    def _is_own(record: Record, inside: set[str]) -> bool:
        """Whether an operation may be the fault: a loop is one if nothing inside of it is wrong at first."""
        operation = record.operation
        if operation.opcode == "while":
            return operation.computation("body") not in inside
        return operation.opcode not in _WRAPPERS or (
            operation.opcode == "fusion" and operation.computation("calls") not in inside
        )

    # ---- Naming the fault --------------------------------------------------------------------------------------------

    def _described(self, record: Record) -> FaultyOperation:
        operation = record.operation
        reads = [(name, known) for name, known in self._operands(record) if known is not None]
        partial = next(((name, known) for name, known in reads if known.partial), None)
        kind, axes, opcode = "another value", self._axes(operation), operation.opcode.removesuffix("-start")
        if operation.opcode == "while":
            text = "hands on what the step computes in its first iteration, and something else after the last"
            return FaultyOperation(kind, operation, axes, text)
        if opcode in _REDUCING and reads:
            lies = reads[0][1].partial
            if not lies:
                kind = "doubled reduction"
                text = f"sums over {_over(axes)} what is no partial sum ({reads[0][1]})"
            else:
                kind = "reduction over other axes"
                text = f"sums over {_over(axes)}, where the partial sums lie over {_over(lies)} ({reads[0][1]})"
        elif partial is not None:
            name, known = partial
            return self._missing(record.computation, name, known, f"{operation.opcode} reads it as if it were whole")
        elif opcode in _REDUCING:
            text = f"sums over {_over(axes)} to something that the step does not compute"
        elif opcode in KINDS:
            kind, text = "blocks of other devices", f"sends blocks over {_over(axes)} to devices that need others"
        else:
            text = "computes nothing that the step does"
        found = self.types.faulty(record)
        if found is not None and found.permuted:
            kind = "blocks of other devices"
        inputs = ", ".join(f"{known.whole.name} ({known})" for _, known in reads) if text.startswith("computes") else ""
        gives = f"; the result is {found} of {found.whole.name}" if found is not None else ""
        step = found.whole if found is not None else reads[0][1].whole if reads else None
        return FaultyOperation(kind, operation, axes, f"{text}{f' from {inputs}' if inputs else ''}{gives}", step)

    def _missing(self, computation: str, name: str, known: ObservedType, why: str) -> FaultyOperation:
        """A partial sum that is not reduced: the fault lies where it is computed."""
        record = self.local.of(computation, name)
        while record is not None:  # back to what makes it partial
            earlier = [
                (operand, before)
                for operand, before in self._operands(record)
                if before is not None and set(before.partial) & set(known.partial)
            ]
            if not earlier:
                break
            record = self.local.of(record.computation, earlier[0][0])
        assert record is not None
        axes = known.partial
        return FaultyOperation(
            "missing reduction",
            record.operation,
            axes,
            f"computes a partial sum over {_over(axes)} ({known}) that is never reduced; {why}",
            known.whole,
        )

    def _operands(self, record: Record) -> list[tuple[str, ObservedType | None]]:
        """The operands that depend on arguments, with their types."""
        read = [(name, self.local.of(record.computation, name)) for name in record.operation.operands]
        found = [(name, x.value) for name, x in read if x is not None and isinstance(x.value, np.ndarray)]
        return [(name, self.types.of(value)) for name, value in found if not self.types.constant(value)]

    def _axes(self, operation: Operation) -> tuple[str, ...]:
        """The mesh axes of a collective; none if its groups are no axes, or if it is none."""
        opcode, attributes = operation.opcode.removesuffix("-start"), operation.instruction.attributes
        if opcode == "collective-permute":
            return axes_of_pairs(source_target_pairs(attributes), self.mesh.sizes_by_name)
        if opcode in KINDS:
            groups = replica_groups(attributes, self.mesh.size)
            return tuple(axes_of_groups(groups, self.mesh.sizes_by_name) or ())
        return ()


def _over(axes: Sequence[str]) -> str:
    return ",".join(axes) if axes else "groups that are no axes of the mesh"
