"""Training a planned step: data, the loop, checkpoints, the loss curve and samples.

Needs the ``train`` extra. Nothing here knows about layouts: the loop calls any step

    step(*state, batch) -> (*state, loss)

so a planned step and a plain ``jax.jit`` one train alike.
"""
