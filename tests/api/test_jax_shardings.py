"""Shardings that jax's own functions state inside a step are constraints, as ``md.constrain`` states them."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshdsl as md
from meshdsl.errors import ArgumentError, PinError, TraceError
from meshdsl.ir.graph import walk

SIZES, NAMES = (4, 2), ("data", "model")
AUTO, EXPLICIT = (AxisType.Auto,) * 2, (AxisType.Explicit,) * 2
LAYOUTS = {"x": "data=S(0)", "w": "data=B model=S(1)"}
FREE = P.UNCONSTRAINED
W, X = jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)
SMALL = (
    np.cos(np.arange(32.0, dtype=np.float32)).reshape(4, 8),
    np.sin(np.arange(64.0, dtype=np.float32)).reshape(16, 4),
)


def devices(types=AUTO):
    return jax.make_mesh(SIZES, NAMES, axis_types=types)


def under(spec, x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(devices(), spec))


def abstract(spec, x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(AbstractMesh(SIZES, NAMES, axis_types=AUTO), spec))


def resharded(spec, x):
    return jax.sharding.reshard(x, NamedSharding(devices(EXPLICIT), spec))


def placed(spec, x):
    return jax.device_put(x, NamedSharding(devices(), spec))


def jitted_in(spec, x):
    return jax.jit(jnp.negative, in_shardings=NamedSharding(devices(), spec))(-x)


def jitted_out(spec, x):
    return jax.jit(jnp.negative, out_shardings=NamedSharding(devices(), spec))(-x)


def step(constrain, w, x):
    return jnp.tanh(constrain(x @ w)).sum(1)


def scanned(constrain, w, x):
    return jax.lax.scan(lambda h, _: (jnp.tanh(constrain(h @ w) @ w.T), None), x, None, length=3)[0]


def gradient(constrain, w, x):
    return w - jax.grad(lambda w: jnp.mean(jnp.tanh(constrain(x @ w)) ** 2))(w)


def recomputed(constrain, w, x):
    return gradient(constrain, w, x) + w - jax.grad(jax.checkpoint(lambda w: jnp.sum(constrain(x @ w) ** 2)))(w)


def over_rows(constrain, w, x):
    blocks = x.reshape(4, -1, x.shape[1])
    return jax.vmap(lambda rows: jnp.tanh(constrain(rows @ w)))(blocks)


SAME = {  # what jax states -> the same with md.constrain
    "rows": (P("data", None), "data=S(0) model=B"),
    "fewer entries": (P("data"), "data=S(0) model=B"),
    "nothing": (P(), "data=B model=B"),
    "columns": (P(None, "data"), "data=S(1) model=B"),
    "both": (P("model", "data"), "model=S(0) data=S(1)"),
    "two axes": (P(("data", "model"), None), "data=S(0) model=S(0)"),
    "two axes, turned": (P(("model", "data")), "model=S(0) data=S(0)"),
}


def constraints(sharded, *args):
    graph = sharded.stages(*args).checked.graph
    return [str(op.params["layout"]) for _, op in walk(graph) if op.name == "constrain"]


def same_plans(of_jax, layout, f, layouts=LAYOUTS):
    theirs = md.parallelize(lambda w, x: f(of_jax, w, x), "data=4,model=2", layouts)
    ours = md.parallelize(lambda w, x: f(lambda y: md.constrain(y, layout), w, x), "data=4,model=2", layouts)
    assert constraints(theirs, W, X) == constraints(ours, W, X)
    assert theirs.plan(W, X).bytes == ours.plan(W, X).bytes
    assert not theirs.plan(W, X).notes
    return theirs


@pytest.mark.parametrize("name", SAME)
def test_specs(name):
    spec, layout = SAME[name]
    same_plans(lambda y: under(spec, y), layout, step)


@pytest.mark.parametrize("state", [abstract, resharded, placed, jitted_in, jitted_out])
def test_functions(state):
    same_plans(lambda y: state(P("model", "data"), y), "model=S(0) data=S(1)", step)


@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
def test_bare_specs_under_the_mesh_of_the_caller(types):
    state = jax.lax.with_sharding_constraint if types is AUTO else jax.sharding.reshard
    with jax.set_mesh(devices(types)):
        same_plans(lambda y: state(y, P("model", "data")), "model=S(0) data=S(1)", step)


@pytest.mark.parametrize("f", [scanned, gradient, recomputed])
def test_places(f):
    same_plans(lambda y: under(P(None, "data"), y), "data=S(1) model=B", f)


@pytest.mark.parametrize("state", [under, placed, jitted_in, jitted_out])
@pytest.mark.parametrize("f", [step, gradient, scanned])
def test_numbers(state, f):
    sharded = md.parallelize(lambda w, x: f(lambda y: state(P("model", "data"), y), w, x), "data=4,model=2", LAYOUTS)
    assert sharded.check(*SMALL).ok
    sharded.verify(*SMALL)


def test_a_constraint_holds():
    """Free, the product keeps its rows; replicated by the constraint, it is gathered."""
    free = md.parallelize(lambda w, x: step(lambda y: y, w, x), "data=4,model=2", LAYOUTS)
    whole = md.parallelize(lambda w, x: step(lambda y: under(P(), y), w, x), "data=4,model=2", LAYOUTS)
    assert free.plan(W, X).bytes < 0.1 * whole.plan(W, X).bytes


# ---- Free dims -------------------------------------------------------------------------------------------------------


def layout_at_constraint(sharded, *args):
    plan, program = sharded.plan(*args), sharded.stages(*args).planned.program
    (made,) = [op.outputs[0] for _, op in walk(program.graph) if op.name == "constrain"]
    return plan.solution.layouts[made.id]


ROWS_CLOSED = {"B", "S(1)", "P"}


@pytest.mark.parametrize(
    ("spec", "on_data", "on_model"),
    [
        (P(FREE, "data"), {"S(1)"}, {"S(0)"}),
        (P(FREE, None), {"S(0)"}, {"S(0)"}),
        (P(None, FREE), ROWS_CLOSED, ROWS_CLOSED),
    ],
)
def test_unconstrained_dims_are_free_and_others_closed(spec, on_data, on_model):
    """Rows that are free are split, as is best for a sum over columns."""
    sharded = md.parallelize(lambda w, x: step(lambda y: under(spec, y), w, x), "data=4,model=2", LAYOUTS)
    found = layout_at_constraint(sharded, W, X)
    assert str(found.on("data")) in on_data and str(found.on("model")) in on_model


def test_the_dim_that_vmap_adds_is_free():
    sharded = md.parallelize(
        lambda w, x: over_rows(lambda y: under(P(None, "model"), y), w, x), "data=4,model=2", LAYOUTS
    )
    found = layout_at_constraint(sharded, W, X)
    assert str(found.on("model")) == "S(2)"
    assert str(found.on("data")) == "S(0)"


# ---- Other meshes ----------------------------------------------------------------------------------------------------


def test_other_sizes_and_missing_axes_that_split_nothing():
    sharded = md.parallelize(lambda w, x: step(lambda y: under(P("data"), y), w, x), "data=8")
    assert constraints(sharded, W, X) == ["data=S(0)"]
    sharded.plan(W, X)


def test_axes_of_other_names():
    def rows(w, x):
        return step(lambda y: under(P("model"), y), w, x)

    sharded = md.parallelize(rows, "data=4,modell=2")
    with pytest.raises(PinError) as caught:
        sharded.plan(W, X)
    line = under.__code__.co_firstlineno + 1
    row = (
        f"  with_sharding_constraint at test_jax_shardings.py:{line}: no axis 'model' in the mesh; "
        "did you mean 'modell'?; constraints='ignore' plans freely"
    )
    assert row in str(caught.value).splitlines()
    assert md.parallelize(rows, "data=4,modell=2", constraints="ignore").plan(W, X).bytes == 0


def test_ignored_constraints_are_logged_once(caplog):
    def whole(w, x):
        return step(lambda y: under(P(), y), w, x)

    sharded = md.parallelize(whole, "data=4,model=2", LAYOUTS, constraints="ignore")
    line = under.__code__.co_firstlineno + 1
    text = f"with_sharding_constraint at test_jax_shardings.py:{line} is ignored, as constraints='ignore' says"
    assert sharded.plan(*SMALL).notes == (text,)
    with caplog.at_level(logging.WARNING, "meshdsl"):
        sharded(*SMALL)
        sharded(*SMALL)
        sharded(SMALL[0], SMALL[1][:8])
    assert caplog.messages.count(f"whole: {text}") == 1


def test_dims_that_do_not_divide_are_left_free(caplog):
    def uneven(x):
        return jnp.tanh(under(P("data"), x)) * 2

    x = np.ones((6, 3), np.float32)
    sharded = md.parallelize(uneven, "data=4,model=2")
    assert sharded.check(x).ok
    line = under.__code__.co_firstlineno + 1
    text = (
        f"with_sharding_constraint at test_jax_shardings.py:{line}: dim 0 of size 6 does not divide over data=4, "
        "and is left free"
    )
    assert text in sharded.plan(x).notes
    with caplog.at_level(logging.WARNING, "meshdsl"):
        sharded(x)
    assert f"uneven: {text}" in caplog.messages


@pytest.mark.parametrize("state", [placed, jitted_in, jitted_out])
def test_dims_that_jax_refuses(state):
    """Only ``with_sharding_constraint`` takes dims that do not divide."""
    with pytest.raises(TraceError) as caught:
        md.parallelize(lambda x: state(P("data"), x), "data=4,model=2").plan(np.ones((6, 3), np.float32))
    line = state.__code__.co_firstlineno + 1
    assert str(caught.value).splitlines()[1] == (
        f"  test_jax_shardings.py:{line}: P('data',) splits dim 0 of an array of shape (6, 3) into 4 blocks, and 6 "
        "does not divide into them; nearest sizes that work: 4, 8"
    )


def test_more_entries_than_dims():
    with pytest.raises(TraceError) as caught:
        md.parallelize(lambda x: under(P("data", None, "model"), x), "data=4,model=2").plan(np.ones((8, 8)))
    line = under.__code__.co_firstlineno + 1
    row = f"  test_jax_shardings.py:{line}: P('data', None, 'model') has more entries (3) than its array has dims (2)"
    assert str(caught.value).splitlines()[1] == row


def test_operations_without_a_rule_are_logged_once(caplog):
    def opaque(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2

    sharded = md.parallelize(opaque, "data=8", {"x": "data=S(0)"})
    line = opaque.__code__.co_firstlineno + 1
    with caplog.at_level(logging.WARNING, "meshdsl"):
        sharded(jnp.ones(8))
        sharded(jnp.ones(8))
    assert caplog.messages == [f"opaque: replicated: no rule for pure_callback at test_jax_shardings.py:{line}"]


def test_an_unknown_option():
    with pytest.raises(ArgumentError, match="constraints: 'keeep' is a str, neither 'keep' nor 'ignore'; did you mean"):
        md.parallelize(step, "data=4", constraints="keeep")


# ---- Types of results: ``out_sharding=`` on operations ---------------------------------------------------------------


def three(x):
    return jnp.einsum("bi,ij,jk->bk", x, x.T, x, out_sharding=P("data"))


def drawn(x):
    return x + jax.random.normal(jax.random.key(0), x.shape, out_sharding=P("data"))


def mapped(x):
    return jax.vmap(lambda row: jnp.dot(row, x.T, out_sharding=P("model")))(x)


def differentiated(x):
    return jax.grad(lambda x: jnp.sum(jnp.dot(x, x.T, out_sharding=P("data")) ** 2))(x)


def summed_later(x):
    columns, rows = jax.sharding.reshard(x, P(None, "model")), jax.sharding.reshard(x.T, P("model"))
    return jax.sharding.reshard(jnp.dot(columns, rows, out_sharding=P(unreduced={"model"})), P()) * 2


ROWS, COLUMNS = "data=S(0) model=B", "model=S(1) data=B"
TYPED = {  # a step, and the layouts that it states
    "einsum": (lambda x: jnp.einsum("bi,ij->bj", x, x.T, out_sharding=P("data")), ROWS),
    "dot": (lambda x: jnp.dot(x, x.T, out_sharding=P("model", "data")), "model=S(0) data=S(1)"),
    "replicated": (lambda x: jnp.dot(x, x.T, out_sharding=P()) + jnp.zeros((16, 16), out_sharding=P("data")), None),
    "zeros": (lambda x: x + jnp.zeros(x.shape, out_sharding=P("data")), ROWS),
    "full": (lambda x: x * jnp.full(x.shape, 2.0, out_sharding=P("data", "model")), "data=S(0) model=S(1)"),
    "broadcast": (lambda x: x + jnp.broadcast_to(x[0], x.shape, out_sharding=P(None, "model")), COLUMNS),
    "reshape": (lambda x: jnp.sin(jnp.reshape(x, (4, 4, 8), out_sharding=P(None, "data"))), "data=S(1) model=B"),
    "ravel": (lambda x: jnp.ravel(x, out_sharding=P("data")) * 2, ROWS),
    "get": (lambda x: x.at[jnp.arange(4)].get(out_sharding=P("data")) * 2, ROWS),
    "set": (lambda x: x.at[jnp.arange(4)].set(0.0, out_sharding=P("data")) * 2, ROWS),
    "arange": (lambda x: x + jnp.arange(8.0, out_sharding=P("model")), "model=S(0) data=B"),
    "array": (lambda x: jnp.asarray(x, out_sharding=P("data")) * 2, ROWS),
    "three": (three, ROWS),
    "drawn": (drawn, ROWS),
    "mapped": (mapped, COLUMNS),
    "differentiated": (differentiated, ROWS),
    "summed later": (summed_later, [COLUMNS, "model=S(0) data=B", "model=P data=B", "data=B model=B"]),
}


@pytest.mark.parametrize("name", TYPED)
def test_types_of_results(name):
    f, layouts = TYPED[name]
    x = np.cos(np.arange(128.0, dtype=np.float32)).reshape(16, 8)
    layouts = ["data=B model=B", ROWS] if layouts is None else [layouts] if isinstance(layouts, str) else layouts
    with jax.set_mesh(devices(EXPLICIT)):
        sharded = md.parallelize(f, "data=4,model=2")
        assert constraints(sharded, x) == layouts
        np.testing.assert_allclose(sharded(x), jax.jit(f)(x), rtol=1e-4, atol=1e-5)
        assert sharded.check(x).ok
        sharded.verify(x)


def test_types_of_results_without_an_ambient_mesh():
    def rows(x):
        return jnp.tanh(jnp.dot(x, x.T, out_sharding=NamedSharding(devices(EXPLICIT), P("data"))))

    x = SMALL[1]
    sharded = md.parallelize(rows, "data=2,model=2")
    assert constraints(sharded, x) == [ROWS]
    assert sharded.check(x).ok
    sharded.verify(x)


def test_a_type_that_is_ignored():
    def rows(x):
        return jnp.dot(x, x.T, out_sharding=P("data"))

    with jax.set_mesh(devices(EXPLICIT)):
        sharded = md.parallelize(rows, "data=4,model=2", constraints="ignore")
        line = rows.__code__.co_firstlineno + 1
        (note,) = sharded.plan(SMALL[1]).notes
        assert (
            note
            == f"dot_general(out_sharding=) at test_jax_shardings.py:{line} is ignored, as constraints='ignore' says"
        )
        assert not constraints(sharded, SMALL[1])
