"""``check``: the sharded step beside the unsharded one, and how much of the step the compared plan divides.

    divide     the plan that runs
    planned    the plan of a call
    most       one that divides as much as it can, within the same pins: it is planned for devices so slow that no
               message costs anything beside their work. At a small size it tests what the plan of a large one divides

Results of whole arrays alone agree under any plan, so the report counts them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from meshdsl.api.stages import CallStages
from meshdsl.errors import ArgumentError, CheckError, nearest
from meshdsl.lowering.numerics import NUDGES, CheckReport, check_numbers, perturb, rounding, widened_step
from meshdsl.plan.divided import undivided_outputs

DIVIDE = ("planned", "most")


def check_step(
    stages: CallStages,
    reference: Callable[..., Any],
    leaves: Sequence[Any],
    tolerance: float | None = None,
    divide: str = "planned",
) -> CheckReport:
    """Return how the results of the sharded and the unsharded step agree on copies of ``leaves``.

    Args:
      stages: the stages of the call; the sharded step is their executable, or that of ``stages.most_divided``.
      reference: the unsharded step, on flat arrays.
      leaves: the arguments, flat.
      tolerance: relative to the largest value of a result; None takes the defaults, or the budget of ``low_bits``.
      divide: which plan runs, one of ``DIVIDE``.

    Raises:
      ArgumentError: ``divide`` is none of these.
      CheckError: the step returns nothing, or a result differs by more than the tolerance.
    """
    if divide not in DIVIDE:
        raise ArgumentError(f"divide: no way {divide!r} to divide{nearest(divide, DIVIDE)}")
    if not stages.traced.outputs:
        name = stages.traced.name
        raise CheckError(f"{name} returns no arrays, so there is nothing to compare\nreturn what the step computes")
    executable = (stages.most_divided if divide == "most" else stages).executable
    jitted = jax.jit(reference)

    def unsharded(leaves: Sequence[Any]) -> list[Any]:
        results = jitted(*executable.copies(leaves, whole=True))
        return jax.tree.leaves(jax.block_until_ready(results))  # collectives beside it may deadlock (CPU)

    def perturbed() -> Iterator[list[Any]]:
        least = rounding(executable.program)
        return (unsharded([perturb(x, seed, least) for x in leaves]) for seed in range(NUDGES))

    def widened() -> list[Any] | None:
        step = widened_step(stages.program, executable.devices)
        return step and jax.block_until_ready(jax.jit(step)(*executable.copies(leaves, whole=True)))

    expected, got = unsharded(leaves), executable.call(*executable.copies(leaves))
    paths = [leaf.path for leaf in executable.program.outputs]
    plan, low_bits = executable.plan, executable.program.low_bits
    budget = float(low_bits.error) if low_bits and any(c.format for c in plan.collectives) else None
    report = check_numbers(expected, got, paths, tolerance, perturbed, widened, budget)
    undivided = undivided_outputs(executable.program, plan.solution)
    return replace(report, divided=dict(plan.utilization.divided), undivided=undivided)
