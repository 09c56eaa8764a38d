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
    "duplicate dim 'batch' in [batch=2 batch=2 seq=3 embed=4]": lambda: md.vmap(lambda a: a + x, over="batch")(x),
    "duplicate dim 'layers' in [layers=3 layers=3 embed=4]": (
        lambda: md.scan(lambda c, _: (c, layers), 0.0, layers, over="layers")
    ),
    "stack adds dim 'embed', but a variable has it: [embed out]; stack over": lambda: md.stack(
        Block, "embed=3", nnx.Rngs(0)
    ),
    "stack adds dim 'embed', but a variable has it: [embed ]": lambda: md.stack(Partitioned, "embed=3", nnx.Rngs(0)),
    "duplicate dim 'a' in [a=2 a=2]; rename one of them first with md.rename": lambda: md.NamedArray(
        np.ones((2, 2)), ("a", "a")
    ),
    "'ab' is a str, not a tuple of names; md.named(": lambda: md.NamedArray(np.ones((2, 2)), "ab"),
    "dim 'batch' is in both x[batch=1 height=4 width=4 channels=2] and "
    "kernel[height=3 width=3 channels=2 batch=3], but neither in over nor in sum; rename one with md.rename": (
        lambda: md.conv(image, md.rename(kernel, filters="batch"), **SPACE)
    ),
}

POSITIONS = {
    "seq: Array([0, 1], dtype=int32) is a jaxlib.ArrayImpl, not an integer position; for tensors, md.take(": (
        lambda: md.index(x, seq=jnp.arange(2, dtype=jnp.int32))
    ),
    "seq: array([0, 1], dtype=int8) is a numpy.ndarray, not an integer position": (
        lambda: md.index(x, seq=np.arange(2, dtype=np.int8))
    ),
    "seq: True is a bool, not an integer position": lambda: md.index(x, seq=True),
    "seq: [batch=2 seq=3] is a tensor, not an integer position": lambda: md.index(x, seq=labels),
    "seq: 1.0 is a float, not an integer position;": lambda: md.index(x, batch=0, seq=1.0),
    "seq=3 is out of range: dim 'seq' has size 3 in x[batch=2 seq=3 embed=4]": lambda: md.index(x, seq=3),
    "seq: slice(0, 1.5, None) needs static integers, and a step other than 0; for": lambda: md.index(
        x, seq=slice(0, 1.5)
    ),
    "positions must be integers, not float32 as in x[embed=4 hidden=5]": lambda: md.take(x, w * 1, over="seq"),
    "positions must be integers, not float32 as in w[embed=4 hidden=5]": lambda: md.take(x, w, over="seq"),
    "positions must be integers, not float32 as in 1.5": lambda: md.take(x, 1.5, over="seq"),
    "[0, 1] is a list, not a tensor or scalar; name an array's dims with md.named(array": lambda: md.take(
        x, [0, 1], over="seq"
    ),
    "positions must be integers, not float32 as in w[embed=4 hidden=5]\n": lambda: md.one_hot(w, "n=3"),
    "duplicate dim 'seq' in [batch=2 seq=3 seq=3]": lambda: md.one_hot(labels, "seq=3"),
    "positions must be integers, not float32 as in x[batch=2 seq=3 embed=4]": (
        lambda: md.cross_entropy(x, x, over="embed")
    ),
    "k=7 is out of range; expected an integer from 0 to 4, the size of 'embed' in [batch=2": lambda: md.top_k(
        x, 7, "embed"
    ),
    "3 elements from seq=1 are out of range: dim 'seq' has size 3 in x[batch=2 seq=3 embed=4]": lambda: md.update(
        x, x, seq=1
    ),
    "5 elements from seq=0 are out of range: dim 'seq' has size 3 in x[batch=2 seq=3 embed=4]": (
        lambda: md.update(x, md.padded(x, seq=(2, 0)), seq=0)
    ),
    "cannot write bool over float32; convert the part with part.astype(x.dtype)": lambda: md.update(x, x > 0, seq=0),
    "cannot write [embed=4 hidden=5] over x[batch=2 seq=3 embed=4]: update needs equal dims": lambda: md.update(
        x, w, seq=0
    ),
    "shift: 1.5 is a float, not an integer number of positions": lambda: md.roll(x, 1.5, over="seq"),
}

ONE_VALUE = {
    "a tensor with dims [batch=2 seq=3 embed=4] has no single truth value\n  reduce it with md.any or md.all": lambda: (
        bool(x > 1e9)
    ),
    "a tensor with dims [batch=2 seq=3 embed=4] has no single truth value": lambda: 0 < x < 1,
    "a tensor with dims [batch=2 seq=3 embed=4 hidden=5] has no single truth value": lambda: x in [w],
    "a tensor with dims [batch=2 seq=3 embed=4] cannot be converted to float": lambda: float(x),
    "a tensor with dims [batch=2 seq=3 embed=4] cannot be converted to int": lambda: int(x),
    "x[...] does not name a dim; select with md.index(x, seq=0), iterate with md.scan(f": lambda: x[0],
    "x[...] does not name a dim": lambda: 3.0 in x,
    "x[...] does not name a dim; select with md.index": lambda: list(x),
    "[batch=2 seq=3 embed=4] is not converted to a numpy array, which would lose the names; use .array": lambda: (
        np.mean(x)
    ),
    "None is a NoneType, not a tensor or scalar": lambda: x == None,  # noqa: E711
    "rate must be a scalar, not a tensor with dims [embed=4 hidden=5]": lambda: md.dropout(KEY, x, w),
    "value must be a scalar, not a tensor with dims": lambda: md.full("n=3", w),
    "'a' is a str, not a tensor or scalar": lambda: md.normal(KEY, "n=3", std="a"),
    "3 is an int, not a random key; make one with jax.random.key(0)": lambda: md.normal(3, "n=3"),
}

