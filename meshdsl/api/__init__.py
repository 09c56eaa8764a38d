"""What users call: ``parallelize`` and the stages behind it, executables, explanations, mesh search, watch.

A step on its way down, file by file; each stage returns a value that can be printed, and none calls back up:

    sharded.parallelize          the user's arguments
      options.parse_options      -> Options, all faults in one error
    Sharded.__call__, .plan      one call: flat arrays, its form and its kind (``calls``)
      stages.CallStages          the stages below for one kind of call, each computed on first use
        .traced                  axis_names.trace_found          -> what the step's axis names mean, and by
                                   trace.trace_call              -> ir.TracedProgram
        .checked                 pins.fit_constraints            -> the same on this mesh
                                 custom_rules.check_rules        -> the same; executes the user's functions with rules
        .microbatched            pipelining.to_microbatches      -> the same in microbatches or stages of a pipeline
        .program                 uneven_pins.UnevenPins          -> the same, uneven pins as constraints if padded
        .pins                    pins.UserPins.resolve           -> ir.Pins, for this program and for every variant
        .planned                 plan_variants.plan_best_variant -> PlannedProgram
                                   padding.pad_program           -> one variant of the program
                                   planner.solve                 -> SearchResult: the search and memory stages
                                     .polish, .certify           -> ir.Solution with its lower bound
                                   remat, stage_remat, host      -> programs that compute again, and keep on the host
                                   buckets.plan_with_buckets     -> small collectives sent as one, with their bound
                                   overlap.plan_with_overlap     -> a plan of shorter simulated time, on request
                                   overlap.plan_with_prefetch    -> loops that send ahead and behind
                                   rings.with_best_rings         -> products that run in parts beside hops
                                   plan.build_plan               -> Plan
        .executable              executable.Executable           -> lowering.program -> jax.jit(jax.shard_map(...))

Under that line and on top of it:

    ambient       settings of jax and other state around a call: what counts for a step, what must not reach it
    calls         which calls are of one kind and share all stages, and how a call reaches the compiled program
    program       ``md.Program``, what program files define; stacks of layers as pipeline stages
    sink          several steps in one dispatch
    profile       measured beside predicted seconds of collectives
    check         ``sharded.check``: the sharded step beside the unsharded one, and how much of it was divided
    explain       why an input has its layout, by planning with every other one
    frontier      step time against memory limit
    mesh_search   ``md.search``: the best mesh and pipeline for a number of devices
    watch         ``md.watch``: collectives of everything that is compiled inside a ``with``
"""

from meshdsl.api.program import Program
from meshdsl.api.sharded import Sharded, parallelize

__all__ = ["Program", "Sharded", "parallelize"]
