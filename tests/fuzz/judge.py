"""The judgement of a batch: its plans hold together, its numbers and its collectives are right.

The cases of a batch are planned one by one and compiled into one program, because compiling is
what takes time. That program communicates what all the plans say together; each case's results
are compared with those of its own step.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import meshdsl as md
from meshdsl.api.executable import Executable
from meshdsl.api.plan_variants import least_variant_seconds, plan_best_variant
from meshdsl.ir.graph import TracedProgram
from meshdsl.ir.prefetch import prefetchable
from meshdsl.ir.solution import Pins
from meshdsl.layouts.roundness import Roundness
from meshdsl.lowering.hlo.collectives import compiled_collectives
from meshdsl.lowering.numerics import NUDGES, check_numbers, perturb, rounding, widened_step
from meshdsl.lowering.shardings import device_mesh
from meshdsl.lowering.verify import VerifyLine, compare
from meshdsl.padding.min_cut import constrained_sizes, padded_sizes
from meshdsl.padding.uneven_pins import UnevenPins, padded_variant
from meshdsl.pins import UserPins
from meshdsl.plan.build import build_plan
from meshdsl.plan.plan import Plan
from meshdsl.plan.prefetch import with_prefetch
from meshdsl.planner.bounds.trivial import least_memory
from meshdsl.planner.buckets import find_buckets, savings, with_buckets
from meshdsl.planner.costs.fixed_point import TIES
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model
from meshdsl.recomputation import recomputing
from meshdsl.recomputation.levels import recomputable
from meshdsl.recomputation.loop_parts import dividing, loop_families
from meshdsl.trace import trace
from tests.fuzz.generator import Batch, Case
from tests.fuzz.optimum import cheapest
from tests.fuzz.tally import Tally, kinds
from tests.fuzz.wander import wander
from tests.rings import with_all_rings
from tests.trials import fast_options

VISITS = 2000


@dataclass(frozen=True)
class Planned:
    """A case with its plan."""

    case: Case
    program: TracedProgram
    pins: Pins
    plan: Plan


def judge(batch: Batch) -> Tally:
    """Raises what is wrong with the first case that is wrong, with its text."""
    try:
        return _judge(batch)
    except Exception:
        for case in batch.cases:
            alone = replace(batch, cases=(case,))
            try:
                _judge(alone)
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error}\n\n{alone}") from error
        raise


def _judge(batch: Batch) -> Tally:
    planned = [_plan(case, batch) for case in batch.cases]
    planned = [(_prefetched if batch.prefetch else _bucketed)(one) for one in planned]
    priced, planned = planned, [_in_rings(one) if batch.rings else one for one in planned]
    for one in planned:
        _check_plan(one.plan)
    tally = Tally(len(planned), kinds=kinds(batch))
    tally.kinds["loops", "prefetched"] += sum(len(one.plan.prefetched) for one in planned)
    tally.kinds["collectives", "in rings"] += sum(bool(c.ring) for one in planned for c in one.plan.collectives)
    tally.kinds["collectives", "in buckets"] += sum(len(c.parts) for one in planned for c in one.plan.collectives)
    if batch.seed is None:
        for one in priced:
            _check_cost(one, batch.mesh, tally)
    _run(planned, batch)
    return tally


def _plan(case: Case, batch: Batch) -> Planned:
    written = trace(case.step, case.args(), roundness=Roundness.of(batch.mesh.sizes))
    user_pins = UserPins(case.pins, uneven="pad")
    program = UnevenPins.of(written, batch.mesh, user_pins).constrained(written)
    if batch.seed is None:
        least = (
            least_variant_seconds(written, batch.mesh),
            least_memory(written, batch.mesh, user_pins.resolve(written, batch.mesh)),
        )
        planned = plan_best_variant(program, batch.mesh, user_pins)
        program, plan = planned.program, planned.plan
        assert least[0] <= plan.seconds * (1 + 1e-7) and least[1] <= plan.memory, "below what needs no search"
        return Planned(case, program, user_pins.resolve(program, batch.mesh), plan)
    sizes = padded_sizes(program, batch.mesh) | constrained_sizes(program.graph, batch.mesh)
    program = padded_variant(program, sizes, batch.mesh, user_pins, regions=batch.seed % 2 == 1)
    draw = np.random.default_rng(batch.seed)
    if batch.seed % 3:
        families = loop_families(program.graph)
        trips = {id: int(draw.integers(family.length)) for family in families for id in family.forward}
        program = dividing(program, trips).program
        again = [op for op in sorted(recomputable(program)) if draw.random() < 0.6]
        program = recomputing(program, again).program
    pins = user_pins.resolve(program, batch.mesh)
    solution = wander(program, batch.mesh, pins, draw)
    return Planned(case, program, pins, build_plan(program, solution, pins))


def _prefetched(one: Planned) -> Planned:
    """The same plan, with loops that send ahead and behind all that they can."""
    solution = one.plan.solution
    chosen = prefetchable(one.program.graph, solution)
    if not chosen or solution.buckets:
        return one
    made = build_plan(one.program, with_prefetch(one.program, solution, chosen, one.pins.donated), one.pins)
    return replace(one, plan=replace(made, padded=one.plan.padded, regions=one.plan.regions))


def _bucketed(one: Planned) -> Planned:
    """The same plan, with all collectives in buckets that gain by it."""
    solution, graph = one.plan.solution, one.program.graph
    buckets = () if solution.buckets else find_buckets(graph, solution, 2)
    if not buckets:
        return one
    made = build_plan(one.program, with_buckets(solution, graph, buckets), one.pins)
    return replace(one, plan=replace(made, padded=one.plan.padded, regions=one.plan.regions))


def _in_rings(one: Planned) -> Planned:
    """The same plan, with all products in rings that can be."""
    solution = with_all_rings(one.program, one.plan.solution)
    if not solution.rings:
        return one
    made = build_plan(one.program, replace(solution, lower_bound=min(solution.lower_bound, solution.seconds)), one.pins)
    return replace(one, plan=replace(made, padded=one.plan.padded, regions=one.plan.regions))


def _check_plan(plan: Plan) -> None:
    assert str(plan)
    assert plan.lower_bound <= plan.seconds
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        plan.save(file)
        assert md.load_plan(file) == plan


def _check_cost(one: Planned, mesh: md.Mesh, tally: Tally) -> None:
    """No plan is below the bound, and none without buckets is cheaper, where all can be looked at."""
    model, solution = Model(make_problem(one.program, mesh, one.pins)), one.plan.solution
    seconds = one.plan.seconds + savings(solution, one.program.graph, solution.buckets)
    least = cheapest(model, (seconds / model.scale.unit + 2) * TIES, VISITS)
    if least is None:
        return
    assert least < np.inf, "the plan costs more than its seconds say"
    best = model.scale.seconds(least)
    assert one.plan.lower_bound <= best * (1 + 1e-9), f"bound {one.plan.lower_bound}, cheapest {best}"
    tally.compared += 1
    if one.plan.seconds > best * (1 + 1e-9):
        tally.above.append(f"{one.plan.seconds}, where {best} is possible\n\n{Batch(mesh, (one.case,), None)}")


def _run(planned: Sequence[Planned], batch: Batch) -> None:
    """All cases in one compiled program, and each alone on one device."""
    devices = device_mesh(batch.mesh)
    ready = [Executable(one.program, one.plan, devices) for one in planned]
    args = [one.case.args() for one in planned]
    at = [list(one.shardings) for one in ready]

    def together(args: Sequence[Sequence[Any]]) -> list[Any]:
        return [one.function(*given) for one, given in zip(ready, args, strict=True)]

    jitted = jax.jit(together, in_shardings=(at,), out_shardings=[tuple(one.results) for one in ready])
    lowered = jitted.lower(args)
    compiled = lowered.compile(compiler_options=fast_options())
    if _differences(planned, compiled, batch):  # compiled fast, a constant may be worked out that is planned to be sent
        wrong = _differences(planned, lowered.compile(), batch)
        assert not wrong, f"sent otherwise than planned: {wrong}"
    _check_results(planned, args, jax.block_until_ready(compiled(jax.device_put(args, at))))


def _differences(planned: Sequence[Planned], compiled: jax.stages.Compiled, batch: Batch) -> list[VerifyLine]:
    """Where more or less is sent than planned; random plans also plan what cannot matter, which the compiler drops."""
    collectives = [c for one in planned for c in one.plan.collectives]
    lines = compare(collectives, compiled_collectives(compiled.as_text() or "", batch.mesh), batch.mesh).lines
    return [
        line
        for line in lines
        if (line.compiled > line.planned + line.slack if batch.seed is not None else not line.equal)
    ]


def _check_results(planned: Sequence[Planned], args: Sequence[Any], got: Sequence[Any]) -> None:
    """Each case's results are its own step's."""
    steps = [one.case.step for one in planned]
    together = jax.jit(lambda args: [jax.tree.leaves(step(*given)) for step, given in zip(steps, args, strict=True)])
    alone = together.lower(args).compile(compiler_options=fast_options())
    least = [rounding(one.program) for one in planned]

    @cache
    def nudged(seed: int) -> list[Any]:
        return alone([[perturb(x, seed, eps) for x in given] for given, eps in zip(args, least, strict=True)])

    expected = alone(args)
    for i, one in enumerate(planned):
        wide = partial(_wide, one.case)
        check_numbers(
            expected[i], got[i], [leaf.path for leaf in one.program.outputs], None, partial(_each, nudged, i), wide
        )


def _each(nudged: Callable[[int], Any], i: int) -> Iterator[Any]:
    """The results of case ``i`` for nudged arguments."""
    return (nudged(seed)[i] for seed in range(NUDGES))


def _wide(case: Case) -> list[Any] | None:
    """The results of a case in wider floats."""
    step = widened_step(trace(case.step, case.args()))
    return step and jax.jit(step)(*jax.tree.leaves(case.args()))
