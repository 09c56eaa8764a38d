"""The stages of planning, in a straight line: build, search, fit, polish, certify.

    solve      1. build    the problem as arrays (``problem``), networks over its joint states (``encoding``)
               2. search   the cheapest plan, whatever its memory (``search``)
               3. fit      if that exceeds the limit, the cheapest plan within it (``memory``)
    .polish    4. polish   a cheaper plan within the limit, and of equally cheap ones the one with fewest layouts
    .certify   5. certify  seconds that no plan within the limit undercuts (``bounds``, ``memory.dual``)

Each stage keeps its result: ``SearchResult`` holds the model, the plan without the limit, the plan within it with its
peak, and the bounds that are still to be computed. It can also be planned again under other pins (``replan``), or with
reshards that are cheaper because they overlap with compute (``with_overlap``) or are sent in buckets
(``with_shared_latency``), or within less memory (``within``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf
from typing import NamedTuple

from meshdsl.ir.graph import TracedProgram
from meshdsl.ir.solution import Bucket, Pins, Solution
from meshdsl.layouts.mesh import Mesh
from meshdsl.planner.bounds.trivial import least_seconds
from meshdsl.planner.buckets import find_buckets, is_sendable, least_latency, most_savings, with_buckets
from meshdsl.planner.costs.reshard_cost import OverlapWindow, SharedLatency
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.limits import DEFAULT_LIMITS, SearchLimits
from meshdsl.planner.liveness.peak import Liveness, Peak
from meshdsl.planner.liveness.timeline import copy_timeline
from meshdsl.planner.memory.dual import PendingBound, dual_bound, start_bound
from meshdsl.planner.memory.fit import FitResult, MemoryFitter, Pricing, joint_networks
from meshdsl.planner.objective import CostedPlan, Evaluator, exact_surcharge, layouts_of, rows_by_op, trees_of
from meshdsl.planner.problem.build import make_problem, repin, split_stacks
from meshdsl.planner.problem.low_bits import sent_in_full
from meshdsl.planner.problem.model import Assignment, Model, is_refinement
from meshdsl.planner.search.postpone import postponed_reductions
from meshdsl.planner.search.search import (
    ROUNDING,
    evaluate_plan,
    quick_bound,
    repair_for_pins,
    search,
    searches_jointly,
)
from meshdsl.planner.search.tie_break import fewest_layouts
from meshdsl.planner.unshared import UnsharedUses
from meshdsl.util.runtime import Deadline, Submit, gc_paused

# ---- Results ---------------------------------------------------------------------------------------------------------


class KnownBound(NamedTuple):
    """Seconds that no plan undercuts under some pins, and the cost of the plan that was found."""

    pins: Pins
    seconds: float
    cost: float


@dataclass(frozen=True)
class FreeBound:
    """Seconds that no plan undercuts, whatever its memory.

    Args:
      known: proved already, under looser pins.
      search: of the search, computed up to as many seconds as are of use; None if the known bound suffices.
    """

    known: float = 0.0
    search: Callable[[float], float] | None = None

    def seconds(self, enough: float) -> float:
        """Returns the higher of both bounds; from ``enough`` on, a higher one is of no use."""
        return max(self.known, self.search(enough)) if self.search and self.known < enough else self.known


@dataclass(frozen=True, eq=False, repr=False)
class SearchResult:
    """A plan within the memory limit, and the steps that may follow.

    Args:
      model: the problem as arrays.
      fitter: evaluates memory, and improves the plan.
      fit: the plan, the plan without the limit, and prices of memory.
      peak: of the plan.
      free_bound: whatever the memory; computed by ``certify``.
      pending: a bound on plans within the limit, computed concurrently since ``polish``.
      loosest: the bound under the loosest pins that the present ones refine.
    """

    model: Model
    fitter: MemoryFitter
    fit: FitResult
    peak: Peak
    free_bound: FreeBound
    pending: PendingBound | None = None
    loosest: KnownBound | None = None

    @property
    def seconds(self) -> float:
        """Predicted seconds of the step."""
        return self.model.scale.seconds(self.fit.plan.cost)

    @property
    def limit(self) -> float:
        """The memory limit, in bytes per device."""
        return self.fit.limit

    @property
    def is_small(self) -> bool:
        """Whether rounds of improvement and proof are worth their time."""
        return len(self.model.nodes) <= self.model.limits.solve_small_nodes

    def uneven_seconds(self, length: int) -> float:
        """Returns about the seconds that the plan takes because it does not divide dims of a length.

        They are those of operations on such dims beyond an even division over all devices, and of resharding arrays
        with such dims.
        """
        model, found = self.model, 0.0
        nodes, reshards = self.fitter.evaluator.breakdown(self.fit.plan.rows)
        for n, node in enumerate(model.nodes):
            ports = [i for i, port in enumerate(node.ports, model.wiring.first_port[n]) if length in port.value.shape]
            if ports:
                even = model.tables[n].replicated_seconds * node.weight / model.mesh.size
                found += max(0.0, model.scale.seconds(float(nodes[n])) - even)
                found += model.scale.seconds(float(reshards[ports].sum()))
        return found

    def __repr__(self) -> str:
        free = f"{self.model.scale.seconds(self.fit.free.cost):.6g} s without limit"
        return f"SearchResult({self.seconds:.6g} s, {self.peak.bytes} of {self.limit:.0f} bytes; {free})"

    def polish(self, submit: Submit) -> "SearchResult":
        """Returns the same or a better plan: cheaper within the limit, or as cheap with fewer distinct layouts.

        Args:
          submit: runs the bound of a large step concurrently.
        """
        fit, pending = self.fit, None
        is_constrained = fit.is_constrained
        if is_constrained:
            fit = self.fitter.bisect(fit)
            pending = start_bound(self.fitter, fit, submit)
            fit = self.fitter.prove(self.fitter.improve(fit))
        plan = fit.plan
        if searches_jointly(self.model) and not self._is_warm_start():
            plan = fewest_layouts(self.model, self.fitter.evaluator, plan, lambda plan: self._bytes(plan) <= self.limit)
        fit = replace(fit, plan=plan, free=fit.free if is_constrained else plan)
        return replace(self, fit=fit, peak=self.fitter.peak(plan), pending=pending)

    def filled(self) -> "SearchResult":
        """Returns the same or a cheaper plan, which uses more of the memory that this one leaves."""
        fit = replace(self.fit, plan=self.fitter.improve(self.fitter.bisect(self.fit)).plan)
        return replace(self, fit=fit, peak=self.fitter.peak(fit.plan))

    def certify(self, enough: float = inf) -> float:
        """Returns seconds that no plan within the limit undercuts. Nothing can be searched afterwards.

        Args:
          enough: seconds from which on a higher bound is of no use.
        """
        bound, seconds = 0.0, self.model.scale.seconds
        if self.fit.is_constrained:
            cost = dual_bound(self.fitter, self.fit, self.pending)
            bound = seconds(min(cost, self.fit.plan.cost) - ROUNDING * abs(cost))
        if bound <= seconds(self.fit.free.cost):
            bound = max(bound, self.free_bound.seconds(enough))
        self.model.release_domains()
        return bound

    def solution(self) -> Solution:
        """Returns the plan with its certified bound."""
        return replace(self.unproved_solution, lower_bound=self.certify())

    @cached_property
    def unproved_solution(self) -> Solution:
        """The plan with a lower bound of 0."""
        return solution_of(self.model, self.fitter.pins, self.fit.plan, self.peak)

    def released(self) -> "SearchResult":
        """Returns the result without networks and pending bounds, which may be large; it can still be planned again."""
        return replace(self, fitter=self.fitter.without_networks(), free_bound=FreeBound(), pending=None)

    def with_overlap(self, windows: Mapping[int, OverlapWindow]) -> "SearchResult":
        """Returns the best plan where reshards of some values are cheaper; its cost and bound are those without that.

        Args:
          windows: by value id.

        Raises:
          MemoryLimitError: if no plan within the limit is found.
        """
        model, pins = self.model.with_relief(windows), self.fitter.pins
        fitter = MemoryFitter(model, pins, joint_networks(model), is_replan=True)
        free = search(model, lambda _: False, fitter.networks, None, fitter.evaluator).plan
        rows = fitter.fit(free, self.limit, fitter.pricing(self.fit.pricing)).plan.rows
        return self.at_rows(rows)

    # ---- Buckets ----

    @cached_property
    def may_use_buckets(self) -> bool:
        """Whether buckets may matter."""
        return _may_use_buckets(self.fitter, self.fit.plan)

    def _is_warm_start(self) -> bool:
        """Whether the plan only warm-starts the searches for one with buckets, and is not worth a proof of its own."""
        return _proves_no_warm_start(self.model) and self.may_use_buckets

    def bucketed_solution(self) -> Solution:
        """Returns the plan, with a lower bound of 0, and small collectives in buckets within the limit."""
        model, pins, limits = self.model, self.fitter.pins, self.model.limits
        graph, found = model.problem.program.graph, list[tuple[float, CostedPlan, Solution, list[Bucket]]]()
        for plan in (self.fit.plan, *postponed_reductions(model, self.fitter.evaluator, self.fit.plan)):
            moves = _moves(model, pins, plan)
            buckets = find_buckets(graph, moves, limits.buckets_least)
            found.append((with_buckets(moves, graph, buckets).seconds, plan, moves, buckets))
        chosen, least = None, (1 - limits.buckets_worth) * found[0][2].seconds
        for seconds, plan, moves, buckets in sorted(found, key=lambda each: each[0]):
            fitting = self._fitting_buckets(moves, buckets) if seconds < least else None
            if fitting and fitting.seconds < least:
                chosen, least = (plan, fitting), fitting.seconds
        return _with_rows(model, pins, *chosen) if chosen else self.unproved_solution

    def _fitting_buckets(self, plain: Solution, found: Sequence[Bucket]) -> Solution | None:
        """Returns a solution with all of these buckets that fit the memory; None if it does not fit without any."""
        best = self._with_buckets(plain, found)
        if best.peak > self.limit:  # buckets hold results from the moment they are sent
            kept: list[Bucket] = []
            for bucket in found:
                if self._with_buckets(plain, [*kept, bucket]).peak <= self.limit:
                    kept.append(bucket)
            best = self._with_buckets(plain, kept)
        return best if best.peak <= self.limit else None

    def _with_buckets(self, plain: Solution, buckets: Sequence[Bucket]) -> Solution:
        graph, s = self.model.problem.program.graph, plain
        placed = copy_timeline(graph, s.mesh, s.layouts, s.uses, s.trees, buckets)
        peak = Liveness(placed, self.fitter.pins.donated).peak()
        return _with_peak(with_buckets(plain, graph, buckets), peak)

    def with_shared_latency(self, part: float, summed: Sequence[str] = ()) -> "SearchResult":
        """Returns the search where collectives that may be sent in buckets pay only a part of their latency.

        Its cost and bound are those at these prices. ``at_rows`` gives its plan at true prices.

        Args:
          part: of the latency.
          summed: mesh axes, if only all-reduces over exactly these may be sent in buckets.

        Raises:
          MemoryLimitError: if no plan within the limit is found.
        """
        model = self._with_relieved_latencies(part, summed)
        return self._search_at(model, joint_networks(model))

    def at_unshared_latencies(self, best: float, free: "SearchResult | None" = None) -> "UnsharedSearch | None":
        """Returns the search where collectives pay the latencies that they share with no others (``unshared``).

        No plan undercuts its bound, with buckets or without. The result is None for a step that is searched axis by
        axis or layer by layer.

        Args:
          best: seconds of the best plan known; the bound needs not be nearer to it than is worth the work.
          free: ``with_shared_latency(0.0)``, whose networks are taken, if there is one.

        Raises:
          MemoryLimitError: if no plan within the limit is found.
        """
        if not searches_jointly(self.model) or len(self.model.nodes) >= self.model.limits.encoding_layers_nodes:
            return None
        model = free.model if free else self._with_relieved_latencies(0.0)
        networks = free.fitter.networks if free else None
        model, networks, tried = self._with_unshared_latencies(model, networks or NetworkBuilder(model), best)
        search = self._search_at(model, networks)
        return UnsharedSearch(search, (*tried, search.fit.plan.rows))

    def quick_bound_without_latencies(self) -> float:
        """Returns seconds that no plan undercuts, memory aside, where no latencies count that may be shared."""
        model = self._with_relieved_latencies(0.0)
        return quick_bound(model, evaluate_plan(model, Evaluator(model), self.fit.plan.rows))

    def _with_relieved_latencies(self, part: float, summed: Sequence[str] = ()) -> Model:
        sendable = (v.id for v in self.model.problem.index.values if is_sendable(v))
        bits = sum(1 << self.model.mesh.names.index(name) for name in summed)
        return self.model.with_relief(dict.fromkeys(sendable, SharedLatency(part, bits)))

    def _search_at(self, model: Model, networks: NetworkBuilder | None) -> "SearchResult":
        """Returns the search at the prices of a model."""
        fitter = MemoryFitter(model, self.fitter.pins, networks, is_replan=True)
        known = None if self.is_small else self.fit.plan.rows
        is_quick = _proves_no_warm_start(model)  # the bound is of use if that of no other search is higher
        found = search(model, lambda _: self.is_small, fitter.networks, known, fitter.evaluator, lambda _: is_quick)
        fit = fitter.fit(found.plan, self.limit, fitter.pricing(self.fit.pricing))
        return SearchResult(model, fitter, fit, fitter.peak(fit.plan), FreeBound(search=found.lower_bound))

    def _with_unshared_latencies(
        self, model: Model, networks: NetworkBuilder, best: float
    ) -> tuple[Model, NetworkBuilder, list[Assignment]]:
        """Returns a view in which those latencies count that no bucket shares, its networks, and the rounds' plans."""
        limits, index, wiring = model.limits, model.problem.index, model.wiring
        unshared, enough = UnsharedUses(model.problem.program.graph), (1 - limits.worth_gap) * model.scale.cost(best)
        plan, most, idle, tried = self.fit.plan, 0.0, 0, list[Assignment]()
        for left in reversed(range(limits.buckets_rounds)):
            unshared.add(layouts_of(model, plan.rows)[1], trees_of(model, plan))
            ports = wiring.port_of_use[index.use_numbers(unshared.shares)]
            parts = zip(wiring.ends_at(ports), ports, unshared.shares.values(), strict=True)
            model = model.with_unshared({end: part for end, port, part in parts if port >= 0})
            here = networks.priced(model)
            if not left or idle == limits.buckets_patience or model.deadline.expired():
                break
            plan = search(model, lambda _: False, here, plan.rows).plan
            tried.append(plan.rows)
            if plan.cost >= enough:
                break
            idle = idle + 1 if plan.cost < (1 + limits.buckets_rise) * most else 0
            most = max(most, plan.cost)
        return model, here, tried

    def at_rows(self, rows: Assignment) -> "SearchResult":
        """Returns this search with another plan, perhaps of a search at other prices, in place of its own."""
        plan = evaluate_plan(self.model, self.fitter.evaluator, rows)
        return replace(self, fit=replace(self.fit, plan=plan), peak=self.fitter.peak(plan))

    def within(self, limit: float) -> "SearchResult":
        """Returns the best plan found within a smaller limit; its bound is that under the present one.

        Raises:
          MemoryLimitError: if no plan within the smaller limit is found.
        """
        fitter = MemoryFitter(self.model, self.fitter.pins, joint_networks(self.model), is_replan=True)
        fit = fitter.fit(self.fit.free, limit, fitter.pricing(self.fit.pricing))
        plan = (fitter.improve(fitter.bisect(fit)) if fit.is_constrained else fit).plan
        return replace(self, fit=replace(self.fit, plan=plan), peak=self.fitter.peak(plan))

    # ---- Other pins ----

    def replan(self, pins: Pins, bound: float) -> "SearchResult | None":
        """Returns the best plan under other pins that is found from this one; None if they need a problem of their own.

        Args:
          bound: seconds that no plan undercuts under the present pins. It also holds under pins that refine these, and
            where these cost little it is as good as a proof of its own.
        """
        problem = repin(self.model.problem, pins)
        if problem is None:
            return None
        model, mesh = self.model.repinned(problem), self.model.mesh
        fitter = MemoryFitter(model, pins, is_replan=True)
        before = (self.loosest, KnownBound(self.fitter.pins, bound, self.fit.plan.cost))
        known = [each for each in before if each and is_refinement(pins, each.pins, mesh)]
        tolerance = 1 + self.model.limits.solve_replan_cost
        enough = tolerance * min((each.cost for each in known), default=0.0)
        pricing, found = fitter.pricing(self.fit.pricing), None
        if self.fit.is_constrained and enough and len(model.nodes) > self.model.limits.solve_small_nodes:
            found, pricing = self._resume(fitter, pricing, enough)
        found = found or self._search_again(fitter, pricing)
        least = max((each.seconds for each in known), default=0.0)
        free_bound = FreeBound(least, None if found.fit.plan.cost <= enough else found.free_bound.search)
        return replace(found, free_bound=free_bound, loosest=known[0] if known else None)

    def _resume(self, fitter: MemoryFitter, pricing: Pricing, enough: float) -> "tuple[SearchResult | None, Pricing]":
        """Returns the best plan at the present price of memory, and the pricing after that.

        The result is None if the limit binds no longer, or the plan costs more than ``enough``.
        """
        model, evaluator = fitter.model, fitter.evaluator
        known, free = (repair_for_pins(model, evaluator, plan.rows) for plan in (self.fit.plan, self.fit.free))
        if fitter.peak(free).bytes <= self.limit:
            return None, pricing
        fit = fitter.resume(known, free, self.limit, pricing)
        peak = fitter.peak(fit.plan)
        if peak.bytes > self.limit or fit.plan.cost > enough:
            return None, fit.pricing
        bound = FreeBound(search=lambda _: quick_bound(model, free))
        return SearchResult(model, fitter, fit, peak, bound), fit.pricing

    def _search_again(self, fitter: MemoryFitter, pricing: Pricing) -> "SearchResult":
        """Returns the best plan found from this one, first whatever its memory, then within the limit."""
        fitter = fitter.with_networks()
        found = search(fitter.model, lambda _: False, fitter.networks, self.fit.plan.rows, fitter.evaluator)
        fit = fitter.fit(found.plan, self.limit, pricing)
        if fit.is_constrained:
            is_small = len(fitter.model.nodes) <= fitter.model.limits.solve_small_nodes
            fit = fitter.prove(fitter.improve(fitter.bisect(fit)) if is_small else fitter.adopt(fit))
        bound = FreeBound(search=found.lower_bound)
        return SearchResult(fitter.model, fitter, fit, fitter.peak(fit.plan), bound)

    def _bytes(self, plan: CostedPlan) -> int:
        return self.fitter.peak(plan).bytes


