"""Eight virtual devices for every test, set before the backend starts."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
