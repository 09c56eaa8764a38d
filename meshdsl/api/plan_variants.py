"""Choose among variants of a program: with and without padding of uneven dims, with and without overlap.

A length is a candidate for padding if it does not divide over the mesh, is long enough that the padding is small, and
is used by a product, a convolution or a lookup, or else by a reduction or pooling. Whether padding pays is for the
planner to say, so the choice is greedy: the program is planned as written, then with one candidate after the other
padded, longest first, and a padding that does not make the plan faster is undone. Lengths that pay only together are
tried together at the end. Three rules bound the work and the surprise:

1. A split that ``md.constrain`` demands inside the step is impossible without padding, so it is padded first; a short
   dim only if the user asked for that (``uneven="pad"``).
2. A program of more than ``SearchLimits.solve_variant_operations`` operations is not planned again for a length that
   every mesh axis divides by itself, or that only reductions use.
3. When the time limit is up, no further candidate is tried.

At last, parts of dims that are only reduced are computed where they lie (``padding.regions``).

Only the best variant is polished, proved and written as a plan. Notes in the plan list every length that was padded,
that was not, and why.
"""

from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from meshdsl.api.buckets import plan_with_buckets
from meshdsl.api.host import HostChoice, HostCosts, Hosting, by_need, plan_hosting
from meshdsl.api.overlap import plan_with_overlap, plan_with_prefetch
from meshdsl.api.overlap_option import OFF, Overlap
from meshdsl.api.remat import NEGLIGIBLE, Means, Remat, ResidualCosts, plan_residuals
from meshdsl.api.stage_remat import KEEPING, NOTHING, StageChoice, Staging, plan_of_one_stage, plan_stages
from meshdsl.errors import MemoryLimitError, shortened
from meshdsl.ir.graph import Op, TracedProgram, Value, walk
from meshdsl.ir.host import keep_on_host
from meshdsl.ir.index import graph_index
from meshdsl.ir.rewrite import values
from meshdsl.ir.solution import Pins
from meshdsl.layouts.mesh import Mesh
from meshdsl.padding.min_cut import constrained_sizes, padded_length, padded_sizes
from meshdsl.padding.regions import compute_regions
from meshdsl.padding.uneven_pins import padded_variant
from meshdsl.pins import UserPins
from meshdsl.plan.build import build_plan
from meshdsl.plan.plan import Plan
from meshdsl.plan.prefetch import step_seconds
from meshdsl.plan.rings import with_best_rings
from meshdsl.planner.bounds.trivial import least_seconds
from meshdsl.planner.limits import DEFAULT_LIMITS, SearchLimits
from meshdsl.planner.solve import SearchResult, solve
from meshdsl.recomputation.levels import kept_effects
from meshdsl.recomputation.loop_parts import MixedChoice, dividing
from meshdsl.recomputation.min_cut import RematChoice
from meshdsl.recomputation.rewrite import recomputing
from meshdsl.util.runtime import Deadline, Submit, gc_paused, worker_pool
from meshdsl.util.text import bytes_text, count_text, percent_text, seconds_text

CLEARLY = 0.9  # part of a plan's seconds; one that takes less is not compared more closely
SHOWN = 2  # dims that a note names before "and 3 more"
Sizes = Mapping[int, int]  # lengths that are padded -> the lengths they are padded to


@dataclass(frozen=True)
class PlannedProgram:
    """The program that runs and its plan.

    Args:
      variant: the variant that was chosen, from which a plan under other pins can start; None for a given plan.
      overlap: how communication is hidden behind computation.
    """

    program: TracedProgram
    plan: Plan
    variant: "Variant | None" = None
    overlap: Overlap = OFF

    @gc_paused
    def replan(self, user_pins: UserPins) -> "PlannedProgram | None":
        """Plan the same program, padded alike, under other pins, starting from this plan.

        Returns:
          None if the other pins need a search of their own.
        """
        before = self.variant
        if before is None or not isinstance(before.outcome, SearchResult):
            return None
        pins = user_pins.resolve(before.program, self.plan.mesh)
        if (pins.hosted, pins.hosted_outputs) != (before.pins.hosted, before.pins.hosted_outputs):
            return None
        found = before.outcome.replan(pins, self.plan.lower_bound)
        if found is None:
            return None
        notes = [
            f"{before.named(n)} is padded to {m} inside the step, as in the previous plan"
            for n, m in before.sizes.items()
        ]
        with worker_pool() as start:
            variant = replace(before, pins=pins, outcome=found)
            return _finish(variant, [*before.program.notes, *notes], self.overlap, start)


