"""From plan to JAX: moves as collectives, the sharded program, and the proof that it is the planned one."""
