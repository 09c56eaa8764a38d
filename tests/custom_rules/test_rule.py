"""``md.rule``: one operation of the plan inside parallelize, the plain function everywhere else, false rules caught."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.extend.core import Primitive
from jax.interpreters import mlir

import meshdsl as md
from meshdsl.errors import RuleError
from meshdsl.ir.graph import walk
from meshdsl.planner.costs.op_cost import flops_of
from meshdsl.rules import RULES
from meshdsl.trace import trace
from tests.api.test_jit_semantics import same
from tests.sweeps import swept

MESH = md.Mesh(data=4, model=2)
ROUNDING = 1e-5  # second derivatives add in another order
RNG = np.random.default_rng(0)
Q, K, V = (RNG.normal(size=shape).astype(np.float32) for shape in ((8, 4, 2, 3), (8, 6, 2, 3), (8, 6, 2, 4)))
X, W = RNG.normal(size=(8, 12)).astype(np.float32), RNG.normal(size=(12, 4)).astype(np.float32)


def softmax_attention(q, k, v, scale=1.0):
    weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k) * scale, axis=-1)
    return jnp.einsum("bhst,bthe->bshe", weights, v)


attention = md.rule("b s h _, b t h _, b t h e -> b s h e")(softmax_attention)


@md.rule("b k, k n -> b n", reduced={"k": "sum"}, linear=((0,), (1,)))
def product(x, w):
    return x @ w


@jax.custom_vjp
def _kernel(x):
    def run(source, target):
        target[...] = jnp.tanh(source[...])

    return pallas.pallas_call(run, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


_kernel.defvjp(lambda x: (_kernel(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))


@md.rule("a b -> a b")
def kernel(x):
    return _kernel(x)


def ruled(program):
    """Names of the operations with a user's rule, and where they come from."""
    return [(op.called, op.source.function) for _, op in walk(program.graph) if op.name == "ruled"]


def loss(f):
    return lambda q, k, v: jnp.sum(jnp.tanh(f(q, k, v, scale=0.5)) ** 2)


TRANSFORMED = {
    "grad": lambda f: jax.grad(loss(f), argnums=(0, 1, 2)),
    "some gradients": lambda f: jax.grad(loss(f), argnums=2),
    "grad of vmap": lambda f: jax.grad(
        lambda q, k, v: jnp.sum(jax.vmap(f, (1, None, 3))(q[:, None], k, v[:, :, :, None]))
    ),
    "jvp of grad": lambda f: lambda q, k, v: jax.jvp(jax.grad(loss(f)), (q, k, v), (q, k, v))[1],
    "grad of scan": lambda f: jax.grad(
        lambda q, k, v: jnp.sum(jax.lax.scan(lambda c, _: (f(c, k, v)[..., :3], None), q, None, 2)[0])
    ),
    "remat": lambda f: jax.grad(lambda q, k, v: jnp.sum(jax.checkpoint(f)(q, k, v) ** 2)),
}


@swept("name", TRANSFORMED, every=2)
def test_it_stays_the_plain_function(name):
    make = TRANSFORMED[name]
    want = jax.jit(make(softmax_attention))(Q, K, V)
    same(jax.jit(make(attention))(Q, K, V), want, ROUNDING)
    if name in ("grad of vmap", "jvp of grad", "grad of scan"):
        same(md.parallelize(make(attention), MESH, {"q": "data=S(0)"})(Q, K, V), want, ROUNDING)


def test_it_is_one_operation_of_the_plan():
    def step(q, k, v):
        return jax.value_and_grad(loss(attention), argnums=(0, 1, 2))(q, k, v)

    program = trace(step, (Q, K, V))
    where = "loss.<locals>.<lambda>"
    assert ruled(program) == [("softmax_attention", where), ("softmax_attention's cotangent", where)]
    sharded = md.parallelize(step, MESH, {"q": "data=S(0)"})
    plan = sharded.plan(Q, K, V)
    assert "exp" not in plan.operations
    assert str(plan.solution.rows[_first(program).id][0]) == "S(0), S(0), S(0) -> S(0)"
    same(sharded(Q, K, V), jax.jit(step)(Q, K, V))
    sharded.verify(Q, K, V)


