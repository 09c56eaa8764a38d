"""Layout rules (flax's logical-axis rules) as pins, with all their faults at once.

Arrays carry the names of their dims (``meshdsl.nd.named_array``). The kind of an array follows from the step: an input
that no result replaces is the batch (an activation); of the others, those read only by the optimizer phase are
optimizer state, the rest parameters. State in objects is never the batch. Where a step replaces nothing and takes no
objects, as in inference, its first argument is the parameters.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from meshdsl.errors import nearest, shortened
from meshdsl.ir.graph import Graph, Leaf, TracedProgram
from meshdsl.ir.index import graph_index, ops_named
from meshdsl.layouts.axis_rules import Rules, conflicts, layout_of
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.pins.conflicts import leaf_faults, uneven_axes
from meshdsl.trace.annotate import OPTIMIZER
from meshdsl.util.lazy import memoize_by_object
from meshdsl.util.paths import split_path

PARAMS, STATE, ACTIVATIONS = "params", "optimizer", "activations"
_SHOWN, _FREE = 4, Layout()
_NOUNS = {"table": "array", PARAMS: "parameter", STATE: "array of the optimizer state", ACTIVATIONS: "activation"}


class RulePins:
    """Pins by layout rules, for a program's inputs and for results that replace no input.

    Args:
      follows: per result, the input that it replaces.
      loose: uneven splits are no faults.
      faults: one row per fault; arrays with faults are not pinned.
    """

    def __init__(
        self, program: TracedProgram, mesh: Mesh, rules: Rules, follows: Sequence[int | None], loose: bool = False
    ) -> None:
        self.program, self.mesh, self.rules, self._loose = program, mesh, rules, loose
        self._follows = follows
        self._misfits: list[str] = []
        self._tables = {kind: self._table(kind) for kind in (PARAMS, STATE, ACTIVATIONS)}
        self.inputs, self.outputs = [_FREE] * len(program.inputs), [_FREE] * len(program.outputs)
        if any(self._tables.values()):
            self.inputs = [self._pin(leaf, kind) for leaf, kind in zip(program.inputs, self.kinds, strict=True)]
            self.outputs = [
                self._pin(leaf, ACTIVATIONS, "result ") if source is None else _FREE
                for leaf, source in zip(program.outputs, follows, strict=True)
            ]
        lacking = UnusedRules(program, rules, self.kinds)
        self.faults = [*self._unknown_axes(lacking), *lacking.faults(), *shortened(self._misfits, _SHOWN)]

    @cached_property
    def kinds(self) -> list[str]:
        """The kind of each input."""
        return kinds(self.program, self._follows)

    def _pin(self, leaf: Leaf, kind: str, noun: str = "") -> Layout:
        """Returns the pin of one array; a free one if it has a fault."""
        table, what = self._tables[kind], f"rules: {noun}{leaf.path}"
        wrong = [f"{what} {leaf.type}: {row}" for row in conflicts(leaf.dims, table)]
        pin = _FREE if wrong else layout_of(leaf.dims, table)
        layers = uneven_axes(leaf, self.mesh, self.program.pipeline)
        wrong += leaf_faults(what, leaf, pin, self.mesh, layers, self._loose)
        self._misfits += wrong
        return _FREE if wrong else pin

    def _table(self, kind: str) -> dict[str, tuple[str, ...]]:
        """Returns the rules for one kind of arrays, over existing axes."""
        return {d: axes for d, axes in self.rules.group(kind).items() if set(axes) <= set(self.mesh.names)}

    def _unknown_axes(self, lacking: "UnusedRules") -> Iterator[str]:
        for name, table in self.rules.tables.items():
            for dim, axes in table.items():
                for axis in axes:
                    used = self.rules.strict or (name, dim) not in lacking.found
                    if used and axis not in self.mesh.names:
                        yield f"rules: {dim}:{axis}: no axis {axis!r} in the mesh{nearest(axis, self.mesh.names)}"


class UnusedRules:
    """Rules for dims that no array of a program has, as a table for many models has them.

    Args:
      kinds: the kind of each input.

    Attributes:
      found: (table, dim) of each.
    """

    def __init__(self, program: TracedProgram, rules: Rules, kinds: Sequence[str]) -> None:
        self.program, self.rules, self._kinds = program, rules, kinds
        stated = [(name, dim) for name, table in rules.tables.items() for dim in table]
        self._known = {name: self._dims(name) for name in rules.tables}
        self.found = [(name, dim) for name, dim in stated if dim not in self._known[name]]
        self._nothing_applies = len(self.found) == len(stated)

    def faults(self) -> Iterator[str]:
        """Yields a row per rule if the rules are strict, or if none of them applies."""
        for name, dim in self.found if self.rules.strict or self._nothing_applies else ():
            known = self._known[name]
            said = f"rules: no {_NOUNS[name]} has a dim {dim!r}{nearest(dim, known)}"
            yield said + ("" if known else "; md.named gives dims their names")

    def notes(self) -> list[str]:
        """Returns a line that lists the dims; none if there are none, or if they are faults."""
        if self.rules.strict or self._nothing_applies:
            return []
        named = [(name, dim, nearest(dim, self._known[name]).removeprefix("; ")) for name, dim in self.found]
        shown = [
            f"{'' if name == 'table' else f'{name} '}{dim}" + (f" ({meant})" if meant.startswith("did") else "")
            for name, dim, meant in named
        ]
        return [f"rules name dims that this step lacks: {', '.join(shown)}"] if shown else []

    def _dims(self, name: str) -> list[str]:
        """The dim names of all arrays of one kind."""
        inputs = [leaf for leaf, kind in zip(self.program.inputs, self._kinds, strict=True) if name in ("table", kind)]
        results = self.program.outputs if name in ("table", ACTIVATIONS) else ()
        inside = _constrained_dims(self.program) if name == ACTIVATIONS else ()
        return list(dict.fromkeys([d for leaf in (*inputs, *results) for d in leaf.dims if d] + [*inside]))


def kinds(program: TracedProgram, follows: Sequence[int | None]) -> list[str]:
    """Returns the kind of each input: ``PARAMS``, ``STATE`` or ``ACTIVATIONS``."""
    replaced = {i for i in follows if i is not None} | program.held.inputs
    if not replaced:
        firsts = [split_path(leaf.path)[0] for leaf in program.inputs]
        return [PARAMS if first == firsts[0] and len(set(firsts)) > 1 else ACTIVATIONS for first in firsts]
    read = _read_before_the_update(program.graph)
    ids = [value.id for value in program.graph.inputs]
    return [(PARAMS if v in read else STATE) if i in replaced else ACTIVATIONS for i, v in enumerate(ids)]


@memoize_by_object
def _read_before_the_update(graph: Graph) -> set[int]:
    """Returns the ids of values that the forward or the backward pass reads."""
    numbers = graph_index(graph)
    before = [op is not None and op.phase != OPTIMIZER and op.name != "return" for op in numbers.ops]
    return set(numbers.ids(numbers.mask(numbers.use_value[np.array(before)[numbers.use_position]])))


def _constrained_dims(program: TracedProgram) -> Iterable[str]:
    """Returns the dim names of values constrained inside the step."""
    stated = (op.params["names"] for op in ops_named(program.graph, "constrain"))
    return [name for names in stated for name in names if name]