@gc_paused
def plan_best_variant(
    program: TracedProgram,
    mesh: Mesh,
    user_pins: UserPins,
    memory: float | None = None,
    overlap: Overlap = OFF,
    seconds: float | None = None,
    limits: SearchLimits = DEFAULT_LIMITS,
    remat: bool = False,
    host: bool = False,
    staging: Staging | None = None,
) -> PlannedProgram:
    """Return the fastest variant of a program that was found, with its plan.

    Args:
      memory: limit in bytes per device; None takes the topology's.
      overlap: how communication is hidden behind computation (``meshdsl.api.overlap``, ``meshdsl.plan.prefetch``).
      seconds: of planning, after which nothing more is tried to improve the plan and its bound.
      limits: what the planner may spend.
      remat: residuals may be computed again in the backward pass (``meshdsl.api.remat``).
      host: inputs and residuals may be moved to the host's memory (``meshdsl.api.host``, ``meshdsl.api.remat``).
      staging: how the step was cut into stages of a pipeline, if it was, for ``remat``.

    Raises:
      PinError: the pins contradict each other, or the program.
      MemoryLimitError: no plan within the limit was found.
    """
    if remat and (staging or not _is_staged(program)):
        limits = replace(limits, memory_advises_checkpoint=False)
    large, searched = _is_large(program, limits), briefly(limits) if remat or host else limits
    candidates, clock = padded_sizes(program, mesh, reductions=not large), Deadline(seconds)

    def attempt(sizes: Sizes, regions: bool = False) -> Variant:
        padded = padded_variant(program, sizes, mesh, user_pins, regions)
        pins = user_pins.resolve(padded, mesh)
        padded = keep_on_host(padded, pins.hosted, pins.hosted_outputs, pins.follows)
        try:
            return Variant(sizes, padded, pins, solve(padded, mesh, pins, memory, clock, searched), regions)
        except MemoryLimitError as error:
            return Variant(sizes, padded, pins, error, regions)

    required = constrained_sizes(program.graph, mesh)
    if user_pins.uneven != "pad":  # long ones alone
        required = {n: m for n, m in candidates.items() if n in required}
    optional = [n for n in candidates if n not in required]
    untried = [n for n in optional if large and not any(n % k for k in mesh.sizes)]

    best = attempt(required)
    unused = list(_unused_lengths(program, mesh, {**candidates, **required}, large))
    notes = [*unused, *(_required_note(best, n) for n in required), *(_untried_note(program, n) for n in untried)]
    for n in optional:
        if n in untried or clock.expired():
            continue
        saved = best.uneven_seconds(n)
        if saved < limits.solve_variant_worth * best.seconds:
            notes.append(_unworthy_note(program, n, saved))
        else:
            trial = attempt({**best.sizes, n: candidates[n]})
            notes.append(_trial_note(best, trial, n))
            best = trial if trial.seconds < best.seconds else best

    rejected = [n for n in optional if n not in best.sizes and n not in untried]
    if len(rejected) > 1 or (rejected and len(best.sizes) > len(required)):  # lengths of one region pay together
        trial = attempt({**candidates, **required}) if not large and not clock.expired() else best
        if trial.seconds < best.seconds:
            notes = [*unused, *(_required_note(trial, n) for n in required)]
            notes += [_trial_note(best, trial, n) for n in optional]
            best = trial

    more = mesh.size > 1 and not large and not clock.expired()
    if more and compute_regions(program) is not program:
        trial = attempt(best.sizes, regions=True)
        if trial.seconds < best.seconds:
            notes.append(f"parts of dims that are only reduced are computed where they lie: {trial}; moved, {best}")
            best = trial

    with worker_pool() as start:
        limit = mesh.topology.memory if memory is None else memory
        relieve = partial(
            _residuals_elsewhere,
            mesh=mesh,
            user_pins=user_pins,
            limit=limit,
            clock=clock,
            limits=limits,
            staging=staging,
        )
        moved = _hosting(best, mesh, limit, clock, limits) if host else None
        found, remarks, again = list[Variant | None](), list[str](), None
        if host:
            found += [relieve(each, Means(remat, host)) for each in (best, moved) if each]
            if remat and not any(each and each.seconds < inf for each in (moved, *found)):
                # what is computed again takes memory too, which prices leave out: sending alone may need less
                found.append(relieve(best, Means(recompute=False, host=True)))
            using = (each for each in (moved, *found) if each and each.uses_host)
            moved = min(using, key=by_need, default=None)
        if remat:
            first = next(iter(found), None)
            again = first if first and not first.uses_host else relieve(best, Means(remat, host=False))
            if again is best:
                best = again = best.polished(start)
            else:
                again = again and again.polished(start)
        if again is not best and (again is None or again.seconds >= CLEARLY * best.seconds):
            best = best.polished(start)
        if remat:
            best, remarks = _with_or_without(best, again, clock)
        notes = [*best.program.notes, *_constant_notes(best), *notes]
        if host:
            finish = partial(_finish, overlap=overlap, start=start)
            planned = _moved_or_not(best, moved and moved.polished(start), clock, finish, notes, remarks)
        else:
            planned = _finish(best, [*notes, *remarks], overlap, start)
    if not clock.has_stopped:
        return planned
    stopped = f"planning stopped at the time limit of {seconds_text(clock.seconds or 0.0)}: best plan so far"
    note = f"{stopped}, within {percent_text(planned.plan.gap)} of the optimum"
    return replace(planned, plan=replace(planned.plan, notes=(*planned.plan.notes, note)))