ARGUMENTS = {
    "over='seq embed' names 2 dims; expected exactly one": lambda: md.concat([x, x], over="seq embed"),
    "over='a b' names 2 dims; expected exactly one": lambda: md.pack([x, x], over="a b"),
    "sum='a b' names 2 dims; expected exactly one": lambda: md.conv(image, kernel, over="height width", sum="a b"),
    "seq='a b' names 2 dims; expected exactly one": lambda: md.rename(x, seq="a b"),
    "over='layers embed' names 2 dims; expected exactly one": lambda: md.scan(count, x, layers, over="layers embed"),
    "[] is a list; expected a nonempty list of tensors, such as [x, y]": lambda: md.concat([], over="seq"),
    "[] is a list; expected a nonempty list of tensors": lambda: md.pack([], over="seq"),
    "[batch=2 seq=3 embed=4] is a tensor; expected a nonempty list of tensors": lambda: md.concat(x, over="seq"),
    "merge into 'new' names no dims to merge; to add a new dim, use md.pack or md.broadcast": lambda: md.merge(
        x, new=""
    ),
    "padding=[(1, 1)] is invalid for over='height width'; expected 'SAME', 'SAME_LOWER', 'VALID', or (before": (
        lambda: md.conv(image, kernel, padding=[(1, 1)], **SPACE)
    ),
    "padding='FULL' is invalid for over='height'; expected 'SAME'": lambda: md.max_pool(
        image, over="height", window=2, padding="FULL"
    ),
    "window=(2,) is invalid for over='height width'; expected an integer >= 1, or one per dim": (
        lambda: md.sum_pool(image, over="height width", window=(2,))
    ),
    "stride=0 is invalid for over='height width'; expected an integer >= 1": lambda: md.conv(
        image, kernel, stride=0, **SPACE
    ),
    "groups=2 does not divide filters=3 of kernel[": lambda: md.conv(image, kernel, groups=2, **SPACE),
    "seq=(1,) is not a padding; expected (before, after), two integers >= 0": lambda: md.padded(x, seq=(1,)),
    "seq=(-1, 0) is not a padding; expected (before, after)": lambda: md.padded(x, seq=(-1, 0)),
    "xs has no tensor to give the number of iterations along 'layers'; pass it: md.scan(f, init, "
    "over='layers', length=8)": (lambda: md.scan(count, x, None, over="layers")),
    "sizes along 'layers' differ:\n  length=4\n  [layers=3 embed=4]": (
        lambda: md.scan(count, x, layers, over="layers", length=4)
    ),
    "sizes along 'layers' differ:\n  [layers=3 embed=4]\n  an array of shape (4,)": (
        lambda: md.scan(count, x, (layers, np.ones(4)), over="layers")
    ),
    "sizes along 'embed' differ:\n  [layers=3 embed=4]\n  [embed=3]": (
        lambda: md.vmap(count, over="embed")(layers, md.rename(md.index(layers, embed=0), layers="embed"))
    ),
    "no integer number of iterations along 'layers' in:\n  length=2.0": (
        lambda: md.scan(count, x, over="layers", length=2.0)
    ),
    "[batch=2 seq=3 embed=4] is a tensor, but f of scan must return a pair (carry, y); y may be None": (
        lambda: md.scan(lambda c, _: c, x, layers, over="layers")
    ),
    "0 is an int, not random streams; make them with nnx.Rngs(0)": lambda: md.stack(Block, "layers=2", 0),
    ", not a flax module; make must return the block that stack repeats": lambda: md.stack(
        lambda rngs: 3, "layers=2", nnx.Rngs(0)
    ),
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
    "'w' is a str, not a tensor or scalar": lambda: md.sum("w"),
    "2.0 is a float, not a tensor with named dims": lambda: md.sum(2.0),
    "dim 'embed' of [embed] has no size; give one, as in embed=128": lambda: md.zeros("embed"),
    "no dim 'emed' in [embed=4 out=3]; did you mean 'embed'?": lambda: md.fan_in(KEY, "embed=4 out=3", over="emed"),
    "no dim 'sq' in [batch=2 seq=3 embed=4]; did you mean 'seq'?": lambda: x.shape["sq"],
}

TEXTS = {
    "duplicate dim 'embed'\n  embed embed\n        ^\n": lambda: md.sum(x, over="embed embed"),
    "duplicate dim 'a'\n  a a\n    ^\n": lambda: md.named(np.ones((2, 2)), "a a"),
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
    with pytest.raises(DimError, match="duplicate dim 'batch'"):
        jax.make_jaxpr(lambda a: md.vmap(lambda row: row + a, over="batch")(a))(x)
    with pytest.raises(DimError, match="dim 'batch' is in both x"):
        jax.make_jaxpr(lambda a, k: md.conv(a, k, **SPACE))(image, md.rename(kernel, filters="batch"))


def test_trees_put_anything_in_the_place_of_the_array():
    tree = jax.tree.structure(x)
    for held in (None, object(), 0, "spec", jax.ShapeDtypeStruct((2,), np.int32)):
        assert jax.tree.unflatten(tree, [held]).held is held


def test_a_condition_on_a_tensor_is_an_error_when_traced_too():
    def step(a):
        return a if a > 0 else -a

    with pytest.raises(DimError, match=r"\[batch=2 seq=3 embed=4\] has no single truth value"):
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
