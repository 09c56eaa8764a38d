"""The tensor as a value and as a pytree: construction, order, grad, jit, optax, orbax, flax; every error's text."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx

import meshdsl as md
from meshdsl.errors import DimError, MeshDSLError, NotationError
from meshdsl.nd.named_array import common_order

x = md.named(np.arange(24, dtype=np.float32).reshape(2, 3, 4), "batch seq embed")
w = md.named(jnp.ones((4, 5)), "embed hidden")


def test_dims_are_text_names_and_sizes():
    sizes = md.dims("batch=2, embed=4 hidden")
    assert (list(sizes), sizes["embed"], "hidden" in sizes, len(sizes)) == (["batch", "embed", "hidden"], 4, True, 3)
    batch, embed, hidden = sizes
    assert (batch, embed, hidden) == ("batch", "embed", "hidden")
    assert str(sizes("embed batch")) == "embed=4 batch=2"
    assert str(sizes("batch embed") + "heads=2") == "batch=2 embed=4 heads=2"
    assert sizes("batch embed").size == 8
    assert sizes == md.dims(sizes) == eval(f"md.{sizes!r}") and hash(sizes) == hash(md.dims("batch=2 embed=4 hidden"))
    assert md.dims(["a", "b"]) == md.dims("a b") != md.dims("b a")


def test_named():
    assert (x.dims, x.shape, x.dtype) == (("batch", "seq", "embed"), md.dims("batch=2 seq=3 embed=4"), np.float32)
    assert md.named([1, 2], "n=2").shape["n"] == 2
    assert md.named(3.0, "") == 3.0
    assert md.named(jax.ShapeDtypeStruct((2,), jnp.int32), "batch").shape.sizes == (2,)
    assert repr(md.named(np.zeros(2), "n")) == "NamedArray([n=2], array([0., 0.]))"


@pytest.mark.parametrize(
    ("orders", "want"),
    [
        (("a b", "b c"), "a b c"),
        (("b c", "a b"), "a b c"),
        (("c", "a b c"), "a b c"),
        (("a c", "b c"), "a b c"),
        (("a", "b"), "a b"),
        (("a b c", "c a"), "a b c"),
        (("c a", "a b c"), "a b c"),
        (("a b", "b a"), "a b"),
        (("a d", "b d", "c"), "a b d c"),
        (("", "a"), "a"),
    ],
)
def test_the_order_where_tensors_meet(orders, want):
    assert common_order(md.dims(text).names for text in orders) == md.dims(want).names


OPERATORS = "add sub mul truediv floordiv mod pow eq ne lt le gt ge".split()


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_those_of_arrays(name):
    fn, array, other = getattr(operator, name), jnp.asarray(x.array) + 1, jnp.arange(1.0, 5.0)
    left, right = md.named(array, x.dims), md.named(other, "embed")
    for made, expected in (
        (fn(left, right), fn(array, other)),
        (fn(left, 2.0), fn(array, 2.0)),
        (fn(2.0, left), fn(2.0, array)),
        (fn(jnp.float32(2), left), fn(2.0, array)),
        (fn(np.float32(2), left), fn(2.0, array)),
    ):
        assert made.dims == x.dims
        np.testing.assert_array_equal(made.array, expected)


def test_logical_operators():
    m = x > 3
    np.testing.assert_array_equal(((m | False) & ~m).array, False)
    np.testing.assert_array_equal((True | m).array & (True & m).array, m.array)
    np.testing.assert_array_equal(abs(-x).array, x.array)


def loss(w, x):
    return md.mean(md.square(md.dot(x, w, over="embed")))


def test_grad_and_jit():
    plain = jax.grad(lambda w, x: jnp.mean((x @ w) ** 2))(w.array, x.array)
    gradient = jax.jit(jax.grad(loss))(w, x)
    assert isinstance(loss(w, x), jax.Array)
    assert gradient.dims == w.dims
    np.testing.assert_allclose(gradient.array, plain, rtol=1e-6)


def test_optax_updates_named_tensors():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    params = {"w": w}
    state = optimizer.init(params)
    gradient = {"w": jax.grad(loss)(w, x)}
    updates, state = jax.jit(optimizer.update)(gradient, state, params)
    made = optax.apply_updates(params, updates)["w"]
    arrays = optimizer.update({"w": gradient["w"].array}, optimizer.init({"w": w.array}), {"w": w.array})[0]
    assert made.dims == w.dims and state[1][0].mu["w"].dims == w.dims
    np.testing.assert_allclose(made.array, w.array + arrays["w"], rtol=1e-6)


def test_orbax_keeps_named_tensors(tmp_path):
    tree = {"w": w, "step": jnp.int32(3)}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "saved", jax.tree.map(jnp.zeros_like, tree))
    assert back["w"].dims == w.dims
    np.testing.assert_array_equal(back["w"].array, w.array)


def test_flax_variables_hold_named_tensors():
    class Linear(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(md.normal(rngs.params(), "embed=4 hidden=5"))

        def __call__(self, x):
            return md.dot(x, self.w, over="embed")

    model = Linear(nnx.Rngs(0))
    graph, state = nnx.split(model)
    assert model(x).dims == ("batch", "seq", "hidden")
    gradient = jax.jit(jax.grad(lambda s: md.sum(nnx.merge(graph, s)(x))))(state)
    assert jax.tree.structure(gradient) == jax.tree.structure(state)
    assert gradient["w"].get_value().dims == ("embed", "hidden")


def test_rank_promotion_is_no_affair_of_names():
    with jax.numpy_rank_promotion("raise"):
        assert (x + md.ones("embed=4")).dims == x.dims


def test_dropout_keeps_the_mean_and_drops_along_dims():
    ones = md.ones("batch=64 seq=64")
    dropped = md.dropout(jax.random.key(0), ones, 0.25)
    assert abs(float(md.mean(dropped)) - 1) < 0.05
    together = md.dropout(jax.random.key(0), ones, 0.25, over="batch")
    assert (md.max(together, over="seq").array == md.min(together, over="seq").array).all()
    assert md.dropout(jax.random.key(0), ones, 0.0) is ones


def test_fan_in_is_the_sum_of_dot():
    made = md.fan_in(jax.random.key(0), "embed=64 heads=8 head=32", over="embed")
    assert abs(float(md.std(made)) - 64**-0.5) < 0.01


def test_norms_are_made_in_float32():
    half = x.astype(jnp.bfloat16)
    for norm in (md.rms_norm, md.layer_norm):
        assert norm(half, over="embed").dtype == jnp.bfloat16
        wide = norm(half.astype(jnp.float32), over="embed")
        np.testing.assert_array_equal(norm(half, over="embed").array, wide.astype(jnp.bfloat16).array)


def test_convolutions_of_dims_in_any_order():
    key = jax.random.key(0)
    image = md.normal(key, "channels=2 height=4 batch=2 width=5")
    kernel = md.normal(key, "filters=3 width=2 channels=2 height=1")
    made = md.conv(image, kernel, over="height width", sum="channels", stride=(1, 2))
    plain = jax.lax.conv_general_dilated(
        md.order(image, "batch channels height width").array,
        md.order(kernel, "filters channels height width").array,
        (1, 2),
        "SAME",
    )
    assert made.dims == ("filters", "height", "batch", "width")
    np.testing.assert_allclose(md.order(made, "batch filters height width").array, plain, rtol=1e-5, atol=1e-5)


FAULTS = {
    "no dim 'embd' in x[batch=2 seq=3 embed=4]: did you mean 'embed'?": lambda: md.sum(x, over="embd"),
    "no dim 'key' in x[batch=2 seq=3 embed=4]": lambda: md.softmax(x, over="key"),
    "dim 'embed' has two sizes: 4 in x[batch=2 seq=3 embed=4] and 3 in y[embed=3]": lambda: x + md.ones("embed=3"),
    "dim 'seq' has two sizes: 3 in x[batch=2 seq=3 embed=4] and 5 in y[seq=5]": (lambda: x * md.ones("seq=5")),
    "no dim 'hiden' in x[batch=2 seq=3 embed=4]\n  no dim 'hiden' in w[embed=4 hidden=5]: did you mean 'hidden'?": (
        lambda: md.dot(x, w, over="hiden")
    ),
    "dot takes at least two operands; to sum one, use md.sum(x, over=...)": lambda: md.dot(x, over="embed"),
    "dim 'batch' is only in x[batch=2 seq=3 embed=4]; dot sums over dims of at least two operands": (
        lambda: md.dot(x, w, w, over="batch embed")
    ),
    "an array of shape (3,) has no named dims; name them with md.named(array, 'batch embed')": lambda: x + jnp.ones(3),
    "@ does not name the dims to sum over; write md.dot(x, y, over='embed')": lambda: x @ w,
    "embed=4 of x[batch=2 seq=3 embed=4] does not split into [heads=3 head]; the sizes must multiply to 4; at most "
    "one may be omitted": lambda: md.split(x, embed="heads=3 head"),
    "renaming x[batch=2 seq=3 embed=4] would duplicate dim 'seq': [batch seq seq]": lambda: md.rename(x, embed="seq"),
    "x[batch=2 seq=3 embed=4] would become [batch seq seq head], with duplicate dim 'seq'": (
        lambda: md.split(x, embed="seq=2 head")
    ),
    "cannot broadcast x[batch=2 seq=3 embed=4] to [batch=2 seq=9 embed]: dim 'seq' has size 3, not 9": (
        lambda: md.broadcast(x, "batch=2 seq=9 embed")
    ),
    "cannot broadcast x[batch=2 seq=3 embed=4] to [seq embed]: dim 'batch' is missing": (
        lambda: md.broadcast(x, "seq embed")
    ),
    "pack adds a new dim, but [batch=2 seq=3 embed=4] already has 'seq'; md.concat joins along it": (
        lambda: md.pack([x, x], over="seq")
    ),
    "order must name all dims of x[batch=2 seq=3 embed=4]; missing: seq": lambda: md.order(x, "batch embed"),
    "2 names [batch seq] for an array of 3 dims, shape (2, 3, 4)": lambda: md.named(x.array, "batch seq"),
    "dim 'seq' has size 3 in the array of shape (2, 3, 4), but 7 in the names": lambda: md.named(
        x.array, "batch seq=7 embed"
    ),
    "over='seq embed' names 2 dims; expected exactly one": lambda: md.argmax(x, over="seq embed"),
    "cannot join tensors with different dims: x[batch=2 seq=3 embed=4], w[embed=4 hidden=5]": (
        lambda: md.concat([x, w], over="embed")
    ),
    "sort is not elementwise: it maps [batch=2 seq=3 embed=4] to shape (24,)": lambda: md.apply(sort, x),
    "duplicate dim 'embed' in [embed=4 embed]": lambda: md.dims("embed=4") + "embed",
    "dim 'embed' of [embed] has no size; give one, as in embed=128": lambda: md.zeros("embed"),
    "dropout rate=1 is out of range; expected 0 <= rate < 1": lambda: md.dropout(jax.random.key(0), x, 1),
}


def sort(array):
    return jnp.sort(array, axis=None)


@pytest.mark.parametrize("text", FAULTS)
def test_what_errors_say(text):
    with pytest.raises(DimError) as caught:
        FAULTS[text]()
    assert str(caught.value).split("\n  at test_named_array.py:")[0] == text


def test_errors_show_the_users_line_and_names():
    deeper = {"norm": x}
    with pytest.raises(DimError) as caught:
        md.softmax(deeper["norm"], over="keys")
    line = caught.traceback[0].lineno + 1
    assert str(caught.value) == (
        "no dim 'keys' in deeper['norm'][batch=2 seq=3 embed=4]\n"
        f'  at test_named_array.py:{line}: md.softmax(deeper["norm"], over="keys")'
    )


def test_errors_without_source_text():
    with pytest.raises(DimError, match=r"no dim 'embd' in x\[batch=2"):
        eval("md.sum(deeper, over='embd')", {"md": md, "deeper": x})


def test_dims_that_are_none_have_a_caret():
    for text, why in (
        ("a a", "duplicate dim 'a'"),
        ("a=0", "a size must be"),
        ("a =3", "'=' stands"),
        ("2b", "not a valid dim name"),
    ):
        with pytest.raises(NotationError) as caught:
            md.dims(text)
        assert "^" in str(caught.value) and (why in str(caught.value) or "expected" in str(caught.value)), caught.value
    with pytest.raises(MeshDSLError, match="3 is an int, not dims"):
        md.sum(x, over=3)
