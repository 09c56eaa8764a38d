"""How well a plan uses its devices: the compute-bound limit, and what takes the rest of the predicted time.

    seconds  =  compute bound  +  losses
    MFU      =  compute bound / seconds

The compute bound is the time in which all devices together could do the step's matrix products and convolutions at the
topology's rate for their types. What ``jax.checkpoint`` computes again is left out, so the quotient is the model FLOP
utilization of Chowdhery et al. (2022, PaLM, appendix B), with the rate that products reach in place of a data sheet's.
The losses, per device:

    collectives            by kind
    repeated computation   work of operations that an axis does not divide, beyond the share of one device
    recomputation          work of what is computed again
    slow products          products below the rate: narrow ones, or with operands that take longer to read
    memory traffic         all other operations, which read and write
    local copies           slices and reshapes of resharding that send nothing
    launch overhead        of starting operations

Stages of a pipeline also compute in ticks in which they have no microbatch, and recompute what they did not keep. There
the compute bound is that of the step before it was cut into stages, and what else the ticks compute is one loss.
"""

from collections import defaultdict
from collections.abc import Iterable
from math import prod

from meshdsl.ir.graph import Graph, TracedProgram, walk
from meshdsl.ir.host import TRANSFERS
from meshdsl.ir.solution import Solution
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Split
from meshdsl.plan.divided import divided_shares
from meshdsl.plan.op_times import OpTimes
from meshdsl.plan.types import LAUNCHES, Collective, Utilization
from meshdsl.planner.costs.op_cost import work_of
from meshdsl.trace.read_jaxpr import REMATTED

TICKS = "bubble and all other work"  # the loss in the ticks of a pipeline
_ROUNDING = 1e-9  # share of the time up to which a loss is a rounding error


def utilization(
    program: TracedProgram, solution: Solution, times: OpTimes, collectives: Iterable[Collective]
) -> Utilization:
    """Returns the utilization of the devices by one step under a solution.

    Args:
      times: seconds of operations under the solution.
      collectives: of the plan.
    """
    mesh, losses, flops, bound = solution.mesh, defaultdict[str, float](float), 0.0, 0.0
    if program.unstaged is not None:
        flops, bound = _bound_of(program.unstaged, mesh)
        losses[TICKS] = -bound
    for graph, op in walk(program.graph):
        rows, trips = solution.rows.get(op.id), graph.trips
        losses["local copies"] += trips * (times.seconds(op) - times.compute_seconds(op))
        if op.name in TRANSFERS:
            losses["host transfers"] += trips * times.compute_seconds(op)
        if rows is None:
            continue
        work, inside = times.work(op), prod(mesh.axis(axis) for axis in op.manual)
        overhead = mesh.topology.overhead * work.starts
        seconds = times.compute_seconds(op) - overhead
        repeats = prod(
            size
            for (axis, size), row in zip(mesh, rows, strict=True)
            if axis not in op.manual and not any(isinstance(at, Split) for at in (*row.inputs, *row.outputs))
        )
        losses[LAUNCHES] += trips * overhead
        if program.unstaged is not None:
            losses[TICKS] += trips * seconds
            continue
        losses["repeated computation"] += trips * seconds * (1 - 1 / repeats)
        if REMATTED in op.scope:
            losses["recomputation"] += trips * seconds / repeats
            continue
        rate = mesh.topology.flops(work.rate, work.groups is not None)
        least = min(work.flops * inside / mesh.size / rate, seconds / repeats)
        flops += trips * inside * work.flops
        bound += trips * least
        losses["slow products" if work.flops else "memory traffic"] += trips * (seconds / repeats - least)
    for c in collectives:
        losses[c.kind] += c.trips * c.seconds
    rounding = _ROUNDING * (bound + sum(losses.values()))
    largest = sorted((loss for loss in losses.items() if loss[1] > rounding), key=lambda loss: -loss[1])
    return Utilization(tuple(divided_shares(program, solution, times).items()), flops, bound, tuple(largest))


def _bound_of(graph: Graph, mesh: Mesh) -> tuple[float, float]:
    """Returns the FLOPs of a step's products without recomputation, and the seconds that all devices need for them."""
    flops, bound = 0.0, 0.0
    for inside, op in walk(graph):
        if REMATTED not in op.scope:
            work, devices = work_of(op), prod(mesh.axis(axis) for axis in op.manual)
            found = inside.trips * devices * work.flops
            flops += found
            bound += found / mesh.size / mesh.topology.flops(work.rate, work.groups is not None)
    return flops, bound
