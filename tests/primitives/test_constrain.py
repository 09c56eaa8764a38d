"""``md.constrain``: identity everywhere, its meaning kept under every transformation, its faults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import LayoutError, NotationError
from meshdsl.ir.graph import walk
from meshdsl.trace import trace

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def stated(step, *args):
    """The layouts that the traced step constrains values to, with the shapes."""
    found = [op for _, op in walk(trace(step, args).graph) if op.name == "constrain"]
    return [(str(op.params["layout"]), op.outputs[0].shape) for op in found]


def test_identity():
    for run in (lambda f: f, jax.jit):
        got = run(lambda x: md.constrain(x, "data=S(0) model=P"))(X)
        np.testing.assert_array_equal(got, X)


def test_pytrees_and_layout_values():
    layout = md.Layout(data=md.S(0), model=md.P)
    tree = {"a": X, "b": (X, 2 * X)}
    assert jax.tree.structure(md.constrain(tree, layout)) == jax.tree.structure(tree)
    assert stated(lambda t: md.constrain(t, layout), tree) == [("data=S(0) model=P", (2, 3))] * 3


def test_gradients_pass_by_unconstrained():
    def loss(x):
        return jnp.sum(md.constrain(jnp.sin(x), "data=S(1)") ** 3)

    def plain(x):
        return jnp.sum(jnp.sin(x) ** 3)

    np.testing.assert_array_equal(jax.grad(loss)(X), jax.grad(plain)(X))
    assert stated(jax.grad(loss), X) == [("data=S(1)", (2, 3))]
    assert jax.jvp(loss, (X,), (X,)) == jax.jvp(plain, (X,), (X,))


def test_it_is_linear():
    transposed = jax.linear_transpose(lambda x: md.constrain(2 * x, "data=S(0)"), X)
    np.testing.assert_array_equal(transposed(X)[0], 2 * X)


@pytest.mark.parametrize(
    ("axis", "want"), [(0, "data=S(2) model=S(1)"), (1, "data=S(2) model=S(0)"), (2, "data=S(1) model=S(0)")]
)
def test_vmap_moves_the_dims(axis, want):
    mapped = jax.vmap(lambda x: md.constrain(x, "data=S(1) model=S(0)"), in_axes=axis, out_axes=axis)
    x = jnp.ones((2, 3, 4))
    assert stated(mapped, x) == [(want, (2, 3, 4))]
    np.testing.assert_array_equal(mapped(x), x)


def test_vmap_of_partials_and_of_what_is_not_mapped():
    assert stated(jax.vmap(lambda x: md.constrain(x, "model=P data=B")), X) == [("model=P data=B", (2, 3))]
    closed = jax.vmap(lambda x, w: x * md.constrain(w, "data=S(0)"), in_axes=(0, None))
    assert stated(closed, X, X[0]) == [("data=S(0)", (3,))]


def test_in_a_scan():
    def step(xs):
        return jax.lax.scan(lambda c, x: (md.constrain(c + x, "data=S(0)"), None), xs[0], xs)[0]

    assert stated(step, X) == [("data=S(0)", (3,))]
    assert stated(jax.grad(lambda xs: jnp.sum(step(xs) ** 2)), X) == [("data=S(0)", (3,))]


def test_remat_states_it_again():
    def loss(x):
        return jnp.sum(jnp.sin(jax.checkpoint(lambda x: md.constrain(jnp.sin(x), "data=S(1)"))(x)))

    assert set(stated(jax.value_and_grad(loss), X)) == {("data=S(1)", (2, 3))}


def test_faults_are_listed_together():
    with pytest.raises(LayoutError) as error:
        md.constrain({"w": X, "b": X[0], "s": 1.0}, "x=S(1) y=S(2) z=S(embed)")
    assert str(error.value) == (
        "constrain to 'x=S(1) y=S(2) z=S(embed)' does not fit:\n"
        "  b of shape (3): z=S(embed) names a dim, but the array has no named dims\n"
        "  b of shape (3): x=S(1) is out of range; its dims are 0 to 0\n"
        "  b of shape (3): y=S(2) is out of range; its dims are 0 to 0\n"
        "  s of shape (): z=S(embed) names a dim, but the array has no named dims\n"
        "  s of shape (): x=S(1) is out of range; it is a scalar and cannot be split\n"
        "  s of shape (): y=S(2) is out of range; it is a scalar and cannot be split\n"
        "  w of shape (2, 3): z=S(embed) names a dim, but the array has no named dims\n"
        "  w of shape (2, 3): y=S(2) is out of range; its dims are 0 to 1\n"
        "dims are counted from 0"
    )


def test_text_that_is_no_layout():
    with pytest.raises(NotationError, match="a placement is"):
        md.constrain(X, "data=Q")
