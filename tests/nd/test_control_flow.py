"""``md.scan`` and ``md.vmap`` by name; raw transforms that take an axis off say so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import DimError

LAYERS = md.named(jnp.arange(24.0).reshape(3, 2, 4), "layers embed hidden")
X = md.named(jnp.arange(10.0).reshape(5, 2), "batch embed")


def layer(x, w):
    return x + md.sum(md.dot(x, w, over="embed"), over="hidden"), md.mean(x, over="batch")


def by_hand(x, w):
    return x + jnp.sum(jnp.tensordot(x, w, ((1,), (0,))), axis=1)[:, None], jnp.mean(x, axis=0)


def test_scan_is_the_scan_written_by_hand():
    named = jax.make_jaxpr(lambda x, w: md.scan(layer, x, w, over="layers"))(X, LAYERS)
    plain = jax.make_jaxpr(lambda x, w: jax.lax.scan(by_hand, x, w))(X.array, LAYERS.array)
    assert str(named) == str(plain)
    carry, means = md.scan(layer, X, LAYERS, over="layers")
    assert (carry.dims, means.dims) == (("batch", "embed"), ("layers", "embed"))
    np.testing.assert_array_equal(carry.array, jax.lax.scan(by_hand, X.array, LAYERS.array)[0])


def test_scan_finds_the_dim_wherever_it_stands():
    last = md.order(LAYERS, "embed hidden layers")
    for first, second in zip(md.scan(layer, X, LAYERS, over="layers"), md.scan(layer, X, last, over="layers")):
        np.testing.assert_array_equal(first.array, second.array)


def test_scalars_of_a_scan_become_tensors_and_plain_arrays_go_by_their_first_axis():
    keys = jax.random.split(jax.random.key(0), 3)

    def f(total, x):
        w, key = x
        return total + md.sum(w), (md.sum(w), jax.random.normal(key, (2,)))

    total, (sums, noise) = md.scan(f, 0.0, (LAYERS, keys), over="layers")
    assert float(total) == 276.0
    assert (sums.dims, sums.array.shape, noise.shape) == (("layers",), (3,), (3, 2))


def test_slices_without_dims_are_scalars():
    _, running = md.scan(lambda c, x: (c + x, c + x), 0.0, md.arange("seq=4", jnp.float32), over="seq")
    np.testing.assert_array_equal(running.array, [0, 1, 3, 6])
    assert running.dims == ("seq",)


def test_a_carry_comes_back_in_its_order():
    carry, _ = md.scan(lambda x, w: (md.order(x, "embed batch"), None), X, LAYERS, over="layers")
    assert carry.dims == ("batch", "embed")
    np.testing.assert_array_equal(carry.array, X.array)


def test_length_and_reverse():
    carry, none = md.scan(lambda x, _: (2 * x, None), X, over="layers", length=3)
    assert none is None
    np.testing.assert_array_equal(carry.array, 8 * X.array)
    _, ys = md.scan(lambda c, x: (c, c + x), 0.0, md.arange("seq=3", jnp.float32), over="seq", reverse=True)
    np.testing.assert_array_equal(ys.array, [0, 1, 2])


def test_gradients_through_a_scan():
    gradient = jax.grad(lambda w: md.sum(md.scan(layer, X, w, over="layers")[0]))(LAYERS)
    plain = jax.grad(lambda w: jnp.sum(jax.lax.scan(by_hand, X.array, w)[0]))(LAYERS.array)
    assert gradient.dims == LAYERS.dims
    np.testing.assert_array_equal(gradient.array, plain)


def test_vmap_is_the_vmap_written_by_hand():
    def f(x, w):
        return md.softmax(md.dot(x, w, over="embed"), over="hidden")

    def hand(x, w):
        return jax.nn.softmax(jnp.tensordot(x, w, ((1,), (0,))))

    named = md.vmap(f, over="layers")
    assert named(X, LAYERS).dims == ("layers", "batch", "hidden")
    plain = jax.vmap(hand, in_axes=(None, 0))
    assert str(jax.make_jaxpr(named)(X, LAYERS)) == str(jax.make_jaxpr(plain)(X.array, LAYERS.array))


def test_vmap_of_scalars_and_plain_arrays():
    made = md.vmap(lambda x, scale: md.sum(x) * scale, over="batch")(X, 2.0)
    assert made.dims == ("batch",)
    np.testing.assert_array_equal(made.array, 2 * X.array.sum(1))


def error(fn):
    with pytest.raises(DimError) as caught:
        fn()
    return str(caught.value).split("\n  at test_control_flow.py:")[0]


def test_raw_transforms_are_named():
    said = "[layers embed hidden] holds an array of shape (2, 4): 3 names for 2 dims"
    assert error(lambda: jax.lax.scan(layer, X, LAYERS)).startswith(said)
    assert "md.scan(f, init, xs, over='layers')" in error(lambda: jax.vmap(lambda w: w + 1)(LAYERS))
    stacked = jax.lax.scan(lambda c, _: (c, X), 0, None, length=3)[1]
    assert error(lambda: stacked + 1).startswith("[batch embed] holds an array of shape (3, 5, 2)")


def test_what_lacks_the_dim_is_named():
    assert error(lambda: md.scan(layer, X, LAYERS, over="layer")).startswith(
        "no dim 'layer' in [layers=3 embed=2 hidden=4]: did you mean 'layers'?"
    )
    assert error(lambda: md.vmap(layer, over="seq")(X, LAYERS)) == (
        "no dim 'seq' in [batch=5 embed=2]\n  no dim 'seq' in [layers=3 embed=2 hidden=4]"
    )
    assert error(lambda: md.vmap(jnp.sin, over="seq")(jnp.ones(3))).startswith("no argument of vmap has named dims")


def test_a_carry_of_other_dims_is_named():
    assert error(lambda: md.scan(lambda x, w: (md.sum(x, over="embed"), None), X, LAYERS, over="layers")) == (
        "f of scan changes the dims of its carry: it takes [batch=5 embed=2] and returns [batch=5]"
    )