class UnsharedSearch(NamedTuple):
    """The search where collectives pay the latencies that they share with no others.

    Args:
      tried: its plan, and those of the rounds that chose these latencies, whatever their memory.
    """

    search: SearchResult
    tried: tuple[Assignment, ...]


def _proves_no_warm_start(model: Model) -> bool:
    """Whether plans that only warm-start other searches stay unproved: those of small steps are proved at once."""
    return model.limits.worth_gap > 0 and len(model.nodes) > model.limits.buckets_proved_nodes


def _may_use_buckets(fitter: MemoryFitter, plan: CostedPlan) -> bool:
    """Returns whether a plan waits for latencies of small collectives, or repeats work to avoid them.

    A plan without buckets repeats no more work than it takes to send all collectives one by one. So where it could
    save little by dividing all work evenly, buckets do not change how it is divided.
    """
    model = fitter.model
    program, mesh, limits = model.problem.program, model.mesh, model.limits
    if program.pipeline or mesh.size == 1:
        return False
    plain = _moves(model, fitter.pins, plan)
    worth = limits.buckets_worth * plain.seconds
    if most_savings(program.graph, plain, limits.buckets_least) > worth:
        return True
    if len(model.nodes) > limits.solve_small_nodes:
        return False
    nodes, _ = fitter.evaluator.breakdown(plan.rows)
    repeated = model.scale.seconds(float(nodes.sum())) - least_seconds(program, mesh)
    return repeated - least_latency(mesh) > worth


