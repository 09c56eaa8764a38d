"""Compilations that take XLA the least time: of most tests and sweeps, they are nearly all of the time."""

import os

import jax

FLAG = "--xla_cpu_use_fusion_emitters=false"


def compile_quickly() -> None:
    """Has XLA optimize little machine code, in this process and those it starts; call it before the backend starts."""
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if jax.__version_info__ < (0, 12) and FLAG not in os.environ.get("XLA_FLAGS", ""):  # later compilers do not know it
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}"