def test_what_a_cotangent_sums_over_stays_partial():
    def step(w, x):
        return jax.grad(lambda w: jnp.sum(product(x, w) ** 2))(w)

    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in (W.shape, (2**16, 12))]
    (collective,) = (
        md.parallelize(step, MESH, {"x": "data=S(0) model=B", "w": "data=B model=B"}).plan(*args).collectives
    )
    assert collective.kind == "all-reduce"
    assert collective.reason.startswith("partial sum of product's cotangent (test_rule.py:")


def _first(program):
    return next(op for _, op in walk(program.graph) if op.name == "ruled")


def test_its_cost_is_that_of_what_it_does():
    op = _first(trace(lambda x, w: product(x, w), (X, W)))
    assert flops_of(op) == 2 * 8 * 12 * 4


def test_the_cost_of_a_kernel_is_that_of_a_function_like_it():
    """The planner sees no products inside a Pallas kernel, nor inside its gradient."""

    def run(x, w):
        def body(x, w, out):
            out[...] = x[...] @ w[...]

        return pallas.pallas_call(body, out_shape=jax.ShapeDtypeStruct((8, 4), x.dtype), interpret=True)(x, w)

    opaque = jax.custom_vjp(run)
    opaque.defvjp(lambda x, w: (run(x, w), (x, w)), lambda saved, g: tuple(map(jnp.zeros_like, saved)))
    product = 0.5 * 2 * 8 * 12 * 4
    for like, expected in ((None, [0, 0]), (lambda x, w: x @ w, [product, 2 * product])):  # a gradient runs it again
        ruled = md.rule("b _, _ n -> b n", share=0.5, like=like)(opaque)
        steps = ruled, lambda x, w, ruled=ruled: jax.grad(lambda x: ruled(x, w).sum())(x)
        assert [flops_of(_first(trace(step, (X, W)))) for step in steps] == expected


@pytest.mark.parametrize(
    "like, primitive, text",
    [
        (3, "", "like: .*not a function"),
        (lambda x: x, "tanh", "like: is for functions, not for primitives"),
        (lambda x, y: x, "", "like: refuses the arguments of <lambda>: .*'y'; give a function of the same ones"),
        (lambda x: x[0], "", r"like: returns .*\(4,\).*, where <lambda> returns"),
    ],
)
def test_what_a_kernel_cannot_be_like(like, primitive, text):
    with pytest.raises(RuleError, match=text):
        md.rule("a b -> a b", like=like, primitive=primitive)(lambda x: x)(np.ones((3, 4)))


@pytest.mark.parametrize(
    "temporaries, primitive, text",
    [("none", "", "temporaries='none' is neither True nor False"), (False, "tanh", "temporaries: is for functions")],
)
def test_what_temporaries_cannot_be(temporaries, primitive, text):
    with pytest.raises(RuleError, match=text):
        md.rule("a b -> a b", temporaries=temporaries, primitive=primitive)


@pytest.mark.parametrize("part", ["function", "like", "span"])
def test_what_has_no_hash_is_named(part):
    @dataclasses.dataclass
    class Doubled:
        factor: int = 2

        def __call__(self, x, span):
            return x * self.factor

    function, like = (Doubled() if part == each else lambda x, span: x * 2 for each in ("function", "like"))
    name = "Doubled" if part == "function" else part
    with pytest.raises(RuleError, match=rf"^{name}: .* is a \S+ without a hash; give a function"):
        md.rule("a b -> a b", like=like)(function)(np.ones((3, 4)), {1, 2} if part == "span" else 1)


