"""What jaxprs are read to: inlined calls, loops, constants, places, notes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.errors import TraceError
from meshdsl.ir.check import check_graph
from meshdsl.ir.graph import Graph, Op, Value, walk
from meshdsl.trace import trace
from meshdsl.trace.platforms import idle_operations
from tests.trace.interpreter import run
from tests.trace.steps import TABLE, closing, gpt, gpt_remat, gpt_step

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def graph(step, *args):
    return trace(step, args).graph


def names(graph):
    return [op.name for op in graph.ops]


def test_calls_are_inlined():
    inner = jax.jit(lambda x: jax.checkpoint(jnp.sin)(jax.nn.relu(x)))
    assert names(graph(inner, X)) == ["max", "sin", "return"]


def test_barriers_have_one_operand():
    found = graph(lambda x, y: jax.lax.optimization_barrier((x, 1.0, y)), X, X)
    assert names(found) == ["optimization_barrier", "optimization_barrier", "return"]
    assert all(len(op.inputs) == 1 for op in found.ops[:2])


def test_remat_starts_behind_barriers():
    found = graph(jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x))), X)
    kinds = names(found)
    assert "optimization_barrier" in kinds
    assert kinds.index("optimization_barrier") < kinds.index("cos")
    scanned = [op.name for _, op in walk(trace(gpt_remat, gpt()).graph)]
    assert scanned.count("optimization_barrier") > 0


def test_scan_parameters():
    def step(w, x, xs):
        return jax.lax.scan(lambda c, s: (c @ w + s, c), x, xs, reverse=True, unroll=2)

    (op, _) = graph(step, X, X, jax.ShapeDtypeStruct((6, 4, 4), jnp.float32)).ops
    assert op.params == {"length": 6, "reverse": True, "num_consts": 1, "num_carry": 1, "unroll": 2}
    assert op.primitive is None and len(op.inputs) == 3 and len(op.outputs) == 2


def test_a_scan_of_one_trip_is_read_in_place():
    def loss(w, x):
        carry, rows = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, w[None])
        return carry.sum() + rows.sum()

    assert "scan" not in names(graph(jax.grad(loss), X, X))
    sharded = md.parallelize(jax.grad(loss), md.Mesh(x=2), {"x": "x=S(0)"})
    assert sharded.check(jnp.eye(4) / 2, jnp.arange(16.0).reshape(4, 4) / 9).ok
    assert sharded.verify(X, X).equal


@pytest.mark.parametrize(("index", "name"), [(0, "sin"), (1, "cos"), (7, "cos"), (-1, "sin"), (False, "sin")])
def test_a_branch_that_is_known_is_read_in_place(index, name):
    def step(x, y):
        branch = jax.lax.cond if isinstance(index, bool) else jax.lax.switch
        branches = [lambda x: jnp.cos(x + y), jnp.sin] if branch is jax.lax.cond else [jnp.sin, jnp.cos]
        return branch(index, *((*branches,) if branch is jax.lax.cond else (branches,)), x)

    assert names(graph(step, X, X)) == [name, "return"]


def test_a_branch_that_every_device_takes_is_read_in_place():
    """``jnp.diagonal`` has another for the inside of kernels, in which nothing may be planned."""

    def step(x):
        return jnp.diagonal(x @ x), jax.grad(lambda x: jnp.sum(jnp.diagonal(x) ** 2))(x)

    assert "cond" not in names(graph(step, X))
    some = graph(lambda x: jax.lax.platform_dependent(x, tpu=jnp.sin, default=jnp.cos), X)
    assert names(some) == ["platform_index", "cond", "return"]
    sharded = md.parallelize(step, md.Mesh(x=2, y=2), {"x": "x=S(0) y=S(1)"})
    x = jnp.arange(16.0).reshape(4, 4)
    assert sharded.check(x).ok and sharded.check(x, divide="most").ok and sharded.verify(x).equal


def test_branches_that_a_platform_does_not_run():
    """Also where the index is a constant of a loop."""

    def step(x):
        once = lambda x: jax.lax.platform_dependent(x, tpu=jnp.sin, cuda=jnp.tanh, default=jnp.cos)  # noqa: E731
        return jax.lax.scan(lambda h, _: (once(h), None), x, None, length=3)[0]

    found = graph(step, X)
    ops = {op.id: op.name for _, op in walk(found) if op.name in ("sin", "tanh", "cos")}
    for platform, runs in (("cpu", "cos"), ("tpu", "sin"), ("gpu", "tanh"), ("cuda", "tanh")):
        idle = idle_operations(found, platform)
        assert [name for i, name in ops.items() if i not in idle] == [runs]


def test_parameters_are_plain_numbers():
    """Autodiff makes the strides of a pad's gradient of numpy's, which no plan file holds."""

    def loss(x):
        return jnp.sum(jnp.square(jax.lax.pad(x, 0.0, [(2, 1, 1)])))

    (found,) = (op for op in graph(jax.grad(loss), jax.ShapeDtypeStruct((12,), "float32")).ops if op.name == "slice")
    assert [type(n) for n in found.params["strides"]] == [int]


def test_while_and_cond_parameters():
    def step(a, b, x):
        return jax.lax.while_loop(lambda c: c[0, 0] < a[0, 0], lambda c: c @ b, x)

    op = graph(step, X, X, X).ops[0]
    assert op.params == {"cond_nconsts": 1, "body_nconsts": 1}
    op = graph(
        lambda i, x, y: jax.lax.switch(i, [jax.lax.add, jax.lax.sub, jax.lax.mul], x, y), jnp.int32(0), X, X
    ).ops[-2]
    assert (op.name, len(op.bodies), op.params) == ("cond", 3, {})
    assert op.inputs[0].shape == () and str(op.inputs[0].dtype) == "int32"


def test_closed_over_arrays_come_in_as_consts():
    found = graph(closing, jax.ShapeDtypeStruct((4,), jnp.float32))
    constants = [op for g, op in walk(found) if op.name == "constant"]
    assert all(op in found.ops for op in constants), "none inside a body"
    np.testing.assert_array_equal(constants[0].params["value"], TABLE)
    assert isinstance(constants[0].params["value"], np.ndarray)


def test_closed_over_scalars_are_literals():
    scale = jnp.float32(2.5)
    found = graph(lambda x: x * scale, X)
    assert names(found) == ["mul", "return"]
    literal = found.ops[0].inputs[1]
    assert (literal.value, literal.shape, literal.dtype) == (2.5, (), np.float32)


def test_random_keys_close_over():
    key = jax.random.key(0)
    assert "constant" not in names(graph(lambda x: x + jax.random.normal(key, (4, 4)), X))


def test_sources_are_the_users_lines():
    def step(w, x):
        y = x @ w
        state = optax.sgd(0.1).init(w)
        updates, _ = optax.sgd(0.1).update(y, state)
        return jnp.where(updates > 0, y, 0.0)

    ops = graph(step, X, X).ops
    first = step.__code__.co_firstlineno
    lines = {op.name: op.source.line - first for op in ops[:-1]}
    assert lines == {"dot_general": 1, "mul": 3, "gt": 4, "broadcast_in_dim": 4, "select_n": 4}
    assert {op.source.file for op in ops[:-1]} == {__file__}
    assert {op.source.function.rsplit(".", 1)[-1] for op in ops[:-1]} == {"step"}


def test_every_operation_of_a_training_step_has_a_line():
    program = trace(gpt_step, gpt())
    lost = [op.name for _, op in walk(program.graph) if op.name not in ("return", "constant") and not op.source.file]
    assert lost == []
    files = {op.source.file.rsplit("/", 1)[-1] for _, op in walk(program.graph) if op.name != "return"}
    assert files == {"steps.py"}


def test_a_step_of_a_library_has_the_librarys_line():
    assert graph(optax.safe_norm, X, 1e-6).ops[0].source.file.endswith("optax/_src/numerics.py")


def test_scopes():
    def step(x):
        with jax.named_scope("layer"):
            return jax.lax.scan(lambda c, _: (jax.named_scope("inner")(jnp.sin)(c), None), x, None, length=2)[0]

    scan = graph(step, X).ops[0]
    assert scan.scope == "layer"
    assert scan.bodies[0].ops[0].scope == "layer/inner"


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)])
def test_a_batched_while_runs_until_all_of_it_stop(shape):
    limit = jnp.float32(40)

    def each(x):
        return jax.lax.while_loop(lambda c: c[0].sum() < limit, lambda c: (c[0] * 1.5 + x, c[1] + 1), (x, 0))

    def step(x, limits):
        return (jax.vmap(jax.vmap(each)) if x.ndim == 3 else jax.vmap(each))(x), limits

    x = jnp.abs(jnp.sin(jnp.arange(float(np.prod(shape))))).reshape(shape)
    program = trace(step, (x, limit))
    for got, expected in zip(jax.tree.leaves(run(program, x, limit)), jax.tree.leaves(step(x, limit)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    counts = step(x, limit)[0][1]
    assert counts.min() < counts.max()


def test_notes():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))

    def step(x):
        md.constrain(x * 2, "model=P")
        x = jax.device_put(x, jax.devices()[0])
        return jax.lax.with_sharding_constraint(x, sharding) + 1

    line = step.__code__.co_firstlineno
    unread = f"constrain at test_read_jaxpr.py:{line + 1} has no effect: nothing reads its result"
    nameless = f"device_put at test_read_jaxpr.py:{line + 2} is ignored: its sharding names no mesh axes"
    stated = f"with_sharding_constraint at test_read_jaxpr.py:{line + 3} is ignored, as constraints='ignore' says"

    kept = trace(step, (X,))
    assert names(kept.graph) == ["constrain", "add", "return"]
    assert (kept.notes, kept.warnings) == ([nameless, unread], [nameless])

    ignored = trace(step, (X,), keep=False)
    assert names(ignored.graph) == ["add", "return"]
    assert (ignored.notes, ignored.warnings) == ([stated, nameless, unread], [stated, nameless])


def test_a_step_inside_jit_may_close_over_tracers():
    seen = []

    def outer(y):
        seen.append(trace(lambda x: x @ y, (jnp.ones((4, 4)),)))
        return y

    jax.jit(outer)(jnp.ones((4, 4)))
    assert names(seen[0].graph) == ["constant", "dot_general", "return"]


def value(i, *shape):
    return Value(i, shape, np.dtype("float32"))


def op(name, inputs, outputs, **more):
    return Op(0, name, None, {}, tuple(inputs), tuple(outputs), **more)


def test_the_checker():
    x, y = value(0, 2), value(1, 2)
    fine = Graph((x,), (op("return", [x], []),))
    check_graph(fine)
    for ops, text in [
        ((op("sin", [x], [y]),), "a graph must end with its only 'return'"),
        ((op("sin", [y], [value(2)]), op("return", [], [])), "sin reads values [1], which are not defined before it"),
        ((op("sin", [x], [x]), op("return", [], [])), "sin defines values [0] a second time"),
        ((op("scan", [x], [y]), op("return", [], [])), "scan has 0 bodies"),
    ]:
        with pytest.raises(TraceError, match=text.replace("[", r"\[").replace("]", r"\]")):
            check_graph(Graph((x,), ops))
    cond = op("cond", [x, x], [y], bodies=(Graph((value(3, 4),), (op("return", [], []),)),))
    with pytest.raises(TraceError) as error:
        check_graph(Graph((x,), (cond, op("return", [], []))))
    assert str(error.value) == "a body of cond takes float32[4]; its loop has float32[2]"
