"""Primitives that other libraries bind are read as what they compute."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

import meshdsl as md
from meshdsl.trace import trace

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def primitive(name, impl):
    made = Primitive(name)
    made.def_impl(impl)
    made.def_abstract_eval(lambda x, **params: x)
    mlir.register_lowering(made, mlir.lower_fun(impl, multiple_results=False))
    return made


def names(step):
    return [op.name for op in trace(step, (X,)).graph.ops]


halved = primitive("halved", lambda x, *, times: x * 0.5**times)
outer = primitive("outer_halved", lambda x: halved.bind(jnp.sin(x), times=1))
looking = primitive("looking", lambda x: x if float(np.asarray(x).sum()) > 0 else -x)
again = primitive("again", lambda x: again.bind(x))


def test_an_implementation_in_jax_is_inlined():
    assert names(lambda x: halved.bind(x, times=2)) == ["mul", "return"]


def test_also_one_that_binds_another():
    assert names(outer.bind) == ["sin", "mul", "return"]


def test_inside_loops():
    def step(x):
        return jax.lax.scan(lambda c, _: (halved.bind(c, times=1), None), x, length=3)[0]

    (loop, _) = trace(step, (X,)).graph.ops
    assert [op.name for op in loop.bodies[0].ops] == ["mul", "return"]


def test_what_reads_values_stays():
    assert names(looking.bind) == ["looking", "return"]


def test_what_binds_itself_stays():
    assert names(again.bind) == ["again", "return"]


def test_it_is_split_and_right():
    sharded = md.parallelize(lambda x: outer.bind(x) + 1.0, "data=4", {"x": "data=S(0)"})
    x = jnp.arange(32.0).reshape(8, 4)
    assert not sharded.plan(x).collectives
    sharded.check(x)
