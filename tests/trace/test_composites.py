"""Composite primitives are planned as the operations that they consist of: sparse products, and others of jax."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata

import meshdsl as md
from meshdsl.trace import trace
from tests.sweeps import swept

RNG = np.random.default_rng(0)
DENSE = np.where(RNG.random((8, 12)) < 0.3, RNG.normal(size=(8, 12)), 0).astype(np.float32)
STACK = np.where(RNG.random((4, 8, 12)) < 0.3, RNG.normal(size=(4, 8, 12)), 0).astype(np.float32)
ROWS = jnp.asarray(RNG.normal(size=(16, 8)), jnp.float32)
COLUMNS = jnp.asarray(RNG.normal(size=(12, 16)), jnp.float32)
BATCHES = jnp.asarray(RNG.normal(size=(4, 12, 16)), jnp.float32)
INDICES = np.argwhere(DENSE).astype(np.int32)
W = sparse.BCOO((DENSE[DENSE != 0], INDICES), shape=DENSE.shape, indices_sorted=True, unique_indices=True)
PADDED = partial(sparse.BCOO.fromdense, DENSE, nse=W.nse + 5)


def right(step, layouts, *args, mesh="data=4", bound=None):
    """The plan of a step that is right, even divided as far as possible, and sends as planned, at most ``bound``."""
    sharded = md.parallelize(step, mesh, layouts)
    if sharded.check(*args).divided["data"] < 0.1:
        assert sharded.check(*args, divide="most").divided["data"] > 0.1
    sharded.verify(*args)
    plan = sharded.plan(*args)
    assert not [note for note in plan.notes if "no rule" in note]
    assert bound is None or plan.bytes <= bound, plan
    return plan


def product(w, x):
    return x @ w


# Steps, pins, arguments, or what makes them, and the bytes that have to be sent.
PRODUCTS = {
    "dense @ sparse": (product, {"x": "data=S(0)"}, (W, ROWS), 0),
    "sparse @ dense": (lambda w, x: w @ x, {"x": "data=S(1)"}, (W, COLUMNS), 0),
    "with padding": (product, {"x": "data=S(0)"}, (PADDED, ROWS), 0),
    "sparse @ vectors": (jax.vmap(lambda w, x: w @ x, (None, 1)), {"x": "data=S(1)"}, (W, COLUMNS), 0),
    "transposed": (lambda w, x: w.T @ x, {"x": "data=S(1)"}, (W, ROWS.T), 0),
    "batches of sparse": (
        lambda w, x: sparse.bcoo_dot_general(w, x, dimension_numbers=(((2,), (1,)), ((0,), (0,)))),
        {"w/**": "data=S(0)", "x": "data=S(0)"},
        (partial(sparse.BCOO.fromdense, STACK, n_batch=1), BATCHES),
        0,
    ),
    "one dense for every batch": (
        lambda w, x: sparse.bcoo_dot_general(w, x, dimension_numbers=(((2,), (0,)), ((), ()))),
        {"w/**": "data=S(0)"},
        (partial(sparse.BCOO.fromdense, STACK, n_batch=1), COLUMNS),
        0,
    ),
    "summed over batches": (
        lambda w, x: sparse.bcoo_dot_general(w, x, dimension_numbers=(((0, 2), (0, 1)), ((), ()))),
        {"x": "data=S(2)"},
        (partial(sparse.BCOO.fromdense, STACK, n_batch=1), BATCHES),
        0,
    ),
    "dense dims": (
        lambda w, x: sparse.bcoo_dot_general(w, x, dimension_numbers=(((1,), (0,)), ((), ()))),
        {"x": "data=S(1)"},
        (partial(sparse.BCOO.fromdense, np.moveaxis(STACK, 0, -1), n_dense=1), COLUMNS),
        0,
    ),
    "everything summed": (
        lambda w, x: sparse.bcoo_dot_general(w, x, dimension_numbers=(((0, 1), (0, 1)), ((), ()))),
        {},
        (W, jnp.asarray(DENSE)),
        0,
    ),
    "nothing summed": (
        lambda w, x: sparse.bcoo_dot_general(w, x, dimension_numbers=(((), ()), ((), ()))),
        {"x": "data=S(0)"},
        (W, COLUMNS[0]),
        0,
    ),
    "compressed rows": (lambda w, x: w @ x, {"x": "data=S(1)"}, (partial(sparse.BCSR.fromdense, DENSE), COLUMNS), 0),
    "batches of compressed rows": (
        lambda w, x: sparse.bcsr_dot_general(w, x, dimension_numbers=(((2,), (1,)), ((0,), (0,)))),
        {"x": "data=S(2)"},
        (partial(sparse.BCSR.fromdense, STACK, n_batch=1), BATCHES),
        0,
    ),
    "CSR": (
        lambda w, x: w @ x + 0 * w.todense()[:, :1],
        {"x": "data=S(1)"},
        (partial(sparse.CSR.fromdense, DENSE), COLUMNS),
        0,
    ),
    "COO": (
        lambda w, x: w @ x + 0 * w.todense()[:, :1],
        {"x": "data=S(1)"},
        (partial(sparse.COO.fromdense, DENSE), COLUMNS),
        0,
    ),
    "COO, transposed": (lambda w, x: w.T @ x, {"x": "data=S(1)"}, (partial(sparse.COO.fromdense, DENSE), ROWS.T), 0),
    "sparsified": (sparse.sparsify(lambda w, x: (2 * w) @ x), {"x": "data=S(1)"}, (W, COLUMNS), 0),
    "sparse @ sparse": (lambda w, x: (w.T @ w).todense() + x, {}, (W, jnp.zeros((12, 12))), 0),
    "from dense": (
        lambda w, x: sparse.BCOO.fromdense(x, nse=40).sum_duplicates(nse=40).sort_indices().todense() @ w.todense(),
        {},
        (W, jnp.asarray(DENSE.T)),
        0,
    ),
    "in a scan": (
        lambda w, x: lax.scan(lambda h, _: (jnp.tanh(h @ w @ w.T), None), x, length=3)[0],
        {"x": "data=S(0)"},
        (W, ROWS),
        0,
    ),
    "to dense formats": (
        lambda w, x: sparse.CSR.fromdense(x, nse=50).todense() + sparse.COO.fromdense(x, nse=50).todense(),
        {},
        (W, jnp.asarray(DENSE)),
        0,
    ),
}


def made(args):
    return tuple(each() if isinstance(each, partial) else each for each in args)


@swept(
    "name",
    PRODUCTS,
    kept=("sparse @ dense", "dense @ sparse", "batches of sparse", "CSR", "COO", "sparsified", "in a scan"),
)
def test_sparse_products(name):
    step, layouts, args, bound = PRODUCTS[name]
    right(step, layouts, *made(args), bound=bound)


def trained(w, x):
    def loss(data, x):
        made = x @ sparse.BCOO((data, w.indices), shape=w.shape)
        return jnp.mean(jnp.tanh(made) ** 2)

    value, (data, dx) = jax.value_and_grad(loss, (0, 1))(w.data, x)
    return value, w.data - 0.1 * data, dx


def test_gradients_of_sparse_weights_send_as_many_numbers_as_these_have():
    right(trained, {"x": "data=S(0)"}, W, ROWS)
    w, x = sparse.BCOO.fromdense(jnp.eye(256)), jax.ShapeDtypeStruct((65536, 256), jnp.float32)
    plan = md.parallelize(trained, "data=4", {"x": "data=S(0)"}).plan(w, x)
    assert plan.bytes <= 256 * 6 + 6


def test_sparse_weights_on_two_axes():
    right(trained, {"x": "data=S(0)"}, W, ROWS, mesh="data=4,model=2")
    elements = sparse.BCOO.fromdense(DENSE, nse=40)
    right(trained, {"x": "data=S(0)", "w/0": "model=S(0)"}, elements, ROWS, mesh="data=4,model=2")


def test_elements_of_a_sparse_matrix_give_partial_sums():
    w = sparse.BCOO.fromdense(DENSE, nse=40)
    plan = right(product, {"w/**": "data=S(0)"}, w, ROWS)
    assert plan.bytes <= 2 * 16 * 12 * 4 * 3 / 4


def test_a_large_product_sends_nothing():
    x = jax.ShapeDtypeStruct((65536, 256), jnp.float32)
    plan = md.parallelize(product, "data=8", {"x": "data=S(0)"}).plan(sparse.BCOO.fromdense(jnp.eye(256)), x)
    assert (plan.bytes, plan.notes) == (0, ())


# ---- Loops that vmap made of many ------------------------------------------------------------------------------------
# Each runs until its own condition ends it; together they run until none holds.

MATRICES = RNG.normal(size=(8, 4, 4))
POSITIVE = jnp.asarray(MATRICES @ MATRICES.transpose(0, 2, 1) + 4 * np.eye(4), jnp.float32)
KEY = jax.random.key(0)


def grown(row):
    return lax.while_loop(lambda c: c[0] < jnp.abs(row).sum(), lambda c: (c[0] + 1.0, jnp.tanh(c[1] + row)), (0.0, row))


def drawn(row):
    def again(c):
        return jax.random.fold_in(c[0], 1), c[1] + 0.1 + jax.random.uniform(c[0])

    return lax.while_loop(lambda c: c[1] < jnp.abs(row).sum(), again, (KEY, 0.0))[1]


def conjugate_gradients(a):
    return jax.scipy.sparse.linalg.cg(a, jnp.ones(4))[0]


def solved(a):
    return lax.custom_linear_solve(
        lambda v: a @ v, jnp.ones(4), lambda mv, b: jax.scipy.sparse.linalg.cg(mv, b)[0], symmetric=True
    )


def newton(row):
    y = lax.while_loop(lambda y: jnp.abs(y**2 - row).max() > 1e-3, lambda y: y - (y**2 - row) / (2 * y), row)
    return y


LOOPS = {
    "rows": (lambda x: jax.vmap(grown)(x), ROWS),
    "elements": (lambda x: jax.vmap(jax.vmap(grown))(x), ROWS),
    "other dims": (lambda x: jax.vmap(grown, in_axes=1)(x.T), ROWS),
    "keys": (lambda x: jax.vmap(drawn)(x), ROWS),
    "newton": (lambda x: jax.vmap(newton)(jnp.abs(x) + 1), ROWS),
    "a closed over array": (lambda x: jax.vmap(lambda r: grown(r * jnp.arange(8.0))[1])(x), ROWS),
    "in a scan": (lambda x: lax.scan(lambda c, _: (jax.vmap(grown)(c)[1], None), x, length=2)[0], ROWS),
    "under a conditional": (lambda x: jax.vmap(lambda r: lax.cond(r[0] > 0, grown, lambda r: (0.0, r), r))(x), ROWS),
    "cg": (lambda x: jax.vmap(conjugate_gradients)(x), POSITIVE),
    "gmres": (lambda x: jax.vmap(lambda a: jax.scipy.sparse.linalg.gmres(a, jnp.ones(4))[0])(x), POSITIVE),
    "a linear solve": (lambda x: jax.vmap(solved)(x), POSITIVE),
    "its gradient": (lambda x: jax.grad(lambda x: jax.vmap(solved)(x).sum())(x), POSITIVE),
    "polar": (lambda x: jax.vmap(lambda a: jax.scipy.linalg.polar(a)[0])(x), POSITIVE),
}


@swept("name", LOOPS, kept=("rows", "in a scan", "under a conditional", "its gradient", "cg"))
def test_batches_of_loops(name):
    step, x = LOOPS[name]
    right(step, {"x": "data=S(0)"}, x)


def test_batches_of_loops_send_whether_any_condition_holds():
    x = jax.ShapeDtypeStruct((65536, 64), jnp.float32)
    plan = md.parallelize(lambda x: jax.vmap(grown)(x), "data=4", {"x": "data=S(0)"}).plan(x)
    assert {(c.kind, c.bytes) for c in plan.collectives} == {("all-reduce", 2)}


# ---- Other composites of jax -----------------------------------------------------------------------------------------


def names(step, *args):
    return [op.name for op in trace(step, args).graph.ops]


X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


@custom_partitioning
def partitioned(x):
    return jnp.sin(x)


partitioned.def_partition(
    partition=lambda mesh, given, made: (mesh, jnp.sin, made, given),
    infer_sharding_from_operands=lambda mesh, given, made: given[0].sharding,
    sharding_rule="i j -> i j",
)


def test_a_function_with_a_partitioning_of_its_own_is_traced_into():
    assert names(partitioned, X) == ["sin", "return"]
    right(lambda x: partitioned(x) * 2, {"x": "data=S(0)"}, ROWS, bound=0)


def test_uninitialised_arrays_are_zeros():
    assert names(lambda x: lax.empty((8, 4), jnp.float32) + x, X) == ["broadcast_in_dim", "add", "return"]


def test_positions_in_sorted_arrays_are_looked_up_in_parts():
    """A primitive of hijax in jax 0.12."""
    right(lambda x: jnp.searchsorted(jnp.arange(10.0), x), {"x": "data=S(0)"}, ROWS, bound=0)


def test_metadata_is_kept_by_an_identity():
    right(lambda x: set_xla_metadata(x * 2, group="a"), {"x": "data=S(0)"}, ROWS, bound=0)


def test_arrays_that_should_be_sharded_alike_are_planned():
    hints = pytest.importorskip("jax.experimental.shard_alike")  # jax 0.10
    right(lambda x: hints.shard_alike(x, x * 2), {"x": "data=S(0)"}, ROWS, bound=0)
