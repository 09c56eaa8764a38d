"""Experts without drops: what plans multiply and send, beside what balanced routing needs.

python -m bench.experts prints a table of docs/evidence/models.md; steps are planned, in processor time, but not run.
python -m bench.experts targets prints another, of a layer compiled for absent TPUs and GPUs, and
python -m bench.experts nodes one of exchanges over several nodes.
"""

import sys
from collections import Counter
from dataclasses import replace
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp

from bench.report import table, versions
from meshdsl.api import parallelize
from meshdsl.ir.graph import walk
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import topology
from meshdsl.lowering.aot_targets import parse_target
from meshdsl.models import mixture
from meshdsl.models.dropless import ExpertWeights, dropless
from meshdsl.models.mixture import CONFIGS
from meshdsl.planner.costs.op_cost import flops_of
from meshdsl.trace import trace

BATCH, MEMORY = 64, 1e13
CASES = [
    ("mixtral-8x7b", {"data": 8}, ""),
    ("mixtral-8x7b", {"data": 4, "model": 2}, ""),
    ("deepseek-moe-16b", {"data": 8}, ""),
    ("deepseek-moe-16b", {"data": 8}, "data=S(ranks)"),
]
TARGETS, DEVICES = ("tpu-v5e:2x2", "tpu-v6e:2x2", "dgx-h100:4"), 4
TOKENS, EMBED, HIDDEN = 4096, 256, 512  # of the layer that is compiled, with 8 experts, in bfloat16
COMPILED = ["target", "`capacity=`", "exchanges of rows / routed tokens", "bytes planned", "lowered", "compiled"]
NODES = ["model", "mesh", "exchange", "sent between nodes per layer", "predicted step", "gap", "planned in"]
HEADER = ["model", "mesh", "`layout=`", "products / ideal", "recomputed, of 3", "sent per layer / routed tokens"]
HEADER += ["predicted step", "memory", "planned in"]


def row(name: str, axes: dict[str, int], layout: str) -> list[str]:
    """Returns the figures of a model on a mesh."""
    config = replace(CONFIGS[name], layout=layout)
    program = mixture.program(config, mixture.RULES["expert"], batch=BATCH)
    mesh = Mesh(topology=topology("dgx-h100"), **axes)
    rows = BATCH * config.seq * config.choices
    ideal = 2.0 * rows * config.embed * config.hidden * config.layers  # of one of the three products
    found = {"": 0.0, "rematted": 0.0}
    for graph, op in walk(trace(program.step, program.args).graph):
        if op.name == "ragged_dot_general":
            found["rematted" * ("rematted" in op.scope)] += graph.trips * flops_of(op) / ideal
    start = process_time()
    plan = parallelize(program.step, mesh, rules=program.rules, memory=MEMORY).plan(*program.args)
    spent, devices = process_time() - start, mesh.size
    routed = 4 * rows * config.embed * (devices - 1) // devices**2
    sent = Counter[tuple[str, float]]()
    for c in plan.collectives:
        if (
            c.kind in ("all-to-all", "all-gather", "reduce-scatter")
            and c.bytes * 2 > routed
            and c.trips % config.layers == 0
        ):
            sent[c.kind, c.bytes / routed] += c.trips // config.layers
    return [
        name,
        f"`{','.join(f'{axis}={size}' for axis, size in axes.items())}`",
        f"`{layout}`" if layout else "",
        f"{found[''] / 9:.3f}",
        f"{found['rematted']:.2f}",
        ", ".join(f"{n} {kind} {ratio:.3f}" for (kind, ratio), n in sent.items() if n),
        f"{plan.seconds:.2f} s",
        f"{plan.memory / 1e9:.0f} GB",
        f"{spent:.1f} s",
    ]


def compiled_row(target: str, capacity: float) -> list[str]:
    """Returns the figures of a layer on four devices, forward and backward, compiled for a target."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            weights, experts = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
            given = jnp.tanh(x @ params["below"]), experts, weights, ExpertWeights(**params["experts"]), DEVICES
            return jnp.mean(dropless(*given, capacity=capacity, layout="data=S(ranks)") ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    sizes = {"up": (8, EMBED, HIDDEN), "gate": (8, EMBED, HIDDEN), "down": (8, HIDDEN, EMBED)}
    shapes = {"experts": sizes, "below": (EMBED, EMBED), "router": (EMBED, 8)}
    args = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        (shapes, (TOKENS, EMBED)),
        is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int),
    )
    mesh = Mesh(data=DEVICES, topology=topology(parse_target(target).preset))
    sharded = parallelize(step, mesh, {"**": "data=S(0)", "params/{below,router}": "data=B"})
    routed = TOKENS * 2 * EMBED * 2 * (DEVICES - 1) // DEVICES**2
    exchanges = [c.bytes / routed for c in sharded.plan(*args).collectives if c.kind == "all-to-all" and c.trips]
    of_rows = [ratio for ratio in exchanges if ratio > 0.1]
    (line,) = [line for line in sharded.verify(*args, target=target).lines if line.kind == "all-to-all"]
    return [
        f"`{target}`",
        str(capacity),
        f"{len(of_rows)} of {min(of_rows):.3f} to {max(of_rows):.3f}",
        *(f"{int(n):,}" for n in (line.planned, line.compiled, line.made or 0)),
    ]


def nodes_row(name: str, nodes: int, are_known: bool) -> list[str]:
    """Returns the figures of a model over nodes of eight devices; two levels may be taken if nodes are known."""
    ranks = 8 * nodes
    config = replace(CONFIGS[name], ranks=ranks, nodes=nodes if are_known else 1)
    program = mixture.program(config, "batch:(node,data) experts:(node,data)", batch=BATCH * nodes)
    mesh = Mesh(topology=topology("dgx-h100"), node=nodes, data=8)
    start = process_time()
    plan = parallelize(program.step, mesh, rules=program.rules, memory=MEMORY).plan(*program.args)
    exchanges = [c for c in plan.collectives if c.kind == "all-to-all" and "node" in c.axes and c.trips]
    shares = {("node",): 1, ("node", "data"): (ranks - 8) / (ranks - 1)}
    sent = sum(c.bytes * c.trips * shares[c.axes] for c in exchanges) / config.layers
    return [
        name,
        f"`node={nodes},data=8`",
        dict(plan.alternatives).get("experts", "flat"),
        f"{sent / 1e9:.2f} GB",
        f"{plan.seconds:.2f} s",
        f"{100 * plan.gap:.1f}%",
        f"{process_time() - start:.0f} s",
    ]


if __name__ == "__main__":
    if sys.argv[1:] == ["targets"]:
        print(table(COMPILED, [compiled_row(target, capacity) for target in TARGETS for capacity in (1.05, 1.5)]))
    elif sys.argv[1:] == ["nodes"]:
        print(table(NODES, [nodes_row("deepseek-moe-16b", 4, are_known) for are_known in (False, True)]))
    else:
        print(table(HEADER, [row(*case) for case in CASES]))
    print(f"\n`python -m {' '.join(['bench.experts', *sys.argv[1:]])}` ({versions()})")
