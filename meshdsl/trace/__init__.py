"""Trace: a step of ordinary JAX becomes the graph that is planned.

    trace(step, args) = arguments -> jaxpr -> graph -> clean-ups -> trips, phases, numbers

1. The arguments are flattened; every array gets the path by which globs name it.
2. ``jax.make_jaxpr`` runs the step once on shapes. Autodiff has happened after that: the
   graph holds the forward pass, the backward pass and the optimizer alike.
3. The jaxpr is read: calls are inlined, loops kept, closed-over arrays made explicit.
4. The clean-ups, each a pass from graph to graph, remove what would only confuse the planner.
5. Every body learns how often it runs, every operation which phase of the step it belongs to.

Nothing here knows about meshes: one trace serves every mesh.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from meshdsl.ir.check import check_graph
from meshdsl.ir.graph import Graph, TracedProgram, walk
from meshdsl.ir.rewrite import renumber
from meshdsl.layouts.axis_rules import Table
from meshdsl.nd.named_array import pinning
from meshdsl.trace import read_jaxpr as calls
from meshdsl.trace import read_jaxpr as loops
from meshdsl.trace.annotate import count_trips, mark_phases
from meshdsl.trace.arguments import Call, check_arrays, check_captured, flatten_call, path_leaves, typed_leaf
from meshdsl.trace.diagnostics import check_opaque, note_constraints, note_lost_changes, translate_trace_errors
from meshdsl.trace.passes.align_shifts import align_shifts
from meshdsl.trace.passes.canonicalize import (
    fold_broadcast_slices,
    mask_to_select,
    materialize_empty,
    remove_identities,
    remove_stages,
)
from meshdsl.trace.passes.cse import cse
from meshdsl.trace.passes.dce import dce
from meshdsl.trace.passes.duplicate import clone_cheap_constants, split_partial_casts
from meshdsl.trace.passes.fold_pads import fold_pads
from meshdsl.trace.passes.loop_invariants import hoist_invariants, inline_single_trip_loops, invariant_carries_to_consts
from meshdsl.trace.passes.rolls import find_rolls
from meshdsl.trace.read_jaxpr import read_jaxpr
from meshdsl.util.runtime import gc_paused

__all__ = ["CLEANUPS", "Call", "flatten_call", "trace"]

READ = (calls, loops)  # importing them registers how calls and loops are read
Pass = Callable[[Graph], Graph]

# Identities first: they hide patterns and equal expressions. Products with masks where XLA sees them, before loops
# are left. Rolls, pads and shifts next: they leave slices unread.
# What is the same in every trip shows once the dead are gone. Merging leaves conditions unread. Copies last: merging
# would undo them.
CLEANUPS: tuple[Pass, ...] = (
    remove_identities,
    mask_to_select,
    find_rolls,
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

_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


@gc_paused
def trace(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] = _NO_KEYWORDS,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    inside: Table | None = None,
    cuts: bool = False,
) -> TracedProgram:
    """The program of one call ``step(*args, **kwargs)``.

    Args:
      args: pytrees of arrays or of ``jax.ShapeDtypeStruct``; only shapes and dtypes are read.
      static_argnums: positions of arguments that are no arrays, as in ``jax.jit``.
      static_argnames: their names; either form covers both ways of passing them.
      inside: layout rules for the named tensors that the step computes.
      cuts: keep ``md.stage``, where a pipeline's stages end.

    Raises:
      TraceError: arguments that are neither arrays nor static; a step that asks for values while it is traced.
    """
    call = flatten_call(step, args, kwargs, static_argnums, static_argnames)
    lost: list[str] = []

    def flat(*leaves: Any) -> Any:
        args, kwargs = call.args(leaves), call.kwargs(leaves)
        result = step(*args, **kwargs)
        arrays = [(each.path, each.array) for each in path_leaves(result)]
        check_arrays(f"{call.name} returns what is no array:", arrays, "return arrays, in any pytree")
        lost.extend(note_lost_changes(call, leaves, (args, kwargs), result))
        return result

    with translate_trace_errors(call.name, call.paths, call.leaves), pinning(inside):
        closed, result = jax.make_jaxpr(flat, return_shape=True)(*call.leaves)
    check_captured(call.name, closed.consts)
    traced = remove_stages(read_jaxpr(closed), cuts)
    check_opaque(call.name, traced)
    graph = finish(clean(traced))
    outputs = tuple(typed_leaf(found.path, found.array, found.dims) for found in path_leaves(result))
    inputs = tuple(map(typed_leaf, call.paths, closed.in_avals, call.dims))
    tree = jax.tree_util.tree_structure(result)
    return TracedProgram(
        graph,
        inputs,
        outputs,
        call.tree,
        tree,
        call.name,
        [*lost, *note_constraints(traced, graph)],
        any(op.name == "sharding_constraint" for _, op in walk(traced)),
    )


def clean(graph: Graph) -> Graph:
    """The graph after every clean-up."""
    for cleanup in CLEANUPS:
        graph = cleanup(graph)
    return graph


def finish(graph: Graph) -> Graph:
    """The graph with trips, phases and numbers in it, checked."""
    count_trips(graph)
    mark_phases(graph)
    renumber(graph)
    check_graph(graph)
    return graph
