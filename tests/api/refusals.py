"""A step that nobody gets to run, and the one error that says why."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import PinError
from meshdsl.layouts import Mesh

MESH = Mesh(data=4, model=2)


def step(w, batch):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(batch["x"] @ w) ** 2))(w)


ARGS = (np.ones((6, 16), np.float32), {"x": np.ones((8, 6), np.float32)})


def message(kind, make):
    with pytest.raises(kind) as caught:
        make()
    assert isinstance(caught.value, md.MeshDSLError)
    return str(caught.value)


def pinned(layouts, **options):
    return message(PinError, lambda: md.parallelize(step, MESH, layouts, **options)(*ARGS)).splitlines()[1:-1]