def test_a_kernel_may_be_like_a_function_of_weak_type():
    ruled = md.rule("a b -> a b", like=lambda x: jnp.where(x > 0, 1.0, 0.0))(lambda x: (x > 0).astype(x.dtype))
    assert ruled(np.ones((3, 4), np.float32)).shape == (3, 4)


def test_equal_calls_are_one():
    assert len(ruled(trace(lambda x, w: product(x, w) + product(x, w), (X, W)))) == 1


@pytest.mark.parametrize("again", ["rule", "plain"])
def test_equal_operations_of_two_functions_are_kept_apart(again):
    """Compilers look into the functions, and would reduce the sums once."""
    ruled = md.rule("a b -> a", reduced={"b": "sum"}, linear=((0,),))
    one = ruled(lambda t: t.sum(1))
    other = ruled(lambda t: t.sum(1)) if again == "rule" else lambda t: t.sum(1)
    x = np.ones((16, 4096), np.float32)
    step = jax.grad(lambda x: (jnp.sin(one(x)) + jnp.sin(other(x))).sum())
    sharded = md.parallelize(step, "data=4,model=2", {"x": "data=S(1)"})
    assert [c.kind for c in sharded.plan(x).collectives] == ["all-reduce"] * 2
    sharded.verify(x)


def test_a_derivative_reads_what_it_needs():
    """A linear function has the same derivative everywhere, so that its operand is not computed for it."""
    double = md.rule("a b -> a b", linear=((0,),))(lambda t: t * 2)
    args = np.ones((8, 4), np.float32), np.ones((4, 16), np.float32)
    loss = lambda w, x: double(x @ w).sum()  # noqa: E731
    sharded = md.parallelize(jax.grad(loss), "data=4,model=2", {"x": "data=S(1)"})
    assert sharded.plan(args[1], args[0]).operations["dot_general"] == 1
    same(sharded(args[1], args[0]), np.full((4, 16), 16.0, np.float32))
    sharded.verify(args[1], args[0])


def test_sums_stay_partial():
    sharded = md.parallelize(lambda x, w: 2 * product(x, w), MESH, {"x": "data=B model=S(1)", "w": "model=S(0)"})
    (collective,) = sharded.plan(X, W).collectives
    assert collective.reason.startswith("partial sum of ") and collective.axes == ("model",)
    same(sharded(X, W), 2 * jnp.asarray(X @ W))


def test_rows_that_do_not_divide_are_left_out():
    x = RNG.normal(size=(3, 12)).astype(np.float32)
    same(md.parallelize(lambda x, w: product(x, w), MESH)(x, W), jnp.asarray(x @ W))


def test_a_kernel_with_its_own_gradient():
    def step(x):
        return jax.value_and_grad(lambda x: jnp.sum(kernel(x) ** 2))(x)

    sharded = md.parallelize(step, MESH, {"x": "data=S(0) model=S(1)"})
    assert sharded.plan(X).notes == ()
    assert [c.kind for c in sharded.plan(X).collectives] == ["all-reduce"]
    same(sharded(X), jax.jit(step)(X))


def test_trees_keywords_and_integers():
    @md.rule("v _, b, _ -> b _, b")
    def embed(tables, ids, *, bias=None, scale=2):
        assert isinstance(scale, int)
        return {"found": tables["words"][ids] * scale + bias, "ids": ids + 1}

    def step(table, ids, bias):
        return embed({"words": table}, ids, bias=bias, scale=3)

    def plain(table, ids, bias):
        return {"found": table[ids] * 3 + bias, "ids": ids + 1}

    args = W, np.arange(8) % 12, W[0]
    same(md.parallelize(step, MESH, {"ids": "data=S(0)"})(*args), jax.jit(plain)(*args))

    def gradient(f):
        return lambda table, ids, bias: jax.grad(lambda t: jnp.sum(f(t, ids, bias)["found"] ** 2))(table)

    same(jax.jit(gradient(step))(*args), jax.jit(gradient(plain))(*args))


