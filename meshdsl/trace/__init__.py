"""Tracing: a step of ordinary JAX becomes the graph that is planned.

    step, arguments --flatten_call--> Call --make_jaxpr--> jaxpr --read_jaxpr--> graph --passes--> graph --annotate-->

1. ``arguments``   flattens the arguments; every array gets the path by which globs name it (``leaves``). Other
   values in a module of equinox are part of the tree (``static_leaves``); objects of nnx are state (``objects``).
2. ``pure_step``   makes the step a function of flat arrays, which ``jax.make_jaxpr`` runs once on shapes. Changes in
   place become results, or an error (``lost_changes``). Autodiff is over after that: the graph holds forward pass,
   backward pass and optimizer alike. ``device_axes`` makes a step for one device, with collectives over named axes, one
   on whole arrays. ``diagnostics`` translates errors into terms of the step's own arguments.
3. ``read_jaxpr``  equations become operations: calls are inlined, loops stay, closed-over arrays become explicit.
   ``composites`` has the JAX code of composite primitives that do not carry it with them.
   ``source`` gives each operation the user's line; ``shardings`` of jax become layouts; ``shard_maps`` reads the user's
   ``jax.shard_map``.
4. ``checkpoints`` takes the user's ``jax.checkpoint`` out, if asked: operations move to the ``forward_pass``.
5. ``passes``      rewrite the graph so that the planner sees what XLA will run; in the order that ``passes`` states.
6. ``annotate``    writes how often each body runs and the phase of each operation, and numbers values and operations.

A trace knows of the mesh only which lengths it divides (``layouts.roundness``), and one serves all meshes whose sizes
are powers of two, unless the step is written for one device.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax

from meshdsl.errors import ArgumentError
from meshdsl.ir.graph import FunctionChoice, Graph, TracedProgram, walk
from meshdsl.ir.manual import BOUNDARY
from meshdsl.layouts.axis_rules import Table
from meshdsl.layouts.roundness import POWERS_OF_TWO, Roundness
from meshdsl.nd.named_array import pinning
from meshdsl.primitives.alternatives import taking
from meshdsl.trace.annotate import annotate
from meshdsl.trace.arguments import Call, check_captured, flatten_call
from meshdsl.trace.checkpoints import CheckpointsTaken, without_checkpoints
from meshdsl.trace.device_axes import DeviceMap
from meshdsl.trace.diagnostics import check_opaque, note_constraints, note_expectations, translate_trace_errors
from meshdsl.trace.leaves import typed_leaf
from meshdsl.trace.lost_changes import check_nothing_lost
from meshdsl.trace.passes import run_passes
from meshdsl.trace.passes.canonicalize import remove_identities, remove_stages, remove_stated
from meshdsl.trace.pure_step import PureStep
from meshdsl.trace.read_jaxpr import read_jaxpr
from meshdsl.trace.shard_maps import check_shard_maps
from meshdsl.trace.shardings import is_stated
from meshdsl.trace.source import defined_at
from meshdsl.util.runtime import gc_paused

__all__ = ["Call", "PureStep", "flatten_call", "trace", "trace_call"]

_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


def trace(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] = _NO_KEYWORDS,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    inside: Table | None = None,
    cuts: bool = False,
    keep: bool = True,
    roundness: Roundness = POWERS_OF_TWO,
    checkpoints: bool = True,
    choices: Iterable[tuple[str, str]] = (),
) -> TracedProgram:
    """Returns the program of one call ``step(*args, **kwargs)``.

    Args:
      args: pytrees of arrays or of ``jax.ShapeDtypeStruct``; only shapes and dtypes are read.
      static_argnums: positions of arguments that are not arrays, as in ``jax.jit``.
      static_argnames: their names; either form covers both ways of passing them.
      inside: logical-axis rules for the named tensors that the step computes.
      cuts: keep ``md.stage``, which marks where a pipeline's stages end.
      keep: constraints that jax's own functions state are kept; else they are ignored, with a note.
      roundness: which lengths the mesh divides.
      checkpoints: the step's ``jax.checkpoint`` stays as written; else it is taken out, with a note.
      choices: which function is taken of ``md.alternatives``, by name; of others, the first.

    Raises:
      TraceError: arguments that are neither arrays nor static, a step that needs values while it is traced, or that
        changes in place what a call cannot give back.
    """
    call = flatten_call(step, args, kwargs, static_argnums, static_argnames)
    return trace_call(
        step, call, inside, cuts, keep=keep, roundness=roundness, checkpoints=checkpoints, choices=choices
    )


@gc_paused
def trace_call(
    step: Callable[..., Any],
    call: Call,
    inside: Table | None = None,
    cuts: bool = False,
    devices: DeviceMap | None = None,
    keep: bool = True,
    *,
    roundness: Roundness,
    checkpoints: bool = True,
    choices: Iterable[tuple[str, str]] = (),
) -> TracedProgram:
    """Returns the program of a call that has been flattened; other arguments are those of ``trace``.

    Args:
      devices: the step is written for one of these devices; the program is that of all of them.
    """
    # jaxpr
    pure = PureStep(step, call)
    with translate_trace_errors(call.name, call.paths, call.leaves), pinning(inside), taking(choices):
        closed, results = jax.make_jaxpr(devices.whole(pure) if devices else pure, return_shape=True)(*call.leaves)
        check_captured(call.name, closed.consts)
        changes = pure.changes
        notes = check_nothing_lost(call.name, changes, pure.with_changes() if changes else None, defined_at(step))

    # graph
    read = read_jaxpr(closed)
    traced = remove_stages(read if keep else remove_stated(read), cuts)
    check_opaque(call.name, traced)
    check_shard_maps(call.name, traced)

    # passes, annotations
    found = CheckpointsTaken(traced, (), ()) if checkpoints else without_checkpoints(remove_identities(traced))
    graph = annotate(run_passes(found.graph, roundness))
    ignored, unread = note_constraints(read, traced, graph)
    ignored += note_expectations(read)
    shared = call.objects.aliases()
    inputs = map(typed_leaf, call.paths, closed.in_avals, call.dims)
    return TracedProgram(
        graph,
        inputs=tuple(replace(leaf, aliases=shared.get(i, ())) for i, leaf in enumerate(inputs)),
        outputs=tuple(typed_leaf(each.path, x, each.dims) for each, x in zip(pure.outputs, results, strict=True)),
        in_tree=call.tree,
        out_tree=pure.out_tree,
        name=call.name,
        held=pure.held,
        notes=[*notes, *ignored, *unread, *found.notes],
        warnings=[*notes, *ignored],
        roundness=roundness,
        checkpoints=not found.taken,
        alternatives=_alternatives_in(read),
        spread=any(op.name in BOUNDARY or "by" in op.params or is_stated(op) for _, op in walk(read)),
    )


def _alternatives_in(graph: Graph) -> tuple[FunctionChoice, ...]:
    """Returns the alternatives of a step as it is read, in the order in which it first says them.

    Raises:
      ArgumentError: the same name is said of different functions.
    """
    found: dict[str, FunctionChoice] = {}
    for op in (op for _, op in walk(graph) if op.name == "alternatives"):
        this = FunctionChoice(op.params["name"], op.params["taken"], op.params["names"])
        other = found.setdefault(this.name, this)
        if other != this:
            one, two = (", ".join(each.names) for each in (other, this))
            raise ArgumentError(
                f"alternatives {this.name!r} at {op.source}: of {two}, elsewhere of {one}; choose two names, or give "
                "the same functions in the same order"
            )
    return tuple(found.values())
