"""The planned step as a graph for Model Explorer (https://github.com/google-ai-edge/model-explorer): its JSON format.

A file is a collection of graphs, a graph a list of nodes, and a node lists its incoming edges: output of a node, input
of this one. Nodes are the step's inputs, operations and results, and the plan's collectives, which are on the edges
that they reshard. A loop's body is a layer of its own: its inputs are connected to the values outside, and the loop's
own node has its results. A plan alone does not know who uses which value, so the program is needed too.
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
from meshdsl.util.files import write_text
from meshdsl.util.text import bytes_text, seconds_text

Json = dict[str, Any]
_COLOR = {"backgroundColor": "#f6d9b8"}  # of the nodes of collectives
NodeOutput = tuple[str, int]  # id of a node, and index of its output
Edge = tuple[NodeOutput, int]  # and the index of the input that it leads to


def model_explorer_graphs(program: TracedProgram, plan: PlanData) -> Json:
    """A collection with one graph, the step."""
    return {"label": plan.name, "graphs": [{"id": plan.name, "nodes": _NodeBuilder(program, plan).build()}]}


def save_model_explorer(program: TracedProgram, plan: PlanData, path: str | PathLike[str]) -> None:
    """Writes the collection; ArgumentError if ``path`` is not a path, MeshDSLError if the file cannot be written."""
    write_text(path, json.dumps(model_explorer_graphs(program, plan)))


class _NodeBuilder:
    """Builds the nodes of a step.

    Attributes:
      sources: per value id, the output of a node that it comes from, outside of the loop for a body's inputs.
      resharded: the same per value id and other layout; None for a literal.
      nodes: the nodes so far.
      inside: per operation id, texts of the collectives of its local program.
    """

    def __init__(self, program: TracedProgram, plan: PlanData) -> None:
        self.program, self.plan, self.solution = program, plan, plan.solution
        self.reasons = Reasons(program, plan.solution)
        self.sources: dict[int, NodeOutput] = {}
        self.resharded: dict[tuple[int, Layout], NodeOutput | None] = {}
        self.nodes: list[Json] = []
        self.inside: dict[int, list[str]] = {}
        for found in collectives_inside(program.graph, plan.solution):
            text = f"{found.kind} over {','.join(found.axes)}, {bytes_text(found.bytes)}: {found.exchange}"
            self.inside.setdefault(found.op.id, []).append(text)

    def build(self) -> list[Json]:
        """All nodes, in program order."""
        for i, (leaf, v) in enumerate(zip(self.program.inputs, self.program.graph.inputs, strict=True)):
            self.sources[v.id] = f"input {i}", 0
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
        edges = list(self._edges(op, graph, space))
        self.sources.update((v.id, (_id(op), i)) for i, v in enumerate(op.outputs))
        self._add(_id(op), op.called, space, edges, op.outputs, self._attributes(op, graph))

    def _loop(self, op: Op, graph: Graph, space: str) -> None:
        """A loop's bodies, and a node for its results."""
        outside = {i: source for source, i in self._edges(op, graph, space)}
        at = {id(x): outside[i] for i, x in enumerate(op.inputs) if i in outside}
        returned: list[Edge] = []
        for body, given in zip(op.bodies, body_operands(op), strict=True):
            inner = "/".join(filter(None, (space, f"{op.called} {op.id}")))
            self.sources.update((v.id, at[id(x)]) for v, x in zip(body.inputs, given, strict=True) if id(x) in at)
            self._graph(body, inner)
            returned += self._edges(body.ops[-1], body, inner)
        self.sources.update((v.id, (_id(op), i)) for i, v in enumerate(op.outputs))
        self._add(_id(op), op.called, space, returned, op.outputs, self._attributes(op, graph))

    def _results(self, op: Op, graph: Graph) -> None:
        edges = {i: source for source, i in self._edges(op, graph, "results")}
        for i, leaf in enumerate(self.program.outputs):
            found = [(edges[i], 0)] if i in edges else []
            self._add(f"result {i}", leaf.path or "result", "results", found, (), {"type": leaf.type})

    def _edges(self, op: Op, graph: Graph, space: str) -> Iterator[Edge]:
        """The incoming edges of an operation, each operand in the layout in which it is used."""
        for i, x in enumerate(op.inputs):
            source = self._in_layout(x, self.solution.uses[op.id, i], graph, space) if isinstance(x, Value) else None
            if source is not None:
                yield source, i

    def _in_layout(self, x: Value, layout: Layout, graph: Graph, space: str) -> NodeOutput | None:
        """The output of a node that a value in a layout comes from; None for a literal."""
        if (x.id, layout) not in self.resharded:
            move = next((m for m in self.solution.trees.get(x.id, ()) if m.after == layout), None)
            source = self.sources.get(x.id)
            if move is not None and layout != self.solution.layouts[x.id] and source is not None:
                source = self._in_layout(x, move.before, graph, space)
                source = (
                    self._collective(x, move, source, graph, space) if source and move.kind in COLLECTIVES else source
                )
            self.resharded[x.id, layout] = source
        return self.resharded[x.id, layout]

    def _collective(self, x: Value, move: ReshardStep, source: NodeOutput, graph: Graph, space: str) -> NodeOutput:
        reason, runs = self.reasons.explain(x, move)[2], graph.trips
        costs = {"bytes": bytes_text(move.bytes), "trips": str(runs), "seconds": seconds_text(move.seconds * runs)}
        name = f"move {x.id} {move.after}"
        attributes = {"axes": ",".join(move.axes), **costs, "reason": reason}
        self._add(name, move.kind, space, [(source, 0)], (), attributes, _COLOR)
        return name, 0

    def _attributes(self, op: Op, graph: Graph) -> dict[str, str]:
        found = {"line": self.reasons.line(op), "phase": op.phase, "trips": str(graph.trips)}
        return found | {f"collective {i}": text for i, text in enumerate(self.inside.get(op.id, ()))}

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
            "incomingEdges": [_edge(source, i) for source, i in edges],
            "outputsMetadata": [{"id": str(i), "attrs": _pairs(self._tensor(v))} for i, v in enumerate(outputs)],
        }
        self.nodes.append(node | ({"style": style} if style else {}))

    def _tensor(self, v: Value) -> dict[str, str]:
        shape = f"{v.dtype}[{','.join(map(str, v.shape))}]"
        return {"tensor_shape": shape, "layout": layout_text(self.solution.layouts[v.id])}


def _id(op: Op) -> str:
    return f"operation {op.id}"


def _edge(source: NodeOutput, at: int) -> dict[str, str]:
    return {"sourceNodeId": source[0], "sourceNodeOutputId": str(source[1]), "targetNodeInputId": str(at)}


def _pairs(attributes: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in attributes.items()]
