"""Choose what the stages of a pipeline keep of a microbatch until its backward pass, and what they compute again.

``Pipeline.recompute`` knows two ways: stages keep their inputs alone (``"stage"``), or all that the backward pass reads
(``"none"``). Between them lies every choice of ``meshdsl.api.remat``: operations of the layers are doubled before the
step is cut into stages (``meshdsl.recomputation``), and its stages keep what the backward pass still reads, as if the
user had written ``jax.checkpoint`` with a policy.

Values of stages have other ids than those of the step before, and other sizes: a microbatch, once per slot of the
stash. So costs come from a plan of the whole batch without the axis of the stages, and are scaled to the part that a
device keeps at a time.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import NamedTuple

from meshdsl.api.remat import NEGLIGIBLE, Means, P, ResidualCosts, plan_residuals
from meshdsl.errors import PinError
from meshdsl.ir.graph import TracedProgram
from meshdsl.layouts.mesh import Mesh
from meshdsl.pins import UserPins
from meshdsl.plan.types import RecomputedValue
from meshdsl.planner.limits import SearchLimits
from meshdsl.planner.solve import SearchResult, solve
from meshdsl.recomputation.levels import layer_loops, levels
from meshdsl.recomputation.loop_parts import MixedChoice
from meshdsl.recomputation.min_cut import RematChoice, Rewrite
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.schedules.spec import RECOMPUTE
from meshdsl.util.runtime import Deadline

STAGE, KEEPING = RECOMPUTE
NOTHING: Rewrite = (frozenset(), frozenset(), frozenset())  # as the step is written


class Staging(NamedTuple):
    """How a step is cut into stages.

    Args:
      whole: the step before.
      cut: cuts it, or a rewritten one, with a given ``Pipeline.recompute``.
    """

    whole: TracedProgram
    cut: Callable[[TracedProgram, str], TracedProgram]


class StageChoice(NamedTuple):
    """What the backward pass of a stage computes again.

    Args:
      recompute: ``Pipeline.recompute``.
      choice: the operations of layers that run twice besides.
      costs: by which it was chosen.
      redone: all that stages do not keep beside their inputs, if they keep nothing else.
    """

    recompute: str
    choice: RematChoice
    costs: ResidualCosts
    redone: RecomputedValue | None = None


def plan_of_one_stage(
    program: TracedProgram, pipelined: Pipelined, mesh: Mesh, pins: UserPins, clock: Deadline, limits: SearchLimits
) -> SearchResult:
    """Returns the plan of the whole batch on the devices of one stage, whatever its memory.

    Args:
      program: before it is cut into stages.
    """
    program = replace(program, pipeline=pipelined)  # layers need not divide over the stages
    one = Mesh(topology=mesh.topology, **{**mesh.sizes_by_name, pipelined.axis: 1})
    try:
        stated = pins.resolve(program, one)
    except PinError:  # a shard_map that states the size of that axis
        one, stated = mesh, pins.resolve(program, mesh)
    return solve(program, one, stated, inf, clock, limits)


def plan_stages(
    found: SearchResult,
    pipelined: Pipelined,
    excess: float,
    limit: float,
    attempt: Callable[[StageChoice], P],
    clock: Deadline,
) -> P | None:
    """Returns the fastest plan found; None if stages compute nothing that can be computed again.

    If none fits, that with the least memory is returned.

    Args:
      found: the plan of the whole batch on the devices of one stage.
      pipelined: the pipeline, with stages that keep everything.
      excess: bytes by which the plan that keeps everything exceeds the limit.
      limit: bytes per device.
      attempt: plans the step in stages under a choice, within the limit.
      clock: after which only what needs least memory is planned, unless something fits.
    """
    kept, once = (_costs(found, pipelined, slots) for slots in (pipelined.slots, 1))
    if not kept.ops:
        return None
    nothing = kept.as_written._replace(ops=NOTHING[0], spared=NOTHING[1], parts=frozenset())
    seconds = sum(kept.twice[op] for op in kept.ops)
    redone = RecomputedValue("all of a stage but its input", kept.bytes(nothing), seconds, len(kept.ops))

    def among(costs: ResidualCosts, excess: float, how: str, redone: RecomputedValue | None = None) -> list[P]:
        def trial(choice: RematChoice | MixedChoice) -> P:
            assert isinstance(choice, RematChoice)  # loops are not divided
            return attempt(StageChoice(how, choice, costs, redone))

        best = plan_residuals(costs, excess, limit, trial, clock, divides=False)
        return [best] if best else []

    plans = [attempt(StageChoice(STAGE, nothing, kept, redone))]
    if (excess <= 0 or plans[0].seconds < inf) and not clock.expired():
        plans.append(attempt(StageChoice(KEEPING, nothing, kept)))
    if (excess > 0 or kept.promise > NEGLIGIBLE * found.seconds) and not clock.expired():
        plans += among(kept, excess, KEEPING)
    if all(plan.seconds == inf for plan in plans):
        plans += among(once, min(plan.least for plan in plans) - limit, STAGE, redone)
    return min(plans, key=lambda plan: (plan.seconds, plan.least))


def _costs(found: SearchResult, pipelined: Pipelined, slots: int) -> ResidualCosts:
    """Returns the costs of residuals of the layers on a device of a pipeline.

    Args:
      found: the plan of the whole batch on the devices of one stage.
      slots: microbatches whose residuals a device keeps at a time.
    """
    whole, layers = ResidualCosts.of(found, 0.0, Means(recompute=True, host=False)), sum(pipelined.layers)
    pairs = (loops for level in levels(whole.program.graph) for loops in layer_loops(level))
    bodies = {id(body := loops.forward.bodies[0]): body for loops in pairs if loops.forward.params["length"] == layers}
    ops = frozenset(op.id for body in bodies.values() for op in body.ops)
    inside = [v for body in bodies.values() for v in (*body.inputs, *(v for op in body.ops for v in op.outputs))]
    part = max(pipelined.layers) / layers / pipelined.microbatches  # of the batch and the layers, in one task
    seconds = part * pipelined.ticks
    return replace(
        whole,
        ops=whole.ops & ops,
        held={v.id: round(part * slots * whole.held.get(v.id, 0)) for v in inside},
        traffic={v.id: seconds * whole.traffic.get(v.id, 0.0) for v in inside},
        again={op: seconds * each for op, each in whole.again.items()},
        twice={op: seconds * each for op, each in whole.twice.items()},
    )