# Parts of the limit. Where nothing faster is found, values count as well that live only where less memory is short: a
# plan that computes them again has its peak elsewhere.
_SHORT = (0.75, 0.5)
_FULL = 0.9  # part of the limit; plans under a choice that take less are filled before they are compared


def _residuals_elsewhere(
    best: "Variant",
    means: Means,
    mesh: Mesh,
    user_pins: UserPins,
    limit: float,
    clock: Deadline,
    limits: SearchLimits,
    staging: Staging | None,
) -> "Variant | None":
    """Return the fastest variant found that does not keep all residuals on the device; None if that cannot be of use.

    Where the plan that keeps everything does not feel the memory limit, recomputation must promise to save traffic. If
    none fits, something is tried whatever the clock says.

    Args:
      means: what may become of them.
      staging: how the step was cut into stages, if it was.
    """
    found, program = best.outcome, best.program
    if isinstance(found, SearchResult) and clock.expired():
        return None
    if _is_staged(program):
        return _stages_otherwise(best, staging, mesh, user_pins, limit, clock, limits) if means.recompute else None
    if isinstance(found, SearchResult):
        free, kept = found.at_rows(found.fit.free.rows), (found.peak.bytes, found.seconds)
    else:
        free, kept = solve(program, mesh, best.pins, inf, clock, limits), None
    quick, tried = replace(briefly(limits), memory_branch_boxes_smallest=0), dict[Hashable, Variant]()

    def attempt(costs: ResidualCosts, choice: RematChoice | MixedChoice) -> Variant:
        if choice.rewrite not in tried:
            tried[choice.rewrite] = planned(costs, choice, quick)
        return tried[choice.rewrite]

    def planned(costs: ResidualCosts, choice: RematChoice | MixedChoice, limits: SearchLimits) -> Variant:
        if isinstance(choice, MixedChoice):
            divided = dividing(program, dict(choice.trips))
            before, rewrite = divided.program, divided.rewrite(choice)
        else:
            divided, before, rewrite = None, program, choice.rewrite
        made = recomputing(before, *rewrite)
        stated = user_pins.resolve(made.program, mesh)
        pins = replace(stated, hosted=best.pins.hosted, hosted_outputs=best.pins.hosted_outputs)
        known = Remat(choice, rewrite, made, costs, (free.peak.bytes, free.seconds), kept, divided)
        outcome = _filled_plan(made.program, mesh, pins, limit, clock, limits)
        return replace(best, program=made.program, pins=pins, outcome=outcome, remat=known)

    whole, excess = ResidualCosts.of(free, 0.0, means), free.peak.bytes - limit
    if excess <= 0 and whole.promise <= NEGLIGIBLE * free.seconds:
        return None
    found_best = plan_residuals(whole, excess, limit, partial(attempt, whole), clock)
    for short in (limit, *(part * limit for part in _SHORT)) if excess > 0 else ():
        if found_best and found_best.seconds < best.seconds and (short < limit or clock.expired()):
            break
        costs = ResidualCosts.of(free, short, means)
        again = (
            None if costs.held == whole.held else plan_residuals(costs, excess, limit, partial(attempt, costs), clock)
        )
        found_best = again if again and not (found_best and found_best.seconds <= again.seconds) else found_best
        if best.seconds < inf and clock.expired():
            break
    if found_best and found_best.remat and best.seconds == found_best.seconds == inf and _says_more(free, limits):
        return planned(found_best.remat.costs, found_best.remat.choice, limits)
    return found_best


