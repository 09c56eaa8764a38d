"""Layouts as shardings, meshes of devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from meshdsl.errors import DeviceError, LayoutError
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.shardings import device_mesh, named_sharding, place
from meshdsl.shardings import partition_spec


def test_partition_spec_keeps_the_order_of_axes():
    assert partition_spec(Layout.parse("y=S(1) x=S(1) z=S(0)"), 3) == PartitionSpec("z", ("y", "x"), None)
    assert partition_spec(Layout.parse("x=B"), 0) == PartitionSpec()


def test_partial_stays_inside():
    with pytest.raises(LayoutError, match=r"layout x=P y=S\(0\) is partial over x: arrays hold S and B only"):
        partition_spec(Layout.parse("x=P y=S(0)"), 1)


def test_mesh_takes_the_first_devices():
    mesh = device_mesh(Mesh(x=2, y=3))
    assert (mesh.shape, mesh.size) == ({"x": 2, "y": 3}, 6)
    chosen = jax.devices()[4:]
    assert set(device_mesh(Mesh(x=2), chosen).devices.flat) == set(chosen[:2])


def test_too_few_devices():
    with pytest.raises(DeviceError) as caught:
        device_mesh(Mesh(data=8, model=4))
    assert str(caught.value) == (
        "mesh data=8,model=4 needs 32 devices, and there are 8 (cpu)\n"
        "To try it on one CPU: JAX_NUM_CPU_DEVICES=32, or before anything runs "
        "jax.config.update('jax_num_cpu_devices', 32)"
    )


def test_place():
    mesh = device_mesh(Mesh(x=4, y=2))
    split = named_sharding(Layout.parse("y=S(0) x=S(0)"), 1, mesh)
    (placed,) = place([jnp.arange(8)], [split])
    by_device = {shard.device: int(shard.data[0]) for shard in placed.addressable_shards}
    assert [by_device[d] for d in mesh.devices.flat] == [0, 4, 1, 5, 2, 6, 3, 7]
