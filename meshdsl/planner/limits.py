"""Every tuning constant of the planner in one place, as or-tools keeps its own in ``sat_parameters.proto``.

A limit bounds the work of a stage, or is the size from which on a stage uses another method. None changes the meaning
of a plan: with other limits the planner finds another plan or proves another bound, and both stay valid. Work is
counted in table entries, passes and nodes, never in seconds, so that equal limits give equal plans on every machine.

    from dataclasses import replace
    solve(program, mesh, pins, limits=replace(SearchLimits(), memory_rounds=2))

The first word of a field is the stage that reads it, as ``model.limits``. The comment gives the unit (entries of cost
tables, nodes, states, passes of messages over a network, rounds; a part or a ratio has none) and the meaning.

Not here, but beside the code that they belong to: random seeds, and tolerances for the rounding of floats.
"""

from dataclasses import dataclass
from math import inf

PROVE = "prove"  # the effort that ends only where bound and plan meet, or more work does not help


@dataclass(frozen=True)
class SearchLimits:
    """The limits of all stages of ``meshdsl.planner.solve``, with defaults tuned on the plans of ``bench``."""

    # ---- solve: which stages run ---------------------------------------------------------------------------------

    solve_small_nodes: int = 600  # nodes up to which plans over the limit get rounds, and changed pins a search
    solve_variant_operations: int = 20_000  # operations; padding for several axes is tried on steps of fewer
    solve_variant_worth: float = 0.0  # part of a plan's seconds that padding must promise to save to be tried
    solve_replan_cost: float = 1e-2  # part of a plan's cost that refined pins may add for its bound to be good enough

    effort: str = PROVE  # name of the preset (``EFFORTS``) that these limits are, or are like

    # ---- worth: when planning ends although bound and plan have not met (see ``tolerated_gap``) --------------------

    worth_gap: float = 0.0  # relative gap that is not worth more work; 0 to go on as long as the other limits allow
    worth_work: int = 1  # entries that are touched before all of that gap is tolerated

    # ---- buckets: small collectives that are sent as one -----------------------------------------------------------

    buckets_least: int = 2  # collectives from which on a bucket is made
    buckets_latencies: tuple[float, ...] = (0.0, 0.05, 0.1, 0.25, 0.5)  # parts of latencies that are paid in searches
    buckets_sums: float = 0.05  # part of their latency that all-reduces pay where no other collectives share theirs
    buckets_proved_nodes: int = 200  # nodes up to which plans are proved though buckets replace them
    buckets_postponed: int = 32  # reductions that are postponed one by one, where all together cost more
    buckets_rounds: int = 12  # rounds that choose the latencies which count in a bound on plans with buckets ...
    buckets_patience: int = 2  # ... rounds in a row that do not help ...
    buckets_rise: float = 1e-3  # ... which is to raise the cheapest plan by this part
    buckets_worth: float = 1e-3  # part of the step's seconds that all buckets must save
    buckets_latency_worth: float = 0.0  # part of the open gap that one latency must close for a proof without buckets

    # ---- costs: op tables and resharding costs -------------------------------------------------------------------

    costs_exact_targets: int = 6  # layouts that a value is resharded to, up to which its tree is exact

    # ---- problem: variables, repeated layers ---------------------------------------------------------------------

    problem_layers_least: int = 4  # equal layers that are worth recognising, and repetitions of a run
    problem_layers_ends: int = 2  # layers that may differ from the others: the first and the last
    problem_layers_periods: int = 200  # periods that are tried, the most frequent first

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
    bounds_apart_passes: tuple[int, ...] = (4, 8, 16, 32)  # passes of the stages of the early bound of many mesh axes
    bounds_apart_rise: float = 3.0  # what later stages raise it by at most, in rises of the last one
    bounds_small_gap: float = 1e-4  # relative gap of a larger network that is not worth all of the work ...
    bounds_small_gap_reserve: int = 48_000_000_000  # ... but only as long as more entries than these are left

    # ---- search: descent over axes, large-neighbourhood search ---------------------------------------------------

    search_joint_pairs: int = 2_000_000  # pairs of layouts, over all values, up to which all axes are searched jointly
    search_joint_pairs_once: int = 50_000_000  # the same for encoding them once, for rounds and bound
    search_rounds_entries: int = 2_000_000  # entries of a network of plans up to which the gap is closed in rounds
    search_rounds_nodes: int = 2_000  # nodes up to which it is in any case
    search_near_entries: int = 2_000_000  # the same in a neighbourhood of mesh axes, where entries alone count
    search_pairs_worth: float = 0.0  # part of the cost that axes in two groups must save over one for pairs to move
    search_quick_pairs: bool = True  # whether they do in a search from a known plan; otherwise all move in two groups
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

    memory_rounds: int = 14  # prices that are tried until a plan fits, for each way to price waiting values
    memory_idle_prices: int = 3  # prices in a row at which no plan is smaller, from which on none seems to fit ...
    memory_hopeless: float = 1.25  # ... where the smallest takes this part of the limit
    memory_price_factor: float = 3.0  # ratio of one price to the last
    memory_price_negligible: float = 100.0  # ratio of the first price to one that is as good as none
    memory_plans_per_price: int = 2  # plans at one price whose peaks were not priced yet, before the price rises
    memory_priced_nodes: int = (
        20_000  # nodes below which both ways to price waiting values are tried; of all bisections
    )
    memory_bisections: int = 6  # prices between one at which a plan fits and one at which none does ...
    memory_bisections_least: int = 1  # ... and as many in any case if no lower price was tried
    memory_gap_small: float = 2e-3  # part of the cost without a limit; plans this near to another are left as they are
    memory_gap_wide: float = 5e-2  # a plan that costs more gets another price and a neighbourhood search ...
    memory_gap_wide_many_axes: float = 1e-2  # ... the latter from here on where mesh axes are not searched jointly
    memory_donors: int = 3  # plans over the limit whose parts are adopted
    memory_lns_price: float = 0.25  # part of the price at which plans fit, for neighbourhood search
    memory_lns_samples: int = 24  # neighbourhoods ...
    memory_lns_samples_per_group: int = 8  # ... and per group of mesh axes where these are not searched jointly
    memory_lns_nodes: int = 40_000  # nodes of all neighbourhoods together
    memory_mesh_doublings: int = 4  # larger meshes that an error about memory reports on ...
    memory_mesh_plans: int = 2  # ... with as many plans on each
    memory_advises_checkpoint: bool = True  # such an error names jax.checkpoint; not where the planner recomputes
    memory_waiting_values: int = 10_000  # values that wait for a consumer which the lower bound on memory counts
    memory_part_share: float = 0.5  # part of all nodes; a larger part of a difference of plans is divided by layer
    memory_part_nodes: int = 8  # nodes that half of a part must have to be adopted by itself
    memory_part_worth: float = 1e-4  # part of a plan's cost that a part must save for that
    memory_crossover_nodes: int = 50_000  # nodes of all plans together that adopt halves of parts
    memory_crossover_failures: int = 3  # halves in a row that exceed the limit, before the others are halved untried
    memory_knapsack_rounds: int = 8  # knapsacks that are solved, each with the points that the last plan has exceeded
    memory_knapsack_patience: int = 4  # rounds after which every point gets less room
    memory_knapsack_items: int = 100  # items up to which a knapsack is solved as an integer program
    memory_reserve: float = 2e-3  # part of the limit that is reserved for points that are no constraints ...
    memory_reserve_parts: int = 100  # ... if a difference has more parts
    memory_branch_nodes: int = 150  # nodes up to which branch and bound is affordable
    memory_branch_boxes: int = 5_000  # boxes times nodes
    memory_branch_boxes_smallest: int = 10_000  # the same if no plan was found that fits
    memory_branch_entries: int = 200_000_000  # entries of the networks of all boxes together
    memory_branch_price_step: float = 1.5  # ratio of prices at which boxes are solved
    memory_branch_price: float = 8.0  # price that finds small plans: seconds of a plan per limit
    memory_box_table_entries: int = 1 << 16  # entries of the largest table when a box is solved
    memory_dual_nodes: int = 8_000  # nodes up to which the dual bound tries several prices ...
    memory_dual_steps: int = 4  # ... and how many more, where mesh axes are searched jointly
    memory_dual_rise: float = 1e-3  # part of the bound; a gap or rise below is not worth another price or network
    memory_dual_price_step: float = 1.15  # ratio of prices where known plans suggest none
    memory_dual_price_apart: float = 2e-2  # part of a price by which another one is known to give nearly its bound
    memory_dual_price_tolerance: float = 0.1  # the same for a bound that was started before all plans were known
    memory_dual_worth: float = 2e-3  # part of a plan's cost that the dual bound of a large step must promise to add
    memory_dual_entries: int = 2_000_000  # entries of a network that goes through rounds ...
    memory_dual_entries_small: int = 200_000_000  # ... and of one of a small step
    memory_dual_work: int = 18_000_000_000  # entries that rounds may touch at a price ...
    memory_dual_work_last: int = 48_000_000_000  # ... and at the last one

    # ---- liveness ------------------------------------------------------------------------------------------------

    liveness_points: int = 24  # program points over the limit that crossover of plans considers ...
    liveness_spacing: int = 48  # ... so many parts of the step or more apart

    def tolerated_gap(self, work: int) -> float:
        """Returns the relative gap that is not worth more work, after so many entries were touched.

        A step runs for as long as training takes, however short it is, so what a gap may cost is relative as well. What
        is cheap to prove is proved: the gap that is tolerated grows with the work that was spent, up to ``worth_gap``.
        """
        return self.worth_gap * min(1.0, work / self.worth_work)


