"""Pipeline schedules as data: which rank runs which stage on which microbatch, and what that costs.

Problem. A pipeline of p ranks runs m microbatches per step. A schedule orders the tasks of every rank; good ones keep
the *bubble* (ranks without a task) and the *stash* (activations that wait for their backward) small. p-1 ticks of
warm-up and of cool-down are unavoidable in a synchronous step:

    schedule      bubble / ideal     most stage inputs on a rank   source
    gpipe         (p-1)/m            m                             Huang et al. 2019
    1f1b          (p-1)/m            min(m, p)                     PipeDream-flush; Narayanan et al. 2021
    interleaved   (p-1)/(v m)        about p, of 1/v stage each    Megatron-LM; Narayanan et al. 2021
    zero bubble   about 1/3 of 1f1b  p                             Qi et al. 2023, 2024

The executor runs schedules in *lockstep*: in every tick all ranks do at most one task of each kind, and a tick takes as
long as its slowest rank. The asynchronous time, in which a rank only waits for what it needs, is predicted for
comparison.

Entry points: ``Pipeline`` (what a user asks for), ``Schedule`` and ``make_schedule`` (lists of tasks per rank),
``Pipelined`` (what a plan knows of its pipeline).

Modules, in reading order:

    schedule    tasks and schedules, their text format, the check for deadlock, the schedules of the literature
    spec        ``md.Pipeline``: the user's options and their faults
    lockstep    the timetable in ticks, the uniform schedule, allocation of buffer slots
    partition   layers to stages: min-max partition
    simulate    costs of the parts of a tick; lockstep and asynchronous time
    pipelined   ``Pipelined``: timetable, buffers, costs and predictions of one planned step
"""