def test_dims_of_two_factors():
    @md.rule("b (h d) -> b h d", sizes={"h": 4}, commuting=((0,),))
    def heads(x):
        return x.reshape(x.shape[0], x.shape[1] // 3, 3)

    sharded = md.parallelize(lambda x: heads(x), MESH, {"x": "data=S(1)"}, outputs={"": "data=S(1) model=B"})
    assert sharded.plan(X).collectives == ()
    same(sharded(X), jnp.asarray(X.reshape(8, 4, 3)))
    assert [str(row) for row in heads.check(X)][:2] == ["S(0) -> S(0)", "S(1) -> S(1)"]


def test_a_saved_plan(tmp_path):
    md.parallelize(jax.grad(loss(attention)), MESH).plan(Q, K, V).save(tmp_path / "p.json")
    again = md.parallelize(jax.grad(loss(attention)), MESH, plan=md.load_plan(tmp_path / "p.json"))
    assert again.plan(Q, K, V).operations["ruled"] == 2


def test_proving():
    assert [str(row) for row in attention.check(Q, K, V)] == [
        "S(0), S(0), S(0) -> S(0)",
        "S(1), B, B -> S(1)",
        "S(2), S(2), S(2) -> S(2)",
        "B, B, S(3) -> S(3)",
    ]


def test_false_rows_are_left_out_at_the_first_use_and_named():
    split = md.rule("b s h d, b t h d, b t h d -> b s h d")(softmax_attention)
    q, k = Q[..., :2], K[..., :2]
    v = V[..., :2]
    sharded = md.parallelize(lambda q, k, v: split(q, k, v), MESH, {"*": "data=S(0)", "q": "model=S(3)"})
    (note,) = sharded.plan(q, k, v).notes
    head = (
        "the rule of softmax_attention does not hold in full; removed: S(3), S(3), S(3) -> S(3) (the result is off by "
    )
    assert note.startswith(head)
    assert note.endswith("; write _ for a dim that cannot be split")
    same(sharded(q, k, v), softmax_attention(q, k, v))
    with pytest.raises(RuleError, match="does not hold"):
        split.check(q, k, v)


@pytest.mark.parametrize(
    ("text", "properties", "function", "row"),
    [
        ("a b -> a b", {}, lambda x: jnp.cumsum(x, 1), "S(1) -> S(1)"),
        ("a b -> a b", {"linear": ((0,),)}, jnp.sin, "P -> P"),
        ("a b -> a", {"reduced": {"b": "max"}}, lambda x: x.sum(1), "S(1) -> P(max)"),
        ("a b -> b", {"reduced": {"a": "sum"}}, lambda x: x.mean(0), "S(0) -> P"),
        ("a b -> a b", {"increasing": (0,)}, lambda x: -x, "P(max) -> P(max)"),
        ("a b -> a b", {}, lambda x: x + jnp.arange(8.0)[:, None], "S(0) -> S(0)"),
    ],
)
def test_false_rules(text, properties, function, row):
    with pytest.raises(RuleError, match="does not hold") as caught:
        md.rule(text, **properties)(function).check(X)
    assert str(caught.value).splitlines()[1].startswith(f"  {row} on 2 devices: ")


def test_a_gradient_that_does_not_follow():
    @jax.custom_vjp
    def scaled(x):
        return x * 2

    scaled.defvjp(lambda x: (scaled(x), None), lambda _, g: (g / jnp.sum(jnp.abs(g)),))
    with pytest.raises(RuleError, match="the rule of scaled's cotangent does not hold"):
        md.rule("a b -> a b")(scaled).check(X)


def test_rules_of_large_operands_are_tried_on_small_ones():
    wide = [jax.ShapeDtypeStruct(s, np.float32) for s in ((4096, 65536), (65536, 4096))]
    assert md.parallelize(lambda x, w: product(x, w), MESH).plan(*wide).notes == ()
    summed = md.rule("a b -> a b")(lambda x: x / x.sum())
    (note,) = md.parallelize(lambda x: summed(x), MESH, memory="1TB").plan(wide[0]).notes
    assert "does not hold in full; removed: S(0) -> S(0)" in note


def test_a_rule_that_cannot_be_tried_is_noted():
    exact = md.rule("a b -> a b")(lambda x: x.reshape(4096, 256).reshape(4096, 256))
    (note,) = md.parallelize(lambda x: exact(x), MESH).plan(jax.ShapeDtypeStruct((4096, 256), np.float32)).notes
    assert note.startswith("the rule of <lambda> was not checked: it does not run here (TypeError: ")


def test_what_does_not_fit():
    with pytest.raises(RuleError) as caught:
        attention(Q, K[:4], V[0])
    assert str(caught.value) == (
        "the rule of softmax_attention does not fit, b s h _, b t h _, b t h e -> b s h e:\n"
        "  v of shape (6, 2, 4) has 3 dims, the text names 4: b t h e"
    )
    with pytest.raises(RuleError) as caught:
        attention(Q, K[:4], V[:, :3])
    assert str(caught.value).splitlines()[1:] == [
        "  k of shape (4, 6, 2, 3) (b t h _): dim 0 is 4, elsewhere b=8",
        "  v of shape (8, 3, 2, 4) (b t h e): dim 1 is 3, elsewhere t=6",
    ]
    with pytest.raises(RuleError, match=r"operands: the text has 2, the call 3 \(a/0, a/1, b\)"):
        md.rule("a, a -> a")(lambda a, b: b)((X, X), b=X)
    with pytest.raises(RuleError, match=r"result of shape \(8,\) has 1 dims, the text names 2: a b"):
        md.rule("a b -> a b")(lambda x: x.sum(1))(X)
    with pytest.raises(RuleError, match="the lengths of h, d in dim 1 are unknown; pass sizes="):
        md.rule("b (h d) -> b h")(lambda x: x[:, :4])(X)


def test_texts_that_are_no_rules():
    with pytest.raises(RuleError) as caught:
        md.rule("a b, b -> c a", reduced={"b": "mean", "d": "sum"}, linear=((2,),))
    assert str(caught.value) == (
        "'a b, b -> c a' is not a rule:\n"
        "  c is in a result, but in no operand; write _ if it cannot be split\n"
        "  d is reduced, but in no operand\n"
        "  b is reduced by 'mean'; reductions are sum, max and min\n"
        "  linear: there is no operand 2; they count from 0 to 1\n"
        "a rule reads 'b m k, b k n -> b m n'"
    )
    with pytest.raises(RuleError, match="it needs one '->'"):
        md.rule("a b")


def test_a_rule_for_a_primitive():
    twice = Primitive("twice_in_c")
    twice.def_abstract_eval(lambda x: x)
    mlir.register_lowering(twice, mlir.lower_fun(lambda x: x * 2, multiple_results=False))

    def step(x):
        return twice.bind(x)

    assert md.parallelize(step, MESH).plan(X).notes[0].startswith("replicated: no rule for twice_in_c at test_rule.py:")
    try:
        md.rule("a b -> a b", linear=((0,),), primitive="twice_in_c")
        sharded = md.parallelize(step, MESH, {"x": "data=S(0) model=S(1)"})
        assert (sharded.plan(X).notes, sharded.plan(X).collectives) == ((), ())
        same(sharded(X), jnp.asarray(X * 2))
        with pytest.raises(RuleError, match=r"operand 0 of shape \(8,\) has 1 dims, the text names 2: a b"):
            md.parallelize(step, MESH).plan(X[:, 0])
        with pytest.raises(RuleError, match="twice_in_c has a rule already"):
            md.rule("a b -> a b", primitive="twice_in_c")
    finally:
        RULES.pop("twice_in_c", None)
