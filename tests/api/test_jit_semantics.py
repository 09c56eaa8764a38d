"""parallelize behaves as ``jax.jit``: the same values, dtypes, weak types and trees, the same buffers given up."""

import dataclasses
import functools
import logging
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshdsl as md
from meshdsl.errors import ArgumentError, TraceError

MESH = md.Mesh(data=4, model=2)
X = np.arange(16, dtype=np.float32).reshape(8, 2)
Y = jnp.ones((8, 8))
KEY = jax.random.key(0)
F0 = jax.dtypes.float0


class Pair(NamedTuple):
    a: Any
    b: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["name"])
@dataclasses.dataclass
class Weight:
    w: Any
    name: str


@jax.tree_util.register_pytree_with_keys_class
class Dense:
    """As an equinox module: arrays are children, the rest is static."""

    def __init__(self, weight, activation):
        self.weight, self.activation = weight, activation

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("weight"), self.weight),), (self.activation,)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, *static)

    def __call__(self, x):
        return self.activation(x @ self.weight)


def leaf(x):
    """What has to be equal: type, weakness, contents."""
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    weak = isinstance(x, jax.Array) and x.aval.weak_type
    return str(x.dtype), x.shape, weak, None if x.dtype == F0 else np.asarray(x).astype(complex)


def same(got, want, atol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(map(leaf, jax.tree.leaves(got)), map(leaf, jax.tree.leaves(want)), strict=True):
        assert a[:3] == b[:3]
        if a[3] is not None:
            np.testing.assert_allclose(a[3], b[3], rtol=1e-5, atol=atol)


def as_jit(step, *args, named=None, options=None, **kwargs):
    """The step planned and jitted, called twice: the second call takes another way."""
    options = options or {}
    sharded, jitted = md.parallelize(step, MESH, **options), jax.jit(step, **options)
    for _ in range(2):
        same(sharded(*args, **(named or kwargs)), jitted(*args, **(named or kwargs)))
    return sharded


CONSTANT, CLOSED, CLOSED_KEY = np.arange(6.0).reshape(2, 3), jnp.arange(6.0), jax.random.key(3)
RAW, RBG = jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")

CASES = {
    "scalars": (lambda x, s, i: (x * s, x * i, s * 2, i + 1.5, s, i), X, 2.0, 3),
    "bool and complex": (lambda b, c: (b, jnp.where(b, c, 0), c * 2), True, 1.0j),
    "numpy scalar": (lambda s: s + 1, np.float32(3)),
    "narrow with scalars": (lambda x, s: (x * s, x * jnp.float32(2), x + 1.0), jnp.ones(8, jnp.bfloat16), 2.0),
    "wide numpy": (lambda x, i: (x + 1, i + 1), np.arange(8.0), np.arange(8)),
    "weak arrays": (lambda c: (c * 2, jnp.abs(c)), jnp.arange(16) * 1j),
    "None": (lambda d: {"a": d["a"] * 2, "b": d["b"]}, {"a": X, "b": None}),
    "returns None": (lambda x: None, X),
    "returns nothing": (lambda x: (), X),
    "takes nothing": (lambda: (jnp.arange(8.0), None)),
    "passes through": (lambda x, y, s: (x, y, x, s), X, X[0], 1.0),
    "twice": (lambda x: (lambda y: (y, y, {"a": y}))(x * 2), X),
    "constants": (lambda x: (jnp.zeros(8), 1.0, 3, True, jnp.arange(3), np.ones(3)), X),
    "closes over": (lambda x: (CONSTANT, CLOSED, CLOSED * 2, jax.random.split(CLOSED_KEY), CLOSED_KEY), X),
    "no elements": (lambda x: (x * 2, x.sum(), jnp.concatenate([x, x], 1)), np.zeros((0, 4), np.float32)),
    "nothing but no elements": (
        lambda x, w: (x @ w, (x @ w).sum(0), jax.grad(lambda w: jnp.sum(x @ w))(w)),
        jnp.zeros((8, 0)),
        jnp.zeros((0, 4)),
    ),
    "integers": (lambda i: (i * 2, i.sum(), i // 3, i % 2, i > 3), jnp.arange(16)),
    "narrow integers": (lambda i: (i * 2, i.sum()), jnp.arange(16, dtype="uint8")),
    "below a byte": (lambda i: (i * 2, i.astype("int32").sum()), jnp.arange(8, dtype="int4")),
    "bools": (lambda b: (b.any(), ~b, b.sum(), b.all()), jnp.arange(16) % 3 == 0),
    "narrow floats": (lambda x: (x.astype("float32").sum(), x), jnp.arange(16).astype("float8_e4m3fn")),
    "keys": (lambda k: (jax.random.bits(k, (8,)), jax.random.split(k), k), KEY),
    "raw keys": (lambda k: jax.random.bits(k, (8,)), RAW),
    "many keys": (lambda k: (jax.vmap(jax.random.bits)(k), k), jax.random.split(KEY, 8)),
    "keys of another kind": (lambda k: (jax.random.bits(k, (8,)), k), RBG),
    "no cotangent": (
        lambda x, i: jax.grad(lambda x, i: jnp.sum(x * i), argnums=(0, 1), allow_int=True)(x, i),
        X,
        jnp.arange(2),
    ),
    "takes no cotangent": (lambda x, z: (x, z, np.zeros(3, F0)), X, np.zeros(8, F0)),
    "haiku": (
        lambda p, x: jax.tree.map(lambda w: w - x.mean(), p),
        {"mlp/~/linear_0": {"w": X, "b": X[0]}, "mlp/~/linear_1": {"w": X}},
        X,
    ),
    "containers": (lambda t, d, l: (Pair(t.b, t.a), d, [l[0] * 2, l[1]]), Pair(X, X[0]), OrderedDict(b=X, a=X), [X, 1]),
    "a dataclass": (lambda d: dataclasses.replace(d, w=d.w * 2, name="after"), Weight(X, "before")),
    "as equinox": (lambda d, x: (d(x), Dense(d.weight * 2, d.activation)), Dense(X.T, jnp.tanh), X),
    "partial": (functools.partial(lambda a, x: a * x, 2.0), X),
    "jitted": (jax.jit(lambda x: x * 2), X),
    "star": (lambda *xs: (sum(xs), xs), X, X, X),
    "a default": (lambda a, b=2.0: a * b, X),
    "committed": (lambda x: x * 2, jax.device_put(X, jax.devices()[3])),
    "another order": (lambda x: x * 2, np.asfortranarray(X)),
}


@pytest.mark.parametrize("case", CASES)
def test_results(case):
    step, *args = CASES[case] if isinstance(CASES[case], tuple) else (CASES[case],)
    as_jit(step, *args)


@pytest.mark.parametrize("case", ["scalars", "wide numpy", "bool and complex", "integers", "no cotangent"])
def test_results_in_double_precision(case):
    with jax.enable_x64(True):
        as_jit(*CASES[case])


def test_results_inside_jit_are_as_weak():
    sharded = md.parallelize(lambda s: (s * 2, 1), MESH)
    narrow = jnp.ones(8, jnp.bfloat16)
    same(*(jax.jit(lambda s, f=f: (narrow * f(s)[0], f(s)))(3.0) for f in (sharded, jax.jit(sharded.step))))


def test_keywords():
    as_jit(lambda x, *, y, z=3.0: x + y * z, X, y=X)
    as_jit(lambda a, *b, **c: (a, b, c), X, X, z=X, y=1.0)


@pytest.mark.parametrize(
    ("args", "kwargs", "options"),
    [
        ((X, 3), {}, {"static_argnames": "n"}),
        ((X,), {"n": 3}, {"static_argnames": ["n"]}),
        ((X, 3), {}, {"static_argnums": -1}),
        ((X,), {"n": 3}, {"static_argnums": 1}),
        ((X, 3, "half"), {}, {"static_argnums": (1, 2)}),
        ((X,), {}, {"static_argnames": ("n", "mode")}),
    ],
)
def test_static_arguments(args, kwargs, options):
    as_jit(lambda x, n=2, mode="whole": x * n / (2 if mode == "half" else 1), *args, named=kwargs, options=options)


def test_a_static_function():
    as_jit(lambda x, f: f(x), X, jnp.tanh, options={"static_argnums": 1})


def test_a_python_number_is_not_an_array():
    """The compiled program would take either."""
    sharded, narrow = md.parallelize(lambda x, s: x * s, MESH), jnp.ones(8, jnp.bfloat16)
    dtypes = [str(sharded(narrow, s).dtype) for s in (2.0, jnp.float32(2), np.float32(2), 2.0, 2.0)]
    assert dtypes == ["bfloat16", "float32", "float32", "bfloat16", "bfloat16"]


def test_settings_of_jax_are_part_of_the_key():
    sharded, x = md.parallelize(lambda x: x * 2, MESH), np.arange(8.0)
    assert sharded(x).dtype == np.float32
    with jax.enable_x64(True):
        assert sharded(x).dtype == np.float64
    assert sharded(x).dtype == np.float32


def test_what_planned_it_again(caplog):
    caplog.set_level(logging.INFO, logger="meshdsl")
    sharded = md.parallelize(lambda x, n: x["a"] * n, MESH, static_argnums=1)
    for args in (({"a": X}, 1), ({"a": X}, 2), ({"a": X, "b": None}, 2), ({"a": 1.0}, 2)):
        sharded(*args)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "static argument n is 2 instead of 1",
        "what the tree of its arguments holds beside arrays changed",
        "x/a is weak float32[] instead of float32[8,2]",
    ]


def given_up(tree):
    return [isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(tree)]


PLACED = {
    "uncommitted": lambda: (jnp.ones((8, 8)), jnp.ones(8)),
    "committed": lambda: jax.device_put((np.ones((8, 8)), np.ones(8)), jax.devices()[0]),
    "numpy": lambda: (np.ones((8, 8), np.float32), np.ones(8, np.float32)),
}


@pytest.mark.parametrize("donated", [{"donate_argnums": 0}, {"donate_argnames": ("p", "x")}])
@pytest.mark.parametrize("placed", PLACED)
def test_donated_buffers_are_given_up(placed, donated):
    def step(p, x):
        return p + x.sum(), x

    sharded, jitted = md.parallelize(step, MESH, **donated), jax.jit(step, **donated)
    want = PLACED[placed]()
    jitted(*want)
    for _ in range(2):
        args = PLACED[placed]()
        results = sharded(*args)
        assert given_up(args) == given_up(want)
        again = sharded(*results)
        assert given_up(results) == [bool(x) for x in given_up(jax.tree.map(jnp.asarray, args))] or placed == "numpy"
        same(again, step(*step(*PLACED[placed]())))


def test_donated_keywords_and_further_arguments():
    def step(a, *more, p):
        return a + more[0], more[0], p * 2

    sharded = md.parallelize(step, MESH, donate_argnames="p", donate_argnums=1)
    for _ in range(2):
        a, b, p = Y + 1, Y + 2, Y + 3
        sharded(a, b, p=p)
        assert given_up((a, b, p)) == [False, True, True]


def test_a_donation_that_is_of_no_use():
    sharded = md.parallelize(lambda p: p.sum(), MESH, donate_argnums=0)
    p = Y + 0
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        sharded(p)
    assert not p.is_deleted()


def test_what_cannot_be_static_or_donated():
    with pytest.raises(ArgumentError) as caught:
        md.parallelize(
            lambda x, mode: x,
            MESH,
            static_argnames=("mod", "mode"),
            static_argnums=5,
            donate_argnums=(1, -3),
        )
    assert str(caught.value) == (
        "invalid arguments of parallelize(<lambda>, ...):\n"
        "  static_argnums=5: the step takes 2 positional arguments\n"
        "  donate_argnums=-3: the step takes 2 positional arguments\n"
        "  static_argnames='mod': the step has no such argument; did you mean 'mode'?\n"
        "  mode: is static, so it has no buffer to donate"
    )


def test_results_that_are_no_arrays():
    with pytest.raises(TraceError) as caught:
        md.parallelize(lambda x: {"loss": x, "mode": "train"}, MESH).plan(X)
    assert str(caught.value) == (
        "step returns what is not an array:\n  mode: 'train' is a str, not an array\nreturn arrays, in any pytree"
    )


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.drop = nnx.Linear(2, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(2))

    def __call__(self, x):
        self.mean[...] += x.mean(0)
        return self.drop(self.dense(x - self.mean[...]))


def module_and_optimizer():
    module = Layer(nnx.Rngs(0))
    return module, nnx.Optimizer(module, optax.sgd(1e-2), wrt=nnx.Param)


def updated(module, optimizer, x):
    value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(module)
    optimizer.update(module, grads)
    return value


def test_flax_modules_and_optimizers_are_returned():
    """As under ``nnx.jit``, the module returned is the module given; under ``jax.jit`` it is another one."""

    def step(module, optimizer, x):
        value = updated(module, optimizer, x)
        return module, optimizer, value

    module, optimizer = module_and_optimizer()
    sharded = md.parallelize(step, MESH)
    paths = [array.path for array in sharded.plan(module, optimizer, X).inputs]
    assert {"module/dense/kernel", "module/mean", "module/drop/rngs/key", "optimizer/step"} <= set(paths)
    assert [array.path for array in sharded.plan(module, optimizer, X).outputs][:2] == [
        "0/dense/bias",
        "0/dense/kernel",
    ]
    assert sharded.plan(module, optimizer, X).notes == ()
    *again, _ = sharded(*sharded(module, optimizer, X)[:2], X)
    assert again[0] is module and again[1] is optimizer
    assert len(sharded._stages) == 1
    np.testing.assert_allclose(module.mean[...], 2 * X.mean(0))


def test_flax_modules_split_and_merged():
    definition, state = nnx.split(module_and_optimizer())

    def step(definition, state, x):
        module, optimizer = nnx.merge(definition, state)
        value = updated(module, optimizer, x)
        return nnx.split((module, optimizer)), value

    as_jit(step, definition, state, X, options={"static_argnums": 0})
