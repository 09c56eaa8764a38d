"""Every primitive of the installed jax has a rule, is traced into, or is listed with the reason and the cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas, sparse
from jax.extend.core import Primitive

from meshdsl.ir.graph import walk
from meshdsl.trace import trace
from tests.coverage import audit
from tests.trace.test_composites import PRODUCTS, W, made, partitioned, trained


def test_every_primitive_is_accounted_for():
    assert audit.unaccounted() == []


def test_nothing_is_listed_that_jax_lacks():
    assert audit.stale() == []


def test_nothing_is_listed_that_has_a_rule():
    assert audit.needless() == []


def test_the_page_is_the_list():
    assert audit.PAGE.read_text() == audit.page()


def test_a_primitive_that_nobody_thought_about_is_found(monkeypatch):
    new = audit.Found(Primitive("conjure"), "jax._src.lax.lax")
    monkeypatch.setattr(audit, "installed", lambda: (new,))
    assert audit.unaccounted() == ["jax._src.lax.lax: conjure"]


def test_the_audit_sees_what_jax_has():
    found = {each.name for each in audit.installed()}
    assert len(found) > 400
    assert {"add", "scan", "bcoo_dot_general", "pallas_call", "random_bits", "shard_map", "cholesky"} <= found


# ---- What is traced into ---------------------------------------------------------------------------------------------

X = jnp.ones((8, 4))


def bound(name, **params):
    """A function that binds the primitive of this name, for those that no public function of jax binds."""
    found = next((each.primitive for each in audit.installed() if each.name == name), None)
    return lambda *operands: found.bind(*operands, **params)


def doubled(x):
    def body(ref):
        ref[...] = ref[...] * 2.0

    return pallas.run_state(body)(x)


def sampled(x):
    return sparse.bcoo_dot_general_sampled(x, x.T, W.indices, dimension_numbers=(((1,), (0,)), ((), ())))


def examples():
    """Steps that bind all that is traced into, with their arguments."""
    return [
        *((step, made(args)) for step, _, args, _ in PRODUCTS.values()),
        (trained, (W, jnp.ones((16, 8)))),
        (sampled, (jnp.ones((12, 4)),)),
        (lambda w, x: sparse.bcoo_extract(w, x).data, (W, jnp.ones((8, 12)))),
        (lambda x: sparse.BCSR.fromdense(x, nse=4).todense(), (X,)),
        (lambda w: sparse.bcsr_extract(w.indices, w.indptr, w.todense()), (sparse.BCSR.fromdense(np.eye(4)),)),
        (sparse.todense, (W,)),
        (lambda w, x: w @ x, (sparse.CSR.fromdense(np.eye(4)), jnp.ones(4))),
        (lambda w, x: w @ x, (sparse.COO.fromdense(np.eye(4)), jnp.ones(4))),
        (partitioned, (X,)),
        (lambda x: lax.empty((8, 4), jnp.float32) + x, (X,)),
        (doubled, (X,)),
        (bound("tie"), (X, X)),
        (bound("broadcast_to", shape=(8, 4)), (jnp.ones(4),)),
        (lambda x: jnp.searchsorted(x, x), (jnp.ones(4),)),
    ]


def primitives(jaxpr):
    """The names of all primitives in a jaxpr."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from primitives(getattr(inner, "jaxpr", inner))


@pytest.mark.sweep
def test_what_is_listed_as_traced_into_is():
    seen = set()
    for step, args in examples():
        names = set(primitives(jax.make_jaxpr(step)(*args).jaxpr)) & set(audit.traced())
        left = {op.name for _, op in walk(trace(step, args).graph)}
        assert not names & left
        seen |= names
    hijax = set() if jax.__version_info__ >= (0, 11) else {"call_hi_primitive"}  # jax itself had none before
    assert set(audit.traced()) - seen == hijax