def _filled_plan(
    program: TracedProgram, mesh: Mesh, pins: Pins, limit: float, clock: Deadline, limits: SearchLimits
) -> SearchResult | MemoryLimitError:
    """Return the plan of a program within a limit, with more of it filled if much is left over."""
    try:
        found = solve(program, mesh, pins, limit, clock, limits)
    except MemoryLimitError as error:
        return error
    return found.filled() if found.fit.is_constrained and found.peak.bytes < _FULL * limit else found


def _stages_otherwise(
    best: "Variant",
    staging: Staging | None,
    mesh: Mesh,
    user_pins: UserPins,
    limit: float,
    clock: Deadline,
    limits: SearchLimits,
) -> "Variant | None":
    """Return the fastest variant found of a pipeline, whatever its stages keep; None if there is no choice."""
    pipelined = best.program.pipeline
    if staging is None or pipelined is None or pipelined.loads or pipelined.forward_only:
        return None
    quick, (whole, cut) = replace(briefly(limits), memory_branch_boxes_smallest=0), staging
    tried: dict[Hashable, Variant] = {(pipelined.asked.recompute, NOTHING): best}

    def prepared(program: TracedProgram, recompute: str) -> tuple[TracedProgram, Pins]:
        padded = padded_variant(cut(program, recompute), best.sizes, mesh, user_pins, best.regions)
        stated = user_pins.resolve(padded, mesh)
        pins = replace(stated, hosted=best.pins.hosted, hosted_outputs=best.pins.hosted_outputs)
        return keep_on_host(padded, pins.hosted, pins.hosted_outputs, pins.follows), pins

    keeping, pins = prepared(whole, KEEPING)
    free, stages = solve(keeping, mesh, pins, inf, clock, quick), keeping.pipeline
    assert stages is not None

    def attempt(given: StageChoice) -> Variant:
        key = given.recompute, given.choice.rewrite
        if key not in tried:
            made, keeps = recomputing(whole, *given.choice.rewrite), tried.get((KEEPING, NOTHING))
            program, pins = prepared(made.program, given.recompute)
            known = Remat(
                choice=given.choice,
                rewrite=given.choice.rewrite,
                made=made,
                costs=given.costs,
                fastest=(free.peak.bytes, free.seconds),
                kept=keeps.peak_and_seconds if keeps else None,
                stages=given.recompute,
                redone=given.redone,
            )
            outcome = _filled_plan(program, mesh, pins, limit, clock, quick)
            tried[key] = replace(best, program=program, pins=pins, outcome=outcome, remat=known)
        return tried[key]

    one = plan_of_one_stage(whole, stages, mesh, user_pins, clock, quick)
    return plan_stages(one, stages, free.peak.bytes - limit, limit, attempt, clock)


