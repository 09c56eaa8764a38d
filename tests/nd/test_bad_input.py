"""What is no input of the DSL: one error of our own each, with both values, the remedy and the user's line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshdsl as md
from meshdsl.errors import ArgumentError, DimError, MeshDSLError, NotationError

KEY = jax.random.key(0)
x = md.named(np.arange(24, dtype=np.float32).reshape(2, 3, 4), "batch seq embed")
w = md.named(np.ones((4, 5), np.float32), "embed hidden")
image = md.named(np.ones((1, 4, 4, 2), np.float32), "batch height width channels")
kernel = md.named(np.ones((3, 3, 2, 3), np.float32), "height width channels filters")
labels = md.named(np.zeros((2, 3), np.int32), "batch seq")
layers = md.named(np.ones((3, 4), np.float32), "layers embed")
SPACE = {"over": "height width", "sum": "channels"}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(md.ones("embed=4 out=4"))


class Partitioned(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((4, 4)), out_sharding=("embed", None), eager_sharding=False)


def count(carry, _):
    return carry, None


DOUBLED = {
    "dim 'batch' would be twice in [batch=2 batch=2 seq=3 embed=4]": lambda: md.vmap(lambda a: a + x, over="batch")(x),
    "dim 'layers' would be twice in [layers=3 layers=3 embed=4]": (
        lambda: md.scan(lambda c, _: (c, layers), 0.0, layers, over="layers")
    ),
    "dim 'embed' of layers is in the block's [embed out] too; stack over": lambda: md.stack(
        Block, "embed=3", nnx.Rngs(0)
    ),
    "dim 'embed' of layers is in the block's [embed ] too": lambda: md.stack(Partitioned, "embed=3", nnx.Rngs(0)),
    "dim 'a' would be twice in [a=2 a=2]; md.rename gives one": lambda: md.NamedArray(np.ones((2, 2)), ("a", "a")),
    "'ab' is a str, not a tuple of names; md.named(": lambda: md.NamedArray(np.ones((2, 2)), "ab"),
    "dim 'batch', which is neither slid along nor summed, is in x[batch=1 height=4 width=4 channels=2] and "
    "kernel[height=3 width=3 channels=2 batch=3]; md.rename": (
        lambda: md.conv(image, md.rename(kernel, filters="batch"), **SPACE)
    ),
}

POSITIONS = {
    "seq: Array([0, 1], dtype=int32) is a jaxlib.ArrayImpl, not a position; md.take(x, positions, over='seq')": (
        lambda: md.index(x, seq=jnp.arange(2, dtype=jnp.int32))
    ),
    "seq: array([0, 1], dtype=int8) is a numpy.ndarray, not a position": (
        lambda: md.index(x, seq=np.arange(2, dtype=np.int8))
    ),
    "seq: True is a bool, not a position": lambda: md.index(x, seq=True),
    "seq: [batch=2 seq=3] is a tensor, not a position": lambda: md.index(x, seq=labels),
    "seq: 1.0 is a float, not a position;": lambda: md.index(x, batch=0, seq=1.0),
    "seq=3: there are 3 in x[batch=2 seq=3 embed=4]": lambda: md.index(x, seq=3),
    "seq: slice(0, 1.5, None): start, stop and step are known": lambda: md.index(x, seq=slice(0, 1.5)),
    "positions are whole numbers, not float32 as in x[embed=4 hidden=5]": lambda: md.take(x, w * 1, over="seq"),
    "positions are whole numbers, not float32 as in w[embed=4 hidden=5]": lambda: md.take(x, w, over="seq"),
    "positions are whole numbers, not float32 as in 1.5": lambda: md.take(x, 1.5, over="seq"),
    "[0, 1] is a list, not a tensor and not a scalar; md.named(array": lambda: md.take(x, [0, 1], over="seq"),
    "positions are whole numbers, not float32 as in w[embed=4 hidden=5]\n": lambda: md.one_hot(w, "n=3"),
    "dim 'seq' would be there twice in [batch=2 seq=3 seq=3]": lambda: md.one_hot(labels, "seq=3"),
    "positions are whole numbers, not float32 as in x[batch=2 seq=3 embed=4]": (
        lambda: md.cross_entropy(x, x, over="embed")
    ),
    "k=7 is no number of elements from 0 to 4, as many as 'embed' has in [batch=2": lambda: md.top_k(x, 7, "embed"),
    "3 elements from seq=1 on: there are 3 in x[batch=2 seq=3 embed=4]": lambda: md.update(x, x, seq=1),
    "5 elements from seq=0 on: there are 3 in x[batch=2 seq=3 embed=4]": (
        lambda: md.update(x, md.padded(x, seq=(2, 0)), seq=0)
    ),
    "bool is written over float32; part.astype(x.dtype)": lambda: md.update(x, x > 0, seq=0),
    "[embed=4 hidden=5] is written over x[batch=2 seq=3 embed=4]; both": lambda: md.update(x, w, seq=0),
    "shift: 1.5 is a float, not a number of positions": lambda: md.roll(x, 1.5, over="seq"),
}

ONE_VALUE = {
    "a tensor with dims [batch=2 seq=3 embed=4] is not true or false\n  md.any or md.all": lambda: bool(x > 1e9),
    "a tensor with dims [batch=2 seq=3 embed=4] is not true or false": lambda: 0 < x < 1,
    "a tensor with dims [batch=2 seq=3 embed=4 hidden=5] is not true or false": lambda: x in [w],
    "a tensor with dims [batch=2 seq=3 embed=4] is not a float": lambda: float(x),
    "a tensor with dims [batch=2 seq=3 embed=4] is not an int": lambda: int(x),
    "x[...] does not say along which dim; md.index(x, seq=0) picks": lambda: x[0],
    "x[...] does not say along which dim": lambda: 3.0 in x,
    "x[...] does not say along which dim; md.index": lambda: list(x),
    "[batch=2 seq=3 embed=4] has names, a numpy array has none; .array": lambda: np.mean(x),
    "None is a NoneType, not a tensor and not a scalar": lambda: x == None,  # noqa: E711
    "rate is one number, not a tensor with dims [embed=4 hidden=5]": lambda: md.dropout(KEY, x, w),
    "value is one number, not a tensor with dims": lambda: md.full("n=3", w),
    "'a' is a str, not a tensor and not a scalar": lambda: md.normal(KEY, "n=3", std="a"),
    "3 is an int, not a random key; jax.random.key(0) makes one": lambda: md.normal(3, "n=3"),
}

ARGUMENTS = {
    "one dim is wanted here, not 2: over='seq embed'": lambda: md.concat([x, x], over="seq embed"),
    "one dim is wanted here, not 2: over='a b'": lambda: md.pack([x, x], over="a b"),
    "one dim is wanted here, not 2: sum='a b'": lambda: md.conv(image, kernel, over="height width", sum="a b"),
    "one dim is wanted here, not 2: seq='a b'": lambda: md.rename(x, seq="a b"),
    "one dim is wanted here, not 2: over='layers embed'": lambda: md.scan(count, x, layers, over="layers embed"),
    "[] is a list, where a list of tensors is joined, at least one": lambda: md.concat([], over="seq"),
    "[] is a list, where a list of tensors": lambda: md.pack([], over="seq"),
    "[batch=2 seq=3 embed=4] is a tensor, where a list of tensors is": lambda: md.concat(x, over="seq"),
    "no dims are given that 'new' is to be made of": lambda: md.merge(x, new=""),
    "padding=[(1, 1)] along height width: 'SAME', 'SAME_LOWER', 'VALID' or 2 times (before, after)": (
        lambda: md.conv(image, kernel, padding=[(1, 1)], **SPACE)
    ),
    "padding='FULL' along height: 'SAME'": lambda: md.max_pool(image, over="height", window=2, padding="FULL"),
    "window=(2,) along height width: a number >= 1 for all, or 2 of them": (
        lambda: md.sum_pool(image, over="height width", window=(2,))
    ),
    "stride=0 along height width: a number >= 1": lambda: md.conv(image, kernel, stride=0, **SPACE),
    "groups=2 does not divide filters=3 of kernel[": lambda: md.conv(image, kernel, groups=2, **SPACE),
    "seq=(1,): (elements before, elements after) are wanted": lambda: md.padded(x, seq=(1,)),
    "seq=(-1, 0): (elements before, elements after) are": lambda: md.padded(x, seq=(-1, 0)),
    "xs holds no tensor: how many trips along 'layers'? md.scan(f, init, over='layers', length=8) says it": (
        lambda: md.scan(count, x, None, over="layers")
    ),
    "all that is mapped along 'layers' is of one size there, not:\n  length=4\n  [layers=3 embed=4]": (
        lambda: md.scan(count, x, layers, over="layers", length=4)
    ),
    "all that is mapped along 'layers' is of one size there, not:\n  [layers=3 embed=4]\n  an array of shape (4,)": (
        lambda: md.scan(count, x, (layers, np.ones(4)), over="layers")
    ),
    "all that is mapped along 'embed' is of one size there, not:\n  [layers=3 embed=4]\n  [embed=3]": (
        lambda: md.vmap(count, over="embed")(layers, md.rename(md.index(layers, embed=0), layers="embed"))
    ),
    "no number of trips along 'layers' is said by:\n  length=2.0": (
        lambda: md.scan(count, x, over="layers", length=2.0)
    ),
    "[batch=2 seq=3 embed=4] is a tensor, not the next carry and a result: f of scan returns (carry, y)": (
        lambda: md.scan(lambda c, _: c, x, layers, over="layers")
    ),
    "0 is an int, not random streams; nnx.Rngs(0)": lambda: md.stack(Block, "layers=2", 0),
    ", not a flax module, of which stack": lambda: md.stack(lambda rngs: 3, "layers=2", nnx.Rngs(0)),
}

CALLED = {
    "no dim 'emed' in x[batch=2 seq=3 embed=4]: did you mean 'embed'?": lambda: md.dropout(KEY, x, 0.5, over="emed"),
    "no dim 'emed' in x[batch=2 seq=3 embed=4]: did you": lambda: md.categorical(KEY, x, over="emed"),
    "dim 'seq' has two sizes: 7 in y[seq=7] and 3 in x[batch=2": lambda: md.where(md.zeros("seq=7") > 0, x, 0.0),
    "dim 'embed' has two sizes: 4 in w[embed=4 hidden=5] and 3 in x[embed=3]": (
        lambda: md.apply(jnp.add, w, md.zeros("embed=3"))
    ),
    "no dim 'q' in x[batch=2 seq=3 embed=4]: did you mean 'seq'?\n  no dim 'q' in y[": (
        lambda: md.dot(*[x, w], over="q")
    ),
    "'w' is a str, not a tensor and not a scalar": lambda: md.sum("w"),
    "2.0 is a float, not a tensor with named dims": lambda: md.sum(2.0),
    "dim 'embed' of [embed] has no size here": lambda: md.zeros("embed"),
    "no dim 'emed' in [embed=4 out=3]; did you mean 'embed'?": lambda: md.fan_in(KEY, "embed=4 out=3", over="emed"),
    "no dim 'sq' in [batch=2 seq=3 embed=4]; did you mean 'seq'?": lambda: x.shape["sq"],
}

TEXTS = {
    "dim 'embed' is named twice\n  embed embed\n        ^\n": lambda: md.sum(x, over="embed embed"),
    "dim 'a' is named twice\n  a a\n    ^\n": lambda: md.named(np.ones((2, 2)), "a a"),
    "Array((), dtype=key<fry>) overlaying: is a jax.PRNGKeyArray, not dims": lambda: md.zeros(KEY),
}

POLICIES = {
    "no remat policy 'dost'; did you mean 'dots'?": lambda: md.stack(Block, "layers=2", nnx.Rngs(0), remat="dost"),
    "no remat policy 'wieghts'; did you mean 'weights'?": lambda: md.remat(count, "wieghts"),
}

TABLES = [
    *((DimError, table) for table in (DOUBLED, POSITIONS, ONE_VALUE, ARGUMENTS, CALLED)),
    (NotationError, TEXTS),
    (ArgumentError, POLICIES),
]


@pytest.mark.parametrize(
    ("kind", "text", "call"), [(kind, text, call) for kind, table in TABLES for text, call in table.items()]
)
def test_what_is_said(kind, text, call):
    with pytest.raises(MeshDSLError) as caught:
        call()
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert "\n  at test_bad_input.py:" in str(caught.value)


def test_doubled_dims_are_found_while_a_step_is_traced():
    with pytest.raises(DimError, match="dim 'batch' would be twice"):
        jax.make_jaxpr(lambda a: md.vmap(lambda row: row + a, over="batch")(a))(x)
    with pytest.raises(DimError, match="dim 'batch', which is neither"):
        jax.make_jaxpr(lambda a, k: md.conv(a, k, **SPACE))(image, md.rename(kernel, filters="batch"))


def test_trees_put_anything_in_the_place_of_the_array():
    tree = jax.tree.structure(x)
    for held in (None, object(), 0, "spec", jax.ShapeDtypeStruct((2,), np.int32)):
        assert jax.tree.unflatten(tree, [held]).held is held


def test_a_condition_on_a_tensor_is_an_error_when_traced_too():
    def step(a):
        return a if a > 0 else -a

    with pytest.raises(DimError, match=r"\[batch=2 seq=3 embed=4\] is not true or false"):
        jax.jit(step)(x)


def test_tensors_without_dims_are_scalars():
    one = md.NamedArray(jnp.float32(2.5), ())
    assert bool(one) and float(one) == 2.5 and int(one) == 2
    assert not md.NamedArray(np.float32(0), ())
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda a: 1 if a else 2)(one)


def test_exclusive_or():
    odd, large = labels % 2 == 1, labels > 2
    np.testing.assert_array_equal((odd ^ large).array, odd.array ^ large.array)
    np.testing.assert_array_equal((True ^ odd).array, ~odd.array)


def test_positions_are_scalars_of_any_kind():
    for i in (1, np.int8(1), np.array(1), jnp.int32(1), -2):
        np.testing.assert_array_equal(md.index(x, seq=i).array, x.array[:, 1])
    np.testing.assert_array_equal(jax.jit(lambda i: md.index(x, seq=i))(1).array, x.array[:, 1])
    rows = jax.jit(lambda i: md.take(x, i, over="embed"))(md.arange("pick=3"))
    np.testing.assert_array_equal(rows.array, x.array[:, :, :3])
    np.testing.assert_array_equal(md.update(x, md.index(-x, seq=slice(1, 3)), seq=-2).array[:, 1:], -x.array[:, 1:])


def test_norms_of_whole_numbers_are_no_whole_numbers():
    whole = x.astype(np.int32)
    for norm in (md.rms_norm, md.layer_norm):
        assert norm(whole, over="embed").dtype == np.float32
        np.testing.assert_array_equal(norm(whole, over="embed").array, norm(x, over="embed").array)
