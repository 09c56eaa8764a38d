"""Every tuning constant of the planner in one place, as or-tools keeps its own in ``sat_parameters.proto``.

A limit says how much work a stage may spend, or from which size on it takes another way. None changes what a plan
means: with other limits the planner finds another plan or proves another bound, and both stay valid. Work is counted
in table entries, passes and nodes, never in seconds, so that equal limits give equal plans on every machine.

    from dataclasses import replace
    solve(program, mesh, pins, limits=replace(SearchLimits(), memory_rounds=2))

Each field has its unit in the comment: entries (of cost tables), bytes, nodes (variables of the problem), states,
passes (of messages over a network), rounds, or none for a ratio. Fields are named by the stage that reads them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchLimits:
    """What each stage of ``meshdsl.planner.solve`` may spend; see the module's docstring."""

    # ---- solve: which stages run ---------------------------------------------------------------------------------

    # ---- costs: op tables and resharding costs -------------------------------------------------------------------

    # ---- problem: variables, repeated layers ---------------------------------------------------------------------

    # ---- mrf: elimination, message passing -----------------------------------------------------------------------

    # ---- encoding: networks, hubs, fan-out, Steiner variables, blocks --------------------------------------------

    # ---- bounds: certificate, tightening -------------------------------------------------------------------------

    # ---- search: descent over axes, large-neighbourhood search ---------------------------------------------------

    # ---- memory: prices, crossover, branch and bound, dual bound -------------------------------------------------

    # ---- liveness ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContestLimits:
    """What each stage of ``meshdsl.planner.contest`` may spend."""


DEFAULT_LIMITS = SearchLimits()