# ---- Entry point -----------------------------------------------------------------------------------------------------


@gc_paused
def solve(
    program: TracedProgram,
    mesh: Mesh,
    pins: Pins,
    memory: float | None = None,
    deadline: Deadline | None = None,
    limits: SearchLimits = DEFAULT_LIMITS,
) -> SearchResult:
    """Returns a good plan of a program within the memory limit: stages 1 to 3.

    Of several programs (padded in different ways, say) only the best one is worth the other stages:

        with worker_pool() as submit:
            best = solve(program, mesh, pins).polish(submit)
            solution = best.solution()  # certified

    Args:
      memory: limit in bytes per device; None takes the topology's memory.
      deadline: after which improvements are skipped.

    Raises:
      PinError: if no assignment satisfies the pins.
      MemoryLimitError: if no plan within the limit is found.
    """
    limit = mesh.topology.memory if memory is None else memory
    model = Model(make_problem(program, mesh, pins), deadline, limits)
    fitter = MemoryFitter(model, pins, joint_networks(model))
    is_small = len(model.nodes) <= limits.solve_small_nodes

    def is_worth_rounds(plan: CostedPlan) -> bool:
        return is_small or fitter.peak(plan).bytes <= limit

    @cache
    def is_warm_start(plan: CostedPlan) -> bool:
        return _proves_no_warm_start(model) and _may_use_buckets(fitter, plan)

    found = search(model, is_worth_rounds, fitter.networks, None, fitter.evaluator, is_warm_start)
    fit = fitter.fit(found.plan, limit)
    return SearchResult(model, fitter, fit, fitter.peak(fit.plan), FreeBound(search=found.lower_bound))


