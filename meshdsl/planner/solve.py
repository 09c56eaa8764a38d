"""The stages of planning, in a straight line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshdsl.ir.graph import TracedProgram
from meshdsl.ir.solution import Pins, Solution
from meshdsl.layouts.mesh import Mesh
from meshdsl.planner.costs.reshard_cost import OverlapWindow
from meshdsl.planner.limits import DEFAULT_LIMITS, SearchLimits
from meshdsl.planner.liveness.peak import Peak
from meshdsl.planner.memory.dual import PendingBound, dual_bound, start_bound
from meshdsl.planner.memory.fit import MemoryFitter
from meshdsl.planner.objective import CostedPlan, layouts_of, rows_by_op, trees_of
from meshdsl.planner.problem.build import make_problem, repin, split_stacks
from meshdsl.planner.problem.model import Model, is_refinement
from meshdsl.planner.search.search import (
    ROUNDING,
    evaluate_plan,
    quick_bound,
    repair_for_pins,
    search,
    searches_jointly,
)
from meshdsl.planner.search.tie_break import fewest_layouts
from meshdsl.util.runtime import Deadline, Submit, gc_paused

_LITTLE = (
    600  # nodes up to which a plan is worth rounds although it does not fit: they may find a better one that does;
)
# and up to which other pins are worth a search from the beginning
_NEAR = 1e-2  # part of a plan's cost that another pin may cost, for the bound to stay as it is


class KnownBound(NamedTuple):
    """What was found under some pins: seconds that no plan can be below, and what the plan costs."""

    pins: Pins
    bound: float
    cost: float


@dataclass(frozen=True)
class SearchResult:
    """The best plan found within the memory; how good it is at least is proved when it is asked for.

    Args:
      limit: of memory, in bytes. peak: the plan's fullest point.
      free: the best plan found, memory aside; the same if it fits.
      prove: seconds that no plan can be below, whether it fits or not.
      pending: a bound on those that fit. loosest: what was found before under pins that these add to.
    """

    model: Model
    fitter: MemoryFitter
    limit: float
    free: CostedPlan
    choice: CostedPlan
    peak: Peak
    prove: Callable[[], float]
    pending: PendingBound | None = None
    loosest: "KnownBound | None" = None

    @property
    def seconds(self) -> float:
        """What the plan takes."""
        return self.model.scale.seconds(self.choice.cost)

    def certify(self) -> float:
        """Seconds that no plan can be below that fits; nothing is searched any more."""
        bound = self._prove_short()
        if bound <= self.model.scale.seconds(self.free.cost):
            bound = max(bound, self.prove())
        self.model.release_domains()
        return bound

    def solution(self) -> Solution:
        """The plan with its bound."""
        return replace(self.unproved_solution(), lower_bound=self.certify())

    def polish(self, submit: Submit) -> "SearchResult":
        """The same or a better plan, where memory is short, and of such as cost the same a simpler one.

        Args:
          submit: runs the bound of a large step concurrently.
        """
        choice, short = self.choice, self.choice is not self.free
        bound = None
        if short:
            fitting = self.fitter.nearer(choice, self.free, self.limit)
            bound = start_bound(self.fitter, self.free, fitting[0], self.limit, submit)
            choice, _ = self.fitter.proved(self.fitter.cheaper(fitting, self.free, self.limit), self.limit)
        if searches_jointly(self.model):
            choice = fewest_layouts(self.model, self.fitter.evaluator, choice, self._fits)
        return replace(
            self, choice=choice, peak=self.fitter.peak(choice), free=self.free if short else choice, pending=bound
        )

    def _fits(self, choice: CostedPlan) -> bool:
        return self.fitter.peak(choice).bytes <= self.limit

    def _prove_short(self) -> float:
        """Seconds that no plan can be below that fits; 0 where memory says nothing."""
        if self.choice is self.free:
            return 0.0
        least = dual_bound(self.fitter, self.free, self.choice, self.limit, self.pending)
        return self.model.scale.seconds(min(least, self.choice.cost) - ROUNDING * abs(least))

    def unproved_solution(self) -> Solution:
        """The plan, with no bound yet."""
        return solution_of(self.model, self.fitter.pins, self.choice, self.peak)

    def with_overlap(self, windows: Mapping[int, OverlapWindow]) -> "SearchResult":
        """The best plan found where moves of some values cost less; cost and bound are those without that.

        Raises MemoryLimitError if none was found that fits.
        """
        model, pins = self.model.with_overlap(windows), self.fitter.pins
        fitter = MemoryFitter(model, pins, self.fitter)
        free = search(model, lambda _: False, fitter.joint, None, fitter.evaluator).plan
        rows = fitter.fit(free, self.limit)[0].rows
        choice = evaluate_plan(self.model, self.fitter.evaluator, rows)
        return replace(self, choice=choice, peak=self.fitter.peak(choice))

    def replan(self, pins: Pins, bound: float) -> "SearchResult | None":
        """The best plan found from this one on, under other pins, without rounds; None if it takes another problem.

        Args:
          bound: seconds that no plan can be below under the present pins. Nor can one under others that add to them;
            where these cost little, that is as good as a proof of its own.
        """
        problem = repin(self.model.problem, pins)
        if problem is None:
            return None
        fitter, mesh = MemoryFitter(self.model.repinned(problem), pins, self.fitter), self.model.mesh
        before = (self.loosest, KnownBound(self.fitter.pins, bound, self.choice.cost))
        known = [each for each in before if each and is_refinement(pins, each.pins, mesh)]
        enough = (1 + _NEAR) * min((each.cost for each in known), default=0.0)
        found = self._resumed(fitter, enough) or self._refound(fitter)
        least, prove = max((each.bound for each in known), default=0.0), found.prove
        proof = (lambda: least) if found.choice.cost <= enough else (lambda: max(least, prove()))
        return replace(found, prove=proof, loosest=known[0] if known else None)

    def _resumed(self, fitter: MemoryFitter, enough: float) -> "SearchResult | None":
        """The best plan found at the price that bytes have, if memory is short still, and it costs so much at most."""
        model, evaluator = fitter.model, fitter.evaluator
        if self.choice is self.free or not enough or len(model.nodes) <= _LITTLE:
            return None
        known, free = (repair_for_pins(model, evaluator, plan.rows) for plan in (self.choice, self.free))
        if fitter.peak(free).bytes <= self.limit:
            return None
        choice = fitter.resumed(known, free, self.limit)
        if choice is None or choice.cost > enough:
            return None
        return SearchResult(
            model, fitter, self.limit, free, choice, fitter.peak(choice), lambda: quick_bound(model, free)
        )

    def _refound(self, fitter: MemoryFitter) -> "SearchResult":
        """The best plan found from this one on, memory aside, and then within it."""
        model = fitter.model
        found = search(model, lambda _: False, fitter.joint, self.choice.rows, fitter.evaluator)
        best = found.plan
        choice, peak = fitter.fit(best, self.limit)
        if choice is not best and len(model.nodes) <= _LITTLE:
            choice = fitter.cheaper(fitter.nearer(choice, best, self.limit), best, self.limit)
        elif choice is not best:
            choice = fitter.mixed(choice, fitter.over or [best], self.limit)
        if choice is not best:
            choice, peak = fitter.proved(choice, self.limit)
        return SearchResult(model, fitter, self.limit, best, choice, peak, found.lower_bound)

    def released(self) -> "SearchResult":
        """Without what has found it and proved the bound, which may be large."""
        self.fitter.let_go()
        return replace(self, prove=lambda: 0.0, pending=None)


@gc_paused
def solve(
    program: TracedProgram,
    mesh: Mesh,
    pins: Pins,
    memory: float | None = None,
    deadline: Deadline | None = None,
    limits: SearchLimits = DEFAULT_LIMITS,
) -> SearchResult:
    """Returns a good plan of a program that fits the memory, with the steps that are left: polish and certify.

    The stages in order: build the model, search for the cheapest plan whatever its memory, and if that does not fit,
    search for the cheapest one that does. Of several programs (padded in different ways, say) only the best one is
    worth the rest:

        with worker_pool() as submit:
            best = solve(program, mesh, pins).polish(submit)
            solution = best.solution()  # certified

    Args:
      memory: limit in bytes per device; None takes the topology's.
      deadline: after which improvements are skipped.

    Raises:
      PinError: if no assignment satisfies the pins.
      MemoryLimitError: if no plan within the limit is found.
    """
    limit = mesh.topology.memory if memory is None else memory
    model = Model(make_problem(program, mesh, pins), deadline, limits)
    fitter = MemoryFitter(model, pins)
    is_small = len(model.nodes) <= _LITTLE

    def is_worth_rounds(plan: CostedPlan) -> bool:
        return is_small or fitter.peak(plan).bytes <= limit

    found = search(model, is_worth_rounds, fitter.joint, None, fitter.evaluator)
    return SearchResult(model, fitter, limit, found.plan, *fitter.fit(found.plan, limit), found.lower_bound)


def solution_of(model: Model, pins: Pins, choice: CostedPlan, peak: Peak) -> Solution:
    """A choice, with its fullest point, as a solution that nothing is proved of."""
    problem = model.problem
    own, uses = layouts_of(model, choice.rows)
    trees = trees_of(model, choice)
    kept = [stack for stack in split_stacks(problem.program, pins, problem.mesh) if stack.stays_split(trees)]
    return Solution(
        mesh=problem.mesh,
        rows=rows_by_op(model, choice.rows),
        layouts=own,
        uses=uses,
        trees=trees,
        seconds=model.scale.seconds(choice.cost),
        lower_bound=0.0,
        peak=peak.bytes,
        peak_op=peak.op.id if peak.op else -1,
        held=peak.held(),
        notes=tuple(dict.fromkeys(map(str, kept))),
    )