def _hosting(best: "Variant", mesh: Mesh, limit: float, clock: Deadline, limits: SearchLimits) -> "Variant | None":
    """Return the fastest variant found that moves inputs to the host's memory; None if that cannot be of use.

    The plan that moves nothing is the fastest if it does not feel the memory limit. If none fits, something is tried
    whatever the clock says.
    """
    found, program, pins = best.outcome, best.program, best.pins
    if _is_staged(program) or (isinstance(found, SearchResult) and (not found.fit.is_constrained or clock.expired())):
        return None
    if isinstance(found, SearchResult):
        free, kept = found.at_rows(found.fit.free.rows), (found.peak.bytes, found.seconds)
    else:
        free, kept = solve(program, mesh, pins, inf, clock, limits), None
    quick = replace(briefly(limits), memory_branch_boxes_smallest=0)

    def attempt(choice: HostChoice, limits: SearchLimits = quick) -> Variant:
        made = keep_on_host(program, choice.inputs, choice.outputs, pins.follows)
        with_host = replace(
            pins, hosted=pins.hosted | choice.inputs, hosted_outputs=pins.hosted_outputs | choice.outputs
        )
        try:
            outcome: SearchResult | MemoryLimitError = solve(made, mesh, with_host, limit, clock, limits)
        except MemoryLimitError as error:
            outcome = error
        known = Hosting(choice, (free.peak.bytes, free.seconds), kept)
        return replace(best, program=made, pins=with_host, outcome=outcome, hosting=known)

    moved = plan_hosting(HostCosts.of(free, pins, limit), attempt, clock)
    if moved and moved.hosting and best.seconds == moved.seconds == inf and _says_more(free, briefly(limits)):
        return attempt(moved.hosting.choice, briefly(limits))
    return moved


def _moved_or_not(
    best: "Variant",
    moved: "Variant | None",
    clock: Deadline,
    finish: "Callable[[Variant, list[str]], PlannedProgram]",
    notes: list[str],
    remarks: list[str],
) -> PlannedProgram:
    """Return the faster of the plan that moves nothing to the host's memory and the one that does, with notes.

    Args:
      finish: writes a variant as a plan with notes.
      notes: on both.
      remarks: on what the first computes again.
    """
    remarks = [*notes, *remarks]
    if moved is None:
        why = "no input or residual that may move saves memory where it is short"
        if _is_staged(best.program):
            why = "stages of a pipeline keep what they need on their devices"
        elif isinstance(best.outcome, SearchResult) and not best.outcome.fit.is_constrained:
            why = "the fastest plan without that fits the memory"
        elif isinstance(best.outcome, SearchResult) and clock.has_stopped:
            why = "the time limit was up before it was tried"
        return finish(best, [*remarks, f"nothing is moved to the host's memory: {why} (host='auto')"])
    counts = moved.host_counts.items()
    moving = " and ".join(count_text(count, kind) for kind, count in counts if count)
    if isinstance(moved.outcome, MemoryLimitError):
        if isinstance(best.outcome, MemoryLimitError) and by_need(moved) < by_need(best):
            computes = moved.remat is not None and bool(moved.remat.choice.ops)
            again = f" and activations computed again ({_asked(best)})" if computes else ""
            text = f"that is with {moving} in the host's memory (host='auto'){again}; a plan without needs more"
            error = MemoryLimitError("\n".join((str(moved.outcome), text)))
            error.least = moved.outcome.least
            raise error
        return finish(best, [*remarks, "nothing is moved to the host's memory (host='auto'): no plan that does fits"])
    if isinstance(best.outcome, MemoryLimitError):
        return finish(moved, notes)
    try:
        last = finish(moved, notes)
        if moved.seconds < CLEARLY * best.seconds:
            return last
        plans = finish(best, remarks), last
    except MemoryLimitError:  # the host's
        return finish(best, [*remarks, "nothing is moved to the host's memory (host='auto'): it would not fit there"])
    stays, moves = (planned.plan.seconds for planned in plans)
    if moves < stays:
        return plans[1]
    times = f"{seconds_text(stays)}; with {moving} there, {seconds_text(moves)}"
    note = f"nothing is moved to the host's memory (host='auto'): {times}"
    return replace(plans[0], plan=replace(plans[0].plan, notes=(*plans[0].plan.notes, note)))


