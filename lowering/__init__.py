"""From a plan to a program that communicates exactly as planned, and the checks that it does.

    interpreter         runs a graph under a target; loops and conditionals included
    program             the planned step as one ``shard_map`` with explicit collectives
    pipelined_scan      loops whose collectives run one iteration ahead or behind
    rings               products that run in parts beside the hops of a gather or reduction
    reference           the unsharded step of a program that the user divides by ``jax.shard_map``
    keep_collectives    keeps XLA from merging repeated collectives and from moving them out of loops
    local/              what one device runs: a program per primitive, reshard steps as collectives
    shardings           device meshes, and the shardings of arguments and results
    hlo/                HLO text: parser, collectives with loops counted, FLOPs, schedule, value numbering
    verify              compiled communication, memory and FLOPs compared with the plan
    overlap             seconds of communication beside products, compared with what the plan hides
    numerics            results compared with those of the unsharded step
    aot_targets         compilers of devices that are not present

The input is a ``Solution`` (``ir.solution``); nothing here knows how it was found.
"""
