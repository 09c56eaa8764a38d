"""The planned step as a graph for Model Explorer (https://github.com/google-ai-edge/model-explorer): its JSON format.

A file is a collection of graphs, a graph is nodes, and a node lists what comes in: which node's output, at which input.
Nodes are the step's inputs, operations and results, and the plan's collectives, which stand on the edges that they are
for. A loop's body is a layer of its own: what goes in comes straight from outside, and the loop's own node has what it
comes to. A plan alone does not know who reads what, so the program is needed too.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

from meshdsl.ir.graph import Graph, Op, TracedProgram, Value
from meshdsl.ir.loops import body_operands
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.reshard import ReshardStep
from meshdsl.plan.reasons import Reasons, collectives_inside
from meshdsl.plan.text import layout_text
from meshdsl.plan.types import PlanData
from meshdsl.util.text import bytes_text, seconds_text, write_text

Json = dict[str, Any]
_COLOR = {"backgroundColor": "#f6d9b8"}  # of collectives
End = tuple[str, int]  # a node's id, and which of its outputs
Edge = tuple[End, int]  # with the input that it goes into


def model_explorer_graphs(program: TracedProgram, plan: PlanData) -> Json:
    """A collection with one graph, the step."""
    return {"label": plan.name, "graphs": [{"id": plan.name, "nodes": _Nodes(program, plan).made()}]}


def save_model_explorer(program: TracedProgram, plan: PlanData, path: str | PathLike[str]) -> None:
    """Write the collection; ArgumentError for what is no path, MeshDSLError if it cannot be written."""
    write_text(path, json.dumps(model_explorer_graphs(program, plan)))


class _Nodes:
    """The nodes of a step while they are made.

    ``ends`` has, per value id, where it comes from: a node's output, outside of a loop for what goes into its body.
    """

    def __init__(self, program: TracedProgram, plan: PlanData) -> None:
        self.program, self.plan, self.solution = program, plan, plan.solution
        self.reasons = Reasons(program, plan.solution)
        self.ends: dict[int, End] = {}
        self.moved: dict[tuple[int, Layout], End | None] = {}
        self.nodes: list[Json] = []
        self.inside: dict[int, list[str]] = {}
        for found in collectives_inside(program.graph, plan.solution):
            said = f"{found.kind} over {','.join(found.axes)}, {bytes_text(found.bytes)}: {found.exchange}"
            self.inside.setdefault(found.op.id, []).append(said)

    def made(self) -> list[Json]:
        """All of them, in program order."""
        for i, (leaf, v) in enumerate(zip(self.program.inputs, self.program.graph.inputs, strict=True)):
            self.ends[v.id] = f"input {i}", 0
            self._add(f"input {i}", leaf.path, "inputs", (), (v,), {})
        self._graph(self.program.graph, "")
        return self.nodes

    def _graph(self, graph: Graph, space: str) -> None:
        for op in graph.ops:
            if op.bodies:
                self._loop(op, graph, space)
            elif op.name != "return":
                self._op(op, graph, space)
            elif graph is self.program.graph:
                self._results(op, graph)

    def _op(self, op: Op, graph: Graph, space: str) -> None:
        edges = list(self._read(op, graph, space))
        self.ends.update((v.id, (_id(op), i)) for i, v in enumerate(op.outputs))
        self._add(_id(op), op.called, space, edges, op.outputs, self._attributes(op, graph))

    def _loop(self, op: Op, graph: Graph, space: str) -> None:
        """A loop's bodies, and a node for what it comes to."""
        outside = {i: end for end, i in self._read(op, graph, space)}
        at = {id(x): outside[i] for i, x in enumerate(op.inputs) if i in outside}
        returned: list[Edge] = []
        for body, given in zip(op.bodies, body_operands(op), strict=True):
            inner = "/".join(filter(None, (space, f"{op.called} {op.id}")))
            self.ends.update((v.id, at[id(x)]) for v, x in zip(body.inputs, given, strict=True) if id(x) in at)
            self._graph(body, inner)
            returned += self._read(body.ops[-1], body, inner)
        self.ends.update((v.id, (_id(op), i)) for i, v in enumerate(op.outputs))
        self._add(_id(op), op.called, space, returned, op.outputs, self._attributes(op, graph))

    def _results(self, op: Op, graph: Graph) -> None:
        edges = {i: end for end, i in self._read(op, graph, "results")}
        for i, leaf in enumerate(self.program.outputs):
            found = [(edges[i], 0)] if i in edges else []
            self._add(f"result {i}", leaf.path or "result", "results", found, (), {"type": leaf.type})

    def _read(self, op: Op, graph: Graph, space: str) -> Iterator[Edge]:
        """Where the operands come from, moved as the operation reads them."""
        for i, x in enumerate(op.inputs):
            end = self._moved(x, self.solution.uses[op.id, i], graph, space) if isinstance(x, Value) else None
            if end is not None:
                yield end, i

    def _moved(self, x: Value, layout: Layout, graph: Graph, space: str) -> End | None:
        """Where a value comes from in a layout; None for a scalar that is written into the program."""
        if (x.id, layout) not in self.moved:
            move = next((m for m in self.solution.trees.get(x.id, ()) if m.after == layout), None)
            end = self.ends.get(x.id)
            if move is not None and layout != self.solution.layouts[x.id] and end is not None:
                end = self._moved(x, move.before, graph, space)
                end = self._collective(x, move, end, graph, space) if end and move.kind in COLLECTIVES else end
            self.moved[x.id, layout] = end
        return self.moved[x.id, layout]

    def _collective(self, x: Value, move: ReshardStep, end: End, graph: Graph, space: str) -> End:
        reason, runs = self.reasons.explain(x, move)[2], graph.trips
        costs = {"bytes": bytes_text(move.bytes), "trips": str(runs), "seconds": seconds_text(move.seconds * runs)}
        name = f"move {x.id} {move.after}"
        attributes = {"axes": ",".join(move.axes), **costs, "reason": reason}
        self._add(name, move.kind, space, [(end, 0)], (), attributes, _COLOR)
        return name, 0

    def _attributes(self, op: Op, graph: Graph) -> dict[str, str]:
        found = {"line": self.reasons.line(op), "phase": op.phase, "trips": str(graph.trips)}
        return found | {f"collective {i}": said for i, said in enumerate(self.inside.get(op.id, ()))}

    def _add(
        self,
        name: str,
        label: str,
        space: str,
        edges: Iterable[Edge],
        outputs: Sequence[Value],
        attributes: Mapping[str, str],
        style: Json | None = None,
    ) -> None:
        node = {
            "id": name,
            "label": label,
            "namespace": space,
            "attrs": _pairs(attributes),
            "incomingEdges": [_edge(end, i) for end, i in edges],
            "outputsMetadata": [{"id": str(i), "attrs": _pairs(self._tensor(v))} for i, v in enumerate(outputs)],
        }
        self.nodes.append(node | ({"style": style} if style else {}))

    def _tensor(self, v: Value) -> dict[str, str]:
        shape = f"{v.dtype}[{','.join(map(str, v.shape))}]"
        return {"tensor_shape": shape, "layout": layout_text(self.solution.layouts[v.id])}


def _id(op: Op) -> str:
    return f"operation {op.id}"


def _edge(end: End, at: int) -> dict[str, str]:
    return {"sourceNodeId": end[0], "sourceNodeOutputId": str(end[1]), "targetNodeInputId": str(at)}


def _pairs(attributes: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in attributes.items()]