def _says_more(free: SearchResult, limits: SearchLimits) -> bool:
    """Return whether an error of a full search says more than one of a quick search: larger meshes, or a lower least.

    Args:
      free: of a program with at most as many nodes.
    """
    return limits.memory_mesh_doublings > 0 or len(free.model.nodes) <= limits.memory_branch_nodes


def briefly(limits: SearchLimits) -> SearchLimits:
    """Return limits with which errors do not report on larger meshes, which takes longer than the search."""
    return replace(limits, memory_mesh_doublings=0)


def _is_staged(program: TracedProgram) -> bool:
    return program.pipeline is not None and bool(program.pipeline.axis)


def _with_or_without(best: "Variant", again: "Variant | None", clock: Deadline) -> "tuple[Variant, list[str]]":
    """Return the faster of the plan that keeps everything and the one that does not, with notes on the choice."""
    if again is None:
        why, pipelined = "there is nothing that can be", best.program.pipeline
        stopped = isinstance(best.outcome, SearchResult) and clock.has_stopped
        late = "the time limit was up before recomputation was tried"
        if pipelined and pipelined.loads:
            why = "parts that md.stage cuts are computed again from their inputs"
        elif pipelined and pipelined.axis:
            none = "no layers of stages have a backward pass that reads what can be"
            why = late if stopped and not pipelined.forward_only else none
        elif isinstance(best.outcome, SearchResult) and not best.outcome.fit.is_constrained:
            why = "the fastest plan that keeps everything fits the memory, and no choice promises a faster one"
        elif stopped:
            why = late
        return best, [f"nothing is computed again: {why} ({_asked(best)})"]
    why = "has effects and runs once: its results are kept"
    once = [f"{op.name} at {op.source} {why}" for op in kept_effects(best.program)]
    if again.seconds < best.seconds:
        return again, once
    if again is best:
        return _as_stated(best)
    if isinstance(best.outcome, MemoryLimitError):
        text = f"that is with activations computed again ({_asked(best)}); {_stated(best)} needs more"
        error = MemoryLimitError("\n".join((str(again.outcome), text, *once)))
        error.least = again.outcome.least if isinstance(again.outcome, MemoryLimitError) else 0
        return replace(again, outcome=error), once
    choice = f"{_stated(best)} is taken" if _is_staged(best.program) else "nothing is computed again"
    return best, [f"{choice} ({_asked(best)}): {best}; with the best choice found, {again}"]


def _as_stated(best: "Variant") -> "tuple[Variant, list[str]]":
    """Return the plan of a pipeline whose stages keep what they were told to, with a note."""
    if isinstance(best.outcome, MemoryLimitError):
        text = f"that is {_stated(best)}; no other choice of what stages keep needs less ({_asked(best)})"
        error = MemoryLimitError("\n".join((str(best.outcome), text)))
        error.least = best.outcome.least
        return replace(best, outcome=error), []
    return best, [f"{_stated(best)} is taken ({_asked(best)}): no other choice of what stages keep was faster"]


def _stated(variant: "Variant") -> str:
    """Return in words what the step says without the planner's choice."""
    pipelined = variant.program.pipeline
    if pipelined and pipelined.axis:
        return f"a plan with recompute={pipelined.asked.recompute!r}"
    return "a plan that keeps them all"


def _asked(variant: "Variant") -> str:
    """Return the option by which the planner chooses what is computed again."""
    return f"remat={'auto' if variant.program.checkpoints else 'replace'!r}"


def least_variant_seconds(program: TracedProgram, mesh: Mesh, limits: SearchLimits = DEFAULT_LIMITS) -> float:
    """Return a lower bound on the seconds of every plan of every variant of a program.

    Padding only makes arrays longer and adds operations. Regions can cost less than the program as written, by the
    copy that joins their pieces.
    """
    apart = program if _is_large(program, limits) else compute_regions(program)
    least = least_seconds(program, mesh)
    return least if apart is program else min(least, least_seconds(apart, mesh))


def _is_large(program: TracedProgram, limits: SearchLimits) -> bool:
    return graph_index(program.graph).op_count > limits.solve_variant_operations