@dataclass(frozen=True)
class ContestLimits:
    """What each stage of ``meshdsl.planner.contest.solve`` may spend.

    Unlike the planner's stages, the contest's are limited by wall time: parts of the seconds left when a stage begins.
    """

    # ---- solve: how the time is divided --------------------------------------------------------------------------

    answer_time: float = 0.05  # part of all seconds that is reserved for returning the answer
    price_time: float = 0.2  # part of the seconds left that a round may spend on prices
    search_time: float = 0.35  # part of the seconds left that a round may spend on local search, twice
    restart_time: float = 0.4  # part of the seconds left for searches from random prices, on small cores
    restart_variables: int = 1_000  # variables of the largest core that gets them
    mip_time: float = 0.2  # part of the seconds left for one mixed-integer program
    price_patience: int = 400  # price steps without a better bound
    searches: int = 3  # local searches between two programs
    search_steps: int = 200  # steps of one, beside one per eight variables
    pool: int = 6  # valid choices that are combined
    impossible_cost: float = 4.0  # cost of an impossible combination, in costs of the incumbent

    # ---- presolve ------------------------------------------------------------------------------------------------

    elimination_entries: int = 1 << 14  # entries that the elimination of one variable may touch
    comparison_entries: int = 1 << 22  # entries that comparing all states of a variable may touch

    # ---- lagrangian: prices and bound ----------------------------------------------------------------------------

    bound_passes: int = 8  # passes at the best prices, since the last steps may have led messages elsewhere
    first_passes: int = 50  # passes before prices move
    step_patience: int = 20  # price steps without a better bound before steps get shorter
    step_shrink: float = 0.7  # factor by which they do
    bound_progress: float = 1e-6  # relative rise that counts as a better bound
    expected_rise: float = 0.1  # relative rise of the bound that a step of full length aims at, at most

    # ---- local search over forests -------------------------------------------------------------------------------

    forest_tries: int = 6  # price rises for one forest
    price_factor: float = 1.5  # by which the price of an overfull point rises ...
    price_extra: float = 0.01  # ... beside this part of all prices
    price_decay: float = 0.98  # factor of prices where there is room
    price_learning: float = 0.1  # part by which the search's prices follow those that made a forest valid
    forest_global: float = 0.3  # part of the forests over all variables; the others are over neighbouring ones
    forest_least: int = 10  # variables of the smallest neighbourhood
    forest_patience: int = 40  # forests without an improvement, beside one per four variables
    forest_disturbed: int = 4  # forests with disturbed costs after that
    forest_noise: tuple[float, float] = (0.1, 30.0)  # disturbance of a state's cost, in average costs of a variable
    forest_worse: float = 0.02  # relative cost above the best up to which the search goes on from where it is

    # ---- local search over narrow graphs -------------------------------------------------------------------------

    wide_log_entries: tuple[int, ...] = (12, 14, 16, 18)  # binary logarithms of the entries of the largest table
    wide_candidates: int = 300  # variables of one move
    wide_noise: tuple[float, ...] = (3.0, 30.0)  # in neighbours: randomness of which variables are fixed
    allowance_tries: int = 500  # allowances that are lowered until all fit
    allowance_near: float = 0.9  # part of the largest usage from which on another state may be preferred to it

    # ---- restarts ------------------------------------------------------------------------------------------------

    restart_passes: int = 20  # passes at each start's prices
    restart_free_steps: int = 10  # moves without a memory limit
    restart_fit_tries: int = 5  # attempts to make a start valid
    restart_patience: int = 16  # moves without an improvement
    restart_trial: int = 20  # moves after which a start is given up ...
    restart_worse: float = 1.5  # ... if it costs so many times the best
    restart_factors: tuple[float, float] = (-1.2, 0.9)  # natural logarithms of factors of prices
    restart_elite: int = 6  # starts that are remembered
    restart_repeat: float = 0.5  # part of the starts that vary a remembered one
    restart_change: float = 0.3  # standard deviation of the logarithm of its prices' factors

    # ---- mip -----------------------------------------------------------------------------------------------------

    mip_pairs: int = 10_000  # pairs of states in the first program, beside one per edge
    mip_rows: int = 8  # time points that get a memory row at a time
    mip_spacing: int = 64  # these rows are at least one part in so many of all points apart
    mip_cost_scale: float = 1e4  # cost of the incumbent in the program's unit
    mip_gap: float = 1e-6  # relative gap at which the program counts as solved


