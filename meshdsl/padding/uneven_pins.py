"""Pins that do not divide: the last batch of an evaluation, 30 rows where others have 128.

An array at the boundary of a step cannot be split unevenly, so a pin that does not divide is loosened there: the array
is replicated over the axes concerned. That is all that ``uneven="replicate"`` does. With ``uneven="pad"`` the pin
moves inside the step, as a constraint, and constraints are what padding makes possible:

    batch [30, 512] data=B --constrain data=S(0)--> ...         as written, with the pin as a constraint
    batch [30, 512] data=B --pad--> [32, 512] data=S(0) ...     after pad_program

Padding, slicing and splitting send nothing; each device computes its 8 rows, and sums are over the 30.

Constraints that the user wrote and that no padding makes divide are loosened as pins are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshdsl.errors import shortened
from meshdsl.ir.graph import Atom, Op, TracedProgram, Value
from meshdsl.ir.rewrite import copied, fresh_ids, new_value, renumber, returning, substitute, with_each_op, with_ops
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.padding.regions import compute_regions
from meshdsl.padding.rewrite import pad_program
from meshdsl.pins import UserPins
from meshdsl.pins.conflicts import divisible
from meshdsl.primitives.constrain import constrain_p

_SHOWN = 3  # arrays that a note names


@dataclass(frozen=True)
class UnevenPins:
    """The pins of a program that do not divide, as they were stated, by the index of the input or output."""

    inputs: Mapping[int, Layout]
    outputs: Mapping[int, Layout]

    @classmethod
    def of(cls, program: TracedProgram, mesh: Mesh, pins: UserPins) -> "UnevenPins":
        """Returns those of ``pins``; PinError lists their other faults."""
        return cls(*pins.loosened(program, mesh))

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs)

    def notes(self, program: TracedProgram, mesh: Mesh, padded: bool) -> list[str]:
        """Returns a sentence per pin, for the plan and the log."""
        arrays: dict[tuple[str, str], list[str]] = {}
        for leaves, pins in ((program.inputs, self.inputs), (program.outputs, self.outputs)):
            for i, pin in pins.items():
                stated = str(pin), str(divisible(leaves[i].shape, pin, mesh))
                arrays.setdefault(stated, []).append(f"{leaves[i].path or 'the result'} {leaves[i].type}")
        inside = ", padded and split inside" if padded else ""
        how = f"uneven={'pad' if padded else 'replicate'!r}"
        return [
            f"{', '.join(shortened(named, _SHOWN))}: {pin} does not divide; {loosened} at the boundary{inside} ({how})"
            for (pin, loosened), named in arrays.items()
        ]

    def constrained(self, program: TracedProgram) -> TracedProgram:
        """Returns the program with the pins as constraints behind its inputs and in front of its outputs.

        An input that nothing reads has none: compilers would drop what it sends.
        """
        graph = copied(program.graph)
        read = {x.id for op in graph.ops[:-1] for x in op.inputs if isinstance(x, Value)}
        ids, table, first, last = fresh_ids(graph), dict[int, Atom](), list[Op](), list[Op]()
        for i, pin in self.inputs.items():
            if graph.inputs[i].id not in read:
                continue
            first.append(_constraint(graph.inputs[i], pin, program.inputs[i].dims, ids))
            table[graph.inputs[i].id] = first[-1].outputs[0]
        ops = [substitute(op, table) for op in graph.ops[:-1]]
        returned = list(graph.returned)
        for i, pin in self.outputs.items():
            value = returned[i]
            if isinstance(value, Value):
                last.append(_constraint(table.get(value.id, value), pin, program.outputs[i].dims, ids))
                returned[i] = last[-1].outputs[0]
        made = returning(with_ops(graph, [*first, *ops, *last, graph.ops[-1]]), returned)
        renumber(made)
        return replace(program, graph=made)


def _constraint(x: Atom, pin: Layout, names: tuple[str, ...], ids: Iterator[int]) -> Op:
    assert isinstance(x, Value)
    params = {"layout": pin, "names": names}
    return Op(0, "constrain", constrain_p, params, (x,), (new_value(x, ids),))


def padded_variant(
    program: TracedProgram, sizes: Mapping[int, int], mesh: Mesh, pins: UserPins, regions: bool = False
) -> TracedProgram:
    """Returns the program with these lengths padded, without constraints that then do not divide if pins need not.

    Args:
      regions: compute parts of dims that are only reduced where they lie (``regions``).
    """
    padded = pad_program(compute_regions(program) if regions else program, sizes)
    return padded if pins.uneven == "error" else loosened(padded, mesh)


def loosened(program: TracedProgram, mesh: Mesh) -> TracedProgram:
    """Returns the program without the parts of its constraints that do not divide."""
    graph = with_each_op(program.graph, lambda op: _loosened(op, mesh) if op.name == "constrain" else op)
    return program if graph is program.graph else replace(program, graph=graph)


def _loosened(op: Op, mesh: Mesh) -> Op:
    """Returns the constraint with those axes free over which it does not divide."""
    stated = op.params["layout"]
    kept = divisible(op.outputs[0].shape, Layout(**{a: p for a, p in stated.placements if a in mesh.names}), mesh)
    lost = {axis for axis, p in kept.placements if p != stated.on(axis)}
    freed = Layout(**{axis: p for axis, p in stated.placements if axis not in lost})
    return replace(op, params={**op.params, "layout": freed}) if lost else op
