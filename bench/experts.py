"""Experts without drops: what plans multiply and send, beside what balanced routing needs.

python -m bench.experts prints a table of docs/evidence/models.md; steps are planned, in processor time, but not run.
"""

from collections import Counter
from dataclasses import replace
from time import process_time

from bench.report import table, versions
from meshdsl.api import parallelize
from meshdsl.ir.graph import walk
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import topology
from meshdsl.models import mixture
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


if __name__ == "__main__":
    print(table(HEADER, [row(*case) for case in CASES]))
    print(f"\n`python -m bench.experts` ({versions()})")
