"""One collective for several reshard steps gives exactly the numbers of one for each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, P, S
from meshdsl.layouts.reshard import reshard
from meshdsl.lowering.local.collectives import apply_bucket, apply_move
from meshdsl.lowering.shardings import device_mesh

MESH = Mesh(x=4, y=2)
SHAPES = (16, 8), (8, 32, 3), (16,)
CASES = {
    "all-reduce": ((P, B), (P, B), (P, B)),
    "reduce-scatter": ((P, S(1)), (P, S(0)), (P, S(0))),
    "all-gather": ((S(0), B), (S(1), B), (S(0), B)),
}


@pytest.mark.parametrize(("axes", "dtype"), [(("x",), jnp.bfloat16), (("x", "y"), jnp.float32)])
@pytest.mark.parametrize("kind", CASES)
def test_a_bucket_equals_its_steps_bit_by_bit(kind, axes, dtype):
    moves = [
        reshard(
            *(Layout(**{n: at if n in axes else B for n in MESH.names}) for at in ends), shape, dtype(0).itemsize, MESH
        )
        for shape, ends in zip(SHAPES, CASES[kind], strict=True)
    ]
    assert all(len(path) == 1 and path[0].kind == kind for path in moves)
    moves, sizes, rng = [path[0] for path in moves], MESH.sizes_by_name, np.random.default_rng(0)
    blocks = [move.before.local_shape(shape, sizes) for move, shape in zip(moves, SHAPES, strict=True)]
    given = [jnp.asarray(rng.normal(size=(8, *block)), dtype) for block in blocks]  # another one on every device

    def both(*xs):
        xs = [x[0] for x in xs]
        alone = [apply_move(x, move, sizes) for x, move in zip(xs, moves, strict=True)]
        return [x[None] for x in (*alone, *apply_bucket(xs, moves, sizes))]

    at = PartitionSpec(("x", "y"))
    found = jax.jit(jax.shard_map(both, mesh=device_mesh(MESH), in_specs=at, out_specs=at, check_vma=False))(*given)
    for alone, together in zip(found[:3], found[3:], strict=True):
        np.testing.assert_array_equal(alone, together)
