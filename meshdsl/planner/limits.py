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

    bounds_first_tree_entries: int = 1 << 15  # entries of the exact trees of one value, in a first network
    bounds_round_tree_entries: int = 1 << 18  # the same in the networks of rounds
    bounds_reduction_entries: int = 1 << 20  # entries that the elimination of one variable may touch, between passes
    bounds_reparametrize_entries: int = 2_000_000  # entries of a network up to which messages move into its tables
    bounds_reparametrize_passes: int = 100  # passes that take as long as that
    bounds_message_work: int = 200_000_000  # entries that passes of messages may touch in any case
    bounds_message_work_most: int = 8_000_000_000  # entries that they may touch as long as the last ones have helped
    bounds_passes_first: int = 8  # passes of the first stage; each stage has twice as many as the last one
    bounds_passes_least: int = 64  # passes over a network of any size
    bounds_passes_most: int = 192  # passes over one network
    bounds_tight_gap: float = 2e-3  # relative gap that is not worth more passes outside of rounds
    bounds_stalled_gap: float = 2e-4  # what a stage must take off the relative gap for another one to follow
    bounds_progress: float = 0.9  # ratio of gaps; whatever leaves more of the gap open is not repeated
    bounds_prune_entries: int = 4_000_000  # entries of a network up to which states are pruned though no rounds follow
    bounds_whole_pass_entries: int = 400_000_000  # of a network with a reduced step, up to which all of it gets passes
    bounds_eliminate_entries: int = 50_000  # entries of a network that is eliminated in the end
    bounds_eliminate_cap: int = 1 << 20  # entries of the largest table then
    bounds_split_entries: int = 1_000_000  # entries of a network that is eliminated in the end in smaller tables
    bounds_split_cap: int = 1 << 14  # entries of the largest table then
    bounds_wide_gap: float = 1e-2  # relative gap that is worth more than messages
    bounds_open_gap: float = 5e-3  # relative gap that is worth a search for a better plan, or another network
    bounds_rebuilds: int = 4  # networks that are built in turn because values were underpaid
    bounds_light_entries: int = 1_000_000_000  # entries of a network over which messages are affordable
    bounds_layout_pairs: int = 10_000_000  # pairs of layouts, over all shapes, up to which axes are bounded jointly
    bounds_passes: tuple[int, ...] = (8, 16, 32, 64)  # passes of the stages of a round; the last repeats
    bounds_round_progress: float = 0.95  # ratio of gaps, and of numbers of states, above which rounds end
    bounds_closing_work: int = 64_000_000_000  # entries that all rounds may touch
    bounds_lifting_work: int = 1_000_000_000  # the same for rounds without search, of a network that is quick
    bounds_quick_entries: int = 2_000_000  # entries of such a network
    bounds_small_gap: float = 1e-4  # relative gap of a larger network that is not worth all of the work ...
    bounds_small_gap_reserve: int = 48_000_000_000  # ... but only as long as more entries than these are left

    # ---- search: descent over axes, large-neighbourhood search ---------------------------------------------------

    search_joint_pairs: int = 2_000_000  # pairs of layouts, over all values, up to which all axes are searched jointly
    search_joint_pairs_once: int = 50_000_000  # the same for encoding them once, for rounds and bound
    search_rounds_entries: int = 2_000_000  # entries of a network of plans up to which the gap is closed in rounds
    search_rounds_nodes: int = 2_000  # nodes up to which it is in any case
    search_deep_nodes: int = 20_000  # nodes above which neighbourhoods get no rounds, and fewer sweeps
    search_start_passes: int = 8  # passes between tests of progress
    search_start_patience: int = 2  # tests without progress after which the initial plan is taken
    search_start_rise: float = 1e-4  # part of the cost by which the bound must rise to count as progress
    search_decoded_gap: float = 1e-6  # relative gap of messages that leaves nothing to find by a sweep
    search_deep_gap: float = 5e-2  # the same for steps of more than search_deep_nodes, where messages are far quicker
    search_quick_passes: int = 24  # passes for a search that starts from a known plan
    search_sweep_entries: int = 20_000  # entries of the largest table of a sweep
    search_sweep_rounds: int = 3  # sweeps over all axes
    search_lns_fixed_least: float = 0.05  # part of the variables that a neighbourhood fixes, at least
    search_lns_fixed_most: float = 0.5  # and at most
    search_lns_entries: int = 1 << 20  # entries of the largest table
    search_lns_work: int = 100_000_000  # entries of the networks of all samples together
    search_lns_samples_least: int = 8  # samples in any case
    search_lns_samples: int = 200  # samples at most
    search_lns_patience: int = 40  # samples without an improvement
    search_tie_entries: int = 1 << 16  # entries of the largest table
    search_tie_trials: int = 8  # layouts that are tried to be replaced
    search_tie_nodes: int = 8_000  # nodes of all trials together

    # ---- memory: prices, crossover, branch and bound, dual bound -------------------------------------------------

    # ---- liveness ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContestLimits:
    """What each stage of ``meshdsl.planner.contest`` may spend."""


DEFAULT_LIMITS = SearchLimits()
