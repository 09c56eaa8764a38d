"""The graph for Model Explorer: by the fields of its own format, with every operation and collective of the plan."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import pytest
from typer.testing import CliRunner

import meshdsl as md
from meshdsl.cli import app
from meshdsl.ir.graph import walk
from meshdsl.plan.report import model_explorer_graphs
from tests.plan.conftest import step

# The fields of model_explorer's graph_builder.py; what has no default there has none here.


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


class KeyValue(Strict):
    key: str
    value: str


class IncomingEdge(Strict):
    sourceNodeId: str
    sourceNodeOutputId: str = "0"
    targetNodeInputId: str = "0"


class MetadataItem(Strict):
    id: str
    attrs: list[KeyValue] = []


class GraphNode(Strict):
    id: str
    label: str
    namespace: str = ""
    subgraphIds: list[str] = []
    attrs: list[KeyValue] = []
    incomingEdges: list[IncomingEdge] = []
    outputsMetadata: list[MetadataItem] = []
    inputsMetadata: list[MetadataItem] = []
    style: dict[str, str] | None = None
    config: dict[str, Any] | None = None


class Graph(Strict):
    id: str
    nodes: list[GraphNode] = []
    groupNodeAttributes: dict[str, dict[str, str]] | None = None


class GraphCollection(Strict):
    label: str
    graphs: list[Graph] = []


@pytest.fixture(scope="module")
def made():
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 64, 64), (3, 64, 64), (128, 64))]
    layouts = {"batch": "data=S(0)", "w": "model=S(1)"}
    sharded = md.parallelize(step, md.Mesh(data=4, model=2), layouts, donate_argnums=(0, 1))
    planned = sharded.stages(*args).planned
    return planned.program, planned.plan


@pytest.fixture(scope="module")
def nodes(made):
    text = json.dumps(model_explorer_graphs(*made))
    (graph,) = msgspec.json.decode(text, type=GraphCollection).graphs
    return {node.id: node for node in graph.nodes}


def test_every_edge_has_two_ends_and_no_node_leads_to_itself(nodes):
    for node in nodes.values():
        for edge in node.incomingEdges:
            source = nodes[edge.sourceNodeId]
            assert int(edge.sourceNodeOutputId) <= max(0, len(source.outputsMetadata) - 1)
    order = list(nodes)
    assert all(order.index(e.sourceNodeId) < order.index(n.id) for n in nodes.values() for e in n.incomingEdges)


def test_operations_inputs_results_and_collectives_are_there(made, nodes):
    program, plan = made
    operations = [op for _, op in walk(program.graph) if op.name != "return"]
    assert [node.label for node in nodes.values() if node.namespace == "inputs"] == [a.path for a in plan.inputs]
    assert sum(node.id.startswith("operation ") for node in nodes.values()) == len(operations)
    assert sum(node.namespace == "results" and not node.style for node in nodes.values()) == len(plan.outputs)
    drawn = sorted(node.label for node in nodes.values() if node.style)
    inside = sum(pair.key.startswith("collective ") for node in nodes.values() for pair in node.attrs)
    assert len(drawn) + inside == len(plan.collectives) and set(drawn) <= {c.kind for c in plan.collectives}
    dots = [node for node in nodes.values() if node.label == "dot_general"]
    assert dots and all(node.namespace.startswith("scan ") and len(node.incomingEdges) == 2 for node in dots)


SOURCE = """
import jax, jax.numpy as jnp
import meshdsl as md

def step(w, batch):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)

array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
program = md.Program(step, (array(64, 32), array(128, 64)), layouts={"batch": "data=S(0)"})
"""


def test_the_command(tmp_path):
    (tmp_path / "p.py").write_text(SOURCE)
    run = lambda *options: CliRunner().invoke(app, [str(option) for option in options])  # noqa: E731
    assert run("plan", tmp_path / "p.py", "--save", tmp_path / "p.json", "--microbatches", 4).exit_code == 0
    done = run("report", tmp_path / "p.json", tmp_path / "p.py", "--model-explorer", tmp_path / "g.json")
    assert done.exit_code == 0 and done.stdout.endswith("p.html, " + f"{tmp_path}/g.json\n")
    msgspec.json.decode((tmp_path / "g.json").read_bytes(), type=GraphCollection)
    done = run("report", tmp_path / "p.json", "--model-explorer", tmp_path / "g.json")
    assert isinstance(done.exception, md.MeshDSLError) and "name it after the plan" in str(done.exception)
