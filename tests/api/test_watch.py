"""What the programs communicate that are compiled inside a ``with``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshdsl as md
from meshdsl.errors import BudgetError
from meshdsl.lowering.shardings import device_mesh

MESH = md.Mesh(data=4, model=2)


def step(w, x):
    return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


def arguments():
    return jnp.ones((8, 8)), jnp.ones((16, 8))


def test_a_planned_step():
    sharded = md.parallelize(step, MESH, {"x": "data=S(0)", "w": "data=B model=S(1)"})
    with md.watch(MESH) as comm:
        sharded(*arguments())
    planned = sharded.plan(*arguments())
    assert comm.bytes == planned.bytes > 0
    assert [(c.kind, c.axes) for c in comm.collectives] == [(c.kind, c.axes) for c in planned.collectives]
    comm.assert_at_most(bytes=planned.bytes, kinds=comm.counts)
    with pytest.raises(BudgetError, match="what was compiled exceeds its budget"):
        comm.assert_at_most(bytes=planned.bytes - 1)
    assert "jit_step: all-reduce over data" in str(comm)


def test_what_xla_partitions_and_drops():
    at = NamedSharding(device_mesh(MESH), PartitionSpec(("data", "model")))
    with md.watch(MESH) as comm:
        x = jax.device_put(np.ones((8, 8), np.float32), at)
        jax.jit(lambda x: jnp.sum(x))(x).block_until_ready()
        jax.clear_caches()
    assert list(comm.counts) == ["all-reduce"]
    assert {axis for c in comm.collectives for axis in c.axes} == {"data", "model"}


def test_what_was_compiled_before_does_not_count():
    jitted = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "data"),
            mesh=device_mesh(MESH),
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
        )
    )
    jitted(jnp.ones(8))
    with md.watch() as comm:
        jitted(jnp.ones(8))
    assert not comm.collectives and str(comm) == "0 B per device in 0 compiled collectives"
    with md.watch() as comm:
        jitted(jnp.ones(16))
    (found,) = comm.collectives
    assert found.axes is None and found.group == 4 and "groups of 4" in str(comm)


def test_no_mesh():
    with pytest.raises(md.MeshDSLError, match=r"watch: .* not a mesh"), md.watch(8):
        pass
