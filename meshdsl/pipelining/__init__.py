"""Microbatches and pipelines: rewrites a step to run one microbatch at a time, its layers on one device or many.

Problem. A step over a large batch is to run as m microbatches whose gradients are accumulated, and if layers are split
over a mesh axis, its devices are to work on different microbatches at the same time, each on its own layers. The result
has to be an ordinary step: one SPMD program without divergent control flow, whose other axes are planned as usual.

Method. GPipe (Huang et al. 2019), 1F1B (PipeDream-flush and interleaved: Narayanan et al. 2021), zero bubble (Qi et al.
2023) and arbitrary tables, run in lockstep: time is divided into *ticks*, and in every tick all ranks run the same
operations on different microbatches (vmap over stages and a roll to the next: GSPMD, Xu et al. 2021). The schedules
themselves are data, in ``meshdsl.schedules``.

Words. A *microbatch* is a block of consecutive examples. A *stage* is a contiguous part of the model; a *rank* is a
position along the pipeline's axis, and holds one stage, or several *chunks* of layers if stages are interleaved. A
*task* is a forward (F), a backward (B), or the input-gradient (I) or weight-gradient (W) half of a backward, of one
stage on one microbatch. Ticks come in *warm-up*, *steady state* and *cool-down*; ticks in which a rank has no task are
the *bubble*. Activations wait in the *stash* from a forward to its backward.

Entry points. ``to_microbatches`` rewrites a program; ``whole_function`` evaluates a graph on whole arrays.

Modules, in reading order:

    microbatch       the entry: finds the batch and chooses the form
    time_axis        which operations run per microbatch: abstract interpretation over the microbatch axis
    shard_map_rows   whether bodies of the user's shard_map make of a microbatch what they make of the batch
    stage_shard_maps those in stages, freed of the axis of the stages
    interpreter      evaluates a graph for one microbatch while jax traces
    accumulate       cuts the step into before, inside and after a loop; the plain loop with gradient accumulation
    body_exports     blocks of these bodies that go on after the loop
    tick_loops       a lockstep timetable as loops over arrays
    tick_executor    runs these loops, with a backend for the stages
    stage_buffers    arrays of all ranks: stacked, sent around the ring, packed
    layer_scan       finds the scan over layers that is pinned to be split
    scan_stages      its stages: prologue, layers, head, tail; which layers each holds
    scan_stage_work  what one stage runs: forward, backward, split backward
    scan_executor    backend: all stages of a layer scan, vmapped
    cut_stages       stages of a step that ``md.stage`` cuts
    cut_stage_work   what one of them runs, on packed buffers
    cut_executor     backend: different stages as branches of a switch
    stage_cost       what a stage costs on one device; layers per stage
"""

from meshdsl.pipelining.interpreter import whole_function
from meshdsl.pipelining.microbatch import to_microbatches

__all__ = ["to_microbatches", "whole_function"]
