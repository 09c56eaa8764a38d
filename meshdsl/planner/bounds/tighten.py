"""How far a bound is raised: by as much message passing, pruning and rebuilding as is affordable and helps.

Work is counted in table entries, not in seconds: the same problem gives the same plan on every machine. A deadline only
skips work. Three ways, from cheap to expensive:

* ``raise_bound`` passes messages in stages of doubling length, and eliminates what is small in the end.
* ``rebuild_and_raise`` does so on networks that give exact trees to values which the decoded plan shows as underpaid.
* ``PruningRounds`` rebuild the network from the remaining states. Fewer states make the exact trees of more values
  affordable, so that the next round sees more. Where all are exact and few states remain, the incumbent is proved.
"""

import logging
from collections.abc import Callable
from itertools import chain, repeat
from math import inf

from meshdsl.planner.bounds.certificate import Certificate
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.encoding.projection import projections
from meshdsl.planner.limits import SearchLimits
from meshdsl.planner.objective import CostedPlan, Evaluator
from meshdsl.planner.problem.model import Model
from meshdsl.util.text import seconds_text

log = logging.getLogger("meshdsl.progress")  # plan and bound as they meet, at level DEBUG

# ---- Messages in stages ----------------------------------------------------------------------------------------------


def raise_bound(
    certificate: Certificate, evaluator: Evaluator | None = None, most: int | None = None, prune: bool = False
) -> float:
    """Raises a bound by messages, and returns it.

    Args:
      evaluator: see ``Certificate.tighten``.
      most: passes; by default ``bounds_passes_most``.
      prune: prune states on the way, because rounds follow; otherwise only where that is cheap.
    """
    if certificate.reduced_entries:
        certificate.pass_messages(1)
    limits, clock = certificate.model.limits, certificate.model.deadline
    enough, most = _affordable_passes(certificate, limits.bounds_passes_most if most is None else most, prune)
    passes, done = limits.bounds_passes_first, 0
    while (
        done < most
        and certificate.is_worth_more
        and certificate.gap >= limits.bounds_tight_gap
        and not (certificate.is_exhausted or clock.expired())
    ):
        before, stage = certificate.gap, min(passes, (enough if done < enough else most) - done)
        if prune or certificate.entries <= limits.bounds_prune_entries:
            certificate.tighten(stage)
        else:
            certificate.pass_messages(stage)
        _tell(certificate.model, certificate.best, certificate.bound)
        done, passes = done + stage, 2 * passes
        has_stalled = before - certificate.gap < limits.bounds_stalled_gap
        if has_stalled or (done >= enough and certificate.gap > limits.bounds_progress * before):
            break
    if certificate.is_worth_more and certificate.gap >= limits.bounds_wide_gap and not clock.expired():
        if certificate.entries < limits.bounds_eliminate_entries:
            certificate.eliminate_rest(limits.bounds_eliminate_cap, evaluator)
        elif certificate.entries < limits.bounds_split_entries:
            certificate.eliminate_rest(limits.bounds_split_cap, evaluator)
    return certificate.bound


