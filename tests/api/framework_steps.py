"""What every step of a framework has to show: equal numbers, the planned communication, and the same training.

The mesh is one of slow devices, on which plans of small steps divide as much as those of large ones.
"""

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from meshdsl.api.stages import SLOW_DEVICES

MESH = md.Mesh(data=4, model=2, topology=SLOW_DEVICES)
X = jax.random.normal(jax.random.key(7), (16, 8))
BATCH = {"x": X, "y": jnp.arange(16) % 4}


def numbers(tree):
    """The arrays of a tree, keys as their integers."""
    arrays = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype") or isinstance(x, int | float)]
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in arrays]


def is_key(x):
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def proved(step, *args, layouts=None, plain=jax.jit, steps=0, tolerance=1e-4, **options):
    """The step checked and verified; then run a few times, each time on what it returned, beside the plain one.

    Args:
      steps: number of runs; the first results replace the first arguments.
    """
    sharded = md.parallelize(step, MESH, {"batch/**": "data=S(0)"} if layouts is None else layouts, **options)
    assert sharded.check(*args).divided["data"] > 0.5
    sharded.verify(*args)
    ours, theirs, plain = args, args, plain(step)
    for _ in range(steps):
        got, want = sharded(*ours), plain(*theirs)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(numbers(got), numbers(want), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
        count = len(args) - 1
        ours, theirs = (*got[:count], args[-1]), (*want[:count], args[-1])
    return sharded
