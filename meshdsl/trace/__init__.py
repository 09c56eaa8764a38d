"""Tracing: a step of ordinary JAX becomes the graph that is planned.

    step, arguments --flatten_call--> Call --make_jaxpr--> jaxpr --read_jaxpr--> graph --passes--> graph --annotate-->

1. ``arguments``   the arguments are flattened; every array gets the path by which globs name it. Of modules of equinox,
   what is no array is part of the tree (``static_leaves``).
2. ``jax.make_jaxpr`` runs the step once on shapes. Autodiff is over after that: the graph holds forward pass, backward
   pass and optimizer alike. ``diagnostics`` translates errors into terms of the step's own arguments.
3. ``read_jaxpr``  equations become operations: calls are inlined, loops stay, closed-over arrays become explicit.
   ``source`` gives each operation the user's line.
4. ``passes``      rewrite the graph so that the planner sees what XLA will run; in the order that ``passes`` states.
5. ``annotate``    writes how often each body runs and the phase of each operation, and numbers values and operations.

A trace knows no mesh: one serves all.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from meshdsl.ir.graph import TracedProgram, walk
from meshdsl.layouts.axis_rules import Table
from meshdsl.nd.named_array import pinning
from meshdsl.trace.annotate import annotate
from meshdsl.trace.arguments import Call, check_arrays, check_captured, flatten_call, path_leaves, typed_leaf
from meshdsl.trace.diagnostics import check_opaque, note_constraints, note_lost_changes, translate_trace_errors
from meshdsl.trace.passes import run_passes
from meshdsl.trace.passes.canonicalize import remove_stages
from meshdsl.trace.read_jaxpr import read_jaxpr
from meshdsl.trace.static_leaves import hide
from meshdsl.util.runtime import gc_paused

__all__ = ["Call", "flatten_call", "trace"]

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
    """Returns the program of one call ``step(*args, **kwargs)``.

    Args:
      args: pytrees of arrays or of ``jax.ShapeDtypeStruct``; only shapes and dtypes are read.
      static_argnums: positions of arguments that are not arrays, as in ``jax.jit``.
      static_argnames: their names; either form covers both ways of passing them.
      inside: logical-axis rules for the named tensors that the step computes.
      cuts: keep ``md.stage``, which marks where a pipeline's stages end.

    Raises:
      TraceError: arguments that are neither arrays nor static, or a step that needs values while it is traced.
    """
    # arguments
    call = flatten_call(step, args, kwargs, static_argnums, static_argnames)
    lost_changes: list[str] = []

    def on_leaves(*leaves: Any) -> Any:
        args, kwargs = call.args(leaves), call.kwargs(leaves)
        result = hide(step(*args, **kwargs))
        arrays = [(each.path, each.array) for each in path_leaves(result)]
        check_arrays(f"{call.name} returns what is not an array:", arrays, "return arrays, in any pytree")
        lost_changes.extend(note_lost_changes(call, leaves, (args, kwargs), result))
        return result

    # jaxpr
    with translate_trace_errors(call.name, call.paths, call.leaves), pinning(inside):
        closed, result = jax.make_jaxpr(on_leaves, return_shape=True)(*call.leaves)
    check_captured(call.name, closed.consts)

    # graph
    traced = remove_stages(read_jaxpr(closed), cuts)
    check_opaque(call.name, traced)

    # passes, annotations
    graph = annotate(run_passes(traced))
    return TracedProgram(
        graph,
        inputs=tuple(map(typed_leaf, call.paths, closed.in_avals, call.dims)),
        outputs=tuple(typed_leaf(found.path, found.array, found.dims) for found in path_leaves(result)),
        in_tree=call.tree,
        out_tree=jax.tree_util.tree_structure(result),
        name=call.name,
        notes=[*lost_changes, *note_constraints(traced, graph)],
        spread=any(op.name == "sharding_constraint" for _, op in walk(traced)),
    )