def _affordable_passes(certificate: Certificate, most: int, prune: bool) -> tuple[int, int]:
    """Returns the passes that are affordable in any case, and those that are if the last ones have helped."""
    limits, entries = certificate.model.limits, max(1, certificate.entries)
    if certificate.reduced_entries and entries > (
        limits.bounds_whole_pass_entries if prune else limits.bounds_prune_entries
    ):
        return 0, 0  # beyond those of the reduced step they hardly help
    enough = min(most, affordable_passes(entries, limits))
    return enough, max(enough, min(most, limits.bounds_message_work_most // entries))


def affordable_passes(entries: int, limits: SearchLimits) -> int:
    """Returns the passes of messages over a network of so many entries, whether they help or not."""
    return max(
        limits.bounds_passes_least, min(limits.bounds_passes_most, limits.bounds_message_work // max(1, entries))
    )


def _tell(model: Model, best: CostedPlan, bound: float) -> None:
    """Logs how near the incumbent and a bound are."""
    if log.isEnabledFor(logging.DEBUG):
        plan, least = model.scale.seconds(best.cost), model.scale.seconds(bound)
        log.debug("plan %s, bound %s", seconds_text(plan), seconds_text(least))


# ---- Rebuilding ------------------------------------------------------------------------------------------------------


def rebuild_and_raise(certificate: Certificate, most: int | None = None, enough: float | None = None) -> Certificate:
    """Returns a certificate that proves more than one that was raised, if much is open, or that one.

    Networks are rebuilt as long as that helps. In each, the values that are underpaid in the decoded plan get larger
    trees.

    Args:
      most: passes of messages over each network.
      enough: gap that needs no more; by default ``bounds_open_gap``.
    """
    model, limits = certificate.model, certificate.model.limits
    enough = limits.bounds_open_gap if enough is None else enough
    for _ in range(limits.bounds_rebuilds):
        if certificate.gap <= enough or not certificate.is_worth_more:
            break
        if model.deadline.expired() or not is_light(certificate):
            break
        before, trees = certificate, limits.bounds_first_tree_entries
        certificate = Certificate(before.builder, before.best, trees, before.underpaid, before.work, before.enough)
        raise_bound(certificate, most=most)
        certificate.bound = max(certificate.bound, before.bound)
        if certificate.gap > limits.bounds_progress * before.gap:
            break
    return certificate


def is_light(certificate: Certificate) -> bool:
    """Whether messages over the network, or over that of a reduced step, are affordable."""
    return (certificate.reduced_entries or certificate.entries) <= certificate.model.limits.bounds_light_entries


# ---- Rounds of pruning -----------------------------------------------------------------------------------------------


class PruningRounds:
    """Rounds that prune states and rebuild the network from the remaining ones, within a budget of work.

    Args:
      evaluator: if given, decoded plans are tried as incumbents.
      work: table entries that may be touched.

    Attributes:
      certificate: of the latest round.
      work: what is left of the budget.
    """

    def __init__(self, certificate: Certificate, evaluator: Evaluator | None, work: int) -> None:
        self.certificate, self.work = certificate, work
        self._evaluator, self._limits = evaluator, certificate.model.limits
        self._proved = certificate.bound  # by networks before this one

    def tighten(self, least: int) -> None:
        """Tightens the present network until that helps no more, and eliminates it if it is small.

        Args:
          least: passes per stage that are made whether they help or not.
        """
        certificate, stages = self.certificate, self._limits.bounds_passes
        small = self._limits.bounds_eliminate_entries
        for i, passes in enumerate(chain(stages, repeat(stages[-1]))):
            gap, states = certificate.gap, certificate.states
            self.work -= certificate.tightening_work(passes)
            if not self._is_worth_more or certificate.model.deadline.expired():
                return
            certificate.tighten(passes, self._evaluator)
            _tell(certificate.model, certificate.best, max(certificate.bound, self._proved))
            is_done = certificate.entries < small and i >= len(stages)
            if is_done or (passes >= least and not self._has_helped(gap, states)):
                break
        if certificate.is_worth_more and certificate.entries < small:
            certificate.eliminate_rest(self._limits.bounds_eliminate_cap, self._evaluator)

    def run(self) -> None:
        """Rebuilds and tightens, as long as that helps."""
        gap, states = 1.0, self.certificate.states + 1
        while self._is_worth_more and self._has_helped(gap, states):
            if self.certificate.model.deadline.expired():
                break
            last, gap, states = self.certificate, self.certificate.gap, self.certificate.states
            self._proved = last.bound
            builder, trees = NetworkBuilder(last.model, last.remaining), self._limits.bounds_round_tree_entries
            self.certificate = Certificate(builder, last.best, trees, last.underpaid, last.work, last.enough)
            self.tighten(self._limits.bounds_passes[1])
            self.certificate.bound = max(self.certificate.bound, last.bound)

    @property
    def _is_worth_more(self) -> bool:
        """Whether the gap is worth more passes: a small one, of a large network, only the first part of the budget."""
        certificate, limits = self.certificate, self._limits
        is_cheap = certificate.gap > limits.bounds_small_gap or certificate.entries <= limits.bounds_quick_entries
        return certificate.is_worth_more and self.work > (0 if is_cheap else limits.bounds_small_gap_reserve)

    def _has_helped(self, gap: float, states: int) -> bool:
        """Whether the gap or the number of states has fallen enough."""
        ratio = self._limits.bounds_round_progress
        return self.certificate.gap < ratio * gap or self.certificate.states < ratio * states


def tighten_without_search(certificate: Certificate, most: int) -> Certificate:
    """Returns a certificate that proves more, by rounds that look for no plan.

    Args:
      most: entries that may be touched, where the network is large.
    """
    limits = certificate.model.limits
    work = limits.bounds_lifting_work if certificate.entries <= limits.bounds_quick_entries else most
    rounds = PruningRounds(certificate, None, work)
    rounds.tighten(limits.bounds_passes[1])
    rounds.run()
    return rounds.certificate


# ---- Whole bounds ----------------------------------------------------------------------------------------------------


class RisingBound:
    """A bound on the cost of every plan that is raised when it is asked for, in steps from cheap to expensive.

    Args:
      steps: each computes a bound, given the cost from which on a higher one is of no use, and may be dropped then.
      known: a bound to begin with.
    """

    def __init__(self, *steps: Callable[[float], float], known: float = 0.0) -> None:
        self._steps, self._bound = list(steps), known

    def at_least(self, enough: float = inf, useful: float = inf) -> float:
        """Returns the bound after the first step that reaches ``enough``, else after all of them.

        Args:
          useful: cost from which on a higher bound is of no use, now or later.
        """
        while self._steps and self._bound < enough:
            self._bound = max(self._bound, self._steps.pop(0)(useful))
        return self._bound


def bound_jointly(builder: NetworkBuilder, best: CostedPlan, most: int, rebuild: bool, enough: float = inf) -> float:
    """Returns the bound of the joint networks of a model, which may have been built a while ago.

    Args:
      most: passes of messages.
      rebuild: rebuild the network where much is open.
      enough: cost from which on a higher bound is of no use.
    """
    certificate = Certificate(builder, best, builder.model.limits.bounds_first_tree_entries, enough=enough)
    raise_bound(certificate, most=most)
    return (rebuild_and_raise(certificate, most) if rebuild else certificate).bound


def bound_on_many_axes(model: Model, best: CostedPlan, quick: bool, enough: float = inf) -> float:
    """Returns a bound where the states of all mesh axes together are too many for a search.

    It is that of projections on pairs of axes (``projection``) if it is to be ``quick``, or if the joint network is too
    large.

    Args:
      enough: cost from which on a higher bound is of no use.
    """
    limits = model.limits
    if not quick and has_few_layouts(model) and not model.deadline.expired():
        certificate = Certificate(NetworkBuilder(model), best, limits.bounds_first_tree_entries, enough=enough)
        if is_light(certificate):
            raise_bound(certificate, prune=True)
            return rebuild_and_raise(certificate, enough=limits.bounds_wide_gap).bound
    return sum(raise_bound(Certificate(NetworkBuilder(each.model), each.plan(best))) for each in projections(model))


def bound_on_axes_apart(model: Model, best: CostedPlan, enough: float = inf) -> float:
    """Returns the bound of projections on pairs of mesh axes, with as much work as is worth it before all others.

    It is good where communication costs much less than compute, or where it costs bytes rather than latencies.

    Args:
      enough: cost from which on a higher bound is of no use.
    """
    limits, bound = model.limits, 0.0
    parts = [Certificate(NetworkBuilder(each.model), each.plan(best)) for each in projections(model)]
    enough = min(enough, (1 - limits.worth_gap) * best.cost)
    for stage, passes in enumerate(limits.bounds_apart_passes):
        for part in parts:
            part.tighten(passes)
        before, bound = bound, sum(part.bound for part in parts)
        _tell(model, best, bound)
        expected = limits.bounds_apart_rise * (bound - before)
        if bound >= enough or (stage and bound + expected < enough):
            break
    return bound


def bound_in_rounds(model: Model, best: CostedPlan, enough: float = inf) -> float:
    """Returns the bound of the joint network of all mesh axes, raised in rounds that look for no plan.

    Args:
      enough: cost from which on a higher bound is of no use.
    """
    certificate = Certificate(NetworkBuilder(model), best, model.limits.bounds_first_tree_entries, enough=enough)
    raise_bound(certificate, prune=True)
    return tighten_without_search(certificate, model.limits.bounds_closing_work).bound


def has_few_layouts(model: Model) -> bool:
    """Whether all mesh axes may be encoded jointly for a bound."""
    pairs = sum(distances.feasible.size**2 for distances in model.reshard_costs.distinct)
    return pairs <= model.limits.bounds_layout_pairs