DEFAULT_LIMITS = SearchLimits()
EFFORTS = {  # how much planning is worth, by the word that users write
    "fast": SearchLimits(
        effort="fast",
        solve_variant_operations=0,
        solve_variant_worth=3e-2,
        worth_gap=3e-2,
        worth_work=30_000_000,
        buckets_latencies=(0.1, 0.25),
        buckets_postponed=4,
        buckets_rounds=1,
        buckets_latency_worth=0.1,
        mrf_prune_worth=0.5,
        bounds_message_work_most=600_000_000,
        bounds_closing_work=600_000_000,
        bounds_small_gap_reserve=0,
        search_near_entries=0,
        search_pairs_worth=inf,
        search_quick_pairs=False,
        search_tie_nodes=0,
        memory_bisections=3,
        memory_dual_steps=1,
        memory_dual_work=600_000_000,
        memory_dual_work_last=600_000_000,
    ),
    "default": SearchLimits(
        effort="default",
        solve_variant_worth=1e-2,
        worth_gap=1e-2,
        worth_work=200_000_000,
        buckets_postponed=8,
        buckets_rounds=2,
        buckets_latency_worth=0.1,
        mrf_prune_worth=0.5,
        bounds_message_work_most=2_000_000_000,
        bounds_closing_work=2_000_000_000,
        bounds_small_gap_reserve=0,
        search_near_entries=0,
        search_pairs_worth=1e-2,
        search_quick_pairs=False,
        memory_dual_work=2_000_000_000,
        memory_dual_work_last=4_000_000_000,
    ),
    PROVE: DEFAULT_LIMITS,
}
DEFAULT_CONTEST_LIMITS = ContestLimits()
