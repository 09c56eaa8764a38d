"""``dot_product_attention``: the numbers of jax's in every form, sharded and not, and the form planned."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.experimental.pallas.ops.gpu.attention import mha

import meshdsl as md
from meshdsl.errors import ArgumentError
from meshdsl.models.dot_product_attention import dot_product_attention
from meshdsl.models.running_softmax import BLOCK
from meshdsl.primitives.alternatives import taking
from tests.models.values import quick
from tests.sweeps import swept

RNG = np.random.default_rng(11)
PLAIN, RINGS = ("plain", "recomputed", "blockwise"), ("ring", "permuted_ring")
LENGTHS = np.array([5, 0], np.int32)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def kept(*shape):
    return jnp.asarray(RNG.random(shape) < 0.5)


def operands(queries, keys, heads=6, groups=3, batch=2, head=4):
    return normal(batch, queries, heads, head), *(normal(batch, keys, heads // groups, head) for _ in range(2))


def offered(arrays, given):
    """The name and the functions that a call offers."""
    jaxpr = jax.make_jaxpr(lambda *x: dot_product_attention(*x, **given))(*arrays)
    (mark,) = (each for each in jaxpr.eqns if each.primitive.name == "alternatives")
    return mark.params["name"], mark.params["names"]


def values(attend, arrays, given):
    """The result and the gradients of all arrays and of the bias, in float32."""

    def total(arrays, bias):
        made = attend(*arrays, bias, **{name: x for name, x in given.items() if name != "bias"})
        return jnp.sum(jnp.sin(made.astype(jnp.float32))), made

    bias = given.get("bias")
    grads, made = quick(jax.grad(total, (0, 1) if bias is not None else 0, has_aux=True))(arrays, bias)
    return [np.asarray(x, np.float32) for x in jax.tree.leaves((made, grads))]


def compare(form, arrays, given, error=3e-6):
    name, _ = offered(arrays, given | {"blocks": 2})
    expected = values(jax.nn.dot_product_attention, arrays, given)
    with taking([(name, form)]):
        found = values(partial(dot_product_attention, blocks=2), arrays, given)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=error, atol=error * max(1, np.abs(b).max()))


@pytest.mark.parametrize(
    "keys, given",
    [
        (16, {"bias": normal(1, 6, 16, 16), "mask": kept(2, 1, 16, 16)}),
        (16, {"bias": normal(2, 1, 16, 1), "mask": kept(2, 6, 16, 1), "is_causal": True}),
        (16, {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS[::-1], "local_window_size": 3}),
        (16, {"bias": jnp.where(kept(1, 1, 16, 16) | np.eye(16, dtype=bool), 0, -jnp.inf)}),
        (16, {"bias": jnp.full((2, 1, 1, 16), jnp.finfo(jnp.float32).min)}),
        (2 * BLOCK + 1, {"mask": kept(2, 1, 16, 2 * BLOCK + 1), "bias": normal(1, 6, 1, 2 * BLOCK + 1), "scale": 0.3}),
        (BLOCK + 8, {"is_causal": True, "mask": kept(1, 1, 16, 1)}),
        (BLOCK + 8, {"key_value_seq_lengths": np.array([BLOCK + 2, 0], np.int32)}),
        (BLOCK + 8, {"mask": kept(2, 1, 1, BLOCK + 8) & False}),
    ],
    ids=[
        "both",
        "columns of 1",
        "lengths",
        "infinite",
        "least",
        "blocks",
        "causal",
        "lengths of blocks",
        "none",
    ],
)
def test_blocks_of_keys_have_the_numbers_of_jax(keys, given):
    compare("blockwise", operands(16, keys), given)


@pytest.mark.parametrize(
    "form, queries, keys, given",
    [
        ("ring", 24, 24, {"is_causal": True, "scale": 0.7}),
        ("permuted_ring", 24, 24, {"is_causal": True, "local_window_size": (5, 2), "query_seq_lengths": LENGTHS}),
        ("ring", 24, 24, {"is_causal": True, "local_window_size": (3, 0)}),
        ("ring", 16, 2 * BLOCK + 20, {"key_value_seq_lengths": np.array([BLOCK + 12, 0], np.int32)}),
        ("permuted_ring", 4 * BLOCK + 40, 4 * BLOCK + 40, {"is_causal": True}),
    ],
    ids=["scaled", "window", "left window", "cross", "blocks of visits"],
)
def test_rings_have_the_numbers_of_jax(form, queries, keys, given):
    small = {"heads": 1, "groups": 1, "head": 2} if queries > BLOCK else {}
    compare(form, operands(queries, keys, **small), given)


@swept("seed", range(12), left=range(3, 12))
def test_random_calls_have_the_numbers_of_jax(seed):
    rng = np.random.default_rng(seed)
    groups, heads, causal = (int(rng.integers(*span)) for span in ((1, 4), (1, 3), (0, 2)))
    queries, keys = (4 * int(rng.integers(1, 9)) for _ in range(2))
    keys = queries if rng.random() < 0.5 else keys
    sizes = [int(rng.choice([1, size])) for size in (2, heads * groups, queries, keys)]
    given = {"is_causal": bool(causal)}
    given |= {"bias": normal(*sizes)} if rng.random() < 0.3 else {}
    given |= {"mask": kept(*sizes)} if rng.random() < 0.3 else {}
    given |= {"local_window_size": (int(rng.integers(0, 9)), 4)} if rng.random() < 0.3 else {}
    given |= {"key_value_seq_lengths": rng.integers(0, keys, 2).astype(np.int32)} if rng.random() < 0.3 else {}
    arrays = operands(queries, keys, heads * groups, groups)
    for form in offered(arrays, given | {"blocks": 2})[1]:
        compare(form, arrays, given, error=1e-5)


@pytest.mark.parametrize("form", ["blockwise", "permuted_ring"])
def test_bfloat16_has_its_softmax_in_float32(form):
    arrays, given = operands(64, 64), {"is_causal": True}
    rounded = [x.astype(jnp.bfloat16) for x in arrays]
    exact = values(jax.nn.dot_product_attention, [x.astype(jnp.float32) for x in rounded], given)
    with taking([("attention.causal.blocks", form)]):
        found = values(partial(dot_product_attention, blocks=4), rounded, given)
    for a, b in zip(found, exact, strict=True):
        assert np.abs(a - b).max() < 0.02 * max(1, np.abs(b).max())


def test_sequences_may_have_no_batch():
    query, key, value = (x[0] for x in operands(8, 8))
    expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    for form in (*PLAIN, *RINGS):
        with taking([("attention.causal.blocks", form)]):
            found = dot_product_attention(query, key, value, is_causal=True, blocks=2)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "keys, given, name, rings",
    [
        (16, {}, "attention.blocks", 1),
        (16, {"is_causal": True, "local_window_size": 3}, "attention.causal.window.blocks", 2),
        (8, {}, "attention.cross.blocks", 1),
        (8, {"is_causal": True}, "attention.causal.cross", 0),
        (16, {"mask": kept(1, 1, 16, 16)}, "attention.mask", 0),
        (16, {"bias": normal(1, 1, 16, 16)}, "attention.bias", 0),
        (16, {"is_causal": True, "query_seq_lengths": LENGTHS}, "attention.causal.lengths.blocks", 2),
        (16, {"is_causal": True, "key_value_seq_lengths": LENGTHS}, "attention.causal.lengths", 0),
    ],
)
def test_a_call_offers_the_forms_that_can_express_it(keys, given, name, rings):
    arrays = operands(16, keys)
    assert offered(arrays, given | {"blocks": 4}) == (name, (*PLAIN, *RINGS[:rings]))
    assert offered(arrays, given) == (name.removesuffix(".blocks"), PLAIN)


def test_calls_of_other_forms_are_of_another_name():
    """A name is of the same functions in all of a step, or the step is refused."""
    lengths, given = jnp.asarray(LENGTHS), {"is_causal": True, "blocks": 4}

    def step(query, key, value):
        x = dot_product_attention(query, key, value, query_seq_lengths=lengths, **given)
        x = dot_product_attention(x, key, value, key_value_seq_lengths=lengths, **given)
        x = dot_product_attention(
            x, key, value, forms={"kernel": partial(jax.nn.dot_product_attention, is_causal=True)}, **given
        )
        return dot_product_attention(x, key, value, is_causal=True)

    arrays = operands(16, 16)
    plan = md.parallelize(step, "seq=2", {"**": "seq=S(1)"}).plan(*arrays)
    names = ["attention.causal" + kind for kind in (".lengths.blocks", ".lengths", ".blocks.kernel", "")]
    assert [name for name, _ in plan.alternatives] == names


@pytest.mark.parametrize("form", ["blockwise", "ring"])
def test_forms_without_a_forward_mode_are_left_out(form):
    """``jax.jvp`` of a function with ``jax.custom_vjp`` is refused by jax where it is compiled."""

    def step(*arrays):
        return jax.jvp(partial(dot_product_attention, blocks=4), arrays, arrays)[1]

    sharded = md.parallelize(step, "seq=4", {"**": "seq=S(1)"})
    plan = sharded.plan(*(arrays := operands(16, 16)))
    assert re.search(f"{form} cannot be planned: a forward-mode derivative at .*jax.jvp", plan.notes[-1])
    np.testing.assert_allclose(sharded(*arrays), step(*arrays), rtol=1e-4, atol=1e-5)


def test_second_derivatives_are_those_of_jax_in_blocks():
    """Forward over reverse mode differentiates the backward pass itself."""

    def product(attend, x):
        return jax.jvp(jax.grad(lambda x: jnp.sum(attend(x, x, x, is_causal=True) ** 2)), (x,), (jnp.sin(x),))[1]

    x = normal(1, 8, 2, 4)
    with taking([("attention.causal", "blockwise")]):
        found = product(dot_product_attention, x)
    np.testing.assert_allclose(found, product(jax.nn.dot_product_attention, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "blocks", "causal", "text"),
    [
        ((2, 0, 4, 8), 1, False, "blockwise cannot be planned: .*zero-size array"),
        ((2, 12, 4, 8), 4, True, "permuted_ring cannot be planned: .*seq=12 does not divide into 8 chunks"),
    ],
)
def test_forms_that_refuse_lengths_say_why(shape, blocks, causal, text):
    def step(query, key):
        return dot_product_attention(query, key, key, is_causal=causal, blocks=blocks)

    query = jnp.ones((2, shape[1] or 12, 4, 8))
    plan = md.parallelize(step, "seq=4", {"**": "seq=B"}).plan(query, jnp.ones(shape))
    assert re.search(text, plan.notes[-1])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"blocks": 0}, "blocks: 0 is an int, not the size of the axis"),
        ({"blocks": "8"}, "blocks: '8' is a str, not the size of the axis"),
        ({"forms": [max]}, "forms: .* is a list, not a dict"),
        ({"forms": {"plain": max}}, "forms: 'plain' is the name of a form of its own"),
        ({"forms": {"flash": 3}}, "forms: flash: 3 is an int, not a function"),
        ({"query": jnp.ones((4, 8))}, r"query: shape \(4, 8\) is neither \[batch seq heads head\]"),
        ({"key": md.named(jnp.ones((2, 8, 4)), "seq heads head")}, r"key: .*\[seq heads head\]; give key.array"),
    ],
)
def test_arguments_that_jax_does_not_check(given, text):
    arrays = dict(zip(("query", "key", "value"), operands(8, 8), strict=True))
    with pytest.raises(ArgumentError, match=text):
        dot_product_attention(**{**arrays, **given})


def test_kernels_with_a_rule_are_forms_of_their_own():
    """The planner counts the products of the function that the kernel is like: it sees none inside of Pallas."""
    causal = partial(jax.nn.dot_product_attention, is_causal=True)

    @md.rule("b _ h _, b _ h _, b _ h _ -> b _ h _", share=0.5, like=causal)
    def flash(query, key, value):
        return mha(query, key, value, segment_ids=None, causal=True, sm_scale=0.25, interpret=True)

    given = {"is_causal": True, "forms": {"flash": flash}}
    arrays = operands(128, 128, groups=1, heads=4, head=16)
    assert offered(arrays, given) == ("attention.causal.flash", (*PLAIN, "flash"))
    assert offered(arrays, given | {"mask": kept(1, 1, 128, 128)})[1] == PLAIN

    def step(*arrays):
        return jax.grad(lambda *x: jnp.mean(dot_product_attention(*x, **given) ** 2), (0, 1, 2))(*arrays)

    sharded = md.parallelize(step, "model=4", {"**": "model=S(2)"}, outputs={"**": "model=S(2)"})
    assert sharded.plan(*arrays).alternatives == (("attention.causal.flash", "flash"),)
    expected = jax.grad(lambda *x: jnp.mean(causal(*x) ** 2), (0, 1, 2))(*arrays)
    for a, b in zip(sharded(*arrays), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_other_arguments_of_jax_take_its_function():
    arrays = operands(16, 16)
    for given in ({"implementation": "xla"}, {"return_residual": True}, {"scale": jnp.float32(0.5)}):
        found = jax.make_jaxpr(lambda *x, given=given: dot_product_attention(*x, **given))(*arrays)
        assert "alternatives" not in str(found)
    with pytest.raises(ValueError, match="multiple of key/value heads"):
        dot_product_attention(*operands(8, 8)[:2][::-1], operands(8, 8)[0])


SIZES = {"q": (32, 4, 8), "k": (32, 2, 8), "v": (32, 2, 8)}


def attended(form, given, w, x):
    """Attention in one form, that of jax without any."""
    query, key, value = (jnp.einsum("bse,ehd->bshd", x, w[name]) for name in "qkv")
    if not form:
        return jax.nn.dot_product_attention(query, key, value, **given)
    name, _ = offered((query, key, value), given | {"blocks": 4})
    with taking([(name, form)]):
        return dot_product_attention(query, key, value, **given, blocks=4)


@swept("form", ["blockwise", "ring", "permuted_ring"], left=["ring"])
def test_a_split_sequence_has_the_numbers_of_jax(form):
    given = {"is_causal": True, "local_window_size": (9, 0)}
    if form == "blockwise":
        given |= {"bias": normal(1, 4, 32, 32), "mask": kept(2, 1, 32, 32)}

    def step(form, w, x):
        return jax.tree.map(lambda w, g: w - g, w, jax.grad(lambda w: jnp.mean(attended(form, given, w, x) ** 2))(w))

    w, x = {name: normal(*shape) / 4 for name, shape in SIZES.items()}, normal(2, 32, 32)
    sharded = md.parallelize(partial(step, form), "seq=4,data=2", {"x": "seq=S(1) data=S(0)"})
    assert sharded.verify(w, x).equal
    for a, b in zip(*map(jax.tree.leaves, (sharded(w, x), partial(step, "")(w, x))), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("seq", "taken"), [(128, "plain"), (65536, "blockwise")])
def test_long_sequences_take_blocks_within_the_memory(seq, taken):
    """Heads do not divide here, so that all of 64 GB of weights would be on one device, a row of each in the ring."""

    def step(w, x):
        def loss(w):
            query, key, value = jnp.einsum("bse,cehd->cbshd", x, w)
            return jnp.mean(dot_product_attention(query, key, value, is_causal=True) ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    shapes = jax.ShapeDtypeStruct((3, 256, 1, 64), jnp.float32), jax.ShapeDtypeStruct((1, seq, 256), jnp.float32)
    mesh = md.Mesh(seq=4, topology="dgx-h100")
    plan = md.parallelize(step, mesh, {"x": "seq=S(1)", "w": "seq=B"}, memory="8GB").plan(*shapes)
    assert plan.alternatives == (("attention.causal", taken),)


def test_masks_of_all_blocks_are_never_held_at_once():
    """Jax moves whatever depends on no value of a loop over layers out of it, where that is differentiated."""

    def loss(w, x):
        def layer(x, w):
            return x + dot_product_attention(x @ w, x, x, is_causal=True), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, w)[0])

    shapes = [jax.ShapeDtypeStruct(size, jnp.float32) for size in [(2, 8, 8), (1, 4 * BLOCK, 1, 8)]]
    with taking([("attention.causal", "blockwise")]):
        traced = jax.make_jaxpr(jax.grad(loss))(*shapes)
    masks = re.findall(rf"bool\[([\d,]+),{4 * BLOCK},{BLOCK}\]", str(traced))
    assert masks and all(set(sizes.split(",")) == {"1"} for sizes in masks)


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_the_attention_layers_of_flax_take_it(library):
    """As on the page: ``linen`` gives it the arguments that it has, ``nnx`` gives all."""

    def attend(query, key, value, mask=None, is_causal=True, **_):
        mask = None if mask is None else mask.astype(bool)
        return dot_product_attention(query, key, value, mask=mask, is_causal=is_causal)

    x = normal(2, 8, 16)
    if library == "linen":
        plain, ours = (linen.MultiHeadDotProductAttention(4, **given) for given in ({}, {"attention_fn": attend}))
        w = plain.init(jax.random.key(0), x)
        expected = plain.apply(w, x, mask=linen.make_causal_mask(x[..., 0]))
        found = ours.apply(w, x)
    else:
        plain, ours = (
            nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0), **given)
            for given in ({}, {"attention_fn": attend})
        )
        expected, found = plain(x, is_causal=True), ours(x, is_causal=True)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
