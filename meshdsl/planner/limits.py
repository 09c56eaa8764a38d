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

    mrf_float32_entries: int = 1 << 20  # entries of tables from which on bounds read them as float32, rounded down
    mrf_prune_worth: float = 0.9  # ratio of entries; states are not pruned beside messages if more would remain

    # ---- encoding: networks, hubs, fan-out, Steiner variables, blocks --------------------------------------------

    encoding_reduction_entries: int = 1 << 17  # entries that the elimination of one variable may touch
    encoding_hub_stake: float = 1e-3  # part of a plan's cost; values whose costliest reshard is below get one hub only
    encoding_pair_consumers: int = 6  # consumers up to which a value is relaxed to pairs of them
    encoding_tree_entries: int = 1 << 18  # entries of the exact trees of a value that was underpaid once
    encoding_tree_entries_most: int = 1 << 23  # entries of those of a value underpaid twice, or with many consumers
    encoding_tree_entries_total: int = 1 << 26  # entries of those of all underpaid values together
    encoding_underpaid_share: float = 0.9  # part of all underpayment in a plan whose values get larger trees
    encoding_set_layouts: int = 12  # layouts in one set of a subset variable
    encoding_set_splits: int = 1 << 21  # ways to divide all sets of a subset variable in two
    encoding_max_reader_cost: float = 2e-2  # part of a plan's cost from which on reshards of a value are not told apart
    encoding_cost_level: float = 1.01  # ratio of reshard costs below which they are one state of a max-reader variable
    encoding_layers_nodes: int = 8_000  # nodes from which on repeated layers are encoded as blocks
    encoding_layers_kept: int = 3  # layers at either end of a run of equal ones that the reduced step keeps
    encoding_depth_passes_step: int = 4  # passes over the reduced step between tests of convergence
    encoding_depth_passes: int = 16  # passes that are made even if the bound rises little
    encoding_depth_passes_most: int = 96  # passes in all
    encoding_depth_work: int = 2_000_000_000  # entries that passes may touch before the bound must rise by ...
    encoding_depth_rise: float = 5e-4  # ... this part of the plan's cost per test
    encoding_depth_converged: float = 1e-6  # part of the plan's cost below which gap and changes count as none

    # ---- bounds: certificate, tightening -------------------------------------------------------------------------

    # ---- search: descent over axes, large-neighbourhood search ---------------------------------------------------

    # ---- memory: prices, crossover, branch and bound, dual bound -------------------------------------------------

    # ---- liveness ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContestLimits:
    """What each stage of ``meshdsl.planner.contest`` may spend."""


DEFAULT_LIMITS = SearchLimits()
