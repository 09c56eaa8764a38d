"""A planned step inside jax's own transformations: inlined in jit, refused where it would have to be changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import TraceError
from tests.api.two_matrices import LAYOUTS, MESH, arguments, close, step


@pytest.fixture(scope="module")
def sharded():
    return md.parallelize(step, MESH, LAYOUTS)


def test_without_jit(sharded):
    args = arguments()
    with jax.disable_jit():
        close(sharded(*args), step(*args))


def test_inside_jit_it_is_inlined(sharded):
    params, batch = arguments()
    twice = jax.jit(lambda p, b: sharded(sharded(p, b)[0], b)[1])
    close(twice(params, batch), step(step(params, batch)[0], batch)[1])


def test_inside_jit_it_may_read_what_is_around_it():
    x = np.arange(8.0, dtype=np.float32)

    @jax.jit
    def outer(scale):
        return md.parallelize(lambda x: x * scale, MESH)(x) + md.parallelize(lambda y: y * scale, MESH)(scale)

    np.testing.assert_allclose(outer(jnp.float32(3)), 3 * x + 9)


def test_an_array_of_a_trace_that_has_ended_is_refused():
    kept = []
    x = np.ones(8, np.float32)
    jax.make_jaxpr(lambda x: kept.append(x * 2) or x)(x)
    with pytest.raises(TraceError) as caught:
        md.parallelize(lambda x: x + kept[0], MESH)(x)
    assert str(caught.value) == (
        "step uses a traced array of another function, which has returned\nreturn it from there, and pass it in"
    )


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_gradients_are_refused(sharded, wrap):
    params, batch = arguments()
    with pytest.raises(TraceError) as caught:
        jax.grad(wrap(lambda p: sharded(p, batch)[1]))(params)
    assert str(caught.value) == (
        "step is already planned and cannot be differentiated (jax.grad, jax.jvp, jax.vjp)\n"
        "take the gradient inside the step, and parallelize that"
    )


def test_vmap_is_refused(sharded):
    params, batch = arguments()
    with pytest.raises(TraceError) as caught:
        jax.vmap(lambda b: sharded(params, b)[1])(np.stack([batch, batch]))
    assert str(caught.value) == (
        "step is already planned and cannot be batched (jax.vmap)\nbatch inside the step, and parallelize that"
    )
