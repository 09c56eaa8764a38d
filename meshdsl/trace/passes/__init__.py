"""The passes from graph to graph that remove what would only confuse the planner, in order.

XLA does most of these rewrites itself. The planner has to do them first, since a plan is promised to be what runs: a
collective on a value that XLA removes, merges or moves out of a loop would be counted wrongly. Others (``rolls``,
``permutations``, ``align_shifts``) turn patterns that no device split survives into operations that have a rule.

    pass                          file              why at this position
    ------------------------------------------------------------------------------------------------------------------
    remove_identities             canonicalize      first: identities hide the patterns and equal expressions below
    mask_to_select                canonicalize      before loops are left: XLA sees products with masks inside them
    materialize_constants         canonicalize      before slices are pushed through sums of nothing, which pads leave
    push_slices                   push_slices       before rolls and pads, whose slices it leaves
    find_rolls                    rolls             before shifts: a roll is the better form where both match
    find_permutations             permutations      after rolls; before cse, which is to see equal permutations
    fold_pads                     fold_pads         before shifts, which look at single pads and slices
    scale_after_shifts            share_halos       before shifts, which it makes those of one array
    static_windows                static_windows    before shifts, which look at slices and windows without strides
    align_shifts                  align_shifts      before dce: all of these leave slices without uses
    join_strides                  static_windows    after shifts, which uses the two halves where it can
    sum_shifts                    sum_shifts        after shifts, which it adds up
    fold_broadcast_slices         canonicalize      after shifts, which cut elements out of broadcasts
    invariant_carries_to_consts   loop_invariants   before dce: consts without uses go, carries would stay alive
    dce                           dce               what is the same in every iteration shows once dead code is gone
    hoist_invariants              loop_invariants   before inlining: it leaves bodies that are invariant as a whole
    inline_single_trip_loops      loop_invariants   before cse: operations of an inlined body meet equal ones outside
    fold_known_choices            known_choices     after inlining; before cse, which it leaves operations without uses
    cse                           cse               merges equal expressions, which leaves conditions without uses
    dce                           dce               drops these
    share_halos                   share_halos       after cse, which merges equal shifts
    dce                           dce               drops rolls that only rolls of them read
    split_partial_casts           duplicate         after cse, which would merge the copies again
    clone_cheap_constants         duplicate         last, for the same reason

Reference for the general scheme: Muchnick, Advanced Compiler Design and Implementation (1997), chapters 12, 13 and 18.
"""

from collections.abc import Callable
from functools import partial

from meshdsl.ir.graph import Graph
from meshdsl.layouts.roundness import Roundness
from meshdsl.trace.passes.align_shifts import align_shifts
from meshdsl.trace.passes.canonicalize import (
    fold_broadcast_slices,
    mask_to_select,
    materialize_constants,
    remove_identities,
)
from meshdsl.trace.passes.cse import cse
from meshdsl.trace.passes.dce import dce
from meshdsl.trace.passes.duplicate import clone_cheap_constants, split_partial_casts
from meshdsl.trace.passes.fold_pads import fold_pads
from meshdsl.trace.passes.known_choices import fold_known_choices
from meshdsl.trace.passes.loop_invariants import hoist_invariants, inline_single_trip_loops, invariant_carries_to_consts
from meshdsl.trace.passes.permutations import find_permutations
from meshdsl.trace.passes.push_slices import push_slices
from meshdsl.trace.passes.rolls import find_rolls
from meshdsl.trace.passes.share_halos import scale_after_shifts, share_halos
from meshdsl.trace.passes.static_windows import join_strides, static_windows
from meshdsl.trace.passes.sum_shifts import sum_shifts

Pass = Callable[[Graph], Graph]


def passes(roundness: Roundness) -> tuple[Pass, ...]:
    """Returns the passes, in order; ``roundness`` says which lengths the mesh divides."""
    return (
        remove_identities,
        mask_to_select,
        materialize_constants,
        partial(push_slices, roundness=roundness),
        find_rolls,
        find_permutations,
        fold_pads,
        scale_after_shifts,
        static_windows,
        partial(align_shifts, roundness=roundness),
        join_strides,
        sum_shifts,
        fold_broadcast_slices,
        invariant_carries_to_consts,
        dce,
        hoist_invariants,
        inline_single_trip_loops,
        fold_known_choices,
        cse,
        dce,
        share_halos,
        dce,
        split_partial_casts,
        clone_cheap_constants,
    )


def run_passes(graph: Graph, roundness: Roundness) -> Graph:
    """Returns the graph after all passes."""
    for run in passes(roundness):
        graph = run(graph)
    return graph