def _finish(best: "Variant", notes: list[str], overlap: Overlap, start: Submit) -> PlannedProgram:
    """Write the best variant as a plan; MemoryLimitError if it has none.

    Args:
      start: runs the proof of the bound, mostly compiled loops, while the plan is built.
    """
    found = best.outcome
    if isinstance(found, MemoryLimitError):
        raise found
    planned = plan_with_buckets(found)
    if overlap.simulates:
        planned = plan_with_overlap(found, planned)
    other, ahead = plan_with_prefetch(planned.apart, best.program, overlap.globs, best.pins.donated, overlap.simulates)
    changed = ahead.prefetch or other is not planned.apart
    if changed and overlap.globs is None and planned.solution.buckets:  # a loop sends what it sends ahead by itself
        changed = step_seconds(best.program, ahead) < step_seconds(best.program, planned.solution)
    solution = ahead if changed else planned.solution
    solution, of_rings = with_best_rings(
        best.program, solution, overlap.verdicts, overlap.simulates, best.pins.donated, found.limit
    )
    program = replace(best.program, notes=[*notes, *planned.notes, *of_rings])
    bound = start(planned.certify)
    plan = build_plan(program, solution, best.pins, found.model.problem.op_classes)
    solution = replace(solution, lower_bound=min(bound.result(), solution.seconds))
    room = solution.mesh.topology.host_memory
    if plan.host_memory > room:
        needed = f"the arrays @host need {bytes_text(plan.host_memory)} of the host's memory per device"
        there = f"topology {solution.mesh.topology.name} has {bytes_text(room)}"
        raise MemoryLimitError(f"{needed}; {there}\nkeep fewer of them @host, or divide them over more devices")
    effort = found.model.limits.effort
    plan = replace(plan, padded=tuple(best.sizes.items()), regions=best.regions, solution=solution, effort=effort)
    if best.hosting and plan.host:
        plan = replace(plan, host=plan.host._replace(fastest=best.hosting.fastest, kept=best.hosting.kept))
    if best.remat:
        plan = replace(plan, recomputation=best.remat.facts(program, solution, found.model.problem.op_classes))
    return PlannedProgram(program, plan, replace(best, outcome=planned.origin.released()), overlap)


# ---- Variants, and how notes name their dims -------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One variant of a program, with its search result, or the reason why no plan fits the memory.

    Args:
      sizes: lengths that are padded.
      program: the variant.
      pins: its pins.
      outcome: of its search.
      regions: parts of dims that are only reduced are computed where they lie.
      remat: what it computes again by the planner's choice.
      hosting: what it keeps in the host's memory by the planner's choice.
    """

    sizes: Sizes
    program: TracedProgram
    pins: Pins
    outcome: SearchResult | MemoryLimitError
    regions: bool = False
    remat: Remat | None = None
    hosting: Hosting | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the plan; infinite if none fits the memory."""
        return self.outcome.seconds if isinstance(self.outcome, SearchResult) else float("inf")

    @property
    def peak_and_seconds(self) -> tuple[int, float] | None:
        """Bytes and seconds of the plan; None if none fits the memory."""
        return (self.outcome.peak.bytes, self.seconds) if isinstance(self.outcome, SearchResult) else None

    @property
    def spare(self) -> float:
        """Bytes that the plan leaves of the limit."""
        return self.outcome.limit - self.outcome.peak.bytes if isinstance(self.outcome, SearchResult) else -inf

    @property
    def least(self) -> float:
        """The least bytes found if none fits; infinite if they are not known."""
        return (self.outcome.least or inf) if isinstance(self.outcome, MemoryLimitError) else 0.0

    @property
    def uses_host(self) -> bool:
        """Whether it keeps anything in the host's memory by the planner's choice."""
        return any(self.host_counts.values())

    @property
    def host_counts(self) -> dict[str, int]:
        """How many inputs and residuals it keeps in the host's memory by the planner's choice."""
        inputs = len(self.hosting.choice.inputs) if self.hosting else 0
        return {"input": inputs, "residual": len(self.remat.choice.hosted) if self.remat else 0}

    def uneven_seconds(self, n: int) -> float:
        """Return about the seconds that not dividing dims of a length takes; infinite if no plan fits the memory."""
        return self.outcome.uneven_seconds(n) if isinstance(self.outcome, SearchResult) else inf

    def polished(self, start: Submit) -> "Variant":
        """Return the variant with the same or a better plan."""
        return replace(self, outcome=self.outcome.polish(start)) if isinstance(self.outcome, SearchResult) else self

    def named(self, n: int) -> str:
        """Return the inputs that are padded from ``n``, else those of that length, else the first operation on it."""
        graph, m = self.program.graph, self.sizes[n]
        padded = {x.id for op in graph.ops if op.name == "pad" and m in op.outputs[0].shape for x in values(op.inputs)}
        operations = (f"{op.name} at {op.source}" for _, op in walk(graph) if any(m in v.shape for v in op.outputs))
        return f"{_listed(_dims(self.program, n, padded) or _dims(self.program, n) or [next(operations)])} ({n})"

    def __str__(self) -> str:
        return seconds_text(self.seconds) if isinstance(self.outcome, SearchResult) else "exceeds the memory limit"


