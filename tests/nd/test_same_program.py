"""No overhead: the jaxpr of every operation is the one of the function written by hand on plain arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md

X = md.dims("batch=2 seq=3 embed=4")
W = md.dims("embed=4 hidden=5")
KEY = jax.random.key(0)


def tensor(dims, kind="float"):
    dims = md.dims(dims)
    if kind == "int":
        return md.named(jnp.arange(dims.size).reshape(dims.sizes) % 3, dims)
    return md.named(jnp.sin(jnp.arange(dims.size, dtype=jnp.float32)).reshape(dims.sizes), dims)


x, w, bias, row = tensor(X), tensor(W), tensor("embed=4"), tensor("batch=2 embed=4")
mask, tokens, table = tensor("query=3 key=3") > 0, tensor("batch=2 seq=3", "int"), tensor("vocab=7 embed=4")
scores, labels = tensor("batch=2 heads=2 query=3 key=3"), tensor("batch=2 seq=3", "int")
q, k = tensor("batch=2 query=3 heads=2 head=4"), tensor("batch=2 key=5 heads=2 head=4")
image, kernel = tensor("batch=2 height=6 width=6 channels=4"), tensor("height=3 width=3 channels=4 filters=8")


def rms(a):
    return a * lax.rsqrt(jnp.mean(jnp.square(a), axis=-1) + 1e-6)[..., None]


def centre(a):
    a = a - jnp.mean(a, axis=-1)[..., None]
    return rms(a)


def over_heads(fn):
    return lambda a, b: fn(a, b, (((3,), (3,)), ((0, 2), (0, 2))), preferred_element_type=jnp.float32)


def along(a, i):
    return jnp.squeeze(jnp.take_along_axis(a, i[..., None], axis=2), 2)


def drop(a):
    return jnp.where(jax.random.bernoulli(KEY, 0.5, a.shape), a / 0.5, jnp.zeros((), a.dtype))


# name: (operands, by name, by hand, dims of the result)
CASES = {
    "add": ((x, bias), lambda x, b: x + b, lambda x, b: x + b, "batch seq embed"),
    "add first": ((bias, x), lambda b, x: b + x, lambda b, x: b + x, "batch seq embed"),
    "in the middle": ((x, row), lambda x, r: x * r, lambda x, r: x * r[:, None], "batch seq embed"),
    "outer": ((bias, tokens), lambda b, t: b * t, lambda b, t: b[:, None, None] * t, "embed batch seq"),
    "scalars": ((x,), lambda x: 2 * x**2 - 1 / (x + 3), lambda x: 2 * x**2 - 1 / (x + 3), "batch seq embed"),
    "contradicting": ((x, tensor("embed=4 batch=2")), lambda x, y: x - y, lambda x, y: x - y.T[:, None], X.names),
    "compare": ((x, bias), lambda x, b: (x > b) & ~(x <= 0), lambda x, b: (x > b) & ~(x <= 0), "batch seq embed"),
    "where": ((mask, scores), lambda m, s: md.where(m, s, -1e9), lambda m, s: jnp.where(m, s, -1e9), scores.dims),
    "gelu": ((x,), md.gelu, jax.nn.gelu, "batch seq embed"),
    "apply": ((x, bias), lambda *a: md.apply(jnp.arctan2, *a), jnp.arctan2, "batch seq embed"),
    "astype": ((x,), lambda x: x.astype(jnp.bfloat16), lambda x: x.astype(jnp.bfloat16), "batch seq embed"),
    "dot": ((x, w), lambda *a: md.dot(*a, over="embed"), lambda x, w: x @ w, "batch seq hidden"),
    "dot einsum": ((q, k), lambda *a: md.dot(*a, over="head"), over_heads(lax.dot_general), "batch heads query key"),
    "dot two dims": (
        (tensor("batch=2 heads=2 query=3 head=4"), tensor("heads=2 head=4 embed=6")),
        lambda *a: md.dot(*a, over="heads head"),
        lambda a, b: jnp.tensordot(a, b, ((1, 3), (0, 1))),
        "batch query embed",
    ),
    "dot of three": (
        (x, w, tensor("hidden=5 out=2")),
        lambda *a: md.dot(*a, over="embed hidden"),
        lambda a, b, c: jnp.einsum(a, [0, 1, 2], b, [2, 3], c, [3, 4], [0, 1, 4]),
        "batch seq out",
    ),
    "outer dot": (
        (bias, tokens),
        lambda *a: md.dot(*a, over=""),
        lambda a, b: jnp.tensordot(a, b.astype(a.dtype), 0),
        "embed batch seq",
    ),
    "sum": ((x,), lambda x: md.sum(x, over="seq"), lambda x: jnp.sum(x, axis=1), "batch embed"),
    "mean of two": ((x,), lambda x: md.mean(x, over="embed batch"), lambda x: jnp.mean(x, axis=(0, 2)), "seq"),
    "max of all": ((x,), md.max, jnp.max, ""),
    "var": ((x,), lambda x: md.var(x, over="embed"), lambda x: jnp.var(x, axis=2), "batch seq"),
    "logsumexp": ((x,), lambda x: md.logsumexp(x, over="seq"), lambda x: jax.nn.logsumexp(x, axis=1), "batch embed"),
    "argmax": ((x,), lambda x: md.argmax(x, over="embed"), lambda x: jnp.argmax(x, axis=2), "batch seq"),
    "norm": ((x,), lambda x: md.norm(x, over="embed"), lambda x: jnp.sqrt(jnp.sum(jnp.square(x), axis=2)), "batch seq"),
    "softmax": ((scores,), lambda s: md.softmax(s, over="key"), jax.nn.softmax, scores.dims),
    "softmax of two": (
        (scores,),
        lambda s: md.softmax(s, over="query key"),
        lambda s: jax.nn.softmax(s, axis=(2, 3)),
        scores.dims,
    ),
    "log_softmax": ((x,), lambda x: md.log_softmax(x, over="seq"), lambda x: jax.nn.log_softmax(x, axis=1), X.names),
    "rms_norm": ((x,), lambda x: md.rms_norm(x, over="embed"), rms, X.names),
    "layer_norm": ((x,), lambda x: md.layer_norm(x, over="embed"), centre, X.names),
    "dim called as the argument": (
        (x,),
        lambda x: md.index(md.rename(x, seq="x"), x=1),
        lambda x: x[:, 1],
        "batch embed",
    ),
    "rename": ((x,), lambda x: md.rename(x, seq="key"), lambda x: x, "batch key embed"),
    "order": ((x,), lambda x: md.order(x, "embed batch seq"), lambda x: x.transpose(2, 0, 1), "embed batch seq"),
    "order as it is": ((x,), lambda x: md.order(x, X), lambda x: x, X.names),
    "split": (
        (x,),
        lambda x: md.split(x, embed="heads=2 head"),
        lambda x: x.reshape(2, 3, 2, 2),
        "batch seq heads head",
    ),
    "merge": ((scores,), lambda s: md.merge(s, both="query key"), lambda s: s.reshape(2, 2, 9), "batch heads both"),
    "merge apart": (
        (scores,),
        lambda s: md.merge(s, both="key heads"),
        lambda s: s.transpose(0, 3, 1, 2).reshape(2, 6, 3),
        "batch both query",
    ),
    "broadcast": (
        (row,),
        lambda r: md.broadcast(r, "batch seq=3 embed"),
        lambda r: jnp.broadcast_to(r[:, None], (2, 3, 4)),
        X.names,
    ),
    "concat": ((x, x), lambda *a: md.concat(a, over="seq"), lambda *a: jnp.concatenate(a, axis=1), X.names),
    "pack": ((x, x), lambda *a: md.pack(a, over="layers"), lambda *a: jnp.stack(a), "layers batch seq embed"),
    "pad": ((x,), lambda x: md.padded(x, seq=(1, 0)), lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0))), X.names),
    "roll": ((x,), lambda x: md.roll(x, 1, over="seq"), lambda x: jnp.roll(x, 1, 1), X.names),
    "flip": ((x,), lambda x: md.flip(x, over="seq"), lambda x: jnp.flip(x, 1), X.names),
    "index": ((x,), lambda x: md.index(x, seq=-1, embed=slice(0, 2)), lambda x: x[:, -1, 0:2], "batch embed"),
    "take rows": ((table, tokens), lambda *a: md.take(*a, over="vocab"), lambda t, i: t[i], "batch seq embed"),
    "take in the middle": (
        (x, tensor("pick=2", "int")),
        lambda *a: md.take(*a, over="seq"),
        lambda x, i: x[:, i],
        "batch pick embed",
    ),
    "take along": ((x, labels), lambda *a: md.take(*a, over="embed"), along, "batch seq"),
    "take along, kept": (
        (x, tensor("batch=2 pick=2", "int")),
        lambda *a: md.take(*a, over="seq"),
        lambda x, i: jnp.take_along_axis(x, i[:, :, None], axis=1),
        "batch pick embed",
    ),
    "update": (
        (x, tensor("batch=2 seq=1 embed=4")),
        lambda x, p: md.update(x, p, seq=1),
        lambda x, p: lax.dynamic_update_slice(x, p, (0, 1, 0)),
        X.names,
    ),
    "sort": ((x,), lambda x: md.sort(x, over="seq"), lambda x: jnp.sort(x, axis=1), X.names),
    "top_k": ((x,), lambda x: md.top_k(x, 2, over="embed")[1], lambda x: lax.top_k(x, 2)[1], X.names),
    "cumsum": ((x,), lambda x: md.cumsum(x, over="seq"), lambda x: lax.cumsum(x, axis=1), X.names),
    "cummax": ((x,), lambda x: md.cummax(x, over="seq", reverse=True), lambda x: lax.cummax(x, 1, True), X.names),
    "arange": ((), lambda: md.arange("seq=5"), lambda: jnp.arange(5, dtype=jnp.int32), "seq"),
    "one_hot": (
        (tokens,),
        lambda t: md.one_hot(t, "vocab=7"),
        lambda t: jax.nn.one_hot(t, 7, dtype=jnp.float32),
        "batch seq vocab",
    ),
    "causal": (
        (),
        lambda: md.causal("query=4 key=4"),
        lambda: lax.broadcasted_iota(jnp.int32, (4, 4), 0) >= lax.broadcasted_iota(jnp.int32, (4, 4), 1),
        "query key",
    ),
    "normal": ((), lambda: md.normal(KEY, W), lambda: jax.random.normal(KEY, (4, 5), jnp.float32), W.names),
    "dropout": ((x,), lambda x: md.dropout(KEY, x, 0.5), drop, X.names),
    "conv": (
        (image, kernel),
        lambda *a: md.conv(*a, over="height width", sum="channels", stride=2),
        lambda a, b: lax.conv_general_dilated(
            a, b, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), rhs_dilation=(1, 1)
        ),
        "batch height width filters",
    ),
    "max_pool": (
        (image,),
        lambda a: md.max_pool(a, over="height width", window=2),
        lambda a: lax.reduce_window(a, np.float32(-np.inf), lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        image.dims,
    ),
}


def plain(tensors):
    return [t.array for t in tensors]


@pytest.mark.parametrize("name", CASES)
def test_the_program_is_the_one_written_by_hand(name):
    operands, by_name, by_hand, _ = CASES[name]
    assert str(jax.make_jaxpr(by_name)(*operands)) == str(jax.make_jaxpr(by_hand)(*plain(operands)))


@pytest.mark.parametrize("name", CASES)
def test_the_dims_and_the_numbers(name):
    operands, by_name, by_hand, dims = CASES[name]
    made, expected = by_name(*operands), by_hand(*plain(operands))
    assert getattr(made, "dims", ()) == md.dims(dims).names
    np.testing.assert_array_equal(getattr(made, "array", made), expected)


def block(params, x):
    y = md.rms_norm(x, over="embed") * params["scale"]
    query, key, value = (md.dot(y, params[name], over="embed") for name in ("query", "key", "value"))
    key, value = md.rename(key, seq="key"), md.rename(value, seq="key")
    scores = md.dot(query, key, over="head") * 0.5
    weights = md.softmax(md.where(md.causal("seq=3 key=3"), scores, -1e9), over="key")
    x = x + md.dot(md.dot(weights, value, over="key"), params["out"], over="heads head")
    return x + md.dot(md.gelu(md.dot(x, params["up"], over="embed")), params["down"], over="hidden")


def block_by_hand(params, x):
    y = rms(x) * params["scale"]
    query, key, value = (jnp.einsum("bse,ehd->bshd", y, params[name]) for name in ("query", "key", "value"))
    scores = jnp.einsum("bshd,bthd->bhst", query, key) * 0.5
    rows, columns = (lax.broadcasted_iota(jnp.int32, (3, 3), i) for i in (0, 1))
    weights = jax.nn.softmax(jnp.where(rows >= columns, scores, -1e9))
    mixed = jnp.einsum("bhst,bthd->bhsd", weights, value)
    x = x + jnp.tensordot(mixed, params["out"], ((1, 3), (0, 1)))
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


def block_params():
    dims = dict.fromkeys(("query", "key", "value"), "embed=4 heads=2 head=4")
    dims |= {"out": "heads=2 head=4 embed=4", "up": "embed=4 hidden=8", "down": "hidden=8 embed=4", "scale": "embed=4"}
    return {name: tensor(text) for name, text in dims.items()}


def test_a_block_of_attention_and_mlp_is_the_one_written_by_hand():
    params = block_params()
    arrays = {name: w.array for name, w in params.items()}
    assert str(jax.make_jaxpr(block)(params, x)) == str(jax.make_jaxpr(block_by_hand)(arrays, x.array))

    def loss(fn, total):
        return lambda p, x: total(fn(p, x) ** 2)

    gradient = jax.make_jaxpr(jax.grad(loss(block, md.sum)))(params, x)
    by_hand = jax.make_jaxpr(jax.grad(loss(block_by_hand, jnp.sum)))(arrays, x.array)
    assert str(gradient) == str(by_hand)


def test_a_grouped_convolution_is_the_one_written_by_hand():
    few = tensor("height=3 width=3 channels=2 filters=8")
    named = jax.make_jaxpr(lambda a, b: md.conv(a, b, over="height width", sum="channels", dilation=2, groups=2))(
        image, few
    )
    order = ("NHWC", "HWIO", "NHWC")

    def by_hand(a, b):
        return lax.conv_general_dilated(a, b, (1, 1), "SAME", None, (2, 2), order, 2)

    assert str(named) == str(jax.make_jaxpr(by_hand)(image.array, few.array))
