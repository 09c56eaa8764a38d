"""Paths, static arguments, and what is no array."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshdsl.errors import TraceError
from meshdsl.trace import flatten_call, trace

X = jax.ShapeDtypeStruct((2, 3), jnp.float32)


class Pair(NamedTuple):
    first: object
    second: object


def paths(step, *args, **kwargs):
    return [leaf.path for leaf in trace(step, args, kwargs).inputs]


def test_keys_of_containers():
    tree = {"layers": [{"w1": X}, {"w1": X}], "pair": Pair(X, (X,)), 3: X, "none": None}
    tree = {str(k): v for k, v in tree.items()}
    want = ["params/3", "params/layers/0/w1", "params/layers/1/w1", "params/pair/first", "params/pair/second/0"]
    assert paths(lambda params: params["3"], tree) == want


def test_a_key_with_a_slash_is_one_component():
    assert paths(lambda params: 0, {"a/b": {"w": X}}) == ["params/'a/b'/w"]


def test_argument_names():
    assert paths(lambda a, *rest, scale: a, X, X, {"k": X}, scale=2.0) == ["a", "rest/0", "rest/1/k", "scale"]
    assert paths(lambda *args: args[0], X, X) == ["args/0", "args/1"]
    assert paths(lambda a, b: a, b=X, a=X) == ["a", "b"]
    assert paths(lambda **named: named["z"], z=X, y=X) == ["y", "z"]
    assert paths(partial(lambda a, b: a, 1.0), X) == ["b"]
    assert paths(jax.jit(lambda first: first), X) == ["first"]


def test_keywords_keep_their_arrays():
    program = trace(lambda b, a: (a, b), (), {"b": jnp.ones(2), "a": jnp.ones(3)})
    assert [(leaf.path, leaf.shape) for leaf in program.inputs] == [("a", (3,)), ("b", (2,))]
    assert [leaf.shape for leaf in program.outputs] == [(3,), (2,)]
    assert program.in_tree == jax.tree.structure(((), {"a": 0, "b": 0}))


def test_results():
    program = trace(lambda x: ({"loss": x, "a/b": [x]}, x), (X,))
    assert [leaf.path for leaf in program.outputs] == ["0/'a/b'/0", "0/loss", "1"]
    assert [leaf.path for leaf in trace(lambda x: x, (X,)).outputs] == [""]


def test_static_arguments():
    def step(a, mode, b, *, times):
        assert mode == "double"
        return a * times + b

    for static in ({"static_argnums": 1}, {"static_argnums": -2}, {"static_argnames": "mode"}):
        assert [x.path for x in trace(step, (X, "double", X), {"times": 2.0}, **static).inputs] == ["a", "b", "times"]
    both = {"static_argnums": (1,), "static_argnames": ["times"]}
    program = trace(step, (X,), {"mode": "double", "b": X, "times": 3}, **both)
    assert [leaf.path for leaf in program.inputs] == ["a", "b"]
    assert program.graph.ops[0].inputs[1].value == 3


def test_rebuilding_a_call():
    call = flatten_call(lambda *a, **k: 0, (1.0, "x", {"p": 2.0}), {"k": 3.0, "s": "y"}, 1, "s")
    assert call.arguments([10, 20, 30]) == ((10, "x", {"p": 20}), {"k": 30, "s": "y"})


def test_scalars_and_numpy():
    dtypes = [x.dtype for x in trace(lambda *xs: xs, (1, 2.0, True, np.float32(3), np.ones(2, np.int8))).inputs]
    assert [str(d) for d in dtypes] == ["int32", "float32", "bool", "float32", "int8"]


def test_what_is_no_array():
    def step(config, x):
        return x

    with pytest.raises(TraceError) as error:
        trace(step, ({"act": "relu", "f": np.array(["a"])}, X))
    assert str(error.value) == (
        "step cannot be traced:\n"
        "  config/act: 'relu' is a str, not an array\n"
        "  config/f: an array of <U1 holds no numbers\n"
        "pass values that are not arrays through static_argnames"
    )