def _required_note(variant: Variant, n: int) -> str:
    text = f"{variant.named(n)} is padded to {variant.sizes[n]} inside the step, as a constraint splits it"
    return text + _loop_note(variant, n)


def _untried_note(program: TracedProgram, n: int) -> str:
    what = _listed(_dims(program, n)) or "a dim"
    return f"{what} ({n}) is left unpadded: every mesh axis divides it; padding it for several axes was not tried"


def _constant_notes(variant: Variant) -> list[str]:
    returned, outputs = variant.program.graph.returned, variant.program.outputs
    fixed = [outputs[j].path for j in sorted(variant.pins.hosted_outputs) if not isinstance(returned[j], Value)]
    text = f"output {', '.join(shortened(fixed))} is constant and stays on the device, although '@host' was asked for"
    return [text] if fixed else []


def _unworthy_note(program: TracedProgram, n: int, saved: float) -> str:
    what = _listed(_dims(program, n)) or "a dim"
    return f"{what} ({n}) does not divide over the mesh and is left unpadded: that costs about {seconds_text(saved)}"


def _trial_note(before: Variant, after: Variant, n: int) -> str:
    what, m = after.named(n), after.sizes[n]
    if after.seconds < before.seconds:
        text = f"{what} is padded to {m} inside the step: {after}; without, {before}"
    else:
        text = f"{what} does not divide over the mesh and is left unpadded: padded to {m}, {after}; without, {before}"
    return text + _loop_note(after, n)


def _loop_note(variant: Variant, n: int) -> str:
    """Name the loop that pads in every iteration, if any: one whose operands and results keep their length."""
    m = variant.sizes[n]

    def pads(op: Op) -> bool:
        return op.name == "pad" and n in op.inputs[0].shape and m in op.outputs[0].shape

    for _, op in walk(variant.program.graph):
        if op.name in ("scan", "while") and any(pads(inner) for body in op.bodies for inner in body.ops):
            return f"; {op.name} at {op.source} carries it unpadded and pads it in every iteration"
    return ""


def _unused_lengths(program: TracedProgram, mesh: Mesh, candidates: Sizes, large: bool) -> Iterator[str]:
    """Yield a note per uneven length of the inputs that is no candidate."""
    users = "product, convolution or lookup" if large else "product, convolution, lookup or reduction"
    for n in dict.fromkeys(n for leaf in program.inputs for n in leaf.shape):
        if n not in candidates and padded_length(n, mesh) > n:
            text = f"does not divide over the mesh and is left unpadded: no {users} uses it"
            yield f"{_listed(_dims(program, n))} ({n}) {text}"


def _dims(program: TracedProgram, n: int, among: Container[int] | None = None) -> list[str]:
    """Return the dims of length ``n`` of all inputs, or of those whose value ids are ``among`` these."""
    return [
        f"dim {d} of {leaf.path}"
        for leaf, value in zip(program.inputs, program.graph.inputs, strict=True)
        for d, size in enumerate(leaf.shape)
        if size == n and (among is None or value.id in among)
    ]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
