"""Arrays that lie split are brought together for evaluation."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshdsl.training.evaluate import gather


def test_arrays_come_whole_to_one_device():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    numbers = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    split = jax.device_put(numbers, NamedSharding(mesh, PartitionSpec("y", "x")))
    made = gather({"split": split, "numpy": numbers})
    assert len(made["split"].devices()) == 1 and made["numpy"] is numbers
    np.testing.assert_array_equal(made["split"], numbers)
