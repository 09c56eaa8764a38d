"""The passes from graph to graph that remove what would only confuse the planner, in order.

XLA does most of these rewrites itself. The planner has to do them first, since a plan is promised to be what runs: a
collective on a value that XLA removes, merges or moves out of a loop would be counted wrongly. Others (``rolls``,
``permutations``, ``align_shifts``) turn patterns that no device split survives into operations that have a rule.

    pass                          file              why at this position
    ------------------------------------------------------------------------------------------------------------------
    remove_identities             canonicalize      first: identities hide the patterns and equal expressions below
    mask_to_select                canonicalize      before loops are left: XLA sees products with masks inside them
    find_rolls                    rolls             before shifts: a roll is the better form where both match
    find_permutations             permutations      after rolls; before cse, which is to see equal permutations
    fold_pads                     fold_pads         before shifts, which look at single pads and slices
    align_shifts                  align_shifts      before dce: the three leave slices without uses
    fold_broadcast_slices         canonicalize      after shifts, which cut elements out of broadcasts
    materialize_empty             canonicalize      before dce, which then drops the producers of empty arrays
    invariant_carries_to_consts   loop_invariants   before dce: consts without uses go, carries would stay alive
    dce                           dce               what is the same in every iteration shows once dead code is gone
    hoist_invariants              loop_invariants   before inlining: it leaves bodies that are invariant as a whole
    inline_single_trip_loops      loop_invariants   before cse: operations of an inlined body meet equal ones outside
    cse                           cse               merges equal expressions, which leaves conditions without uses
    dce                           dce               drops these
    split_partial_casts           duplicate         after cse, which would merge the copies again
    clone_cheap_constants         duplicate         last, for the same reason

Reference for the general scheme: Muchnick, Advanced Compiler Design and Implementation (1997), chapters 12, 13 and 18.
"""

from collections.abc import Callable

from meshdsl.ir.graph import Graph
from meshdsl.trace.passes.align_shifts import align_shifts
from meshdsl.trace.passes.canonicalize import (
    fold_broadcast_slices,
    mask_to_select,
    materialize_empty,
    remove_identities,
)
from meshdsl.trace.passes.cse import cse
from meshdsl.trace.passes.dce import dce
from meshdsl.trace.passes.duplicate import clone_cheap_constants, split_partial_casts
from meshdsl.trace.passes.fold_pads import fold_pads
from meshdsl.trace.passes.loop_invariants import hoist_invariants, inline_single_trip_loops, invariant_carries_to_consts
from meshdsl.trace.passes.permutations import find_permutations
from meshdsl.trace.passes.rolls import find_rolls

Pass = Callable[[Graph], Graph]

PASSES: tuple[Pass, ...] = (
    remove_identities,
    mask_to_select,
    find_rolls,
    find_permutations,
    fold_pads,
    align_shifts,
    fold_broadcast_slices,
    materialize_empty,
    invariant_carries_to_consts,
    dce,
    hoist_invariants,
    inline_single_trip_loops,
    cse,
    dce,
    split_partial_casts,
    clone_cheap_constants,
)


def run_passes(graph: Graph) -> Graph:
    """Returns the graph after all passes, in order."""
    for run in PASSES:
        graph = run(graph)
    return graph