def solution_of(model: Model, pins: Pins, plan: CostedPlan, peak: Peak) -> Solution:
    """Returns a plan, with its peak, as a solution whose lower bound is 0."""
    return _with_rows(model, pins, plan, _with_peak(_moves(model, pins, plan), peak))


def _with_peak(solution: Solution, peak: Peak) -> Solution:
    return replace(solution, peak=peak.bytes, peak_op=peak.op.id if peak.op else -1, held=peak.bytes_by_value())


def _moves(model: Model, pins: Pins, plan: CostedPlan) -> Solution:
    """Returns what a plan moves, and its seconds: a solution without rows, notes and memory."""
    own, uses = layouts_of(model, plan.rows)
    seconds = model.scale.seconds(plan.cost - exact_surcharge(model, plan.rows))
    found = Solution(model.mesh, {}, own, uses, trees_of(model, plan), seconds, lower_bound=0.0, peak=0, peak_op=-1)
    return sent_in_full(found, model.problem.exact)


def _with_rows(model: Model, pins: Pins, plan: CostedPlan, moves: Solution) -> Solution:
    """Returns the solution of a plan, given what it moves."""
    problem = model.problem
    stacks = [stack for stack in split_stacks(problem.program, pins, problem.mesh) if stack.stays_split(moves.trees)]
    return replace(moves, rows=rows_by_op(model, plan.rows), notes=tuple(dict.fromkeys(map(str, stacks))))
